"""The clients of `bench.service_load`, in a process of their own: pollers and watchers over gRPC, which report what
they saw.

Reads a line of JSON for each window from stdin: how many watchers and pollers, for how long, or how much processor time
to burn instead. Answers with a line of JSON on stdout. Takes the answers as bytes and reads of them only what it
reports, to cost little itself.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc.aio

from horizon_proto.v1 import job_pb2, node_pb2

PERIOD_S = 2.0
_CALL_TIMEOUT_S = 60.0
_WARM_UP_S = 1.0


def cpu_s(pid: int | str = "self") -> float:
    """Return the processor seconds that a process has used."""
    user, system = Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


class Clients:
    """Callers with a token each in turn, all on a few connections."""

    def __init__(self, channels: list[grpc.aio.Channel], tokens: list[str], job_id: str) -> None:
        self._channels, self._tokens, self._job_id = channels, tokens, job_id
        self.latencies_s: dict[str, list[float]] = defaultdict(list)
        self.delays_s: list[float] = []
        self.failures: list[str] = []
        self.counting = False

    def _call(self, number: int, method: str, *, stream: bool = False) -> Callable[..., Any]:
        channel, token = self._channels[number % len(self._channels)], self._tokens[number % len(self._tokens)]
        make = channel.unary_stream if stream else channel.unary_unary
        call = make(
            f"/horizon_proto.v1.{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=None,
        )
        return lambda request, **more: call(request, metadata=(("authorization", f"Bearer {token}"),), **more)

    async def poll(self, number: int) -> None:
        """Make the three calls of a page of status, every two seconds from a moment of this client's own."""
        calls = {
            "ListJobs": (self._call(number, "JobService/ListJobs"), job_pb2.ListJobsRequest(page_size=100)),
            "GetJob": (self._call(number, "JobService/GetJob"), job_pb2.GetJobRequest(job_id=self._job_id)),
            "GetNode": (self._call(number, "NodeService/GetNode"), node_pb2.GetNodeRequest()),
        }
        due_s = time.perf_counter() + PERIOD_S * (number * 0.618 % 1)
        for round_number in itertools.count():
            await asyncio.sleep(due_s + PERIOD_S * round_number - time.perf_counter())
            for name, (call, request) in calls.items():
                started_s = time.perf_counter()
                try:
                    await call(request, timeout=_CALL_TIMEOUT_S)
                except grpc.aio.AioRpcError as error:
                    self.failures.append(f"{name}: {error.code().name} {error.details()}")
                if self.counting:
                    self.latencies_s[name].append(time.perf_counter() - started_s)

    async def watch(self, number: int, after: int) -> None:
        """Follow the job from an event on."""
        request = job_pb2.WatchJobRequest(job_id=self._job_id, after_sequence=after)
        async for data in self._call(number, "JobService/WatchJob", stream=True)(request):
            if self.counting:
                time_ns = job_pb2.WatchJobResponse.FromString(data).event.time.ToNanoseconds()
                self.delays_s.append(time.time() - time_ns / 1e9)

    @asynccontextmanager
    async def busy(self, *, watchers: int, pollers: int) -> AsyncIterator[None]:
        """Have that many clients for the block."""
        request = job_pb2.GetJobRequest(job_id=self._job_id)
        now = job_pb2.GetJobResponse.FromString(await self._call(0, "JobService/GetJob")(request))
        running = [self.watch(number, now.job.last_sequence) for number in range(watchers)]
        running += [self.poll(number) for number in range(pollers)]
        tasks = [asyncio.create_task(one) for one in running]
        try:
            yield
        finally:
            self.failures += [repr(task.exception()) for task in tasks if task.done() and task.exception()]
            for task in tasks:
                task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(*tasks, return_exceptions=True)


async def _burn(share: float, seconds: float) -> None:
    """Use that share of a processor in small pieces, as clients do."""
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        piece_s = time.thread_time() + 0.002 * min(share, 1.0)
        while time.thread_time() < piece_s:
            pass
        await asyncio.sleep(0.002 * max(0.0, 1.0 - share))


async def _serve(address: str, tokens: list[str], job_id: str) -> None:
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(address, options=options) for _ in range(10)]
    for line in iter(sys.stdin.readline, ""):
        window = json.loads(line)
        clients = Clients(channels, tokens, job_id)
        async with clients.busy(watchers=window["watchers"], pollers=window["pollers"]):
            await asyncio.sleep(_WARM_UP_S)
            began_s, began_cpu_s, clients.counting = time.time(), cpu_s(), True
            print(json.dumps({"began_s": began_s}), flush=True)
            if window["burn_share"]:
                await _burn(window["burn_share"], window["seconds"])
            else:
                await asyncio.sleep(window["seconds"])
            clients.counting = False
            ended_s, used_s = time.time(), cpu_s() - began_cpu_s
            report = {
                "ended_s": ended_s,
                "cpu_s": used_s,
                "latencies_s": clients.latencies_s,
                "delays_s": clients.delays_s,
                "failures": clients.failures,
            }
            # Before the streams are cut: the daemon's work for that belongs to no window.
            print(json.dumps(report), flush=True)
    await asyncio.gather(*(channel.close(None) for channel in channels))


if __name__ == "__main__":
    given = json.loads(sys.stdin.readline())
    os.nice(given["nice"])
    asyncio.run(_serve(given["address"], given["tokens"], given["job_id"]))
