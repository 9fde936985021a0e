"""What polling clients and watchers (50 and 50) cost: time of their calls, delay of events, processor time of the
daemon, training speed.

One daemon with 1,000 ended jobs (--jobs) in its database trains a small model on every processor. Windows without
clients, with watchers, with pollers and with both follow each other several times, so that all ratios are from one run.
The clients run on the same machine, at a lower priority, which real ones do not: a further kind of window burns as much
processor time as they took, and the daemon's own part is what training loses beyond that.

python -m bench.service_load                # about ten minutes
python -m bench.service_load --quick        # about three
python -m bench.service_load --quick --watchers 1 --pollers 100 --jobs 10000
"""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from tests.support.daemon_process import DaemonProcess, wait_for_step

from bench.service_clients import cpu_s
from horizon_client.job_spec_types import JobSpec, TrainSpec
from horizon_server.demo.recipe import write_demo_dataset, write_demo_model

WATCHERS, POLLERS, JOBS, USERS = 50, 50, 1000, 10
_BURN = "burned instead"
_EVENTS_OF_A_COPY = 10


@dataclass
class Window:
    """What was measured while one kind of load lasted."""

    began_s: float
    ended_s: float
    daemon_cpu_s: float
    client_cpu_s: float
    latencies_s: dict[str, list[float]]
    delays_s: list[float]
    failures: list[str]

    @property
    def seconds(self) -> float:
        """How long it was."""
        return self.ended_s - self.began_s


@dataclass
class Node:
    """The daemon under load, and its clients."""

    daemon: DaemonProcess
    job_id: str
    clients: subprocess.Popen[str]
    windows: dict[str, list[Window]] = field(default_factory=lambda: defaultdict(list))

    def measure(self, kind: str, *, seconds: float, watchers: int = 0, pollers: int = 0, burn_share: float = 0) -> None:
        """Have that load for a window."""
        order = {"watchers": watchers, "pollers": pollers, "seconds": seconds, "burn_share": burn_share}
        _tell(self.clients, order)
        began_s, began_cpu_s = _answer(self.clients)["began_s"], cpu_s(self.daemon.pid)
        report = _answer(self.clients)
        window = Window(
            began_s=began_s,
            ended_s=report["ended_s"],
            daemon_cpu_s=cpu_s(self.daemon.pid) - began_cpu_s,
            client_cpu_s=report["cpu_s"],
            latencies_s=report["latencies_s"],
            delays_s=report["delays_s"],
            failures=report["failures"],
        )
        self.windows[kind].append(window)

    def tokens_per_s(self, window: Window) -> float:
        """Return the speed of training in that window, from the times of its steps."""
        query = (
            "SELECT time_s, json_extract(body, '$.num_input_tokens_seen') FROM events WHERE job_id = ? AND time_s "
            "BETWEEN ? AND ?"
        )
        which = ' AND body LIKE \'{"kind":"step"%\' ORDER BY sequence'
        with sqlite3.connect(self.daemon.state_dir / "horizon.db") as database:
            steps = database.execute(query + which, (self.job_id, window.began_s, window.ended_s)).fetchall()
        (first_s, first), (last_s, last) = steps[0], steps[-1]
        return float((last - first) / (last_s - first_s))


def _tell(process: subprocess.Popen[str], order: dict[str, Any]) -> None:
    stdin: IO[str] | None = process.stdin
    assert stdin is not None
    stdin.write(json.dumps(order) + "\n")
    stdin.flush()


def _answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "the clients have ended"
    answer: dict[str, Any] = json.loads(line)
    return answer


def add_ended_jobs(database: Path, like: str, count: int) -> None:
    """Add ended jobs that are copies of one job and of its first events."""
    with sqlite3.connect(database, timeout=30) as connection:
        columns = [row[1] for row in connection.execute("PRAGMA table_info(jobs)")]
        taken = {
            "number": "NULL",
            "job_id": "printf('job_%012x', n.value)",
            "job_state": "'SUCCEEDED'",
            "wanted": "''",
            "ended_s": "started_s + 60",
            "last_sequence": str(_EVENTS_OF_A_COPY),
            "queue_order": "0",
        }
        values = ", ".join(taken.get(name, name) for name in columns)
        numbers = (
            f"(WITH RECURSIVE n(value) AS (SELECT 1 UNION ALL SELECT value + 1 FROM n LIMIT {count}) SELECT * FROM n) n"
        )
        connection.execute(
            f"INSERT INTO jobs ({', '.join(columns)}) SELECT {values} FROM jobs, {numbers} WHERE job_id = ?", (like,)
        )
        connection.execute(
            "INSERT INTO events (job_id, sequence, time_s, body) SELECT printf('job_%012x', n.value), sequence, "
            "time_s, body "
            f"FROM events, {numbers} WHERE job_id = ? AND sequence <= ?",
            (like, _EVENTS_OF_A_COPY),
        )


@contextmanager
def loaded_node(folder: Path, *, nice: int, num_jobs: int = JOBS) -> Iterator[Node]:
    """Start a daemon that trains, fill its database, and start the clients."""
    daemon = DaemonProcess(folder / "state", "--log-level", "error")
    clients: subprocess.Popen[str] | None = None
    try:
        daemon.start()
        owner = daemon.user("owner")
        # Viewers see all jobs.
        tokens = [daemon.user(f"viewer-{number}", role="viewer") for number in range(USERS)]
        with daemon.client(owner) as client:
            client.models.push(write_demo_model(folder / "model"), name="model")
            client.datasets.push([write_demo_dataset(folder)], name="chats")
            train: TrainSpec = {
                "max_steps": 1_000_000,
                "sequence_length": 256,
                "tokens_per_step": 1024,
                "compile": "off",
            }
            spec: JobSpec = {"name": "load", "model": "model", "dataset": "chats", "train": train}
            job_id = client.jobs.submit({**spec, "checkpoint": {"every_steps": 0}}).job_id
            wait_for_step(client, job_id, 10, timeout_s=180)
            add_ended_jobs(daemon.state_dir / "horizon.db", job_id, num_jobs)
            clients = subprocess.Popen(
                [sys.executable, "-m", "bench.service_clients"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            _tell(clients, {"address": daemon.endpoints["grpc"], "tokens": tokens, "job_id": job_id, "nice": nice})
            yield Node(daemon, job_id, clients)
            client.jobs.cancel(job_id)
    finally:
        if clients is not None:
            clients.kill()
            clients.wait()
        daemon.close()


def measure(node: Node, *, seconds: float, rounds: int, watchers: int = WATCHERS, pollers: int = POLLERS) -> None:
    """Have every kind of window, several times in turn; the first round does not count."""
    # Name of a kind of window, how many watch, how many poll.
    kinds = (("nobody", 0, 0), ("watchers", watchers, 0), ("pollers", 0, pollers), ("both", watchers, pollers))
    for number in range(rounds + 1):
        for kind, num_watchers, num_pollers in kinds:
            node.measure(kind, seconds=seconds if number else 3.0, watchers=num_watchers, pollers=num_pollers)
        taken = node.windows["both"][-1]
        node.measure(_BURN, seconds=seconds if number else 3.0, burn_share=taken.client_cpu_s / taken.seconds)
        if not number:
            node.windows.clear()


def _percentiles(values: Sequence[float]) -> str:
    ordered = sorted(values)
    if not ordered:
        return ""
    return f"{1e3 * statistics.median(ordered):.1f} / {1e3 * ordered[int(0.99 * (len(ordered) - 1))]:.1f}"


def report(node: Node) -> None:
    """Print the tables."""
    calls = ("ListJobs", "GetJob", "GetNode")
    columns = [
        "clients",
        *(f"{name} p50 / p99 ms" for name in (*calls, "all calls", "event delay")),
        "calls/s",
        "events/s",
        "daemon % of a core",
        "clients %",
        "training tokens/s",
        "failures",
    ]
    print(f"| {' | '.join(columns)} |\n{'| --- ' * len(columns)}|")
    speeds: dict[str, list[float]] = {}
    for kind, windows in node.windows.items():
        seconds = sum(window.seconds for window in windows)
        times = {name: [s for window in windows for s in window.latencies_s.get(name, ())] for name in calls}
        every = [s for one in times.values() for s in one]
        delays = [s for window in windows for s in window.delays_s]
        speeds[kind] = [node.tokens_per_s(window) for window in windows]
        cells = [
            kind,
            *(_percentiles(times[name]) for name in calls),
            _percentiles(every),
            _percentiles(delays),
            f"{len(every) / seconds:.0f}",
            f"{len(delays) / seconds:.0f}",
            f"{100 * sum(window.daemon_cpu_s for window in windows) / seconds:.1f}",
            f"{100 * sum(window.client_cpu_s for window in windows) / seconds:.1f}",
            f"{statistics.median(speeds[kind]):.0f}",
            str(sum(len(window.failures) for window in windows)),
        ]
        print(f"| {' | '.join(cells)} |")
    for failure in {failure for windows in node.windows.values() for window in windows for failure in window.failures}:
        print(f"\nfailed: {failure}")
    print("\n| of the daemon | figure |\n| --- | --- |")
    idle = _share(node, "nobody")
    watched, polled = node.windows["watchers"], node.windows["pollers"]
    num_events = sum(len(window.delays_s) for window in watched)
    num_calls = sum(len(times) for window in polled for times in window.latencies_s.values())
    for name, kind, number in (("an event delivered", "watchers", num_events), ("a call", "pollers", num_calls)):
        seconds = sum(window.seconds for window in node.windows[kind])
        print(f"| processor time of {name} | {1e3 * (_share(node, kind) - idle) * seconds / max(number, 1):.2f} ms |")
    for name, base in (("nobody there", "nobody"), ("as much processor time burned", _BURN)):
        ratios = [with_them / without for with_them, without in zip(speeds["both"], speeds[base], strict=True)]
        spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
        print(
            f"| training with both / with {name}, median of rounds (of each) | {statistics.median(ratios):.3f} "
            f"({spread}) |"
        )


def _share(node: Node, kind: str) -> float:
    windows = node.windows[kind]
    return sum(window.daemon_cpu_s for window in windows) / sum(window.seconds for window in windows)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter windows")
    parser.add_argument("--nice", type=int, default=10, help="of the clients (default: %(default)s)")
    parser.add_argument(
        "--profile", type=Path, help="write a py-spy profile of the daemon under both loads to this file"
    )
    parser.add_argument("--watchers", type=int, default=WATCHERS, help="clients that watch (default: %(default)s)")
    parser.add_argument("--pollers", type=int, default=POLLERS, help="clients that poll (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=JOBS, help="ended jobs in the database (default: %(default)s)")
    options = parser.parse_args()
    seconds, rounds = (10.0, 2) if options.quick else (25.0, 4)
    with (
        tempfile.TemporaryDirectory() as folder,
        loaded_node(Path(folder), nice=options.nice, num_jobs=options.jobs) as node,
    ):
        if options.profile:
            profile(node, options.profile, watchers=options.watchers, pollers=options.pollers)
            return
        print(f"{os.cpu_count()} processors, clients at nice {options.nice}, {rounds} rounds of {seconds:.0f} s\n")
        measure(node, seconds=seconds, rounds=rounds, watchers=options.watchers, pollers=options.pollers)
        report(node)


def profile(node: Node, path: Path, *, watchers: int, pollers: int) -> None:
    """Sample the daemon while both kinds of clients are there."""
    command = [
        "py-spy",
        "record",
        "--pid",
        str(node.daemon.pid),
        "--duration",
        "12",
        "--rate",
        "200",
        "--format",
        "raw",
    ]
    sampling = subprocess.Popen([*command, "--output", str(path)])
    while sampling.poll() is None:
        node.measure("both", seconds=5.0, watchers=watchers, pollers=pollers)


if __name__ == "__main__":
    main()
