"""A trainer whose steps are called in parts: gradients of several calls add up in host memory, and a further call makes
the step.

One call and a step have the bits of `Trainer.train_step` with the same objective, rate and clipping.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from horizon_server.engine.micro_batch import MicroBatch, refused
from horizon_server.engine.objectives import StepObjective
from horizon_server.engine.optimizer import global_norm
from horizon_server.engine.step_pass import StepKey
from horizon_server.engine.trainer import Trainer
from horizon_server.figures import StepFigures, overlap_ratio


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
    """What the calls since the last step add up to, besides their gradients."""

    num_calls: int = 0
    loss: float = 0.0
    num_tokens: int = 0
    model_flops: float = 0.0
    duration_s: float = 0.0
    _figures: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Of each, the sum over the supervised tokens of the calls that have it, and their number."""

    def observe(self, figures: Mapping[str, float], num_targets: int) -> None:
        """Take what a call's objective reports, which are means over its supervised tokens."""
        for name, value in figures.items():
            total, size = self._figures.get(name, (0.0, 0))
            self._figures[name] = total + value * num_targets, size + num_targets

    @property
    def figures(self) -> dict[str, float]:
        """Their means over the tokens of all calls."""
        return {name: total / size for name, (total, size) in self._figures.items()}


class CalledTrainer(Trainer):
    """Thread: one driving thread. On one device, in one lane, with a plane of fp32 gradients (`Execution.adds_up`)."""

    def __init__(self, *of_trainer: Any, **how: Any) -> None:
        """As `Trainer`."""
        super().__init__(*of_trainer, **how)
        assert self._execution.adds_up, "planned for calls that add up"
        self._sum = _Sum()

    def forward(self, micro_batches: Sequence[MicroBatch], objective: StepObjective) -> Computed:
        """The objective's loss, and the log-probabilities that it is of, without dropout; nothing changes.

        Raises:
            InvalidData: as `accumulate`.
        """
        objective.check(self._checked_rows(micro_batches))
        logprobs, _ = self.evaluate_tokens(micro_batches)
        logprobs_S = torch.cat(logprobs)
        loss, _ = objective(logprobs_S)
        return Computed(loss=float(loss), logprobs=tuple(logprobs), figures=objective.figures(logprobs_S))

    def accumulate(self, micro_batches: Sequence[MicroBatch], objective: StepObjective, *, key: int) -> Computed:
        """As `forward`, with dropout, and add the loss's gradient to those of the calls since the last `apply`, in fp32
        and in their order. `key` names the call, for what dropout and noise draw.

        When it returns, the gradients are known; the processors may still add them up, which `apply` waits for.

        Raises:
            InvalidData: the rows are not for this model, or have no trained token, or the objective is not for them;
                nothing has been touched.
            DoesNotFit: the call needs more device memory than its limit. After this error and any other, the gradients
                of the calls before are gone too.
        """
        start_s = time.perf_counter()
        self._take_device()
        rows = self._checked_rows(micro_batches)
        objective.check(rows)
        parts, step_key = self._micro_batches(rows), StepKey(seed=self._recipe.seed, step=key)
        # A pass that fails has added some of its gradients.
        total, self._sum = self._sum, _Sum()
        loss = self._forward_backward.gradients(parts, step_key, objective, adds=total.num_calls > 0)
        logprobs_S = self._forward_backward.logprobs_S
        assert logprobs_S is not None, "the objectives of calls have log-probabilities"
        figures = objective.figures(logprobs_S)
        total.num_calls += 1
        total.loss += loss
        total.num_tokens += sum(row.num_tokens for row in rows)
        total.model_flops += self._flops.of([length for row in rows for length in row.document_lengths])
        total.observe(figures, logprobs_S.numel())
        total.duration_s += time.perf_counter() - start_s
        self._sum = total
        logprobs = torch.split(logprobs_S, [row.num_targets for row in micro_batches])
        return Computed(loss=loss, logprobs=logprobs, figures=figures)

    def apply(
        self,
        *,
        learning_rate: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        max_grad_norm: float | None,
    ) -> StepFigures:
        """One step of AdamW with the gradients that were added up, which count as zero after it. When it returns, the
        update is under way. Where the loss or a gradient is not finite, no weight changes, and the figures say so.

        The recipe's optimizer and schedule do not count, and neither does its limit of skipped steps. The loss of the
        figures is the sum of all calls' losses.

        Raises:
            InvalidData: there are no gradients.
        """
        total, self._sum = self._sum, _Sum()
        if not total.num_calls:
            raise refused("optim_step", "has no gradients to make a step with; call forward_backward before it")
        start_s = time.perf_counter()
        self._optimizer.queue.record().wait()
        # Only now, because after a failure the queues skip their work but let every event happen.
        self._device.raise_failure()
        figures = StepFigures(
            step=self.step + 1,
            loss=total.loss,
            grad_norm=global_norm(self._sink.square_sums),
            learning_rate=learning_rate,
            num_tokens=total.num_tokens,
            duration_s=total.duration_s + time.perf_counter() - start_s,
            model_flops=total.model_flops,
            method_figures=total.figures,
        )
        recipe = replace(
            self._recipe,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            max_grad_norm=max_grad_norm,
            max_skipped_steps=0,
        )
        figures = self._update(figures, recipe)
        use = self._device.take_use()
        on_device, on_host = self._memory_bytes(use.compute_s, total.num_tokens)
        return replace(
            figures,
            **use.of_queues,
            drives=self._store.take_traffic(),
            duration_s=total.duration_s + time.perf_counter() - start_s,
            overlap_ratio=overlap_ratio([use.h2d, use.d2h]),
            device_memory_bytes=on_device,
            host_memory_bytes=on_host,
        )

    def reload(self, write: Callable[[], dict[str, Any] | None]) -> None:
        """Have `write` give the store other weights, which counts as a step. It returns the state of the trainer that
        they belong to; None where the moments are new. Gradients count as zero after it."""
        self.flush()
        found: list[dict[str, Any] | None] = []
        self._optimizer.replace(lambda: found.append(write()))
        self._stream.forget()
        self._sum = _Sum()
        self.step += 1
        self._num_updates = 0 if found[0] is None else int(found[0]["num_updates"])
        self._num_skipped_in_a_row = 0
