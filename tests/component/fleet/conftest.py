"""A daemon that takes jobs, box2, and one that sends jobs there, box1; each with scripted workers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.conftest import MakeDaemon
from tests.daemon_parts import WAIT_S, DaemonParts
from tests.support.rates import write_rates

from horizon_server.api.box.server import BoxServer, start_box_server
from horizon_server.nodes.key import make_key
from horizon_server.records.account import Principal


@dataclass
class Fleet:
    """Two daemons, and what serves between them."""

    make_daemon: MakeDaemon
    folder: Path
    key: Path
    box: DaemonParts
    server: BoxServer
    head: DaemonParts = field(init=False)
    ada: Principal = field(init=False)
    _of_head: contextlib.AsyncExitStack = field(init=False, default_factory=contextlib.AsyncExitStack)

    @property
    def port(self) -> int:
        """Where the box serves."""
        return int(self.server.address.rpartition(":")[2])

    async def start_head(self) -> None:
        """Have a head, in the same folder each time."""
        boxes = (f"box2={self.server.address}",)
        more = {"box_name": "box1", "boxes": boxes, "fleet_key_file": self.key, "num_threads": 1}
        self.head = await self._of_head.enter_async_context(self.make_daemon(self.folder / "box1", **more))
        following = asyncio.create_task(self.head.services.jobs.boxes.run())

        async def end() -> None:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

        self._of_head.push_async_callback(end)

    async def stop_head(self) -> None:
        """End the head."""
        await self._of_head.aclose()

    async def cut(self) -> None:
        """Have the box answer no more calls of the head."""
        await self.server.stop()

    async def mend(self) -> None:
        """Have the box answer again, at the same address."""
        settings = self.box.settings.model_copy(update={"box_port": self.port})
        self.server = await start_box_server(self.box.services, settings)

    async def until(self, is_so: Callable[[], Awaitable[bool]]) -> None:
        """Wait for what nothing announces."""
        async with asyncio.timeout(WAIT_S):
            while not await is_so():  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def arrived(self, job_id: str) -> None:
        """Wait until the head knows that a job is in the box."""

        async def is_so() -> bool:
            return (await self.head.job(job_id)).journal_line > 0

        await self.until(is_so)


@pytest.fixture
def fleet_key(tmp_path: Path) -> Path:
    make_key(tmp_path / "fleet.pem")
    return tmp_path / "fleet.pem"


@pytest.fixture
async def fleet(make_daemon: MakeDaemon, tmp_path: Path, fleet_key: Path) -> AsyncIterator[Fleet]:
    """Both run, and ada has pushed a model and a dataset to the head."""
    more = {"fleet_key_file": fleet_key, "fleet_address": "127.0.0.1", "num_threads": 1}
    for name in ("box1", "box2"):
        write_rates(tmp_path / name, num_threads=1)
    async with make_daemon(tmp_path / "box2", box_name="box2", box_port=0, **more) as box:
        made = Fleet(make_daemon, tmp_path, fleet_key, box, await start_box_server(box.services, box.settings))
        try:
            await made.start_head()
            made.ada = await made.head.user("ada")
            await made.head.dataset(made.ada)
            await made.head.model(made.ada)
            yield made
        finally:
            await made.stop_head()
            await made.server.stop()
