"""Runs the data preparation in a child process, and keeps its results by what they were made from."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from horizon_server.errors import InvalidData, WorkerFailed
from horizon_server.events import AttemptEnded, PrepareProgress
from horizon_server.jobs.child import Child, exit_reason
from horizon_server.jobs.ports import DatasetFiles
from horizon_server.spec import JobSpec

_EVERY_S = 0.5
"""Progress is stored at most this often."""


class PreparationKey(Protocol):
    """Names a preparation by dataset, tokenizer and options; see `datasets.preparation_key`."""

    def __call__(self, dataset_digest: str, model: Path, options: Mapping[str, Any]) -> str: ...  # noqa: D102


class Preparation:
    """Prepares one dataset at a time below `root`; a folder that is there under its key is whole, and is used again."""

    def __init__(self, root: Path, key: PreparationKey) -> None:
        self._root = root
        self._key = key
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
        on_progress: Callable[[PrepareProgress], Awaitable[None]],
    ) -> Path | None:
        """Return the prepared folder, or None when `stop` came first.

        Raises:
            InvalidData: when rows cannot be used, with file, line and field.
            WorkerFailed: when the child died.
        """
        self._stopped = False
        options = {
            "format": dataset.format,
            "map": dataset.field_map,
            "method": spec.method,
            "sequence_length": spec.train.sequence_length,
            "train_on": spec.train.train_on,
        }
        key = await asyncio.to_thread(self._key, dataset.digest, model, options)
        target = self._root / key
        if not target.is_dir():
            request = {
                **options,
                "dataset_files": [str(path) for path in dataset.files],
                "model_dir": str(model),
                "output_dir": str(target),
            }
            path = log.with_name("preparation.json")
            path.write_text(json.dumps(request, indent=1), "utf-8")
            await self._run_child(path, log, environment, on_progress)
        if self._stopped:
            return None
        report = json.loads((target / "report.json").read_text("utf-8"))
        counts = {name: value for name, value in report.items() if isinstance(value, int)}
        rows = counts.get("rows", 0)
        await on_progress(PrepareProgress(done_rows=rows, total_rows=rows, report=counts))
        return target

    def stop(self) -> None:
        """End a running preparation; what it half-wrote has another name and is removed by the next."""
        self._stopped = True
        if self._child is not None:
            self._child.kill()

    async def _run_child(
        self,
        request: Path,
        log: Path,
        environment: Mapping[str, str],
        on_progress: Callable[[PrepareProgress], Awaitable[None]],
    ) -> None:
        child = await Child.start("horizon_server.datasets.prepare", [str(request)], log=log, environment=environment)
        self._child = child
        ended: AttemptEnded | None = None
        told_s = 0.0
        try:
            async for line in child.lines():
                if isinstance(line, AttemptEnded):
                    ended = line
                elif isinstance(line, PrepareProgress) and time.monotonic() - told_s >= _EVERY_S:
                    told_s = time.monotonic()
                    await on_progress(line)
            code = await child.wait()
        finally:
            self._child = None
            child.kill()
            await child.wait()
        if self._stopped or (ended is not None and ended.outcome == "succeeded"):
            return
        if ended is None:
            raise WorkerFailed("the data preparation failed: " + exit_reason(code, oom_killed=False))
        error = InvalidData(ended.message)
        error.reason = ended.reason or InvalidData.reason
        raise error
