"""The daemon: serves, does its chores, and drains."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import socket
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any

import sdnotify
import structlog

from horizon_server.api.box.server import start_box_server
from horizon_server.api.certificates import addresses_of, certificate_of, watch_certificate
from horizon_server.api.grpc.server import GrpcServer, start_grpc_server
from horizon_server.api.http.server import HttpServer, make_app, start_http_server
from horizon_server.blobs.concurrency import in_thread
from horizon_server.blobs.parts import disk_full_reported
from horizon_server.blobs.space import Space
from horizon_server.control_groups import remove_empty_worker_groups
from horizon_server.db.database import Database
from horizon_server.db.existing import keep_before_migration, remove_left_copies
from horizon_server.errors import HorizonError
from horizon_server.network import (
    Address,
    ServerCertificate,
    is_loopback,
)
from horizon_server.planning.machine import (
    find_accelerators,
    host_memory,
    usable_accelerators,
)
from horizon_server.services.housekeeping.requests import answer_request
from horizon_server.services.merging import remove_cut_merges
from horizon_server.settings import Settings, child_environment, watchdog_limit_s
from horizon_server.state_dir import held_state_dir, write_endpoints
from horizon_server.store.prepared import remove_all_partial
from horizon_server.telemetry.gpus import GpuWatch
from horizon_server.telemetry.logs import configure_logging
from horizon_server.wiring import Parts, wire

log = structlog.get_logger(__name__)

_MEMORY_EVERY_S = 5.0
_SWEEP_EVERY_S = 3600.0
_REQUESTS_EVERY_S = 1.0
_STORED_EVERY_S = 60.0


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
            parts.services.sessions.run(),
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
