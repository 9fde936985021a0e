"""Several jobs on one device: shares, throughput, hand-overs, the first step of a short job, and the bytes of the
results.

The daemon runs in this process, with real workers of one compute thread and one thread of the optimizer, on the host
device and over an emulated link. Every figure is a ratio of two things measured in this run. The replay of a queue is
`bench.sharing_replay`; in virtual time, `bench.sharing_arrivals`.

python -m bench.sharing                      # all, about half an hour on two cores
python -m bench.sharing --quick shares       # short runs, some sections
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import structlog
import transformers
from tests.daemon_parts import DaemonParts, daemon_parts
from tests.support.held_device import HeldDevice
from transformers import AutoConfig, AutoModelForCausalLM

from bench import sharing_arrivals, sharing_replay
from bench.sharing_worker import OPTIONS_FILE
from horizon_server.db.sharing import SharingStore
from horizon_server.demo.recipe import write_demo_model
from horizon_server.events import StepDone
from horizon_server.records.account import Principal
from horizon_server.records.job import JobRecord, JobState
from horizon_server.records.sharing import Allowance

_WORKER = "bench.sharing_worker"
_MANY_STEPS = 1_000_000
_URGENT = 1000
_WAIT_S = 300.0
# The first steps of a worker are slower, and do not count; fewer than these others give no rate.
_FIRST_STEPS, _FEWEST_STEPS = 3, 8
# Several steps of every load here, as the usual slice of a minute is; jobs that leave the device idle take turns by
# steps all the same.
_LONG_SLICE_S = 3.0

Interval = tuple[float, float, str]
"""When a kernel ran, in seconds of the machine's monotonic clock, and its label."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """A model and a size of step. `hidden` 0 is the built-in model of 2.6 M parameters."""

    hidden: int = 0
    layers: int = 0
    row_tokens: int = 64
    tokens: int = 128
    link_bytes_per_s: float | None = None
    update_bytes_per_s: float | None = None


SMALL = Load()
COMPUTE = Load(hidden=256, layers=6, row_tokens=256, tokens=512)
FEW_TOKENS = Load(hidden=1024, layers=4, row_tokens=32, tokens=32)
OPTIMIZER = replace(FEW_TOKENS, update_bytes_per_s=2e9)
SMALL_LINK_BYTES_PER_S, COMPUTE_LINK_BYTES_PER_S = 1e9, 0.4e9


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How long to measure."""

    window_s: float
    slice_s: float
    rounds: int
    phase_s: float
    short_slice_s: float


FULL = Sizes(window_s=40, slice_s=0.5, rounds=3, phase_s=8, short_slice_s=20)
QUICK = Sizes(window_s=12, slice_s=0.25, rounds=2, phase_s=5, short_slice_s=12)


@dataclass(kw_only=True)
class Run:
    """A submitted job and the steps that were reported, with the time of each."""

    owner: Principal
    job: JobRecord
    steps: list[tuple[float, StepDone]] = field(default_factory=list)


class Node:
    """A daemon whose jobs all have one model."""

    def __init__(self, daemon: DaemonParts, load: Load) -> None:
        self._daemon, self._load = daemon, load
        self._watches: set[asyncio.Task[None]] = set()

    @classmethod
    @asynccontextmanager
    async def opened(
        cls, folder: Path, load: Load, *, slice_s: float, weights: Mapping[str, float]
    ) -> AsyncIterator[Node]:
        """Start a daemon with a user for each weight."""
        model = _write_model(folder / "model", load)
        state = folder / "state"
        settings: dict[str, Any] = {"time_slice_s": slice_s, "num_threads": 1, "log_level": "error"}
        async with daemon_parts(state, model_folder=model, worker_module=_WORKER, **settings) as daemon:
            options = {name: getattr(load, name) for name in ("link_bytes_per_s", "update_bytes_per_s")}
            (state / OPTIONS_FILE).write_text(json.dumps(options), "utf-8")
            store = SharingStore(daemon.database)
            for name, weight in weights.items():
                owner = await daemon.user(name)
                await daemon.dataset(owner)
                await store.set_allowance(Allowance(holder="project", name=name, weight=weight))
            node = cls(daemon, load)
            try:
                yield node
            finally:
                # Before the daemon closes its database, which they read.
                watches = list(node._watches)
                for watch in watches:
                    watch.cancel()
                await asyncio.gather(*watches, return_exceptions=True)

    async def submit(self, user: str, *, num_steps: int = _MANY_STEPS, name: str = "job") -> Run:
        """Submit a job and collect its steps."""
        owner = Principal(name=user, role="user", project=user)
        train = {
            "max_steps": num_steps,
            "sequence_length": self._load.row_tokens,
            "tokens_per_step": self._load.tokens,
            "compile": "off",
            "learning_rate": 1e-5,
        }
        run = Run(owner=owner, job=await self._daemon.submit(owner, name, train=train, checkpoint={"every_steps": 0}))
        watch = asyncio.create_task(self._collect(run))
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)
        return run

    async def loaded(self, *users: str, num_steps: Mapping[str, int] = MappingProxyType({})) -> list[Run]:
        """Submit a job for each user, and let none begin before all are loaded."""
        async with HeldDevice(self._daemon.parts.scheduler.turns["host"], timeout_s=_WAIT_S) as held:
            runs = [await self.submit(user, num_steps=num_steps.get(user, _MANY_STEPS)) for user in users]
            await held.until_wanted_by(len(runs))
            return runs

    async def prefer(self, preferred: Run | None, runs: Sequence[Run]) -> None:
        """Make one job urgent, which has the device alone then, or none."""
        admin = Principal(name="root", role="admin", project="root")
        wanted = {run.job.job_id: _URGENT if run is preferred else 0 for run in runs}
        for job_id, priority in wanted.items():
            await self._daemon.services.jobs.update(admin, job_id, priority=priority)
        turns = self._daemon.parts.scheduler.turns["host"]
        await self.until(
            lambda: {participant.job.job_id: participant.job.priority for participant in turns.participants} == wanted
        )

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for what the collected steps show."""
        async with asyncio.timeout(_WAIT_S):
            while not condition():
                for watch in self._watches:
                    assert not watch.done(), "a job has ended early; see its log"
                await asyncio.sleep(0.01)

    async def succeeded(self, run: Run) -> Mapping[str, bytes]:
        """Wait for a job's end, and return its last checkpoint's files."""
        job = await self._daemon.until(run.job.job_id, JobState.SUCCEEDED)
        folder = self._folder(run) / "checkpoints" / f"step-{job.step:08d}"
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    async def cancel(self, *runs: Run) -> list[list[Interval]]:
        """End jobs, and return when each computed."""
        for run in runs:
            await self._daemon.services.jobs.cancel(run.owner, run.job.job_id)
        for run in runs:
            await self._daemon.until(run.job.job_id, JobState.CANCELLED)
        return [json.loads((self._folder(run) / "compute-1.json").read_text("utf-8")) for run in runs]

    def device_s(self) -> dict[str, float]:
        """Return the device seconds that each user was charged up to now."""
        self._daemon.parts.scheduler.turns["host"].charge()
        return {labels["user"]: value for labels, value in self._series("horizon_device_seconds_total")}

    def handovers(self) -> tuple[int, float]:
        """Return the number of hand-overs, and their mean seconds as the daemon saw them."""
        count = sum(value for _, value in self._series("horizon_device_handover_seconds_count"))
        total_s = sum(value for _, value in self._series("horizon_device_handover_seconds_sum"))
        return int(count), total_s / max(1.0, count)

    def _series(self, name: str) -> list[tuple[Mapping[str, str], float]]:
        families = self._daemon.parts.metrics.registry.collect()
        samples = (sample for family in families for sample in family.samples)
        return [(sample.labels, sample.value) for sample in samples if sample.name == name]

    def _folder(self, run: Run) -> Path:
        return self._daemon.state_dir / "jobs" / run.job.job_id

    async def _collect(self, run: Run) -> None:
        async for event in self._daemon.parts.journal.follow(run.job.job_id, 0):
            if isinstance(event.payload, StepDone):
                run.steps.append((event.time_s, event.payload))


def _write_model(folder: Path, load: Load) -> Path:
    """Write the built-in model, or one of another shape with its tokenizer."""
    write_demo_model(folder)
    if load.hidden:
        config = AutoConfig.from_pretrained(folder)
        heads = load.hidden // config.head_dim
        sizes = {"hidden_size": load.hidden, "intermediate_size": 3 * load.hidden, "num_hidden_layers": load.layers}
        layer_types = ["full_attention"] * load.layers
        config.update(
            {**sizes, "num_attention_heads": heads, "num_key_value_heads": heads // 2, "layer_types": layer_types}
        )
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)  # type: ignore[no-untyped-call]
    return folder


def handover_gaps(first: Iterable[Interval], second: Iterable[Interval]) -> list[float]:
    """Return the seconds from each last kernel of one job to the first of the other; below 0, both computed at the same
    time."""
    work = sorted([(*one, 0) for one in first] + [(*one, 1) for one in second])
    return [after[0] - before[1] for before, after in pairwise(work) if before[3] != after[3]]


def step_gaps(work: Sequence[Interval], *, others: Sequence[Interval]) -> list[float]:
    """Return the seconds from the last kernel of a step to the first of the next, where no other job computed in
    between."""
    pairs = [(a, b) for a, b in pairwise(work) if b[2] == "forward 0" and a[2] != "forward 0"]
    return [b[0] - a[1] for a, b in pairs if not any(a[1] <= start_s <= b[0] for start_s, _, _ in others)]


def tokens_per_second(steps: Iterable[tuple[float, StepDone]], *, start_s: float, end_s: float) -> float:
    """Return the rate of all steps that ended in a window: the tokens after the first of them, by the time from it to
    the last."""
    ended = sorted((time_s, step.num_tokens) for time_s, step in steps if start_s <= time_s <= end_s)
    return sum(tokens for _, tokens in ended[1:]) / (ended[-1][0] - ended[0][0])


async def shares(load: Load, weights: Mapping[str, float], sizes: Sizes) -> tuple[str, str]:
    """Return a row of shares and one of hand-overs, of two jobs from when both are loaded."""
    with tempfile.TemporaryDirectory() as folder:
        async with Node.opened(Path(folder), load, slice_s=sizes.slice_s, weights=weights) as node:
            runs = await node.loaded(*weights)
            await asyncio.sleep(sizes.window_s)
            used_s = node.device_s()
            charged = {user: used_s[user] for user in weights}
            _, mean_s = node.handovers()
            first, second = await node.cancel(*runs)
    wanted = {user: weight / sum(weights.values()) for user, weight in weights.items()}
    user = next(iter(weights))
    part = charged[user] / sum(charged.values())
    busy = [sum(end_s - start_s for start_s, end_s, _ in work) for work in (first, second)]
    ratio = ":".join(f"{weight:g}" for weight in weights.values())
    row = f"{ratio} | {wanted[user]:.1%} | {part:.1%} | {busy[0] / sum(busy):.1%} | {sum(charged.values()):.0f}"
    gaps = sorted(handover_gaps(first, second))
    own = step_gaps(first, others=second) + step_gaps(second, others=first)
    own_ms = f"{1e3 * statistics.median(own):.1f}" if own else "-"
    high, overlaps = gaps[int(0.95 * len(gaps))], sum(gap < 0 for gap in gaps)
    median_ms = 1e3 * statistics.median(gaps)
    return row, f"{len(gaps)} | {median_ms:.1f} | {1e3 * high:.1f} | {1e3 * mean_s:.1f} | {own_ms} | {overlaps}"


async def _steady(node: Node, runs: Sequence[Run], *, window_s: float) -> tuple[float, list[StepDone]]:
    """Return tokens per second of jobs together from when each has done a step, and the steps."""
    begun_s = time.time()
    await node.until(lambda: all(run.steps[-1][0] > begun_s for run in runs))
    start_s = time.time()
    await asyncio.sleep(window_s)
    # On a slow machine, a few steps more.
    await node.until(lambda: sum(time_s > start_s for run in runs for time_s, _ in run.steps) >= _FEWEST_STEPS)
    steps = [step for run in runs for step in run.steps]
    rate = tokens_per_second(steps, start_s=start_s, end_s=max(time_s for time_s, _ in steps))
    return rate, [step for time_s, step in steps if time_s > start_s]


async def throughput(load: Load, sizes: Sizes) -> str:
    """Return a row: tokens per second of two jobs that share against those of one alone, which is what one after the
    other has.

    Both are loaded all the time; alone means that an admin has made the job urgent. Each has that in turn, then they
    share, in every round: so a machine whose speed drifts slows both sides alike.
    """
    alone: list[float] = []
    shared: list[float] = []
    figures: list[StepDone] = []
    with tempfile.TemporaryDirectory() as folder:
        async with Node.opened(Path(folder), load, slice_s=_LONG_SLICE_S, weights={"ann": 1, "ben": 1}) as node:
            runs = await node.loaded("ann", "ben")
            await node.until(lambda: all(len(run.steps) >= _FIRST_STEPS for run in runs))
            for _ in range(sizes.rounds):
                rates = []
                for run in runs:
                    await node.prefer(run, runs)
                    rate, steps = await _steady(node, [run], window_s=sizes.phase_s)
                    rates.append(rate)
                    figures += steps
                await node.prefer(None, runs)
                alone.append(statistics.mean(rates))
                shared.append((await _steady(node, runs, window_s=2 * sizes.phase_s))[0])
            await node.cancel(*runs)
    ratios = sorted(two / one for one, two in zip(alone, shared, strict=True))
    step_s, exposed_s, link_s = (
        statistics.median(values)
        for values in zip(*((f.duration_s, f.optimizer_exposed_s, f.h2d.busy_s) for f in figures), strict=True)
    )
    return (
        f"{statistics.median(alone):.0f} | {statistics.median(shared):.0f} | {statistics.median(ratios):.3f} "
        f"| {ratios[0]:.2f} to {ratios[-1]:.2f} | {1e3 * step_s:.0f} | {exposed_s / step_s:.2f} | {link_s / step_s:.2f}"
    )


async def short_job(load: Load, sizes: Sizes) -> str:
    """Return a row: how long a job that is submitted while a long one has the device waits for its first step."""
    slice_s = sizes.short_slice_s
    with tempfile.TemporaryDirectory() as folder:
        async with Node.opened(Path(folder), load, slice_s=slice_s, weights={"long": 1, "short": 1}) as node:
            long = await node.submit("long")
            await node.until(lambda: len(long.steps) > 1)
            short = await node.submit("short", num_steps=3)
            submitted_s = short.job.created_s
            await node.until(lambda: bool(short.steps))
            await node.cancel(long)
    waited_s = short.steps[0][0] - submitted_s
    return f"{slice_s:g} | {waited_s:.1f} | {waited_s / slice_s:.2f}"


async def same_bytes(load: Load) -> str:
    """Return a row: whether two interleaved jobs end with the checkpoints of the same jobs alone."""
    num_steps = {"ann": 24, "ben": 20}
    with tempfile.TemporaryDirectory() as folder:
        async with Node.opened(Path(folder), load, slice_s=0.01, weights=dict.fromkeys(num_steps, 1.0)) as node:
            alone = {u: await node.succeeded(await node.submit(u, num_steps=n)) for u, n in num_steps.items()}
            before, _ = node.handovers()
            runs = await node.loaded(*num_steps, num_steps=num_steps)
            interleaved = {run.owner.name: await node.succeeded(run) for run in runs}
            count = node.handovers()[0] - before
    files = [(user, path) for user in alone for path in alone[user]]
    equal = sum(alone[user][path] == interleaved[user].get(path) for user, path in files)
    size = sum(len(alone[user][path]) for user, path in files)
    return f"{count} | {len(files)} | {equal} | {size / 1e6:.1f}"


def _devices(load: Load, link_bytes_per_s: float) -> list[tuple[str, Load]]:
    return [
        ("host", load),
        (f"link, {link_bytes_per_s / 1e9:g} GB/s", replace(load, link_bytes_per_s=link_bytes_per_s)),
    ]


def _head(*titles: str) -> str:
    return "| " + " | ".join(titles) + " |\n" + "| --- " * len(titles) + "|"


def print_shares(sizes: Sizes) -> None:
    """Shares of the device and hand-overs, of a small model."""
    print(_head("device", "weights", "wanted", "charged", "computed", "device s"))
    handed = []
    for device, load in _devices(SMALL, SMALL_LINK_BYTES_PER_S):
        for weights in ({"ann": 1.0, "ben": 1.0}, {"ann": 3.0, "ben": 1.0}):
            row, of_handovers = asyncio.run(shares(load, weights, sizes))
            print(f"| {device} | {row} |", flush=True)
            handed.append(f"| {device} | {of_handovers} |")
    titles = ("kernel to kernel, median ms", "95 %", "of it between the workers, mean ms")
    own = "step to step of one job, median ms"
    print("\n" + _head("device", "hand-overs", *titles, own, "jobs computed at once"), *handed, sep="\n", flush=True)


def print_throughput(sizes: Sizes) -> None:
    """Tokens per second."""
    ratios = ("shared / alone, median of rounds", "of each round")
    of_step = ("step ms", "optimizer exposed", "link busy")
    print(_head("bound by", "device", "alone tokens/s", "shared tokens/s", *ratios, *of_step))
    cases = [("compute", device, load) for device, load in _devices(COMPUTE, COMPUTE_LINK_BYTES_PER_S)]
    cases += [("optimizer", device, load) for device, load in _devices(OPTIMIZER, 4e9)]
    cases += [("link", *_devices(FEW_TOKENS, rate)[1]) for rate in (1e9, 0.3e9)]
    for bound, device, load in cases:
        print(f"| {bound} | {device} | {asyncio.run(throughput(load, sizes))} |", flush=True)


def print_short_job(sizes: Sizes) -> None:
    """A short job after a long one."""
    print(_head("device", "slice s", "submission to first step s", "in slices"))
    for device, load in _devices(SMALL, SMALL_LINK_BYTES_PER_S):
        print(f"| {device} | {asyncio.run(short_job(load, sizes))} |", flush=True)


def print_bytes(_: Sizes) -> None:
    """Interleaved against undisturbed."""
    print(_head("device", "hand-overs", "files", "of them equal", "MB"))
    for device, load in _devices(SMALL, SMALL_LINK_BYTES_PER_S):
        print(f"| {device} | {asyncio.run(same_bytes(load))} |", flush=True)


def print_replay(sizes: Sizes) -> None:
    """Estimates against what happened."""
    sharing_replay.print_table(num_jobs=40 if sizes is QUICK else 200)


def print_arrivals(sizes: Sizes) -> None:
    """What an estimate gains from knowing how jobs arrive."""
    sharing_arrivals.print_table(quick=sizes is QUICK)


SECTIONS: dict[str, tuple[str, Callable[[Sizes], None]]] = {
    "shares": ("Shares of the device, and hand-overs", print_shares),
    "throughput": ("Two jobs that share against one after the other", print_throughput),
    "short": ("A short job after a long one", print_short_job),
    "bytes": ("Interleaved against undisturbed", print_bytes),
    "replay": ("Estimated against real start and end", print_replay),
    "arrivals": ("Estimates beside those that know how jobs arrive, in virtual time", print_arrivals),
}


def main() -> None:
    """Run the sections asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.sharing", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="*", choices=[[], *SECTIONS], metavar="NAME", help=", ".join(SECTIONS))
    parser.add_argument("--quick", action="store_true", help="short runs, whose figures vary more")
    arguments = parser.parse_args()
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(io.StringIO()))
    for name in arguments.sections or list(SECTIONS):
        title, section = SECTIONS[name]
        print(f"### {title} (`python -m bench.sharing {name}`)\n", flush=True)
        section(QUICK if arguments.quick else FULL)
        print(flush=True)


if __name__ == "__main__":
    main()
