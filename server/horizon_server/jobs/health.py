"""Which devices of the node no job may use: those that an admin has withdrawn, and those on which a trial has failed
after the failure of a job."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field

import structlog

from horizon_server.records.sharing import NodeCondition

log = structlog.get_logger(__name__)

WITHDRAWN = "withdrawn by an admin"


@dataclass(kw_only=True, eq=False)
class DeviceHealth:
    """Thread: belongs to one event loop.

    Results of trials are in memory only: a daemon that is restarted takes all devices to work.

    Args:
        why_broken: tries a device of that name; returns why it cannot be used, nothing where it can.
    """

    why_broken: Callable[[str], Awaitable[str]]
    _broken: dict[str, str] = field(init=False, default_factory=dict)

    async def try_devices(self, names: Collection[str]) -> dict[str, str]:
        """Try devices of a job that has failed, together; return those that fail too, and why."""
        for name, why in zip(names, await asyncio.gather(*map(self.why_broken, names)), strict=True):
            if why:
                log.error("a device is out of service", device=name, why=why)
                self._broken[name] = f"out of service, as a trial of it failed: {why}"
        return {name: self._broken[name] for name in names if name in self._broken}

    def forget(self) -> None:
        """An admin has seen to the devices: those that trials failed on are used again."""
        self._broken.clear()

    def out(self, condition: NodeCondition) -> dict[str, str]:
        """Return the devices that no job may use, and why."""
        return {**self._broken, **dict.fromkeys(condition.withdrawn, WITHDRAWN)}
