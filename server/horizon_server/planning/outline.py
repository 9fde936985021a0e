"""A model folder from config.json alone, from which a job is planned before its weights are fetched."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from horizon_server.children.child import ChildTask, Limits
from horizon_server.errors import InvalidModel, OutOfMemory, Stalled, WorkerCrashed
from horizon_server.store.model_files import CONFIG_FILE
from horizon_server.store.safetensors_files import write_outline

# The class of a model is built without storage: seconds, and less than a gigabyte for the largest models published.
_LIMITS = Limits(memory_bytes=8 * 2**30, cpu_s=120, file_bytes=2**20, wall_s=300.0, oom_score_adj=1000)
_TOO_MUCH = InvalidModel("config.json asks for more than any model has; give the config.json of a published model")


def has_weights(folder: Path) -> bool:
    """Whether there are safetensors in a model folder, whole or not."""
    return any(folder.glob("*.safetensors*"))


async def write_config_outline(config: Path, target: Path, *, environment: Mapping[str, str]) -> None:
    """Fill the folder `target` with a config.json and the headers of the tensors that its class has; they take no
    space. A child process builds the class, without storage.

    Raises:
        InvalidModel: the config is not one of a model that can be trained.
    """
    shutil.copyfile(config, target / CONFIG_FILE)
    task = ChildTask(
        module="horizon_server.worker.measure",
        who="the reading of config.json",
        environment=environment,
        limits=_LIMITS,
        meanings={Stalled: _TOO_MUCH, OutOfMemory: _TOO_MUCH, WorkerCrashed: _TOO_MUCH},
    )
    write_outline(target / "model.safetensors", await task.run({"tensors_of": str(target)}))
