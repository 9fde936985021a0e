"""What every scenario starts from: a real daemon and real uploads.

A scenario runs twice: with a daemon in the test's process, whose workers follow a script instead of training, and with
`horizond` itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.support.both_daemons import KINDS, AnyDaemon, make_one
from tests.support.pushed_state import PushedState

from horizon_client import Client


@pytest.fixture(scope="session")
def demo_files(pushed: PushedState) -> tuple[Path, Path]:
    """The built-in model folder and dataset file."""
    return pushed.model, pushed.dataset


@pytest.fixture(params=KINDS)
def make_daemon(
    request: pytest.FixtureRequest, tmp_path: Path, pushed: PushedState
) -> Iterator[Callable[..., AnyDaemon]]:
    """Start daemons, in the test's process or in their own; all are gone at the end."""
    made: list[AnyDaemon] = []

    def make(*flags: str, state: str = "state", **settings: float) -> AnyDaemon:
        made.append(make_one(request.param, tmp_path / state, pushed, *flags, **settings))
        return made[-1].start()

    yield make
    with ExitStack() as stack:
        for daemon in made:
            stack.callback(daemon.close)


@pytest.fixture
def daemon(make_daemon: Callable[..., AnyDaemon]) -> AnyDaemon:
    """One running daemon."""
    return make_daemon()


@pytest.fixture
def push_demo(demo_files: tuple[Path, Path]) -> Callable[[Client], None]:
    """Push the built-in model and dataset as `demo-model` and `demo-chats`; a daemon in a process has them of ada."""

    def push(client: Client) -> None:
        model, dataset = demo_files
        client.models.push(model, name="demo-model")
        client.datasets.push([dataset], name="demo-chats")

    return push
