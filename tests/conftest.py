"""A real daemon inside the test's process, for every package of tests; see tests/daemon_parts.py."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

# A parent such as `nohup ... &` leaves SIGINT ignored, and children inherit that: the tests that interrupt a command would then wait for a
# signal that never arrives. A handler of Python's own is reset to the default when a child starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

if TYPE_CHECKING:
    from tests.daemon_parts import DaemonParts

MakeDaemon = Callable[..., AbstractAsyncContextManager["DaemonParts"]]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that jobs may name by its folder."""
    from horizon_server.demo.recipe import write_demo_model

    return write_demo_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def prepared_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared data of all daemons of the session: the same data is prepared once."""
    return tmp_path_factory.mktemp("prepared")


@pytest.fixture(scope="session")
def make_daemon(model_folder: Path, prepared_data: Path) -> MakeDaemon:
    """Make daemons: `async with make_daemon(state_dir) as daemon`; the same folder again is a restart."""
    from tests.daemon_parts import daemon_parts  # heavy imports, which most tests do without

    return partial(daemon_parts, model_folder=model_folder, prepared=prepared_data)


@pytest.fixture
async def daemon(make_daemon: MakeDaemon, tmp_path: Path) -> AsyncIterator[DaemonParts]:
    """A running daemon with an empty state folder."""
    async with make_daemon(tmp_path / "state") as made:
        yield made
