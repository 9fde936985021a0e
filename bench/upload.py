"""How fast a push is, against a bare gRPC byte stream in the same run; what a second push and a cut cost.

Ours holds everything that a push does between the local checks and the server's validation: the announcement, 1 MiB
pieces through protobuf, sha256 and fsync on the server; a second figure adds the client's own sha256. The bare stream
throws its bytes away; beside it stands one that hashes, writes and syncs them, as no push can do less. On a machine
that is busy with other things the processor time tells more than the clock.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil
from tests.support.daemon_process import DaemonProcess
from tests.tcp_proxy import Fault, TcpProxy

from horizon_client import AsyncClient, Progress, Reporter
from horizon_client import upload as blob_upload

MIB = 2**20
CHUNK_BYTES = MIB
_PATH = "/bench.Bare/Take"


async def sink(keep: bool) -> None:
    """Serve the bare stream: count bytes and forget them; or hash, write and sync them, which is the least that a push
    has to do."""

    async def take(requests: AsyncIterator[bytes], _context: Any) -> bytes:
        loop = asyncio.get_running_loop()
        total = 0
        with tempfile.TemporaryFile() as file:
            digest = hashlib.sha256()

            def store(data: bytes) -> None:
                file.write(data)
                digest.update(data)

            writing: asyncio.Future[None] | None = None
            async for data in requests:
                total += len(data)
                if keep:
                    if writing is not None:
                        await writing
                    writing = loop.run_in_executor(None, store, data)
            if writing is not None:
                await writing
                file.flush()
                await loop.run_in_executor(None, os.fsync, file.fileno())
        return str(total).encode()

    server = grpc.aio.server(options=[("grpc.max_receive_message_length", 4 * MIB)])
    handler = grpc.stream_unary_rpc_method_handler(take)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Bare", {"Take": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


@dataclass(frozen=True)
class Spent:
    """Seconds on the wall, and of processors: of this process and of the server."""

    wall_s: float
    cpu_s: float

    def __sub__(self, earlier: Spent) -> Spent:
        return Spent(self.wall_s - earlier.wall_s, self.cpu_s - earlier.cpu_s)


class Meter:
    """Reads what was spent since its making by this process and one server."""

    def __init__(self, server_pid: int) -> None:
        self._processes = [psutil.Process(), psutil.Process(server_pid)]

    def read(self) -> Spent:
        """Return what was spent so far."""
        times = [process.cpu_times() for process in self._processes]
        return Spent(time.perf_counter(), sum(one.user + one.system for one in times))


@dataclass(frozen=True)
class Sink:
    """A bare server that runs."""

    address: str
    pid: int


@contextmanager
def running_sink(kind: str) -> Iterator[Sink]:
    """A bare server in a process of its own."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.upload", "--sink", kind],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield Sink(f"127.0.0.1:{int(process.stdout.readline())}", process.pid)
    finally:
        process.kill()
        process.wait()


async def send_bare(sink: Sink, content: bytes) -> Spent:
    """Send `content` in one bare stream."""
    options = [("grpc.max_send_message_length", 4 * MIB)]
    meter = Meter(sink.pid)
    channel: Any
    async with grpc.aio.insecure_channel(sink.address, options=options) as channel:
        before = meter.read()
        call = channel.stream_unary(_PATH)()
        for start in range(0, len(content), CHUNK_BYTES):
            await call.write(content[start : start + CHUNK_BYTES])
        await call.done_writing()
        assert int(await call) == len(content)
        return meter.read() - before


class Phases(Reporter):
    """What was spent when each phase of a push ended; the upload ends where `finalize` is reported, once, when it
    begins."""

    def __init__(self, server_pid: int) -> None:
        self._meter = Meter(server_pid)
        self._ended: dict[str, Spent] = {}

    def progress(self, progress: Progress) -> None:
        """Take a report."""
        if progress.phase != "upload":
            self._ended[progress.phase] = self._meter.read()

    @property
    def upload(self) -> Spent:
        """From the last local byte hashed to the last byte durable on the server."""
        return self._ended["finalize"] - self._ended["hash"]

    @property
    def with_hash(self) -> Spent:
        """The same with the client's own sha256."""
        return self._ended["finalize"] - self._ended["check"]


def text_of(num_bytes: int, salt: int) -> bytes:
    """Lines of text, other ones for another salt."""
    line = f"{salt:08d} ".encode() + b"one line of a corpus that is as long as lines of text use to be, more or less\n"
    return (line * (num_bytes // len(line) + 1))[: num_bytes - 1] + b"\n"


def received_bytes(http: str) -> float:
    """Data bytes that the daemon has received, by its own metric."""
    with urllib.request.urlopen(f"http://{http}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return sum(float(value) for value in re.findall(r"^horizon_upload_bytes_total\{.*\} (\S+)$", text, re.MULTILINE))


async def against_bare(client: AsyncClient, pid: int, folder: Path, num_bytes: int, rounds: int) -> None:
    """One file, one stream, turn by turn with the bare ones."""
    titles = {
        "bare": f"bare gRPC stream, {num_bytes // MIB} MiB in 1 MiB pieces",
        "kept": "the same, hashed, written and synced",
        "upload": "push: upload",
        "with_hash": "push: local sha256 and upload",
    }
    spent: dict[str, list[Spent]] = {name: [] for name in titles}
    path = folder / "corpus.txt"
    with running_sink("forget") as bare, running_sink("keep") as kept:
        for number in range(rounds + 1):
            content = text_of(num_bytes, number)
            path.write_bytes(content)
            os.sync()  # what is written here must not wait for the disk behind what was written before
            phases = Phases(pid)
            took = {"bare": await send_bare(bare, content), "kept": await send_bare(kept, content)}
            await client.datasets.push([path], name=f"corpus-{number}", reporter=phases)
            for name, one in (took | {"upload": phases.upload, "with_hash": phases.with_hash}).items():
                spent[name] += [one] if number else []  # the first round warms up
    for name, title in titles.items():
        ratios = sorted(one.wall_s / other.wall_s for one, other in zip(spent["bare"], spent[name], strict=True))
        rate = num_bytes / MIB / statistics.median(one.wall_s for one in spent[name])
        cpu_ms = 1e3 * statistics.median(one.cpu_s for one in spent[name]) * MIB / num_bytes
        print(
            f"| {title} | {rate:.0f} MiB/s, {cpu_ms:.1f} ms of processors a MiB | "
            f"{statistics.median(ratios):.2f} x bare ({ratios[0]:.2f} to {ratios[-1]:.2f}) |"
        )


async def again(client: AsyncClient, http: str, folder: Path) -> None:
    """The last file under another name."""
    before = received_bytes(http)
    started_s = time.perf_counter()
    result = await client.datasets.push([folder / "corpus.txt"], name="again")
    took_s = time.perf_counter() - started_s
    print(
        f"| second push of the same file | {took_s:.2f} s | {result.sent_bytes} data bytes sent, "
        f"{received_bytes(http) - before:.0f} received |"
    )


async def cut(server: str, token: str, folder: Path, num_bytes: int) -> None:
    """A push that is cut in the middle, counted on the wire."""
    path = folder / "cut.txt"
    path.write_bytes(text_of(num_bytes, 99))
    faults = iter([Fault(after_bytes=num_bytes // 2 + 123_456)])
    async with TcpProxy(server, faults) as proxy, AsyncClient(proxy.address, token=token) as client:
        await client.datasets.push([path], name="cut")
        assert proxy.num_faults == 1
        twice = proxy.up_bytes - num_bytes
    print(f"| cut in the middle | | {twice / blob_upload.CHUNK_BYTES:.2f} pieces travelled twice, framing included |")


async def several(client: AsyncClient, pid: int, folder: Path, *, num_files: int, num_bytes: int, rounds: int) -> None:
    """Many files, with one stream and with several."""
    times: dict[int, list[float]] = {1: [], blob_upload.STREAMS_AT_ONCE: []}
    for number in range(rounds):
        for streams, seconds in times.items():
            paths = [folder / f"shard-{i}.txt" for i in range(num_files)]
            for i, path in enumerate(paths):
                path.write_bytes(text_of(num_bytes, 1000 * (number * 100 + streams) + i))
            os.sync()
            blob_upload.STREAMS_AT_ONCE = streams
            phases = Phases(pid)
            await client.datasets.push(paths, name=f"shards-{num_files}-{number}-{streams}", reporter=phases)
            seconds.append(phases.upload.wall_s)
    one, many = (statistics.median(seconds) for seconds in times.values())
    print(
        f"| {num_files} files of {num_bytes / MIB:g} MiB | {num_files * num_bytes / MIB / many:.0f} MiB/s, "
        f"{num_files / many:.0f} files/s | {one / many:.2f} x one stream |"
    )


async def measure(daemon: DaemonProcess, folder: Path, num_bytes: int, rounds: int) -> None:
    """Print a line per figure."""
    assert daemon.process is not None
    token, server, pid = daemon.user("you"), daemon.endpoints["grpc"], daemon.process.pid
    print("| what | rate | against |\n| --- | --- | --- |")
    async with AsyncClient(server, token=token) as client:
        await against_bare(client, pid, folder, num_bytes, rounds)
        await again(client, daemon.endpoints["http"], folder)
        await cut(server, token, folder, 32 * MIB)
        await several(client, pid, folder, num_files=8, num_bytes=16 * MIB, rounds=rounds)
        await several(client, pid, folder, num_files=200, num_bytes=32 * 1024, rounds=rounds)


def main() -> None:
    """Measure, or serve the bare stream."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.upload", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sink", choices=["forget", "keep"], help="serve a bare stream; used by the bench itself")
    parser.add_argument("--mib", type=int, default=256, help="size of the file")
    parser.add_argument("--rounds", type=int, default=5)
    flags = parser.parse_args()
    if flags.sink:
        asyncio.run(sink(keep=flags.sink == "keep"))
        return
    with tempfile.TemporaryDirectory() as name:
        daemon = DaemonProcess(Path(name) / "state").start()
        try:
            asyncio.run(measure(daemon, Path(name), flags.mib * MIB, flags.rounds))
        finally:
            daemon.close()


if __name__ == "__main__":
    main()
