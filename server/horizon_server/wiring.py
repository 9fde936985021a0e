"""Makes every part of the daemon and connects it to its neighbours. The one place that knows all parts; owns no logic
of its own."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from horizon_server.api.limits import CallLimits
from horizon_server.api.logins import Logins
from horizon_server.api.services import Services
from horizon_server.blobs.space import Space
from horizon_server.blobs.store import BlobStore
from horizon_server.db.database import Database
from horizon_server.db.jobs import JobStore
from horizon_server.db.pairing import Pairing
from horizon_server.db.pushed import BlobReferences, DatasetStore, ModelStore
from horizon_server.db.sharing import SharingStore
from horizon_server.db.webhooks import WebhookStore
from horizon_server.jobs.attempt import WORKER_MODULE, Attempt
from horizon_server.jobs.bases import Bases
from horizon_server.jobs.call_news import CallNews
from horizon_server.jobs.compiling import LayerCompiler
from horizon_server.jobs.folders import JobFolders
from horizon_server.jobs.health import DeviceHealth
from horizon_server.jobs.joint_turn import JointTurn
from horizon_server.jobs.journal import Journal, Lifecycle
from horizon_server.jobs.preparation import Preparation
from horizon_server.jobs.queue_view import QueueView
from horizon_server.jobs.requests import AttemptDevices
from horizon_server.jobs.runtime import Runtime
from horizon_server.jobs.scheduler import Scheduler
from horizon_server.jobs.spare_worker import SpareWorker
from horizon_server.jobs.tracking import NodeTrackers, Tracking
from horizon_server.jobs.turns import DeviceTurns
from horizon_server.jobs.usage import UsageMeter
from horizon_server.nodes.boxes import BoxClient
from horizon_server.nodes.directory import NodeDirectory
from horizon_server.planning.drives import find_drives
from horizon_server.planning.gpus import usable_device_bytes
from horizon_server.planning.machine import (
    Accelerator,
    IdleMeasurement,
    Machine,
    RateBook,
    host_memory,
    why_broken,
    worker_environment,
)
from horizon_server.planning.planner import Planner
from horizon_server.records.job import JobRecord, JobState
from horizon_server.records.plan import HeldMemory
from horizon_server.scheduling.shares import Shares
from horizon_server.scheduling.state import Rules
from horizon_server.services.accounts import Accounts, UserLocks
from horizon_server.services.audit import Audit
from horizon_server.services.evaluating import Evaluations
from horizon_server.services.fleet.boxes import Boxes
from horizon_server.services.fleet.guest import Guest
from horizon_server.services.housekeeping.deletion import Deletions
from horizon_server.services.housekeeping.retention import Retention
from horizon_server.services.housekeeping.sweep import Sweep
from horizon_server.services.identity import IdentityService
from horizon_server.services.idle_compilation import IdleCompilation
from horizon_server.services.inputs import Inputs
from horizon_server.services.jobs import JobService
from horizon_server.services.merging import Merges
from horizon_server.services.model_child import try_model
from horizon_server.services.node import NodeFacts
from horizon_server.services.previews import Previews
from horizon_server.services.pushed import DatasetService, ModelService, ModelTrial
from horizon_server.services.quotas import Quotas
from horizon_server.services.sampling import Samples
from horizon_server.services.sampling_child import SamplingChild
from horizon_server.services.sessions import Sessions
from horizon_server.services.sharing import SharingService
from horizon_server.services.task_results import TaskResults
from horizon_server.services.tinker.drawing import Drawing
from horizon_server.services.tinker.models import TinkerModels
from horizon_server.services.tinker.samples import WaitingSamples
from horizon_server.services.uploads import Uploads
from horizon_server.services.webhooks.deliveries import Deliveries
from horizon_server.services.webhooks.hooks import Webhooks
from horizon_server.services.webhooks.receiver import Receivers
from horizon_server.settings import Settings, child_environment
from horizon_server.store.cpus import available_cpus
from horizon_server.telemetry.families import NEWEST_ENDED
from horizon_server.telemetry.metrics import Metrics


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What the daemon is made of, wired."""

    services: Services
    lifecycle: Lifecycle
    journal: Journal
    scheduler: Scheduler
    metrics: Metrics
    pairing: Pairing
    sweep: Sweep
    space: Space

    async def drain(self, timeout_s: float, *, leave_workers: bool = False) -> None:
        """Take no new work, have the running jobs checkpoint and end, or leave their workers to the next daemon; then
        end every watch."""
        await self.services.tinker_samples.close()
        await self.services.samples.close()
        await self.scheduler.runtime.spare.close()
        await self.scheduler.runtime.compiler.close()
        if leave_workers:
            await self.scheduler.leave(timeout_s)
        else:
            await self.scheduler.drain(timeout_s)
        self.lifecycle.close()
        self.journal.end_watches()
        await self.services.jobs.tracking.close()


async def wire(
    settings: Settings,
    database: Database,
    *,
    found: Sequence[Accelerator],
    usable: Sequence[Accelerator],
    worker_module: str = WORKER_MODULE,
    more_environment: Mapping[str, str] = MappingProxyType({}),
) -> Parts:
    """Make every part and connect them; nothing runs yet.

    Args:
        found: the GPUs of this machine.
        usable: those that a worker's torch can use; each has turns of its own.
        worker_module: what `python -m` runs as the worker of an attempt; tests give a scripted one.
        more_environment: variables of child processes besides the usual ones.
    """
    metrics, lifecycle, store = Metrics(), Lifecycle(), JobStore(database)
    journal = Journal(store, metrics, lifecycle)
    metrics.set_jobs(await store.counts())
    metrics.set_queued(await store.in_states([JobState.QUEUED]))
    metrics.set_ended(await store.newest_ended(NEWEST_ENDED))
    memory = host_memory()
    # Now, as the first scrape may come before the first of the chores.
    metrics.set_host_memory(memory.limit_bytes, memory.available_bytes)
    environment = child_environment() | dict(more_environment)
    sharing, accounts = SharingStore(database), Accounts(database)
    folders = JobFolders(settings.state_dir, min_free_bytes=settings.min_free_bytes)
    audit, limits = Audit(database), CallLimits(calls_per_s=settings.max_calls_per_s)
    quotas, space = Quotas(sharing, store, folders), Space(settings.state_dir, settings.min_free_bytes)
    database.when_full = space.give_up_reserve
    # A scripted worker trains no model, so that none is tried.
    trial = partial(try_model, environment=environment) if worker_module == WORKER_MODULE else None
    uploads, datasets, models = _wire_data(settings, database, store, metrics, quotas, space, folders, trial)
    resources = Inputs(datasets=datasets, models=models, model_roots=settings.model_roots, folders=folders)
    shares = Shares(settings.share_half_life_s, await sharing.uses(), await sharing.allowances())
    rates = RateBook(settings.state_dir, Machine.of(usable, num_threads=settings.num_threads or available_cpus()))
    bases = Bases()
    planner = Planner.of_node(
        settings,
        rates,
        usable,
        free_devices=lambda: scheduler.free_devices,
        jobs_on=bases.jobs_on,
        drives=await asyncio.to_thread(find_drives, settings),
    )

    def free_bytes(but: str) -> int:
        return min(
            planner.host_limit_bytes - scheduler.promised(but=but).num_bytes,
            host_memory().available_bytes - settings.host_memory_reserve_bytes,
        )

    sampling = SamplingChild(environment=environment, free_bytes=free_bytes, keep_s=settings.sampling_keep_s)
    spare = SpareWorker(
        worker_module if settings.spare_worker else "",
        settings.state_dir / "jobs",
        environment=worker_environment(environment, "cuda", usable[:1]) if usable else environment,
        free_bytes=lambda but: free_bytes(but) - sampling.held_bytes,
    )
    compiler = LayerCompiler(
        folders,
        environment=environment,
        find_model=resources.model_of,
        free_bytes=lambda: free_bytes("") - sampling.held_bytes,
        tell=journal.append,
        wake=lambda: scheduler.wake(),
        on_made=metrics.on_compiled,
    )
    gpus = {f"cuda:{gpu.index}": gpu for gpu in usable}
    nodes = NodeDirectory(
        addresses=settings.nodes,
        key_file=settings.fleet_key_file,
        owner=f"{settings.fleet_address} {settings.state_dir.absolute()}",
        is_resident=store.is_resident,
    )

    async def why_device_broken(name: str) -> str:
        return await why_broken(gpus[name], environment) if name in gpus else ""

    view = QueueView(
        jobs=store,
        sharing=sharing,
        shares=shares,
        rules=Rules(**settings.model_dump(include={field.name for field in dataclasses.fields(Rules)})),
        host_bytes=lambda: max(0, planner.host_limit_bytes - sampling.busy_bytes),
        # On the host, what jobs hold on the device is part of their host memory.
        devices={
            **dict.fromkeys(host_device_names(settings), settings.arena_limit(host_memory().limit_bytes)),
            **{name: usable_device_bytes(gpu.memory_bytes) for name, gpu in gpus.items()},
        },
        health=DeviceHealth(why_broken=why_device_broken),
        further=nodes.why_not,
    )
    runtime = Runtime(
        settings=settings,
        journal=journal,
        metrics=metrics,
        lifecycle=lifecycle,
        folders=folders,
        find_inputs=resources.of_job,
        planner=planner,
        meter=UsageMeter(sharing, shares),
        view=view,
        nodes=nodes,
        calls=CallNews(),
        environment=environment,
        worker_module=worker_module,
        bases=bases,
        spare=spare,
        compiler=compiler,
    )
    measurement = IdleMeasurement(rates, environment=environment, gpus=usable)
    # A scripted worker trains no model.
    most = settings.compile_pushed_models if worker_module == WORKER_MODULE else 0
    compilation = IdleCompilation(models=models, planner=planner, compiler=compiler, most=most)

    async def idle() -> None:
        await measurement()
        await compilation()

    preparing = asyncio.Lock()
    scheduler = _wire_scheduler(runtime, usable, space, sampling, idle, preparing)
    boxes = Boxes(
        name=settings.box_name,
        clients=_box_clients(settings),
        journal=journal,
        planner=planner,
        meter=runtime.meter,
        shares=shares,
        simulate=scheduler.simulate,
        needed_by=resources.needed_by,
        path_of=uploads.store.path,
    )
    jobs = JobService(
        journal=journal,
        scheduler=scheduler,
        lifecycle=lifecycle,
        resources=resources,
        planner=planner,
        boxes=boxes,
        folders=folders,
        turns=UserLocks(),
        quotas=quotas,
        tracking=Tracking(
            journal=journal, lifecycle=lifecycle, trackers=NodeTrackers(settings=settings), environment=environment
        ),
    )
    retention = Retention(jobs=jobs, sharing=sharing, notice_s=settings.deletion_notice_days * 86400.0)
    node = NodeFacts(
        store,
        lifecycle,
        scheduler,
        boxes,
        state_dir=settings.state_dir,
        accelerators=tuple(found),
        share_half_life_s=settings.share_half_life_s,
    )
    outbox, receivers = WebhookStore(database), Receivers(settings.webhook_networks)
    samples = Samples(jobs, sampling, num_threads=settings.num_threads or available_cpus())
    sessions = Sessions(jobs, space=space)
    tinker_models = TinkerModels(jobs, sessions)
    services = Services(
        accounts=accounts,
        jobs=jobs,
        datasets=datasets,
        previews=Previews(resources, environment=environment),
        samples=samples,
        sessions=sessions,
        tinker_models=tinker_models,
        tinker_drawing=Drawing(jobs, sessions, samples, tinker_models),
        tinker_samples=WaitingSamples(),
        evaluations=Evaluations(
            jobs,
            memory=sampling,
            make_preparation=lambda: Preparation(folders.prepared, preparing, space),
            environment=environment,
        ),
        task_results=TaskResults(jobs),
        merges=Merges(jobs, quotas=quotas, environment=environment),
        models=models,
        blobs=uploads,
        node=node,
        sharing=SharingService(store=sharing, accounts=accounts, quotas=quotas, jobs=jobs, scheduler=scheduler),
        audit=audit,
        logins=Logins(accounts, audit, limits),
        limits=limits,
        deletions=Deletions(datasets=datasets, models=models, jobs=jobs),
        retention=retention,
        identity=IdentityService(
            accounts=accounts, datasets=datasets, models=models, max_token_days=settings.max_token_days
        ),
        webhooks=Webhooks(
            store=outbox,
            deliveries=Deliveries(outbox, receivers, metrics, public_url=settings.public_url),
            receivers=receivers,
            accounts=accounts,
        ),
        guest=Guest(name=settings.box_name, jobs=jobs, node=node, datasets=datasets, models=models, uploads=uploads),
    )
    pairing = Pairing(database, settings.state_dir)
    sweep = Sweep(
        settings=settings,
        pairing=pairing,
        uploads=uploads,
        datasets=datasets,
        models=models,
        jobs=jobs,
        retention=retention,
    )
    return Parts(
        services=services,
        lifecycle=lifecycle,
        journal=journal,
        scheduler=scheduler,
        metrics=metrics,
        pairing=pairing,
        sweep=sweep,
        space=space,
    )


def _box_clients(settings: Settings) -> dict[str, BoxClient]:
    """What the daemons of other machines are called with, by their names."""
    clients = {}
    for box in settings.boxes:
        name, _, address = box.partition("=")
        assert settings.fleet_key_file is not None, "settings with boxes have a key"
        clients[name] = BoxClient(name=name, address=address, key_file=settings.fleet_key_file)
    return clients


def host_device_names(settings: Settings) -> tuple[str, ...]:
    """Return the names of the devices that the processors are divided into."""
    num = settings.host_devices
    return ("host",) if num == 1 else tuple(f"host:{index}" for index in range(num))


def _wire_data(
    settings: Settings,
    database: Database,
    store: JobStore,
    metrics: Metrics,
    quotas: Quotas,
    space: Space,
    folders: JobFolders,
    trial: ModelTrial | None,
) -> tuple[Uploads, DatasetService, ModelService]:
    """Make what takes and keeps users' contents; `store` knows which jobs still need them."""
    uploads = Uploads(
        BlobStore(settings.state_dir, space=space),
        BlobReferences(database),
        max_blob_bytes=max(settings.max_dataset_bytes, settings.max_model_bytes),
        on_upload=metrics.on_upload,
    )
    datasets = DatasetService(
        DatasetStore(database),
        uploads,
        max_bytes=settings.max_dataset_bytes,
        users_of=store.users_of,
        quotas=quotas,
        prepared_root=folders.prepared,
    )
    models = ModelService(
        ModelStore(database),
        uploads,
        root=settings.state_dir / "models",
        digests=folders.digests,
        trial=trial,
        max_bytes=settings.max_model_bytes,
        users_of=store.users_of,
        quotas=quotas,
    )
    return uploads, datasets, models


def _wire_scheduler(
    runtime: Runtime,
    usable: Sequence[Accelerator],
    space: Space,
    sampling: SamplingChild,
    idle: Callable[[], Coroutine[Any, Any, None]],
    preparing: asyncio.Lock,
) -> Scheduler:
    """Make what queues and runs jobs: turns for each device, and an attempt for each job that gets memory."""
    settings, metrics, view = runtime.settings, runtime.metrics, runtime.view
    gpus = {f"cuda:{gpu.index}": gpu for gpu in usable}
    turns = {
        device: DeviceTurns(
            device,
            usable_bytes=view.devices[device] if device in gpus else None,
            shares=view.shares,
            rules=view.rules,
            grace_s=settings.turn_grace_s,
            metrics=metrics,
        )
        for device in view.devices
    }

    def on_asked(job_id: str) -> None:
        metrics.on_loaded(job_id)
        scheduler.wake()

    def find_devices(names: Sequence[str]) -> AttemptDevices:
        own = [turns[name] for name in names]
        return AttemptDevices(
            names=tuple(names),
            turns=own[0] if len(own) == 1 else JointTurn(own),
            gpus=tuple(gpus[name] for name in names if name in gpus),
        )

    async def make_room(job_id: str, num_bytes: int) -> None:
        await sampling.make_room(job_id, num_bytes)
        await runtime.spare.make_room(job_id, num_bytes)

    def make_attempt(job: JobRecord, devices: tuple[str, ...], others: Callable[[], HeldMemory]) -> Attempt:
        return Attempt(
            job=job,
            runtime=runtime,
            preparation=Preparation(runtime.folders.prepared, preparing, space, ask=scheduler.wake),
            devices=find_devices(devices),
            find_devices=find_devices,
            others=others,
            make_room=functools.partial(make_room, job.job_id),
            on_asked=functools.partial(on_asked, job.job_id),
        )

    scheduler = Scheduler(
        runtime=runtime,
        turns=turns,
        make_attempt=make_attempt,
        when_idle=idle,
        held_bytes=lambda: sampling.held_bytes,
    )
    return scheduler
