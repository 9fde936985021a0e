"""The host memory that answering prompts takes: from a model folder, on the host device in fp32, and in a job's
evaluations. Torch-free.

Units: bytes.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from horizon_server.planning.model_folder import ModelFolder
from horizon_server.planning.pages import PagesPlan
from horizon_server.planning.trainable import open_for_training
from horizon_server.records.execution import NUM_SLOTS
from horizon_server.records.plan import Ledger
from horizon_server.spec import JobSpec, TrainSpec
from horizon_server.store.adapter_files import AdapterFolder
from horizon_server.store.layout import StoreLayout, plane_sizes, weights_only

_FP32 = 4
# Of all sequences together; prompts that take more are refused.
CACHE_BYTES = 2**30
# The tokenizer of the model, in a worker.
_DECODER_BYTES = 64 * 2**20
# The interpreter, torch, the tokenizer, and what a layer computes with on the longest prompt.
_HEAP_BYTES = 3 * 2**30


@dataclass(frozen=True, kw_only=True)
class SampleMemory:
    """`planes` hold the weights, in memory files; `private` is what the child may have besides. Where there is room,
    layers and head stay in fp32 instead of being converted in each pass, which takes `kept` more. Until then, experts
    come in pages of `expert_page_elements`, where that is not 0."""

    planes: int
    private: int
    kept: int
    keeps_weights: bool = False
    expert_page_elements: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.planes + self.private

    def for_room(self, free_bytes: int) -> SampleMemory:
        """The same with weights that are kept, where that takes at most half of what is free: the rest is for jobs and
        for other children, which need not wait until this one ends."""
        if self.total + self.kept > free_bytes // 2:
            return self
        return dataclasses.replace(self, private=self.private + self.kept, keeps_weights=True, expert_page_elements=0)


def sample_layout(folder: ModelFolder, adapter: AdapterFolder | None = None) -> StoreLayout:
    """The store's layout for weights that are only read, and an adapter that is merged into them: what it adds takes
    both halves.

    Raises:
        InvalidModel: the adapter is of another model.
    """
    shapes = {name: header.shape for name, header in folder.headers.items()}
    adapted = {} if adapter is None else adapter.of_weights(shapes)
    return weights_only(folder.layout, is_bfloat16=lambda name: name not in adapted and folder.is_bfloat16(name))


def trained_layout(folder: Path, train: TrainSpec) -> StoreLayout:
    """The store's layout for weights that are only read, with a job's adapters next to a base that is kept as it was
    trained on.

    Raises: InvalidModel, InvalidSpec as `open_for_training`.
    """
    found = open_for_training(folder, train)
    return weights_only(
        found.layout, is_bfloat16=found.is_bfloat16, packing_of=lambda name: found.layout.find(name)[1].packing
    )


def evaluated_folder(folder: Path, train: TrainSpec) -> ModelFolder:
    """A job's model, laid out for weights that are only read, each with the bits that the job's store has of it.

    Raises: InvalidModel, InvalidSpec as `open_for_training`.
    """
    found = open_for_training(folder, train)
    place_of = {place.name: place for _, place in found.layout.tensors()}
    layout = weights_only(
        found.layout,
        is_bfloat16=lambda name: not place_of[name].exact,
        packing_of=lambda name: place_of[name].packing,
    )
    return dataclasses.replace(found, layout=layout)


def sample_memory(layout: StoreLayout, *, expert_page_elements: int = 0) -> SampleMemory:
    """What a child that answers from weights of this layout takes at most, with experts in pages of at most
    `expert_page_elements`; 0 is whole layers."""
    embedding, *layers, head = (unit.num_elements for unit in layout.units)
    head += embedding if layout.tied else 0
    edge = max(embedding, head)
    pages = PagesPlan.of(layout, expert_page_elements)
    passing = max((pages.num_elements(unit) for unit in layout.units if unit.kind == "layer"), default=0)
    slots = NUM_SLOTS * (passing + pages.page_elements) + edge
    planes = sum(plane_sizes(layout, grad_dtype_bytes=0).values())
    return SampleMemory(
        planes=planes,
        private=slots * _FP32 + CACHE_BYTES + _HEAP_BYTES,
        # What stays takes the place of what passes through.
        kept=(sum(layers) + head + NUM_SLOTS * (max(layers, default=0) - passing - pages.page_elements)) * _FP32,
        expert_page_elements=expert_page_elements,
    )


def cache_limit_bytes(spec: JobSpec, folder: ModelFolder) -> int:
    """What the keys and values of the prompts may take that a job answers at a time: those of one prompt at least."""
    generate = spec.eval.generate
    if generate is None:
        return 0
    shape = folder.shape
    width = max(shape.num_key_value_heads * shape.head_dim, shape.hidden_size if shape.latent_size else 0)
    # In fp32, whatever the device computes in.
    one = shape.num_hidden_layers * 2 * width * (spec.train.sequence_length + generate.max_new_tokens) * _FP32
    return min(generate.prompts * one, max(CACHE_BYTES, one))


def with_answers(ledger: Ledger, spec: JobSpec, folder: ModelFolder) -> Ledger:
    """The ledger of a job with the host memory that the answers of its evaluations take, where it asks for any.

    Weights in flight are in the place of those of training. The rest is the cache, and what a layer computes with on
    the longest prompt, or a chunk of it.
    """
    if spec.eval.generate is None:
        return ledger
    shape, length = folder.shape, spec.train.sequence_length
    length = min(length, spec.train.chunk_tokens or length)
    # A mask and its form before; scores of every head where attention is not fused, twice for their softmax.
    pairs = length * length * (_FP32 + 1 + 2 * shape.num_score_planes * _FP32)
    rows = length * (4 * shape.intermediate_size + 8 * shape.hidden_size) * _FP32
    answers = cache_limit_bytes(spec, folder) + pairs + rows + _DECODER_BYTES
    return dataclasses.replace(ledger, host_bytes={**ledger.host_bytes, "generation": answers})
