"""What the names in a job spec stand for: pushed datasets and models, or model folders below an allowed root."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from horizon_formats.formats import DatasetFormat
from horizon_server.datasets.reading import StoredFile
from horizon_server.datasets.recipe import (
    PrepareOptions,
    PrepareRequest,
    evaluation_folder,
    is_prepared,
    prepared_folder,
    tokenizer_digest,
)
from horizon_server.errors import NotAllowed, NotFound
from horizon_server.jobs.preparation import DatasetFiles, JobInputs, PreparationCall
from horizon_server.records.account import Principal
from horizon_server.records.blob import DatasetRecord
from horizon_server.records.job import JobRecord
from horizon_server.services.datasets import DatasetService
from horizon_server.services.models import ModelService
from horizon_server.spec import JobSpec
from horizon_server.store.prepared import remove_all_partial


class NodeResources:
    """Finds the files that names stand for, as the dataset and model services let the caller see them."""

    def __init__(self, *, datasets: DatasetService, models: ModelService, model_roots: Sequence[Path]) -> None:
        self._datasets = datasets
        self._models = models
        self._model_roots = [root.resolve() for root in model_roots]

    async def dataset(self, principal: Principal, name: str) -> DatasetFiles:
        """Return a READY dataset by name or id.

        Raises:
            NotFound: when there is none for the caller, or its upload is not finished.
        """
        record = await self._datasets.get(principal, name)
        if not record.ready:
            raise NotFound(f"dataset {name} is not ready: its upload was not finished; push it again")
        return self._files(record)

    async def of_job(self, job: JobRecord) -> JobInputs:
        """Return the files of a job, which was allowed to use them when it was submitted.

        Raises:
            NotFound: when a dataset was deleted meanwhile.
        """
        dataset = await self._datasets.by_id(job.dataset_id)
        evaluation = await self._datasets.by_id(job.eval_dataset_id) if job.eval_dataset_id else None
        return JobInputs(
            # `model` gives the path of a folder of the node as its id.
            model=Path(job.model_id) if job.model_id.startswith("/") else self._models.folder(job.model_id),
            dataset=self._files(dataset),
            evaluation=self._files(evaluation) if evaluation else None,
        )

    async def model(self, principal: Principal, name: str) -> tuple[str, Path]:
        """Return id and folder of a READY model by name or id, or of a folder below an allowed root.

        Raises:
            NotFound: when there is none for the caller, or its upload is not finished.
            NotAllowed: when a folder is not below one of the setting's `model_roots`.
        """
        if name.startswith("/"):
            folder = await asyncio.to_thread(self._allowed_folder, name)
            return str(folder), folder
        record = await self._models.get(principal, name)
        if not record.ready:
            raise NotFound(f"model {name} is not ready: its upload was not finished; push it again")
        return record.model_id, self._models.folder(record.model_id)

    def _allowed_folder(self, name: str) -> Path:
        folder = Path(name).resolve()
        if not any(folder.is_relative_to(root) for root in self._model_roots):
            roots = ", ".join(map(str, self._model_roots)) or "none"
            raise NotAllowed(
                f"model folder {name} is not below an allowed root (model_roots: {roots}); push the model, or ask an admin"
            )
        if not (folder / "config.json").is_file():
            raise NotFound(f"model folder {name} holds no config.json")
        return folder

    def _files(self, record: DatasetRecord) -> DatasetFiles:
        return DatasetFiles(
            dataset_id=record.dataset_id,
            digest=record.digest,
            format=record.format,
            field_map=dict(record.field_map),
            num_rows=record.num_rows,
            files=tuple((file.name, file.path) for file in self._datasets.data_files(record)),
        )


class PreparationRecipes:
    """How datasets are prepared: prepared folders live below `root`, under the key of what they were made from."""

    def __init__(self, root: Path) -> None:
        self._root = root
        remove_all_partial(root)  # of preparations that ran when the daemon was killed

    def __call__(self, spec: JobSpec, dataset: DatasetFiles, model: Path) -> PreparationCall:
        """Return the call; reads the tokenizer's files.

        Raises:
            InvalidModel: when the folder holds no tokenizer.
        """
        options = PrepareOptions(
            format=DatasetFormat(dataset.format),
            field_map=dataset.field_map,
            method=spec.method,
            sequence_length=spec.train.sequence_length,
            train_on=spec.train.train_on,
            eval_fraction=spec.eval_fraction,
        )
        target = prepared_folder(self._root, dataset.digest, tokenizer_digest(model), options)
        request = PrepareRequest(
            dataset_files=tuple(StoredFile.at(path, name=name) for name, path in dataset.files),
            model_dir=model,
            output_dir=target,
            options=options,
            num_rows=dataset.num_rows,
        )
        return PreparationCall(
            target=target,
            evaluation=evaluation_folder(target, options),
            is_whole=is_prepared(target, options),
            request=request.to_mapping(),
        )
