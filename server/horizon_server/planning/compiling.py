"""Whether a job's layers are compiled: the planner asks for what is kept on the device, the worker for what it makes.
Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping

from horizon_server.planning.flops import FlopsCount
from horizon_server.planning.model_folder import ModelFolder
from horizon_server.records.execution import DeviceKind
from horizon_server.spec import CompileChoice, TrainSpec

WORTH_COMPILING_FLOPS: Mapping[DeviceKind, float] = {"host": 1e14, "cuda": 5e16}
"""Below this, compiling takes longer than it saves: about five minutes of training on the machines that we know."""


def flops_of_job(folder: ModelFolder, train: TrainSpec, num_steps: int) -> float:
    """The operations of a whole job, in rows of their full length."""
    of_row = FlopsCount.of_folder(folder).of([train.sequence_length])
    return of_row * num_steps * train.tokens_per_step / train.sequence_length


def is_worth_compiling(choice: CompileChoice, kind: DeviceKind, model_flops: float) -> bool:
    """Whether the layers of a job of that much work are compiled, if they can be."""
    # By the work and not by what the library has, so that a job's numbers do not depend on earlier jobs.
    return choice == "on" or (choice == "auto" and model_flops >= WORTH_COMPILING_FLOPS[kind])
