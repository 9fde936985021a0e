"""One optimizer step's loss and gradients, layer by layer over all its micro-batches.

Forward keeps each layer's input and no graph; the head (`head_pass`) turns chunks of tokens into loss and gradient;
backward recomputes one layer at a time with local autograd. Weights cross the link twice a step and gradients once, for
any number of micro-batches. A micro-batch longer than `chunk_tokens` is computed in chunks: up in forward, down in
backward, with the keys and values of the whole row.

Shapes: N = tokens of the step, T = tokens of a micro-batch, S = supervised tokens of the step, D = hidden size, R =
embedding rows in use, L = layers.
Source: Horizon-LM (arXiv 2602.04816), explicit recomputation with layer-local gradients; layer-major order is ours.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor

from horizon_server.engine.activations import EMBEDDING, Activations, OffloadedActivations, Purpose
from horizon_server.engine.attention.chunked import KeptOutput
from horizon_server.engine.chunk_trial import key_sizes
from horizon_server.engine.chunked_keys import ChunkedKeys
from horizon_server.engine.compiled.layers import CompiledLayers
from horizon_server.engine.device.protocol import Device, Event
from horizon_server.engine.embedding_noise import noise_magnitudes, noise_of
from horizon_server.engine.fp8 import Fp8Visit
from horizon_server.engine.gradient_sink import GradientSink
from horizon_server.engine.head_pass import HeadPass
from horizon_server.engine.lane_sums import RowExchange
from horizon_server.engine.lanes import StepRows
from horizon_server.engine.layer_stream import LayerStream, UnitRequest
from horizon_server.engine.layer_stubs import LayerCall, call_bytes
from horizon_server.engine.leaves import unit_leaves
from horizon_server.engine.linear import LinearMap, LinearMaps
from horizon_server.engine.micro_batch import MicroBatch, StepTokens
from horizon_server.engine.objectives import StepObjective
from horizon_server.engine.paged_layers import PagedLayers
from horizon_server.engine.ranks import ALONE, Ranks
from horizon_server.engine.shared_activations import SharedActivations
from horizon_server.engine.step_pass import PassTokens, StepKey, StepPass, charged
from horizon_server.engine.streamed_activations import StreamedActivations
from horizon_server.engine.template import Template, VisitNorms
from horizon_server.engine.unit_gradients import UnitGradients
from horizon_server.planning.working_memory import EMBEDDING_GRADIENT_TOKENS, logits_chunk_tokens
from horizon_server.recipe import Recipe
from horizon_server.records.execution import Execution
from horizon_server.store.reference import in_order

Enqueue = Callable[[Tensor], None]

# That the driver queues before compute has reached them.
_UNITS_AHEAD = 2


class ForwardBackward:
    """Drives a step through stream, compute and sink.

    Thread: one driving thread; it only queues work and waits at the end.
    """

    def __init__(
        self,
        template: Template,
        device: Device,
        stream: LayerStream,
        sink: GradientSink,
        recipe: Recipe,
        execution: Execution,
        *,
        compiled: CompiledLayers,
        ranks: Ranks = ALONE,
    ) -> None:
        self._template, self._device, self._stream, self._sink = template, device, stream, sink
        self._ranks, self._owned_rows = ranks, None
        ownership = ranks.ownership(template.layout)
        # What is frozen of a table travels as well where each node has a part of it.
        has_rows = ownership.has_rows or (execution.num_nodes > 1 and ownership.is_table_alone)
        if execution.lanes > 1 and template.embeds_by_rows and has_rows:
            self._owned_rows = ownership.rows()
        self._recipe, self._residency, self._compiled = recipe, execution.residency, compiled
        chunk_tokens = execution.head_chunk_tokens or logits_chunk_tokens(template.vocab_size, device.name)
        self._head_chunk_tokens = chunk_tokens
        # Backward ends at the first trained unit, and wants no inputs of the layers before it.
        self._first_trained = template.layout.first_trained_unit
        self._own_layers = list(range(template.num_layers))
        if ranks.by_layers:
            self._own_layers = [layer for layer, rank in enumerate(ownership.layer_ranks) if rank == ranks.rank]
        self.activations = self._make_activations(execution)
        self._paged = PagedLayers(template, device, stream, sink, recipe, self.activations)
        self._chunk_tokens = execution.chunk_tokens
        self._keys: ChunkedKeys | None = None
        if self._chunk_tokens:
            assert not ranks.by_layers, "chunks of one row go up and down within a layer, on one rank"
            sizes, num_skipped = key_sizes(template), template.layout.num_skipped_layers
            self._keys = ChunkedKeys(device, sizes, execution, num_skipped=num_skipped)
        self._head = UnitRequest(unit_index=template.layout.units[-1].index)
        self._head_pass = HeadPass(
            template,
            device,
            sink,
            self.activations,
            label_smoothing=recipe.label_smoothing,
            ranks=ranks,
        )
        self.first_square: float | None = None
        """Square sum of the gradients of all layers after the first micro-batch of the last step, where it was
        measured."""
        self.logprobs_S: Tensor | None = None
        """The log-probabilities of the last step's supervised tokens, of all ranks, on the CPU, where it had an
        objective that is not the mean cross-entropy."""

    def gradients(
        self,
        rows: StepRows,
        key: StepKey,
        objective: StepObjective | None = None,
        *,
        measure_first: bool = False,
        adds: bool = False,
    ) -> float:
        """The objective's loss, without one the mean loss over the supervised tokens; with dropout. When it returns,
        every trained unit's gradient is on the host. With `measure_first`, and of more micro-batches than one,
        `first_square` is what the first of them gave the layers, on the first rank. A rank that follows takes an
        objective without tensors: the first one has them. With `adds`, they are added to those of the passes before.
        """
        current = self._start(rows, "training", key)
        by_layers, num_layers = self._ranks.by_layers, self._template.num_layers
        if measure_first and len(rows.micro_batches) > 1 and (self._ranks.leads or by_layers) and rows.lanes[0]:
            current.first_squares_L = self._device.place(torch.zeros(num_layers, dtype=torch.float64))
        if objective is not None and objective.objective.is_cross_entropy:
            assert objective.weights_S is not None, "checked before the step"
            weights_S = objective.weights_S.float()
            if objective.objective.is_sum:
                current.divisor = 1.0
                current.logprobs_S = self._empty_logprobs(current)
            else:
                current.divisor = float(weights_S.double().sum())
            start = sum(current.logprobs_of_ranks[: self._ranks.rank])
            current.weights_S = self._device.place(weights_S[start : start + current.edges.tokens.num_targets])
        elif objective is not None:
            current.runs_twice = True
            current.objective = objective.placed(self._device.place) if self._ranks.leads else None
            current.logprobs_S = self._empty_logprobs(current)
        self._sink.reserve(sum(micro_batch.num_tokens for micro_batch in rows.micro_batches))
        self._sink.start_step(current.embedding_backward.exchange or self._row_exchange(rows), adds=adds)
        program: list[tuple[UnitRequest, Enqueue]] = [
            *self._forward(current),
            (self._head, partial(self._head_pass.enqueue_gradients, current)),
            *(
                (UnitRequest(unit_index=layer + 1), partial(self._enqueue_layer_backward, current, layer))
                for layer in reversed(self._own_layers)
                if layer + 1 >= self._first_trained
            ),
        ]
        if self._first_trained == 0:
            program.append((current.embedding_backward, partial(self._enqueue_embed_backward, current)))
        self._run(current, program)
        self._sink.meet()
        self.first_square = None
        if current.first_squares_L is not None:
            squares_L = current.first_squares_L.cpu()
            if by_layers:
                # Each rank has those of its layers, and zeros.
                squares_L = self._ranks.meet(squares_L.tolist()).sum(0)
            # In the order of backward.
            self.first_square = in_order(squares_L.flip(0).numpy())
        self.logprobs_S = self._logprobs_of_all(current)
        return self._sink.loss

    def loss(self, rows: StepRows) -> tuple[float, int]:
        """Mean loss over the supervised tokens, without gradients, and how many of them the model finds the
        likeliest."""
        current = self._start(rows, "evaluation")
        current.num_correct = self._device.place(torch.zeros((), dtype=torch.int64))
        self._run_forward(current, self._head_pass.enqueue_loss)
        return self._sink.loss, int(self._ranks.meet([float(current.num_correct)]).sum())

    def log_probabilities(self, rows: StepRows) -> Tensor:
        """The log-probability of every supervised token, in order, without dropout. Shapes: [S], fp32, on the CPU."""
        current = self._start(rows, "evaluation")
        current.logprobs_S = self._empty_logprobs(current)
        self._run_forward(current, self._head_pass.enqueue_log_probabilities)
        found = self._logprobs_of_all(current)
        assert found is not None
        return found

    def _logprobs_of_all(self, current: StepPass) -> Tensor | None:
        """Those of the supervised tokens of all ranks, in order; None where the pass has none."""
        if current.logprobs_S is None:
            return None
        return self._ranks.join_parts(current.logprobs_S.cpu(), current.logprobs_of_ranks)

    def _empty_logprobs(self, current: StepPass) -> Tensor:
        # NaN, so that a token that no chunk reached would show.
        return self._device.place(torch.full((current.edges.tokens.num_targets,), torch.nan))

    def _run_forward(self, current: StepPass, enqueue_head: Callable[[StepPass, Tensor], None]) -> None:
        self._run(current, [*self._forward(current), (self._head, partial(enqueue_head, current))])

    def hidden_states(
        self, micro_batches: Sequence[MicroBatch], chunk_tokens: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """What goes into the first layer and what comes out of the last, with chunks of other sizes where that is
        asked; every rank gets all of it. Shapes: [N, D] both."""
        current = self._start(StepRows.single(micro_batches), "trial", chunk_tokens=chunk_tokens)
        self._run(current, self._forward(current))
        return self.activations.trial_ends

    def _forward(self, current: StepPass) -> list[tuple[UnitRequest, Enqueue]]:
        """The part of a pass up to the last layer."""
        return [
            (current.embedding, partial(self._enqueue_embed, current)),
            *(
                (UnitRequest(unit_index=layer + 1), partial(self._enqueue_layer, current, layer))
                for layer in self._own_layers
            ),
        ]

    def _make_activations(self, execution: Execution) -> Activations:
        template, layout = self._template, self._template.layout
        sizes = {
            "num_layers": template.num_layers,
            "num_skipped": layout.num_skipped_layers,
            "hidden_size": template.hidden_size,
        }
        if self._ranks.by_layers:
            return SharedActivations(
                self._device, self._ranks, self._own_layers, first_trained=self._first_trained - 1, **sizes
            )
        pages = bool(self._stream.paging.layers)
        on_device = execution.activation_placement == "device"
        if execution.chunk_tokens and not on_device:
            return StreamedActivations(self._device, slot_tokens=execution.chunk_tokens, **sizes)
        if on_device:
            return Activations(self._device, by_part=execution.chunk_tokens > 0, pages_experts=pages, **sizes)
        return OffloadedActivations(self._device, pages_experts=pages, **sizes)

    def open(self) -> None:
        """Have the device memory that `release` has freed."""
        self.activations.open()

    def release(self) -> None:
        """Free the device memory of hidden states, keys and values until `open`. The queues must be idle."""
        self.activations.release()
        if self._keys is not None:
            self._keys.release()

    def close(self) -> None:
        """Free all memory. The queues must be idle."""
        self.activations.close()
        if self._keys is not None:
            self._keys.close()

    def _start(
        self, rows: StepRows, purpose: Purpose, key: StepKey | None = None, *, chunk_tokens: int | None = None
    ) -> StepPass:
        by_rows, ranks = self._template.embeds_by_rows, self._ranks
        num_lanes = len(rows.lanes)
        # A pass of one lane is computed by all ranks.
        of_ranks = [range(1)] * ranks.num_ranks if num_lanes == 1 else ranks.lanes(num_lanes)
        # Dropout is for training steps alone; compute is idle between passes, so no work sees the switch.
        self._template.train(key is not None)
        lanes = range(num_lanes) if ranks.by_layers else of_ranks[ranks.rank]
        # Before the tokens take memory: a step that is too large is refused by its account, with the numbers.
        self.activations.reserve(max(1, sum(micro_batch.num_tokens for micro_batch in rows.of(lanes))))
        chunk_tokens = self._chunk_tokens if chunk_tokens is None else chunk_tokens
        layers = edges = self._pass_tokens(rows, lanes, key, chunk_tokens)
        exchange = backward_exchange = None if ranks.is_alone else self._row_exchange(rows)
        edges_of_ranks = [range(0)] * ranks.num_ranks
        if ranks.by_layers:
            edges = self._pass_tokens(rows, of_ranks[ranks.rank], key, chunk_tokens)
            if self._owned_rows is not None:
                exchange = RowExchange.between([rows.rows_in_use(lanes)] * ranks.num_ranks, ranks, self._owned_rows)
            if purpose != "trial":
                edges_of_ranks = [layers.micro_batches_of(of_rank) for of_rank in of_ranks]
        for one in (exchange, backward_exchange):
            if one is not None:
                self._stream.reserve(one)
        self.activations.start(purpose, layers.tokens.spans, edges_of_ranks)
        if self._keys is not None:
            self._keys.start(layers.tokens.chunks, has_backward=purpose == "training")
        return StepPass(
            layers=layers,
            edges=edges,
            embedding=UnitRequest(unit_index=0, rows_R=layers.tokens.rows_R if by_rows else None, exchange=exchange),
            embedding_backward=UnitRequest(
                unit_index=0, rows_R=edges.tokens.rows_R if by_rows else None, exchange=backward_exchange
            ),
            head_chunk_tokens=self._head_chunk_tokens,
            # In fp64, because the losses of all chunks of a lane add up in it.
            loss=self._device.place(torch.zeros(len(edges.lanes), dtype=torch.float64)),
            divisor=rows.num_targets,
            logprobs_of_ranks=tuple(sum(m.num_targets for m in rows.of(of_rank)) for of_rank in of_ranks),
            key=key,
            generator=self._device.generator if self._template.draws_random_numbers else None,
        )

    def _pass_tokens(self, rows: StepRows, lanes: range, key: StepKey | None, chunk_tokens: int) -> PassTokens:
        template = self._template
        # Only a training step has noise.
        alpha = 0.0 if key is None else self._recipe.neftune_noise_alpha
        return PassTokens(
            tokens=StepTokens.of(
                [rows.lanes[lane] for lane in lanes],
                self._device,
                num_rows=None if template.embeds_by_rows else template.vocab_size,
                chunk_tokens=chunk_tokens,
            ),
            lanes=lanes,
            num_lanes=len(rows.lanes),
            noise_N1=noise_magnitudes(rows.of(lanes), self._template.hidden_size, alpha, self._device)
            if alpha
            else None,
        )

    def _row_exchange(self, rows: StepRows) -> RowExchange | None:
        """Which rows of the table travel; None where each rank reads its own, or it is read as a whole."""
        if self._owned_rows is None:
            return None
        if len(rows.lanes) == 1:
            used = rows.rows_in_use(range(1))
            return RowExchange.between([used] * self._ranks.num_ranks, self._ranks, self._owned_rows)
        return RowExchange.of(rows, self._ranks, self._owned_rows)

    def _run(self, current: StepPass, program: Sequence[tuple[UnitRequest, Enqueue]]) -> None:
        walk = self._stream.walk([request for request, _ in program])
        done: deque[Event] = deque()
        for (_, flat), (_, enqueue) in zip(walk, program, strict=True):
            enqueue(flat)
            done.append(self._device.compute.record())
            # Not the whole step at once: while it queues, the driver holds the interpreter's lock, which compute needs
            # to launch.
            if len(done) > _UNITS_AHEAD:
                done.popleft().wait()
        self._device.drain()
        # Only now, because after a failure the queues skip their work but let every event happen.
        try:
            self._device.raise_failure()
            self.activations.finish()
        finally:
            self._device.charge("workspace", -current.call_bytes)
            # Of a pass that failed before backward took them.
            current.products.clear()
            self._device.charge("activations", -current.product_bytes)

    def _enqueue_embed(self, current: StepPass, flat: Tensor) -> None:
        template, part, tokens = self._template, current.layers, current.layers.tokens

        def embed(index: int, span: slice, output_TD: Tensor) -> None:
            parameters = {place.name: place.piece.read(flat) for place in template.places_besides_table}
            parameters[template.table_place.name] = self._table(tokens, flat, by_rows=template.embeds_by_rows)
            noise_1TD = noise_of(current, part, index, template.hidden_size, self._device)
            current.seed(0, part.name_of(index))
            with torch.no_grad(), charged(self._device, 0 if noise_1TD is None else noise_1TD.nbytes):
                hidden_1TD, calls = template.embed(
                    parameters, tokens.row_ids_N[span], tokens.position_ids[index], tokens.boundaries[index], noise_1TD
                )
            output_TD.copy_(hidden_1TD[0])
            # Those of a chunk are made again at each visit of a layer: all together they would grow with the row.
            if tokens.chunks[index] is None:
                current.calls[index] = calls
                num_bytes = call_bytes(calls)
                self._device.charge("workspace", num_bytes)
                current.call_bytes += num_bytes

        for index, span in enumerate(tokens.spans):
            output_TD = self.activations.before_embedding(index)
            self._device.compute.submit(partial(embed, index, span, output_TD), label="forward 0")
            self.activations.after_forward(EMBEDDING, index)

    def _enqueue_layer(self, current: StepPass, layer: int, flat: Tensor) -> None:
        if self._paged.has(layer):
            self._paged.enqueue_forward(current, layer, flat)
            return
        template, activations, part = self._template, self.activations, current.layers
        visit, norms = self._fp8_visit(layer, for_backward=False), VisitNorms(template, layer)

        def forward(index: int, input_TD: Tensor, output_TD: Tensor, kept: KeptOutput | None) -> None:
            parameters = norms.beside({place.name: place.piece.read(flat) for place in template.places[layer + 1]})
            hidden_1TD = input_TD[None]
            current.seed(layer + 1, part.name_of(index))
            if part.tokens.chunks[index] is not None:
                maps = _casting_maps(parameters, visit)
                with torch.no_grad(), self._chunk_call(part, layer, index, kept) as call:
                    output_1TD = template.layer(layer, parameters, hidden_1TD, call, maps)
            elif compiled := self._compiled.serve(layer, call := current.calls[index][layer], hidden_1TD.shape[1]):
                output_1TD, products = compiled.forward(
                    parameters, hidden_1TD, visit.of(parameters), keeps=keeps_products
                )
                self._keep(current, layer, index, products)
            else:
                maps = _casting_maps(parameters, visit)
                with torch.no_grad():
                    output_1TD = template.layer(layer, parameters, hidden_1TD, call, maps)
            output_TD.copy_(output_1TD[0])

        # Only a training step has a backward.
        has_backward = current.key is not None and layer + 1 >= self._first_trained
        keeps_products = has_backward and layer >= template.num_layers - self._residency.product_layers
        for index, chunk in enumerate(part.tokens.chunks):
            input_TD, output_TD = activations.before_forward(layer, index)
            kept = None
            if self._keys is not None and chunk is not None:
                kept = self._keys.before_forward(layer, chunk)
            work = partial(forward, index, input_TD, output_TD, kept)
            self._device.compute.submit(work, label=f"forward {layer + 1}")
            activations.after_forward(layer, index)
            if self._keys is not None and chunk is not None:
                self._keys.after_forward(layer, chunk)

    def _enqueue_layer_backward(self, current: StepPass, layer: int, flat: Tensor) -> None:
        if self._paged.has(layer):
            self._paged.enqueue_backward(current, layer, flat, is_last=layer + 1 == self._first_trained)
            return
        template, activations, part = self._template, self.activations, current.layers
        unit = self._sink.open(layer + 1)
        visit, norms = self._fp8_visit(layer, for_backward=True), VisitNorms(template, layer)
        is_last = layer + 1 == self._first_trained

        def backward(
            index: int,
            input_TD: Tensor,
            gradient_TD: Tensor,
            gradients: UnitGradients | None,
            attended: KeptOutput | None,
        ) -> None:
            # `data`, not `detach`: other tokens of the same block may be on their way in, which autograd would take for
            # a change here.
            hidden_1TD = input_TD[None].data
            is_chunk = part.tokens.chunks[index] is not None
            if not is_chunk and (
                compiled := self._compiled.serve(layer, current.calls[index][layer], len(gradient_TD))
            ):
                parameters = norms.beside({place.name: place.piece.read(flat) for place in template.places[layer + 1]})
                kept = current.products.pop((layer, index), [])
                self._charge_products(current, -_num_bytes(kept))
                casts = visit.of(parameters)
                gradient_TD.copy_(
                    compiled.backward(parameters, hidden_1TD, gradient_TD[None], gradients, casts, kept)[0]
                )
                return
            hidden_1TD.requires_grad_(not is_last)
            leaves, maps = unit_leaves(template.places[layer + 1], flat, gradients, visit)
            # As in forward, so that the recompute draws the same dropout masks.
            current.seed(layer + 1, part.name_of(index))
            key = ("layer", template.layer_kinds[layer], is_last, is_chunk, hidden_1TD.shape[1])
            call_of: AbstractContextManager[LayerCall] = (
                self._chunk_call(part, layer, index, attended) if is_chunk else nullcontext(current.calls[index][layer])
            )
            with call_of as call, self._device.workspace(key):
                output_1TD = template.layer_for_gradients(layer, norms.beside(leaves), hidden_1TD, call, maps)
                torch.autograd.backward(output_1TD, gradient_TD[None])
            if hidden_1TD.grad is not None:
                gradient_TD.copy_(hidden_1TD.grad[0])

        def measure(squares_L: Tensor) -> None:
            if unit is not None:
                squares_L[layer] = unit.lanes[0].square_sum()

        for lane in range(len(part.tokens.lanes)):
            gradients = None if unit is None else unit.lanes[lane]
            for index in part.tokens.backward_order(lane):
                states, attended = activations.before_backward(layer, index), None
                chunk = part.tokens.chunks[index]
                if self._keys is not None and chunk is not None:
                    attended = self._keys.before_backward(layer, chunk)
                work = partial(backward, index, *states, gradients, attended)
                self._device.compute.submit(work, label=f"backward {layer + 1}")
                if index == 0 and current.first_squares_L is not None:
                    self._device.compute.submit(
                        partial(measure, current.first_squares_L), label=f"backward {layer + 1}"
                    )
                # Per micro-batch, so that the input two layers below comes back while the next micro-batch computes.
                activations.after_backward(layer, index)
                if self._keys is not None and chunk is not None:
                    self._keys.after_backward(layer)
            if unit is not None:
                unit.close(lane)
        self._sink.send(layer + 1)

    def _enqueue_embed_backward(self, current: StepPass, flat: Tensor) -> None:
        template, sink, activations, part = self._template, self._sink, self.activations, current.edges
        tokens = part.tokens
        padding_rows = [] if template.padding_id is None else (tokens.rows_R == template.padding_id).nonzero().tolist()
        # As nn.Embedding does, whose padding_idx the template removed: the token of padding gets no gradient.
        padding_row = padding_rows[0][0] if padding_rows else -1
        has_table = template.table_place.has_gradient
        # In a step of one lane, a tied table's gradient holds the head's part already, and that is of all rows.
        by_rows = template.embeds_by_rows and not (template.tied and self._owned_rows is None)
        rows_R = tokens.rows_R if by_rows else None
        unit = sink.open(0, rows_R)
        assert unit is not None, "backward comes here only for what is trained"

        def backward(index: int, gradient_TD: Tensor, gradients: UnitGradients) -> None:
            leaves, maps = unit_leaves(template.places_besides_table, flat, gradients)
            row_ids_T = tokens.row_ids_N[tokens.spans[index]]
            # A row for each token: a gradient of the whole table, once per micro-batch, would take longer than all the
            # rest of this.
            weight_TD = self._table(tokens, flat, by_rows=template.embeds_by_rows)[row_ids_T].requires_grad_(has_table)
            leaves[template.table_place.name] = weight_TD
            noise_1TD = noise_of(current, part, index, template.hidden_size, self._device)
            current.seed(0, part.name_of(index))
            with self._device.workspace(("embedding", len(gradient_TD))):
                own_rows_T = torch.arange(row_ids_T.numel(), device=row_ids_T.device)
                with maps:
                    hidden_1TD, _ = template.embed(leaves, own_rows_T, tokens.position_ids[index], noise_1TD=noise_1TD)
                torch.autograd.backward(hidden_1TD, gradient_TD[None])
            # Not by a hook: other parameters of the unit may still read what came in.
            if weight_TD.grad is not None:
                gradient_TD.copy_(weight_TD.grad)

        def add_up(span: slice, gradient_TD: Tensor, table: Tensor) -> None:
            sink.reached.update(template.table_place.stored_names)
            # In fp32, because a common token is added thousands of times. By the backward of nn.Embedding, which adds
            # in the same order every time on cuda too; index_add_ with repeated rows does not.
            gradient_RD = torch.ops.aten.embedding_dense_backward(
                gradient_TD.float(),
                tokens.row_ids_N[span],
                tokens.rows_R.numel(),
                padding_row,
                False,
            )
            if by_rows or not template.embeds_by_rows:
                table.add_(gradient_RD)
            else:
                # Rows are distinct, so that no two additions meet and the result is the same in any order.
                table.index_add_(0, tokens.placed_rows_R, gradient_RD)

        activations.before_embedding_backward()
        for lane, numbers in enumerate(tokens.lanes):
            gradients = unit.lanes[lane]
            sink.start_table(gradients, rows_R)
            for visit in activations.edge_visits(numbers, tokens.spans, "embedding"):
                first, end = visit.tokens.start, visit.tokens.stop
                for index in visit.numbers:
                    span = tokens.spans[index]
                    gradient_TD = visit.gradient[span.start - first : span.stop - first]
                    self._device.compute.submit(partial(backward, index, gradient_TD, gradients), label="backward 0")
                if has_table:
                    table = self._table(tokens, gradients.flat, by_rows=by_rows)
                    for start in range(first, end, EMBEDDING_GRADIENT_TOKENS):
                        span = slice(start, min(start + EMBEDDING_GRADIENT_TOKENS, end))
                        work = partial(add_up, span, visit.gradient[span.start - first : span.stop - first], table)
                        self._device.compute.submit(work, label="backward 0")
            unit.close(lane)
        sink.send(0, rows_R)

    @contextmanager
    def _chunk_call(self, part: PassTokens, layer: int, index: int, kept: KeptOutput | None) -> Iterator[LayerCall]:
        """The call of a layer on a chunk, with what is kept of the row, on the device's account while it runs."""
        tokens, template = part.tokens, self._template
        chunk, boundaries = tokens.chunks[index], tokens.boundaries[index]
        assert self._keys is not None and chunk is not None and template.own_attention is not None
        calls = template.calls_of(tokens.position_ids[index], boundaries, self._device.compute_dtype)
        with charged(self._device, call_bytes(calls, but=tokens.position_ids[index])):
            yield template.own_attention.with_kept(layer, calls[layer], self._keys.row(layer, chunk, boundaries, kept))

    def _keep(self, current: StepPass, layer: int, index: int, products: list[Tensor]) -> None:
        """Keep a layer's products of a micro-batch, where there is room; else backward computes them again."""
        num_bytes = _num_bytes(products)
        if products and current.product_bytes + num_bytes <= self._residency.product_bytes:
            current.products[layer, index] = products
            self._charge_products(current, num_bytes)

    def _charge_products(self, current: StepPass, num_bytes: int) -> None:
        self._device.charge("activations", num_bytes)
        current.product_bytes += num_bytes

    def _fp8_visit(self, layer: int, *, for_backward: bool) -> Fp8Visit:
        return Fp8Visit(self._template.places[layer + 1], self._recipe.matmul, for_backward=for_backward)

    def _table(self, tokens: StepTokens, flat: Tensor, *, by_rows: bool) -> Tensor:
        """The embedding table in a flat buffer: the rows of these tokens one after the other, or all."""
        if not by_rows:
            return self._template.table_place.piece.read(flat)
        hidden_size = self._template.hidden_size
        return flat[: tokens.rows_R.numel() * hidden_size].view(-1, hidden_size)


def _casting_maps(parameters: Mapping[str, Tensor], visit: Fp8Visit) -> LinearMaps | None:
    """How the maps of a layer without gradients are computed; None where all are in the compute dtype."""
    casted = [(parameters[name], LinearMap(cast=cast)) for name, cast in visit.of(parameters).items()]
    return LinearMaps(casted) if casted else None


def _num_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)
