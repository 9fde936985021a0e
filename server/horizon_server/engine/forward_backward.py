"""One optimizer step's loss and gradients, layer by layer over all its micro-batches.

Forward keeps each layer's input and no graph; the head turns chunks of tokens into loss and gradient; backward recomputes one
layer at a time with local autograd. Weights cross the link twice a step and gradients once, for any number of micro-batches.

Owns the order of the work. Must not know how units travel, what an optimizer does with gradients, or any architecture.

Shapes: N = tokens of the step, T = tokens of a micro-batch, S = supervised tokens of a chunk, D = hidden size, R = embedding rows
in use.
Source: Horizon-LM (arXiv 2602.04816), explicit recomputation with layer-local gradients; layer-major order is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from horizon_server.engine.activations import ActivationPlacement, make_activations
from horizon_server.engine.device.protocol import Device
from horizon_server.engine.gradient_sink import GradientSink
from horizon_server.engine.layer_stream import LayerStream, UnitRequest
from horizon_server.engine.loss import chunk_loss
from horizon_server.engine.micro_batch import MicroBatch
from horizon_server.engine.random_keys import StepKey
from horizon_server.engine.step_tokens import StepTokens
from horizon_server.engine.template import LayerCall, Place, Template

Enqueue = Callable[[Tensor], None]
Accumulate = Callable[[Tensor], object]


@dataclass
class _Pass:
    """What one pass over the units carries along. Thread: after the driver built it, compute's own."""

    tokens: StepTokens
    loss: Tensor
    key: StepKey | None
    calls: dict[int, list[LayerCall]] = field(default_factory=dict)
    call_bytes: int = 0


class ForwardBackward:
    """Drives a step through stream, compute and sink. `head_chunk_tokens` bounds the logits that live at a time.

    Thread: one driving thread; it only queues work and waits at the end.
    """

    def __init__(
        self,
        template: Template,
        device: Device,
        stream: LayerStream,
        sink: GradientSink,
        *,
        head_chunk_tokens: int,
        activation_placement: ActivationPlacement = "device",
    ) -> None:
        self._template, self._device, self._stream, self._sink = template, device, stream, sink
        self._head_chunk_tokens = head_chunk_tokens
        self._activations = make_activations(
            activation_placement, device, num_layers=template.num_layers, hidden_size=template.hidden_size
        )

    @property
    def capacity_tokens(self) -> int:
        """Tokens that fit without growing the device's memory."""
        return self._activations.capacity_tokens

    def reserve(self, num_tokens: int) -> None:
        """Make room for steps of `num_tokens` tokens now. The queues must be idle.

        Raises:
            DoesNotFit: the device's memory limit would be exceeded.
        """
        self._activations.reserve(num_tokens)

    def gradients(self, micro_batches: Sequence[MicroBatch], key: StepKey) -> float:
        """Mean loss over the supervised tokens, with dropout; when it returns, every unit's gradient is on the host."""
        current, layers = self._start(micro_batches, key), range(self._template.num_layers)
        self._sink.start_step()
        embedding = self._embedding_request(current)
        self._drive(
            [
                (embedding, partial(self._enqueue_embed, current)),
                *((UnitRequest(unit_index=i + 1), partial(self._enqueue_layer_forward, current, i)) for i in layers),
                (self._head_request, partial(self._enqueue_head_gradients, current)),
                *(
                    (UnitRequest(unit_index=i + 1), partial(self._enqueue_layer_backward, current, i))
                    for i in reversed(layers)
                ),
                (embedding, partial(self._enqueue_embed_backward, current)),
            ]
        )
        self._finish(current)
        return self._sink.loss

    def loss(self, micro_batches: Sequence[MicroBatch]) -> float:
        """Mean loss over the supervised tokens, without gradients."""
        current = self._start(micro_batches)
        self._drive(
            [
                (self._embedding_request(current), partial(self._enqueue_embed, current)),
                *(
                    (UnitRequest(unit_index=i + 1), partial(self._enqueue_layer, current, i, 0, 0))
                    for i in range(self._template.num_layers)
                ),
                (self._head_request, partial(self._enqueue_head_loss, current)),
            ]
        )
        self._finish(current)
        return self._sink.loss

    def hidden_states(self, micro_batches: Sequence[MicroBatch]) -> tuple[Tensor, Tensor]:
        """What goes into the first layer and what comes out of the last. Shapes: [N, D] both."""
        current, layers = self._start(micro_batches), range(self._template.num_layers)
        self._drive(
            [
                (self._embedding_request(current), partial(self._enqueue_embed, current)),
                *(
                    (UnitRequest(unit_index=i + 1), partial(self._enqueue_layer, current, i, min(i, 1), 1))
                    for i in layers
                ),
            ]
        )
        self._finish(current)
        inputs, outputs = self._activations.layer_input(0), self._activations.layer_input(1)
        return inputs.cpu().clone(), outputs.cpu().clone()

    def close(self) -> None:
        """Free the activations' memory. The queues must be idle."""
        self._activations.close()

    @property
    def _head_request(self) -> UnitRequest:
        return UnitRequest(unit_index=len(self._template.layout.units) - 1)

    def _embedding_request(self, current: _Pass) -> UnitRequest:
        return UnitRequest(unit_index=0, rows_R=current.tokens.rows_R if self._template.embeds_by_rows else None)

    def _start(self, micro_batches: Sequence[MicroBatch], key: StepKey | None = None) -> _Pass:
        self._template.train(key is not None)
        all_rows = None if self._template.embeds_by_rows else self._template.vocab_size
        tokens = StepTokens.of(micro_batches, self._device, num_rows=all_rows)
        self._activations.reserve(tokens.num_tokens)
        # In fp64, because the losses of all chunks of a step add up in it.
        loss = self._device.place(torch.zeros((), dtype=torch.float64))
        return _Pass(tokens=tokens, loss=loss, key=key)

    def _drive(self, program: Sequence[tuple[UnitRequest, Enqueue]]) -> None:
        walk = self._stream.walk([request for request, _ in program])
        for (_, flat), (_, enqueue) in zip(walk, program, strict=True):
            enqueue(flat)

    def _finish(self, current: _Pass) -> None:
        # Compute waits for the last gradients too, so that a tail of copies shows as exposed time.
        self._device.compute.wait(self._device.d2h.record())
        self._device.compute.record().wait()
        self._device.raise_failure()
        self._device.charge("workspace", -current.call_bytes)

    def _enqueue_embed(self, current: _Pass, flat: Tensor) -> None:
        for index in range(len(current.tokens.spans)):
            self._device.compute.submit(partial(self._embed, current, index, flat), label="forward 0")

    def _enqueue_layer(self, current: _Pass, layer: int, source: int, output: int, flat: Tensor) -> None:
        for index in range(len(current.tokens.spans)):
            work = partial(self._layer, current, index, layer, source, output, flat)
            self._device.compute.submit(work, label=f"forward {layer + 1}")

    def _enqueue_layer_forward(self, current: _Pass, layer: int, flat: Tensor) -> None:
        for index, span in enumerate(current.tokens.spans):
            if layer == 0:
                self._activations.produced(0, span)
            self._activations.before_write(layer + 1, span)
            work = partial(self._layer, current, index, layer, layer, layer + 1, flat)
            self._device.compute.submit(work, label=f"forward {layer + 1}")
            self._activations.produced(layer + 1, span)

    def _enqueue_head_loss(self, current: _Pass, flat: Tensor) -> None:
        for chunk in self._chunks(current.tokens):
            self._device.compute.submit(partial(self._head_loss, current, chunk, flat), label="head loss")
        self._sink.send_loss(current.loss)

    def _enqueue_head_gradients(self, current: _Pass, flat: Tensor) -> None:
        unit_index = self._head_request.unit_index
        slot = self._sink.open(unit_index)
        self._device.compute.submit(self._activations.gradient.zero_, label="zero hidden gradient")
        for chunk in self._chunks(current.tokens):
            work = partial(self._head_gradients, current, chunk, flat, slot.flat)
            self._device.compute.submit(work, label=f"backward {unit_index}")
        self._sink.send_loss(current.loss)
        self._sink.send(unit_index, slot)
        for span in current.tokens.spans:
            self._activations.consumed(self._template.num_layers, span)

    def _enqueue_layer_backward(self, current: _Pass, layer: int, flat: Tensor) -> None:
        slot = self._sink.open(layer + 1)
        for index, span in enumerate(current.tokens.spans):
            self._activations.await_input(layer, span)
            work = partial(self._layer_backward, current, index, layer, flat, slot.flat)
            self._device.compute.submit(work, label=f"backward {layer + 1}")
            self._activations.consumed(layer, span)
        self._sink.send(layer + 1, slot)

    def _enqueue_embed_backward(self, current: _Pass, flat: Tensor) -> None:
        template, sink, tokens = self._template, self._sink, current.tokens
        padding_row = tokens.row_of(template.padding_id)
        slot = sink.open_table() if template.tied else sink.open(0)
        gradient = sink.embedding_part(slot)
        by_rows = template.embeds_by_rows and not template.tied
        table = self._rows(current, gradient) if by_rows else template.table_place.view(gradient)
        rows_R = None if by_rows else tokens.placed_rows_R
        accumulate = partial(_add_rows, table, rows_R, padding_row)
        for index in range(len(tokens.spans)):
            work = partial(self._embed_backward, current, index, flat, gradient, accumulate)
            self._device.compute.submit(work, label="backward 0")
        if template.tied:
            sink.send_table(slot)
        elif by_rows:
            sink.send_rows(slot, tokens.rows_R)
        else:
            sink.send(0, slot)

    def _chunks(self, tokens: StepTokens) -> Iterator[slice]:
        for start in range(0, tokens.num_targets, self._head_chunk_tokens):
            yield slice(start, start + self._head_chunk_tokens)

    def _rows(self, current: _Pass, flat: Tensor) -> Tensor:
        hidden_size = self._template.hidden_size
        return flat[: current.tokens.rows_R.numel() * hidden_size].view(-1, hidden_size)

    def _table(self, current: _Pass, flat: Tensor) -> Tensor:
        return self._rows(current, flat) if self._template.embeds_by_rows else self._template.table_place.view(flat)

    def _embed(self, current: _Pass, index: int, flat: Tensor) -> None:
        span, table_place = current.tokens.spans[index], self._template.table_place
        parameters = {place.local_name: place.view(flat) for place in self._template.places_beside_the_table}
        parameters[table_place.local_name] = self._table(current, flat)
        self._seed(current, 0, index)
        with torch.no_grad():
            hidden_1TD, calls = self._template.embed(
                parameters, current.tokens.row_ids_N[span], current.tokens.position_ids_N[span]
            )
        self._activations.layer_input(0)[span].copy_(hidden_1TD[0])
        current.calls[index] = calls
        # All layers of a kind get the same masks and tables, which count once.
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for call in calls for t in call.tensors()
        }
        num_bytes = sum(storages.values())
        self._device.charge("workspace", num_bytes)
        current.call_bytes += num_bytes

    def _layer(self, current: _Pass, index: int, layer: int, source: int, output: int, flat: Tensor) -> None:
        span, places = current.tokens.spans[index], self._template.places(layer + 1)
        parameters = {place.local_name: place.view(flat) for place in places}
        hidden_1TD = self._activations.layer_input(source)[span][None]
        self._seed(current, layer + 1, index)
        with torch.no_grad():
            output_1TD = self._template.layer(layer, parameters, hidden_1TD, current.calls[index][layer])
        self._activations.layer_input(output)[span].copy_(output_1TD[0])

    def _head_loss(self, current: _Pass, chunk: slice, flat: Tensor) -> None:
        tokens, places = current.tokens, self._template.places(self._head_request.unit_index)
        parameters = {place.local_name: place.view(flat) for place in places}
        hidden_1SD = self._activations.layer_input(0)[tokens.supervised_S[chunk]][None]
        with torch.no_grad():
            logits_SV = self._template.head(parameters, hidden_1SD)
            current.loss += chunk_loss(logits_SV, tokens.targets_S[chunk], num_targets_of_step=tokens.num_targets)

    def _head_gradients(self, current: _Pass, chunk: slice, flat: Tensor, gradient: Tensor) -> None:
        tokens, last = current.tokens, self._template.num_layers
        supervised_S = tokens.supervised_S[chunk]
        hidden_1SD = self._activations.layer_input(last)[supervised_S][None].requires_grad_()
        leaves = _leaves(self._template.places(self._head_request.unit_index), flat, gradient, self._sink.reached)
        self._seed(current, self._head_request.unit_index, chunk.start)
        with self._device.workspace(("head", supervised_S.numel())):
            logits_SV = self._template.head(leaves, hidden_1SD)
            loss = chunk_loss(logits_SV, tokens.targets_S[chunk], num_targets_of_step=tokens.num_targets)
            torch.autograd.backward(loss)
        current.loss += loss.detach()
        assert hidden_1SD.grad is not None
        self._activations.gradient.index_copy_(0, supervised_S, hidden_1SD.grad[0])

    def _layer_backward(self, current: _Pass, index: int, layer: int, flat: Tensor, gradient: Tensor) -> None:
        span = current.tokens.spans[index]
        gradient_TD = self._activations.gradient[span]
        # `data`, not `detach`: other tokens of the same block may be on their way in, which autograd would take for a change here.
        hidden_1TD = self._activations.layer_input(layer)[span][None].data.requires_grad_()
        leaves = _leaves(self._template.places(layer + 1), flat, gradient, self._sink.reached)
        # As in forward, so that the recompute draws the same dropout masks.
        self._seed(current, layer + 1, index)
        with self._device.workspace(("layer", self._template.layer_groups[layer], hidden_1TD.shape[1])):
            output_1TD = self._template.layer_for_gradients(layer, leaves, hidden_1TD, current.calls[index][layer])
            torch.autograd.backward(output_1TD, gradient_TD[None])
        assert hidden_1TD.grad is not None
        gradient_TD.copy_(hidden_1TD.grad[0])

    def _seed(self, current: _Pass, unit_index: int, index: int) -> None:
        """Have the work that follows draw the numbers that are its own, the first time and when it is recomputed."""
        if current.key is not None and self._template.draws_random_numbers:
            self._device.generator.manual_seed(current.key.seed_of(unit_index, index))

    def _embed_backward(
        self, current: _Pass, index: int, flat: Tensor, gradient: Tensor, accumulate: Accumulate
    ) -> None:
        span = current.tokens.spans[index]
        leaves = _leaves(self._template.places_beside_the_table, flat, gradient, self._sink.reached)
        self._sink.reached.update(self._template.table_place.stored_names)
        leaves[self._template.table_place.local_name] = _leaf(self._table(current, flat), accumulate)
        self._seed(current, 0, index)
        with self._device.workspace(("embedding", span.stop - span.start)):
            hidden_1TD, _ = self._template.embed(
                leaves, current.tokens.row_ids_N[span], current.tokens.position_ids_N[span]
            )
            torch.autograd.backward(hidden_1TD, self._activations.gradient[span][None])


def _leaves(places: Sequence[Place], flat: Tensor, gradient: Tensor, reached: set[str]) -> dict[str, Tensor]:
    def leaf(place: Place) -> Tensor:
        def accumulate(values: Tensor) -> None:
            place.add(gradient, values)
            reached.update(place.stored_names)

        return _leaf(place.view(flat), accumulate) if place.trained else place.view(flat)

    return {place.local_name: leaf(place) for place in places}


def _leaf(weight: Tensor, accumulate: Accumulate) -> Tensor:
    """A view that autograd differentiates; its gradient goes to `accumulate` and is dropped as soon as it is complete."""
    leaf = weight.detach().requires_grad_()

    def take(finished: Tensor) -> None:
        assert finished.grad is not None
        accumulate(finished.grad)
        finished.grad = None

    leaf.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]
    return leaf


def _add_rows(table: Tensor, rows_R: Tensor | None, padding_row: int | None, gradient_RD: Tensor) -> None:
    if padding_row is not None:
        gradient_RD[padding_row].zero_()
    if rows_R is None:
        table.add_(gradient_RD)
        return
    # Rows are distinct, so that no two additions meet and the result is the same in any order.
    table.index_add_(0, rows_R, gradient_RD.to(table.dtype))
