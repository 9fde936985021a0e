"""Every call that another daemon may make, a row for each. It calls for a user, whom it has authenticated."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any

from horizon_server.api.services import Services
from horizon_server.codec import from_plain, to_plain
from horizon_server.nodes.boxes import Item
from horizon_server.records.account import Principal
from horizon_server.records.blob import BlobRef
from horizon_server.records.job import JobRecord
from horizon_server.records.sample import SampleOptions, SamplePrompt
from horizon_server.records.task_result import TaskResult
from horizon_server.services.checkpoint_files import read_checkpoint_file
from horizon_server.services.fleet.records import Asked, Needed, SentJob

Body = Mapping[str, Any]
Answered = Callable[[Services, Principal, Body], Awaitable[Any]]
Streamed = Callable[[Services, Principal, Body], AsyncGenerator[Any, None]]


ANSWERED: Mapping[str, Answered] = {
    "report": lambda on, caller, b: on.guest.report(caller),
    "simulate": lambda on, caller, b: on.guest.simulate(
        caller, from_plain(JobRecord, b["job"]), from_plain(list[JobRecord], b["coming"])
    ),
    "missing": lambda on, caller, b: on.guest.missing(caller, from_plain(list[BlobRef], b["refs"])),
    "announce": lambda on, caller, b: on.guest.announce(caller, from_plain(Needed, b["needed"])),
    "finalize": lambda on, caller, b: on.guest.finalize(caller, b["kind"], b["id"]),
    "submit": lambda on, caller, b: on.guest.submit(caller, from_plain(SentJob, b)),
    "updates": lambda on, caller, b: on.guest.updates(caller, from_plain(Asked, b)),
    "cancel": lambda on, caller, b: on.jobs.cancel(caller, b["key"]),
    "pause": lambda on, caller, b: on.jobs.pause(caller, b["key"]),
    "resume": lambda on, caller, b: on.jobs.resume(caller, b["key"]),
    "update": lambda on, caller, b: on.jobs.update(caller, b["key"], priority=b["priority"]),
    "keep": lambda on, caller, b: on.retention.keep(caller, b["key"]),
    "log_part": lambda on, caller, b: on.jobs.log_part(
        caller, b["key"], attempt=b["attempt"], offset=b["offset"], limit=b["limit"]
    ),
    "checkpoints": lambda on, caller, b: on.jobs.checkpoints(caller, b["key"]),
    "keep_checkpoint": lambda on, caller, b: on.retention.keep_checkpoint(caller, b["key"], b["step"], kept=b["kept"]),
    "record_task_results": lambda on, caller, b: on.task_results.record(
        caller, b["key"], b["step"], from_plain(list[TaskResult], b["results"])
    ),
    "delete_checkpoint": lambda on, caller, b: on.jobs.delete_checkpoint(caller, b["key"], b["step"]),
    "require_checkpoint_deletable": lambda on, caller, b: _require_checkpoint_deletable(on, caller, b),
    "delete": lambda on, caller, b: on.jobs.delete(caller, b["key"]),
}
"""Calls with one answer, which is a record, a list of records, or nothing."""


async def _require_checkpoint_deletable(on: Services, caller: Principal, body: Body) -> None:
    await on.jobs.require_checkpoint_deletable(caller, await on.jobs.get(caller, body["key"]), body["step"])


async def _pieces(pieces: AsyncGenerator[tuple[int, bytes], None]) -> AsyncGenerator[Item, None]:
    async with aclosing(pieces):
        async for offset, data in pieces:
            yield Item(offset, data)


async def _records(records: AsyncGenerator[Any, None]) -> AsyncGenerator[Item, None]:
    async with aclosing(records):
        async for record in records:
            yield Item({"kind": type(record).__name__, "record": to_plain(record)})


STREAMED: Mapping[str, Streamed] = {
    "logs": lambda on, caller, b: _pieces(
        on.jobs.logs(caller, b["key"], attempt=b["attempt"], offset=b["offset"], follow=b["follow"])
    ),
    "read_file": lambda on, caller, b: _pieces(
        read_checkpoint_file(on.jobs, caller, b["key"], b["step"], b["path"], offset=b["offset"], length=b["length"])
    ),
    "sample": lambda on, caller, b: _records(
        on.samples.sample(
            caller,
            b["key"],
            b["step"],
            from_plain(list[SamplePrompt], b["prompts"]),
            from_plain(SampleOptions, b["options"]),
        )
    ),
    "evaluate": lambda on, caller, b: _records(on.evaluations.evaluate(caller, b["key"], b["step"], {})),
    "merge": lambda on, caller, b: _records(
        on.merges.merge(caller, b["key"], b["step"], dtype=b["dtype"], base=b["base"], remove=b["remove"])
    ),
}
"""Calls that answer in parts."""


async def write(on: Services, caller: Principal, body: Body, data: AsyncIterator[bytes]) -> Any:
    """Take a content, of which the bytes follow the call."""
    return await on.guest.write(caller, from_plain(BlobRef, body["ref"]), body["offset"], data)
