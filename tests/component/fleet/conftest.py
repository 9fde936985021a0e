"""A daemon that takes jobs, box2, and one that sends jobs there, box1; each with scripted workers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.conftest import MakeDaemon
from tests.daemon_parts import DaemonParts

from horizon_server.api.box.server import BoxServer, start_box_server
from horizon_server.nodes.key import make_key
from horizon_server.records.account import Principal


@dataclass
class Fleet:
    """Two daemons, and what serves between them."""

    head: DaemonParts
    box: DaemonParts
    server: BoxServer
    ada: Principal

    async def cut(self) -> None:
        """Have the box answer no more calls of the head."""
        await self.server.stop()

    async def mend(self) -> None:
        """Have the box answer again, at the same address."""
        port = int(self.server.address.rpartition(":")[2])
        settings = self.box.settings.model_copy(update={"box_port": port})
        self.server = await start_box_server(self.box.services, settings)


@pytest.fixture
def fleet_key(tmp_path: Path) -> Path:
    make_key(tmp_path / "fleet.pem")
    return tmp_path / "fleet.pem"


@contextlib.asynccontextmanager
async def fleet_of(make_daemon: MakeDaemon, folder: Path, key: Path) -> AsyncIterator[Fleet]:
    """The folders of the two daemons are made in `folder`, or used again."""
    common = {"fleet_key_file": key, "fleet_address": "127.0.0.1"}
    async with make_daemon(folder / "box2", box_name="box2", box_port=0, **common) as box:
        server = await start_box_server(box.services, box.settings)
        boxes = (f"box2={server.address}",)
        async with make_daemon(folder / "box1", box_name="box1", boxes=boxes, **common) as head:
            following = asyncio.create_task(head.services.jobs.boxes.run())
            fleet = Fleet(head, box, server, await head.user("ada"))
            try:
                yield fleet
            finally:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
                await fleet.server.stop()


@pytest.fixture
async def fleet(make_daemon: MakeDaemon, tmp_path: Path, fleet_key: Path) -> AsyncIterator[Fleet]:
    async with fleet_of(make_daemon, tmp_path, fleet_key) as made:
        await made.head.dataset(made.ada)
        await made.head.model(made.ada)
        yield made
