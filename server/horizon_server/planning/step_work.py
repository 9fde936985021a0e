"""What the schedule does in one optimizer step, counted: operations, bytes of memory traffic, bytes over the link.
Torch-free.

What is not known before the data is prepared is taken at its upper end: all tokens are trained on, each row is one
document as long as `sequence_length`, no two tokens are the same.

Units: floating-point operations, bytes. D = hidden size, T = tokens of a step.
Source: docs/engine.md, "One step of training", and docs/architecture.md, "How fast a job will be".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from horizon_server.planning.bandwidth import adamw_bytes_per_parameter, compressed_bytes_per_parameter
from horizon_server.planning.elementwise import copied_bytes, elementwise_bytes
from horizon_server.planning.flops import FLOPS_PER_PARAMETER, FlopsCount
from horizon_server.planning.gpus import FP8_TIMES_AS_FAST
from horizon_server.planning.ledger import attention_output_bytes, chunked_row_tokens
from horizon_server.planning.model_folder import ModelFolder
from horizon_server.planning.pages import PagesPlan, visited_share
from horizon_server.planning.residency import (
    moving_units,
    packed_units,
    resident_units,
    skips_projection,
    state_units,
)
from horizon_server.planning.step_parts import (
    TODAY,
    EmbeddingTraffic,
    EngineFacts,
    HeadWork,
    LayerWork,
    StepWork,
    UnitTraffic,
)
from horizon_server.planning.working_memory import logits_chunk_tokens
from horizon_server.recipe import Recipe
from horizon_server.records.execution import DeviceKind, Execution
from horizon_server.store.adapters import adapted_sizes, scaled_sizes
from horizon_server.store.drive_layout import DriveLayout, state_bytes
from horizon_server.store.layout import UnitLayout
from horizon_server.store.ownership import Ownership

_FP32 = 4
_FORWARD_SHARE = 1 / 3
"""Of a model's own operations; backward is twice that, and recomputes the layers' forward besides."""

# Of one logit in bf16: itself, in fp32 through softmax, loss and gradient, and back. Fused, it becomes its own gradient
# in place.
LOGIT_BYTES, FUSED_LOGIT_BYTES = 44.0, 8.2
# Of one gradient that is added to another lane's: both are read, and the sum is written.
_JOIN_BYTES = 3 * _FP32
# Of every gradient a cuda device takes the norm and rounds a copy to bf16, half of it in the shadow of compute.
_NORM_AND_CAST_BYTES: Mapping[DeviceKind, int] = {"host": 0, "cuda": 5}
# Of one embedding row's element per micro-batch: its gradient is cleared, written, rounded and added up, in units of
# the element.
_ROW_GRADIENT_PASSES = 9


# Of a weight's element while its norms are computed, besides reading it: written in fp32, the adapter's product added,
# squared.
_NORM_BYTES = 4 * _FP32
# Of an output of a map with magnitudes: both products read, scaled, added up, and added to the output; then their
# gradients.
_SCALED_ACCESSES, _SCALED_BACKWARD_ACCESSES = 11, 14
# Of an output of a map with an adapter: the adapter's product is written, and added to the map's. Of an input in
# backward: the same of both gradients. On an H100, eager steps of 65,536 tokens took within 3 % of what this gives.
_ADAPTED_ACCESSES, _ADAPTED_BACKWARD_ACCESSES = 4, 4
_FP8_WEIGHT_GRADIENTS = ("fp8_full",)
"""Values of `train.matmul`."""
# Of products in FP8, what an eager layer moves for its casts, by hidden elements of a token in a whole step: five
# passes for each cast, and the same input cast for each of its maps. Compiled layers cast what they make at once.
_CAST_BYTES = 654
DETERMINISTIC_BACKWARD = 1.1
"""Attention's backward on a GPU that adds in a fixed order, in units of the one that adds in the order of arrival.
Estimated; `bench.gpu_all` measures both."""


def work_of_step(folder: ModelFolder, recipe: Recipe, execution: Execution, *, facts: EngineFacts = TODAY) -> StepWork:
    """Count a step on a model folder that is laid out for the job."""
    on_host, by_layers = execution.device_kind == "host", execution.parallel == "layers"
    whole = _Counter.of(folder, recipe, execution, facts, share=1)
    # Of head and embedding, and by rows of the layers too.
    of_rank = _Counter.of(folder, recipe, execution, facts, share=execution.num_ranks)
    own = whole if on_host else of_rank
    counter = whole if by_layers else own
    # Where rows are computed in chunks, hidden states come and go in the same way as from other ranks.
    hops = by_layers or (execution.chunk_tokens > 0 and execution.activation_placement == "host")
    hop_bytes = sum(whole.lengths) * folder.shape.hidden_size * execution.element_bytes if hops else 0
    drives = DriveLayout(folder.layout, execution.drives)
    return StepWork(
        num_tokens=recipe.tokens_per_step,
        hidden_size=folder.shape.hidden_size,
        micro_batch_tokens=counter.micro_batch_tokens,
        num_micro_batches=counter.num_micro_batches,
        document_tokens=counter.lengths[0],
        model_flops=FlopsCount.of_folder(folder).of(whole.lengths),
        updates_in_backward=counter.updates_in_backward,
        layer=counter.layer(),
        layers=counter.layers(),
        head=own.head(),
        head_traffic=own.head_traffic(),
        embedding=own.embedding(),
        product_layers=execution.residency.product_layers,
        attention_layers=whole.attention_layers,
        first_trained=folder.layout.first_trained_unit,
        peers_are_processes=on_host,
        num_links=1 if on_host else execution.num_ranks,
        layer_ranks=Ownership.of(folder.layout, execution).layer_ranks if by_layers else (),
        lanes=execution.lanes,
        hop_bytes=hop_bytes,
        head_hop_bytes=hop_bytes if on_host else hop_bytes / execution.num_ranks,
        drive_bytes=tuple(
            (unit, state_bytes(folder.layout, unit, execution.drives.planes))
            for unit in moving_units(folder.layout, execution)
        ),
        drive_spans=tuple((unit, len(drives.parts(unit))) for unit in moving_units(folder.layout, execution)),
        ring_slots=execution.drives.ring_slots,
        longest_share=sum(of_rank.lengths) * execution.num_ranks / recipe.tokens_per_step,
    )


def _lengths(num_tokens: int, document: int) -> tuple[int, ...]:
    num_full, rest = divmod(num_tokens, document)
    return (document,) * num_full + (rest,) * (rest > 0)


@dataclass(frozen=True, kw_only=True)
class _Again:
    """Of an average layer, what is computed once more; `share` are the layers that do."""

    share: float
    flops: float
    num_bytes: float


@dataclass(frozen=True, kw_only=True)
class _Counter:
    """The parts of a step, counted one by one."""

    folder: ModelFolder
    lengths: tuple[int, ...]
    micro_batch_tokens: int
    num_micro_batches: int
    recipe: Recipe
    execution: Execution
    facts: EngineFacts

    @classmethod
    def of(
        cls, folder: ModelFolder, recipe: Recipe, execution: Execution, facts: EngineFacts, *, share: int
    ) -> _Counter:
        """One of `share` equal parts of the step's tokens and lanes, or one document, which is not divided."""
        document, num_lanes = min(recipe.sequence_length, recipe.tokens_per_step), -(-execution.lanes // share)
        num_tokens = max(document, -(-recipe.tokens_per_step // share))
        lengths, rows_together = _lengths(num_tokens, document), max(1, execution.micro_batch_tokens // document)
        # Micro-batches do not cross lanes, and rows are not divided.
        rows_together = min(rows_together, -(-len(lengths) // num_lanes))
        parts = [min(rows_together * document, num_tokens)] * -(-len(lengths) // rows_together)
        if chunk_tokens := chunked_row_tokens(recipe, execution, longest=document) and execution.chunk_tokens:
            parts = [chunk_tokens for length in lengths for _ in range(-(-length // chunk_tokens))]
        return cls(
            folder=folder,
            lengths=lengths,
            micro_batch_tokens=parts[0],
            num_micro_batches=len(parts),
            recipe=recipe,
            execution=execution,
            facts=facts,
        )

    @property
    def _is_chunked(self) -> bool:
        return bool(chunked_row_tokens(self.recipe, self.execution, longest=max(self.lengths)))

    @property
    def attention_layers(self) -> int:
        """Whose outputs of attention wait on the host."""
        return self.execution.residency.attention_layers if self._is_chunked else 0

    @property
    def element(self) -> int:
        """Bytes of a weight on its way up."""
        return self.execution.element_bytes

    @property
    def grad_bytes(self) -> int:
        """Of one gradient on its way down."""
        return self.execution.grad_bytes or self.element

    @property
    def updates_in_backward(self) -> bool:
        """Whether each unit is updated as its gradient lands."""
        return self.execution.grad_bytes == 0

    @property
    def exact_update_bytes(self) -> int:
        """Host memory traffic while one parameter is updated whose states are exact."""
        # A link's copies of other units read and write the same memory meanwhile.
        per_copy = 0 if self.execution.device_kind == "host" else self.element
        return adamw_bytes_per_parameter(self.grad_bytes) + per_copy * (1 + self.updates_in_backward)

    def updated(self, unit: UnitLayout, traffic: UnitTraffic) -> UnitTraffic:
        """A unit's traffic, with that of its update on the host."""
        saved = adamw_bytes_per_parameter(self.grad_bytes) - compressed_bytes_per_parameter(self.grad_bytes)
        exact = unit.trained_elements - unit.compressed_elements
        compressed_bytes = unit.compressed_elements * (self.exact_update_bytes - saved)
        return replace(
            traffic,
            update_bytes=exact * self.exact_update_bytes + compressed_bytes,
            compressed_bytes=compressed_bytes,
            compressed_parameters=unit.compressed_elements,
        )

    def clear_bytes(self, *, divided: bool) -> float:
        """Device memory traffic of one gradient besides its sums; `divided`: the ranks sum its lanes together."""
        # Where products add to the gradient, the first one of a step overwrites it.
        cleared = (0 if self.facts.accumulates_in_gemm else _FP32) + _NORM_AND_CAST_BYTES[self.execution.device_kind]
        # How often it is added to that of another lane, on this rank or on all that share the processors.
        lanes, ranks = self.execution.lanes, self.execution.num_ranks
        alone = self._on_host or not divided
        return cleared + _JOIN_BYTES * (lanes - 1 if alone else -(-lanes // ranks) - 1 + (ranks - 1) / ranks)

    @property
    def _on_host(self) -> bool:
        return self.execution.device_kind == "host"

    @property
    def _in_fp8(self) -> bool:
        """Whether the layers' products are in FP8 on a device that has it; the host emulates it, at its own pace."""
        return self.recipe.matmul != "bf16" and not self._on_host

    @property
    def _gemm_times(self) -> tuple[float, float]:
        """What products of values and of input gradients take in units of bf16's, and those of weight gradients."""
        if not self._in_fp8:
            return 1.0, 1.0
        faster = 1 / FP8_TIMES_AS_FAST
        return faster, faster if self.recipe.matmul in _FP8_WEIGHT_GRADIENTS else 1.0

    @property
    def _by_layers(self) -> bool:
        return self.execution.parallel == "layers"

    @property
    def _upload_share(self) -> float:
        """Of a unit's weights, what crosses the link: each rank brings its part, or on the host reads all of it."""
        ranks = self.execution.num_ranks
        return float(ranks) if self._on_host else 1 / ranks

    @property
    def _download_share(self) -> float:
        return 1.0 if self._on_host else 1 / self.execution.num_ranks

    def _peers_up(self, num_bytes: float) -> float:
        """What a rank gets of a unit's weights from the others; on the host it reads them all itself."""
        ranks = self.execution.num_ranks
        return 0.0 if self._on_host else (ranks - 1) / ranks * num_bytes

    def _peers_down(self, num_gradients: float) -> float:
        """What a rank gets of the others' sums; on the host, what all ranks get."""
        ranks = self.execution.num_ranks
        return (ranks - 1) * (1 if self._on_host else 1 / ranks) * num_gradients * _FP32

    @property
    def accumulate_bytes(self) -> float:
        """Device memory traffic of adding one weight's gradient to its fp32 sum, once per micro-batch or chunk."""
        # A product that adds to its output hides a part of reading and writing it. Estimated: 3.5 of 8 bytes stay
        # visible.
        return 3.5 if self.facts.accumulates_in_gemm else self.element + 2 * _FP32

    def layer(self) -> LayerWork:
        model, count, num_tokens = self.folder.shape, FlopsCount.of_folder(self.folder), sum(self.lengths)
        matrices = (count.active_parameters - model.vocab_size * model.hidden_size) / model.num_hidden_layers
        own_flops = FLOPS_PER_PARAMETER * num_tokens * matrices
        skips = self.facts.skips_projection and skips_projection(self.folder)
        skipped = model.hidden_size * model.intermediate_size if skips else 0
        layers = self._layer_units
        # A frozen weight has no gradient of its own, which is half of its backward.
        trained = sum(u.trained_elements for u in layers) / sum(u.num_elements for u in layers)
        elementwise = elementwise_bytes(model, self.element, fused=self.facts.fused)
        less = (0.0, 0.0, 0.0)
        if self.facts.fused and self.facts.fewer_copies and not self._on_host:
            less = copied_bytes(model, self.element)
        forward, recompute, backward = (
            (part - saved) * num_tokens for part, saved in zip(elementwise, less, strict=True)
        )
        again = self._before_pages(num_tokens)
        forward, recompute = forward + again.num_bytes, recompute + again.num_bytes
        # DoRA: norms once a visit, whatever the micro-batches, and what is done with each output of an adapted map.
        normed, scaled = (size / len(layers) for size in scaled_sizes(self.folder.layout))
        norm_bytes, output_bytes = normed * (self.element + _NORM_BYTES), scaled * num_tokens * self.element
        forward += norm_bytes + _SCALED_ACCESSES * output_bytes
        recompute += norm_bytes + _SCALED_ACCESSES * output_bytes
        backward += _SCALED_BACKWARD_ACCESSES * output_bytes
        if not self.facts.fused:
            outputs, inputs = (size / len(layers) for size in adapted_sizes(self.folder.layout))
            forward += _ADAPTED_ACCESSES * outputs * num_tokens * self.element
            recompute += _ADAPTED_ACCESSES * outputs * num_tokens * self.element
            backward += _ADAPTED_BACKWARD_ACCESSES * inputs * num_tokens * self.element
        # Where inputs are dropped, what a magnitude multiplies is a second product of the weight, with a gradient of
        # its inputs.
        casts = self._in_fp8 and not self.facts.fused
        cast_bytes = _CAST_BYTES * model.hidden_size * num_tokens / 3 if casts else 0.0
        of_values, of_gradients = self._gemm_times
        again_flops = FLOPS_PER_PARAMETER * _FORWARD_SHARE * num_tokens * normed if self.recipe.adapter_dropout else 0.0
        return LayerWork(
            forward_flops=of_values * (own_flops * _FORWARD_SHARE + again_flops + again.flops),
            recompute_flops=of_values
            * (own_flops * _FORWARD_SHARE * max(0.0, 1 - skipped / matrices) + again_flops + again.flops),
            # Half of it are gradients of inputs, the other half those of trained weights.
            backward_flops=own_flops * (1 - _FORWARD_SHARE) * (of_values + of_gradients * trained) / 2 + again_flops,
            attention_flops=count.of_attention(self.lengths) * _FORWARD_SHARE / model.num_hidden_layers,
            forward_bytes=forward + cast_bytes,
            recompute_bytes=recompute + cast_bytes,
            backward_bytes=backward + cast_bytes,
            accumulate_bytes=self.accumulate_bytes * matrices * self.num_micro_batches * trained,
            attention_backward_times=1.0 if self._on_host or not self.recipe.deterministic else DETERMINISTIC_BACKWARD,
            attention_times=1.0 + again.share,
        )

    def _before_pages(self, num_tokens: int) -> _Again:
        """What an average layer computes once more in forward, and in the recompute, because its experts come in pages:
        all that comes before them, and a shared expert with it."""
        layers, units = self._layer_units, PagesPlan.of(self.folder.layout, self.execution.expert_page_elements).units
        matrices = sum(
            tensor.num_elements
            for unit in layers
            if unit.index in units
            for tensor in unit.tensors
            if len(tensor.shape) > 1 and tensor.name not in units[unit.index].names
        )
        dense = replace(self.folder.shape, experts=None, intermediate_size=0)
        share = len(units) / len(layers)
        return _Again(
            share=share,
            flops=FLOPS_PER_PARAMETER * _FORWARD_SHARE * num_tokens * matrices / len(layers),
            num_bytes=share * num_tokens * elementwise_bytes(dense, self.element, fused=self.facts.fused)[0],
        )

    def head(self) -> HeadWork:
        model, num_tokens, facts = self.folder.shape, sum(self.lengths), self.facts
        table = model.vocab_size * model.hidden_size
        chunk_tokens = self.execution.head_chunk_tokens or logits_chunk_tokens(
            model.vocab_size, self.execution.device_kind
        )
        bytes_per_logit = (FUSED_LOGIT_BYTES if facts.fused_head else LOGIT_BYTES) * self.element / 2
        flops, logit_bytes = FLOPS_PER_PARAMETER * num_tokens * table, bytes_per_logit * num_tokens * model.vocab_size
        # Of what one pass does with a logit, writing it and reducing it is about half.
        forward_flops, forward_bytes = _FORWARD_SHARE * flops, logit_bytes / 2
        return HeadWork(
            flops=flops + forward_flops * facts.two_pass_head,
            elementwise_bytes=logit_bytes + forward_bytes * facts.two_pass_head,
            forward_flops=forward_flops,
            forward_bytes=forward_bytes,
            accumulate_bytes=self.accumulate_bytes * table * -(-num_tokens // chunk_tokens),
        )

    @property
    def _layer_units(self) -> list[UnitLayout]:
        return [unit for unit in self.folder.layout.units if unit.kind == "layer"]

    def layers(self) -> tuple[UnitTraffic, ...]:
        return self._whole_layers() if self._by_layers else self._divided_layers()

    def _whole_layers(self) -> tuple[UnitTraffic, ...]:
        """Of ranks that the layers go round: each layer's weights and gradient are one rank's."""
        return tuple(
            self.updated(
                unit,
                UnitTraffic(
                    upload_bytes=unit.unpacked_elements * self.element + unit.packed_bytes,
                    download_bytes=unit.trained_elements * self.grad_bytes,
                    clear_bytes=unit.trained_elements * self.clear_bytes(divided=False),
                    unpack_bytes=self._unpack_bytes(unit),
                ),
            )
            for unit in self._layer_units
        )

    def _unpack_bytes(self, unit: UnitLayout) -> float:
        """Packed weights are read, and written as they are computed with."""
        return unit.packed_bytes + (unit.num_elements - unit.unpacked_elements) * self.element

    def _divided_layers(self) -> tuple[UnitTraffic, ...]:
        units = self._layer_units
        layout, residency = self.folder.layout, self.execution.residency
        resident = {unit.index for unit in resident_units(layout, residency.resident_layers)}
        packed = {unit.index for unit in packed_units(layout, residency)}
        # The host's memory is its device's.
        on_device = set() if self._on_host else {unit.index for unit in state_units(layout, residency)}
        device_update_bytes = adamw_bytes_per_parameter(self.grad_bytes)
        offload, waits = 0, self.execution.activation_placement == "host"
        if waits and not self.execution.chunk_tokens:
            offload = sum(self.lengths) * self.folder.shape.hidden_size * self.element
        keys = outputs = 0
        if self._is_chunked:
            keys = sum(self.lengths) * self.folder.shape.key_value_elements * self.element
            outputs = attention_output_bytes(self.folder.shape, sum(self.lengths), self.element)
        attended = {unit.index for unit in units[len(units) - self.attention_layers :]}
        pages = PagesPlan.of(layout, self.execution.expert_page_elements)
        share = visited_share(self.folder.shape.experts, sum(self.lengths))
        brought = {unit.index: pages.brought(unit, self.element, share) for unit in units}
        traffic = [
            UnitTraffic(
                upload_bytes=0
                if unit.index in on_device
                else unit.trained_elements * self.element * self._upload_share
                if unit.index in resident
                else unit.unpacked_elements * self.element * self._upload_share
                + (0 if unit.index in packed else unit.packed_bytes)
                - (brought[unit.index].all_bytes - brought[unit.index].upload_bytes),
                download_bytes=0
                if unit.index in on_device
                else unit.trained_elements * self.grad_bytes * self._download_share,
                clear_bytes=unit.trained_elements
                * (self.clear_bytes(divided=True) + (device_update_bytes if unit.index in on_device else 0)),
                # The last layer's input is still on the device when backward begins.
                offload_bytes=keys
                + (offload if unit is not units[-1] else 0)
                + (outputs if unit.index in attended else 0),
                unpack_bytes=0
                if unit.index in resident
                else self._unpack_bytes(unit)
                - (brought[unit.index].all_unpack_bytes - brought[unit.index].unpack_bytes),
                resident=unit.index in resident,
                page_bytes=brought[unit.index].upload_bytes,
                page_unpack_bytes=brought[unit.index].unpack_bytes,
                peer_up_bytes=self._peers_up(
                    (unit.trained_elements if unit.index in resident else unit.unpacked_elements) * self.element
                ),
                peer_down_bytes=self._peers_down(unit.trained_elements),
            )
            for unit in units
        ]
        return tuple(
            found if unit.index in on_device else self.updated(unit, found)
            for unit, found in zip(units, traffic, strict=True)
        )

    def head_traffic(self) -> UnitTraffic:
        layout, whole, stays = self.folder.layout, self._by_layers, self.execution.residency.resident_head
        head = layout.units[-1]
        # The projection of a tied model is the embedding's table, whose gradient leaves with the embedding's.
        units = [head, layout.units[0]] if layout.tied else [head]
        projection = sum(unit.trained_elements if stays else unit.num_elements for unit in units)
        # By layers every rank brings all of it.
        upload_share = max(1.0, self._upload_share) if whole else self._upload_share
        traffic = UnitTraffic(
            upload_bytes=projection * self.element * upload_share,
            download_bytes=head.trained_elements * self.grad_bytes * self._download_share,
            clear_bytes=layout.head_gradient_elements * self.clear_bytes(divided=True),
            resident=stays,
            peer_up_bytes=0.0 if whole else self._peers_up(projection * self.element),
            peer_down_bytes=self._peers_down(layout.head_gradient_elements),
        )
        return self.updated(head, traffic)

    def embedding(self) -> EmbeddingTraffic:
        model, tied, table = self.folder.shape, self.folder.layout.tied, self.folder.layout.units[0].trained_elements
        rows = min(sum(self.lengths), model.vocab_size) * model.hidden_size
        trained_rows = rows if table else 0
        kept, residency = self.facts.keeps_embedding and not tied, self.execution.residency
        # From a tied table that is trained, rows are gathered on the device when the head has it there.
        tied_stays = tied and residency.resident_head
        is_there = kept or residency.resident_table or (tied_stays and not table)
        # All rows of a tied table have a gradient, from the head.
        by_rows = self.facts.sends_rows and not tied
        on_drives = 0 in self.execution.drives.units
        # On drives it is updated as a whole, from rows to which the zeros between them are added.
        first = trained_rows if by_rows and not on_drives else table
        padding_bytes = 2 * table * self.grad_bytes if by_rows and on_drives else 0
        return EmbeddingTraffic(
            rows_up_bytes=0 if is_there else rows * self.element,
            rows_up_again_bytes=0 if is_there or tied_stays else rows * self.element,
            rows_down_bytes=0 if kept or tied else trained_rows * self.grad_bytes,
            table_down_bytes=table * self.grad_bytes * self._download_share if tied else 0,
            clear_host_bytes=0 if kept or tied or by_rows else table * self.grad_bytes,
            gradient_bytes=_ROW_GRADIENT_PASSES * self.element * trained_rows * self.num_micro_batches,
            first_update_bytes=0 if kept else first * self.exact_update_bytes + padding_bytes,
            last_update_bytes=0 if kept else (table - first) * self.exact_update_bytes,
            peer_rows_bytes=self._peer_rows_bytes() if self._by_layers and table else 0,
        )

    def _peer_rows_bytes(self) -> float:
        """Of the rows of all tokens, what a rank gets from the others, or on the host all of them from each other."""
        model, ranks = self.folder.shape, self.execution.num_ranks
        rows = min(self.recipe.tokens_per_step, model.vocab_size) * model.hidden_size * self.element
        return rows * (ranks - 1) * (1 if self._on_host else 1 / ranks)
