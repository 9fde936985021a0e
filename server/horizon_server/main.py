"""The daemon: wires every part to its neighbours, serves, and drains. The one place that knows all parts; owns no logic
of its own."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import shutil
import signal
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import sdnotify
import structlog

from horizon_server.api.box.server import start_box_server
from horizon_server.api.certificates import addresses_of, certificate_of, watch_certificate
from horizon_server.api.grpc.server import GrpcServer, start_grpc_server
from horizon_server.api.http.server import HttpServer, make_app, start_http_server
from horizon_server.api.limits import CallLimits
from horizon_server.api.logins import Logins
from horizon_server.api.services import Services
from horizon_server.blobs.concurrency import in_thread
from horizon_server.blobs.parts import disk_full_reported
from horizon_server.blobs.space import Space
from horizon_server.blobs.store import BlobStore
from horizon_server.control_groups import remove_empty_worker_groups
from horizon_server.db.database import Database
from horizon_server.db.existing import keep_before_migration, remove_left_copies
from horizon_server.db.jobs import JobStore
from horizon_server.db.pairing import Pairing
from horizon_server.db.pushed import BlobReferences, DatasetStore, ModelStore
from horizon_server.db.sharing import SharingStore
from horizon_server.db.webhooks import WebhookStore
from horizon_server.errors import HorizonError
from horizon_server.jobs.attempt import WORKER_MODULE, Attempt
from horizon_server.jobs.folders import JobFolders
from horizon_server.jobs.health import DeviceHealth
from horizon_server.jobs.joint_turn import JointTurn
from horizon_server.jobs.journal import Journal, Lifecycle
from horizon_server.jobs.preparation import Preparation
from horizon_server.jobs.queue_view import QueueView
from horizon_server.jobs.requests import AttemptDevices
from horizon_server.jobs.runtime import Runtime
from horizon_server.jobs.scheduler import Scheduler
from horizon_server.jobs.tracking import NodeTrackers, Tracking
from horizon_server.jobs.turns import DeviceTurns
from horizon_server.jobs.usage import UsageMeter
from horizon_server.network import (
    Address,
    ServerCertificate,
    is_loopback,
)
from horizon_server.nodes.boxes import BoxClient
from horizon_server.nodes.directory import NodeDirectory
from horizon_server.planning.gpus import usable_device_bytes
from horizon_server.planning.machine import (
    Accelerator,
    IdleMeasurement,
    Machine,
    RateBook,
    find_accelerators,
    host_memory,
    usable_accelerators,
    why_broken,
)
from horizon_server.planning.planner import Planner
from horizon_server.records.job import JobRecord, JobState
from horizon_server.scheduling.shares import Shares
from horizon_server.scheduling.state import Rules
from horizon_server.services.accounts import Accounts, UserLocks
from horizon_server.services.audit import Audit
from horizon_server.services.evaluating import Evaluations
from horizon_server.services.fleet.boxes import Boxes
from horizon_server.services.fleet.guest import Guest
from horizon_server.services.housekeeping.deletion import Deletions
from horizon_server.services.housekeeping.requests import answer_request
from horizon_server.services.housekeeping.retention import Retention
from horizon_server.services.housekeeping.sweep import Sweep
from horizon_server.services.identity import IdentityService
from horizon_server.services.inputs import Inputs
from horizon_server.services.jobs import JobService
from horizon_server.services.merging import Merges, remove_cut_merges
from horizon_server.services.model_child import try_model
from horizon_server.services.node import NodeFacts
from horizon_server.services.previews import Previews
from horizon_server.services.pushed import DatasetService, ModelService, ModelTrial
from horizon_server.services.quotas import Quotas
from horizon_server.services.sampling import Samples
from horizon_server.services.sampling_child import SamplingChild
from horizon_server.services.sharing import SharingService
from horizon_server.services.uploads import Uploads
from horizon_server.services.webhooks.deliveries import Deliveries
from horizon_server.services.webhooks.hooks import Webhooks
from horizon_server.services.webhooks.receiver import Receivers
from horizon_server.settings import Settings, child_environment, watchdog_limit_s
from horizon_server.state_dir import held_state_dir, write_endpoints
from horizon_server.store.cpus import available_cpus
from horizon_server.store.prepared import remove_all_partial
from horizon_server.telemetry.families import NEWEST_ENDED
from horizon_server.telemetry.gpus import GpuWatch
from horizon_server.telemetry.logs import configure_logging
from horizon_server.telemetry.metrics import Metrics

log = structlog.get_logger(__name__)

_MEMORY_EVERY_S = 5.0
_SWEEP_EVERY_S = 3600.0
_REQUESTS_EVERY_S = 1.0
_STORED_EVERY_S = 60.0


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
        await self.services.samples.close()
        if leave_workers:
            await self.scheduler.leave(timeout_s)
        else:
            await self.scheduler.drain(timeout_s)
        self.lifecycle.close()
        self.journal.end_watches()
        await self.services.jobs.tracking.close()


def run_daemon(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code.

    Raises:
        InUse: when another daemon holds the state folder.
        BadSetting: when an address or the state folder cannot be used.
        DiskFull: when the state folder's disk has no space to start with.
    """
    configure_logging(settings.log_level, settings.log_json)
    with (
        # Without the reserve nothing can be written, so nobody can delete through the daemon.
        disk_full_reported(
            f"free space on the disk of {settings.state_dir}, then start again; if nothing else can go, compiled/ and "
            "trash/ in it are not "
            "needed, and prepared/ is made again (docs/housekeeping.md)"
        ),
        held_state_dir(settings.state_dir),
    ):
        # Before the database is opened, which takes some space.
        Space(settings.state_dir, settings.min_free_bytes).tend_reserve()
        asyncio.run(_serve(settings))
    return 0


async def _serve(settings: Settings) -> None:
    stop, interrupted = asyncio.Event(), asyncio.Event()

    def interrupt() -> None:
        interrupted.set()
        stop.set()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    # Ctrl-C ends everything.
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupt)
    # Before the database is opened: a mistake in an address leaves none behind.
    addresses = addresses_of(settings)
    certificate = certificate_of(settings, *addresses)
    found = await find_accelerators()
    await asyncio.to_thread(remove_left_copies)
    kept = await asyncio.to_thread(keep_before_migration, settings.database_path)
    if kept is not None:
        log.info("the database is migrated; this copy of it is for going back", copy=str(kept))
    async with Database.opened(settings.database_path) as database:
        usable = await usable_accelerators(found, child_environment(), wanted=settings.gpu)
        parts = await wire(settings, database, found=found, usable=usable)
        box_server = None if settings.box_port is None else await start_box_server(parts.services, settings)
        grpc_server, http_server = await _listen(settings, parts, *addresses, certificate)
        if box_server is not None:
            log.info("takes jobs of other daemons", box=settings.box_name, address=box_server.address)
        queue = asyncio.create_task(run_queue(parts), name="queue")
        watching = watch_certificate(settings, certificate, (grpc_server, http_server), parts.metrics)
        chores = asyncio.create_task(_chores(settings, parts, watching), name="chores")
        waiting = asyncio.create_task(stop.wait(), name="signals")
        # A queue that breaks is a defect; the daemon then ends with the traceback instead of serving a dead queue.
        await asyncio.wait({queue, waiting}, return_when=asyncio.FIRST_COMPLETED)
        log.info("draining")
        sdnotify.SystemdNotifier().notify("STOPPING=1")
        await grpc_server.set_serving(serving=False)
        # The servers last, so that watchers still get the events of the running job's last checkpoint.
        leave_workers = settings.leaves_workers and not interrupted.is_set()
        await parts.drain(settings.drain_timeout_s, leave_workers=leave_workers)
        ending = [grpc_server.stop(2.0), http_server.stop(), *([box_server.stop()] if box_server else [])]
        await asyncio.gather(*ending)
        await asyncio.gather(parts.services.datasets.close(), parts.services.models.close())
        log.info("stopped")
        chores.cancel()
        waiting.cancel()
        await asyncio.gather(chores, waiting, return_exceptions=True)
        await queue


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
    planner = Planner.of_node(settings, rates, usable, free_devices=lambda: scheduler.free_devices)
    sampling = SamplingChild(
        environment=environment,
        free_bytes=lambda but: min(
            planner.host_limit_bytes - scheduler.promised_bytes(but=but),
            host_memory().available_bytes - settings.host_memory_reserve_bytes,
        ),
        keep_s=settings.sampling_keep_s,
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
        environment=environment,
        worker_module=worker_module,
    )
    idle = IdleMeasurement(rates, environment=environment, gpus=usable)
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
    services = Services(
        accounts=accounts,
        jobs=jobs,
        datasets=datasets,
        previews=Previews(resources, environment=environment),
        samples=Samples(jobs, sampling, num_threads=settings.num_threads or available_cpus()),
        evaluations=Evaluations(
            jobs,
            memory=sampling,
            make_preparation=lambda: Preparation(folders.prepared, preparing, space),
            environment=environment,
        ),
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
    idle: IdleMeasurement,
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

    def make_attempt(job: JobRecord, devices: tuple[str, ...], other_bytes: Callable[[], int]) -> Attempt:
        return Attempt(
            job=job,
            runtime=runtime,
            preparation=Preparation(runtime.folders.prepared, preparing, space, ask=scheduler.wake),
            devices=find_devices(devices),
            find_devices=find_devices,
            other_bytes=other_bytes,
            make_room=functools.partial(sampling.make_room, job.job_id),
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


async def _listen(
    settings: Settings, parts: Parts, grpc: Address, http: Address, certificate: ServerCertificate | None
) -> tuple[GrpcServer, HttpServer]:
    """Serve gRPC and HTTP and announce their addresses; when one step fails, nothing keeps listening."""
    metrics, metrics_open = parts.metrics, is_loopback(http.host) and not settings.metrics_token_required
    authority = certificate.authority if certificate else None
    if certificate is not None:
        metrics.set_certificate_expiry(certificate.expires_s)
    app = make_app(
        parts.services,
        metrics,
        metrics_open=metrics_open,
        ready=lambda: "the daemon is shutting down" if parts.lifecycle.draining else None,
    )
    async with AsyncExitStack() as stack:
        grpc_server = await start_grpc_server(
            parts.services, address=str(grpc), tls=certificate, observe=metrics.on_grpc
        )
        stack.push_async_callback(grpc_server.stop, 0)
        http_server = await start_http_server(app, http.host, http.port, certificate)
        stack.push_async_callback(http_server.stop)
        # The ports that were bound: a setting may ask for port 0.
        grpc_at, http_at = f"{grpc.host}:{grpc_server.port}", f"{http.host}:{http_server.port}"
        metrics.set_page_url(_page_url(settings, http.host, http_server.port, is_secure=certificate is not None))
        write_endpoints(settings.state_dir, grpc=grpc_at, http=http_at, authority=authority)
        log.info("ready", grpc=grpc_at, http=http_at, tls=certificate is not None, state_dir=str(settings.state_dir))
        if authority is not None:
            log.info("clients need this file: horizon login HOST:PORT --token-file F --ca ca.pem", ca=str(authority))
        # Last: systemd starts what depends on the daemon when it reads this.
        sdnotify.SystemdNotifier().notify("READY=1")
        stack.pop_all()
    return grpc_server, http_server


def _page_url(settings: Settings, host: str, port: int, *, is_secure: bool) -> str:
    """Return where people reach the web page: as the settings say, else by the first name that the certificate was
    asked for, else where the daemon listens."""
    if settings.public_url is not None:
        return settings.public_url.rstrip("/")
    if is_secure and settings.tls_names:
        host = settings.tls_names[0]
    elif host in ("0.0.0.0", "::"):  # noqa: S104
        host = socket.gethostname()
    return f"{'https' if is_secure else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


async def run_queue(parts: Parts) -> None:
    """Settle what the last daemon left, then serve the queue until it is drained."""
    remove_empty_worker_groups()
    # Of preparations and merges that ran when the last daemon was killed.
    remove_all_partial(parts.services.jobs.folders.prepared)
    remove_cut_merges(parts.services.jobs.folders)
    await parts.scheduler.recover()
    await parts.services.jobs.tracking.recover()
    await parts.scheduler.run()


async def _chores(settings: Settings, parts: Parts, watching: Coroutine[Any, Any, None]) -> None:
    """Keep the gauges of memory and disk fresh, clear away what is not used any more, send webhooks, tell systemd that
    the daemon is alive, and serve with a certificate that is replaced."""
    # Apart from each other: a sweep may take minutes, and the disk may run full meanwhile.
    with contextlib.closing(GpuWatch()) as gpus:
        if parts.services.node.accelerators:
            gpus.start()
        await asyncio.gather(
            _watch_machine(settings, parts, gpus),
            _count_stored(parts),
            _sweep_hourly(settings, parts),
            parts.services.webhooks.deliveries.run(),
            feed_watchdog(),
            parts.services.jobs.boxes.run(parts.metrics.set_fleet_boxes),
            parts.scheduler.runtime.nodes.watch(parts.scheduler.try_held_back, parts.metrics.set_fleet_nodes),
            watching,
        )


async def feed_watchdog() -> None:
    """Tell systemd that the event loop turns, where the unit has WatchdogSec; a loop that hangs is then restarted."""
    limit_s, notifier = watchdog_limit_s(), sdnotify.SystemdNotifier()
    try:
        while limit_s:
            notifier.notify("WATCHDOG=1")
            await asyncio.sleep(limit_s / 3)
    finally:
        if notifier.socket is not None:
            notifier.socket.close()


async def _count_stored(parts: Parts) -> None:
    while True:
        with contextlib.suppress(HorizonError, OSError):  # tried again in a minute
            parts.metrics.set_stored(await parts.services.sharing.quotas.stored_bytes())
        await asyncio.sleep(_STORED_EVERY_S)


async def _watch_machine(settings: Settings, parts: Parts, gpus: GpuWatch) -> None:
    while True:
        parts.metrics.set_gpus(gpus.figures())
        memory = host_memory()
        parts.metrics.set_host_memory(memory.limit_bytes, memory.available_bytes)
        disk = shutil.disk_usage(settings.state_dir)
        parts.metrics.set_disk(disk.total, disk.free)
        with contextlib.suppress(OSError):
            await in_thread(parts.space.tend_reserve)
        await asyncio.sleep(_MEMORY_EVERY_S)


async def _sweep_hourly(settings: Settings, parts: Parts) -> None:
    loop = asyncio.get_running_loop()
    next_sweep_s = loop.time()
    while True:
        if loop.time() >= next_sweep_s:
            next_sweep_s = loop.time() + _SWEEP_EVERY_S
            await sweep(parts)
        await answer_request(settings.state_dir, parts.sweep)
        await asyncio.sleep(_REQUESTS_EVERY_S)


async def sweep(parts: Parts) -> None:
    """Remove what nothing needs any more."""
    try:
        await parts.services.audit.expire(parts.sweep.settings.audit_days)
        await parts.services.webhooks.sweep()
        await parts.sweep.run()
    except (HorizonError, OSError):
        # Tried again in an hour; a disk in trouble must not end the daemon and its job.
        log.exception("the state folder could not be swept")
