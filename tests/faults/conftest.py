"""One real daemon for all cases that leave it as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.support.daemon_process import DaemonProcess
from tests.support.node import Node, Shell, node_of
from tests.support.pushed_state import PushedState
from tests.support.trials import Reference


@pytest.fixture(scope="session")
def node(tmp_path_factory: pytest.TempPathFactory, pushed: PushedState) -> Iterator[Node]:
    """The shared daemon; cases leave it running and its queue empty."""
    daemon = pushed.daemon(tmp_path_factory.mktemp("faults") / "state").let_children_rest()
    try:
        yield node_of(daemon, pushed)
    finally:
        daemon.close()


@pytest.fixture(autouse=True)
def no_job_outlives_its_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """Cancel what a failed test has left running on the shared daemon: it would hold the queue and burn a core."""
    yield
    if "node" in request.fixturenames:
        node: Node = request.getfixturevalue("node")
        node.daemon.resting.clear()
        with node.client() as client:
            for job in client.jobs.list():
                if job.state not in ("SUCCEEDED", "FAILED", "CANCELLED"):
                    client.jobs.cancel(job.job_id)


@pytest.fixture
def shell(node: Node, tmp_path: Path) -> Shell:
    return node.shell(tmp_path)


@pytest.fixture
def own_node(tmp_path: Path, pushed: PushedState) -> Iterator[Callable[..., Node]]:
    """Daemons that a case may stop, kill or starve."""
    made: list[DaemonProcess] = []

    def make(*flags: str, state_dir: Path | None = None) -> Node:
        made.append(pushed.daemon(state_dir or tmp_path / "state", *flags).let_children_rest())
        return node_of(made[-1], pushed)

    yield make
    with ExitStack() as stack:
        for daemon in made:
            stack.callback(daemon.close)


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Reference:
    """What the seeded trials start from and are compared with; all processes of a test run share it."""
    base = tmp_path_factory.getbasetemp()
    return Reference.shared((base if worker_id == "master" else base.parent) / "trials")
