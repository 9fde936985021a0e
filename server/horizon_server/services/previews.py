"""Rows of a dataset as a model would see them, rendered in a child process that is short of time, memory and trust.

Knows who may see what by `jobs.ports.Resources`, and nothing of templates or tokens: the daemon never runs what came with a model.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import structlog

from horizon_server.blobs.disk import told_when_full
from horizon_server.children.child import Child, exit_reason, log_tail
from horizon_server.datasets.preview.request import (
    DatasetPreview,
    PreviewOptions,
    PreviewRequest,
    PreviewRow,
    rows_from_json,
)
from horizon_server.datasets.reading import StoredFile
from horizon_server.errors import InvalidData, InvalidModel, InvalidSpec, Stalled, WorkerFailed
from horizon_server.events import AttemptEnded
from horizon_server.jobs.ports import Resources
from horizon_server.records.account import Principal

log = structlog.get_logger(__name__)

_AT_ONCE = 2
_NEEDS_SPACE = "a preview needs a little space there while it runs: free some, then ask again"


class Previews:
    """Renders previews: two at once, and one of each user, so that nobody waits for a single user's templates.

    Thread: belongs to one event loop. A caller who hangs up ends the child.
    """

    def __init__(
        self, resources: Resources, *, folder: Path, environment: Mapping[str, str], limit_s: float = 45.0
    ) -> None:
        """`folder` takes a folder for each preview while it runs. The child gets one thread: few rows need no more."""
        self._resources = resources
        self._folder = folder
        shutil.rmtree(folder, ignore_errors=True)  # previews that a daemon which was killed has left
        folder.mkdir(mode=0o700, parents=True)
        self._environment = {**environment, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        self._limit_s = limit_s
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._of_user: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def preview(self, principal: Principal, dataset: str, model: str, options: PreviewOptions) -> DatasetPreview:
        """Return rows of a READY dataset as a READY model would see them.

        Raises:
            InvalidSpec: for options out of range.
            NotFound: when the caller has no such dataset or model.
            InvalidData, InvalidModel: when the dataset cannot be rendered for the model.
            Stalled: when it takes longer than `limit_s`.
            WorkerFailed: when the child died.
        """
        options.check()
        if not model:
            sentence = "model is empty; name the pushed model whose chat template and tokenizer render the rows"
            raise InvalidSpec.of("model", sentence)
        files = await self._resources.dataset(principal, dataset)
        _, model_dir = await self._resources.model(principal, model)
        if options.offset >= files.num_rows > 0 and files.format != "text":
            sentence = f"offset is {options.offset}, but dataset {dataset} has {files.num_rows} rows"
            raise InvalidSpec.of("offset", sentence)
        async with self._of_user[principal.name], self._slots:
            with told_when_full(_NEEDS_SPACE), tempfile.TemporaryDirectory(prefix="preview-", dir=self._folder) as name:
                request = PreviewRequest(
                    dataset_files=tuple(StoredFile.at(path, name=name) for name, path in files.files),
                    model_dir=model_dir,
                    answer_file=Path(name) / "rows.json",
                    format=files.format,
                    field_map=files.field_map,
                    options=options,
                )
                rows = await self._render(request, Path(name))
        return DatasetPreview(rows=rows, num_rows=files.num_rows, format=files.format, options=options)

    async def _render(self, request: PreviewRequest, folder: Path) -> tuple[PreviewRow, ...]:
        (folder / "request.json").write_text(request.to_json(), "utf-8")
        try:
            async with asyncio.timeout(self._limit_s):
                ended, code = await self._run_child(folder)
        except TimeoutError as error:
            raise Stalled(
                f"the rows were not rendered within {self._limit_s:g} s; ask for fewer rows, or for earlier ones; "
                "if that does not help, the model's chat template may never end"
            ) from error
        if ended is None:
            log.warning("a preview died", code=code, log=log_tail(folder / "log"))
            raise WorkerFailed(exit_reason(code, oom_killed=False, who="the preview"))
        if ended.outcome != "succeeded":
            kind = InvalidModel if ended.reason == InvalidModel.reason else InvalidData
            raise kind(ended.message)
        return await asyncio.to_thread(lambda: rows_from_json(request.answer_file.read_bytes()))

    async def _run_child(self, folder: Path) -> tuple[AttemptEnded | None, int]:
        child = await Child.start(
            "horizon_server.datasets.preview.child",
            [str(folder / "request.json")],
            log=folder / "log",
            environment=self._environment,
        )
        ended: AttemptEnded | None = None
        try:
            async for line in child.lines():
                ended = line if isinstance(line, AttemptEnded) else ended
            return ended, await child.wait()
        finally:
            child.kill()
            await child.wait()
