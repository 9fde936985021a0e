"""The children that read what users push run with the limits that docs/security.md names: read from the processes
themselves."""

from __future__ import annotations

import signal
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.conftest import MakeDaemon
from tests.daemon_parts import DaemonParts, chat_rows

from horizon_server.children import child
from horizon_server.children.child import Limits
from horizon_server.datasets import checking, preparing
from horizon_server.datasets.preview import PreviewOptions
from horizon_server.jobs import preparation
from horizon_server.records.account import Principal
from horizon_server.records.job import JobState
from horizon_server.services.previews import _MEMORY_BYTES

ADA = Principal(name="ada", role="user", project="ada")


@pytest.fixture
async def daemon(make_daemon: MakeDaemon, tmp_path: Path) -> AsyncIterator[DaemonParts]:
    async with make_daemon(tmp_path / "state", prepared=None) as made:
        await made.services.accounts.add_user(ADA.name)
        await made.dataset(ADA)
        yield made


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[tuple[int, int]]]:
    """The limits of memory and of files that children begin with, by their modules."""
    found, set_limits = defaultdict[str, set[tuple[int, int]]](set), child.limit

    def limit(pid: int, limits: Limits) -> None:
        set_limits(pid, limits)
        process = psutil.Process(pid)  # which waits until this returns
        while not (words := process.cmdline()):  # the kernel is still within the child's execve
            pass
        module = next(word for word in words if word.startswith("horizon_server."))
        found[module].add((process.rlimit(psutil.RLIMIT_DATA)[0], process.rlimit(psutil.RLIMIT_FSIZE)[0]))

    monkeypatch.setattr(child, "limit", limit)
    return found


def wanted(limits: Limits) -> tuple[int, int]:
    unlimited = psutil.RLIM_INFINITY
    return limits.memory_bytes or unlimited, limits.file_bytes or unlimited


async def test_children_run_with_their_limits(daemon: DaemonParts, seen: dict[str, set[tuple[int, int]]]) -> None:
    await daemon.dataset(ADA, "more", chat_rows(16))
    assert seen["horizon_server.datasets.checking"] == {wanted(checking._LIMITS)}
    job = await daemon.submit(ADA)
    await daemon.until(job.job_id, JobState.SUCCEEDED)
    assert seen["horizon_server.datasets.preparing"] == {wanted(preparation._LIMITS)}
    await daemon.model(ADA)
    await daemon.services.previews.preview(ADA, "chats", "tiny", PreviewOptions())
    assert {memory_bytes for memory_bytes, _ in seen["horizon_server.datasets.preview_child"]} == {_MEMORY_BYTES}


class _Asked(Exception):
    pass


def test_a_preparation_has_a_bounded_number_of_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(_: object, *, num_processes: int, **more: object) -> None:
        raise _Asked(num_processes)

    monkeypatch.setattr(preparing, "prepare", prepare)
    monkeypatch.setattr(preparing, "available_cpus", lambda: 1000)
    monkeypatch.setattr(preparing, "from_plain", lambda kind, plain: None)
    before: Any = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(_Asked) as asked:
            preparing.work({}, None)  # type: ignore[arg-type]
    finally:
        signal.signal(signal.SIGTERM, before)
    assert asked.value.args == (preparing._MAX_PROCESSES,)
