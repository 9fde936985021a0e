"""Pulls: resumed, verified, confined to their folder, and never over a different file."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from horizon_client import Client, CorruptDownload, FileConflict, NotFound, ServerFailed

if TYPE_CHECKING:
    from tests.unit.client.conftest import FakeDaemon

WEIGHTS = random.Random(1).randbytes(25_300)
FILES = {"model.safetensors": WEIGHTS, "config.json": b"{}", "trainer/state.json": b'{"step": 10}'}


@pytest.fixture
def job(daemon: FakeDaemon) -> str:
    """A job with two checkpoints; the first is the best, the second the last."""
    daemon.add_checkpoint(10, FILES, best=True, eval_loss=1.0)
    daemon.add_checkpoint(20, {**FILES, "config.json": b'{"later": 1}'}, last=True)
    return "job-1"


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


@pytest.mark.parametrize("cuts", [[0], [1], [25], [3, 0, 20]])
def test_a_cut_pull_continues_where_it_stopped(
    client: Client, daemon: FakeDaemon, job: str, tmp_path: Path, cuts: list[int]
) -> None:
    daemon.stream_cuts = list(cuts)
    result = client.checkpoints.pull(job, tmp_path, at=10)
    assert (tmp_path / "model.safetensors").read_bytes() == WEIGHTS
    assert result.received_bytes == len(WEIGHTS) + 2
    expected = [1000 * sum(cuts[: i + 1]) for i in range(len(cuts))]
    assert daemon.read_offsets[: len(cuts) + 1] == [0, *expected]


def test_partial_file_of_an_earlier_run_is_used(client: Client, daemon: FakeDaemon, job: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.part").write_bytes(WEIGHTS[:7777])
    result = client.checkpoints.pull(job, tmp_path, at=10)
    assert (tmp_path / "model.safetensors").read_bytes() == WEIGHTS
    assert result.received_bytes == len(WEIGHTS) - 7777 + 2
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize("leftover", [b"other bytes", WEIGHTS + b"too long", b"x" * len(WEIGHTS)])
def test_useless_partial_file_is_replaced(
    client: Client, daemon: FakeDaemon, job: str, tmp_path: Path, leftover: bytes
) -> None:
    (tmp_path / "model.safetensors.part").write_bytes(leftover)
    client.checkpoints.pull(job, tmp_path, at=10)
    assert (tmp_path / "model.safetensors").read_bytes() == WEIGHTS


def test_one_corrupt_byte_is_detected(client: Client, daemon: FakeDaemon, job: str, tmp_path: Path) -> None:
    damaged = bytearray(WEIGHTS)
    damaged[12_345] ^= 1
    daemon.files["10/model.safetensors"] = bytes(damaged)
    with pytest.raises(CorruptDownload, match=r"model\.safetensors arrived damaged"):
        client.checkpoints.pull(job, tmp_path, at=10)
    assert not (tmp_path / "model.safetensors").exists()
    assert not (tmp_path / "model.safetensors.part").exists()


def test_too_many_bytes_are_refused(client: Client, daemon: FakeDaemon, job: str, tmp_path: Path) -> None:
    daemon.files["10/model.safetensors"] = WEIGHTS + b"more"
    with pytest.raises(CorruptDownload, match=r"model\.safetensors"):
        client.checkpoints.pull(job, tmp_path, at=10)


def test_identical_files_are_left_alone_and_different_ones_refused(
    client: Client, daemon: FakeDaemon, job: str, tmp_path: Path
) -> None:
    client.checkpoints.pull(job, tmp_path, at=10)
    assert client.checkpoints.pull(job, tmp_path, at=10).received_bytes == 0

    reads = len(daemon.read_offsets)
    with pytest.raises(FileConflict, match=r"config\.json exists and is different"):
        client.checkpoints.pull(job, tmp_path, at=20)
    assert len(daemon.read_offsets) == reads
    assert (tmp_path / "config.json").read_bytes() == b"{}"

    client.checkpoints.pull(job, tmp_path, at=20, force=True)
    assert (tmp_path / "config.json").read_bytes() == b'{"later": 1}'


@pytest.mark.parametrize("path", ["../evil", "/etc/evil", "a/../../evil", "a//b", "C:\\evil", "..\\evil", "a/./b", ""])
def test_paths_that_lead_out_are_refused(client: Client, daemon: FakeDaemon, tmp_path: Path, path: str) -> None:
    daemon.add_checkpoint(5, {"config.json": b"{}", path: b"evil"})
    with pytest.raises(ServerFailed, match="is outside the folder"):
        client.checkpoints.pull("job-1", tmp_path / "out", at=5)
    assert list(tmp_path.iterdir()) == []


def test_links_that_lead_out_are_not_followed(client: Client, daemon: FakeDaemon, job: str, tmp_path: Path) -> None:
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
