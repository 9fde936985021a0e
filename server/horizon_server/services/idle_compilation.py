"""Compiles the layers of the models that were pushed last, while no job needs the node: a first job of one of them then
finds them compiled, where it computes as a job does by default."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import structlog

from horizon_server.errors import HorizonError
from horizon_server.jobs.compiling import LayerCompiler
from horizon_server.planning.planner import Planner
from horizon_server.records.blob import ModelRecord
from horizon_server.services.pushed import ModelService
from horizon_server.spec import JobSpec, parse_job_spec

IDLE_S = 60.0
"""How long the node is idle before it begins, and between two looks at the models."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class IdleCompilation:
    """Thread: belongs to one event loop. Cancelling a call ends the child at once.

    Args:
        most: how many models are compiled for; 0: none are.
    """

    models: ModelService
    planner: Planner
    compiler: LayerCompiler
    most: int
    idle_s: float = IDLE_S

    async def __call__(self) -> None:
        """Compile for one model after the other, until it is cancelled."""
        while self.most:
            await asyncio.sleep(self.idle_s)
            for model in await self.models.newest(self.most):
                await self._compile(model)

    async def _compile(self, model: ModelRecord) -> None:
        spec = usual_spec(model.id)
        folder = self.models.folder(model.id)
        try:
            plan = await asyncio.to_thread(self.planner.plan, spec, folder)
            if plan.fits and await self.compiler.make_idle(spec, plan, folder):
                log.info("compiled the layers of a model that was pushed", model=model.name)
        except (HorizonError, OSError) as error:
            # What is wrong with a model, its first job reports.
            log.info("the layers of a model that was pushed are not compiled ahead", model=model.name, why=str(error))


def usual_spec(model: str) -> JobSpec:
    """Return a job that leaves all that layers depend on at its default."""
    train = {"max_steps": 1, "compile": "on"}
    return parse_job_spec({"name": "idle", "model": model, "dataset": "none", "train": train})
