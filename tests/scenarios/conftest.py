"""Real daemons, real workers, real uploads: what every scenario starts from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.daemon_process import DaemonProcess

from horizon_client import Client
from horizon_server.demo.recipe import DEMO_SPEC, write_demo_dataset, write_demo_model


@pytest.fixture(scope="session")
def demo_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The built-in model folder and dataset file."""
    folder = tmp_path_factory.mktemp("demo")
    return write_demo_model(folder / "model"), write_demo_dataset(folder)


@pytest.fixture
def make_daemon(tmp_path: Path) -> Iterator[Callable[..., DaemonProcess]]:
    """Start daemons; all are gone at the end."""
    made: list[DaemonProcess] = []

    def make(*flags: str, state: str = "state") -> DaemonProcess:
        made.append(DaemonProcess(tmp_path / state, *flags))
        return made[-1].start()

    yield make
    for daemon in made:
        daemon.close()


@pytest.fixture
def daemon(make_daemon: Callable[..., DaemonProcess]) -> DaemonProcess:
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


def demo_spec(name: str = "job", *, checkpoint: dict[str, Any] | None = None, **train: Any) -> dict[str, Any]:
    """A short job over the built-in model and dataset."""
    return {
        **DEMO_SPEC,
        "name": name,
        "model": "demo-model",
        "dataset": "demo-chats",
        "train": {**DEMO_SPEC["train"], "max_steps": 6, **train},
        "checkpoint": checkpoint or {"every_steps": 0},
    }
