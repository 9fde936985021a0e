"""A worker that answers prompts at its evaluations: turns, orders, batches, and what it shows of the answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.orders import STOP
from tests.support.worker_attempts import Daemon, always, assert_same, attempt, result, spec_of

from horizon_server.children.entry import Line
from horizon_server.datasets.preparing import prepare
from horizon_server.datasets.reading import StoredFile
from horizon_server.datasets.recipe import PrepareOptions, PrepareRequest
from horizon_server.demo.recipe import demo_chats, write_demo_model
from horizon_server.errors import InvalidSpec
from horizon_server.events import CheckpointWritten, EvalAnswer, EvalDone, StepDone, TurnEnded, TurnWanted
from horizon_server.spec import parse_job_spec
from horizon_server.worker import evaluation
from horizon_server.worker.ending import Outcome
from horizon_server.worker.evaluation import MAX_SHOWN_ANSWERS, MAX_SHOWN_CHARACTERS
from horizon_server.worker_link.orders import RELEASE, TURN, YIELD

LENGTH = 64
JOB: dict[str, Any] = {
    "train": {"sequence_length": LENGTH, "tokens_per_step": 128, "compile": "off"},
    "eval_every_steps": 2,
    "checkpoint": {"every_steps": 2},
}
ASKED: dict[str, Any] = {"sets": {"chats": "d"}, "generate": {"set": "chats", "prompts": 10, "max_new_tokens": 6}}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    write_demo_model(folder / "model")
    lines = [json.dumps({"messages": list(chat)}) + "\n" for chat in demo_chats()[:40]]
    (folder / "chats.jsonl").write_text("".join(lines), "utf-8")
    request = PrepareRequest(
        dataset_files=(StoredFile(path=folder / "chats.jsonl", name="chats.jsonl"),),
        model_dir=folder / "model",
        output_dir=folder / "prepared",
        options=PrepareOptions(sequence_length=LENGTH),
    )
    prepare(request, on_progress=lambda rows: None)
    return folder


@pytest.fixture
def folders(source: Path, tmp_path: Path) -> Callable[[str], Path]:
    def make(name: str) -> Path:
        (tmp_path / name).mkdir()
        for part in ("model", "prepared"):
            (tmp_path / name / part).symlink_to(source / part)
        return tmp_path / name

    return make


def run(folder: Path, daemon: Daemon, asked: dict[str, Any] = ASKED, **more: Any) -> Outcome:
    sets = {name: str(folder / "prepared") for name in asked.get("sets", ())}
    return attempt(folder, spec_of(4, **JOB, eval=asked), daemon, evaluations=sets, **more)


def answers_of(daemon: Daemon) -> list[tuple[Any, ...]]:
    return [(done.step, done.sets, done.answers) for done in daemon.said(EvalDone)]


def test_answers_change_no_bit_of_the_training(folders: Callable[[str], Path]) -> None:
    plain, asked, one, other = Daemon(always), Daemon(always), folders("plain"), folders("asked")
    run(one, plain, {})
    run(other, asked)
    assert [step.loss for step in plain.said(StepDone)] == [step.loss for step in asked.said(StepDone)]
    assert_same(result(one, 4), result(other, 4))


def test_few_answers_are_shown_and_long_ones_are_cut(folders: Callable[[str], Path]) -> None:
    daemon = Daemon(always)
    run(folders("job"), daemon)
    for done in daemon.said(EvalDone):
        assert (done.sets[0].num_answers, len(done.answers)) == (10, MAX_SHOWN_ANSWERS)
    long = MAX_SHOWN_CHARACTERS * "ab"
    shown = evaluation._shown(EvalAnswer(document=0, prompt=long, answer=long, reference=long, found=long))
    assert {len(text) for text in (shown.prompt, shown.answer, shown.reference, shown.found or "")} == {
        MAX_SHOWN_CHARACTERS
    }
    assert shown.prompt.startswith("...") and shown.answer.endswith("...")


def test_a_checkpoint_says_what_it_is_and_has_the_whole_answers_of_its_step(folders: Callable[[str], Path]) -> None:
    daemon, folder = Daemon(always), folders("job")
    run(folder, daemon)
    done = daemon.said(EvalDone)[-1]
    checkpoint = folder / "checkpoints/step-00000004"
    result(folder, 4)  # complete, with these files
    answers = [json.loads(line) for line in (checkpoint / "answers.jsonl").read_bytes().splitlines()]
    assert len(answers) == 10 and answers[0]["answer"] == done.answers[0].answer
    evaluation_of_step = json.loads((checkpoint / "evaluation.json").read_bytes())
    assert (evaluation_of_step["step"], evaluation_of_step["sets"][0]["loss"]) == (4, done.sets[0].loss)
    # It can be submitted again as it is.
    assert parse_job_spec(yaml.safe_load((checkpoint / "job.yaml").read_bytes())) == spec_of(4, **JOB, eval=ASKED)
    card = (checkpoint / "README.md").read_text()
    for shown in (
        "library_name: transformers\n",
        f"Loss of the last step: {daemon.said(StepDone)[-1].loss:.4f}",
        f"| chats | {done.sets[0].loss:.4f} |",
        "| d | training | 40 | 40 |",
        "| d | evaluation (chats) | 40 | 40 |",
    ):
        assert shown in card


def test_batches_of_prompts_give_the_same_answers(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    together, apart = Daemon(always), Daemon(always)
    run(folders("together"), together)
    # Room for one prompt at a time.
    monkeypatch.setattr(evaluation, "cache_limit_bytes", lambda spec, folder: 1)
    run(folders("apart"), apart)
    assert answers_of(together) == answers_of(apart)


def test_the_device_is_given_back_between_tokens(folders: Callable[[str], Path]) -> None:
    alone, shared = Daemon(always), Daemon(lambda line: TURN + YIELD + RELEASE if isinstance(line, TurnWanted) else b"")
    run(folders("alone"), alone)
    run(folders("shared"), shared)
    assert answers_of(alone) == answers_of(shared)
    # A pass each, but for the first.
    assert len(shared.said(TurnEnded)) > len(alone.said(TurnEnded)) + 3 * 4


def stop_at_token(number: int) -> Callable[[Line], bytes]:
    """Wants the turn back after every piece of work, and stops the worker at one of an evaluation after step 2."""
    wanted: list[int] = []

    def react(line: Line) -> bytes:
        if isinstance(line, StepDone) and line.step == 2:
            wanted.append(0)
        if not isinstance(line, TurnWanted):
            return b""
        if wanted:
            wanted[0] += 1
        return STOP if wanted and wanted[0] == number else TURN + YIELD

    return react


@pytest.mark.parametrize("number", [4, 6])
def test_answers_that_were_given_up_are_given_by_the_next_attempt(number: int, folders: Callable[[str], Path]) -> None:
    undisturbed, first, second = Daemon(always), Daemon(stop_at_token(number)), Daemon(always)
    run(folders("whole"), undisturbed)
    folder = folders("job")
    assert run(folder, first) == Outcome(outcome="stopped")
    assert [done.step for done in first.said(EvalDone)] == [0]
    assert first.said(CheckpointWritten)[-1].step == 2
    assert run(folder, second, resume_at=2) == Outcome(outcome="succeeded")
    assert answers_of(first) + answers_of(second) == answers_of(undisturbed)


@pytest.mark.parametrize(("expression", "num_matches"), [("()", 10), ("^(never)$", 0), (None, 0)])
def test_final_answers_are_compared_with_the_data(
    expression: str | None, num_matches: int, folders: Callable[[str], Path]
) -> None:
    daemon = Daemon(always)
    run(folders("job"), daemon, {**ASKED, "generate": {**ASKED["generate"], "answer": expression}})
    first = daemon.said(EvalDone)[0]
    [figures] = first.sets
    assert (figures.num_answers, figures.num_matches) == (10, num_matches)
    assert figures.exact_match == (None if expression is None else num_matches / 10)
    # What is found in both is the same; what is found in neither is no match.
    assert {(a.found, a.expected, a.matches) for a in first.answers} == {
        ("", "", True) if num_matches else (None, None, False)
    }


def test_the_best_is_by_the_figure_that_is_named(folders: Callable[[str], Path]) -> None:
    daemon = Daemon(always)
    folder = folders("job")
    run(folder, daemon, {"sets": {"a": "d", "b": "d"}, "best_by": "b.accuracy", "patience": 1, "min_delta": 1.0})
    evaluations = daemon.said(EvalDone)
    # No accuracy is better by more than 1.
    assert [done.step for done in evaluations] == [0, 2]
    assert [done.judged for done in evaluations] == [done.sets[1].accuracy for done in evaluations]
    state = json.loads((folder / "checkpoints/step-00000002/trainer/trainer_state.json").read_text("utf-8"))
    assert state["last_eval"] == [2, evaluations[1].eval_loss, evaluations[1].judged, True]


def test_prompts_that_leave_no_room_are_refused_before_the_first_step(folders: Callable[[str], Path]) -> None:
    daemon = Daemon(always)
    generate = {"set": "chats", "max_new_tokens": 4096}
    with pytest.raises(InvalidSpec, match=r"eval\.generate: no row of the set chats"):
        run(folders("job"), daemon, {**ASKED, "generate": generate})
    assert not daemon.said(StepDone)
