"""`horizond node serve`: gives this machine's memory and devices to the ranks of jobs of another node's daemon.

It holds the planes, so that a job continues in them after its ranks were killed, and starts the ranks; of a model it
has the shapes, of data nothing. It works for one job at a time, and is free again when that job's daemon says so, or
when the job has had no rank for `ABANDONED_S`.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from horizon_server.children.child import log_tail
from horizon_server.children.entry import Answer, Failure, Line, encode_line
from horizon_server.codec import from_plain, to_plain
from horizon_server.errors import DoesNotFit, HorizonError, InUse, WorkerFailed
from horizon_server.network import Address, bound_socket, interface_of
from horizon_server.nodes.key import server_context
from horizon_server.nodes.processes import RANK_MODULE, RankProcesses
from horizon_server.nodes.protocol import (
    CALL_S,
    HEARTBEAT_S,
    LOG_FOLLOWS,
    LOST_S,
    NodeCall,
    NodeReport,
    RankOrder,
    Reservation,
    decode_call,
    end_connection,
    receive_line,
)
from horizon_server.planning.machine import Accelerator, HostMemory, gpu_uuids, worker_environment
from horizon_server.settings import Settings
from horizon_server.store.model_files import CONFIG_FILE
from horizon_server.store.planes import create_memory_file
from horizon_server.store.safetensors_files import write_outline
from horizon_server.texts import size_text

ABANDONED_S = 900.0
"""A job without a rank for longer is forgotten: its daemon has ended without a word."""

# Between two looks at ranks.
_POLL_S = 0.2
# Connections that are served at the same time: ranks of one job, and questions of a few daemons.
_MAX_CONNECTIONS = 64
# How long a caller may take to show that it has the key.
_HANDSHAKE_S = 5.0
# The kernel's out-of-memory killer chooses a rank before this process, which holds the job's memory.
_RANK_OOM_SCORE = 500

log = structlog.get_logger(__name__)


@dataclass(kw_only=True, eq=False)
class _Lease:
    """The memory of the job that this node is reserved for."""

    reservation: Reservation
    planes: dict[str, int]
    ranks: RankProcesses | None = None
    used_s: float = field(default_factory=time.monotonic)

    def close(self) -> None:
        if self.ranks is not None:
            self.ranks.kill()
        for descriptor in self.planes.values():
            os.close(descriptor)


class NodeAgent:
    """Thread: `serve` belongs to one; each connection has one of its own."""

    def __init__(
        self,
        settings: Settings,
        *,
        folder: Path,
        memory: Callable[[], HostMemory],
        num_threads: int,
        gpus: Sequence[Accelerator] = (),
        environment: Mapping[str, str],
        module: str = RANK_MODULE,
    ) -> None:
        """`folder` is for what ranks are asked for, and their logs; `environment` is what they start with."""
        assert settings.fleet_address and settings.fleet_key_file, "the caller has checked them"
        self._settings, self._folder, self._memory = settings, folder, memory
        self._num_threads, self._gpus, self._module = num_threads, tuple(gpus), module
        interface = interface_of(settings.fleet_address)
        self._environment = {**environment, "GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
        self._lease: _Lease | None = None
        self._lock = threading.RLock()
        self._context = server_context(settings.fleet_key_file)
        self._listener = bound_socket(
            "fleet_address",
            Address(host=settings.fleet_address, port=settings.fleet_port),
            remedy="set another fleet_address or fleet_port",
        )
        self._listener.listen(_MAX_CONNECTIONS)
        host, port = self._listener.getsockname()[:2]
        self.address = str(Address(host=host, port=port))
        """HOST:PORT where it listens."""
        self._is_closing = False
        self._connections: set[socket.socket] = set()

    def serve(self) -> None:
        """Answer calls until `close`."""
        threading.Thread(target=self._forget_abandoned, name="abandoned jobs", daemon=True).start()
        with ThreadPoolExecutor(max_workers=_MAX_CONNECTIONS, thread_name_prefix="node") as pool:
            while not self._is_closing:
                try:
                    connection, caller = self._listener.accept()
                except OSError:
                    return
                pool.submit(self._serve, connection, str(caller[0]))

    def close(self) -> None:
        """End the ranks, give the memory back, and take no more calls."""
        self._is_closing = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            self._end_lease()
            for connection in self._connections:
                end_connection(connection)

    def _serve(self, plain: socket.socket, caller: str) -> None:
        try:
            plain.settimeout(_HANDSHAKE_S)
            # Where the caller's machine is gone, what is sent to it must fail soon.
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * LOST_S))
            with self._context.wrap_socket(plain, server_side=True) as connection, self._open(connection):
                try:
                    call = decode_call(receive_line(connection, timeout_s=CALL_S))
                    end: Line = Answer(self._answer(call, connection))
                except HorizonError as error:
                    log.warning("a call was refused", caller=caller, why=error.message)
                    end = Failure(error)
                connection.sendall(encode_line(end))
        except (OSError, ssl.SSLError) as error:
            log.info("a connection ended", caller=caller, why=str(error))
        except Exception:  # a defect in one call must not end the node
            log.exception("a call failed", caller=caller)
        finally:
            plain.close()

    @contextlib.contextmanager
    def _open(self, connection: socket.socket) -> Iterator[None]:
        """Have `close` end a connection within the block."""
        with self._lock:
            self._connections.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._connections.discard(connection)

    def _answer(self, call: NodeCall, connection: socket.socket) -> Any:
        body = call.body
        match call.name:
            case "report":
                return to_plain(self.report())
            case "reserve":
                self._reserve(_read(Reservation, body))
            case "release":
                self._release(str(body.get("job_id")))
            case "run":
                return self._run(_read(RankOrder, body), connection)
        return {}

    def report(self) -> NodeReport:
        """What this node has."""
        memory, lease = self._memory(), self._lease
        limit = min(memory.limit_bytes, self._settings.host_memory_limit_bytes or memory.limit_bytes)
        host_bytes = max(0, limit - self._settings.host_memory_reserve_bytes)
        free_bytes = min(host_bytes, max(0, memory.available_bytes - self._settings.host_memory_reserve_bytes))
        return NodeReport(
            hostname=socket.gethostname(),
            host_bytes=host_bytes,
            free_bytes=free_bytes,
            num_threads=self._num_threads,
            host_devices=self._settings.host_devices,
            gpus=tuple(gpu.name for gpu in self._gpus),
            job_id="" if lease is None else lease.reservation.job_id,
            owner="" if lease is None else lease.reservation.owner,
        )

    def _reserve(self, asked: Reservation) -> None:
        with self._lock:
            lease = self._lease
            if lease is not None and lease.reservation.job_id == asked.job_id:
                if lease.reservation == asked:
                    lease.used_s = time.monotonic()
                    return
                self._end_lease()
            elif lease is not None:
                raise InUse(f"it works for job {lease.reservation.job_id}")
            self._check(asked)
            planes: dict[str, int] = {}
            try:
                for plane, size_bytes in asked.plane_bytes.items():
                    planes[plane] = create_memory_file(plane, size_bytes)
            except OSError as error:
                for descriptor in planes.values():
                    os.close(descriptor)
                raise DoesNotFit(f"its kernel gave no memory files: {error.strerror}") from error
            self._lease = _Lease(reservation=asked, planes=planes)
            log.info("reserved", job_id=asked.job_id, host_bytes=asked.host_bytes, num_ranks=asked.num_ranks)

    def _check(self, asked: Reservation) -> None:
        report = self.report()
        if asked.host_bytes > report.free_bytes:
            need, free = size_text(asked.host_bytes), size_text(report.free_bytes)
            raise DoesNotFit(f"{need} of host memory are needed there and {free} are free")
        if asked.device_kind == "host":
            num_devices, what = report.host_devices, "host_devices is"
        else:
            num_devices = sum(name == asked.gpu_name for name in report.gpus)
            what = f"of its GPUs that are {asked.gpu_name} there are"
        if asked.num_ranks > num_devices:
            raise DoesNotFit(f"{asked.num_ranks} devices are needed there, and {what} {num_devices}")

    def _release(self, job_id: str) -> None:
        with self._lock:
            if self._lease is not None and self._lease.reservation.job_id == job_id:
                self._end_lease()

    def _end_lease(self) -> None:
        if self._lease is not None:
            self._lease.close()
            log.info("free again", job_id=self._lease.reservation.job_id)
            self._lease = None
            shutil.rmtree(self._folder, ignore_errors=True)

    def _forget_abandoned(self) -> None:
        while not self._is_closing:
            time.sleep(min(30.0, ABANDONED_S / 3))
            with self._lock:
                lease = self._lease
                if lease is not None and lease.ranks is None and time.monotonic() - lease.used_s > ABANDONED_S:
                    log.warning("the job was abandoned", job_id=lease.reservation.job_id)
                    self._end_lease()

    def _run(self, order: RankOrder, connection: socket.socket) -> None:
        """Run ranks until one ends, or the connection does. Raises how one has failed."""
        failures: list[Failure] = []
        with self._lock:
            lease = self._lease
            if lease is None or lease.reservation.job_id != order.job_id:
                raise WorkerFailed(f"the node is not reserved for job {order.job_id}")
            if lease.ranks is not None:
                # Of a worker that was killed a moment ago.
                lease.ranks.kill()
            request_file, log_file = self._written(order, lease)
            with log_file.open("wb") as stream:
                ranks = lease.ranks = RankProcesses(
                    range(order.first_rank, order.first_rank + order.num_ranks),
                    request_file,
                    meeting=("--meeting-at", order.meeting),
                    planes=lease.planes,
                    on_end=lambda _, end: failures.append(end) if isinstance(end, Failure) else None,
                    environment=self._environment_of(lease),
                    log=stream,
                    module=self._module,
                )
        for pid in ranks.pids:
            with contextlib.suppress(OSError):  # one that has ended already
                Path(f"/proc/{pid}/oom_score_adj").write_text(str(_RANK_OOM_SCORE), "ascii")
        log.info("ranks started", job_id=order.job_id, pids=list(ranks.pids))
        try:
            self._watch(ranks, failures, connection)
        finally:
            ranks.kill()
            with self._lock:
                lease.used_s = time.monotonic()
                if lease.ranks is ranks:
                    lease.ranks = None
        if failures:
            log.error("a rank has ended", job_id=order.job_id, why=failures[0].error.message)
            tail = log_tail(log_file)
            error = failures[0].error
            raise type(error)(f"{error.message}{LOG_FOLLOWS}{tail}" if tail else error.message)

    def _watch(self, ranks: RankProcesses, failures: Sequence[Failure], connection: socket.socket) -> None:
        """Say every second that all is well, until a rank has failed, all have ended, or the caller has."""
        caller = select.poll()
        caller.register(connection, select.POLLIN)
        beat_s = time.monotonic()
        # All in one thread: a TLS connection is not for two at once.
        while ranks.are_alive and not failures:
            # The caller says nothing more: whatever comes is the connection's end.
            if caller.poll(1000 * _POLL_S):
                return
            if time.monotonic() >= beat_s:
                beat_s += HEARTBEAT_S
                connection.sendall(b"\n")
        if not failures:
            # What has ended is heard of a moment later.
            time.sleep(_POLL_S)

    def _written(self, order: RankOrder, lease: _Lease) -> tuple[Path, Path]:
        """The request of the ranks and what else they read, in files; and the file of their log."""
        shutil.rmtree(self._folder, ignore_errors=True)
        model = self._folder / "model"
        model.mkdir(parents=True)
        (model / CONFIG_FILE).write_text(order.config, "utf-8")
        write_outline(model / "model.safetensors", order.tensors)
        request = {**order.request, "planes": lease.planes, "model": str(model)}
        if lease.reservation.device_kind == "cuda":
            request["plan"]["execution"]["gpu"] = gpu_uuids(self._gpus_of(lease))
        request_file = self._folder / "request.json"
        request_file.write_text(json.dumps(request), "ascii")
        return request_file, self._folder / "ranks.log"

    def _gpus_of(self, lease: _Lease) -> Sequence[Accelerator]:
        equal = [gpu for gpu in self._gpus if gpu.name == lease.reservation.gpu_name]
        return equal[: lease.reservation.num_ranks]

    def _environment_of(self, lease: _Lease) -> dict[str, str]:
        kind = lease.reservation.device_kind
        return worker_environment(self._environment, kind, self._gpus_of(lease) if kind == "cuda" else ())


def _read(kind: type[Any], body: Mapping[str, Any]) -> Any:
    try:
        return from_plain(kind, body)
    except ValueError as error:
        raise WorkerFailed(f"the calling node asked for something that this one does not know: {error}") from error
