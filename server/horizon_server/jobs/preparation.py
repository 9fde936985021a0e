"""What an attempt works with, and the child process that prepares its data: results are kept by what they were made from."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horizon_server.children.child import Child, Limits
from horizon_server.errors import HorizonError, InvalidData, OutOfMemory
from horizon_server.events import Message, PrepareProgress, WorkerLine
from horizon_server.records.job import JobRecord
from horizon_server.spec import JobSpec
from horizon_server.store.prepared import REPORT_FILE, remove_partial

_MEMORY_GIB = 4
# A template may never end, or print without end. Its own limit on processor time ends the first within a minute; the silence is for all
# else that hangs, and long because the last thing a preparation does is to wait for the disk.
_LIMITS = Limits(memory_bytes=_MEMORY_GIB * 2**30, silence_s=600, oom_score_adj=1000)

Publish = Callable[[PrepareProgress | Message], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class DatasetFiles:
    """A READY dataset as the preparation needs it. `files` are the names its user knows and where the bytes are."""

    dataset_id: str
    digest: str
    format: str
    field_map: dict[str, str]
    num_rows: int
    files: tuple[tuple[str, Path], ...]


@dataclass(frozen=True, kw_only=True)
class JobInputs:
    """The model and the datasets of one job."""

    model: Path
    dataset: DatasetFiles
    evaluation: DatasetFiles | None


FindInputs = Callable[[JobRecord], Awaitable[JobInputs]]


@dataclass(frozen=True, kw_only=True)
class PreparationCall:
    """What the preparation child is to do: the folder it makes, whether that is there already, and its request.

    `evaluation` is where the rows held out will be, or None where none are.
    """

    target: Path
    evaluation: Path | None
    is_whole: bool
    request: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class PreparedData:
    """What was prepared: the folder, that of the rows held out (None where none are), and the counts of the report."""

    folder: Path
    evaluation: Path | None
    report: dict[str, int]


Recipe = Callable[[JobSpec, DatasetFiles, Path], PreparationCall]
"""How a dataset is prepared for a model. Reads the tokenizer's files: call it in a thread. Raises InvalidModel without a tokenizer."""


class Preparation:
    """Prepares one dataset at a time; a folder that is there is whole, and is used again.

    Thread: belongs to one event loop; `stop` may be called at any time.
    """

    def __init__(self, recipe: Recipe) -> None:
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
        publish: Publish,
    ) -> PreparedData | None:
        """Return what was done, or None when `stop` came first.

        Raises:
            InvalidData: when rows cannot be used; a message names each with file, line and field.
            WorkerDied: when the child was killed, or crashed.
        """
        call = await asyncio.to_thread(self._recipe, spec, dataset, model)
        if not self._stopped and not call.is_whole:
            # A folder that is there but not whole has lost files.
            await asyncio.to_thread(shutil.rmtree, call.target, ignore_errors=True)
            try:
                await self._run_child(call.request, log, environment, publish)
            finally:
                # A child that was killed could not remove its partial folder itself, which may hold gigabytes.
                await asyncio.to_thread(remove_partial, call.target)
        if self._stopped:
            return None
        report = json.loads(await asyncio.to_thread((call.target / REPORT_FILE).read_text, "utf-8"))
        counts = {name: value for name, value in report.items() if isinstance(value, int)}
        await publish(PrepareProgress(done_rows=report["rows"], total_rows=report["rows"], report=counts))
        if report["errors"]:
            count = report["error_rows"]
            first = f", the first {len(report['errors'])}" if count > len(report["errors"]) else ""
            head = f"{count} of {report['rows']} rows are left out{first}:"
            await publish(Message(level="warning", text="\n".join([head, *report["errors"]])))
        return PreparedData(folder=call.target, evaluation=call.evaluation, report=counts)

    def stop(self) -> None:
        """End it; `run` removes what it has written so far."""
        self._stopped = True
        if self._child is not None:
            self._child.kill()

    async def _run_child(
        self, request: Mapping[str, Any], log: Path, environment: Mapping[str, str], publish: Publish
    ) -> None:
        async def on_event(event: WorkerLine) -> None:
            if isinstance(event, PrepareProgress):
                await publish(event)

        child = await Child.start(
            "horizon_server.datasets.preparing", request, who="the data preparation", environment=environment,
            request_file=log.with_name("preparation.json"), log_file=log, limits=_LIMITS,
        )  # fmt: skip
        self._child = child
        try:
            await child.answer(on_event)
        except OutOfMemory as error:
            raise InvalidData(
                f"a row of the dataset takes more than {_MEMORY_GIB} GiB of memory to render; shorten it or correct the chat template"
            ) from error
        except HorizonError as error:
            if self._stopped:
                return
            if len(error.violations) > 1:
                lines = [violation.description for violation in error.violations]
                await publish(Message(level="error", text="\n".join(lines)))
            raise
        finally:
            self._child = None
