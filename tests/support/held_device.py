"""A device that is kept from the jobs of a daemon until all of them wait for it, so that they take turns from their
first step on."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Self

from horizon_server.jobs.turns import DeviceTurns, Participant
from horizon_server.scheduling.state import Job
from horizon_server.worker_link.orders import TURN


class HeldDevice:
    """Has the turn on a device within its block, as an urgent job, from the next step boundary on."""

    def __init__(self, turns: DeviceTurns, *, timeout_s: float = 240.0) -> None:
        self._turns, self._timeout_s, self._granted = turns, timeout_s, asyncio.Event()
        job = Job(
            job_id="held",
            user="held",
            project="held",
            priority=1000,
            order=0,
            since_s=time.time(),
            device=turns.device,
            host_bytes=0,
            device_bytes=0,
        )
        self._participant = Participant(
            job=job, send=self._order, charge=lambda _: None, is_storing=lambda: True, on_overrun=lambda *_: None
        )

    async def __aenter__(self) -> Self:
        self._turns.join(self._participant)
        self._turns.want(self._participant)
        await asyncio.wait_for(self._granted.wait(), self._timeout_s)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._turns.leave(self._participant)

    async def until_wanted_by(self, num_jobs: int) -> None:
        """Wait until that number of jobs waits for the device."""
        end_s = time.monotonic() + self._timeout_s
        while sum(participant.waits for participant in self._turns.participants) < num_jobs:
            assert time.monotonic() < end_s, "the jobs do not ask for the device"
            await asyncio.sleep(0.01)

    def _order(self, order: bytes) -> None:
        if order == TURN:
            self._granted.set()
