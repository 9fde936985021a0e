"""Reference log-probabilities that are kept next to a prepared dataset."""

from __future__ import annotations

import contextlib
import errno
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tests.support.tiny_models import VOCAB
from torch import Tensor

from horizon_server.engine.data import PreparedDataset, StepPlan
from horizon_server.engine.micro_batch import MicroBatch
from horizon_server.engine.objectives import DPO, Documents, StepObjective
from horizon_server.engine.references import References
from horizon_server.engine.trainer import Trainer
from horizon_server.errors import DiskFull

if TYPE_CHECKING:
    from tests.support.tiny_models import Engine, Run

LENGTHS = [9, 14, 5, 11, 20, 7, 8, 13]
UNTRAINED = 2


@pytest.fixture
def dataset() -> PreparedDataset:
    """Eight documents, of which one has nothing that is trained."""
    draw = np.random.default_rng(0)
    starts = np.concatenate([[0], np.cumsum(LENGTHS)]).astype(np.int64)
    trained = draw.integers(0, 2, sum(LENGTHS), dtype=np.uint8)
    trained[starts[1:] - 1] = 1
    trained[starts[UNTRAINED] : starts[UNTRAINED + 1]] = 0
    # Of a first token the mask means nothing.
    trained[starts[UNTRAINED]] = 1
    ids = draw.integers(0, VOCAB, sum(LENGTHS), dtype=np.int32)
    return PreparedDataset(input_ids_N=ids, trained_N=trained, document_starts=starts, report={})


@pytest.fixture
def run(engine: Engine) -> Run:
    return engine.start(engine.tiny_model("qwen3"), tokens_per_step=40, micro_batch_tokens=64, lr_schedule="constant")


def plan_of(dataset: PreparedDataset, tokens_per_step: int = 30, **how: Any) -> StepPlan:
    return StepPlan(dataset, sequence_length=24, tokens_per_step=tokens_per_step, **{"epochs": 3, **how})


def test_they_are_the_log_probabilities_of_the_starting_weights_for_any_step(
    dataset: PreparedDataset, run: Run, tmp_path: Path
) -> None:
    plan = plan_of(dataset, 60)
    assert References.open(tmp_path, plan, key="model/float32") is None
    references = References.computed(tmp_path, plan, run.trainer, key="model/float32")
    wanted = [torch.cat(run.trainer.log_probabilities(plan.step(i))) for i in range(plan.num_steps)]

    # What is trained meanwhile does not change them.
    run.trainer.train_step(plan.step(0))
    opened = References.open(tmp_path, plan, key="model/float32")

    assert opened is not None
    for i in range(plan.num_steps):
        documents = [document for row in plan.documents_of(i) for document in row]
        assert torch.equal(opened.of(documents), references.of(documents))
        if plan.epoch_of(i) <= 1:
            assert torch.equal(opened.of(documents), wanted[i]), "in the first epoch's rows, the same bits"
        assert torch.allclose(opened.of(documents), wanted[i], rtol=1e-5, atol=1e-5)
    assert opened.of([UNTRAINED]).numel() == 0
    assert not torch.allclose(torch.cat(run.trainer.log_probabilities(plan.step(0))), wanted[0], rtol=1e-3)


@pytest.mark.parametrize("micro_batch_tokens", [0, 24, 64])
@pytest.mark.parametrize("chunk", [3, 1000])
def test_the_first_steps_forward_gives_the_same_bits(
    chunk: int,
    micro_batch_tokens: int,
    dataset: PreparedDataset,
    engine: Engine,
    tmp_path: Path,
) -> None:
    how: dict[str, Any] = {"tokens_per_step": 60, "micro_batch_tokens": micro_batch_tokens, "head_chunk_tokens": chunk}
    # Of a rate of 0 the weights stay as they are, so every step of the epoch begins like the first.
    run = engine.start(engine.tiny_model("qwen3"), learning_rate=0.0, lr_schedule="constant", **how)
    plan = plan_of(dataset, 60, group_size=2, seed=1)
    references = References.computed(tmp_path, plan, run.trainer, key="model")
    for i, rows in enumerate(plan.first_epoch()):
        documents = [document for row in rows for document in row]
        # Document 2 has nothing that is trained, so its pair has no margin.
        pairs_P2 = torch.arange(len(documents)).view(-1, 2)
        is_whole_P = (torch.tensor(documents).view(-1, 2) != UNTRAINED).all(1)
        micro_batches = plan.step(i)
        objective = StepObjective(
            objective=DPO(),
            documents=Documents.of(micro_batches, pairs_P2=pairs_P2[is_whole_P]),
            references_S=references.of(documents),
        )

        figures = run.trainer.train_step(micro_batches, objective)

        assert figures.loss == pytest.approx(math.log(2), rel=1e-7)
        for name in ("rewards/margins", "rewards/accuracies", "rewards/chosen", "rewards/rejected"):
            assert figures.method_figures[name] == 0.0, name


def test_another_key_another_dataset_or_a_damaged_file_is_not_taken_for_them(
    dataset: PreparedDataset, run: Run, tmp_path: Path
) -> None:
    plan = plan_of(dataset)
    References.computed(tmp_path, plan, run.trainer, key="model")
    (path,) = tmp_path.iterdir()
    shorter = PreparedDataset(
        input_ids_N=np.zeros(9, dtype=np.int32),
        trained_N=np.ones(9, dtype=np.uint8),
        document_starts=np.array([0, 9], dtype=np.int64),
        report={},
    )

    assert References.open(tmp_path, plan, key="another model") is None
    assert References.open(tmp_path, plan_of(dataset, seed=1), key="model") is None
    assert References.open(tmp_path, plan_of(dataset, epochs=1), key="model") is not None
    assert References.open(tmp_path, plan_of(shorter), key="model") is None
    path.write_bytes(path.read_bytes()[:-4])
    assert References.open(tmp_path, plan, key="model") is None


@pytest.mark.parametrize("stop_at", range(1, 4))
def test_what_was_interrupted_is_continued_with_the_first_missing_document_and_has_the_same_bits(
    dataset: PreparedDataset, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: int
) -> None:
    whole, cut, unfinished = tmp_path / "whole", tmp_path / "cut", tmp_path / "job/references/one"
    whole.mkdir()
    cut.mkdir()
    given: list[list[int]] = []
    log_probabilities = Trainer.log_probabilities

    def record(self: Trainer, rows: list[MicroBatch]) -> list[Tensor]:
        given.append([row.num_tokens for row in rows])
        return log_probabilities(self, rows)

    monkeypatch.setattr(Trainer, "log_probabilities", record)
    plan = plan_of(dataset)
    References.computed(whole, plan, run.trainer, key="model")
    groups, given[:] = list(given), []
    assert len(groups) == 4

    def stop(_num_done: int) -> None:
        if len(given) == stop_at:
            raise KeyboardInterrupt

    done: list[int] = []
    for before in (stop, done.append):
        with contextlib.suppress(KeyboardInterrupt):
            References.computed(
                cut, plan, run.trainer, key="model", before_step=before, unfinished=unfinished, data_digest="data"
            )
    assert given == groups, "each group was computed once"
    assert done[0] > 0
    assert [path.read_bytes() for path in cut.iterdir()] == [path.read_bytes() for path in whole.iterdir()]
    assert list(unfinished.parent.iterdir()) == []


@pytest.mark.parametrize("changed", ["key", "data_digest", "plan"])
def test_what_was_interrupted_with_other_weights_data_or_steps_is_not_continued(
    dataset: PreparedDataset, run: Run, tmp_path: Path, changed: str
) -> None:
    folder, unfinished = tmp_path / "prepared", tmp_path / "references/one"
    folder.mkdir()
    how: dict[str, Any] = {"plan": plan_of(dataset), "key": "model", "data_digest": "data", "unfinished": unfinished}

    def stop(num_done: int) -> None:
        if num_done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        References.computed(folder, trainer=run.trainer, before_step=stop, **how)
    how[changed] = plan_of(dataset, 31) if changed == "plan" else "another"
    done: list[int] = []
    References.computed(folder, trainer=run.trainer, before_step=done.append, **how)
    assert done[0] == 0


def test_what_is_interrupted_leaves_nothing_and_a_full_disk_is_named(
    dataset: PreparedDataset, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    log_probabilities = Trainer.log_probabilities

    def fill_the_disk(self: Trainer, rows: list[MicroBatch]) -> list[Tensor]:
        calls.append(len(rows))
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return log_probabilities(self, rows)

    monkeypatch.setattr(Trainer, "log_probabilities", fill_the_disk)

    with pytest.raises(DiskFull, match="reference log-probabilities"):
        References.computed(tmp_path, plan_of(dataset), run.trainer, key="model")

    assert list(tmp_path.iterdir()) == []
