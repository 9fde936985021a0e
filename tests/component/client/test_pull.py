"""Pulls: resumed, verified, confined to their folder, and never over a different file."""

from __future__ import annotations

import random
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.adapters import LORA, write_adapter_checkpoint

from horizon_client import Client, CorruptDownload, FileConflict, InvalidRequest, NotFound, ServerFailed
from horizon_client.errors import HorizonClientError
from horizon_proto.v1 import checkpoint_pb2
from horizon_server.records.job import JobRecord, JobState

if TYPE_CHECKING:
    from tests.component.client.conftest import Daemon

WEIGHTS = random.Random(1).randbytes(25_300)
FILES = {"model.safetensors": WEIGHTS, "config.json": b"{}", "trainer/state.json": b'{"step": 10}'}


def reads_of(daemon: Daemon) -> list[int]:
    """Offsets from which the client has asked for checkpoint files."""
    return [request.offset for method, request in daemon.line.requests if method == "ReadCheckpointFile"]


@pytest.fixture
def job(daemon: Daemon, finished_job: JobRecord) -> str:
    """A job with two checkpoints; the first is the best, the second the last."""
    daemon.add_checkpoint(finished_job, 10, FILES, eval_loss=1.0)
    daemon.add_checkpoint(finished_job, 20, {**FILES, "config.json": b'{"later": 1}'}, eval_loss=2.0)
    return finished_job.job_id


def test_pull_brings_the_model_only_by_default(client: Client, job: str, tmp_path: Path) -> None:
    result = client.checkpoints.pull(job, tmp_path / "out", at="best")
    assert {p.name for p in (tmp_path / "out").rglob("*")} == {"model.safetensors", "config.json"}
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == WEIGHTS
    assert result.received_bytes == len(WEIGHTS) + 2
    assert result.checkpoint.step == 10


def test_pull_with_trainer(client: Client, job: str, tmp_path: Path) -> None:
    client.checkpoints.pull(job, tmp_path, at=10, with_trainer=True)
    assert (tmp_path / "trainer" / "state.json").read_bytes() == b'{"step": 10}'


def test_places(client: Client, job: str, tmp_path: Path) -> None:
    assert client.checkpoints.pull(job, tmp_path / "a").checkpoint.step == 20
    assert client.checkpoints.pull(job, tmp_path / "b", at="10").checkpoint.step == 10
    with pytest.raises(NotFound, match="no checkpoint at step 11; it has checkpoints at steps 10, 20"):
        client.checkpoints.pull(job, tmp_path / "c", at=11)


@pytest.mark.parametrize("cuts", [[0], [1000], [25_000], [3000, 0, 20_000]])
def test_a_cut_pull_continues_where_it_stopped(
    client: Client, daemon: Daemon, job: str, tmp_path: Path, cuts: list[int]
) -> None:
    daemon.line.cuts["ReadCheckpointFile"] = [len(FILES["config.json"]), *cuts]  # which is read first
    result = client.checkpoints.pull(job, tmp_path, at=10)
    assert (tmp_path / "model.safetensors").read_bytes() == WEIGHTS
    assert result.received_bytes == len(WEIGHTS) + 2
    assert reads_of(daemon)[1:] == [sum(cuts[:i]) for i in range(len(cuts) + 1)]


def test_partial_file_of_an_earlier_run_is_used(client: Client, daemon: Daemon, job: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.part").write_bytes(WEIGHTS[:7777])
    result = client.checkpoints.pull(job, tmp_path, at=10)
    assert (tmp_path / "model.safetensors").read_bytes() == WEIGHTS
    assert result.received_bytes == len(WEIGHTS) - 7777 + 2
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize("leftover", [b"other bytes", WEIGHTS + b"too long", b"x" * len(WEIGHTS)])
def test_useless_partial_file_is_replaced(
    client: Client, daemon: Daemon, job: str, tmp_path: Path, leftover: bytes
) -> None:
    (tmp_path / "model.safetensors.part").write_bytes(leftover)
    client.checkpoints.pull(job, tmp_path, at=10)
    assert (tmp_path / "model.safetensors").read_bytes() == WEIGHTS


def test_one_corrupt_byte_is_detected(client: Client, daemon: Daemon, job: str, tmp_path: Path) -> None:
    def damage(answer: checkpoint_pb2.ReadCheckpointFileResponse) -> None:
        damaged = bytearray(answer.data)
        if len(damaged) > 12_345:
            damaged[12_345] ^= 1
        answer.data = bytes(damaged)

    daemon.line.change["ReadCheckpointFile"] = damage
    with pytest.raises(CorruptDownload, match=r"model\.safetensors arrived damaged"):
        client.checkpoints.pull(job, tmp_path, at=10)
    assert not (tmp_path / "model.safetensors").exists()
    assert not (tmp_path / "model.safetensors.part").exists()


def test_too_many_bytes_are_refused(client: Client, daemon: Daemon, job: str, tmp_path: Path) -> None:
    def lengthen(answer: checkpoint_pb2.ReadCheckpointFileResponse) -> None:
        if len(answer.data) == len(WEIGHTS):
            answer.data += b"more"

    daemon.line.change["ReadCheckpointFile"] = lengthen
    with pytest.raises(CorruptDownload, match=r"model\.safetensors"):
        client.checkpoints.pull(job, tmp_path, at=10)


def test_identical_files_are_left_alone_and_different_ones_refused(
    client: Client, daemon: Daemon, job: str, tmp_path: Path
) -> None:
    client.checkpoints.pull(job, tmp_path, at=10)
    assert client.checkpoints.pull(job, tmp_path, at=10).received_bytes == 0

    reads = len(reads_of(daemon))
    with pytest.raises(FileConflict, match=r"config\.json exists and is different"):
        client.checkpoints.pull(job, tmp_path, at=20)
    assert len(reads_of(daemon)) == reads
    assert (tmp_path / "config.json").read_bytes() == b"{}"

    client.checkpoints.pull(job, tmp_path, at=20, force=True)
    assert (tmp_path / "config.json").read_bytes() == b'{"later": 1}'


@pytest.mark.parametrize("path", ["../evil", "/etc/evil", "a/../../evil", "a//b", "C:\\evil", "..\\evil", "a/./b", ""])
def test_paths_that_lead_out_are_refused(client: Client, daemon: Daemon, job: str, tmp_path: Path, path: str) -> None:
    def lead_out(answer: checkpoint_pb2.ListCheckpointsResponse) -> None:
        answer.checkpoints[0].files.add(path=path, sha256="0" * 64, size_bytes=4)

    daemon.line.change["ListCheckpoints"] = lead_out
    with pytest.raises(ServerFailed, match="is outside the folder"):
        client.checkpoints.pull(job, tmp_path / "out", at=10)
    assert list(tmp_path.iterdir()) == []


def test_links_that_lead_out_are_not_followed(client: Client, daemon: Daemon, job: str, tmp_path: Path) -> None:
    outside, out = tmp_path / "outside", tmp_path / "out"
    outside.mkdir()
    out.mkdir()
    (out / "trainer").symlink_to(outside)
    with pytest.raises(ServerFailed, match="is a link to a place outside"):
        client.checkpoints.pull(job, out, at=10, with_trainer=True)
    assert list(outside.iterdir()) == []


def test_delete(client: Client, job: str) -> None:
    client.checkpoints.delete(job, 10)
    assert [c.step for c in client.checkpoints.list(job)] == [20]
    with pytest.raises(InvalidRequest, match="name the checkpoint to delete by its step"):
        client.checkpoints.delete(job)
    client.checkpoints.delete(f"{job}@20")
    assert client.checkpoints.list(job) == []


def test_a_checkpoint_is_named_with_its_job(client: Client, job: str, tmp_path: Path) -> None:
    for name, step in ((f"{job}@10", 10), (f"{job}@best", 10), (f"{job}@last", 20), ("@".join((job, "20")), 20)):
        assert client.checkpoints.pull(name, tmp_path / name).checkpoint.step == step
        assert [c.step for c in client.checkpoints.list(name)] == [step]
    with pytest.raises(InvalidRequest, match=r"names the checkpoint already; leave out at=20"):
        client.checkpoints.pull(f"{job}@10", tmp_path / "a", at=20)
    with pytest.raises(InvalidRequest, match=r"write JOB, JOB@STEP, JOB@best or JOB@last"):
        client.checkpoints.pull(f"{job}@newest", tmp_path / "a")
    with pytest.raises(InvalidRequest, match="holds a whole model, not an adapter"):
        client.checkpoints.merge(f"{job}@last")


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(
    "other", ["adapter_config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"]
)
def test_a_folder_with_another_model_is_left_alone(
    client: Client, daemon: Daemon, job: str, tmp_path: Path, other: str, force: bool
) -> None:
    (tmp_path / other).write_bytes(b"another model")
    (tmp_path / "notes.txt").write_text("mine", "ascii")
    with pytest.raises(FileConflict, match=rf"holds another model \({re.escape(other)}\); choose another folder"):
        client.checkpoints.pull(job, tmp_path, at=10, force=force)
    assert {path.name for path in tmp_path.iterdir()} == {other, "notes.txt"} and reads_of(daemon) == []


def test_a_folder_that_an_earlier_pull_has_begun_is_filled(client: Client, job: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"{}")
    (tmp_path / "model.safetensors.part").write_bytes(WEIGHTS[:100])
    (tmp_path / "notes.txt").write_text("mine", "ascii")
    assert client.checkpoints.pull(job, tmp_path, at=10).received_bytes == len(WEIGHTS) - 100


def test_nothing_is_merged_for_a_folder_with_another_model(
    client: Client, daemon: Daemon, finished_job: JobRecord, model_folder: Path, tmp_path: Path
) -> None:
    job = daemon.add_job("lora", state=JobState.SUCCEEDED, train=LORA)
    folder = daemon.served.parts.services.jobs.folders.checkpoints(job.job_id).of_step(3)
    write_adapter_checkpoint(folder, daemon.served.call(daemon.served.parts.services.jobs.base_of(job)))
    out, base = tmp_path / "out", tmp_path / "tiny-base"
    shutil.copytree(model_folder, base)
    held = {path: path.read_bytes() for path in base.iterdir()}
    for call in (client.checkpoints.pull, lambda job, to: client.checkpoints.merge(job, out=to)):
        with pytest.raises(FileConflict, match=r"tiny-base holds another model \(config\.json, model\.safetensors\)"):
            call(job.job_id, base)
    assert {path: path.read_bytes() for path in base.iterdir()} == held
    assert not (folder / "merged").exists(), "nothing was merged"

    assert client.checkpoints.merge(f"{job.job_id}@last", out=out, dtype="bf16").received_bytes
    assert client.checkpoints.merge(job.job_id, out=out, dtype="bf16").received_bytes == 0
    # Another one, which would be refused when it has been made
    with pytest.raises(FileConflict, match="out holds another model"):
        client.checkpoints.merge(job.job_id, out=out, dtype="fp32")
    assert client.checkpoints.merge(job.job_id, out=out).received_bytes == 0, "it is still the one of before"
    assert client.checkpoints.merge(job.job_id, out=out, dtype="fp32", force=True).received_bytes


@pytest.mark.parametrize(
    ("prompts", "sent"),
    [
        ("Hello", ["Hello"]),
        (["Hello", "you"], ["Hello", "you"]),
        ({"prompt": "Hello"}, ["Hello"]),
        ([{"prompt": "Hello"}, "you"], ["Hello", "you"]),
        ([{"messages": [{"role": "user", "content": "Hi"}]}], [[("user", "Hi")]]),
        ([{"role": "user", "content": "Hi"}], [[("user", "Hi")]]),
        ([[{"role": "user", "content": "Hi", "weight": 1}]], [[("user", "Hi")]]),
    ],
)
def test_prompts_are_texts_chats_or_rows(
    client: Client, daemon: Daemon, job: str, prompts: Any, sent: list[Any]
) -> None:
    with pytest.raises(HorizonClientError):  # these checkpoints are no models
        list(client.checkpoints.sample(f"{job}@10", prompts))
    [request] = [request for method, request in daemon.line.requests if method == "SampleCheckpoint"]
    assert request.step == 10
    assert [prompt.text or [(m.role, m.content) for m in prompt.messages] for prompt in request.prompts] == sent


@pytest.mark.parametrize(
    "bad", [3, {"text": "a"}, {"prompt": 3}, [{"role": "user"}], {"prompt": "a", "messages": []}, [[]]]
)
def test_what_is_no_prompt_is_named(client: Client, daemon: Daemon, job: str, bad: Any) -> None:
    with pytest.raises(InvalidRequest, match=r'prompts\[1\] is not a prompt; write a text, .*\{"prompt": "..."\}'):
        list(client.checkpoints.sample(job, ["Hello", bad]))
    assert daemon.calls == []
