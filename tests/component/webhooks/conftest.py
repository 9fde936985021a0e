"""A daemon that may send to loopback, a receiver there, and a clock that a test moves on."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.conftest import MakeDaemon
from tests.daemon_parts import DaemonParts
from tests.support.webhook_receiver import SECRET, Receiver, receiver

from horizon_server.records.account import EVERYONE, Principal
from horizon_server.records.webhook import Delivery, Webhook
from horizon_server.services.webhooks.hooks import Webhooks

LOOPBACK = ("127.0.0.0/8",)
ADA = Principal(name="ada", role="user", project="ada")


class Post:
    """The webhooks of a daemon, and its outbox, which is sent when a test says so."""

    def __init__(self, daemon: DaemonParts) -> None:
        self.daemon = daemon
        self._passed_s = 0.0
        self.webhooks.deliveries.clock = lambda: time.time() + self._passed_s

    @property
    def webhooks(self) -> Webhooks:
        return self.daemon.services.webhooks

    async def add(self, owner: Principal, url: str, *events: str, project: str = "", format: str = "json") -> Webhook:
        webhook, _ = await self.webhooks.create(
            owner, url=url, project=project, events=events, format=format, secret=SECRET
        )
        return webhook

    async def send(self, *, after_s: float = 0.0) -> int:
        """Let time pass, send all that is due then, and return how many requests that were."""
        self._passed_s += after_s
        number = 0
        while begun := await self.webhooks.deliveries.send_due():
            number += len(begun)
            await asyncio.gather(*begun)
        return number

    async def newest(self, webhook: Webhook) -> Delivery:
        return (await self.webhooks.store.deliveries(webhook.webhook_id))[0]

    async def webhook(self, webhook: Webhook) -> Webhook:
        found = await self.webhooks.store.get(webhook.webhook_id)
        assert found is not None
        return found


@pytest.fixture(scope="session")
def stocked(make_daemon: MakeDaemon, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state folder in which ada has a dataset that everybody may use."""
    folder = tmp_path_factory.mktemp("webhooks") / "state"

    async def stock() -> None:
        async with make_daemon(folder, queue=False) as daemon:
            await daemon.dataset(await daemon.user("ada"))
            await daemon.services.datasets.share(ADA, "chats", EVERYONE)

    asyncio.run(stock())
    return folder


@pytest.fixture
def state(stocked: Path, tmp_path: Path) -> Path:
    return shutil.copytree(stocked, tmp_path / "state", symlinks=True)


@pytest.fixture
async def daemon(make_daemon: MakeDaemon, state: Path) -> AsyncIterator[DaemonParts]:
    async with make_daemon(state, queue=False, webhook_networks=LOOPBACK) as made:
        yield made


@pytest.fixture
def post(daemon: DaemonParts) -> Post:
    return Post(daemon)


@pytest.fixture
def ada() -> Principal:
    return ADA


@pytest.fixture
async def inbox() -> AsyncIterator[Receiver]:
    async with receiver() as made:
        yield made
