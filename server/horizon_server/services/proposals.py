"""A job before it is queued: what it names is found, everything is checked, and its memory and time are planned.

`job plan`, `queue simulate` and `job submit` all begin here, so that they refuse the same jobs with the same words.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from horizon_formats.formats import DatasetFormat, kind_of
from horizon_server.db.jobs import AdmitJob
from horizon_server.errors import DoesNotFit, InvalidModel, InvalidSpec, NotFound, QuotaExceeded, TooLarge
from horizon_server.jobs.compiling import LayerCompiler
from horizon_server.jobs.folders import JobFolders
from horizon_server.jobs.preparation import DatasetFiles, known_size
from horizon_server.jobs.tracking import NodeTrackers
from horizon_server.planning.data_size import DataSize
from horizon_server.planning.outline import config_outline
from horizon_server.planning.planner import Planner
from horizon_server.records.account import Principal
from horizon_server.records.job import JobRecord, JobState
from horizon_server.records.plan import Plan, PlannedMachine
from horizon_server.services.access import require_project
from horizon_server.services.accounts import UserLocks
from horizon_server.services.fleet.boxes import Boxes, Placed
from horizon_server.services.inputs import Inputs
from horizon_server.services.model_check import check_config
from horizon_server.services.pushed import MAX_ANNOUNCED_CONFIG_BYTES
from horizon_server.services.quotas import Quotas
from horizon_server.services.starts import CheckpointStart, PushedAdapter, Start, require_lora, start_at
from horizon_server.settings import child_environment
from horizon_server.spec import EVAL_SET, JobSpec, check_kinds
from horizon_server.store.base_digest import INIT_ADAPTER, check_base
from horizon_server.store.model_files import parse_config

PROPOSED = "job_proposed"
"""The id of a job that is not queued yet."""

_ONLY_HERE = "init_from names a checkpoint of this machine, and no other one has it"


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A job that passes every check but that of memory, with what its names mean; see `plan.fits`."""

    job: JobRecord
    """As it would be queued, under the id `PROPOSED`: with its project, its plan, and the box that it is sent to."""
    start: Start | None = None
    placed: Placed
    admit: AdmitJob | None = None
    """Refuses it where too many jobs are queued; None where it cannot be queued at all."""

    async def warned(self, quotas: Quotas) -> Plan:
        """Return the plan, with a warning where the queue has no room for a job that could run."""
        plan = self.placed.plan
        if self.admit is None:
            return plan
        try:
            await quotas.require_room(self.job.owner, self.job.project)
        except QuotaExceeded as full:
            return replace(plan, warnings=(*plan.warnings, f"it would not be queued now: {full.message}"))
        return plan

    def require_fit(self) -> None:
        """Let pass a job that its machine has memory for. Raises DoesNotFit, with the numbers."""
        if not self.placed.plan.fits:
            raise DoesNotFit(self.placed.plan.message)


@dataclass(frozen=True, kw_only=True)
class _Data:
    """The datasets that a job names, and those of its eval sets by their names."""

    trained: DatasetFiles | None
    """None for a session."""
    evaluated: dict[str, DatasetFiles]


@dataclass(frozen=True, kw_only=True, eq=False)
class Proposals:
    """Thread: belongs to one event loop; blocking file work goes to threads.

    Args:
        find_job: the job of a name or id that the caller may see; raises NotFound.
    """

    resources: Inputs
    planner: Planner
    boxes: Boxes
    folders: JobFolders
    quotas: Quotas
    trackers: NodeTrackers
    turns: UserLocks
    compiler: LayerCompiler
    find_job: Callable[[Principal, str], Awaitable[JobRecord]]

    @asynccontextmanager
    async def of(self, principal: Principal, spec: JobSpec, *, stays: bool = False) -> AsyncIterator[Proposal]:
        """Give the proposal, for the machine of the fleet where the job ends first, and one of the caller's turns until
        the block ends. With `stays` it is for this machine.

        Raises:
            NotAllowed: when the project is not the caller's.
            NotFound: when model or datasets do not exist for the caller, or the checkpoint that `init_from` names.
            InvalidSpec: when that checkpoint is of another model, its adapter is not what the job trains, or the method
                does not learn from data of such a kind; and what the model or the machine cannot do, or a tracker of
                `report_to` that this node does not write to.
            QuotaExceeded: when the job alone needs more memory than a quota allows.
            InUse: while the digest of a model is made that an adapter is compared with.
        """
        spec = spec if spec.project else spec.in_project(principal.project)
        require_project(principal, spec.project)
        await asyncio.to_thread(self.trackers.check, spec, owner=principal.name, project=spec.project)
        async with self.turns.of(principal.name):
            model_id, folder = await self.resources.model(principal, spec.model)
        start = await self._start(principal, spec, model_id, folder)
        async with self.turns.of(principal.name):
            data = await self._data(principal, spec)
            size = await asyncio.to_thread(self._size, spec, folder, data)
            evaluated = {name: files.record.dataset_id for name, files in data.evaluated.items()}
            now_s = time.time()
            job = JobRecord(
                job_id=PROPOSED,
                owner=principal.name,
                project=spec.project,
                spec=spec,
                priority=spec.priority,
                model_id=model_id,
                dataset_id=data.trained.record.dataset_id if data.trained else "",
                eval_dataset_id=evaluated.pop(EVAL_SET, ""),
                eval_set_ids=evaluated,
                job_state=JobState.QUEUED,
                created_s=now_s,
                queued_s=now_s,
            )
            placed = await self.boxes.placed(
                principal,
                job,
                lambda planner: _plan(planner, spec, folder, start, size),
                # A session stays where its calls come to.
                node=self.boxes.name if stays or spec.is_session else spec.node,
                only_here=_ONLY_HERE if isinstance(start, CheckpointStart) else "",
            )
            # On another machine, its own daemon says so.
            if not placed.box and (note := await self.compiler.note(spec, placed.plan, folder)):
                placed = replace(placed, plan=replace(placed.plan, warnings=(*placed.plan.warnings, note)))
            plan = placed.plan
            yield Proposal(
                job=replace(job, plan=plan, box=placed.box),
                start=start,
                placed=placed,
                # That it does not fit the node says more than that a quota is smaller.
                admit=await self.quotas.admit_job(principal.name, spec.project, plan) if plan.fits else None,
            )

    async def plan_elsewhere(
        self, principal: Principal, spec: JobSpec, machine: PlannedMachine
    ) -> tuple[JobSpec, Plan]:
        """Return the spec with its project and its plan on a machine that is asked about, where the data need not be
        known. Raises as `of`."""
        spec = spec if spec.project else spec.in_project(principal.project)
        require_project(principal, spec.project)
        async with self.turns.of(principal.name):
            model_id, folder = await self.resources.model(principal, spec.model)
        await self._start(principal, spec, model_id, folder)
        async with self.turns.of(principal.name):
            try:
                data = await self._data(principal, spec)
            except NotFound:
                size = None
            else:
                size = await asyncio.to_thread(self._size, spec, folder, data)
            plan_elsewhere = partial(self.planner.plan_elsewhere, spec, folder, machine, data=size)
            return spec, await asyncio.to_thread(plan_elsewhere)

    async def plan_config(
        self, principal: Principal, spec: JobSpec, config: bytes, machine: PlannedMachine | None = None
    ) -> tuple[JobSpec, Plan]:
        """Return the spec with its project and the plan of a job whose model is known by its config.json alone; neither
        the model's weights nor the data need to be here.

        Raises:
            NotAllowed: when the project is not the caller's.
            InvalidModel: when the config is not one of a model that can be trained.
            InvalidSpec: when the job starts from another job's result; and what the model or the machine cannot do.
        """
        spec = spec if spec.project else spec.in_project(principal.project)
        require_project(principal, spec.project)
        if spec.init_from is not None:
            raise InvalidSpec.of(
                "init_from", "init_from is a result on the node, and the model is not there; leave init_from out"
            )
        if len(config) > MAX_ANNOUNCED_CONFIG_BYTES:
            raise TooLarge(
                f"config.json has {len(config)} bytes; at most {MAX_ANNOUNCED_CONFIG_BYTES} are planned from"
            )
        check_config(parse_config(config))
        async with self.turns.of(principal.name), config_outline(config, environment=child_environment()) as folder:
            if machine is None:
                return spec, await asyncio.to_thread(self.planner.plan, spec, folder)
            return spec, await asyncio.to_thread(self.planner.plan_elsewhere, spec, folder, machine)

    async def _data(self, principal: Principal, spec: JobSpec) -> _Data:
        """Return the datasets that the job names. Raises NotFound, and InvalidSpec where its method does not learn from
        such data."""
        if spec.is_session:
            return _Data(trained=None, evaluated={})
        trained = await self.resources.dataset(principal, spec.dataset)
        named = {**({EVAL_SET: spec.eval_dataset} if spec.eval_dataset else {}), **spec.eval.sets}
        evaluated = {name: await self.resources.dataset(principal, given) for name, given in named.items()}
        kinds = {name: kind_of(DatasetFormat(files.record.format)) for name, files in evaluated.items()}
        check_kinds(spec, kind_of(DatasetFormat(trained.record.format)), kinds)
        return _Data(trained=trained, evaluated=evaluated)

    async def _start(self, principal: Principal, spec: JobSpec, model_id: str, folder: Path) -> Start | None:
        """Return what `init_from` names, which anyone may use who may download it; an adapter that names its base is
        compared with the model. Raises NotFound, InvalidSpec, and InUse while the model's digest is made.
        """
        start = await self._named_start(principal, spec, model_id)
        wanted = "" if start is None else await asyncio.to_thread(start.base_sha256)
        if wanted:
            try:
                check_base(INIT_ADAPTER, wanted, await self.resources.digest_of(principal, folder), model=spec.model)
            except InvalidModel as error:
                raise InvalidSpec.of("init_from", error.message) from error
        return start

    async def _named_start(self, principal: Principal, spec: JobSpec, model_id: str) -> Start | None:
        if spec.init_from is None:
            return None
        key, _, which = spec.init_from.rpartition("@")
        if not key:
            require_lora(spec)
            return PushedAdapter(name=spec.init_from, folder=await self.resources.adapter(principal, spec.init_from))
        source = await self.find_job(principal, key)
        if source.box:
            raise InvalidSpec.of(
                "init_from",
                f"init_from: the checkpoints of job {source.job_id} are in {source.box}, and a job starts from those "
                f"of this machine only; pull the checkpoint (horizon checkpoint pull {source.job_id}@{which}) and push "
                "it as a model or adapter",
            )
        return await start_at(spec, model_id, source, which, self.folders.checkpoints(source.job_id))

    def _size(self, spec: JobSpec, folder: Path, data: _Data) -> DataSize | None:
        if data.trained is None:
            return None
        evaluated = [files.record for files in data.evaluated.values()]
        return known_size(self.folders.prepared, spec, folder, data.trained.record, evaluated)


def _plan(planner: Planner, spec: JobSpec, folder: Path, start: Start | None, size: DataSize | None) -> Plan:
    """Return the plan of a job, with the numbers of the files that it starts from. Blocking."""
    if start is None:
        return planner.plan(spec, folder, data=size)
    return start.plan(planner, spec, folder, data=size)
