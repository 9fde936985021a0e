"""One optimizer step's loss and gradients, layer by layer over all its micro-batches.

Forward keeps each layer's input and no graph; the head turns chunks of tokens into loss and gradient; backward recomputes one
layer at a time with local autograd. Weights cross the link twice a step and gradients once, for any number of micro-batches.

Owns the order of the work, the seeds of dropout and the scaling of the loss. Must not know how units travel, what an optimizer does
with gradients, or any architecture.

Shapes: N = tokens of the step, T = tokens of a micro-batch, S = supervised tokens of a chunk, D = hidden size, V = vocabulary,
R = embedding rows in use.
Source: Horizon-LM (arXiv 2602.04816), explicit recomputation with layer-local gradients; layer-major order is ours.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from horizon_server.engine.activations import ActivationPlacement, make_activations
from horizon_server.engine.device.protocol import Device
from horizon_server.engine.gradient_sink import GradientSink
from horizon_server.engine.layer_stream import LayerStream, UnitRequest
from horizon_server.engine.micro_batch import MicroBatch, StepTokens
from horizon_server.engine.template import LayerCall, Place, Template

Enqueue = Callable[[Tensor], None]
Accumulate = Callable[[Tensor], object]


def chunk_loss(logits_SV: Tensor, targets_S: Tensor, *, num_targets_of_step: int) -> Tensor:
    """This chunk's share of the step's mean loss, in fp32. Every target counts: ignored positions were dropped before.

    It is what the plain forward of transformers computes, for any split into micro-batches and chunks. For mixtures of experts that
    forward adds the routers' auxiliary loss only where the config sets `output_router_logits`; such a config is refused.
    """
    # A sum over the step's count, because a mean of the chunks' means would weigh tokens of short chunks more.
    return functional.cross_entropy(logits_SV.float(), targets_S, reduction="sum") / num_targets_of_step


@dataclass(frozen=True, kw_only=True)
class StepKey:
    """A step of a run, by the run's seed and the steps taken before: decides which random numbers dropout draws."""

    seed: int
    step: int

    def seed_of(self, unit_index: int, micro_batch: int) -> int:
        """The seed of a unit's work on a micro-batch (for the head: on a chunk), within 63 bits.

        It is the same when the work runs for the first time, is recomputed in backward, or runs after a resume.
        """
        text = f"{self.seed}/{self.step}/{unit_index}/{micro_batch}"
        # Not hash(), which Python salts differently in every process.
        return int.from_bytes(hashlib.blake2b(text.encode("ascii"), digest_size=8).digest(), "big") >> 1


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
        self._run(
            current,
            [
                (embedding, partial(self._enqueue_embed, current)),
                *((UnitRequest(unit_index=i + 1), partial(self._enqueue_layer_forward, current, i)) for i in layers),
                (self._head_request, partial(self._enqueue_head_gradients, current)),
                *(
                    (UnitRequest(unit_index=i + 1), partial(self._enqueue_layer_backward, current, i))
                    for i in reversed(layers)
                ),
                (embedding, partial(self._enqueue_embed_backward, current)),
            ],
        )
        return self._sink.loss

    def loss(self, micro_batches: Sequence[MicroBatch]) -> float:
        """Mean loss over the supervised tokens, without gradients."""
        current = self._start(micro_batches)
        self._run(
            current,
            [
                (self._embedding_request(current), partial(self._enqueue_embed, current)),
                *(
                    (UnitRequest(unit_index=i + 1), partial(self._enqueue_layer, current, i, 0, 0))
                    for i in range(self._template.num_layers)
                ),
                (self._head_request, partial(self._enqueue_head_loss, current)),
            ],
        )
        return self._sink.loss

    def hidden_states(self, micro_batches: Sequence[MicroBatch]) -> tuple[Tensor, Tensor]:
        """What goes into the first layer and what comes out of the last. Shapes: [N, D] both."""
        current, layers = self._start(micro_batches), range(self._template.num_layers)
        self._run(
            current,
            [
                (self._embedding_request(current), partial(self._enqueue_embed, current)),
                *(
                    (UnitRequest(unit_index=i + 1), partial(self._enqueue_layer, current, i, min(i, 1), 1))
                    for i in layers
                ),
            ],
        )
        # The first layer wrote from 0 to 1 and all others within 1, so that 0 still holds what went in.
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
        # Dropout is for training steps alone; compute is idle between passes, so no work sees the switch.
        self._template.train(key is not None)
        all_rows = None if self._template.embeds_by_rows else self._template.vocab_size
        tokens = StepTokens.of(micro_batches, self._device, num_rows=all_rows)
        self._activations.reserve(tokens.num_tokens)
        # In fp64, because the losses of all chunks of a step add up in it.
        loss = self._device.place(torch.zeros((), dtype=torch.float64))
        return _Pass(tokens=tokens, loss=loss, key=key)

    def _run(self, current: _Pass, program: Sequence[tuple[UnitRequest, Enqueue]]) -> None:
        walk = self._stream.walk([request for request, _ in program])
        for (_, flat), (_, enqueue) in zip(walk, program, strict=True):
            enqueue(flat)
        # Compute waits for the last gradients too, so that a tail of copies shows as exposed time.
        self._device.compute.wait(self._device.d2h.record())
        self._device.compute.record().wait()
        # Only now, because after a failure the queues skip their work but let every event happen.
        self._device.raise_failure()
        self._device.charge("workspace", -current.call_bytes)

    def _enqueue_embed(self, current: _Pass, flat: Tensor) -> None:
        template, tokens = self._template, current.tokens

        def embed(index: int, span: slice) -> None:
            parameters = {place.local_name: place.view(flat) for place in template.places_beside_the_table}
            parameters[template.table_place.local_name] = self._table(current, flat, by_rows=template.embeds_by_rows)
            self._seed(current, 0, index)
            with torch.no_grad():
                hidden_1TD, calls = template.embed(parameters, tokens.row_ids_N[span], tokens.position_ids_N[span])
            self._activations.layer_input(0)[span].copy_(hidden_1TD[0])
            current.calls[index] = calls
            # All layers of a kind get the same masks and tables, which count once.
            storages = [tensor.untyped_storage() for call in calls for tensor in call.tensors()]
            num_bytes = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
            self._device.charge("workspace", num_bytes)
            current.call_bytes += num_bytes

        for index, span in enumerate(tokens.spans):
            self._device.compute.submit(partial(embed, index, span), label="forward 0")

    def _enqueue_layer(self, current: _Pass, layer: int, source: int, output: int, flat: Tensor) -> None:
        for index in range(len(current.tokens.spans)):
            work = partial(self._layer, current, index, layer, source, output, flat)
            self._device.compute.submit(work, label=f"forward {layer + 1}")

    def _enqueue_layer_forward(self, current: _Pass, layer: int, flat: Tensor) -> None:
        for index, span in enumerate(current.tokens.spans):
            # The embedding wrote it, but only a pass with a backward has to keep it.
            if layer == 0:
                self._activations.produced(0, span)
            self._activations.before_write(layer + 1, span)
            work = partial(self._layer, current, index, layer, layer, layer + 1, flat)
            self._device.compute.submit(work, label=f"forward {layer + 1}")
            self._activations.produced(layer + 1, span)

    def _enqueue_head_loss(self, current: _Pass, flat: Tensor) -> None:
        template, tokens = self._template, current.tokens

        def head(chunk: slice) -> None:
            parameters = {p.local_name: p.view(flat) for p in template.places(self._head_request.unit_index)}
            # An evaluation writes all layers' outputs into one place, because no backward wants their inputs.
            hidden_1SD = self._activations.layer_input(0)[tokens.supervised_S[chunk]][None]
            with torch.no_grad():
                logits_SV = template.head(parameters, hidden_1SD)
                current.loss += chunk_loss(logits_SV, tokens.targets_S[chunk], num_targets_of_step=tokens.num_targets)

        for chunk in self._chunks(tokens):
            self._device.compute.submit(partial(head, chunk), label="head loss")
        self._sink.send_loss(current.loss)

    def _enqueue_head_gradients(self, current: _Pass, flat: Tensor) -> None:
        template, tokens, activations = self._template, current.tokens, self._activations
        unit_index = self._head_request.unit_index
        slot = self._sink.open(unit_index)

        def head(chunk: slice) -> None:
            supervised_S = tokens.supervised_S[chunk]
            hidden_1SD = activations.layer_input(template.num_layers)[supervised_S][None].requires_grad_()
            leaves = _leaves(template.places(unit_index), flat, slot.flat, self._sink.reached)
            self._seed(current, unit_index, chunk.start)
            with self._device.workspace(("head", supervised_S.numel())):
                logits_SV = template.head(leaves, hidden_1SD)
                loss = chunk_loss(logits_SV, tokens.targets_S[chunk], num_targets_of_step=tokens.num_targets)
                torch.autograd.backward(loss)
            current.loss += loss.detach()
            assert hidden_1SD.grad is not None
            activations.gradient.index_copy_(0, supervised_S, hidden_1SD.grad[0])

        # Tokens without a target get no gradient from the head, but backward reads theirs.
        self._device.compute.submit(activations.gradient.zero_, label="zero hidden gradient")
        for chunk in self._chunks(tokens):
            self._device.compute.submit(partial(head, chunk), label=f"backward {unit_index}")
        # First, because an update in backward looks at the loss as soon as the first gradient has landed.
        self._sink.send_loss(current.loss)
        self._sink.send(unit_index, slot)
        for span in tokens.spans:
            activations.consumed(template.num_layers, span)

    def _enqueue_layer_backward(self, current: _Pass, layer: int, flat: Tensor) -> None:
        template, activations = self._template, self._activations
        slot = self._sink.open(layer + 1)

        def backward(index: int, span: slice) -> None:
            gradient_TD = activations.gradient[span]
            # `data`, not `detach`: other tokens of the same block may be on their way in, which autograd would take for a change here.
            hidden_1TD = activations.layer_input(layer)[span][None].data.requires_grad_()
            leaves = _leaves(template.places(layer + 1), flat, slot.flat, self._sink.reached)
            # As in forward, so that the recompute draws the same dropout masks.
            self._seed(current, layer + 1, index)
            with self._device.workspace(("layer", template.layer_groups[layer], hidden_1TD.shape[1])):
                output_1TD = template.layer_for_gradients(layer, leaves, hidden_1TD, current.calls[index][layer])
                torch.autograd.backward(output_1TD, gradient_TD[None])
            assert hidden_1TD.grad is not None
            gradient_TD.copy_(hidden_1TD.grad[0])

        for index, span in enumerate(current.tokens.spans):
            activations.await_input(layer, span)
            self._device.compute.submit(partial(backward, index, span), label=f"backward {layer + 1}")
            # Per micro-batch, so that the input two layers below comes back while the next micro-batch computes.
            activations.consumed(layer, span)
        self._sink.send(layer + 1, slot)

    def _enqueue_embed_backward(self, current: _Pass, flat: Tensor) -> None:
        template, sink, tokens = self._template, self._sink, current.tokens
        padding_row = tokens.row_of(template.padding_id)
        slot = sink.open_table() if template.tied else sink.open(0)
        gradient = sink.embedding_part(slot)
        # A tied table's gradient holds the head's part already, and that is of all rows.
        by_rows = template.embeds_by_rows and not template.tied
        table = self._table(current, gradient, by_rows=by_rows)

        def accumulate(gradient_RD: Tensor) -> None:
            if padding_row is not None:
                gradient_RD[padding_row].zero_()
            if by_rows:
                table.add_(gradient_RD)
            else:
                # Rows are distinct, so that no two additions meet and the result is the same in any order.
                table.index_add_(0, tokens.placed_rows_R, gradient_RD.to(table.dtype))

        def backward(index: int, span: slice) -> None:
            leaves = _leaves(template.places_beside_the_table, flat, gradient, sink.reached)
            sink.reached.update(template.table_place.stored_names)
            weight = self._table(current, flat, by_rows=template.embeds_by_rows)
            leaves[template.table_place.local_name] = _leaf(weight, accumulate)
            self._seed(current, 0, index)
            with self._device.workspace(("embedding", span.stop - span.start)):
                hidden_1TD, _ = template.embed(leaves, tokens.row_ids_N[span], tokens.position_ids_N[span])
                torch.autograd.backward(hidden_1TD, self._activations.gradient[span][None])

        for index, span in enumerate(tokens.spans):
            self._device.compute.submit(partial(backward, index, span), label="backward 0")
        if template.tied:
            sink.send_table(slot)
        elif by_rows:
            sink.send_rows(slot, tokens.rows_R)
        else:
            sink.send(0, slot)

    def _chunks(self, tokens: StepTokens) -> Iterator[slice]:
        for start in range(0, tokens.num_targets, self._head_chunk_tokens):
            yield slice(start, start + self._head_chunk_tokens)

    def _table(self, current: _Pass, flat: Tensor, *, by_rows: bool) -> Tensor:
        """The embedding table in a flat buffer: the rows of this pass one after the other, or all."""
        if not by_rows:
            return self._template.table_place.view(flat)
        hidden_size = self._template.hidden_size
        return flat[: current.tokens.rows_R.numel() * hidden_size].view(-1, hidden_size)

    def _layer(self, current: _Pass, index: int, layer: int, source: int, output: int, flat: Tensor) -> None:
        span, places = current.tokens.spans[index], self._template.places(layer + 1)
        parameters = {place.local_name: place.view(flat) for place in places}
        hidden_1TD = self._activations.layer_input(source)[span][None]
        self._seed(current, layer + 1, index)
        with torch.no_grad():
            output_1TD = self._template.layer(layer, parameters, hidden_1TD, current.calls[index][layer])
        self._activations.layer_input(output)[span].copy_(output_1TD[0])

    def _seed(self, current: _Pass, unit_index: int, index: int) -> None:
        """Have the work that follows draw the numbers that are its own, the first time and when it is recomputed."""
        if current.key is not None and self._template.draws_random_numbers:
            self._device.generator.manual_seed(current.key.seed_of(unit_index, index))


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
        # At once and not after backward, so that the gradients of a layer's parameters are never in memory together.
        accumulate(finished.grad)
        finished.grad = None

    leaf.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]
    return leaf
