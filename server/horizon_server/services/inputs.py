"""The files that a job, a preview or a plan means by the names of a dataset and a model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from horizon_server.errors import InvalidSpec, NotAllowed, NotFound
from horizon_server.jobs.folders import JobFolders
from horizon_server.jobs.preparation import DatasetFiles, EvalSets
from horizon_server.records.account import Principal
from horizon_server.records.blob import DatasetRecord, ModelRecord
from horizon_server.records.job import JobRecord
from horizon_server.services.fleet.records import Needed
from horizon_server.services.pushed import DatasetService, ModelService
from horizon_server.spec import EVAL_SET
from horizon_server.store.adapter_files import PEFT_LORA, is_adapter_folder
from horizon_server.store.model_files import CONFIG_FILE


class Inputs:
    """Finds the files that names mean, as the dataset and model services let the caller see them."""

    def __init__(
        self, *, datasets: DatasetService, models: ModelService, model_roots: Sequence[Path], folders: JobFolders
    ) -> None:
        self._datasets = datasets
        self._models = models
        self._folders = folders
        self._model_roots = [root.resolve() for root in model_roots]

    async def dataset(self, principal: Principal, name: str) -> DatasetFiles:
        """Return a READY dataset by name or id. Raises NotFound when there is none for the caller, or its upload is not
        finished."""
        return self._files(await self._datasets.get_ready(principal, name))

    async def of_job(self, job: JobRecord) -> tuple[Path, DatasetFiles | None, EvalSets]:
        """Return model, data and eval sets of a job; a session has no data.

        Raises NotFound when a dataset was deleted meanwhile, or the weights that the job starts from are gone.
        """
        dataset = self._files(await self._datasets.by_id(job.dataset_id)) if job.dataset_id else None
        of_sets = {EVAL_SET: job.eval_dataset_id} if job.eval_dataset_id else {}
        of_sets |= job.eval_set_ids
        eval_sets = {name: self._files(await self._datasets.by_id(key)) for name, key in of_sets.items()}
        return await self.model_of(job), dataset, eval_sets

    async def needed_by(self, job: JobRecord) -> dict[str, Needed]:
        """Return what a job needs where it is sent, by what its spec names. Raises NotFound when it was deleted
        meanwhile."""
        found = {} if job.model_id.startswith("/") else {"model": _needed(await self._models.by_id(job.model_id))}
        sets = {f"eval.sets.{name}": key for name, key in job.eval_set_ids.items()}
        datasets = {"dataset": job.dataset_id, "eval_dataset": job.eval_dataset_id, **sets}
        found |= {name: _needed(await self._datasets.by_id(key)) for name, key in datasets.items() if key}
        if job.spec.init_from is not None and "@" not in job.spec.init_from:
            # Which its owner was allowed to use when the job was submitted.
            owner = Principal(name=job.owner, role="viewer", project=job.project)
            found["init_from"] = _needed(await self._models.get_ready(owner, job.spec.init_from))
        return found

    async def model_of(self, job: JobRecord) -> Path:
        """Return the model folder of a job: of an adapter that it starts with, the base. Raises NotFound when its start
        is gone."""
        # `model` gives the path of a folder of the node as its id.
        model = Path(job.model_id) if job.model_id.startswith("/") else self._models.folder(job.model_id)
        if job.spec.init_from is None:
            return model
        start = self._folders.start(job.job_id)
        if not await asyncio.to_thread(start.is_dir):
            # As after a restore: no backup has them.
            raise NotFound(
                f"the weights that job {job.job_id} started from ({job.spec.init_from}) are gone; submit it again, or "
                f"start another job from its own checkpoint, if it has one (init_from: {job.job_id}@last)"
            )
        return model if await asyncio.to_thread(is_adapter_folder, start) else start

    async def adapter(self, principal: Principal, name: str) -> Path:
        """Return the folder of a READY adapter. Raises NotFound when there is none for the caller, InvalidSpec when it
        is a model."""
        record = await self._models.get_ready(principal, name)
        if record.architecture != PEFT_LORA:
            raise InvalidSpec.of(
                "init_from", f"init_from: {name} is a model, not an adapter; give it as model, and leave init_from out"
            )
        return self._models.folder(record.model_id)

    async def model(self, principal: Principal, name: str) -> tuple[str, Path]:
        """Return id and folder of a READY model by name or id, or of a folder below an allowed root.

        Raises:
            NotFound: when there is none for the caller, or its upload is not finished.
            NotAllowed: when a folder is not below one of the setting's `model_roots`.
            InvalidSpec: when it is an adapter.
        """
        if name.startswith("/"):
            folder = await asyncio.to_thread(self._allowed_folder, name)
            return str(folder), folder
        record = await self._models.get_ready(principal, name)
        if record.architecture == PEFT_LORA:
            raise InvalidSpec.of(
                "model",
                f"model: {name} is an adapter; give its base as model, train.trainable: lora, and init_from: {name}",
            )
        return record.model_id, self._models.folder(record.model_id)

    def _allowed_folder(self, name: str) -> Path:
        folder = Path(name).resolve()  # a link must not lead out of the allowed root
        if not any(folder.is_relative_to(root) for root in self._model_roots):
            roots = ", ".join(map(str, self._model_roots)) or "none"
            raise NotAllowed(
                f"model folder {name} is not below an allowed root (model_roots: {roots}); push the model, or ask an "
                "admin"
            )
        if not (folder / CONFIG_FILE).is_file():
            raise NotFound(f"model folder {name} holds no {CONFIG_FILE}")
        return folder

    async def digest_of(self, principal: Principal, folder: Path) -> str:
        """Return the digest of a model folder that the caller may use. Raises as `ModelService.digest_of` does."""
        return await self._models.digest_of(principal, folder)

    @contextmanager
    def reading(self, dataset_id: str, model_id: str) -> Iterator[None]:
        """Keep a dataset and a model from being deleted until the end of the block."""
        with self._datasets.reading(dataset_id), self._models.reading(model_id):
            yield

    @contextmanager
    def reading_model(self, model_id: str) -> Iterator[None]:
        """Keep a model from being deleted until the end of the block."""
        with self._models.reading(model_id):
            yield

    def _files(self, record: DatasetRecord) -> DatasetFiles:
        return DatasetFiles(record=record, files=self._datasets.data_files(record))


def _needed(record: ModelRecord | DatasetRecord) -> Needed:
    needed = Needed(kind=record.kind, name=record.name, digest=record.digest, files=record.files)
    if isinstance(record, DatasetRecord):
        return replace(needed, format=record.format, field_map=record.field_map)
    return needed
