"""A job with states on drives, against the real daemon: planned, trained, killed, and ended by a drive that fails."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.daemon_process import DaemonProcess, wait_for_state, wait_for_step
from tests.support.drives import drive_folders
from tests.support.pushed_state import MODEL, PushedState
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from horizon_client.errors import InvalidSpec

NUM_STEPS, SAVE_EVERY = 12, 4
# Less than what the job takes in memory, more than what it takes with all layers on drives.
SHORT_BYTES = 40 << 20
# Workers whose drives fail from the moment on when a file is there.
_SITECUSTOMIZE = """
import errno, os, sys

if "horizon_server.worker" in sys.orig_argv:
    write = os.pwritev

    def failing(file, buffers, offset, *flags):
        if os.path.exists({flag!r}) and "(deleted)" in os.readlink(f"/proc/self/fd/{{file}}"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return write(file, buffers, offset, *flags)

    os.pwritev = failing
"""


@pytest.fixture
def folders(tmp_path: Path) -> tuple[str, ...]:
    return drive_folders(tmp_path)


@pytest.fixture
def daemon(tmp_path: Path, pushed: PushedState, folders: tuple[str, ...]) -> Iterator[DaemonProcess]:
    running = pushed.daemon(tmp_path / "state")
    running._settings |= {"tier_dirs": ",".join(folders), "tier_endurance_bytes": 10**15, "on_sigterm": "leave"}
    running.start()
    try:
        yield running
    finally:
        running.close()


@pytest.fixture
def model(tmp_path: Path, pushed: PushedState) -> Path:
    """One whose states are more than what drives cost in memory."""
    folder, tokenizer = tmp_path / "model", AutoTokenizer.from_pretrained(pushed.model)
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=16,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    made: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    made.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def spec_of(name: str, **memory: Any) -> Any:
    return {
        "name": name,
        "model": "deep",
        "dataset": "demo-chats",
        "train": {"max_steps": NUM_STEPS, "sequence_length": 64, "tokens_per_step": 128, "compile": "off"},
        "checkpoint": {"every_steps": SAVE_EVERY, "keep_last": 9},
        "memory": memory,
    }


def planes_of(daemon: DaemonProcess, job_id: str) -> dict[str, bytes]:
    """All bytes of the last checkpoint."""
    found = max((daemon.state_dir / "jobs" / job_id / "checkpoints").glob("step-*"))
    return {str(file.relative_to(found)): file.read_bytes() for file in sorted(found.rglob("*.safetensors"))}


def limit_memory(daemon: DaemonProcess, limit_bytes: int, **settings: Any) -> None:
    daemon.kill()
    daemon._settings |= {"host_memory_limit_bytes": limit_bytes, "host_memory_reserve_bytes": 0, **settings}
    daemon.start()


def test_a_job_on_drives_learns_what_it_learns_in_memory_whatever_is_killed(
    daemon: DaemonProcess, model: Path, folders: tuple[str, ...]
) -> None:
    with daemon.client(daemon.user("ada")) as client:
        client.models.push(model, name="deep")
        whole = client.jobs.submit(spec_of("whole"))
        assert wait_for_state(client, whole.job_id, "SUCCEEDED").plan is not None
        needed = client.jobs.plan(spec_of("on-drives")).plan.host_total_bytes
        limit_memory(daemon, needed - SHORT_BYTES)

        refused = client.jobs.plan(spec_of("too-large")).plan
        assert not refused.fits and "it would fit with " in refused.message
        job = client.jobs.submit(spec_of("on-drives", tier="drive"))
        assert job.plan is not None and job.plan.fits and job.plan.drives is not None
        assert 3 < job.plan.drives.num_layers < 16 and job.plan.drives.num_drives == 2
        wait_for_step(client, job.job_id, 2)
        (pid,) = daemon.worker_pids()
        os.kill(pid, signal.SIGKILL)
        wait_for_step(client, job.job_id, 6)
        daemon.kill()
        daemon.start()
        done = wait_for_state(client, job.job_id, "SUCCEEDED", "FAILED")
        assert done.state == "SUCCEEDED", done.message
        assert done.last_step is not None and len(done.last_step.drives) == 2
        assert planes_of(daemon, job.job_id) == planes_of(daemon, whole.job_id)
        assert not any(list(Path(folder).iterdir()) for folder in folders), "files are gone with the job"


def test_a_drive_that_fails_ends_its_job_alone_and_the_job_continues_elsewhere(
    daemon: DaemonProcess, model: Path, folders: tuple[str, ...], tmp_path: Path
) -> None:
    flag, code = tmp_path / "fails", tmp_path / "code"
    code.mkdir()
    (code / "sitecustomize.py").write_text(_SITECUSTOMIZE.format(flag=str(flag)), "ascii")
    with daemon.client(daemon.user("ada")) as client:
        client.models.push(model, name="deep")
        whole = client.jobs.submit(spec_of("whole"))
        wait_for_state(client, whole.job_id, "SUCCEEDED")
        needed = client.jobs.plan(spec_of("on-drives")).plan.host_total_bytes
        daemon.environment["PYTHONPATH"] = str(code)
        limit_memory(daemon, needed - SHORT_BYTES)

        job = client.jobs.submit(spec_of("on-drives", tier="drive"))
        wait_for_step(client, job.job_id, SAVE_EVERY + 1)
        flag.touch()
        failed = wait_for_state(client, job.job_id, "FAILED", "SUCCEEDED")
        assert failed.state == "FAILED" and failed.reason == "DRIVE_FAILED", failed.message
        assert any(folder in failed.message for folder in folders) and "Input/output error" in failed.message
        assert client.checkpoints.list(job.job_id)

        flag.unlink()
        other = tmp_path / "other-drive"
        other.mkdir()
        limit_memory(daemon, needed - SHORT_BYTES, tier_dirs=str(other))
        client.jobs.resume(job.job_id)
        done = wait_for_state(client, job.job_id, "SUCCEEDED", "FAILED")
        assert done.state == "SUCCEEDED", done.message
        assert planes_of(daemon, job.job_id) == planes_of(daemon, whole.job_id)


def test_a_job_whose_only_drives_are_taken_out_continues_in_memory(
    daemon: DaemonProcess, model: Path, tmp_path: Path
) -> None:
    with daemon.client(daemon.user("ada")) as client:
        client.models.push(model, name="deep")
        needed = client.jobs.plan(spec_of("on-drives")).plan.host_total_bytes
        limit_memory(daemon, needed - SHORT_BYTES)
        job = client.jobs.submit(spec_of("on-drives", tier="drive"))
        wait_for_step(client, job.job_id, SAVE_EVERY + 1)
        client.jobs.pause(job.job_id)
        assert wait_for_state(client, job.job_id, "PAUSED").plan is not None
        limit_memory(daemon, needed + (1 << 30), tier_dirs="")
        client.jobs.resume(job.job_id)
        done = wait_for_state(client, job.job_id, "SUCCEEDED", "FAILED")
        assert done.state == "SUCCEEDED" and done.plan is not None and done.plan.drives is None, done.message


def test_a_daemon_without_drives_says_so(daemon: DaemonProcess, tmp_path: Path) -> None:
    daemon.kill()
    daemon._settings |= {"tier_dirs": f"{tmp_path}/gone,/dev/shm"}
    daemon.start()
    assert "gone" in daemon.log() and "there is no such folder" in daemon.log() and "tmpfs" in daemon.log()
    spec: Any = {**spec_of("j", tier="drive"), "model": MODEL}
    with daemon.client(daemon.user("ada")) as client, pytest.raises(InvalidSpec, match="no drive for it"):
        client.jobs.plan(spec)
