"""Hours of a daemon's life in one: jobs come and go, data is pushed and deleted, uploads and watches are cut. What it
uses must stay flat.

Prints a line for each round and the growth of memory, descriptors, threads, processes and disk over the run, fitted by
a line that one outlier cannot bend; ends with 1 where one of them grew by more than is allowed.

python -m bench.soak                  # two hours
python -m bench.soak --seconds 300    # as in CI
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
from tests.support.node import Node, node_of, quick_spec
from tests.support.pushed_state import PushedState

from horizon_client import Client
from horizon_client.errors import HorizonClientError
from horizon_proto.v1 import blob_pb2, blob_pb2_grpc

MIB = 2**20
# Until caches are full and every kind of call was made once: this part of the rounds does not count.
_WARM_UP = 0.3
_PAUSE_S = 0.5
_NUM_LOOKS = 10
_LOOK_PAUSE_S = 0.1
# No other thread looks at one that is older.
_KEPT_JOBS = 2
_JOB_S = 120.0
_CONNECT_S = 30.0
# What is measured, in which unit, and the growth over the measured part that is allowed: a fixed part, and one for each
# job. In memory the daemon keeps the records of 1,000 jobs; on disk a deleted job leaves its request and lines of the
# audit log.
ALLOWED: dict[str, tuple[float, float]] = {
    "rss_mib": (16.0, 0.03),
    "descriptors": (4.0, 0.0),
    "threads": (4.0, 0.0),
    "children": (1.0, 0.0),
    "disk_mib": (4.0, 0.05),
}


@dataclass(frozen=True)
class Sample:
    """What the daemon used at the end of a round."""

    at_s: float
    num_jobs: int
    figures: dict[str, float]


@dataclass
class Soak:
    """One run: what was sampled, how much was done, and what went wrong."""

    node: Node
    samples: list[Sample] = field(default_factory=list)
    done: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("jobs", "pushes", "watches", "polls", "cut uploads"), 0)
    )
    problems: list[str] = field(default_factory=list)
    _ended: deque[str] = field(default_factory=deque)
    _over: threading.Event = field(default_factory=threading.Event)

    def run(self, seconds: float, report: Callable[[Sample], None] = lambda sample: None) -> None:
        """Go on for that long, and to the end of the last round."""
        started_s = time.monotonic()
        around = [self._poll, self._watch, self._watch_by_http, self._push_and_delete]
        threads = [threading.Thread(target=self._repeated, args=(work,), name=work.__name__) for work in around]
        for thread in threads:
            thread.start()
        try:
            with self.node.client() as client:
                for number in itertools.count():
                    self._job(client, number)
                    if number >= _KEPT_JOBS:
                        self.samples.append(self._sample(time.monotonic() - started_s))
                        report(self.samples[-1])
                    if time.monotonic() - started_s > seconds and len(self.samples) >= 6:
                        break
        finally:
            self._over.set()
            for thread in threads:
                thread.join(_JOB_S)
        self.problems += [f"{thread.name} still runs" for thread in threads if thread.is_alive()]

    def _repeated(self, work: Callable[[Client, int], None]) -> None:
        with self.node.client() as client:
            for number in itertools.count():
                try:
                    work(client, number)
                except (HorizonClientError, httpx.HTTPError) as error:
                    self.problems.append(f"{work.__name__}: {error!r}")
                if self._over.wait(_PAUSE_S):
                    return

    def _job(self, client: Client, number: int) -> None:
        """Train a job to its end, or cancel it on the way; delete the one of some rounds before."""
        is_cancelled = number % 3 == 1
        spec = quick_spec(f"soak-{number % 10}", max_steps=1000 if is_cancelled else 2)
        job = client.jobs.submit(spec)
        for event in client.jobs.watch(job.job_id):
            if is_cancelled and event.kind == "step":
                client.jobs.cancel(job.job_id)
                is_cancelled = False
        ended = client.jobs.wait(job.job_id, timeout_s=_JOB_S)
        if ended.state not in ("SUCCEEDED", "CANCELLED"):
            self.problems.append(f"{job.job_id} ended {ended.state}: {ended.message}")
        for checkpoint in client.checkpoints.list(job.job_id):
            client.checkpoints.delete(job.job_id, checkpoint.step)
        self._ended.append(job.job_id)
        if len(self._ended) > _KEPT_JOBS:
            self.problems += [
                f"{done.key} is not deleted: {done.refusal}"
                for done in client.housekeeping.delete("job", [self._ended.popleft()])
                if done.refusal
            ]
        self.done["jobs"] += 1

    def _poll(self, client: Client, _number: int) -> None:
        jobs = client.jobs.list(limit=20)
        client.node.status()
        client.jobs.queue()
        if jobs:
            client.jobs.get(jobs[0].job_id)
            with self._http() as http:
                for path in ("jobs?page_size=20", f"jobs/{jobs[0].job_id}/metrics", "node", "queue"):
                    http.get(f"/horizon/v1/{path}").raise_for_status()
        self.done["polls"] += 1

    def _watch(self, client: Client, number: int) -> None:
        """Follow the newest job for a few events, then leave."""
        if jobs := client.jobs.list(limit=1):
            events = client.jobs.watch(jobs[0].job_id)
            with contextlib.closing(events):  # type: ignore[type-var]  # a generator
                for _ in itertools.islice(events, number % 7):
                    pass
            self.done["watches"] += 1

    def _watch_by_http(self, client: Client, number: int) -> None:
        if jobs := client.jobs.list(limit=1):
            url = f"/horizon/v1/jobs/{jobs[0].job_id}/events"
            with self._http() as http, http.stream("GET", url) as answer:
                for _ in itertools.islice(answer.iter_lines(), number % 20):
                    pass
            self.done["watches"] += 1

    def _push_and_delete(self, client: Client, number: int) -> None:
        """Push a new dataset and delete it; every other time leave an upload half done."""
        rows = [
            {"messages": [{"role": "user", "content": f"{number} {i}"}, {"role": "assistant", "content": "yes"}]}
            for i in range(200)
        ]
        path = self.node.daemon.state_dir.parent / "pushed.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), "ascii")
        client.datasets.push([path], name="pushed")
        client.datasets.delete("pushed")
        self.done["pushes"] += 1
        if number % 2:
            self._cut_an_upload()
            self.done["cut uploads"] += 1

    def _cut_an_upload(self) -> None:
        content = bytes(range(256)) * 4096
        ref = blob_pb2.BlobRef(sha256=hashlib.sha256(content).hexdigest(), size_bytes=len(content))

        def chunks() -> Iterator[blob_pb2.WriteBlobRequest]:
            yield blob_pb2.WriteBlobRequest(chunk=blob_pb2.BlobChunk(blob=ref, data=content[: len(content) // 2]))
            sent.set()
            self._over.wait(_PAUSE_S)

        sent = threading.Event()
        with grpc.insecure_channel(self.node.daemon.endpoints["grpc"]) as channel:
            metadata = (("authorization", f"Bearer {self.node.token}"),)
            call = blob_pb2_grpc.BlobServiceStub(channel).WriteBlob.future(
                chunks(), metadata=metadata, timeout=_CONNECT_S
            )
            sent.wait(_CONNECT_S)
            call.cancel()  # type: ignore[no-untyped-call]

    def _http(self, timeout: float = _CONNECT_S) -> httpx.Client:
        headers = {"authorization": f"Bearer {self.node.token}"}
        return httpx.Client(base_url=f"http://{self.node.daemon.endpoints['http']}", headers=headers, timeout=timeout)

    def _sample(self, at_s: float) -> Sample:
        """The least of some looks: what a call or a child has open for a moment is gone in one of them, and what leaks
        is in all."""
        daemon = psutil.Process(self.node.daemon.pid)
        looks = []
        for _ in range(_NUM_LOOKS):
            looks.append(
                {
                    "rss_mib": daemon.memory_info().rss / MIB,
                    "descriptors": _num_descriptors(daemon),
                    "threads": daemon.num_threads(),
                    "children": len(daemon.children(recursive=True)),
                    "disk_mib": _disk_bytes(self.node.daemon.state_dir) / MIB,
                }
            )
            time.sleep(_LOOK_PAUSE_S)
        return Sample(at_s, self.done["jobs"], {name: min(look[name] for look in looks) for name in looks[0]})


def _num_descriptors(process: psutil.Process) -> int:
    """Return how many it has open, without those of its pool of database connections, which fills up to its bound over
    hours."""
    count = 0
    for entry in Path(f"/proc/{process.pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            count += "horizon.db" not in entry.readlink().name
    return count


def _disk_bytes(folder: Path) -> int:
    """Return the bytes of all files; those that go away meanwhile do not count."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += (Path(root) / name).stat().st_blocks * 512
    return total


def growth(times_s: Sequence[float], values: Sequence[float]) -> float:
    """Return the growth from the first to the last time by the median of the slopes between all pairs (Theil and
    Sen)."""
    pairs = itertools.combinations(zip(times_s, values, strict=True), 2)
    slopes = [(last - first) / (end_s - start_s) for (start_s, first), (end_s, last) in pairs if end_s > start_s]
    return statistics.median(slopes) * (times_s[-1] - times_s[0])


def judge(samples: Sequence[Sample]) -> dict[str, tuple[float, float]]:
    """Return, for each figure, how much it grew after the warm-up, and how much it may."""
    counted = samples[int(len(samples) * _WARM_UP) :]
    num_jobs = counted[-1].num_jobs - counted[0].num_jobs
    times_s = [sample.at_s for sample in counted]
    return {
        name: (growth(times_s, [sample.figures[name] for sample in counted]), fixed + per_job * num_jobs)
        for name, (fixed, per_job) in ALLOWED.items()
    }


def main() -> int:
    """Run, print, and judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=7200.0, help="how long (default: %(default)s)")
    options = parser.parse_args()

    def show(sample: Sample) -> None:
        figures = ", ".join(f"{name} {value:.1f}" for name, value in sample.figures.items())
        print(f"{sample.at_s:6.0f} s, {sample.num_jobs} jobs: {figures}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        pushed = PushedState.shared(Path(folder) / "pushed")
        daemon = pushed.daemon(Path(folder) / "state", "--log-level", "warning")
        try:
            soak = Soak(node_of(daemon, pushed))
            soak.run(options.seconds, show)
        finally:
            daemon.close()
    did: dict[str, Any] = {"seconds": round(soak.samples[-1].at_s), **soak.done}
    print(", ".join(f"{name} {value}" for name, value in did.items()) + "\n")
    print("| figure | first | last | growth | allowed |\n| --- | --- | --- | --- | --- |")
    judged = judge(soak.samples)
    for name, (grew, allowed) in judged.items():
        first, last = soak.samples[0].figures[name], soak.samples[-1].figures[name]
        print(f"| {name} | {first:.1f} | {last:.1f} | {grew:+.2f} | {allowed:.2f} |")
    for problem in soak.problems:
        print(f"\nproblem: {problem}")
    return int(bool(soak.problems) or any(grew > allowed for grew, allowed in judged.values()))


if __name__ == "__main__":
    sys.exit(main())
