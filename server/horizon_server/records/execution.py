"""How a job runs on a machine. The planner decides it once; ledger, forecast, worker and engine read it as it is.
Torch-free."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from horizon_server.texts import size_text

DeviceKind = Literal["host", "cuda"]
ComputeDtype = Literal["float32", "bfloat16"]
"""What layers are computed in. The master weights, their moments and the sums of gradients are in fp32 whatever it
is."""
ActivationPlacement = Literal["device", "host"]
Parallel = Literal["rows", "layers"]
"""What each of several ranks computes of a step: its lanes of every layer, or every lane of its layers."""

# The host is the reference that other ways of computing are compared with; a GPU computes in the format that its
# store's `hi` plane has.
DEFAULT_COMPUTE_DTYPE: Mapping[DeviceKind, ComputeDtype] = {"host": "float32", "cuda": "bfloat16"}
ELEMENT_BYTES: Mapping[ComputeDtype, int] = {"float32": 4, "bfloat16": 2}
"""Of a weight on its way up, a hidden state, and a gradient that has left the device."""

NUM_SLOTS = 2
"""Layers whose weights are on the device at a time, and whose gradients are."""


@dataclass(frozen=True, kw_only=True)
class Residency:
    """What stays on a device that has memory to spare, and what that buys.

    The weights of `resident_layers` stay from step to step. The optimizer states of `state_layers` of these stay too,
    and their gradients, and the device updates them. Of `packed_layers` others, the frozen weights stay as they
    are packed, and are unpacked for each visit. With `resident_head` the weights of the head stay, a tied table among
    them; with `resident_table` the embedding's frozen table, whose rows are then gathered on the device. The last
    `product_layers` keep the products of their forward for their backward, up to `product_bytes`. `saved_share` is the
    predicted part of a step's time that it saves.
    """

    resident_layers: int = 0
    resident_bytes: int = 0
    state_layers: int = 0
    state_bytes: int = 0
    packed_layers: int = 0
    packed_bytes: int = 0
    resident_head: bool = False
    resident_table: bool = False
    end_bytes: int = 0
    """What the weights of head and table take."""
    product_layers: int = 0
    product_bytes: int = 0
    saved_share: float = 0.0

    @property
    def text(self) -> str:
        """In one line, for people."""
        parts = [
            f"{what} of {num_layers} layer{'' if num_layers == 1 else 's'} ({size_text(num_bytes)})"
            for what, num_layers, num_bytes in (
                ("weights", self.resident_layers, self.resident_bytes),
                ("optimizer states", self.state_layers, self.state_bytes),
                ("packed weights", self.packed_layers, self.packed_bytes),
                ("activations", self.product_layers, self.product_bytes),
            )
            if num_layers
        ]
        ends = [name for name, stays in (("head", self.resident_head), ("embedding", self.resident_table)) if stays]
        if ends:
            parts.append(f"weights of {' and '.join(ends)} ({size_text(self.end_bytes)})")
        return f"{', '.join(parts)}; saves about {self.saved_share:.0%} of a step"

    @property
    def is_anything(self) -> bool:
        """Whether something stays."""
        layers = self.resident_layers or self.packed_layers or self.product_layers
        return bool(layers) or self.resident_head or self.resident_table


NOTHING_STAYS = Residency()

RING_SLOTS = 3
"""Spans whose states are in memory between drives and update: one is read, one updated, one written."""
SPAN_ELEMENTS = 1 << 24
"""Of a unit, on the way between drives and update at once: exact states of 160 MiB, which are 20 pieces, so that many
drives read at a time."""


@dataclass(frozen=True, kw_only=True)
class OnDrives:
    """What of the optimizer's state is on the node's drives: these `planes` of these units, in their order. `folders`
    has one folder for each drive. States move in spans of `span_elements` of a unit, whole groups of compressed
    ones."""

    units: tuple[int, ...] = ()
    planes: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    ring_slots: int = RING_SLOTS
    span_elements: int = SPAN_ELEMENTS


NOTHING_ON_DRIVES = OnDrives()


@dataclass(frozen=True, kw_only=True)
class Execution:
    """On what a job computes, in which numbers, and where things are meanwhile. None of it is part of the job's spec.

    It changes memory and speed and never the result, but for rounding: `compute_dtype`, `micro_batch_tokens`,
    `chunk_tokens` and `lanes` (also what dropout and noise draw), `num_threads` and `head_chunk_tokens` decide in which
    numbers and in which order sums are made.
    """

    device_kind: DeviceKind = "host"
    compute_dtype: ComputeDtype = "float32"
    device_limit_bytes: int = 1 << 60
    """What the job may have on the device."""
    gpu: str = ""
    """UUID of the GPU that `cuda` means, of several ranks one each with commas between; empty where it is the first
    that torch finds."""
    num_ranks: int = 1
    """Devices that compute each step together, with a process each (a rank)."""
    num_nodes: int = 1
    """Machines that the ranks are on, as many on each, in their order."""
    wire: ComputeDtype = "float32"
    """What gradients are rounded to on their way from one machine to another."""
    lanes: int = 1
    """Parts that a step is divided into, a power of two. The gradients of a lane add up in the order of its
    micro-batches, those of the lanes in a balanced tree: the bits depend on the lanes, never on who computes them."""
    parallel: Parallel = "rows"
    """How several ranks divide a step. No bit depends on it."""
    layer_ranks: tuple[int, ...] = ()
    """By layers, the rank that computes each layer; empty where the layers go round the ranks in turn. No bit depends
    on it."""
    deals_lanes: bool = False
    """Whether ranks that were measured to be faster get more lanes, where the devices differ."""
    num_threads: int = 1
    """Threads that the host computes with; each rank has as many."""
    optimizer_threads: int | None = None
    """None: what `update_threads` makes of this process's CPUs."""
    numa_interleave: bool = False
    """Whether pages of the planes are taken from all NUMA nodes in turn."""
    numa_nodes: tuple[int, ...] = ()
    """The node of each rank's GPU, on which what the rank owns of the planes is to be, and its threads; empty where
    that is not known, or would leave a node's memory out."""
    grad_bytes: int = 4
    """Of one stored gradient; 0 where none is stored, because each unit is updated as its gradient lands."""
    adds_up: bool = False
    """Whether a step's gradients come by several calls, which are added up in host memory."""
    activation_placement: ActivationPlacement = "device"
    """Where layer inputs wait for backward."""
    micro_batch_tokens: int = 0
    """Where the model keeps documents apart, they are computed up to this many tokens at a time, whatever row they are
    in; 0 computes row by row."""
    chunk_tokens: int = 0
    """Tokens of a micro-batch that layers compute at once, where it has more; 0 computes each as a whole."""
    residency: Residency = NOTHING_STAYS
    expert_page_elements: int = 0
    """Where the experts of a layer come in pages, the most elements of one (a single expert may have more); 0 where
    layers are whole. In fp32 the bits are those of whole layers whose experts are computed one by one."""
    drives: OnDrives = NOTHING_ON_DRIVES
    num_weight_slots: int = NUM_SLOTS
    num_gradient_slots: int = NUM_SLOTS
    head_chunk_tokens: int | None = None
    """Tokens whose logits live at a time; None takes what fits the vocabulary."""

    @property
    def ranks_per_node(self) -> int:
        """Ranks, and so devices, on each machine."""
        return self.num_ranks // self.num_nodes

    @property
    def joined_tokens(self) -> int:
        """Up to how many tokens short documents are computed together: no more than are computed at once."""
        return min(self.micro_batch_tokens, self.chunk_tokens or self.micro_batch_tokens)

    def on(self, number: int, what: Literal["gpus", "nodes"]) -> Execution:
        """The same on that number of devices of each node, or of nodes with as many devices each."""
        if what == "gpus":
            return dataclasses.replace(self, num_ranks=number * self.num_nodes)
        return dataclasses.replace(self, num_nodes=number, num_ranks=number * self.ranks_per_node)

    @property
    def element_bytes(self) -> int:
        """Of one element of a weight on the device."""
        return ELEMENT_BYTES[self.compute_dtype]
