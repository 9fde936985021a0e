"""The engine's interface: takes one optimizer step from the micro-batches of that step.

Thread: one driving thread per trainer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from horizon_server.engine.attention.adoption import adopt_for_hopper
from horizon_server.engine.attention.implementation import use_deterministic_kernels
from horizon_server.engine.chunk_trial import ChunkTrial
from horizon_server.engine.compiled.layers import CompiledLayers
from horizon_server.engine.device.protocol import Device
from horizon_server.engine.device_states import DeviceStates
from horizon_server.engine.forward_backward import ForwardBackward
from horizon_server.engine.fp8 import check_supported
from horizon_server.engine.gradient_sink import GradientSink
from horizon_server.engine.lane_deal import LaneDeal
from horizon_server.engine.lanes import StepRows, lane_of_each
from horizon_server.engine.layer_stream import LayerStream
from horizon_server.engine.micro_batch import MicroBatch, check_micro_batches, grouped
from horizon_server.engine.noise_scale import EVERY_STEPS, NoiseScale, Part
from horizon_server.engine.objectives import StepObjective
from horizon_server.engine.optimizer import (
    Optimizer,
    adamw_step,
    clip_coefficient,
    global_norm,
    learning_rate_at,
    num_updated_in_backward,
)
from horizon_server.engine.packing_limit import split_row, supports_packing
from horizon_server.engine.paged_experts import Paging
from horizon_server.engine.rank_calls import call_with, given_rows
from horizon_server.engine.ranks import ALONE, Call, Ranks
from horizon_server.engine.step_pass import StepKey
from horizon_server.engine.template import Template
from horizon_server.errors import Diverged
from horizon_server.figures import EvalFigures, StepFigures, overlap_ratio
from horizon_server.planning.flops import FlopsCount
from horizon_server.planning.residency import state_units
from horizon_server.recipe import Recipe
from horizon_server.records.execution import Execution
from horizon_server.store.cpus import available_cpus, update_threads
from horizon_server.store.host_store import HostStore

_STATE_VERSION = 1


class Trainer:
    """Trains the model of `template`, whose weights and moments live in `store`, on `device`, with layers that are
    `compiled` or eager."""

    def __init__(
        self,
        template: Template,
        store: HostStore,
        device: Device,
        recipe: Recipe,
        execution: Execution,
        *,
        num_steps: int,
        compiled: CompiledLayers | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """`num_steps` are those of the whole job, which the schedule of the learning rate spans. Of several `ranks`,
        each has a trainer: the first one is called, the others `follow` it."""
        assert store.layout == template.layout, "store and template share one layout"
        self._recipe, self._execution, self._num_steps = recipe, execution, num_steps
        self._template, self._store, self._device = template, store, device
        template.adapter_scale, template.adapter_dropout = recipe.adapter_scale, recipe.adapter_dropout
        if device.compute_dtype is not torch.float32:
            template.check_dtype(device.compute_dtype)
        computes_on = device.place(torch.zeros(())).device
        if recipe.matmul != "bf16":
            check_supported(computes_on, recipe.matmul)
        use_deterministic_kernels(recipe.deterministic, computes_on)
        self.attention_text = adopt_for_hopper(template, recipe, execution, computes_on)
        """What the job's log says of the kernel that attends; empty where there is nothing to say."""
        # Before anything is copied: memory that is not registered yet takes the detour through staging memory.
        self._with_states = [unit.index for unit in state_units(template.layout, execution.residency)]
        self._page_elements = execution.expert_page_elements
        device.adopt(store, self._with_states, page_elements=self._page_elements)
        template.place_buffers(device.place)
        num_threads = execution.optimizer_threads or update_threads(available_cpus(), device_kind=device.name)
        is_table_trained = template.embeds_by_rows and template.table_place.has_gradient
        table = template.embedding_name if is_table_trained else None
        self._ranks, self._is_together, self._is_released = ranks, False, False
        self._packs: bool | None = None
        self._lane_deal = LaneDeal()
        states = DeviceStates(
            store, device, self._with_states, exact_pieces=template.trained_exact_pieces, num_threads=num_threads
        )
        self._optimizer = Optimizer(store, device, num_threads=num_threads, table=table, ranks=ranks, states=states)
        self._updates_in_backward = store.grad_dtype is None
        assert not self._updates_in_backward or recipe.max_grad_norm is None, "clipping needs the store's grad plane"
        assert not (self._updates_in_backward and ranks.by_layers), "the numbers of layers come at the end of a step"
        self._stream = LayerStream(
            template,
            store,
            device,
            self._optimizer,
            num_slots=execution.num_weight_slots,
            residency=execution.residency,
            ranks=ranks,
            paging=Paging.of(template, self._page_elements),
        )
        self._sink = GradientSink(
            template,
            store,
            device,
            self._optimizer,
            num_slots=execution.num_gradient_slots,
            ranks=ranks,
            num_lanes=execution.lanes,
            wire=torch.bfloat16 if execution.wire == "bfloat16" else torch.float32,
            adds_up=execution.adds_up,
            num_add_threads=num_threads,
            paging=self._stream.paging,
        )
        self._forward_backward = ForwardBackward(
            template,
            device,
            self._stream,
            self._sink,
            recipe,
            execution,
            compiled=compiled or CompiledLayers(template),
            ranks=ranks,
        )
        self._chunk_trial = ChunkTrial(template, device, self._forward_backward.hidden_states, execution.chunk_tokens)
        self._is_released = False
        # Now, so that a job that does not fit fails before its first step.
        share = 1.0 if ranks.by_layers else len(ranks.lanes(execution.lanes)[ranks.rank]) / execution.lanes
        self._forward_backward.activations.reserve(math.ceil(share * recipe.tokens_per_step))
        self._sink.reserve(recipe.tokens_per_step)
        self._flops = FlopsCount(
            template.shapes,
            template.config.to_dict(),
            tied=template.tied,
            embedding_name=template.embedding_parameter,
            layout=template.layout,
        )
        self.on_update: Callable[[StepFigures, dict[str, Any]], str] | None = None
        """Is given what is known of a step before its update begins, and the state after it; returns the text to keep
        with the weights."""
        self._noise_scale = NoiseScale()
        self.step = self._num_updates = self._num_skipped = self._num_skipped_in_a_row = 0

    @property
    def supports_packing(self) -> bool:
        """Whether the model keeps packed documents apart; tested once, on the real weights.

        Where it is False, `train_step` and `evaluate` split packed rows into single documents; where it is True, they
        split rows beyond the template's packing limit.
        """
        # Not by functools, whose lock other ranks' trainers would share where they are threads of one process.
        if self._packs is not None:
            return self._packs
        with self._together(lambda: Call(name="supports_packing")):
            self._take_device()
            answer = supports_packing(
                self._forward_backward.hidden_states,
                vocab_size=self._template.vocab_size,
                compute_dtype=self._device.compute_dtype,
            )
            # The first rank's counts: rounding may differ where the devices do, and all must divide rows alike.
            self._packs = bool(self._ranks.meet([float(answer)])[0, 0])
            # The trial does not count in any step's figures.
            self._device.take_use()
            return self._packs

    def train_step(self, micro_batches: Sequence[MicroBatch], objective: StepObjective | None = None) -> StepFigures:
        """One optimizer step over all micro-batches, which together are the batch. Without an objective it is mean
        cross-entropy.

        When it returns, the gradients are known and the update is under way; it never reads or blocks on it, the next
        step or `flush` does. A step whose loss or gradients are not finite touches nothing.

        A store without a `grad` plane has no room to wait for the last gradient: each unit is updated as its own lands.
        Then a loss that is not finite still touches nothing; if it is finite and a gradient is not, that unit and all
        that backward reaches after it keep their weights, and the report says `partly_non_finite_gradient`.

        Raises:
            InvalidData: the micro-batches are not for this model, or have no trained token, or the objective is not for
                them; nothing has been touched.
            Diverged: this was one skipped step too many in a row.
            DoesNotFit: the step needs more device memory than its limit.
        """
        with self._together(lambda: call_with("train_step", micro_batches, objective)):
            return self._train_step(micro_batches, objective)

    def _train_step(self, micro_batches: Sequence[MicroBatch], objective: StepObjective | None) -> StepFigures:
        start_s = time.perf_counter()
        self._take_device()
        rows = self._checked_rows(micro_batches)
        if objective is not None and self._ranks.leads:
            objective.check(rows)
        learning_rate = learning_rate_at(self.step, self._recipe, num_steps=self._num_steps)
        if self._updates_in_backward:
            # Before backward, whose gradients are updated as they land; clipping is off, so no norm is needed first.
            self._optimizer.begin(adamw_step(self._recipe, learning_rate, step=self._num_updates + 1))
        parts, key = self._micro_batches(rows), StepKey(seed=self._recipe.seed, step=self.step)
        # The noise scale is that of a mean over tokens, weighted or not, which another objective's loss is not.
        is_mean = objective is None or (objective.objective.is_cross_entropy and not objective.objective.is_sum)
        measure = is_mean and self.step % EVERY_STEPS == 0
        loss = self._forward_backward.gradients(parts, key, objective, measure_first=measure)
        if self._forward_backward.first_square is not None:
            weights_S = None if objective is None else objective.weights_S
            self._measure_noise(self._forward_backward.first_square, parts.micro_batches, weights_S)
        figures = StepFigures(
            step=self.step + 1,
            loss=loss,
            grad_norm=global_norm(self._sink.square_sums),
            learning_rate=learning_rate,
            num_tokens=sum(row.num_tokens for row in rows),
            duration_s=time.perf_counter() - start_s,
            model_flops=self._flops.of([length for row in rows for length in row.document_lengths]),
            noise_scale_tokens=self._noise_scale.tokens,
        )
        figures = self._update(figures, self._recipe)
        # While the update runs.
        logprobs_S = self._forward_backward.logprobs_S
        method_figures = {}
        if objective is not None and logprobs_S is not None and self._ranks.leads:
            method_figures = objective.figures(logprobs_S)
        use = self._device.take_use()
        on_device, on_host = self._memory_bytes(use.compute_s, sum(part.num_tokens for part in self._own(parts)))
        return replace(
            figures,
            **use.of_queues,
            ranks=self._ranks.figures(use),
            drives=self._store.take_traffic(),
            method_figures=method_figures,
            duration_s=time.perf_counter() - start_s,
            overlap_ratio=overlap_ratio([use.h2d, use.d2h]),
            device_memory_bytes=on_device,
            host_memory_bytes=on_host,
        )

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> EvalFigures:
        """Mean loss over all supervised tokens, without label smoothing, and their accuracy, with the weights of the
        last step.

        It needs no more memory than training does, and need not wait for the last update: each unit is read after its
        own.

        Raises:
            InvalidData: as `train_step`.
        """
        with self._together(lambda: call_with("evaluate", micro_batches)):
            return self._evaluate(micro_batches)

    def _evaluate(self, micro_batches: Sequence[MicroBatch]) -> EvalFigures:
        start_s = time.perf_counter()
        self._take_device()
        rows = self._checked_rows(micro_batches)
        total, num_targets, num_correct = 0.0, 0, 0
        for group in grouped(rows, (row.num_tokens for row in rows), self._most_tokens):
            group_targets = sum(row.num_targets for row in group)
            # The mean of no token is not a number.
            if group_targets:
                loss, correct = self._forward_backward.loss(self._micro_batches(group))
                total += loss * group_targets
                num_targets, num_correct = num_targets + group_targets, num_correct + correct
        use = self._device.take_use()
        return EvalFigures(
            **use.of_queues,
            eval_loss=total / num_targets,
            num_tokens=sum(row.num_tokens for row in rows),
            num_targets=num_targets,
            num_correct=num_correct,
            duration_s=time.perf_counter() - start_s,
        )

    def log_probabilities(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """The log-probability of every supervised token of each row, with the weights of the last step, without
        dropout.

        What an objective compares with (`StepObjective.references_S`) is this, of the weights before the first step: no
        second model is in memory. Layers are streamed once for as many rows as fit into the memory of a step
        (`Recipe.tokens_per_step`).

        Shapes: [supervised tokens of the row] each, fp32, on the CPU.

        Raises:
            InvalidData: as `train_step`.
        """
        return self.evaluate_tokens(micro_batches)[0]

    def evaluate_tokens(self, micro_batches: Sequence[MicroBatch]) -> tuple[list[Tensor], EvalFigures]:
        """As `log_probabilities`, with the figures of the evaluation that it is. The loss is the mean cross-entropy, as
        in `evaluate`."""
        with self._together(lambda: call_with("evaluate_tokens", micro_batches)):
            return self._evaluate_tokens(micro_batches)

    def _evaluate_tokens(self, micro_batches: Sequence[MicroBatch]) -> tuple[list[Tensor], EvalFigures]:
        start_s = time.perf_counter()
        self._take_device()
        rows = self._checked_rows(micro_batches)
        # A group without a target has nothing for the head to do, and so nothing for the layers.
        parts = [
            self._forward_backward.log_probabilities(self._micro_batches(group))
            for group in grouped(rows, (row.num_tokens for row in rows), self._most_tokens)
            if any(row.num_targets for row in group)
        ]
        logprobs_S = torch.cat(parts)
        # They do not count in any step's figures.
        figures = EvalFigures(
            **self._device.take_use().of_queues,
            eval_loss=-float(logprobs_S.mean(dtype=torch.float64)),
            num_tokens=sum(row.num_tokens for row in rows),
            num_targets=logprobs_S.numel(),
            duration_s=time.perf_counter() - start_s,
        )
        # Rows may have been divided and joined, their tokens' order is the same.
        return list(torch.split(logprobs_S, [row.num_targets for row in micro_batches])), figures

    @property
    def _most_tokens(self) -> int:
        """Of a group that is evaluated at once, no larger than a step, so that an evaluation needs no more memory."""
        capacity = self._forward_backward.activations.capacity_tokens
        # Of several lanes, the groups must not depend on how many of them this rank has room for.
        return self._recipe.tokens_per_step or capacity if self._execution.lanes > 1 else capacity

    def forget_weights(self) -> None:
        """Read all weights from the store again; for a caller that has changed them. Flushes."""
        with self._together(lambda: Call(name="forget_weights")):
            self.flush()
            self._stream.forget()

    def flush(self) -> None:
        """Block until the store holds the result of every step taken, by all ranks; before saving, exporting or
        pausing.

        Raises:
            HorizonError: the first error that a queue of the device met.
        """
        with self._together(lambda: Call(name="flush")):
            self._optimizer.finish().wait()
            # Only now, because after a failure the queues skip their work but let every event happen.
            self._device.raise_failure()
            self._optimizer.send_home()
            self._ranks.meet()

    def state(self) -> dict[str, Any]:
        """What to keep, besides the store's planes, to continue exactly, as JSON values. Flushes."""
        self.flush()
        return self._state()

    def keep(self, text: str) -> None:
        """Keep `text` in the store's memory as what belongs to the weights after the update submitted last."""
        self._store.generations.keep(text, generation=self._optimizer.generation)

    def _state(self) -> dict[str, Any]:
        return {
            "version": _STATE_VERSION,
            "step": self.step,
            "num_updates": self._num_updates,
            "num_skipped": self._num_skipped,
            "num_skipped_in_a_row": self._num_skipped_in_a_row,
            **({"noise_scale": state} if (state := self._noise_scale.state()) else {}),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned; the store must hold the planes of that moment."""
        assert state["version"] == _STATE_VERSION, f"unknown trainer state version {state['version']}"
        with self._together(lambda: Call(name="restore", values={"state": state})):
            self.flush()
            self._stream.forget()
            self.step = int(state["step"])
            self._num_updates = int(state["num_updates"])
            self._num_skipped = int(state["num_skipped"])
            self._num_skipped_in_a_row = int(state["num_skipped_in_a_row"])
            if "noise_scale" in state:
                self._noise_scale.restore(state["noise_scale"])

    def release_device(self) -> None:
        """Free this trainer's memory on the device, for other work, until its next step or evaluation takes it again.

        Between steps. No result depends on it, and the last update in host memory, which stays, may still be under way.
        What the device has updated goes there before; then it raises as `flush`.
        """
        if self._is_released:
            return
        with self._together(lambda: Call(name="release_device")):
            self._device.drain()
            self._is_released = True
            # What is held back for the next pass too: it may be long until then, and a worker that is killed meanwhile
            # leaves whole weights.
            self._optimizer.finish()
            if not self._ranks.is_alone:
                # Other work on the device of one rank may read what others update.
                self.flush()
            self._optimizer.send_home()
            self._optimizer.states.close()
            self._stream.close()
            self._sink.close_slots()
            self._forward_backward.release()
            self._device.release_memory()

    def close(self) -> None:
        """Finish what is under way and free the device's memory. The caller closes the device.

        It does not complain about a failure that `train_step` has already raised.
        """
        with self._together(lambda: Call(name="close")):
            # Work that is still queued would write into freed memory.
            self._device.drain()
            self._optimizer.finish().wait()
            # After a failure, the store's generations say that these units are not up to date.
            with suppress(Exception):
                self._optimizer.send_home()
            self._optimizer.states.close()
            self._stream.close()
            self._sink.close()
            self._forward_backward.close()
        self._ranks.leave()

    def follow(self, others: Mapping[str, Callable[[Call], object]] = MappingProxyType({})) -> None:
        """Do what the first rank's trainer does, until that is closed. On every other rank. `others` are calls that are
        not the trainer's."""
        calls: dict[str, Callable[[Call], object]] = {
            "train_step": lambda call: self.train_step(*given_rows(call)),
            "evaluate": lambda call: self.evaluate(given_rows(call)[0]),
            "evaluate_tokens": lambda call: self.evaluate_tokens(given_rows(call)[0]),
            "supports_packing": lambda call: self.supports_packing,
            "forget_weights": lambda call: self.forget_weights(),
            "flush": lambda call: self.flush(),
            "restore": lambda call: self.restore(call.values["state"]),
            "release_device": lambda call: self.release_device(),
            "close": lambda call: self.close(),
            **others,
        }
        while True:
            call = self._ranks.receive()
            calls[call.name](call)
            if call.name == "close":
                return

    @contextmanager
    def _together(self, make_call: Callable[[], Call]) -> Iterator[None]:
        """Have all ranks do what is in the block; what the block calls of this kind is a part of it. The call is made
        only where there are others."""
        is_first = not self._is_together
        if is_first and self._ranks.leads and not self._ranks.is_alone:
            self._ranks.send(make_call())
        self._is_together = True
        try:
            yield
        finally:
            self._is_together = not is_first

    def _deal(self, measured: list[list[float]]) -> None:
        """Give the ranks lanes by what each has measured in the last step. No bit of a step depends on it."""
        sizes = self._lane_deal.after_step(measured, [len(one) for one in self._ranks.lanes(self._execution.lanes)])
        if sizes is not None:
            # Not later: what the queues hold is of this step.
            self._device.drain()
            self._ranks.deal(sizes)
            self._sink.deal()

    def _own(self, rows: StepRows) -> list[MicroBatch]:
        """The micro-batches that this rank computes."""
        return rows.of(self._ranks.lanes(len(rows.lanes))[self._ranks.rank])

    def _memory_bytes(self, compute_s: float, num_tokens: int) -> tuple[dict[str, int], dict[str, int]]:
        """Peaks by component: of the device that holds the most of each, and of the host memory of all ranks. What this
        rank has computed in the step, and in which time, goes to the others with it."""
        on_device, on_host = dict(self._device.peak_bytes()), dict(self._device.host_peak_bytes())
        gathered = self._ranks.meet([compute_s, float(num_tokens), *on_device.values(), *on_host.values()])
        if self._execution.deals_lanes and not self._ranks.is_alone:
            self._deal(gathered[:, :2].tolist())
        found = gathered[:, 2:]
        most, total = found.amax(0).tolist(), found.sum(0).tolist()
        of_device = {name: int(size) for name, size in zip(on_device, most, strict=False)}
        of_host = {name: int(size) for name, size in zip(on_host, total[len(on_device) :], strict=True)}
        return of_device, {**self._store.host_bytes(), **of_host}

    def _take_device(self) -> None:
        """Have the memory that `release_device` has freed, and on its way what the next update takes from drives."""
        self._optimizer.read_ahead()
        if self._is_released:
            self._device.adopt(self._store, self._with_states, page_elements=self._page_elements)
            self._optimizer.states.open()
            self._stream.open()
            self._sink.open_slots()
            self._forward_backward.open()
            self._is_released = False

    def _update(self, figures: StepFigures, recipe: Recipe) -> StepFigures:
        """Submit the update if all is finite, and count the step. Returns the figures with why it was skipped, if it
        was. Of the recipe, the optimizer's parameters, clipping and `max_skipped_steps` count."""
        trained = [unit.index for unit in self._template.layout.units if unit.trained_elements]
        num_units, num_updated, skipped = len(trained), 0, ""
        loss, grad_norm, hyper = figures.loss, figures.grad_norm, None
        if self._updates_in_backward:
            num_updated = num_updated_in_backward(loss, self._sink.square_sums[trained])
        elif math.isfinite(loss) and math.isfinite(grad_norm):
            grad_scale = clip_coefficient(grad_norm, recipe.max_grad_norm)
            hyper = adamw_step(recipe, figures.learning_rate, step=self._num_updates + 1, grad_scale=grad_scale)
            num_updated = num_units
        if num_updated < num_units:
            skipped = "partly_non_finite_gradient" if num_updated else "non_finite_gradient"
        self.step += 1
        # A skipped step is none for AdamW's bias correction, as a loop that leaves optimizer.step() out would count.
        self._num_updates += num_updated > 0
        self._num_skipped += bool(skipped)
        self._num_skipped_in_a_row = self._num_skipped_in_a_row + 1 if skipped else 0
        figures = replace(figures, skipped=skipped)
        generation = self._optimizer.generation + (hyper is not None)
        if self.on_update is not None:
            # Before the update begins: its units are of no use to a later worker without the state that they belong to.
            self._store.generations.keep(self.on_update(figures, self._state()), generation=generation)
        if hyper is not None:
            self._optimizer.submit(hyper, self._sink.all_reached(), self._sink.row_gradient)
        limit = recipe.max_skipped_steps
        if limit and self._num_skipped_in_a_row >= limit:
            raise Diverged(
                f"{self._num_skipped_in_a_row} steps in a row were skipped up to step {self.step} ({skipped}: the last "
                f"one's loss is {loss:.4g}), so training stops; continue from an earlier checkpoint with a lower "
                "train.learning_rate, or "
                "look for bad rows in the data"
            )
        return figures

    def _measure_noise(
        self, first_square: float, micro_batches: Sequence[MicroBatch], weights_S: Tensor | None
    ) -> None:
        first = Part.of(micro_batches[0].num_targets, weights_S)
        total = Part.of(sum(part.num_targets for part in micro_batches), weights_S)
        if first.weight <= 0:
            return
        # Each micro-batch's loss is a sum over the step's count or weights, and its own mean is wanted.
        self._noise_scale.observe(
            small_square=first_square * (total.weight / first.weight) ** 2,
            small=first,
            big_square=float(self._sink.square_sums[1:-1].sum()),
            big=total,
        )

    def _checked_rows(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """The micro-batches, packed only as far as the model keeps documents independent of each other."""
        template = self._template
        check_micro_batches(
            micro_batches, vocab_size=template.vocab_size, max_document_tokens=template.max_document_tokens
        )
        if all(len(row.document_lengths) == 1 for row in micro_batches):
            # The trial on the weights costs a forward, so it is left out where nothing is packed.
            return list(micro_batches)
        limit = template.packing_limit if self.supports_packing else 0
        return [row for micro_batch in micro_batches for row in split_row(micro_batch, max_tokens=limit)]

    def _micro_batches(self, rows: list[MicroBatch]) -> StepRows:
        """The documents of the rows in lanes of about equal size, and of each lane in micro-batches of up to
        `micro_batch_tokens`, whatever row they came in: short rows are joined, as many products of small matrices take
        longer, and long ones of short documents divided, as they would fall out of the caches."""
        num_lanes = self._execution.lanes
        self._chunk_trial.check(max(row.num_tokens for row in rows))
        if num_lanes == 1:
            return StepRows.single(self._parts(rows))
        # Rows of models that mix documents were taken apart before.
        keeps_rows = self._template.needs_masks or not self._execution.micro_batch_tokens
        pieces = rows if keeps_rows else [piece for row in rows for piece in split_row(row, max_tokens=1)]
        lanes: list[list[MicroBatch]] = [[] for _ in range(num_lanes)]
        for piece, lane in zip(pieces, lane_of_each([piece.num_tokens for piece in pieces], num_lanes), strict=True):
            lanes[lane].append(piece)
        return StepRows(lanes=tuple(tuple(self._parts(lane)) for lane in lanes))

    def _parts(self, rows: list[MicroBatch]) -> list[MicroBatch]:
        template, joined = self._template, self._execution.joined_tokens
        limit = joined if template.packing_limit is None else min(joined, template.packing_limit)
        # Of models with masks over all pairs, which would cost more than larger products save, rows stay as they are.
        if not limit or template.needs_masks or not rows:
            return rows
        parts = split_row(MicroBatch.joined(rows), max_tokens=limit)
        # The trial on the weights comes last, it costs a forward.
        is_same = [part.num_tokens for part in parts] == [row.num_tokens for row in rows]
        return rows if is_same or not self.supports_packing else parts
