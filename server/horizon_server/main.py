"""The daemon: wires every part to its neighbours, serves, and drains. The one place that knows all parts; owns no logic of its own."""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import MappingProxyType

import sdnotify
import structlog

from horizon_server.api.grpc.server import GrpcServer, start_grpc_server
from horizon_server.api.http.server import HttpServer, make_app, start_http_server
from horizon_server.api.services import Services
from horizon_server.blobs.concurrency import in_thread
from horizon_server.blobs.parts import disk_full_reported
from horizon_server.blobs.store import BlobStore
from horizon_server.db.database import Database
from horizon_server.db.jobs import JobStore
from horizon_server.db.pairing import Pairing
from horizon_server.db.pushed import BlobReferences, DatasetStore, ModelStore
from horizon_server.errors import HorizonError
from horizon_server.jobs.attempt import WORKER_MODULE, Attempt
from horizon_server.jobs.folders import JobFolders
from horizon_server.jobs.journal import Journal, Lifecycle
from horizon_server.jobs.preparation import Preparation
from horizon_server.jobs.scheduler import Scheduler
from horizon_server.network import (
    Address,
    ServerCertificate,
    given_certificate,
    is_loopback,
    own_certificate,
    parse_address,
)
from horizon_server.planning.machine import (
    Accelerator,
    IdleMeasurement,
    Machine,
    RateBook,
    find_accelerators,
    host_memory,
    usable_accelerators,
)
from horizon_server.planning.planner import Planner
from horizon_server.records.job import JobRecord
from horizon_server.services.accounts import Accounts, UserTurns
from horizon_server.services.jobs import JobService
from horizon_server.services.node import NodeFacts
from horizon_server.services.previews import Previews
from horizon_server.services.pushed import DatasetService, ModelService, NodeResources
from horizon_server.services.uploads import Uploads
from horizon_server.settings import Settings, child_environment
from horizon_server.state_dir import held_state_dir, write_endpoints
from horizon_server.store.cpus import available_cpus
from horizon_server.store.prepared import remove_all_partial
from horizon_server.telemetry.logs import configure_logging
from horizon_server.telemetry.metrics import Metrics

log = structlog.get_logger(__name__)

_MEMORY_EVERY_S = 5.0
_SWEEP_EVERY_S = 3600.0
_PREPARED = "prepared"


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What the daemon is made of, wired."""

    services: Services
    lifecycle: Lifecycle
    journal: Journal
    scheduler: Scheduler
    metrics: Metrics
    pairing: Pairing

    async def drain(self, timeout_s: float) -> None:
        """Take no new work, checkpoint the running job at its step boundary, and end every watch."""
        await self.scheduler.drain(timeout_s)
        self.lifecycle.close()
        self.journal.end_watches()


def run_daemon(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code.

    Raises:
        InUse: when another daemon holds the state folder.
        BadSetting: when an address or the state folder cannot be used.
        DiskFull: when the state folder's disk has no space to start with.
    """
    configure_logging(settings.log_level, settings.log_json)
    with (
        disk_full_reported(f"free space for {settings.state_dir}, then start again"),
        held_state_dir(settings.state_dir),
    ):
        asyncio.run(_serve(settings))
    return 0


async def _serve(settings: Settings) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    # Before the database is opened: a mistake in an address leaves none behind.
    addresses = parse_address("grpc", settings.grpc), parse_address("http", settings.http)
    certificate = _certificate(settings, *addresses)
    found = await find_accelerators()
    async with Database.opened(settings.database_path) as database:
        usable = await usable_accelerators(found, child_environment(), wanted=settings.gpu)
        parts = await wire(settings, database, found=found, usable=usable)
        grpc_server, http_server = await _listen(settings, parts, *addresses, certificate)
        queue = asyncio.create_task(run_queue(parts), name="queue")
        chores = asyncio.create_task(_chores(settings, parts), name="chores")
        waiting = asyncio.create_task(stop.wait(), name="signals")
        # A queue that breaks is a defect; the daemon then ends with the traceback instead of serving a dead queue.
        await asyncio.wait({queue, waiting}, return_when=asyncio.FIRST_COMPLETED)
        log.info("draining")
        sdnotify.SystemdNotifier().notify("STOPPING=1")
        await grpc_server.set_serving(serving=False)
        # The servers last, so that watchers still get the events of the running job's last checkpoint.
        await parts.drain(settings.drain_timeout_s)
        await asyncio.gather(grpc_server.stop(2.0), http_server.stop())
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
        usable: those that a worker's torch can use; jobs use the first.
        worker_module: what `python -m` runs as the worker of an attempt; tests give a scripted one.
        more_environment: variables of child processes besides the usual ones.
    """
    metrics, lifecycle, store = Metrics(), Lifecycle(), JobStore(database)
    journal = Journal(store, metrics, lifecycle)
    metrics.set_jobs(await store.counts())
    memory = host_memory()
    # Now, as the first scrape may come before the first of the chores.
    metrics.set_host_memory(memory.limit_bytes, memory.available_bytes)
    environment = child_environment() | dict(more_environment)
    uploads, datasets, models = _wire_data(settings, database, store, metrics)
    resources = NodeResources(datasets=datasets, models=models, model_roots=settings.model_roots)
    scheduler, jobs = _wire_jobs(
        settings, journal, metrics, lifecycle, resources, usable, environment=environment, worker_module=worker_module
    )
    services = Services(
        accounts=Accounts(database),
        jobs=jobs,
        datasets=datasets,
        previews=Previews(resources, environment=environment),
        models=models,
        blobs=uploads,
        node=NodeFacts(store, lifecycle, state_dir=settings.state_dir, accelerators=tuple(found)),
    )
    pairing = Pairing(database, settings.state_dir)
    return Parts(
        services=services, lifecycle=lifecycle, journal=journal, scheduler=scheduler, metrics=metrics, pairing=pairing
    )


def _wire_data(
    settings: Settings, database: Database, store: JobStore, metrics: Metrics
) -> tuple[Uploads, DatasetService, ModelService]:
    """Make what takes and keeps users' contents; `store` knows which jobs still need them."""
    uploads = Uploads(
        BlobStore(settings.state_dir),
        BlobReferences(database),
        max_blob_bytes=max(settings.max_dataset_bytes, settings.max_model_bytes),
        on_upload=metrics.on_upload,
    )
    prepared_root = settings.state_dir / _PREPARED
    # Of preparations that ran when the last daemon was killed.
    remove_all_partial(prepared_root)
    datasets = DatasetService(
        DatasetStore(database),
        uploads,
        max_bytes=settings.max_dataset_bytes,
        in_use=store.user_of,
        prepared_root=prepared_root,
    )
    models = ModelService(
        ModelStore(database),
        uploads,
        root=settings.state_dir / "models",
        max_bytes=settings.max_model_bytes,
        in_use=store.user_of,
    )
    return uploads, datasets, models


def _wire_jobs(
    settings: Settings, journal: Journal, metrics: Metrics, lifecycle: Lifecycle, resources: NodeResources,
    usable: Sequence[Accelerator], *, environment: Mapping[str, str], worker_module: str,
) -> tuple[Scheduler, JobService]:  # fmt: skip
    """Make what plans, queues and runs jobs."""
    num_threads = settings.num_threads or available_cpus()
    rates = RateBook(settings.state_dir, Machine.of(usable, num_threads=num_threads))
    planner = Planner.of_node(settings, rates, usable)
    folders = JobFolders(settings.state_dir)
    gpu = next(iter(usable), None)

    def make_attempt(job: JobRecord) -> Attempt:
        return Attempt(
            job=job, journal=journal, find_inputs=resources.of_job, folders=folders, planner=planner,
            preparation=Preparation(settings.state_dir / _PREPARED), num_threads=num_threads, environment=environment,
            trace=settings.trace_workers, worker_module=worker_module, gpu=gpu, numa_interleave=settings.numa_interleave,
        )  # fmt: skip

    scheduler = Scheduler(
        journal=journal,
        metrics=metrics,
        lifecycle=lifecycle,
        folders=folders,
        make_attempt=make_attempt,
        max_attempts=settings.max_attempts,
        orphan_grace_s=settings.drain_timeout_s,
        when_idle=IdleMeasurement(rates, environment=environment, gpu=gpu),
    )
    jobs = JobService(
        journal=journal, scheduler=scheduler, lifecycle=lifecycle, resources=resources, planner=planner,
        folders=folders, turns=UserTurns(),
    )  # fmt: skip
    return scheduler, jobs


def _certificate(settings: Settings, *addresses: Address) -> ServerCertificate | None:
    """Return the certificate to serve with; None on loopback, where none was asked for."""
    if settings.tls_cert is not None and settings.tls_key is not None:
        return given_certificate(settings.tls_cert, settings.tls_key)
    if all(is_loopback(address.host) for address in addresses):
        return None
    # These two mean all addresses of the machine, and no client connects to them.
    hosts = tuple(a.host for a in addresses if a.host not in ("0.0.0.0", "::"))  # noqa: S104
    return own_certificate(settings.state_dir / "tls", (*hosts, *settings.tls_names))


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
        write_endpoints(settings.state_dir, grpc=grpc_at, http=http_at, authority=authority)
        log.info("ready", grpc=grpc_at, http=http_at, tls=certificate is not None, state_dir=str(settings.state_dir))
        if authority is not None:
            log.info("clients need this file: horizon login HOST:PORT --token-file F --ca ca.pem", ca=str(authority))
        # Last: systemd starts what depends on the daemon when it reads this.
        sdnotify.SystemdNotifier().notify("READY=1")
        stack.pop_all()
    return grpc_server, http_server


async def run_queue(parts: Parts) -> None:
    """Settle what the last daemon left, then serve the queue until it is drained."""
    await parts.scheduler.recover()
    await parts.scheduler.run()


async def _chores(settings: Settings, parts: Parts) -> None:
    """Keep the gauges of memory and disk fresh, and clear away what is not used any more."""
    loop = asyncio.get_running_loop()
    next_sweep_s = loop.time()
    while True:
        memory = host_memory()
        parts.metrics.set_host_memory(memory.limit_bytes, memory.available_bytes)
        disk = shutil.disk_usage(settings.state_dir)
        parts.metrics.set_disk(disk.total, disk.free)
        if loop.time() >= next_sweep_s:
            next_sweep_s = loop.time() + _SWEEP_EVERY_S
            await sweep(settings, parts)
        await asyncio.sleep(_MEMORY_EVERY_S)


async def sweep(settings: Settings, parts: Parts) -> None:
    """Remove uploads that were given up, and move what the database does not know to the trash."""
    try:
        problem = await parts.pairing.problem()
        parts.services.blobs.store.trusts_database = problem is None
        if problem is not None:
            # A database from a backup, or a new one, would name everything in the folder unused.
            log.error("nothing is removed from the state folder", why=problem)
            return
        await parts.services.datasets.sweep(settings.upload_expiry_s)
        await parts.services.models.sweep(settings.upload_expiry_s)
        await parts.services.blobs.sweep(settings.upload_expiry_s)
        trash = parts.services.blobs.store.trash
        await in_thread(lambda: trash.expire(settings.trash_days * 86400.0))
    except (HorizonError, OSError):
        # Tried again in an hour; a disk in trouble must not end the daemon and its job.
        log.exception("the state folder could not be swept")
