"""What an attempt works with, and the child process that prepares its data: results are kept by what they were made
from."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
import os
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from horizon_formats.formats import DataKind, DatasetFormat
from horizon_server.blobs.space import Space
from horizon_server.children.child import Child, ChildTask, Limits
from horizon_server.codec import to_plain
from horizon_server.datasets.reading import StoredFile
from horizon_server.datasets.recipe import (
    PrepareOptions,
    PrepareRequest,
    evaluation_folder,
    is_prepared,
    prepared_folder,
    tokenizer_digest,
)
from horizon_server.errors import HorizonError, InvalidData, OutOfMemory
from horizon_server.events import Message, PrepareProgress, WorkerLine
from horizon_server.planning.data_size import DataSize, counted_steps, expanded_bytes
from horizon_server.records.blob import DatasetRecord
from horizon_server.records.job import JobRecord
from horizon_server.spec import EVAL_SET, JobSpec
from horizon_server.store.prepared import REPORT_FILE, document_lengths, group_size_of, has_weights, remove_partial

_MEMORY_GIB = 4
# A template may never end, or print without end. Its own limit on processor time ends the first within a minute; the
# silence is for all else that hangs, and long because the last thing a preparation does is to wait for the disk.
_LIMITS = Limits(memory_bytes=_MEMORY_GIB * 2**30, silence_s=600, oom_score_adj=1000)

Publish = Callable[[PrepareProgress | Message], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class DatasetFiles:
    """A READY dataset, and where the bytes of its files are."""

    record: DatasetRecord
    files: tuple[StoredFile, ...]


EvalSets = Mapping[str, DatasetFiles]
"""The datasets that a job is evaluated on, by the names of the sets; without the rows that are held out of its own
dataset."""
# Returns the model, the data and the eval sets of a job; a session has no data.
FindInputs = Callable[[JobRecord], Awaitable[tuple[Path, DatasetFiles | None, EvalSets]]]


@dataclass(frozen=True, kw_only=True)
class PreparedData:
    """What was prepared: the folder, that of the rows held out (None where none are), and the counts of the report."""

    folder: Path
    evaluation: Path | None
    report: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class PreparedJob:
    """What was prepared for a job: the tokens to train on, those of each eval set, the counts, and the longest document
    of all.

    `size` is of all documents that are of the kind that the job learns from, trained and evaluated. A session has
    nothing of it.
    """

    folder: Path | None = None
    evaluations: dict[str, Path] = field(default_factory=dict)
    report: dict[str, int] = field(default_factory=dict)
    longest_document: int | None = None
    size: DataSize | None = None


def known_size(
    root: Path, spec: JobSpec, model: Path, dataset: DatasetRecord, eval_sets: Sequence[DatasetRecord]
) -> DataSize:
    """Return how much data a job has: counted where it was prepared with the same settings, else estimated from its
    files. Blocking.

    `root` is the folder of all prepared data. Of the eval sets those count that the pass before the first step goes
    over.
    """
    sizes = [_size_of(root, spec, model, dataset, spec.eval_fraction)]
    # Text is evaluated without references.
    sizes += [_size_of(root, spec, model, one, 0.0) for one in eval_sets if one.data_kind == dataset.data_kind]
    return DataSize.total(sizes)


def _size_of(root: Path, spec: JobSpec, model: Path, record: DatasetRecord, eval_fraction: float) -> DataSize:
    options, train = _options(spec, record, eval_fraction), spec.train
    if (root / record.digest).is_dir():  # first, as the tokenizer's files take milliseconds to read
        with contextlib.suppress(HorizonError, OSError, ValueError, KeyError):  # a damaged folder is prepared again
            folder = prepared_folder(root, record.digest, tokenizer_digest(model), options)
            if is_prepared(folder, options):
                report = json.loads((folder / REPORT_FILE).read_text("utf-8"))
                return _counted(folder, report, record, spec)
    trained = DataSize.estimated(
        num_bytes=round((1 - eval_fraction) * expanded_bytes((file.path, file.size_bytes) for file in record.files)),
        num_rows=math.ceil((1 - eval_fraction) * record.num_rows),
        documents_per_row=group_size_of(DataKind(record.data_kind)),
        sequence_length=train.sequence_length,
        train=train,
        is_split=DatasetFormat(record.format) is DatasetFormat.TEXT,
    )
    return dataclasses.replace(trained, num_tokens=round(trained.num_tokens / (1 - eval_fraction)))


def _counted(folder: Path, report: Mapping[str, Any], record: DatasetRecord, spec: JobSpec) -> DataSize:
    group_size = group_size_of(DataKind(record.data_kind))
    steps = None
    if spec.train.epochs is not None:
        steps = counted_steps(document_lengths(folder), spec.train, group_size=group_size)
    num_tokens = report["tokens"] + report["eval_tokens"]
    return DataSize(num_tokens=num_tokens, num_steps=steps, may_have_weights=has_weights(folder))


def _options(spec: JobSpec, record: DatasetRecord, eval_fraction: float) -> PrepareOptions:
    return PrepareOptions(
        format=DatasetFormat(record.format),
        field_map=record.field_map,
        method=spec.method,
        sequence_length=spec.train.sequence_length,
        train_on=spec.train.train_on,
        eval_fraction=eval_fraction,
    )


class Preparation:
    """Prepares the data of one attempt, below `root`. `stop` may be called at any time. Thread: belongs to one event
    loop.

    Args:
        turn: held while a child prepares. All attempts share it: a preparation uses all cores, and two of the same data
            would write into the same folder.
        space: what the disk has for it; without one it is not limited.
        ask: called when the turn has come, after which `let_load` lets it go on. While it waits, the job is not among
            those that are being loaded, so others may be; it comes back to them only where one more may be. Without it,
            nothing is asked.
    """

    def __init__(
        self, root: Path, turn: asyncio.Lock, space: Space | None = None, *, ask: Callable[[], None] | None = None
    ) -> None:
        self._root = root
        self._space = space
        self._turn = turn
        self._ask = ask
        self._let = asyncio.Event()
        self._asks = False
        self._waiting: asyncio.Task[bool] | None = None
        self._child: Child | None = None
        self._stopped = False

    async def run_all(
        self, spec: JobSpec, model: Path, dataset: DatasetFiles | None, eval_sets: EvalSets, **how: Any
    ) -> PreparedJob | None:
        """Prepare the data to train on, and every eval set; a session has none. `how` and errors as `run`."""
        if dataset is None:
            return PreparedJob()
        prepared = await self.run(spec, model, dataset, eval_fraction=spec.eval_fraction, **how)
        if prepared is None:
            return None
        longest = prepared.report["longest_document"]
        size = await asyncio.to_thread(_counted, prepared.folder, prepared.report, dataset.record, spec)
        evaluations = {} if prepared.evaluation is None else {EVAL_SET: prepared.evaluation}
        for name, eval_set in eval_sets.items():
            one = await self.run(spec, model, eval_set, **how)
            if one is None:
                return None
            evaluations[name] = one.folder
            longest = max(longest, one.report["longest_document"])
            if eval_set.record.data_kind == dataset.record.data_kind:
                size = DataSize.total([size, DataSize(num_tokens=one.report["tokens"])])
        return PreparedJob(
            folder=prepared.folder, evaluations=evaluations, report=prepared.report, longest_document=longest, size=size
        )

    async def run(
        self,
        spec: JobSpec,
        model: Path,
        dataset: DatasetFiles,
        *,
        log: Path,
        environment: Mapping[str, str],
        publish: Publish,
        eval_fraction: float = 0.0,
    ) -> PreparedData | None:
        """Return what was done, or None when `stop` came first. `eval_fraction` of the rows are held out.

        Raises:
            InvalidModel: when the model's folder holds no tokenizer.
            InvalidData: when rows cannot be used; a message names each with file, line and field.
            WorkerDied: when the child was killed, or crashed.
        """
        record = dataset.record
        options = _options(spec, record, eval_fraction)
        # In a thread, as it reads the tokenizer's files, which may be on a slow network disk.
        tokenizer = await asyncio.to_thread(tokenizer_digest, model)
        target = prepared_folder(self._root, record.digest, tokenizer, options)
        # A folder that is there is whole, as it was renamed into place, and is used again.
        if not is_prepared(target, options) and await self._take_turn():
            try:
                if not is_prepared(target, options):  # by another attempt meanwhile
                    self._require_space(record, 1.0)
                    request = PrepareRequest(
                        dataset_files=dataset.files,
                        model_dir=model,
                        output_dir=target,
                        options=options,
                        num_rows=record.num_rows,
                    )
                    await self._prepare(request, record, log, environment, publish)
            finally:
                self._turn.release()
        if self._stopped:
            return None
        await asyncio.to_thread(os.utime, target)  # the sweep removes what is not used for long
        report = json.loads(await asyncio.to_thread((target / REPORT_FILE).read_text, "utf-8"))
        counts = {name: value for name, value in report.items() if isinstance(value, int)}
        await publish(PrepareProgress(done_rows=report["rows"], total_rows=report["rows"], report=counts))
        if report["errors"]:
            count = report["error_rows"]
            first = f", the first {len(report['errors'])}" if count > len(report["errors"]) else ""
            head = f"{count} of {report['rows']} rows are left out{first}:"
            await publish(Message(level="warning", text="\n".join([head, *report["errors"]])))
        return PreparedData(folder=target, evaluation=evaluation_folder(target, options), report=counts)

    @property
    def waits(self) -> bool:
        """Whether it waits until no other attempt prepares, or after that until one more job may be loaded."""
        return self._waiting is not None

    @property
    def asks(self) -> bool:
        """Whether it waits for `let_load`. At most one of all attempts does, which has the turn."""
        return self._asks

    def let_load(self) -> None:
        """Let it go on: from here on, its job is being loaded."""
        self._waiting, self._asks = None, False
        self._let.set()

    def stop(self) -> None:
        """End it; `run` removes what it has written so far."""
        self._stopped = True
        if self._waiting is not None:
            self._waiting.cancel()
        if self._child is not None:
            self._child.kill()

    async def _take_turn(self) -> bool:
        """Wait until no other attempt prepares. Returns False when `stop` came first."""
        if self._stopped:
            return False
        self._waiting = asyncio.create_task(self._acquired())
        try:
            return await self._waiting
        except asyncio.CancelledError:
            if not self._stopped:
                raise
            return False
        finally:
            self._waiting = None

    async def _acquired(self) -> bool:
        await self._turn.acquire()
        if self._ask is None:
            return True
        self._let.clear()
        self._asks = True
        self._ask()
        try:
            await self._let.wait()
        except BaseException:
            self._turn.release()
            raise
        finally:
            self._asks = False
        return True

    def _require_space(self, record: DatasetRecord, part: float) -> None:
        # Tokens with their masks take about as much as the text, and twice that while the file is being put together.
        # Documents of a group repeat their prompt.
        if self._space is not None:
            copies = group_size_of(DataKind(record.data_kind))
            self._space.require(round(part * record.size_bytes * copies), f"preparing dataset {record.name}")

    async def _prepare(
        self,
        request: PrepareRequest,
        record: DatasetRecord,
        log: Path,
        environment: Mapping[str, str],
        publish: Publish,
    ) -> None:
        async def on_event(event: WorkerLine) -> None:
            if isinstance(event, PrepareProgress):
                # Ended before the disk is full: the database and the running jobs need what is left.
                self._require_space(record, 1.0 - event.done_rows / event.total_rows if event.total_rows else 0.0)
                await publish(event)

        # A folder that is there but not whole has lost files.
        await asyncio.to_thread(shutil.rmtree, request.output_dir, ignore_errors=True)
        task = ChildTask(
            module="horizon_server.datasets.preparing",
            who="the data preparation",
            environment=environment,
            limits=_LIMITS,
            meanings={
                OutOfMemory: InvalidData(
                    f"a row of the dataset takes more than {_MEMORY_GIB} GiB of memory to render; shorten it or "
                    "correct the chat template"
                )
            },
        )
        self._child = await task.start(to_plain(request), request_file=log.with_name("preparation.json"), log_file=log)
        try:
            if self._stopped:  # while the child was being started
                self._child.kill()
            await self._child.answer(on_event)
        except HorizonError as error:
            if self._stopped:
                return
            if len(error.violations) > 1:
                lines = [violation.description for violation in error.violations]
                await publish(Message(level="error", text="\n".join(lines)))
            raise
        finally:
            self._child = None
            # A child that was killed could not remove its partial folder itself, which may hold gigabytes.
            await asyncio.to_thread(remove_partial, request.output_dir)
