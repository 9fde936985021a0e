"""The check of a pushed model folder in a process of its own, so that no folder can crash or stop the daemon."""

from __future__ import annotations

from pathlib import Path

from horizon_server.children.child import Limits, run_child
from horizon_server.errors import InvalidModel, OutOfMemory, Stalled, WorkerCrashed
from horizon_server.services.model_check import ModelFacts
from horizon_server.settings import child_environment

# The largest folder that the header's own limits allow, 200,000 tensors in 64 MiB of headers, takes a quarter of each.
LIMITS = Limits(memory_bytes=2 * 2**30, cpu_s=60, file_bytes=2**20, wall_s=300.0, oom_score_adj=1000)
_TOO_MUCH = (
    "config.json and the headers of its weights take more {what} to read than those of any model; "
    "push a folder written by save_pretrained"
)


async def check_model(folder: Path, *, limits: Limits = LIMITS) -> ModelFacts:
    """Return what `model_check.check_folder` returns, from a process of its own; cancelling ends it.

    Raises: InvalidModel as `check_folder`, and where the folder crashes its reader or takes too much time or memory; WorkerDied where
    the child was killed, which says nothing about the folder.
    """
    try:
        found: ModelFacts = await run_child(
            "horizon_server.services.model_check", {"folder": str(folder)}, who="the model check",
            environment=child_environment(), limits=limits,
        )  # fmt: skip
    except Stalled as error:
        raise InvalidModel(_TOO_MUCH.format(what="time")) from error
    except OutOfMemory as error:
        raise InvalidModel(_TOO_MUCH.format(what="memory")) from error
    except WorkerCrashed as error:
        raise InvalidModel(
            "the model folder crashes the program that reads it; its files are damaged, so write them again"
        ) from error
    return found
