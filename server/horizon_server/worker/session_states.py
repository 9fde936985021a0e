"""The weights of a checkpoint for a session that runs: of itself, or of another job of the same model and adapters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from horizon_server.errors import NotFound
from horizon_server.jobs.folders import CheckpointFolder
from horizon_server.records.session import LoadState
from horizon_server.store.adapter_files import read_adapter_folder
from horizon_server.store.base_digest import check_base
from horizon_server.store.checkpoint import load_checkpoint
from horizon_server.store.checkpoint_parts import adapter_part, model_part
from horizon_server.store.layout import MOMENT_PLANES
from horizon_server.store.manifest import TRAINER_FOLDER, read_manifest
from horizon_server.store.model_load import load_model
from horizon_server.worker.set_up import SetUp
from horizon_server.worker_link.request import WorkerRequest


def checkpoint_folder(checkpoints: Path, name: str) -> Path:
    """Return the folder of the checkpoint JOB@STEP; `checkpoints` is the folder of one job's. Raises NotFound."""
    job_id, _, step = name.partition("@")
    folder = CheckpointFolder(checkpoints.parent.parent / job_id / checkpoints.name, job_id)
    if int(step) not in folder.steps():
        raise NotFound(f"the checkpoint {name} is not there any more")
    return folder.of_step(int(step))


def load_state(
    folder: Path, call: LoadState, *, request: WorkerRequest, set_up: SetUp, warn: Callable[[str], None]
) -> dict[str, Any] | None:
    """Fill the store, and return the trainer's state; None where only the weights were wanted, whose moments are zero.
    `warn` gets a sentence where the checkpoint's optimizer states have another form than the session's.

    Weights are the exact ones of the trainer's planes where the checkpoint has them, else the exported ones.

    Raises:
        InvalidModel: the checkpoint is damaged, or belongs to another model or to other adapters.
    """
    store, adapter = set_up.store, set_up.adapter
    base_sha256 = None if adapter is None else adapter.base_sha256
    if call.optimizer or any((folder / TRAINER_FOLDER).glob("*.safetensors")):
        state = load_checkpoint(store, folder, base=request.model, base_sha256=base_sha256, on_conversion=warn)
        if call.optimizer:
            trainer: dict[str, Any] = state["trainer"]
            return trainer
    elif adapter is None:
        load_model(store, folder / (model_part(read_manifest(folder).files) or ""))
    else:
        manifest = read_manifest(folder)
        assert manifest.base is not None and base_sha256 is not None, "a checkpoint of adapters has a base"
        check_base("the checkpoint's adapter", manifest.base.sha256, base_sha256())
        names = {place.name for _, place in store.layout.tensors() if place.adapts}
        adapters = read_adapter_folder(folder / (adapter_part(manifest.files) or ""))
        load_model(store, request.model, adapters=adapters.tensors(names))
    for moments in store.zero(MOMENT_PLANES):
        moments.zero_()
    return None
