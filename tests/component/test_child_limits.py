"""The children that read what users push run with the limits that docs/security.md names: read from the processes
themselves."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.conftest import MakeDaemon
from tests.daemon_parts import DaemonParts, chat_rows

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


async def seen(module: str, call: Callable[[], Awaitable[Any]]) -> set[tuple[int, int]]:
    """The limits of memory and of files that the children of a call run with."""
    task, found = asyncio.ensure_future(call()), set[tuple[int, int]]()
    async with asyncio.timeout(60):
        while not task.done():
            for child in psutil.Process().children():
                with contextlib.suppress(psutil.Error):  # it has just ended
                    if module in child.cmdline():
                        found.add((child.rlimit(psutil.RLIMIT_DATA)[0], child.rlimit(psutil.RLIMIT_FSIZE)[0]))
            await asyncio.sleep(0)
    await task
    return found


def wanted(limits: Limits) -> tuple[int, int]:
    unlimited = psutil.RLIM_INFINITY
    return limits.memory_bytes or unlimited, limits.file_bytes or unlimited


async def test_children_run_with_their_limits(daemon: DaemonParts) -> None:
    async def prepared() -> None:
        job = await daemon.submit(ADA)
        await daemon.until(job.job_id, JobState.SUCCEEDED)

    async def previewed() -> None:
        await daemon.services.previews.preview(ADA, "chats", "tiny", PreviewOptions())

    checks = await seen("horizon_server.datasets.checking", lambda: daemon.dataset(ADA, "more", chat_rows(16)))
    assert wanted(checking._LIMITS) in checks
    assert wanted(preparation._LIMITS) in await seen("horizon_server.datasets.preparing", prepared)
    await daemon.model(ADA)
    found = await seen("horizon_server.datasets.preview_child", previewed)
    assert _MEMORY_BYTES in {memory_bytes for memory_bytes, _ in found}


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
