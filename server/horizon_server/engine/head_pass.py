"""The head's part of a step: the last hidden states become loss and gradient, a chunk of supervised tokens at a time.

Cross-entropy, weighted or not, needs each chunk once: its logits become their own gradient, and where the loss is a
sum, the log-probabilities come with it. Any other objective needs the log-probabilities of all tokens before it knows
the gradient of any, so the chunks run twice: forward for the log-probabilities, of which one number per token stays,
then again for the gradients, now that every token has its coefficient. The head's weights are on the device all the
while, so nothing more crosses the link, and no more logits live at a time.

Shapes: S = supervised tokens of a chunk, D = hidden size, V = vocabulary.
Thread: methods are called by the driving thread; they only queue work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from horizon_server.engine.activations import Activations, EdgeVisit
from horizon_server.engine.cross_entropy import chunk_loss, log_probabilities, num_correct, write_gradient
from horizon_server.engine.device.protocol import Device
from horizon_server.engine.gradient_sink import GradientSink
from horizon_server.engine.leaves import unit_leaves
from horizon_server.engine.ranks import ALONE, Ranks
from horizon_server.engine.step_pass import Chunk, StepPass, charged
from horizon_server.engine.template import Template
from horizon_server.engine.unit_gradients import UnitGradients
from horizon_server.figures import CollectiveKind

WriteGradient = Callable[[Tensor, Tensor], None]
"""Writes the gradient of a chunk's logits: from the logits, to the second tensor, which may be the first."""


class HeadPass:
    """Queues the head's work of a pass on what the last layer wrote, which is in `activations`; gradients and loss go
    to `sink`. `label_smoothing` is that of the mean cross-entropy of training steps.
    """

    def __init__(
        self,
        template: Template,
        device: Device,
        sink: GradientSink,
        activations: Activations,
        *,
        label_smoothing: float,
        ranks: Ranks = ALONE,
    ) -> None:
        self._ranks = ranks
        self._template, self._device, self._sink, self._activations = template, device, sink, activations
        self._label_smoothing = label_smoothing
        self._unit_index = template.layout.units[-1].index
        self._has_backward = template.layout.first_trained_unit < self._unit_index

    def enqueue_loss(self, current: StepPass, flat: Tensor) -> None:
        """The mean cross-entropy, without gradients."""
        tokens = current.edges.tokens

        def head(visit: EdgeVisit, chunk: Chunk) -> None:
            logits_SV = self._logits(current, visit, flat, chunk)
            targets_S = tokens.targets_S[chunk.tokens]
            if current.num_correct is not None:
                current.num_correct += num_correct(logits_SV, targets_S)
            current.loss[chunk.lane] += chunk_loss(logits_SV, targets_S, divisor=current.divisor)

        self._activations.before_head()
        for visit, chunk in self._chunks(current):
            self._device.compute.submit(partial(head, visit, chunk), label="head loss")
        self._sink.send_loss(current.loss)

    def enqueue_log_probabilities(self, current: StepPass, flat: Tensor) -> None:
        """Each supervised token's log-probability, into `logprobs_S`."""
        self._activations.before_head()
        self._enqueue_log_probabilities(current, flat)

    def enqueue_gradients(self, current: StepPass, flat: Tensor) -> None:
        """Loss and gradients, of the cross-entropy or of the objective that the pass has."""
        tokens, activations, compute = current.edges.tokens, self._activations, self._device.compute
        unit = self._sink.open(self._unit_index)
        coefficients_S = torch.empty(0)

        def cross_entropy(chunk: Chunk, logits_SV: Tensor, gradient_SV: Tensor) -> None:
            logprobs_S = None if current.logprobs_S is None else current.logprobs_S[chunk.tokens]
            current.loss[chunk.lane] += chunk_loss(
                logits_SV,
                tokens.targets_S[chunk.tokens],
                divisor=current.divisor,
                weights_S=None if current.weights_S is None else current.weights_S[chunk.tokens],
                gradient_SV=gradient_SV,
                logprobs_S=logprobs_S,
                smoothing=self._label_smoothing if logprobs_S is None else 0.0,
            )

        def weighted(chunk: Chunk, logits_SV: Tensor, gradient_SV: Tensor) -> None:
            write_gradient(logits_SV, tokens.targets_S[chunk.tokens], coefficients_S[chunk.tokens], gradient_SV)

        def ask() -> None:
            nonlocal coefficients_S
            loss, coefficients_S = self._ask(current)
            current.loss[0] += loss

        activations.before_head()
        write = cross_entropy
        if current.runs_twice:
            self._enqueue_log_probabilities(current, flat)
            sizes, rank = current.logprobs_of_ranks, self._ranks.rank
            num_bytes = (sum(sizes) - sizes[rank]) * torch.float32.itemsize
            collective: CollectiveKind | None = None if self._ranks.is_alone else "numbers"
            compute.submit(ask, num_bytes=num_bytes, label="objective", collective=collective)
            write = weighted
        for lane, numbers in enumerate(tokens.lanes):
            gradients = None if unit is None else unit.lanes[lane]
            for visit in activations.edge_visits(numbers, tokens.spans, "head"):
                # Tokens without a target get no gradient from the head, but backward reads theirs.
                compute.submit(visit.gradient.zero_, label="zero hidden gradient")
                for chunk in current.chunks(lane, visit.numbers):
                    work = partial(self._chunk_gradients, current, visit, flat, gradients, chunk, partial(write, chunk))
                    compute.submit(work, label=f"backward {self._unit_index}")
            if unit is not None:
                unit.close(lane)
        # First, because an update in backward looks at the loss as soon as the first gradient has landed.
        self._sink.send_loss(current.loss)
        self._sink.send(self._unit_index)
        activations.start_backward()

    def _ask(self, current: StepPass) -> tuple[Tensor, Tensor]:
        """The objective's loss, on the first rank, and its derivative by each log-probability of this rank. The first
        rank asks it about the tokens of all, and sends the others their part."""
        ranks, sizes = self._ranks, current.logprobs_of_ranks
        logprobs_S = current.logprobs_S
        assert logprobs_S is not None
        if ranks.is_alone:
            assert current.objective is not None
            return current.objective(logprobs_S)
        padded = logprobs_S.new_zeros(max(sizes))
        padded[: logprobs_S.numel()] = logprobs_S
        of_ranks = ranks.collect(padded, "compute")
        loss = logprobs_S.new_zeros((), dtype=torch.float64)
        found_S = logprobs_S.new_zeros(sum(sizes), dtype=torch.float64)
        if current.objective is not None:
            all_S = torch.cat([of_rank[:size] for of_rank, size in zip(of_ranks, sizes, strict=True)])
            loss, found_S = current.objective(all_S)
            found_S = found_S.contiguous()
        ranks.broadcast(found_S, "compute")
        start = sum(sizes[: ranks.rank])
        return loss, found_S[start : start + sizes[ranks.rank]]

    def _enqueue_log_probabilities(self, current: StepPass, flat: Tensor) -> None:
        def head(visit: EdgeVisit, chunk: Chunk) -> None:
            assert current.logprobs_S is not None
            logits_SV = self._logits(current, visit, flat, chunk)
            targets_S = current.edges.tokens.targets_S[chunk.tokens]
            current.logprobs_S[chunk.tokens] = log_probabilities(logits_SV, targets_S)

        for visit, chunk in self._chunks(current):
            self._device.compute.submit(partial(head, visit, chunk), label="head log-probabilities")

    def _chunks(self, current: StepPass) -> Iterator[tuple[EdgeVisit, Chunk]]:
        """The work of a forward, in order."""
        tokens = current.edges.tokens
        for lane, numbers in enumerate(tokens.lanes):
            for visit in self._activations.edge_visits(numbers, tokens.spans, "loss"):
                for chunk in current.chunks(lane, visit.numbers):
                    yield visit, chunk

    def _logits(self, current: StepPass, visit: EdgeVisit, flat: Tensor, chunk: Chunk) -> Tensor:
        """The logits of a chunk, without a graph. Shapes: [S, V]."""
        parameters = {place.name: place.piece.read(flat) for place in self._template.places[self._unit_index]}
        # Outside training it draws nothing. In training the same as when the chunk runs again for its gradients.
        current.seed(self._unit_index, chunk.name)
        hidden_SD = visit.input[current.edges.tokens.supervised_S[chunk.tokens] - visit.tokens.start]
        with torch.no_grad():
            return self._template.head(parameters, hidden_SD[None])

    def _chunk_gradients(
        self,
        current: StepPass,
        visit: EdgeVisit,
        flat: Tensor,
        gradients: UnitGradients | None,
        chunk: Chunk,
        write: WriteGradient,
    ) -> None:
        """The gradients of a chunk, for the hidden states and the head's weights, from that of the logits, which
        `write` writes."""
        template = self._template
        supervised_S = current.edges.tokens.supervised_S[chunk.tokens] - visit.tokens.start
        hidden_1SD = visit.input[supervised_S][None].requires_grad_(self._has_backward)
        leaves, maps = unit_leaves(template.places[self._unit_index], flat, gradients)
        current.seed(self._unit_index, chunk.name)
        # Autograd does not keep the logits, so that they are not in what `workspace` counts.
        logits_bytes = supervised_S.numel() * template.vocab_size * self._device.compute_dtype.itemsize
        with charged(self._device, logits_bytes), self._device.workspace(("head", supervised_S.numel())):
            with maps:
                logits_SV = template.head(leaves, hidden_1SD)
            values_SV = logits_SV.detach()
            # Before the values change: of a view that has changed, autograd makes another graph, with copies of the
            # whole.
            edge = torch.autograd.graph.get_gradient_edge(logits_SV)
            # The logits' own memory becomes their gradient, unless the model's backward wants them again.
            gradient_SV = torch.empty_like(values_SV) if template.head_keeps_logits else values_SV
            write(values_SV, gradient_SV)
            torch.autograd.backward(edge, gradient_SV)
        if hidden_1SD.grad is not None:
            visit.gradient.index_copy_(0, supervised_S, hidden_1SD.grad[0])
