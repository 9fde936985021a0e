"""The host memory that answering prompts from a model folder takes, on the host device in fp32. Torch-free.

Units: bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from horizon_server.planning.ledger import NUM_SLOTS
from horizon_server.planning.model_folder import ModelFolder
from horizon_server.store.adapter_files import AdapterFolder
from horizon_server.store.layout import StoreLayout, plane_sizes, weights_only

_FP32 = 4
# Of all sequences together; prompts that take more are refused.
CACHE_BYTES = 2**30
# The interpreter, torch, the tokenizer, and what a layer computes with on the longest prompt.
_HEAP_BYTES = 3 * 2**30


@dataclass(frozen=True, kw_only=True)
class SampleMemory:
    """`planes` hold the weights, in memory files; `private` is what the child may have besides."""

    planes: int
    private: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.planes + self.private


@dataclass
class SampleHold:
    """Host memory that a call which runs has, and the queue must not give to jobs."""

    num_bytes: int = 0


def sample_layout(folder: ModelFolder, adapter: AdapterFolder | None = None) -> StoreLayout:
    """The store's layout for weights that are only read, and an adapter that is merged into them: what it adds takes both halves.

    Raises:
        InvalidModel: the adapter is of another model.
    """
    shapes = {name: header.shape for name, header in folder.headers.items()}
    adapted = {} if adapter is None else adapter.of_weights(shapes)
    return weights_only(folder.layout, is_bfloat16=lambda name: name not in adapted and folder.is_bfloat16(name))


def sample_memory(folder: ModelFolder, adapter: AdapterFolder | None = None) -> SampleMemory:
    """What a child that answers from this folder, with an adapter, takes at most. Raises InvalidModel as `sample_layout`."""
    layout = sample_layout(folder, adapter)
    embedding, *layers, head = (unit.num_elements for unit in layout.units)
    edge = max(embedding, head + (embedding if layout.tied else 0))
    slots = NUM_SLOTS * max(layers, default=0) + edge
    planes = sum(plane_sizes(layout, grad_dtype_bytes=0).values())
    return SampleMemory(planes=planes, private=slots * _FP32 + CACHE_BYTES + _HEAP_BYTES)
