"""How much memory a job takes on host and device, by component, before anything is allocated.

Stored planes come from the very layout that allocates them; the device's slots follow the engine's layer stream,
gradient sink and activations; what frameworks allocate by themselves is calibrated, and says so. Torch-free.

Host components: weights, moments, gradients (the planes), base (of the planes, what is frozen under adapters and may be
in memory once for several jobs), activations, staging, other. Device components: weights,
gradients, activations, workspace. On the `host` device the device is host memory too: its slots count as staging, its
activations as activations and its workspace in other, so that the host's sum is the whole process.

Units: bytes, unless a name says elements.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from horizon_server.planning.lane_memory import (
    in_flight_bytes,
    lane_gradient_bytes,
    lane_number_bytes,
    own_share,
    owned_elements,
    sent_row_bytes,
    tokens_of_rank,
)
from horizon_server.planning.model_folder import ModelFolder, ModelShape
from horizon_server.planning.pages import PagesPlan
from horizon_server.planning.residency import packed_units, product_bytes, resident_units, state_units
from horizon_server.planning.working_memory import (
    TOKEN_BYTES,
    call_bytes,
    chunk_bytes,
    cuda_working_bytes,
    heap_bytes,
    largest_weight_elements,
    layer_saved_elements,
    norm_input_elements,
    routing_bytes,
    unpacking_bytes,
)
from horizon_server.recipe import Matmul, Recipe
from horizon_server.records.execution import NUM_SLOTS, DeviceKind, Execution, Residency
from horizon_server.records.plan import Ledger
from horizon_server.store.adapters import MAGNITUDE, adapter_elements, first_norm_bytes, norm_bytes
from horizon_server.store.base_plane import can_be_shared, file_bytes, frozen_bytes
from horizon_server.store.drive_files import THREADS_PER_DRIVE
from horizon_server.store.drive_layout import DriveLayout, state_bytes
from horizon_server.store.layout import (
    EXACT_BYTES,
    MOMENT_PLANES,
    PLANE_BYTES,
    TENSOR_ALIGN_ELEMENTS,
    StoreLayout,
    plane_sizes,
)

NUM_STREAMED_SLOTS = 4
"""Parts of a step whose hidden states are on the device at a time, where they come by chunk."""

NUM_OUTPUT_SLOTS = 2
"""Chunks of a row whose outputs of attention are on the device, where these wait on the host for backward."""

PAST_BLOCK_TOKENS = 2048
"""Earlier keys of a row in chunks that get gradients at once, where chunks are not longer themselves."""

CHUNK_TRIAL_TOKENS = 48
"""Of the row that a model is tried with before it computes chunks."""

# An offloaded layer input begins on a page of its own: 4 KiB in bf16.
ACTIVATION_ALIGN_ELEMENTS = 2048

EXPERT_PLANES = 3
"""Hidden states of a layer whose experts come in pages: what goes into them, what comes out, or its gradient, and the
gradient of what goes in."""

# Of the numbers by which ranks that share hidden states tell how far they are.
_COUNTER_BYTES, _PAGE_BYTES = 8, 4096

# Measured, torch 2.13 and transformers 5.23 on x86-64: a worker with everything imported (423 MiB) after its first
# step.
WORKER_BYTES = 460 << 20

# Of these, pages of libraries' files: processes of one machine share them.
_LIBRARY_BYTES = 170 << 20

# Estimated, not measured yet: what the CUDA libraries and context add to a worker, and its pinned staging rings.
CUDA_WORKER_BYTES = (1 << 30) + 4 * (32 << 20)

# Calibrated: stacks and matrix-packing buffers per compute thread.
THREAD_BYTES = 8 << 20

CAST_ELEMENTS = 1 << 25
"""Elements of a gradient rounded to bf16 at once before they leave a cuda device: 64 MiB."""

# Of a large model's host memory; the rest is staging, activations and the worker's heap.
_SHARE_FOR_PLANES = 0.9

# Estimated: the stack and heap of a thread that reads and writes, and computes nothing else.
_DRIVE_THREAD_BYTES = 1 << 20
_FP64 = 8
_FP32 = 4
_BF16 = 2
# Calibrated with bench.long_rows, on the highest of several runs: what the heap grows to for each byte that a recurrent
# layer keeps beyond the formulas, and for each byte that it keeps at all, because its scan makes tensors that autograd
# does not keep.
_HEAP_SHARE = 3.8
_SCAN_SHARE = 0.35
# Calibrated the same way: what the heap grows to for each byte in small blocks at the widest moment of a layer that
# scans.
_SMALL_SHARE = 2.4
LARGE_BLOCK_BYTES = 64 << 20
"""A worker's C library returns blocks of this size and larger to the system when they are freed (a test compares with
its setting)."""
CHECKPOINT_PIECE_ELEMENTS = 1 << 19
"""Of a tensor, converted at once when a checkpoint is written (a test compares with the store)."""
# Bytes of temporary memory for each of them: five threads write a checkpoint, and converting to bf16 takes 9.
_CHECKPOINT_BYTES = 5 * 9

# Estimated, to be measured with bench.joined_rows: what a layer works on stays near the cache of a CPU.
_HOST_MICRO_BATCH = 2048
# Estimated: below it the launches of a layer's kernels show. Wide models fill a GPU with half of it, and keep more per
# token.
_CUDA_MICRO_BATCH = 16384
_WIDE_MODEL = 6144


@dataclass(frozen=True, kw_only=True)
class LayerMemory:
    """What autograd keeps of a layer for a row of T tokens, counted on the model itself: bytes per token and per pair
    of tokens.

    And what forward and backward of the layer take at their widest moment, in fp32 on the host, the largest blocks that
    are alive at it, and what the layers of a row are called with: zeros where that was not counted.
    """

    bytes_per_token: float
    bytes_per_pair: float
    peak_per_token: float = 0.0
    peak_per_pair: float = 0.0
    small_per_token: float = 0.0
    """At the widest moment beside scores."""
    blocks_per_token: tuple[float, ...] = ()
    call_per_token: float = 0.0
    call_per_pair: float = 0.0
    scans: bool = True
    """Whether the layers are recurrent ones, or attention whose scores the formulas count as planes."""

    @classmethod
    def through(cls, lengths: tuple[int, int], counts: tuple[int, int]) -> LayerMemory:
        """The curve a * T + b * T * T through two counts, neither part below zero."""
        (short, long), (few, many) = lengths, counts
        per_pair = max(0.0, (many / long - few / short) / (long - short))
        return cls(bytes_per_token=many / long - per_pair * long, bytes_per_pair=per_pair)

    def at(self, row_tokens: int) -> int:
        """Bytes for a row."""
        return int(row_tokens * (self.bytes_per_token + row_tokens * self.bytes_per_pair))

    def peak_at(self, row_tokens: int) -> int:
        """Bytes at the widest moment; 0 where they were not counted."""
        return int(row_tokens * (self.peak_per_token + row_tokens * self.peak_per_pair))

    def call_at(self, row_tokens: int) -> int:
        """Bytes of what the layers of a row are called with."""
        return int(row_tokens * (self.call_per_token + row_tokens * self.call_per_pair))

    def heap_at(self, row_tokens: int) -> int:
        """What the heap grows to for the widest moment: the C library gives large blocks back at once, and of small
        ones keeps more."""
        peak_bytes = self.peak_at(row_tokens)
        blocks = (int(size * row_tokens) for size in self.blocks_per_token)
        large_bytes = min(peak_bytes, sum(size for size in blocks if size >= LARGE_BLOCK_BYTES))
        return large_bytes + int(_SMALL_SHARE * (peak_bytes - large_bytes))


def plan_memory(
    folder: ModelFolder,
    recipe: Recipe,
    execution: Execution,
    *,
    layer: LayerMemory | None = None,
    longest_document: int | None = None,
) -> Ledger:
    """The ledger of a job on a model folder that is laid out for it.

    `layer` was counted on the model where no formula covers its layers. But for models with masks and recurrent ones,
    documents are computed together up to `micro_batch_tokens`, whatever row they are in; before the data is prepared,
    `longest_document` is not known, and may be as long as a row.
    """
    layout, device_kind = folder.layout, execution.device_kind
    pages, residency = PagesPlan.of(layout, execution.expert_page_elements), execution.residency
    model = pages.shape(folder.shape)
    longest = min(recipe.sequence_length, longest_document or recipe.sequence_length)
    # From here on those of one rank, which the device and the process are of.
    tokens_per_step = tokens_of_rank(recipe.tokens_per_step, execution, longest=longest)
    if layer is None and not model.needs_masks:
        row_tokens = max(longest, execution.micro_batch_tokens)
    else:
        row_tokens = recipe.sequence_length
    row_tokens = min(row_tokens, tokens_per_step)
    # Of the longest row that is computed in chunks, 0 where none is; of shorter ones a layer computes all tokens.
    chunked_tokens = chunked_row_tokens(recipe, execution, longest=longest)
    row_tokens = min(row_tokens, execution.chunk_tokens or row_tokens)
    called_tokens = tokens_per_step - max(0, chunked_tokens - row_tokens)
    # Head and embedding work part by part then.
    edge_tokens = min(tokens_per_step, execution.chunk_tokens or tokens_per_step)
    element_bytes = execution.element_bytes
    formula_elements = layer_saved_elements(model, row_tokens) + model.num_score_planes * row_tokens**2
    counted_bytes = 0 if layer is None else layer.at(row_tokens)
    # Counted scores take the place of the formula's planes where a row is computed as it was counted: in fp32, on the
    # host.
    scores = None
    if layer is not None and not layer.scans:
        is_counted = device_kind == "host" and element_bytes == _FP32 and layer.peak_at(row_tokens) > 0
        scores, counted_bytes = (layer, counted_bytes) if is_counted else (None, 0)
    uncovered_bytes = 0 if scores else max(0, counted_bytes - formula_elements * _FP32)
    num_kept = model.num_hidden_layers - layout.num_skipped_layers
    on_device, on_host = _activation_elements(model, num_kept, tokens_per_step, execution)
    attention_layers = min(residency.attention_layers, num_kept) if chunked_tokens else 0
    on_device += EXPERT_PLANES * tokens_per_step * model.hidden_size * bool(pages.units)
    device = {
        "weights": _weight_slot_elements(layout, residency, pages) * element_bytes
        + sum(unit.packed_bytes for unit in packed_units(layout, residency))
        + (_exact_bytes(layout, model, residency) if element_bytes == _BF16 else 0)
        + sent_row_bytes(layout, execution, recipe.tokens_per_step),
        "gradients": _gradient_slot_elements(layout, pages) * _FP32
        + lane_gradient_bytes(layout, execution, recipe.tokens_per_step),
        "activations": on_device * element_bytes
        + residency.product_layers * product_bytes(folder, recipe, execution)
        # Keys and values of one row, and their gradients.
        + chunked_tokens * model.key_value_elements * (element_bytes + _FP32)
        # What attention gave two chunks.
        + NUM_OUTPUT_SLOTS * execution.chunk_tokens * _output_bytes(model, element_bytes) * bool(attention_layers),
        "workspace": model.position_mask_bytes
        + (
            call_bytes(model, row_tokens, called_tokens, element_bytes)
            if scores is None
            else -(-tokens_per_step // row_tokens) * scores.call_at(row_tokens)
        ),
    }
    device["workspace"] += routing_bytes(model, tokens_per_step)
    for part, num_bytes in _state_bytes(layout, execution).items():
        device[part] = device.get(part, 0) + num_bytes
    in_fp8 = recipe.matmul != "bf16"
    if in_fp8:
        device["workspace"] += _fp8_bytes(layout, model, row_tokens, recipe.matmul)
    adapter_elements_of_row = row_tokens * adapter_elements(layout, drops=recipe.adapter_dropout > 0)
    saved_bytes = formula_elements * element_bytes + uncovered_bytes if scores is None else counted_bytes
    layer_bytes = saved_bytes + adapter_elements_of_row * element_bytes
    if element_bytes == _BF16:
        layer_bytes += norm_input_elements(model, row_tokens) * element_bytes
    past_block_bytes = _past_block_bytes(model, execution, chunked_tokens)
    drives = DriveLayout(layout, execution.drives)
    host = {
        **_plane_shares(layout, execution),
        "activations": (on_host + _key_value_elements_on_host(model, num_kept, tokens_per_step, chunked_tokens))
        * element_bytes
        + attention_layers * attention_output_bytes(model, tokens_per_step, element_bytes),
        "staging": _landing_bytes(layout, recipe.tokens_per_step, execution),
        "other": _process_bytes(layout, model, tokens_per_step, execution.num_threads) + first_norm_bytes(layout),
    }
    if execution.drives.units:
        for unit in execution.drives.units:
            for plane in execution.drives.planes:
                host["weights" if plane in ("lo", "lo8") else "moments"] -= state_bytes(layout, unit, (plane,))
        host["staging"] += drives.ring_bytes + drives.index_bytes
        if layout.has_row_gradients and 0 in execution.drives.units:
            # The rows of a span, with the zeros between them.
            host["staging"] += drives.parts(0)[0].stop * (execution.grad_bytes or element_bytes)
        host["other"] += len(execution.drives.folders) * THREADS_PER_DRIVE * _DRIVE_THREAD_BYTES
    if device_kind == "cuda":
        # The piece of memory in which gradients are rounded before they leave.
        device["gradients"] += min(CAST_ELEMENTS, max(unit.trained_elements for unit in layout.units)) * _BF16
        # The buffer in which packed weights arrive.
        device["weights"] += pages.packed_bytes(layout)
        device["workspace"] += cuda_working_bytes(layout, model, row_tokens, tokens_per_step, edge_tokens=edge_tokens)
        # When backward comes to attention, two planes at least of the feed-forward part's inner size are gone.
        left_bytes = 0 if model.experts else 2 * execution.chunk_tokens * model.intermediate_size * element_bytes
        device["workspace"] += uncovered_bytes + max(0, past_block_bytes - left_bytes)
        device["workspace"] += adapter_elements_of_row * element_bytes + unpacking_bytes(layout) + norm_bytes(layout)
        host["other"] += CUDA_WORKER_BYTES
    else:
        device["workspace"] += max(layer_bytes, chunk_bytes(model, edge_tokens, element_bytes))
        # The device's slots and activations are host memory too.
        host["activations"] += device["activations"]
        host["staging"] += device["weights"] + device.get("moments", 0) + device["gradients"]
        host["other"] += heap_bytes(
            layout,
            model,
            row_tokens,
            tokens_per_step,
            element_bytes,
            counted=scores,
            called_tokens=called_tokens,
            edge_tokens=edge_tokens,
        )
        host["other"] += adapter_elements_of_row * element_bytes + unpacking_bytes(layout) + norm_bytes(layout)
        host["other"] += past_block_bytes
        if in_fp8:
            # Products that are emulated widen both factors again.
            host["other"] += 3 * _fp8_bytes(layout, model, row_tokens, recipe.matmul)
        if uncovered_bytes:
            grown_bytes = int(_HEAP_SHARE * uncovered_bytes + _SCAN_SHARE * counted_bytes)
            # Shares are for what was kept; the widest moment says more, where a large part of it goes back to the
            # system.
            host["other"] += (
                min(grown_bytes, layer.heap_at(row_tokens)) if layer and layer.peak_per_token else grown_bytes
            )
    # The planes and what is read from files are there once, and the first rank alone writes checkpoints; all else, each
    # rank has.
    for part in ("activations", "staging", "other"):
        host[part] *= execution.ranks_per_node
    host["other"] -= (execution.ranks_per_node - 1) * (_LIBRARY_BYTES + _checkpoint_bytes(layout))
    if execution.num_nodes > 1:
        host["staging"] += in_flight_bytes(layout)
    if execution.parallel == "layers":
        # And once what they hand each other.
        plane_bytes = plane_elements_of(recipe.tokens_per_step, model.hidden_size) * element_bytes
        counters = counter_bytes(num_layers=model.num_hidden_layers, num_ranks=execution.num_ranks)
        host["activations"] += num_shared_planes(num_kept) * plane_bytes + counters
    return Ledger(host_bytes=host, device_bytes=device)


def chunked_row_tokens(recipe: Recipe, execution: Execution, *, longest: int) -> int:
    """Tokens of the longest row that is computed in chunks, where documents have up to `longest`; 0 where none is."""
    # Rows of several documents are divided between these first.
    row = min(longest if execution.micro_batch_tokens else recipe.sequence_length, recipe.tokens_per_step)
    return row if 0 < execution.chunk_tokens < row else 0


def max_parameters(limit_bytes: int, *, grad_bytes: int) -> int:
    """About how many parameters a model may have that is trained within this much host memory, at a few thousand tokens
    a step."""
    bytes_per_parameter = EXACT_BYTES + grad_bytes
    return max(0, int((limit_bytes - WORKER_BYTES) * _SHARE_FOR_PLANES / bytes_per_parameter))


def micro_batch_tokens(hidden_size: int, device_kind: DeviceKind) -> int:
    """Tokens up to which the engine lays rows end to end and computes them at once.

    Of the model and the kind of device alone, so that a job that is resumed rounds as before, whatever else runs.
    """
    if device_kind == "host":
        return _HOST_MICRO_BATCH
    return _CUDA_MICRO_BATCH if hidden_size <= _WIDE_MODEL else _CUDA_MICRO_BATCH // 2


def _plane_shares(layout: StoreLayout, execution: Execution) -> dict[str, int]:
    """The planes by component, of one node."""
    shares = own_share(_plane_bytes(layout, execution.grad_bytes), layout, execution)
    # Several nodes divide the frozen weights, each job in its way.
    if execution.num_nodes == 1 and can_be_shared(layout):
        shares["base"] = file_bytes(layout)
        shares["weights"] -= frozen_bytes(layout)
    return shares


def _plane_bytes(layout: StoreLayout, grad_bytes: int) -> dict[str, int]:
    planes = plane_sizes(layout, grad_dtype_bytes=grad_bytes)
    return {
        "weights": sum(planes.get(plane, 0) for plane in ("hi", "lo", "lo8", "packed")),
        "moments": sum(planes.get(plane, 0) for plane in MOMENT_PLANES),
        "gradients": planes.get("grad", 0),
    }


def _head_elements(layout: StoreLayout) -> int:
    """What the head computes with: a tied table is among it."""
    return layout.units[-1].num_elements + (layout.units[0].num_elements if layout.tied else 0)


def _gradient_slot_elements(layout: StoreLayout, pages: PagesPlan) -> int:
    """The rings of gradient_sink: two layers, two pages of experts, and one slot for embedding rows or the head, of
    what is trained."""
    edge_elements = max(layout.units[0].trained_elements, layout.head_gradient_elements)
    layer_elements = max(pages.trained_elements(unit) for unit in layout.units if unit.kind == "layer")
    return NUM_SLOTS * (layer_elements + pages.page_trained_elements) + edge_elements


def _weight_slot_elements(layout: StoreLayout, residency: Residency, pages: PagesPlan) -> int:
    """The rings of layer_stream, of the layers that pass through it and of pages of experts, a slot for each layer that
    stays, and one for embedding rows or the head."""
    resident = {unit.index: unit.num_elements for unit in resident_units(layout, residency.resident_layers)}
    passing = [pages.num_elements(u) for u in layout.units if u.kind == "layer" and u.index not in resident]
    embedding, head_elements = layout.units[0].num_elements, _head_elements(layout)
    # A head that stays has a slot of its own, and leaves the other one to the embedding.
    edges = embedding + head_elements if residency.resident_head else max(embedding, head_elements)
    edges += embedding if residency.resident_table else 0
    return NUM_SLOTS * (max(passing, default=0) + pages.page_elements) + sum(resident.values()) + edges


def _state_bytes(layout: StoreLayout, execution: Execution) -> dict[str, int]:
    """What device_states takes besides the weights' slots: the low half, and the high one where weights are in fp32,
    both moments, and the gradients that are kept, or the one that is being updated from."""
    sizes = [unit.trained_elements for unit in state_units(layout, execution.residency)]
    if not any(sizes):
        return {}
    halves = PLANE_BYTES["lo"] + (0 if execution.element_bytes == _BF16 else PLANE_BYTES["hi"])
    gradients = execution.grad_bytes * sum(sizes) if execution.grad_bytes else execution.element_bytes * max(sizes)
    return {
        "weights": halves * sum(sizes),
        "moments": (PLANE_BYTES["exp_avg"] + PLANE_BYTES["exp_avg_sq"]) * sum(sizes),
        "gradients": gradients,
    }


def _exact_bytes(layout: StoreLayout, model: ModelShape, residency: Residency) -> int:
    """What is at the end of those slots for parameters that stay in fp32 where the others are in bf16."""
    names = [*model.kept_in_fp32, re.escape(MAGNITUDE)]
    if not any(tensor.norm_dim is not None for _, tensor in layout.tensors()):
        names.pop()
    if not names:
        return 0
    exact = re.compile("|".join(names))
    largest = {"layer": 0, "embedding": 0, "head": 0}
    for unit in layout.units:
        sizes = [tensor.num_elements for tensor in unit.tensors if exact.search(tensor.name)]
        elements = sum(-(-size // TENSOR_ALIGN_ELEMENTS) * TENSOR_ALIGN_ELEMENTS for size in sizes)
        largest[unit.kind] = max(largest[unit.kind], elements)
    num_layers = sum(unit.kind == "layer" for unit in layout.units)
    num_slots = residency.resident_layers + (NUM_SLOTS if residency.resident_layers < num_layers else 0)
    num_edges = 2 if residency.resident_head else 1
    return (num_slots * largest["layer"] + num_edges * max(largest["embedding"], largest["head"])) * _FP32


def _largest_layer_elements(layout: StoreLayout) -> int:
    return max(unit.num_elements for unit in layout.units if unit.kind == "layer")


def _landing_bytes(layout: StoreLayout, tokens_per_step: int, execution: Execution) -> int:
    """Host memory that gradients come down in where no plane keeps them, or they are added to those of earlier calls,
    and two sets of a step's numbers."""
    element_bytes = execution.grad_bytes or execution.element_bytes
    num_bytes, edges = 2 * (len(layout.units) + 1) * _FP64, [layout.units[0], layout.units[-1]]
    num_bytes += lane_number_bytes(layout, execution)
    if layout.has_row_gradients:
        num_rows, width = edges.pop(0).tensors[0].shape
        # Where calls add up, their rows may be all in the end, and a call's are there beside them.
        num_bytes += min(tokens_per_step, num_rows) * width * element_bytes
        num_bytes += num_rows * width * element_bytes if execution.adds_up else 0
    if execution.grad_bytes and not execution.adds_up:
        return num_bytes
    largest_edge = max(owned_elements(layout, execution, unit.index) for unit in edges)
    largest = max(owned_elements(layout, execution, unit.index) for unit in layout.units if unit.kind == "layer")
    return num_bytes + (NUM_SLOTS * largest + largest_edge) * element_bytes


def _process_bytes(layout: StoreLayout, model: ModelShape, tokens_per_step: int, num_threads: int) -> int:
    """What a worker takes whatever it computes on: libraries, threads, tokens, masks of the model's class, and writing
    checkpoints."""
    masks = model.num_hidden_layers * model.position_mask_bytes
    threads = num_threads * THREAD_BYTES
    return WORKER_BYTES + threads + tokens_per_step * TOKEN_BYTES + masks + _checkpoint_bytes(layout)


def _checkpoint_bytes(layout: StoreLayout) -> int:
    """What writing checkpoints leaves in the process."""
    # Every checkpoint starts new threads, which take over the heaps of earlier ones: in the end each heap has held a
    # converted piece.
    return min(CHECKPOINT_PIECE_ELEMENTS, max(t.num_elements for _, t in layout.tensors())) * _CHECKPOINT_BYTES


def plane_elements_of(tokens_per_step: int, hidden_size: int) -> int:
    """From one plane of hidden states that ranks share to the next: those of a step, on pages of their own."""
    return -(-tokens_per_step * hidden_size // ACTIVATION_ALIGN_ELEMENTS) * ACTIVATION_ALIGN_ELEMENTS


def num_shared_planes(num_kept: int) -> int:
    """Planes of hidden states that ranks share: for the input of each layer that backward wants, and the last output.
    The trial of a model needs two."""
    return max(2, num_kept + 1)


def counter_bytes(*, num_layers: int, num_ranks: int) -> int:
    """On pages of their own, the numbers by which a rank tells the others how far it is: of each layer in forward and
    in backward, and of each rank's head."""
    return -(-_COUNTER_BYTES * (2 * num_layers + num_ranks) // _PAGE_BYTES) * _PAGE_BYTES


def _activation_elements(
    model: ModelShape, num_layers: int, tokens_per_step: int, execution: Execution
) -> tuple[int, int]:
    """Engine activations for all tokens of a step and the layers whose inputs are kept, on the device and offloaded to
    the host."""
    elements = tokens_per_step * model.hidden_size
    if execution.parallel == "layers":
        # What a layer reads and what it writes; all else is in what the ranks share.
        return 2 * elements, 0
    if execution.chunk_tokens and execution.activation_placement == "host":
        # Parts come and go; on the host the input of every layer, and the last output, which becomes the gradient.
        slot_tokens = min(max(execution.chunk_tokens, CHUNK_TRIAL_TOKENS), tokens_per_step)
        host_elements = num_shared_planes(num_layers) * plane_elements_of(tokens_per_step, model.hidden_size)
        return NUM_STREAMED_SLOTS * slot_tokens * model.hidden_size, host_elements
    if execution.activation_placement == "device":
        # Every layer's input, the last output and one gradient.
        return (num_layers + 2) * elements, 0
    # An input, an output and the gradient; on the host the input of every layer but the last.
    return 3 * elements, (num_layers - 1) * plane_elements_of(tokens_per_step, model.hidden_size)


def _key_value_elements_on_host(model: ModelShape, num_layers: int, tokens_per_step: int, chunked_tokens: int) -> int:
    """Keys and values between a layer's forward and its backward. All of a step may be rows in chunks."""
    if not chunked_tokens:
        return 0
    return num_layers * plane_elements_of(tokens_per_step, model.key_value_elements)


def attention_output_bytes(model: ModelShape, tokens_per_step: int, element_bytes: int) -> int:
    """What attention gave all tokens of a step in one layer, on the host: outputs, and the logarithms of their sums."""
    outputs = plane_elements_of(tokens_per_step, model.num_attention_heads * model.head_dim) * element_bytes
    return outputs + plane_elements_of(tokens_per_step, model.num_attention_heads) * _FP32


def _output_bytes(model: ModelShape, element_bytes: int) -> int:
    """The same of one token on the device."""
    return model.num_attention_heads * (model.head_dim * element_bytes + _FP32)


def _past_block_bytes(model: ModelShape, execution: Execution, chunked_tokens: int) -> int:
    """Gradients of a block of earlier keys and values, beyond what a chunk's own take."""
    more_tokens = min(PAST_BLOCK_TOKENS, chunked_tokens) - execution.chunk_tokens
    return max(0, more_tokens) * model.key_value_elements * execution.element_bytes


def _fp8_bytes(layout: StoreLayout, model: ModelShape, row_tokens: int, matmul: Matmul) -> int:
    """A layer's weights in FP8 by rows and by columns, and what one tensor is rounded from: its quotients in fp32, and
    these within the format's range."""
    largest_weight = largest_weight_elements(layout, model)
    largest_cast = max(largest_weight, row_tokens * max(model.hidden_size, model.intermediate_size))
    num_bytes = 2 * _largest_layer_elements(layout) + 2 * _FP32 * largest_cast
    if matmul == "fp8_full":
        # What is rounded along the tokens, with zeros after the last of them, and a weight's gradient before it is
        # added.
        num_bytes += _FP32 * (largest_cast + largest_weight)
    return num_bytes
