"""Models: what `services.pushed` does for all pushed resources, with a folder of hard links and a check of config and weights."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from horizon_server.blobs.concurrency import in_thread
from horizon_server.blobs.parts import disk_full_reported
from horizon_server.blobs.store import link_folder, remove_folder, remove_unreferenced
from horizon_server.children.child import Limits, run_child
from horizon_server.db.pushed import ModelStore
from horizon_server.errors import InvalidModel, OutOfMemory, Stalled, WorkerCrashed
from horizon_server.records.account import Principal
from horizon_server.records.blob import BlobFile, digest
from horizon_server.records.pushed import ModelRecord
from horizon_server.services.access import require_create
from horizon_server.services.model_check import ModelFacts, check_config, check_names
from horizon_server.services.pushed import FindUser, PushedService, check_name
from horizon_server.services.uploads import Uploads
from horizon_server.settings import child_environment
from horizon_server.store.model_files import CONFIG_FILE, parse_config

MAX_ANNOUNCED_CONFIG_BYTES = 2**20
# The largest folder that the header's own limits allow, 200,000 tensors in 64 MiB of headers, takes a quarter of each.
LIMITS = Limits(memory_bytes=2 * 2**30, cpu_s=60, file_bytes=2**20, wall_s=300.0, oom_score_adj=1000)
_TOO_MUCH = (
    "config.json and the headers of its weights take more {what} to read than those of any model; "
    "push a folder written by save_pretrained"
)


class ModelService(PushedService[ModelRecord]):
    """What callers may do with models. `root` holds one folder of hard links per READY model."""

    def __init__(
        self,
        store: ModelStore,
        uploads: Uploads,
        *,
        root: Path,
        max_bytes: int,
        in_use: FindUser,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(store, uploads, max_bytes=max_bytes, in_use=in_use, clock=clock)
        self._root = root

    async def create(
        self, principal: Principal, *, request_id: str, name: str, files: Sequence[BlobFile], config: bytes = b""
    ) -> ModelRecord:
        """Announce a model folder; the same name with the same content gives the one that is there.

        `config` is the content of its config.json, for a refusal before anything is sent. Empty: not known yet.

        Raises:
            InvalidSpec, TooLarge: for an announcement that cannot be fulfilled.
            InvalidModel: for a folder that its names or its config already rule out: pickles, code, no weights, an encoder.
            AlreadyExists: when the name is taken by other content.
        """
        require_create(principal)
        check_name(name)
        check_names(files)
        if config:
            announced_sha256 = next(file.sha256 for file in files if file.path == CONFIG_FILE)
            if len(config) > MAX_ANNOUNCED_CONFIG_BYTES or hashlib.sha256(config).hexdigest() != announced_sha256:
                raise InvalidModel(
                    f"the announced {CONFIG_FILE} is not the one of files: it must have the same sha256, and at most "
                    f"{MAX_ANNOUNCED_CONFIG_BYTES} bytes; leave it out otherwise"
                )
            check_config(parse_config(config))
        announced = ModelRecord(
            model_id=self._new_id(),
            owner=principal.name,
            name=name,
            files=tuple(files),
            digest=digest(sorted(files, key=lambda file: file.path)),
            created_s=self._clock(),
        )
        return await self._announce(announced, request_id=request_id)

    def folder(self, model_id: str) -> Path:
        """Return where the folder of a READY model is."""
        return self._root / model_id

    async def sweep(self, max_age_s: float) -> int:
        """Remove announcements older than that which were never finalized; move folders without a record to the trash. Return how many."""
        removed = await super().sweep(max_age_s)
        known = await self._store.ids()
        return removed + await in_thread(lambda: remove_unreferenced(self._root, known, self._uploads.store.trash))

    async def _check(self, record: ModelRecord) -> dict[str, Any]:
        folder = self.folder(record.model_id)
        with disk_full_reported():
            await in_thread(lambda: link_folder(self._uploads.store, record.files, folder))
        found = await check_model(folder)
        return {"architecture": found.architecture, "num_parameters": found.num_parameters}

    async def _clean_up(self, record: ModelRecord) -> None:
        await in_thread(lambda: remove_folder(self.folder(record.model_id)))


async def check_model(folder: Path, *, limits: Limits = LIMITS) -> ModelFacts:
    """Return what `model_check.check_folder` returns, from a process of its own; cancelling ends it.

    Raises: InvalidModel as `check_folder`, and where the folder crashes its reader or takes too much time or memory; WorkerDied where
    the child was killed, which says nothing about the folder.
    """
    try:
        found = await run_child(
            "horizon_server.services.model_check", {"folder": str(folder)}, who="the model check",
            environment=child_environment(), limits=limits,
        )  # fmt: skip
    except Stalled as error:
        raise InvalidModel(_TOO_MUCH.format(what="time")) from error
    except OutOfMemory as error:
        raise InvalidModel(_TOO_MUCH.format(what="memory")) from error
    except WorkerCrashed as error:
        raise InvalidModel("the model folder crashes its reader; its files are damaged, so write them again") from error
    return ModelFacts(architecture=found["architecture"], num_parameters=found["num_parameters"])
