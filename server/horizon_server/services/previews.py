"""Rows of a dataset as a model would see them, rendered in a child process: the daemon never runs a template that came
with a model."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping

from horizon_server.children.child import ChildTask, Limits
from horizon_server.codec import to_plain
from horizon_server.datasets.preview import (
    DatasetPreview,
    PreviewOptions,
    PreviewRequest,
    rows_from_answer,
)
from horizon_server.errors import InvalidModel, InvalidSpec, OutOfMemory, Stalled, WorkerCrashed
from horizon_server.records.account import Principal
from horizon_server.services.inputs import Inputs

_AT_ONCE = 2
_MEMORY_BYTES = 4 * 2**30


class Previews:
    """Renders previews: two at once, and one of each user, so that a single user's templates do not keep others
    waiting.

    Thread: belongs to one event loop. A caller who hangs up ends the child.
    """

    def __init__(self, resources: Inputs, *, environment: Mapping[str, str], limit_s: float = 45.0) -> None:
        """`limit_s` is the longest time that one preview may take."""
        self._resources = resources
        self._task = ChildTask(
            module="horizon_server.datasets.preview_child",
            who="the preview",
            # One thread: few rows need no more.
            environment={**environment, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"},
            limits=Limits(
                memory_bytes=_MEMORY_BYTES, cpu_s=60, file_bytes=64 * 2**20, wall_s=limit_s, oom_score_adj=1000
            ),
            meanings={
                Stalled: Stalled(
                    f"the rows were not rendered within {limit_s:g} s; ask for fewer rows, or for earlier ones; "
                    "if that does not help, the model's chat template may never end"
                ),
                WorkerCrashed: InvalidModel("rendering these rows crashes; is the chat template right?"),
                OutOfMemory: InvalidModel(
                    f"rendering these rows takes more than {_MEMORY_BYTES // 2**30} GiB of memory; ask for fewer rows, "
                    "or correct the "
                    "model's chat template"
                ),
            },
        )
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._of_user: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def preview(self, principal: Principal, dataset: str, model: str, options: PreviewOptions) -> DatasetPreview:
        """Return rows of a READY dataset as a READY model would see them.

        Raises:
            InvalidSpec: for options out of range.
            NotFound: when the caller has no such dataset or model.
            InvalidData, InvalidModel: when the dataset cannot be rendered for the model.
            Stalled: when it takes longer than `limit_s`.
            WorkerDied: when the child was killed.
        """
        options.check()
        if not model:
            problem = "model is empty; name the pushed model whose chat template and tokenizer render the rows"
            raise InvalidSpec.of("model", problem)
        files = await self._resources.dataset(principal, dataset)
        model_id, model_dir = await self._resources.model(principal, model)
        record = files.record
        # Of a text the offset counts the documents that the model's tokens split it into, which are not known here.
        if options.offset >= record.num_rows > 0 and record.format != "text":
            problem = f"offset is {options.offset}, but dataset {dataset} has {record.num_rows} rows"
            raise InvalidSpec.of("offset", problem)
        request = PreviewRequest(
            dataset_files=files.files,
            model_dir=model_dir,
            format=record.format,
            field_map=record.field_map,
            options=options,
        )
        # First the user's own turn: what waits for it must not hold one of the slots.
        async with self._of_user[principal.name], self._slots:
            with self._resources.reading(record.dataset_id, model_id):
                rows = rows_from_answer(await self._task.run(to_plain(request)))
        return DatasetPreview(rows=rows, num_rows=record.num_rows, format=record.format, options=options)
