"""Whole attempts on data whose targets have weights: what they report, and that they continue bit by bit."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tests.support.worker_attempts import EVALUATED, Daemon, always, assert_same, attempt, result, spec_of

from horizon_server.events import EvalDone, Message, StepDone
from horizon_server.store.prepared import TOKENS_FILE

TRAIN = {"learning_rate": 1e-2, "warmup_steps": 0}


def weigh(folder: Path, weight_of: Callable[[int], float]) -> None:
    """Give each target of the prepared data a weight."""
    file = folder / "prepared" / TOKENS_FILE
    planes = load_file(file)
    num_targets = int(planes["trained"].sum())
    save_file({**planes, "weights": torch.tensor([weight_of(target) for target in range(num_targets)])}, file)


def run(folder: Path, *, resume_at: int | None = None) -> Daemon:
    daemon = Daemon(always)
    outcome = attempt(
        folder, spec_of(**EVALUATED, train=TRAIN, checkpoint={"every_steps": 2}), daemon, resume_at=resume_at
    )
    assert outcome.outcome == "succeeded"
    return daemon


def test_weights_change_what_is_trained_and_not_what_is_evaluated(inputs: Callable[[str], Path]) -> None:
    plain, weighted = inputs("plain"), inputs("weighted")
    weigh(weighted, lambda target: 0.5 + target % 5)

    one, other = run(plain), run(weighted)

    before, after = (daemon.said(EvalDone)[0] for daemon in (one, other))
    assert after.eval_loss == before.eval_loss
    assert after.sets[0].perplexity == math.exp(before.eval_loss)
    assert after.sets[0].accuracy == before.sets[0].accuracy
    losses = [[step.loss for step in daemon.said(StepDone)] for daemon in (one, other)]
    assert all(abs(plain_loss - loss) > 1e-4 for plain_loss, loss in zip(*losses, strict=True))
    assert not any(step.method_figures for step in other.said(StepDone))
    texts = [[line.text for line in daemon.said(Message) if line.text.startswith("data: ")] for daemon in (one, other)]
    said = "; some answers have a weight, so the loss of a step is the weighted mean over its tokens"
    assert [[said in text for text in found] for found in texts] == [[False], [True]]


def test_a_plane_of_ones_gives_every_bit_that_no_plane_gives(inputs: Callable[[str], Path]) -> None:
    plain, ones = inputs("plain"), inputs("ones")
    weigh(ones, lambda _: 1.0)

    one, other = run(plain), run(ones)

    assert [step.loss for step in one.said(StepDone)] == [step.loss for step in other.said(StepDone)]
    assert_same(result(plain, 4), result(ones, 4))


def test_a_weighted_job_continues_bit_by_bit(inputs: Callable[[str], Path]) -> None:
    folder = inputs("job")
    weigh(folder, lambda target: 0.5 + target % 5)
    whole = run(folder)
    straight = result(folder, 4)

    shutil.rmtree(folder / "checkpoints/step-00000004")
    again = run(folder, resume_at=2)

    assert_same(result(folder, 4), straight)
    assert [step.loss for step in again.said(StepDone)] == [step.loss for step in whole.said(StepDone)][2:]
