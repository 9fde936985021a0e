"""What daemons do with model folders in processes of their own: check them, read them for their digest, and try their
class.

No folder can crash or stop the daemon, and none of these processes can take memory or time without a limit.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import structlog

from horizon_server.children.child import ChildTask, Limits
from horizon_server.errors import HorizonError, InvalidModel, OutOfMemory, Stalled, WorkerCrashed
from horizon_server.services.model_check import ModelFacts
from horizon_server.settings import child_environment

log = structlog.get_logger(__name__)

# The largest folder that the header's own limits allow, 200,000 tensors in 64 MiB of headers, takes a quarter of each.
LIMITS = Limits(memory_bytes=2 * 2**30, cpu_s=60, file_bytes=2**20, wall_s=300.0, oom_score_adj=1000)
# Reading every byte for the digest comes on top: a slow disk, and a processor without instructions for sha256.
_LEAST_READ_BYTES_PER_S, _LEAST_HASHED_BYTES_PER_S = 20e6, 100e6
# A trial loads torch and builds the model without storage: seconds, and less than a gigabyte for the largest models
# published.
TRIAL_LIMITS = Limits(memory_bytes=8 * 2**30, cpu_s=120, file_bytes=2**20, wall_s=300.0, oom_score_adj=1000)
_TOO_MUCH = (
    "config.json and the headers of its weights take more {what} to read than those of any model; "
    "push a folder written by save_pretrained"
)


async def check_model(folder: Path, *, digests: Path, limits: Limits = LIMITS) -> ModelFacts:
    """Return what `model_check.check_folder` returns, from a process of its own; cancelling ends it. The digest goes to
    the book `digests`.

    Raises: InvalidModel as `check_folder`, and where the folder crashes its reader or takes too much time or memory;
    WorkerDied where the child was killed, which says nothing about the folder.
    """
    request = {"folder": str(folder), "digests": str(digests), "digest_only": False}
    found: ModelFacts = await _read(request, "the model check", await _with_reading(folder, limits))
    return found


async def model_digest(folder: Path, *, digests: Path) -> str:
    """Return the digest of a model folder, which goes to the book `digests`; cancelling ends the reading. Raises as
    `check_model` does."""
    request = {"folder": str(folder), "digests": str(digests), "digest_only": True}
    return str(await _read(request, "the reading of a model", await _with_reading(folder, LIMITS)))


async def try_model(folder: Path, *, environment: Mapping[str, str]) -> None:
    """Build the class of a model folder without storage and run it on a few tokens, as a job does before it loads a
    weight.

    A process that fails otherwise than by a refusal says nothing about the folder; the job's worker will try again,
    with its reason.

    Raises:
        InvalidModel: the class is not one that can be trained layer by layer, or the folder is not what its config
            says.
    """
    task = ChildTask(
        module="horizon_server.worker.measure",
        who="the trial of the model",
        environment=environment,
        limits=TRIAL_LIMITS,
    )
    try:
        await task.run({"try": str(folder)})
    except InvalidModel:
        raise
    except HorizonError as error:
        log.warning("a model could not be tried", folder=folder.name, why=str(error)[:200])


async def _read(request: Mapping[str, Any], who: str, limits: Limits) -> Any:
    task = ChildTask(
        module="horizon_server.services.model_check",
        who=who,
        environment=child_environment(),
        limits=limits,
        meanings={
            Stalled: InvalidModel(_TOO_MUCH.format(what="time")),
            OutOfMemory: InvalidModel(_TOO_MUCH.format(what="memory")),
            WorkerCrashed: InvalidModel(
                "the model folder could not be read: the reader crashed. The files are probably damaged; create them "
                "again"
            ),
        },
    )
    return await task.run(request)


async def _with_reading(folder: Path, limits: Limits) -> Limits:
    """With the time for every byte of the weights."""
    num_bytes = await asyncio.to_thread(lambda: sum(file.stat().st_size for file in folder.glob("*.safetensors")))
    return dataclasses.replace(
        limits,
        wall_s=None if limits.wall_s is None else limits.wall_s + num_bytes / _LEAST_READ_BYTES_PER_S,
        cpu_s=None if limits.cpu_s is None else limits.cpu_s + int(num_bytes / _LEAST_HASHED_BYTES_PER_S),
    )
