"""A trainer whose steps are called in parts: gradients of several calls add up in host memory, and a further call makes
the step.

Shapes: R = rows of the embedding with a gradient, D = hidden size.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from horizon_server.engine.micro_batch import MicroBatch, refused
from horizon_server.engine.objectives import StepObjective
from horizon_server.engine.optimizer import clip_coefficient, global_norm
from horizon_server.engine.step_pass import StepKey
from horizon_server.engine.trainer import Trainer
from horizon_server.figures import StepFigures, overlap_ratio
from horizon_server.store.adamw import AdamWStep, RowGradient, sum_squares


@dataclass(frozen=True, kw_only=True)
class Computed:
    """What a call found: the objective's loss, the log-probability of every supervised token of each row, and what the
    objective reports besides.

    Shapes: [supervised tokens of the row] each, fp32, on the CPU.
    """

    loss: float
    logprobs: tuple[Tensor, ...]
    figures: dict[str, float]


@dataclass(kw_only=True)
class _Sum:
    """What the calls since the last step have added up."""

    num_calls: int = 0
    loss: float = 0.0
    num_tokens: int = 0
    model_flops: float = 0.0
    duration_s: float = 0.0
    reached: set[str] = field(default_factory=set)
    rows: RowGradient | None = None
    square_sums: Tensor | None = None
    figures: dict[str, float] = field(default_factory=dict)


class CalledTrainer(Trainer):
    """Thread: one driving thread. On one device, in one lane, with fp32 gradients in a plane (`Execution.adds_up`)."""

    def __init__(self, *of_trainer: Any, **how: Any) -> None:
        """As `Trainer`."""
        super().__init__(*of_trainer, **how)
        assert self._execution.adds_up and self._ranks.is_alone, "planned for calls that add up"
        self._sum = _Sum()

    def forward(self, micro_batches: Sequence[MicroBatch], objective: StepObjective) -> Computed:
        """The objective's loss, and the log-probabilities that it is of, without dropout; nothing changes.

        Raises:
            InvalidData: as `accumulate`.
        """
        logprobs, _ = self.evaluate_tokens(micro_batches)
        objective.check(self._checked_rows(micro_batches))
        logprobs_S = torch.cat(logprobs)
        loss, _ = objective(logprobs_S)
        return Computed(loss=float(loss), logprobs=tuple(logprobs), figures=objective.figures(logprobs_S))

    def accumulate(self, micro_batches: Sequence[MicroBatch], objective: StepObjective, *, key: int) -> Computed:
        """As `forward`, with dropout, and add the loss's gradient to those of the calls since the last `apply`, in fp32
        and in their order. `key` names the call, for what dropout and noise draw.

        Raises:
            InvalidData: the rows are not for this model, or have no trained token, or the objective is not for them;
                nothing has been touched.
            DoesNotFit: the call needs more device memory than its limit.
        """
        start_s = time.perf_counter()
        self._take_device()
        rows = self._checked_rows(micro_batches)
        objective.check(rows)
        parts, total = self._micro_batches(rows), self._sum
        step_key = StepKey(seed=self._recipe.seed, step=key)
        loss = self._forward_backward.gradients(parts, step_key, objective, adds=total.num_calls > 0)
        logprobs_S = self._forward_backward.logprobs_S
        assert logprobs_S is not None, "the objectives of calls look at log-probabilities"
        total.num_calls += 1
        total.loss += loss
        total.num_tokens += sum(row.num_tokens for row in rows)
        total.model_flops += self._flops.of([length for row in rows for length in row.document_lengths])
        total.reached |= self._sink.all_reached()
        if self._sink.row_gradient is not None:
            total.rows = _added(total.rows, self._sink.row_gradient)
        # Of several calls it is taken from their sum.
        total.square_sums = self._sink.square_sums if total.num_calls == 1 else None
        total.figures = objective.figures(logprobs_S)
        total.duration_s += time.perf_counter() - start_s
        sizes = [row.num_targets for row in micro_batches]
        return Computed(loss=loss, logprobs=tuple(torch.split(logprobs_S, sizes)), figures=total.figures)

    def apply(
        self,
        *,
        learning_rate: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        max_grad_norm: float | None,
    ) -> StepFigures:
        """One step of AdamW with the gradients that were added up; they are zero after it. When it returns, the update
        is under way. Where the loss or a gradient is not finite, no weight changes.

        Raises:
            InvalidData: there are no gradients.
        """
        total = self._sum
        if not total.num_calls:
            raise refused("optim_step", "has no gradients to make a step with; call forward_backward before it")
        start_s = time.perf_counter()
        self._optimizer.queue.record().wait()
        self._device.raise_failure()
        grad_norm = global_norm(self._square_sums(total))
        is_finite = math.isfinite(total.loss) and math.isfinite(grad_norm)
        self.step += 1
        self._num_updates += is_finite
        self._num_skipped += not is_finite
        self._num_skipped_in_a_row = 0 if is_finite else self._num_skipped_in_a_row + 1
        figures = StepFigures(
            step=self.step,
            loss=total.loss,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            num_tokens=total.num_tokens,
            duration_s=total.duration_s + time.perf_counter() - start_s,
            model_flops=total.model_flops,
            method_figures=total.figures,
            skipped="" if is_finite else "non_finite_gradient",
        )
        if self.on_update is not None:
            text = self.on_update(figures, self._state())
            self._store.generations.keep(text, generation=self._optimizer.generation + is_finite)
        if is_finite:
            hyper = AdamWStep(
                step=self._num_updates,
                learning_rate=learning_rate,
                beta1=betas[0],
                beta2=betas[1],
                eps=eps,
                weight_decay=weight_decay,
                grad_scale=clip_coefficient(grad_norm, max_grad_norm),
            )
            self._optimizer.submit(hyper, total.reached, total.rows)
        self._sum = _Sum()
        use = self._device.take_use()
        on_device, on_host = dict(self._device.peak_bytes()), dict(self._device.host_peak_bytes())
        return replace(
            figures,
            **use.of_queues,
            duration_s=total.duration_s + time.perf_counter() - start_s,
            overlap_ratio=overlap_ratio([use.h2d, use.d2h]),
            device_memory_bytes=on_device,
            host_memory_bytes={**self._store.host_bytes(), **on_host},
        )

    def reload(self, write: Callable[[], dict[str, Any] | None]) -> None:
        """Have `write` give the store other weights, which counts as a step. It returns the state of the trainer that
        they belong to; None where the moments are new. Gradients are zero after it."""
        self.flush()
        self._sum = _Sum()
        found: list[dict[str, Any] | None] = []
        self._optimizer.replace(lambda: found.append(write()))
        self._stream.forget()
        self.step += 1
        self._num_updates = 0 if found[0] is None else int(found[0]["num_updates"])
        self._num_skipped_in_a_row = 0

    def _square_sums(self, total: _Sum) -> Tensor:
        """Those of the sum of all calls, by unit. Shapes: [units], fp64."""
        if total.square_sums is not None:
            return total.square_sums
        sums = []
        for unit in self._template.layout.units:
            value = 0.0
            if unit.trained_elements:
                rows = total.rows if unit.index == 0 else None
                plane = self._store.unit(unit.index, "grad") if rows is None else rows.values_RD.view(-1)
                value = sum_squares(plane).value
            sums.append(value)
        return torch.tensor(sums, dtype=torch.float64)


def _added(before: RowGradient | None, new: RowGradient) -> RowGradient:
    """The sum of two gradients of rows, in memory of its own."""
    if before is None:
        return RowGradient(rows_R=new.rows_R.clone(), values_RD=new.values_RD.clone())
    rows_R = torch.unique(torch.cat([before.rows_R, new.rows_R]))
    values_RD = new.values_RD.new_zeros(rows_R.numel(), new.values_RD.shape[1])
    values_RD[torch.searchsorted(rows_R, before.rows_R)] = before.values_RD
    values_RD.index_add_(0, torch.searchsorted(rows_R, new.rows_R), new.values_RD)
    return RowGradient(rows_R=rows_R, values_RD=values_RD)
