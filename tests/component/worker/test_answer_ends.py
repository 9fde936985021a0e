"""Answers end where trained answers end: in evaluations, in the checkpoints that a job writes, and for who samples from
these."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.worker_attempts import Daemon, always, attempt, spec_of

from horizon_server.datasets.preparing import prepare
from horizon_server.datasets.reading import StoredFile
from horizon_server.datasets.recipe import PrepareOptions, PrepareRequest
from horizon_server.datasets.tokens.codec import TextCodec
from horizon_server.demo.recipe import write_demo_model
from horizon_server.events import EvalAnswer, EvalDone, Message
from horizon_server.worker.answering import stop_tokens

END = 2
# Short enough to be known by heart after a few steps, and with a wrong number behind the end to be found where nothing
# ends an answer.
CHATS = [
    [{"role": "user", "content": f"Say {number}."}, {"role": "assistant", "content": f"#### {number}"}]
    for number in range(4)
]
JOB: dict[str, Any] = {
    "train": {
        "sequence_length": 64,
        "tokens_per_step": 256,
        "compile": "off",
        "learning_rate": 3e-3,
        "warmup_steps": 2,
        "lr_schedule": "constant",
    },
    "checkpoint": {"every_steps": 0},
}
ASKED: dict[str, Any] = {
    "sets": {"chats": "d"},
    "generate": {"set": "chats", "prompts": 4, "max_new_tokens": 24, "answer": "#### ([0-9]+)"},
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    write_demo_model(folder / "model")
    file = folder / "chats.jsonl"
    file.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS), "utf-8")
    request = PrepareRequest(
        dataset_files=(StoredFile.at(file),),
        model_dir=folder / "model",
        output_dir=folder / "prepared",
        options=PrepareOptions(sequence_length=64),
    )
    prepare(request, on_progress=lambda rows: None)
    return folder


@pytest.fixture
def folders(source: Path, tmp_path: Path) -> Callable[..., Path]:
    def make(name: str, **generation: Any) -> Path:
        shutil.copytree(source, tmp_path / name)
        file = tmp_path / name / "model" / "generation_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | generation))
        return tmp_path / name

    return make


def run(folder: Path, num_steps: int, **changes: Any) -> Daemon:
    daemon = Daemon(always)
    train = {**JOB["train"], **changes.pop("train", {})}
    spec = spec_of(num_steps, **{**JOB, "eval": ASKED, **changes, "train": train})
    attempt(folder, spec, daemon, evaluations={"chats": str(folder / "prepared")})
    return daemon


def answers_of(daemon: Daemon) -> list[EvalAnswer]:
    return [answer for done in daemon.said(EvalDone) for answer in done.answers]


def eos_of(folder: Path) -> Any:
    return json.loads((folder / "generation_config.json").read_text())["eos_token_id"]


def test_answers_are_the_same_whatever_the_base_lists(folders: Callable[..., Path]) -> None:
    pushed, listed = run(folders("pushed"), 40), run(folders("listed", eos_token_id=[0, END]), 40)
    assert answers_of(pushed) == answers_of(listed)
    last = pushed.said(EvalDone)[-1]
    assert [answer.ended for answer in last.answers] == ["stop"] * 4
    assert last.sets[0].exact_match == 1.0
    assert [answer.found for answer in last.answers] == [answer.expected for answer in last.answers]


def test_a_checkpoint_says_where_its_answers_end(folders: Callable[..., Path]) -> None:
    folder = folders("job")
    daemon = run(folder, 1)
    checkpoint = folder / "checkpoints/step-00000001"
    assert (eos_of(folder / "model"), eos_of(checkpoint)) == (0, [0, END])
    assert END in stop_tokens(checkpoint, TextCodec.from_folder(checkpoint))
    said = [message.text for message in daemon.said(Message)]
    wanted = (
        "trained answers end with <|im_end|>, which generation_config.json does not list; answers end there too, and "
        "the checkpoint's generation_config.json says so"
    )
    assert said.count(wanted) == 1
    assert not any("is frozen" in text for text in said)


def test_nothing_is_said_or_written_where_the_base_lists_it(folders: Callable[..., Path]) -> None:
    folder = folders("job", eos_token_id=[0, END])
    daemon = run(folder, 1)
    written = (folder / "checkpoints/step-00000001/generation_config.json").read_bytes()
    assert written == (folder / "model/generation_config.json").read_bytes()
    assert not any("answers end" in message.text for message in daemon.said(Message))


def test_a_base_without_a_generation_config_gets_one(folders: Callable[..., Path]) -> None:
    folder = folders("job")
    (folder / "model/generation_config.json").unlink()
    run(folder, 1)
    written = json.loads((folder / "checkpoints/step-00000001/generation_config.json").read_text())
    assert written == {"eos_token_id": [0, END], "pad_token_id": 3}


@pytest.mark.parametrize(("export", "parts"), [("adapter", [""]), ("both", ["", "merged"]), ("merged", [""])])
def test_checkpoints_of_adapters_say_it_too(folders: Callable[..., Path], export: str, parts: list[str]) -> None:
    folder = folders("job")
    lora = {"trainable": "lora", "lora": {"rank": 2, "targets": ["q_proj"]}}
    daemon = run(folder, 1, train=lora, checkpoint={"export": export})
    assert [eos_of(folder / "checkpoints/step-00000001" / part) for part in parts] == [[0, END]] * len(parts)
    (warning,) = [message for message in daemon.said(Message) if "is frozen" in message.text]
    assert warning.level == "warning"
    assert warning.text.startswith("the embedding of <|im_end|> is frozen: ")


@pytest.mark.parametrize(("trainable", "is_frozen"), [(["embed_tokens"], False), ([r"layers\.1\."], True)])
def test_a_frozen_embedding_is_named(folders: Callable[..., Path], trainable: list[str], is_frozen: bool) -> None:
    daemon = run(folders("job"), 1, train={"trainable": trainable})
    assert any("is frozen" in message.text for message in daemon.said(Message)) == is_frozen
