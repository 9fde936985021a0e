"""How every test runs, and a real daemon inside the test's process for those that want one; see
tests/daemon_parts.py."""

from __future__ import annotations

import fcntl
import importlib
import importlib.util
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

# A parent such as `nohup ... &` leaves SIGINT ignored, and children inherit that: the tests that interrupt a command
# would then wait for a signal that never arrives. A handler of Python's own is reset to the default when a child
# starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Hundreds of child processes import the same modules: each would compile them again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Before torch is loaded, which reads these once: OpenMP's threads that wait must sleep, as the daemon's workers do.
# Spinning, they would take the processors from the tests and the children that run at the same time.
os.environ.update({"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"})

# Before triton is loaded, which reads it once: where there is no GPU, its kernels run in its interpreter.
if not os.environ.get("HORIZON_REQUIRE_GPU"):
    os.environ["TRITON_INTERPRET"] = "1"

# The machine that lends the GPU has no hypothesis, and tests/gpu needs none.
with suppress(ImportError):
    from hypothesis import HealthCheck, settings

    # No limits by the clock: they say how busy the machine is, not whether the code is right. A test that hangs meets
    # pytest's timeout.
    settings.register_profile("horizon", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("horizon")

if TYPE_CHECKING:
    from tests.daemon_parts import DaemonParts
    from tests.support.pushed_state import PushedState

MakeDaemon = Callable[..., AbstractAsyncContextManager["DaemonParts"]]


TEST_ALL = "HORIZON_TEST_ALL"
"""Set by `make test-all`."""
INSIDE_A_TEST = "HORIZON_INSIDE_A_TEST"
"""Set where a test runs tests in a child: that test has the lock, and would wait for a child that waits for it."""
_LONGEST_FIRST = ("scenarios", "faults", "golden", "component")
_HAS_FAILED = pytest.StashKey[bool]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out further cases where not all tests are wanted, and put long tests first and those marked `alone` last.

    What is left at the end, when one process has no more to do, is then short. A test that runs alone waits until the
    other processes have ended theirs, and meanwhile no process begins one: among the long tests that would be minutes.
    """
    if not os.environ.get(TEST_ALL):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("further")])
        items[:] = [item for item in items if not item.get_closest_marker("further")]
    items.sort(key=_order)


def _order(item: pytest.Item) -> list[bool]:
    is_alone = item.get_closest_marker("alone") is not None
    return [is_alone, *(name not in item.path.parts for name in _LONGEST_FIRST)]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Run a test marked `alone` while no other process runs a test of this checkout."""
    if os.environ.get(INSIDE_A_TEST):
        return (yield)
    tests = Path(__file__).parent
    # Folders serve as locks: nothing is left behind.
    gate, room = os.open(tests / "support", os.O_RDONLY), os.open(tests, os.O_RDONLY)
    try:
        # Who waits for an empty room keeps the gate closed; with one lock, the others would enter again and again
        # before it.
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        return (yield)
    finally:
        # Closing alone would not do: a process that the test has forked holds the same lock.
        fcntl.flock(room, fcntl.LOCK_UN)
        os.close(gate)
        os.close(room)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Remember failures, for the fixture below."""
    report = yield
    item.stash[_HAS_FAILED] = item.stash.get(_HAS_FAILED, False) or report.failed
    return report


@pytest.fixture
def triton_interpreter() -> Iterator[Callable[[str], ModuleType]]:
    """Imports a module of Triton kernels for Triton's interpreter, which is chosen when it is imported."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs triton, which is for Linux only: pip install triton")
    if os.environ.get("HORIZON_REQUIRE_GPU"):
        pytest.skip("kernels are compiled here: tests/gpu runs them")
    loaded: list[str] = []

    def load(name: str) -> ModuleType:
        loaded.append(name)
        return importlib.import_module(name)

    yield load
    for name in loaded:
        sys.modules.pop(name, None)


@pytest.fixture(autouse=True)
def no_process_outlives_a_failed_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """Kill what a failed test has started and left: it would hold a port, a lock or a core. A test that passes must do
    that itself."""
    before = _children()
    yield
    if request.node.stash.get(_HAS_FAILED, False):
        for pid in _children() - before:
            with suppress(OSError):
                # Servers of multiprocessing belong to the whole process, whichever test was the first to need them.
                if b"multiprocessing" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)


def _children() -> set[int]:
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # a thread that has ended meanwhile
            found.update(map(int, (task / "children").read_text().split()))
    return found


@pytest.fixture(autouse=True)
def logs_go_where_they_went() -> Iterator[None]:
    """Undo what a test, or the program that it ran in this process, has set up for logs: their stream may be closed
    afterwards."""
    levels = {name: logging.getLogger(name).level for name in (None, "alembic", "uvicorn", "asyncio")}
    handlers = logging.getLogger().handlers[:]
    yield
    logging.getLogger().handlers[:] = handlers
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    if structlog := sys.modules.get("structlog"):  # not on the machine that lends the GPU
        structlog.reset_defaults()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that jobs may name by its folder."""
    from horizon_server.demo.recipe import write_demo_model

    return write_demo_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def pushed(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> PushedState:
    """A state folder with a user, a model and a dataset."""
    from tests.support.pushed_state import PushedState

    base = tmp_path_factory.getbasetemp()
    return PushedState.shared((base if worker_id == "master" else base.parent) / "pushed")


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
