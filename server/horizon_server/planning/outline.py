"""A model folder from config.json alone, from which a job is planned before its weights are fetched."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
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


@asynccontextmanager
async def config_outline(config: bytes, *, environment: Mapping[str, str]) -> AsyncIterator[Path]:
    """Give a folder, which is gone at the end of the block, with a config.json and the headers of the tensors that the
    model's class has; they take no space. A child process builds the class, without storage.

    Raises:
        InvalidModel: the config is not one of a model that can be trained.
    """
    task = ChildTask(
        module="horizon_server.worker.measure",
        who="the reading of config.json",
        environment=environment,
        limits=_LIMITS,
        meanings={Stalled: _TOO_MUCH, OutOfMemory: _TOO_MUCH, WorkerCrashed: _TOO_MUCH},
    )
    with tempfile.TemporaryDirectory(prefix="horizond-config-") as name:
        folder = Path(name)
        await asyncio.to_thread((folder / CONFIG_FILE).write_bytes, config)
        tensors = await task.run({"tensors_of": name})
        try:
            await asyncio.to_thread(write_outline, folder / "model.safetensors", tensors)
        except OSError as error:
            # No file system has files of such a size.
            raise _TOO_MUCH from error
        yield folder
