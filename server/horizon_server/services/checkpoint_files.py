"""Files of checkpoints, in pieces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

from horizon_server.errors import FieldViolation, InvalidSpec, NotFound
from horizon_server.records.account import Principal
from horizon_server.services.jobs import JobService

# Of a file in one message: far below the limit of a message, and large enough to fill a network.
PIECE_BYTES = 2**20


async def read_checkpoint_file(
    jobs: JobService, principal: Principal, key: str, step: int, path: str, *, offset: int = 0, length: int = 0
) -> AsyncGenerator[tuple[int, bytes], None]:
    """Yield the pieces of a file from `offset` on, each with its offset; `length` bytes of it, or all where that is 0.

    Raises:
        NotFound: when the checkpoint or the file does not exist.
        InvalidSpec: when offset or length are out of range.
    """
    job = await jobs.get(principal, key)
    if jobs.boxes.has_arrived(job):
        more = {"step": step, "path": path, "offset": offset, "length": length}
        async with aclosing(jobs.boxes.stream(principal, job, "read_file", **more)) as items:
            async for item in items:
                yield item.value, item.data
        return
    async with (
        jobs.checkpoint_file(principal, job.job_id, step, path) as file,
        aclosing(_pieces(file, f"{path} of step {step}", offset, length)) as pieces,
    ):
        async for piece in pieces:
            yield piece


async def _pieces(path: Path, what: str, offset: int, length: int) -> AsyncGenerator[tuple[int, bytes], None]:
    # The size that the checkpoint lists: one whose files have other sizes is not found.
    size = (await asyncio.to_thread(path.stat)).st_size
    problems = []
    if not 0 <= offset <= size:
        problem = f"offset is {offset}; it must be from 0 to the file's size, {size}"
        problems.append(FieldViolation(field="offset", description=problem))
    if length < 0:
        problem = f"length is {length}; it must be 0 (all) or more"
        problems.append(FieldViolation(field="length", description=problem))
    if problems:
        raise InvalidSpec(problems[0].description, violations=problems)
    end = min(size, offset + length) if length else size
    # In threads: a disk that is busy with a checkpoint must not hold up the calls of others.
    with await asyncio.to_thread(path.open, "rb") as file:
        await asyncio.to_thread(file.seek, offset)
        while offset < end:
            data = await asyncio.to_thread(file.read, min(PIECE_BYTES, end - offset))
            if not data:
                raise NotFound(f"{what} is shorter than listed; the checkpoint is damaged")
            yield offset, data
            offset += len(data)
