"""Job specs that name local files: finds the files, pushes them, and replaces them with the pushed names.

A value is local when it exists on this disk, relative to the spec file's folder or else to the working folder. A bare word that is also the
name of something pushed means that. Only `model`, `dataset` and `eval_dataset` can be local.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horizon_client.connection import Connection
from horizon_client.dataset_files import check_dataset_files, dataset_sources
from horizon_client.datasets import AsyncDatasets, push_dataset
from horizon_client.errors import AlreadyExists, NotFound
from horizon_client.model_folder import model_files
from horizon_client.models import AsyncModels, push_model
from horizon_client.spec_file import load_spec_file, with_overrides
from horizon_client.transfer.files import content_digest, hash_files
from horizon_client.transfer.reporter import Reporter
from horizon_proto.v1.dataset_pb2 import DATASET_FORMAT_AUTO, CreateDatasetRequest
from horizon_proto.v1.model_pb2 import CreateModelRequest

_DATASET_FIELDS = ("dataset", "eval_dataset")
_MAX_NAME = 63
_PLACEHOLDER = "local"


@dataclass(frozen=True, kw_only=True)
class LoadedSpec:
    """A job spec before its local inputs are pushed, and the folders that relative paths in it start from."""

    mapping: Mapping[str, Any]
    folders: tuple[Path, ...]


def load_job_spec(spec: Mapping[str, Any] | str | os.PathLike[str], overrides: Sequence[str] = ()) -> LoadedSpec:
    """Return the spec of a file or mapping with overrides applied.

    Raises:
        BadFile: when the file is unusable.
        InvalidRequest: when an override is.
    """
    if isinstance(spec, Mapping):
        return LoadedSpec(mapping=with_overrides(spec, overrides), folders=(Path(),))
    path = Path(spec).expanduser()
    return LoadedSpec(mapping=with_overrides(load_spec_file(path), overrides), folders=(path.parent, Path()))


class LocalInputs:
    """Pushes the local files that a spec names."""

    def __init__(self, connection: Connection, datasets: AsyncDatasets, models: AsyncModels) -> None:
        self._connection = connection
        self._datasets = datasets
        self._models = models

    def with_placeholders(self, loaded: LoadedSpec) -> dict[str, Any]:
        """Return the spec as it would be after the push, with a placeholder for every name that is not known yet."""
        mapping = dict(loaded.mapping)
        for field in (*_DATASET_FIELDS, "model"):
            if local_sources(mapping.get(field), loaded.folders, many=field != "model"):
                mapping[field] = _PLACEHOLDER
        return mapping

    async def pushed(self, loaded: LoadedSpec, reporter: Reporter) -> dict[str, Any]:
        """Push the local inputs and return the spec with their pushed names."""
        mapping = dict(loaded.mapping)
        model = local_sources(mapping.get("model"), loaded.folders, many=False)
        if model and not await self._is_pushed(mapping["model"], self._models.get):
            reporter.notice(f"pushing the model folder {model[0]}")
            mapping["model"] = await self._push_model(model[0], reporter)
        for field in _DATASET_FIELDS:
            sources = local_sources(mapping.get(field), loaded.folders, many=True)
            if sources and not await self._is_pushed(mapping[field], self._datasets.get):
                reporter.notice(f"pushing the {field.replace('_', ' ')} {', '.join(map(str, sources))}")
                mapping[field] = await self._push_dataset(sources, reporter)
        return mapping

    async def _is_pushed(self, value: object, get: Callable[[str], Awaitable[object]]) -> bool:
        # only a bare word can be the name of something pushed
        if not isinstance(value, str) or "/" in value or os.sep in value or value.startswith((".", "~")):
            return False
        try:
            await get(value)
        except NotFound:
            return False
        return True

    async def _push_model(self, folder: Path, reporter: Reporter) -> str:
        files = await hash_files(await asyncio.to_thread(model_files, folder), reporter)

        async def push(name: str) -> str:
            return (await push_model(self._connection, CreateModelRequest(name=name), files, reporter)).model.name

        return await _push_named(push, folder, content_digest(files))

    async def _push_dataset(self, sources: Sequence[Path], reporter: Reporter) -> str:
        found = dataset_sources(sources, reporter)
        await check_dataset_files(found, reporter.progress)
        files = await hash_files(found, reporter)

        async def push(name: str) -> str:
            request = CreateDatasetRequest(name=name, format=DATASET_FORMAT_AUTO)
            return (await push_dataset(self._connection, request, files, reporter)).dataset.name

        return await _push_named(push, sources[0], content_digest(files, "auto"))


async def _push_named(push: Callable[[str], Awaitable[str]], source: Path, digest: str) -> str:
    """Push under the source's name without its endings, with part of the content's hash appended where that name is taken."""
    name = valid_name(source)
    try:
        return await push(name)  # the same content under this name is not an error, it is the same dataset
    except AlreadyExists:
        return await push(f"{name[: _MAX_NAME - 9]}-{digest[:8]}")


def valid_name(source: Path) -> str:
    """Return the name under which a local file (without its endings) or folder is pushed."""
    resolved = source.resolve()
    text = resolved.name if resolved.is_dir() else resolved.name.split(".")[0]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:_MAX_NAME] or "data"


def local_sources(value: object, folders: Sequence[Path], *, many: bool) -> list[Path]:
    """Return the local paths that a spec's value means; empty when it names something pushed.

    A list must consist of local files; the checks of the spec refuse any other.
    """
    if many and isinstance(value, list | tuple) and value:
        each = [local_sources(item, folders, many=False) for item in value]
        return [paths[0] for paths in each] if all(each) else []
    if not isinstance(value, str) or not value or "\0" in value:
        return []
    path = Path(value).expanduser()
    found = next((folder / path for folder in folders if (folder / path).exists()), None)
    return [found] if found is not None else []
