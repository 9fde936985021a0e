"""What every scenario starts from: a real daemon and real uploads.

A scenario runs twice: with a daemon in the test's process, whose workers follow a script instead of training, and with `horizond` itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.support.both_daemons import KINDS, AnyDaemon, make_one

from horizon_client import Client
from horizon_server.demo.recipe import write_demo_dataset, write_demo_model


@pytest.fixture(scope="session")
def demo_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The built-in model folder and dataset file."""
    folder = tmp_path_factory.mktemp("demo")
    return write_demo_model(folder / "model"), write_demo_dataset(folder)


@pytest.fixture(params=KINDS)
def make_daemon(
    request: pytest.FixtureRequest, tmp_path: Path, demo_files: tuple[Path, Path]
) -> Iterator[Callable[..., AnyDaemon]]:
    """Start daemons, in the test's process or in their own; all are gone at the end."""
    made: list[AnyDaemon] = []

    def make(*flags: str, state: str = "state", **settings: float) -> AnyDaemon:
        made.append(make_one(request.param, tmp_path / state, demo_files[0], *flags, **settings))
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
    """Push the built-in model and dataset as `demo-model` and `demo-chats`."""

    def push(client: Client) -> None:
        model, dataset = demo_files
        client.models.push(model, name="demo-model")
        client.datasets.push([dataset], name="demo-chats")

    return push
