"""A state folder on a disk that runs full: a sentence, no half files, and a daemon that goes on when there is space
again."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.daemon_process import wait_for, wait_for_state, wait_for_step
from tests.support.node import Node, node_of, quick_spec, run_horizond
from tests.support.processes import processes_of
from tests.support.pushed_state import PushedState
from tests.support.trials import FullDiskScene, Reference, Trial

from horizon_server.blobs.space import RESERVE_FILE

MIB = 2**20

# A fifth of the kills: a trial takes as long as one of those. Without, the phases that write most: saving, training and
# uploading.
NUM_TRIALS = max(3, int(os.environ.get("HORIZON_KILLS", "0")) // 5)
SEED = int(os.environ.get("HORIZON_KILLS_SEED", "10"))


@pytest.fixture
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of 64 MiB, or of what a test asks for by its parameter."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("a small disk needs root, to mount a tmpfs")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={getattr(request, 'param', 64)}m", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True, timeout=240)


@pytest.fixture
def tight_node(small_disk: Path, pushed: PushedState) -> Iterator[Node]:
    daemon = pushed.daemon(small_disk / "state")
    try:
        yield node_of(daemon, pushed)
    finally:
        daemon.close()


def fill(disk: Path, *, leave_bytes: int) -> Path:
    """Take all space but this."""
    ballast = disk / "ballast"
    ballast.unlink(missing_ok=True)
    with ballast.open("wb") as file:
        for _ in range(100):
            # A running job takes some of the space between the question and the answer.
            with contextlib.suppress(OSError):
                os.posix_fallocate(file.fileno(), 0, max(1, shutil.disk_usage(disk).free - leave_bytes))
                return ballast
    raise AssertionError(f"{disk} could not be filled")


def half_files(state: Path) -> list[str]:
    return [str(p) for p in state.rglob("*") if p.name.endswith((".partial", ".raw", ".half")) or ".tmp-" in p.name]


def test_a_full_disk_is_told_survived_and_forgotten(tight_node: Node, small_disk: Path, tmp_path: Path) -> None:
    node, state = tight_node, tight_node.daemon.state_dir
    shell = node.shell(tmp_path)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "x" * 1000}) * 1 + "\n")
    big = tmp_path / "big.txt"
    big.write_bytes(b"some text\n" * (4 * MIB // 10))

    with node.client() as client:
        # Enough steps that it cannot end before it is cancelled.
        spare = client.jobs.submit(quick_spec("spare", max_steps=100_000))
        client.jobs.cancel(spare.job_id)
        wait_for_state(client, spare.job_id, "CANCELLED")
        ballast = fill(small_disk, leave_bytes=2 * MIB)
        assert "the node's disk has" in shell.fails(2, "dataset", "push", "big.txt", "--name", "big")
        full = client.jobs.submit(quick_spec("full"))
        events = client.jobs.watch(full.job_id)
        warned = next(event for event in events if event.kind == "message" and event.level == "warning")
        assert "step-00000002 needs" in warned.text
        assert "that are kept for the daemon" in warned.text
        assert str(state) not in warned.text
    assert half_files(state) == []

    fill(small_disk, leave_bytes=0)
    assert "the node's disk" in shell.fails(2, "dataset", "push", "rows.jsonl", "--name", "rows")
    wait_for(lambda: not (state / RESERVE_FILE).exists(), 240)
    # With the reserve, the database has space: users can delete what they do not need.
    shell.works("job", "delete", spare.job_id, "--yes")
    assert "full" in shell.works("job", "list")
    assert "the node's disk" in shell.fails(2, "dataset", "push", "rows.jsonl", "--name", "rows")

    ballast.unlink()
    assert node.daemon.process is not None
    assert node.daemon.process.poll() is None
    shell.works("dataset", "push", "big.txt", "--name", "big")
    with node.client() as client:
        ended = wait_for_state(client, full.job_id, "FAILED", "SUCCEEDED", timeout_s=200.0)
        assert (ended.state, ended.attempt) == ("SUCCEEDED", 1), ended.message
    assert half_files(state) == []


def test_a_disk_that_fills_under_a_running_job(tight_node: Node, small_disk: Path, tmp_path: Path) -> None:
    """The job waits for space, with all the steps it has made; calls are answered meanwhile."""
    node = tight_node
    shell = node.shell(tmp_path)
    with node.client() as client:
        job = client.jobs.submit(quick_spec("running", max_steps=100_000))
        wait_for_step(client, job.job_id, 2)
        ballast = fill(small_disk, leave_bytes=0)
        wait_for(lambda: "the journal waits for the database" in node.daemon.log(), 240)
        at = client.jobs.get(job.job_id).step
        assert "RUNNING" in shell.works("job", "list")
        assert processes_of("horizon_server.worker", node.daemon.state_dir), "its worker lives"
        ballast.unlink()
        wait_for_step(client, job.job_id, at + 2)
        assert client.jobs.get(job.job_id).attempt == 1
        client.jobs.cancel(job.job_id)
        wait_for_state(client, job.job_id, "CANCELLED")
        following = client.jobs.submit(quick_spec("following"))
        assert wait_for_state(client, following.job_id, "FAILED", "SUCCEEDED").state == "SUCCEEDED"
    assert node.daemon.terminate() == 0


def test_a_start_on_a_full_disk_works_with_the_reserve_and_is_one_message_without(
    tight_node: Node, small_disk: Path, tmp_path: Path
) -> None:
    daemon = tight_node.daemon
    wait_for(lambda: (daemon.state_dir / RESERVE_FILE).exists(), 240)
    assert daemon.terminate() == 0
    fill(small_disk, leave_bytes=0)
    daemon.start()
    assert "demo-chats" in tight_node.shell(tmp_path).works("dataset", "list")
    assert daemon.terminate() == 0
    assert not (daemon.state_dir / RESERVE_FILE).exists()

    ballast = fill(small_disk, leave_bytes=0)
    done = run_horizond("serve", "--state-dir", str(daemon.state_dir), "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0")
    errors = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert (done.returncode, len(errors)) == (2, 1), done.stderr
    assert "full" in errors[0]
    assert "Traceback" not in done.stderr
    assert "Event loop is closed" not in done.stderr
    ballast.unlink()
    daemon.start()


def test_several_files_at_once_that_fit_alone_but_not_together(
    tight_node: Node, small_disk: Path, tmp_path: Path
) -> None:
    node, state = tight_node, tight_node.daemon.state_dir
    shell = node.shell(tmp_path)
    shards = tmp_path / "shards"
    shards.mkdir()
    for number in range(4):
        (shards / f"{number}.txt").write_bytes(b"text of shard %d\n" % number * (5 * MIB // 16))
    ballast = fill(small_disk, leave_bytes=12 * MIB)
    before = {blob.name for blob in state.glob("blobs/*/*")}
    sentence = shell.fails(2, "dataset", "push", "shards", "--name", "shards")
    assert "the node's disk" in sentence
    assert half_files(state) == []
    whole = {blob.name for blob in state.glob("blobs/*/*")} - before
    proofs = {proof.name.partition("-")[0] for proof in state.glob("uploads/ada/*.proved")}
    assert whole <= proofs, "every content that is there belongs to an upload that goes on or expires"

    ballast.unlink()
    result = json.loads(shell.works("dataset", "push", "shards", "--name", "shards", "-o", "json"))
    assert result["dataset"]["state"] == "READY"
    assert result["sent_bytes"] < result["dataset"]["size_bytes"], "what was durable is gone on with"
    assert list(state.glob("uploads/*/*")) == []
    shell.works("dataset", "delete", "shards")
    assert {blob.name for blob in state.glob("blobs/*/*")} == before


@pytest.mark.timeout(900)
@pytest.mark.parametrize("small_disk", [256], indirect=True, ids=["256m"])
@pytest.mark.parametrize(
    "trial", [Trial.of(SEED, number, full_disk=True) for number in range(NUM_TRIALS)], ids=lambda trial: trial.id
)
def test_a_disk_that_is_full_for_some_seconds_costs_nothing(
    trial: Trial, reference: Reference, small_disk: Path, tmp_path: Path
) -> None:
    """At any moment between the first upload and the last checkpoint; what needs space waits for it, or is refused and
    tried again."""
    scene = FullDiskScene(trial, reference, small_disk, tmp_path / "tmp")
    with scene.reported():
        scene.play()
        scene.require_all_is_well()
