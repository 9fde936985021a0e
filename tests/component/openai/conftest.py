"""A real daemon with a model, and clients of OpenAI's own SDK."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from openai import OpenAI
from tests.support.daemon_process import DaemonProcess
from tests.support.pushed_state import PushedState

Connect = Callable[..., OpenAI]

CHATS = [
    {"messages": [{"role": "user", "content": f"Say {word}."}, {"role": "assistant", "content": f"{word}!"}]}
    for word in ("one", "two", "three", "four", "five", "six", "seven", "eight")
]


def lines(rows: list[Any]) -> bytes:
    """Rows as a file of JSON lines."""
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.fixture(scope="session")
def daemon(tmp_path_factory: pytest.TempPathFactory, pushed: PushedState) -> Iterator[DaemonProcess]:
    """A daemon in which ada has pushed `demo-model` and `demo-chats`."""
    running = pushed.daemon(tmp_path_factory.mktemp("openai") / "state")
    running.start()
    try:
        yield running
    finally:
        running.close()


@pytest.fixture(scope="session")
def connect(daemon: DaemonProcess) -> Iterator[Connect]:
    """Make clients with a user's token. Answers that do not have the SDK's types are refused."""
    tokens: dict[str, str] = {}
    with ExitStack() as stack:

        def make(user: str = "ada", role: str = "user", api_key: str = "", **options: Any) -> OpenAI:
            if not api_key and user not in tokens:
                tokens[user] = daemon.user(user, role=role)
            options = {"max_retries": 0, "_strict_response_validation": True, **options}
            url = f"http://{daemon.endpoints['http']}/v1"
            return stack.enter_context(OpenAI(base_url=url, api_key=api_key or tokens[user], **options))

        yield make


@pytest.fixture(scope="session")
def client(connect: Connect) -> OpenAI:
    """Ada's client."""
    return connect()
