"""Prompts answered by a job's checkpoint, against the real daemon: by library and by command, and what transformers
answers."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.both_daemons import demo_spec
from tests.support.daemon_process import DaemonProcess, wait_for_state
from tests.support.pushed_state import PushedState
from transformers import AutoModelForCausalLM, AutoTokenizer

from horizon_client import Client, InvalidRequest, NotAllowed, NotFound
from horizon_client.resources import SampledText, SampleFigures

CHAT = [{"role": "user", "content": "What is a lab box?"}]
NUM_TOKENS = 16


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, pushed: PushedState) -> Iterator[DaemonProcess]:
    running = pushed.daemon(tmp_path_factory.mktemp("sampling") / "state")
    running.start()
    try:
        yield running
    finally:
        running.close()


@pytest.fixture(scope="module")
def trained(daemon: DaemonProcess) -> tuple[str, str]:
    """A user's token, and the id of a job of theirs that has written a checkpoint."""
    token = daemon.user("ada")
    with daemon.client(token) as client:
        job = client.jobs.submit(demo_spec(max_steps=8, tokens_per_step=1024))
        done = wait_for_state(client, job.job_id, "SUCCEEDED", "FAILED")
        assert done.state == "SUCCEEDED", done.message
    return token, job.job_id


@pytest.fixture
def client(daemon: DaemonProcess, trained: tuple[str, str]) -> Iterator[Client]:
    with daemon.client(trained[0]) as opened:
        yield opened


def answers_of(client: Client, job: str, prompts: list[object], **options: object) -> tuple[list[str], SampleFigures]:
    texts = [""] * len(prompts)
    *pieces, figures = client.checkpoints.sample(job, prompts, **options)  # type: ignore[arg-type]
    for piece in pieces:
        assert isinstance(piece, SampledText)
        texts[piece.prompt] += piece.text
    assert isinstance(figures, SampleFigures)
    return texts, figures


def test_the_answers_are_those_of_transformers(client: Client, trained: tuple[str, str], tmp_path: Path) -> None:
    client.checkpoints.pull(trained[1], to=tmp_path / "tuned")
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned", dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "tuned")

    texts, figures = answers_of(client, trained[1], ["The lab box", CHAT], max_tokens=NUM_TOKENS)

    plain = tokenizer("The lab box", return_tensors="pt")["input_ids"]
    chat = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    for ids, text in ((plain, texts[0]), (chat["input_ids"], texts[1])):
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False, num_beams=1
        )
        assert text == tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    assert any(texts)
    assert figures.num_tokens <= 2 * NUM_TOKENS
    assert figures.tokens_per_second > 0


def test_by_command(daemon: DaemonProcess, client: Client, trained: tuple[str, str], tmp_path: Path) -> None:
    token, job = trained
    (tmp_path / "prompts.jsonl").write_text(
        json.dumps({"prompt": "The lab box"}) + "\n\n" + json.dumps({"messages": CHAT}) + "\n"
    )
    command = [
        *(sys.executable, "-m", "horizon_client", "checkpoint"),
        *("sample", f"{job}@last", "--prompts", str(tmp_path / "prompts.jsonl"), "--max-tokens", str(NUM_TOKENS)),
        *("--server", daemon.endpoints["grpc"], "--out", str(tmp_path / "answers.jsonl")),
    ]
    environment = {"HORIZON_TOKEN": token, "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=240)

    rows = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    texts, _ = answers_of(client, job, ["The lab box", CHAT], max_tokens=NUM_TOKENS)
    assert {row["index"]: row["answer"] for row in rows} == dict(enumerate(texts))
    assert "tokens/s" in done.stderr


def test_a_chat_remembers_what_was_said(daemon: DaemonProcess, client: Client, trained: tuple[str, str]) -> None:
    token, job = trained
    first, second = CHAT[0]["content"], "And why?"
    command = [
        *(sys.executable, "-m", "horizon_client", "checkpoint", "chat", job, "--max-tokens", str(NUM_TOKENS)),
        *("--server", daemon.endpoints["grpc"]),
    ]
    environment = {"HORIZON_TOKEN": token, "PYTHONPATH": ":".join(sys.path)}
    typed = f"{first}\n{second}\n\n"
    done = subprocess.run(
        command, env=environment, input=typed, capture_output=True, text=True, check=True, timeout=240
    )

    (said,), _ = answers_of(client, job, [CHAT], max_tokens=NUM_TOKENS)
    chat = [*CHAT, {"role": "assistant", "content": said}, {"role": "user", "content": second}]
    (then,), _ = answers_of(client, job, [chat], max_tokens=NUM_TOKENS)
    assert done.stdout.split("> ")[1:] == [f"{said}\n", f"{then}\n", ""]


def test_what_cannot_be_asked_names_the_field(client: Client, trained: tuple[str, str]) -> None:
    job = trained[1]
    asked: list[tuple[list[object], dict[str, object], str]] = [
        ([], {}, "prompts has 0 prompts"),
        (["a"] * 65, {}, "it must have 1 to 64"),
        (["a", ""], {}, r"prompts\[1\] must have either"),
        (["a" * 70_000], {}, r"prompts\[0\] has 70000 characters"),
        (["word " * 13_000], {}, r"prompts\[0\] has .* tokens"),
        (["a"], {"max_tokens": 5000}, "max_tokens is 5000"),
        (["a"], {"temperature": -1.0}, "temperature is -1"),
        (["a"], {"temperature": float("nan")}, "temperature is nan"),
        (["a"], {"top_p": 0.0}, "top_p is 0"),
    ]
    for prompts, options, words in asked:
        with pytest.raises(InvalidRequest, match=words):
            answers_of(client, job, prompts, **options)
    with pytest.raises(NotFound, match="step 77"):
        answers_of(client, job, ["a"], at=77)


def test_other_users_and_viewers_may_not(daemon: DaemonProcess, trained: tuple[str, str]) -> None:
    with daemon.client(daemon.user("bob")) as bob, pytest.raises(NotFound):
        answers_of(bob, trained[1], ["a"])
    with daemon.client(daemon.user("eve", role="viewer")) as eve, pytest.raises(NotAllowed, match="viewer"):
        answers_of(eve, trained[1], ["a"])


def test_two_callers_at_once_share_passes_and_each_has_its_own_end(
    daemon: DaemonProcess, client: Client, trained: tuple[str, str]
) -> None:
    token, job = trained
    alone, _ = answers_of(client, job, ["The lab box"], max_tokens=NUM_TOKENS)
    # One of these will not end soon, whatever the model has learned.
    long = client.checkpoints.sample(job, ["The lab box"] * 8, max_tokens=900, temperature=20.0, seed=1)
    begun, enough = threading.Event(), threading.Event()

    def read() -> int:
        number = 0
        for _ in long:
            number += 1
            begun.set()
            if enough.is_set():
                long.close()  # type: ignore[attr-defined]
                break
        return number

    found: list[SampleFigures] = []
    with ThreadPoolExecutor(1) as pool, daemon.client(token) as second:
        reading = pool.submit(read)
        assert begun.wait(240)
        while not reading.done() and not any(figures.num_shared_passes for figures in found):
            with pytest.raises(InvalidRequest, match=r"prompts\[0\]"):
                answers_of(second, job, [[1 << 20]], max_tokens=4)
            texts, figures = answers_of(second, job, ["The lab box"], max_tokens=NUM_TOKENS)
            assert texts == alone
            assert figures.load_s == 0
            found.append(figures)
        # What failed and what has ended beside it did not end the first one, whose caller leaves now.
        enough.set()
        assert reading.result(240) > 0
    assert any(figures.num_shared_passes for figures in found)
    texts, figures = answers_of(client, job, ["The lab box"], max_tokens=NUM_TOKENS)
    assert texts == alone
    assert figures.load_s == 0


def test_a_caller_who_leaves_ends_the_call_and_the_next_is_answered(client: Client, trained: tuple[str, str]) -> None:
    pieces = client.checkpoints.sample(trained[1], ["The lab box"] * 8, max_tokens=400)
    assert isinstance(next(iter(pieces)), SampledText)
    pieces.close()  # type: ignore[attr-defined]

    texts, _ = answers_of(client, trained[1], ["The lab box"], max_tokens=4)
    assert texts[0]
