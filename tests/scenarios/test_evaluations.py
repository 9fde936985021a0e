"""A job that is evaluated on several sets and answers prompts, against the real daemon; and what transformers computes
of the same."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.both_daemons import demo_spec
from tests.support.daemon_process import DaemonProcess, wait_for_state
from transformers import AutoModelForCausalLM, AutoTokenizer

from horizon_client import Client, InUse, InvalidRequest, NotAllowed, NotFound
from horizon_client.job_spec_types import JobSpec
from horizon_client.reporter import Reporter
from horizon_client.resources import EvalEvent, EvaluationProgress, Job
from horizon_server.demo.recipe import demo_chats, write_demo_model

SHARED = Path(__file__).parents[3] / "shared"
TINY_BASE, GSM8K = SHARED / "models" / "tiny-base", SHARED / "data" / "gsm8k_train.jsonl"
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    running = DaemonProcess(tmp_path_factory.mktemp("evaluations") / "state")
    running.start()
    try:
        yield running
    finally:
        running.close()


@pytest.fixture(scope="module")
def token(daemon: DaemonProcess) -> str:
    return daemon.user("ada")


@pytest.fixture
def client(daemon: DaemonProcess, token: str) -> Iterator[Client]:
    with daemon.client(token) as opened:
        yield opened


def written(path: Path, chats: list[Any]) -> Path:
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats), "utf-8")
    return path


def evaluations_of(client: Client, job: Job) -> list[EvalEvent]:
    return [event for event in client.jobs.watch(job.job_id) if isinstance(event, EvalEvent)]


def figures_of(evaluation: EvalEvent) -> tuple[Any, ...]:
    return (evaluation.step, evaluation.eval_loss, evaluation.sets, evaluation.answers, evaluation.judged)


def ended(client: Client, job: Job) -> Job:
    done = wait_for_state(client, job.job_id, "SUCCEEDED", "FAILED", timeout_s=400)
    assert done.state == "SUCCEEDED", done.message
    return done


@pytest.fixture(scope="module")
def runs(daemon: DaemonProcess, token: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Job], Path]:
    """Two jobs of the same spec, and the file of their first set. All of their data are local files."""
    folder = tmp_path_factory.mktemp("files")
    chats = [list(chat) for chat in demo_chats()]
    train, asked, other = chats[20:], chats[:6], chats[6:20]
    spec = demo_spec("evaluated", max_steps=6)
    spec |= {
        "model": str(write_demo_model(folder / "model")),
        "dataset": str(written(folder / "train.jsonl", train)),
        "eval_every_steps": 3,
        "eval": {
            "sets": {
                "asked": str(written(folder / "asked.jsonl", asked)),
                "other": str(written(folder / "o.jsonl", other)),
            },
            "generate": {"set": "asked", "prompts": 4, "max_new_tokens": NUM_TOKENS, "answer": r"(\w+)\W*$"},
            "best_by": "asked.accuracy",
        },
        "checkpoint": {"every_steps": 3, "keep_last": 3, "dtype": "fp32"},
    }
    with daemon.client(token) as opened:
        jobs = [ended(opened, opened.jobs.submit(spec)) for _ in range(2)]
    return jobs, folder / "asked.jsonl"


def test_every_set_has_its_figures_and_two_runs_have_the_same(client: Client, runs: tuple[list[Job], Path]) -> None:
    one, other = (evaluations_of(client, job) for job in runs[0])
    assert [evaluation.step for evaluation in one] == [0, 3, 6]
    assert [figures_of(evaluation) for evaluation in one] == [figures_of(evaluation) for evaluation in other]
    for evaluation in one:
        assert [figures.name for figures in evaluation.sets] == ["asked", "other"]
        assert len(evaluation.answers) == 4
        assert evaluation.judged == evaluation.sets[0].accuracy
        for figures in evaluation.sets:
            assert figures.accuracy == figures.num_correct / figures.num_targets
            assert figures.perplexity == pytest.approx(torch.tensor(figures.loss, dtype=torch.float64).exp().item())
        asked = evaluation.sets[0]
        assert (asked.num_answers, asked.num_matches) == (4, sum(answer.matches for answer in evaluation.answers))
        assert asked.exact_match == asked.num_matches / 4
        assert evaluation.sets[1].exact_match is None


def test_loss_accuracy_and_answers_are_those_of_transformers(
    client: Client, runs: tuple[list[Job], Path], tmp_path: Path
) -> None:
    jobs, file = runs
    client.checkpoints.pull(jobs[0].job_id, to=tmp_path / "tuned", at=6)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned", dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "tuned")
    total, num_targets, num_correct = 0.0, 0, 0
    last = evaluations_of(client, jobs[0])[-1]
    rows = [json.loads(line)["messages"] for line in file.read_text("utf-8").splitlines()]
    for chat in rows:
        encoded = tokenizer.apply_chat_template(
            chat, return_tensors="pt", return_dict=True, return_assistant_tokens_mask=True
        )
        ids = encoded["input_ids"]
        trained = torch.as_tensor(encoded["assistant_masks"]).reshape(-1).bool()[1:]
        with torch.no_grad():
            logits = model(ids).logits[0, :-1][trained]
        targets = ids[0, 1:][trained]
        total += float(torch.nn.functional.cross_entropy(logits.double(), targets, reduction="sum"))
        num_targets += len(targets)
        num_correct += int((logits.argmax(-1) == targets).sum())
    figures = last.sets[0]
    assert (figures.num_targets, figures.num_correct) == (num_targets, num_correct)
    assert figures.loss == pytest.approx(total / num_targets, rel=1e-6)
    for chat, answer in zip(rows, last.answers, strict=False):
        prompt = tokenizer.apply_chat_template(
            chat[:-1], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        output = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NUM_TOKENS, do_sample=False, num_beams=1
        )
        assert answer.answer == tokenizer.decode(output[0, prompt.shape[1] :], skip_special_tokens=True)
        assert answer.reference == chat[-1]["content"]


def test_a_job_shows_its_figures_before_and_after(
    client: Client, daemon: DaemonProcess, token: str, runs: tuple[list[Job], Path]
) -> None:
    job = client.jobs.get(runs[0][0].job_id)
    evaluations = evaluations_of(client, job)
    assert job.first_eval is not None and job.best_eval is not None and job.last_eval is not None
    assert (job.first_eval.sets, job.last_eval.sets) == (evaluations[0].sets, evaluations[-1].sets)
    best = max(evaluations, key=lambda evaluation: (evaluation.judged, -evaluation.step))
    assert (job.best_eval.step, job.best_eval.judged) == (best.step, best.judged)
    before, after = evaluations[0].sets[0], evaluations[-1].sets[0]
    shown = command(daemon, token, "job", "get", job.job_id)
    assert f"loss {before.loss:.4f} -> {after.loss:.4f}" in shown
    assert f"exact match {before.exact_match:.2%} ({before.num_matches} of 4) -> {after.exact_match:.2%}" in shown
    assert f"step {best.step} by asked.accuracy: {best.judged:.4f}" in shown
    watched = command(daemon, token, "job", "watch", job.job_id)
    assert watched.count("  asked: loss ") == 3
    assert "  prompt: ..." in watched
    # Of the checkpoints, which are of steps 3 and 6.
    [best_checkpoint] = [c for c in client.checkpoints.list(job.job_id) if c.best]
    assert (
        best_checkpoint.step == max(evaluations[1:], key=lambda evaluation: (evaluation.judged, -evaluation.step)).step
    )


def test_a_set_of_a_job_that_runs_is_not_deleted(client: Client, runs: tuple[list[Job], Path]) -> None:
    spec = runs[0][0].spec
    job = client.jobs.submit({**spec, "train": {**spec["train"], "max_steps": 100_000}})
    try:
        with pytest.raises(InUse, match=job.job_id):
            client.datasets.delete(str(spec["eval"]["sets"]["other"]))
    finally:
        client.jobs.cancel(job.job_id)
        wait_for_state(client, job.job_id, "CANCELLED")


@pytest.mark.skipif(
    not (TINY_BASE.is_dir() and GSM8K.is_file()), reason=f"needs {TINY_BASE.name} and {GSM8K.name} in ../shared"
)
def test_exact_match_on_gsm8k_before_and_after_is_reproducible_to_the_digit(
    client: Client, daemon: DaemonProcess, token: str, tmp_path: Path
) -> None:
    with GSM8K.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in itertools.islice(lines, 400)]
    rows = [row for row in rows if len(row["question"]) + len(row["answer"]) <= 400]
    chats = [
        [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}] for row in rows
    ]
    spec: JobSpec = {
        "name": "gsm8k",
        "model": str(TINY_BASE),
        "dataset": str(written(tmp_path / "train.jsonl", chats[16:])),
        "train": {
            "max_steps": 12,
            "tokens_per_step": 1024,
            "sequence_length": 256,
            "learning_rate": 5e-4,
            "compile": "off",
        },
        "eval": {
            "sets": {"gsm8k": str(written(tmp_path / "held_out.jsonl", chats[:16]))},
            "generate": {"set": "gsm8k", "prompts": 16, "max_new_tokens": 80, "answer": "#### (-?[0-9.,]+)"},
            "best_by": "gsm8k.exact_match",
        },
        "checkpoint": {"every_steps": 0},
    }
    shown, figures = [], []
    for _ in range(2):
        job = ended(client, client.jobs.submit(spec))
        lines_of_sets = [
            line for line in command(daemon, token, "job", "get", job.job_id).splitlines() if "exact match" in line
        ]
        shown.append(lines_of_sets)
        figures.append([figures_of(evaluation) for evaluation in evaluations_of(client, job)])
    assert len(shown[0]) == 1, shown
    assert "of 16) -> " in shown[0][0]
    assert shown[0] == shown[1]
    assert figures[0] == figures[1]


def command(daemon: DaemonProcess, token: str, *arguments: str) -> str:
    called = [sys.executable, "-m", "horizon_client", *arguments, "--server", daemon.endpoints["grpc"]]
    environment = {"HORIZON_TOKEN": token, "PYTHONPATH": ":".join(sys.path), "COLUMNS": "1000"}
    return subprocess.run(called, env=environment, capture_output=True, text=True, check=True, timeout=240).stdout


def test_a_checkpoint_is_evaluated_again_with_the_same_figures(client: Client, runs: tuple[list[Job], Path]) -> None:
    job = runs[0][0]
    own = {evaluation.step: evaluation for evaluation in evaluations_of(client, job)}
    told = Told()

    for step in (3, 6):
        found = client.checkpoints.evaluate(job.job_id, at=step, reporter=told)
        assert found.figures is not None
        assert figures_of(found.figures) == figures_of(own[step])
        assert found.differences == ()
    assert {(progress.phase, progress.set) for progress in told.heard} == {
        *itertools.product(("prepare", "evaluate"), ("asked", "other"))
    }


def test_by_command_on_other_sets(
    daemon: DaemonProcess, token: str, client: Client, runs: tuple[list[Job], Path]
) -> None:
    job = runs[0][0]
    own = evaluations_of(client, job)[-1]
    client.datasets.push([runs[1]], name="asked-again")
    done = evaluating(daemon, token, job.job_id, "--set", "again=asked-again", "-o", "json")
    output, errors = done.communicate(timeout=240)

    assert done.returncode == 0, errors
    (figures,) = json.loads(output)["figures"]["sets"]
    assert (figures["name"], figures["loss"], figures["num_correct"]) == (
        "again",
        own.sets[0].loss,
        own.sets[0].num_correct,
    )
    # Nothing is answered of a set that the job does not name.
    assert (figures["num_answers"], figures["exact_match"]) == (0, None)
    assert "evaluating again: " in errors


def test_what_cannot_be_evaluated_is_said(
    daemon: DaemonProcess, client: Client, runs: tuple[list[Job], Path], tmp_path: Path
) -> None:
    job = runs[0][0].job_id
    pairs = {"prompt": "a", "chosen": "b", "rejected": "c"}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(pairs) + "\n", "utf-8")
    client.datasets.push([tmp_path / "pairs.jsonl"], name="pairs")
    evaluate = client.checkpoints.evaluate
    with pytest.raises(NotFound, match="nothing"):
        evaluate(job, sets={"new": "nothing"})
    with pytest.raises(InvalidRequest, match="preference"):
        evaluate(job, sets={"new": "pairs"})
    with pytest.raises(InvalidRequest, match="a name must be"):
        evaluate(job, sets={"a b": "pairs"})
    with pytest.raises(NotFound, match="step 4"):
        evaluate(job, at=4)
    with daemon.client(daemon.user("bob")) as bob, pytest.raises(NotFound):
        bob.checkpoints.evaluate(job)
    with daemon.client(daemon.user("eve", role="viewer")) as eve, pytest.raises(NotAllowed, match="viewer"):
        eve.checkpoints.evaluate(f"{job}@3")


def test_an_interrupted_evaluation_frees_its_memory(
    daemon: DaemonProcess, token: str, client: Client, runs: tuple[list[Job], Path]
) -> None:
    running = evaluating(daemon, token, runs[0][0].job_id)
    # The sets are prepared, and the child has been asked for.
    wait_until(lambda: client.node.status().host_memory_promised_bytes > 0)
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=240)
    assert running.returncode != 0
    assert "the node has ended the evaluation" in errors
    wait_until(lambda: client.node.status().host_memory_promised_bytes == 0)


class Told(Reporter):
    """Keeps what it is told of an evaluation."""

    def __init__(self) -> None:
        self.heard: list[EvaluationProgress] = []

    def evaluation(self, progress: EvaluationProgress) -> None:
        self.heard.append(progress)


def evaluating(daemon: DaemonProcess, token: str, *arguments: str) -> subprocess.Popen[str]:
    """Start `horizon checkpoint eval`."""
    command = [sys.executable, "-m", "horizon_client", "checkpoint", "eval", *arguments]
    return subprocess.Popen(
        [*command, "--server", daemon.endpoints["grpc"]],
        env={"HORIZON_TOKEN": token, "PYTHONPATH": ":".join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.02)
