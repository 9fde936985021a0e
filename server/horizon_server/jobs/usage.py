"""What jobs use of the devices: charged to shares at once, and stored every few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from horizon_server.db.sharing import SharingStore
from horizon_server.records.job import JobRecord
from horizon_server.scheduling.shares import Shares


@dataclass
class _Used:
    device_s: float = 0.0
    num_tokens: int = 0


class UsageMeter:
    """Counts device seconds and tokens by job until they are stored. Thread: belongs to one event loop."""

    def __init__(self, store: SharingStore, shares: Shares, *, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._shares = shares
        self._clock = clock
        self._used: dict[str, tuple[JobRecord, _Used]] = {}

    def add(self, job: JobRecord, device_s: float, *, num_tokens: int = 0) -> None:
        """Count what a job has used just now; `device_s` are those of a device of this node, and devices of others are
        used as long."""
        device_s *= 1 if job.plan is None else job.plan.num_nodes
        if device_s:
            self._shares.charge(job.project, job.owner, device_s, self._clock())
        _, used = self._used.setdefault(job.job_id, (job, _Used()))
        used.device_s += device_s
        used.num_tokens += num_tokens

    async def store(self) -> None:
        """Store what was counted since the last call. Raises DiskFull or DatabaseUnavailable; the counts are kept
        then."""
        if not self._used:
            return
        now_s = self._clock()
        for job_id, (job, used) in list(self._used.items()):
            device_s, num_tokens = used.device_s, used.num_tokens
            await self._store.charge(
                job.project, job.owner, job_id=job_id, device_s=device_s, num_tokens=num_tokens, now_s=now_s
            )
            # What came in while it was stored stays for the next time.
            used.device_s -= device_s
            used.num_tokens -= num_tokens
            if self._used[job_id][1].num_tokens == 0 and used.device_s <= 0.0:
                del self._used[job_id]
        await self._store.save_uses(self._shares.uses(now_s))
