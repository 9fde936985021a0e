"""Whole attempts of jobs that learn from preferences, labels and samples: what they report, and that they continue bit
by bit."""

from __future__ import annotations

import array
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.drives import drive_folders
from tests.support.orders import CANCEL, STOP
from tests.support.worker_attempts import Daemon, always, assert_same, attempt, result, spec_of, write_inputs
from transformers import AutoModelForCausalLM

from horizon_formats.formats import DataKind
from horizon_server.children.entry import Line
from horizon_server.engine.data import PreparedDataset
from horizon_server.engine.micro_batch import MicroBatch
from horizon_server.engine.trainer import Trainer
from horizon_server.errors import InvalidSpec
from horizon_server.events import EvalDone, Message, ReferencesDone, StepDone, TurnEnded
from horizon_server.store.prepared import DocumentColumns, PreparedFolder
from horizon_server.worker import reference_pass
from horizon_server.worker_link.orders import YIELD

KIND_OF = {
    "dpo": DataKind.PREFERENCE,
    "ipo": DataKind.PREFERENCE,
    "orpo": DataKind.PREFERENCE,
    "simpo": DataKind.PREFERENCE,
    "kto": DataKind.KTO,
    "policy": DataKind.SAMPLES,
}
PAIR_FIGURES = {
    "rewards/chosen",
    "rewards/rejected",
    "rewards/accuracies",
    "rewards/margins",
    "logps/chosen",
    "logps/rejected",
}
KTO_FIGURES = {
    "kl",
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "logps/chosen",
    "logps/rejected",
}
POLICY_FIGURES = {
    "ratio",
    "kl_recorded",
    "kl",
    "clip_ratio/low_mean",
    "clip_ratio/high_mean",
    "clip_ratio/region_mean",
}
FIGURES = {
    "dpo": PAIR_FIGURES,
    "ipo": PAIR_FIGURES,
    "orpo": PAIR_FIGURES | {"nll_loss", "log_odds_ratio", "log_odds_chosen"},
    "simpo": PAIR_FIGURES,
    "kto": KTO_FIGURES,
    "policy": POLICY_FIGURES,
}


def write_data(folder: Path, kind: DataKind) -> None:
    """Sixteen documents of 6 to 9 tokens, the last half of each trained."""
    shutil.rmtree(folder, ignore_errors=True)
    draw = np.random.default_rng(0)
    columns = DocumentColumns()
    for number in range(16):
        length = int(draw.integers(6, 10))
        num_targets = length - 4
        numbers = array.array("f", draw.normal(size=num_targets).tolist())
        columns.add(
            array.array("i", draw.integers(1, 32, length).tolist()),
            b"\0" * 4 + b"\1" * num_targets,
            num_targets,
            label=(-1 if number % 2 else number // 2 % 2) if kind is DataKind.KTO else None,
            old_logprobs=array.array("f", [-3.0] * num_targets) if kind is DataKind.SAMPLES else None,
            advantages=numbers if kind is DataKind.SAMPLES else None,
        )
    with PreparedFolder(folder, with_evaluation=False, kind=kind) as target:
        target.train.add(columns)
        target.publish({"kind": kind})


@pytest.fixture
def inputs(tmp_path: Path) -> Any:
    def make(name: str, method: str) -> Path:
        (tmp_path / name).mkdir()
        write_inputs(tmp_path / name, "llama")
        write_data(tmp_path / name / "prepared", KIND_OF[method])
        return tmp_path / name

    return make


def spec(method: str, **changes: Any) -> Any:
    options = {"policy": {"kl_coefficient": 0.1}} if method == "policy" else {}
    train = {"learning_rate": 1e-2, "warmup_steps": 0, "tokens_per_step": 64, **changes.pop("train", {})}
    more = {"eval_dataset": "e", "eval_every_steps": 2, "checkpoint": {"every_steps": 2}, **options}
    return spec_of(method=method, train=train, **{**more, **changes})


@pytest.mark.parametrize("method", KIND_OF)
def test_a_job_learns_by_its_method_reports_its_figures_and_continues_bit_by_bit(inputs: Any, method: str) -> None:
    folder, daemon = inputs("job", method), Daemon(always)
    assert attempt(folder, spec(method), daemon).outcome == "succeeded"
    straight = result(folder, 4)

    steps, evaluations = daemon.said(StepDone), daemon.said(EvalDone)
    assert [set(step.method_figures) for step in steps] == [FIGURES[method]] * 4
    assert [set(done.method_figures) for done in evaluations] == [FIGURES[method]] * 3
    assert evaluations[-1].eval_loss < evaluations[0].eval_loss
    assert all(math.isfinite(value) for done in evaluations for value in done.method_figures.values())

    shutil.rmtree(folder / "checkpoints/step-00000004")
    again = Daemon(always)
    attempt(folder, spec(method), again, resume_at=2)
    assert_same(result(folder, 4), straight)
    assert again.said(EvalDone)[-1].method_figures == evaluations[-1].method_figures


@pytest.mark.parametrize("method", ["dpo", "kto", "policy"])
def test_a_job_with_states_on_drives_ends_with_the_same_files(inputs: Any, method: str, tmp_path: Path) -> None:
    folders, found = drive_folders(tmp_path), []
    on_drives: dict[str, Any] = {"folders": folders, "span": 1056}
    for name, more in (("memory", {}), ("drives", on_drives)):
        folder = inputs(name, method)
        attempt(folder, spec(method), Daemon(always), **more)
        found.append(result(folder, 4))
    assert_same(*found)


@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_figures_of_an_evaluation_are_those_of_the_formula(inputs: Any, method: str) -> None:
    folder, daemon = inputs("job", method), Daemon(always)
    attempt(folder, spec(method), daemon)
    data = PreparedDataset.open(folder / "prepared")
    sums: list[list[float]] = []
    for weights in (folder / "model", folder / "checkpoints/step-00000004"):
        model: Any = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)
        sums.append([])
        for number in range(16):
            row = data.micro_batch([number])
            logits = model(row.input_ids_T[None]).logits[0].detach()
            is_target = row.labels_T >= 0
            picked = torch.log_softmax(logits.double(), -1).gather(1, row.labels_T.clamp(min=0)[:, None])[:, 0]
            sums[-1].append(float(picked[is_target].sum()))
    gains = torch.tensor(sums[1]) - torch.tensor(sums[0])
    found = daemon.said(EvalDone)[-1]
    if method == "dpo":
        margins = 0.1 * (gains[::2] - gains[1::2])
        expected = {
            "rewards/chosen": 0.1 * gains[::2].mean(),
            "rewards/margins": margins.mean(),
            "rewards/accuracies": (margins > 0).float().mean(),
            "logps/rejected": torch.tensor(sums[1][1::2]).mean(),
        }
        loss = -torch.nn.functional.logsigmoid(margins).mean()
    else:
        kl, labels = gains[1::2].mean().clamp(min=0), torch.arange(8) % 2
        good, bad = gains[::2][labels == 1], gains[::2][labels == 0]
        expected = {"kl": kl, "rewards/chosen": 0.1 * good.mean(), "rewards/rejected": 0.1 * bad.mean()}
        loss = torch.cat([torch.sigmoid(-0.1 * (good - kl)), torch.sigmoid(-0.1 * (kl - bad))]).mean()
    assert found.eval_loss == pytest.approx(float(loss), rel=1e-5)
    for name, value in expected.items():
        assert found.method_figures[name] == pytest.approx(float(value), rel=2e-5, abs=1e-6), name


def reference_files(folder: Path) -> list[Path]:
    return sorted((folder / "prepared").glob("references-*"))


def texts(daemon: Daemon) -> list[str]:
    return [line.text for line in daemon.said(Message)]


def test_reference_log_probabilities_are_computed_once_and_again_where_they_were_deleted(inputs: Any) -> None:
    folder, daemon = inputs("job", "dpo"), Daemon(always)
    attempt(folder, spec("dpo"), daemon)
    # The same data is evaluated too, in the file's order: its rows are others, and so is how their numbers are rounded.
    straight, files = result(folder, 4), reference_files(folder)
    numbers = [file.read_bytes() for file in files]
    assert len(files) == 2
    assert any(text.startswith("reference log-probabilities: 100 %") for text in texts(daemon))

    # Another job on the same data and weights finds them.
    shutil.rmtree(folder / "checkpoints")
    other = Daemon(always)
    attempt(folder, spec("dpo", train={"learning_rate": 1e-4}, checkpoint={"every_steps": 0}), other)
    assert not any("reference" in text for text in texts(other))

    # A resumed one whose file is gone computes the numbers of the starting weights, not of the trained ones.
    shutil.rmtree(folder / "checkpoints")
    attempt(folder, spec("dpo"), Daemon(always))
    shutil.rmtree(folder / "checkpoints/step-00000004")
    for file in files:
        file.unlink()
    again = Daemon(always)
    attempt(folder, spec("dpo"), again, resume_at=2)
    assert any("computed again from the weights that the job started with" in text for text in texts(again))
    assert [path.read_bytes() for path in reference_files(folder)] == numbers
    assert_same(result(folder, 4), straight)


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The lengths of the rows of each step that was computed."""
    found: list[list[int]] = []
    log_probabilities = Trainer.log_probabilities

    def record(self: Trainer, rows: list[MicroBatch]) -> list[torch.Tensor]:
        found.append([row.num_tokens for row in rows])
        return log_probabilities(self, rows)

    monkeypatch.setattr(Trainer, "log_probabilities", record)
    # Progress is reported before each step.
    monkeypatch.setattr(reference_pass, "_REPORTED_PERCENT", 0)
    return found


def unfinished_files(folder: Path) -> list[Path]:
    return sorted((folder / "references").rglob("*"))


def short_groups() -> Any:
    """A job whose data are four steps, as training and as evaluation reads them."""
    return spec("dpo", train={"tokens_per_step": 32})


def test_a_pass_that_was_stopped_is_continued_with_the_same_bits(inputs: Any, groups: list[list[int]]) -> None:
    whole, folder = inputs("whole", "dpo"), inputs("job", "dpo")
    attempt(whole, short_groups(), Daemon(always))
    all_groups, groups[:] = list(groups), []
    assert len(all_groups) == 8

    def stop(line: Line) -> bytes:
        return STOP if isinstance(line, Message) and "reference" in line.text and groups else always(line)

    first = Daemon(stop)
    assert attempt(folder, short_groups(), first).outcome == "stopped"
    assert isinstance(first.lines[-1], TurnEnded)
    assert len(groups) == 2 and not reference_files(folder) and len(unfinished_files(folder)) == 2

    second = Daemon(always)
    assert attempt(folder, short_groups(), second).outcome == "succeeded"
    assert groups == all_groups, "each step was computed once"
    [continues] = [text for text in texts(second) if "continues" in text]
    assert "tokens were computed before this attempt" in continues
    reported = second.said(ReferencesDone)
    assert 0 < reported[0].done_tokens < reported[-1].done_tokens < reported[-1].total_tokens
    percents = [int(text.split(": ")[1].split(" ")[0]) for text in texts(second) if " %" in text]
    assert percents[0] > 0
    assert not unfinished_files(folder)
    assert [path.read_bytes() for path in reference_files(folder)] == [
        path.read_bytes() for path in reference_files(whole)
    ]
    assert_same(result(folder, 4), result(whole, 4))


def test_parts_of_other_weights_or_other_data_are_removed_and_not_used(inputs: Any, groups: list[list[int]]) -> None:
    folder = inputs("job", "dpo")

    def stop(line: Line) -> bytes:
        return STOP if isinstance(line, Message) and "reference" in line.text and groups else always(line)

    attempt(folder, short_groups(), Daemon(stop))
    old = unfinished_files(folder)
    weights = load_file(folder / "model/model.safetensors")
    save_file(
        {name: tensor + 1e-3 for name, tensor in weights.items()}, folder / "model/model.safetensors", {"format": "pt"}
    )
    groups.clear()
    attempt(folder, short_groups(), Daemon(stop))
    new = unfinished_files(folder)
    assert len(groups) == 2 and len(new) == 2 and not set(new) & set(old)

    columns = DocumentColumns()
    columns.add(array.array("i", [1, 2, 3]), b"\0\1\1", 2)
    columns.add(array.array("i", [1, 2, 4]), b"\0\1\1", 2)
    shutil.rmtree(folder / "prepared")
    with PreparedFolder(folder / "prepared", with_evaluation=False, kind=DataKind.PREFERENCE) as target:
        target.train.add(columns)
        target.publish({"kind": DataKind.PREFERENCE})
    last = Daemon(always)
    assert attempt(folder, short_groups(), last).outcome == "succeeded"
    assert not any("continues" in text for text in texts(last))
    assert not unfinished_files(folder)


def test_a_cancellation_ends_the_pass_between_two_groups_and_leaves_nothing(
    inputs: Any, groups: list[list[int]]
) -> None:
    folder = inputs("job", "dpo")

    def cancel(line: Line) -> bytes:
        return CANCEL if isinstance(line, Message) and "reference" in line.text and groups else always(line)

    daemon = Daemon(cancel)
    assert attempt(folder, short_groups(), daemon).outcome == "stopped"
    assert isinstance(daemon.lines[-1], TurnEnded)
    # The order came while the second of eight steps was about to be computed.
    assert len(groups) == 2
    assert not reference_files(folder) and not unfinished_files(folder)
    assert not list((folder / "prepared").glob(".references*"))
    assert not daemon.said(StepDone)
    assert attempt(folder, short_groups(), Daemon(always)).outcome == "succeeded"


def test_a_copy_of_the_weights_under_another_name_finds_what_was_computed(inputs: Any, groups: list[list[int]]) -> None:
    folder = inputs("job", "dpo")
    attempt(folder, short_groups(), Daemon(always))
    assert groups
    groups.clear()
    # Other inodes and other times, the same bytes; what is not weights may differ.
    for file in (folder / "model").iterdir():
        shutil.copyfile(file, folder / f"{file.name}.copy")
    shutil.rmtree(folder / "model")
    (folder / "model").mkdir()
    for file in folder.glob("*.copy"):
        file.rename(folder / "model" / file.name.removesuffix(".copy"))
    (folder / "model/generation_config.json").write_text('{"top_p": 0.5}')
    shutil.rmtree(folder / "checkpoints")
    attempt(folder, short_groups(), Daemon(always))
    assert not groups


def test_turns_are_given_back_between_groups_of_documents(inputs: Any) -> None:
    folder = inputs("job", "dpo")

    def share(line: Line) -> bytes:
        # StopRequest back as soon as it is used.
        return YIELD if isinstance(line, Message) and "reference" in line.text else always(line)

    daemon = Daemon(share)
    assert attempt(folder, spec("dpo"), daemon).outcome == "succeeded"
    reports = [i for i, line in enumerate(daemon.lines) if isinstance(line, Message) and "reference" in line.text]
    first = daemon.lines[reports[0] : reports[1]]
    assert any(isinstance(line, TurnEnded) for line in first)


@pytest.mark.parametrize(
    ("method", "data", "wanted"),
    [
        ("dpo", "kto", "preference"),
        ("kto", "preference", "kto"),
        ("sft", "preference", "text"),
        ("policy", "text", "samples"),
    ],
)
def test_data_of_another_kind_than_the_method_learns_from_is_refused(
    inputs: Any, method: str, data: str, wanted: str
) -> None:
    folder = inputs("job", "dpo")
    write_data(folder / "prepared", DataKind(data))
    with pytest.raises(
        InvalidSpec, match=f"{method}, which learns from data of kind {wanted}, and the dataset is of kind {data}"
    ):
        attempt(folder, spec(method), Daemon(always))


def test_adapters_are_compared_with_their_base_and_continue_bit_by_bit(inputs: Any) -> None:
    folder, daemon = inputs("job", "dpo"), Daemon(always)
    lora = spec("dpo", train={"trainable": "lora", "lora": {"rank": 4}})
    attempt(folder, lora, daemon)
    straight, evaluations = result(folder, 4), daemon.said(EvalDone)
    # New adapters add nothing, so that the job begins where the reference is.
    assert evaluations[0].method_figures["rewards/margins"] == pytest.approx(0, abs=1e-6)
    assert evaluations[0].eval_loss == pytest.approx(math.log(2), rel=1e-6)
    assert evaluations[-1].eval_loss < evaluations[0].eval_loss

    shutil.rmtree(folder / "checkpoints/step-00000004")
    for file in reference_files(folder):
        file.unlink()
    attempt(folder, lora, Daemon(always), resume_at=2)
    assert_same(result(folder, 4), straight)
