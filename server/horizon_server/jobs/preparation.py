"""Runs the data preparation in a child process, and keeps its results by what they were made from."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from horizon_server.children.child import Child, exit_reason
from horizon_server.errors import InvalidData, WorkerFailed
from horizon_server.events import AttemptEnded, Message, PrepareProgress
from horizon_server.jobs.ports import DatasetFiles, PreparationCall, PreparationRecipe, PreparedData
from horizon_server.spec import JobSpec
from horizon_server.store.prepared import REPORT_FILE, remove_partial

Tell = Callable[[PrepareProgress | Message], Awaitable[None]]


class Preparation:
    """Prepares one dataset at a time; a folder that is there is whole, and is used again.

    Thread: belongs to one event loop; `stop` may be called at any time.
    """

    def __init__(self, recipe: PreparationRecipe) -> None:
        self._recipe = recipe
        self._child: Child | None = None
        self._stopped = False

    async def run(
        self,
        spec: JobSpec,
        dataset: DatasetFiles,
        model: Path,
        *,
        log: Path,
        environment: Mapping[str, str],
        tell: Tell,
    ) -> PreparedData | None:
        """Return what was done, or None when `stop` came first.

        Raises:
            InvalidData: when rows cannot be used; each was told with file, line and field.
            WorkerFailed: when the child died.
        """
        call = await asyncio.to_thread(self._recipe, spec, dataset, model)
        if not self._stopped and not call.is_whole:
            # A folder that is there but not whole has lost files; partial ones were left by a daemon that was killed.
            await asyncio.to_thread(shutil.rmtree, call.target, ignore_errors=True)
            await asyncio.to_thread(remove_partial, call.target)
            path = log.with_name("preparation.json")
            path.write_text(call.request, "utf-8")
            try:
                await self._run_child(path, log, environment, tell)
            finally:
                # A child that was killed could not remove its partial folder itself, which may hold gigabytes.
                await asyncio.to_thread(remove_partial, call.target)
        if self._stopped:
            return None
        report = await _tell_report(call, tell)
        return PreparedData(folder=call.target, evaluation=call.evaluation, report=report)

    def stop(self) -> None:
        """End it and remove what it has written so far."""
        self._stopped = True
        if self._child is not None:
            self._child.kill()

    async def _run_child(self, request: Path, log: Path, environment: Mapping[str, str], tell: Tell) -> None:
        child = await Child.start(
            "horizon_server.datasets.preparing.child", [str(request)], log=log, environment=environment
        )
        self._child = child
        ended: AttemptEnded | None = None
        try:
            async for line in child.lines():
                if isinstance(line, AttemptEnded):
                    ended = line
                elif isinstance(line, PrepareProgress) and not line.report:
                    await tell(line)
            code = await child.wait()
        finally:
            self._child = None
            child.kill()
            await child.wait()
        if self._stopped or (ended is not None and ended.outcome == "succeeded"):
            return
        if ended is None:
            raise WorkerFailed(exit_reason(code, oom_killed=False, who="the data preparation"))
        if len(ended.details) > 1:
            await tell(Message(level="error", text="\n".join(ended.details)))
        error = InvalidData(ended.message)
        error.reason = ended.reason or InvalidData.reason
        raise error


async def _tell_report(call: PreparationCall, tell: Tell) -> dict[str, int]:
    report = json.loads(await asyncio.to_thread((call.target / REPORT_FILE).read_text, "utf-8"))
    counts = {name: value for name, value in report.items() if isinstance(value, int)}
    await tell(PrepareProgress(done_rows=report["rows"], total_rows=report["rows"], report=counts))
    if report["errors"]:
        count = report["error_rows"]
        first = f", the first {len(report['errors'])}" if count > len(report["errors"]) else ""
        head = f"{count} of {report['rows']} rows are left out{first}:"
        await tell(Message(level="warning", text="\n".join([head, *report["errors"]])))
    return counts
