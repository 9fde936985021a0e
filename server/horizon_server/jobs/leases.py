"""Which checkpoints are being downloaded: a download reads one file after the other, and none of them may be removed in
between."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from horizon_server.errors import InUse
from horizon_server.jobs.folders import CheckpointFolder

# How long after its last file a download may ask for the next.
GRACE_S = 60.0
# Each lease has a descriptor.
MAX_LEASES = 128


@dataclass(kw_only=True, eq=False)
class _Lease:
    lock: contextlib.ExitStack
    num_readers: int = 0
    ending: asyncio.TimerHandle | None = None


@dataclass(eq=False)
class ReadLeases:
    """The leases of one daemon. Thread: belongs to one event loop."""

    _leases: dict[str, _Lease] = field(init=False, default_factory=dict)

    async def take(self, checkpoints: CheckpointFolder, step: int) -> contextlib.AbstractContextManager[None]:
        """Return a block in which a checkpoint is not removed, nor for `GRACE_S` after it, but by its owner. Raises
        NotFound."""
        key = str(checkpoints.of_step(step))
        if key not in self._leases:
            lock = contextlib.ExitStack()
            await asyncio.to_thread(lock.enter_context, checkpoints.reading(step))
            if key in self._leases:  # by another call meanwhile
                lock.close()
            else:
                self._leases[key] = _Lease(lock=lock)
                self._make_room()
        return self._reader(key)

    @contextlib.contextmanager
    def _reader(self, key: str) -> Iterator[None]:
        lease = self._leases[key]
        lease.num_readers += 1
        if lease.ending is not None:
            lease.ending.cancel()
        try:
            yield
        finally:
            lease.num_readers -= 1
            if not lease.num_readers:
                lease.ending = asyncio.get_running_loop().call_later(GRACE_S, self._end, key)

    def require_unread(self, checkpoints: CheckpointFolder, steps: Sequence[int]) -> None:
        """Let pass checkpoints of which no file is being read at this moment. Raises InUse."""
        for step in steps:
            lease = self._leases.get(str(checkpoints.of_step(step)))
            if lease is not None and lease.num_readers:
                raise InUse(
                    f"the checkpoint of step {step} is being downloaded; wait for the end of the download",
                    retry_after_s=5.0,
                )

    def drop_idle(self, checkpoints: CheckpointFolder, step: int) -> None:
        """End the lease of a checkpoint of which no file is being read, as its owner deletes it."""
        key = str(checkpoints.of_step(step))
        if key in self._leases and not self._leases[key].num_readers:
            self._end(key)

    def close(self) -> None:
        """End all leases."""
        for key in list(self._leases):
            self._end(key)

    def _make_room(self) -> None:
        idle = [key for key, lease in self._leases.items() if not lease.num_readers and lease.ending is not None]
        for key in idle[: max(0, len(self._leases) - MAX_LEASES)]:
            self._end(key)

    def _end(self, key: str) -> None:
        lease = self._leases.pop(key)
        if lease.ending is not None:
            lease.ending.cancel()
        lease.lock.close()
