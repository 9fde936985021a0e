"""Everything that can be measured on a GPU machine, in one command and one time limit, from a bare source tree.

    python3 -m bench.gpu_all --out results --minutes 40

Needs g++, torch, transformers and triton with what they bring along (pytest for the tests); nothing is installed or
downloaded. Each stage has a time limit of its own, writes its results as it goes, and does not stop the others when it
fails or crashes:

| file | what |
| --- | --- |
| summary.md | at most 60 lines: machine, tests, the curve next to the forecast, ratios, what failed |
| machine.md | the machine, rates of matrix products and attention, memory and link, what the compiler made of the
layers | | tests.md | tests/gpu |
| curve.md | steps of the engine as a job runs it, next to what is predicted, and with less of it; rows of many
different lengths; adapters next to a frozen base; whether the same steps give the same bits; at its end the whole
table, predicted beside measured | | profile.md, trace.json.gz | one step kernel by kernel, compiled and eager; the
trace is for Perfetto | | resident.md | the engine against the same kernels on resident weights |
| results.jsonl | every number above, a line of JSON per row |

`--device cpu` runs the same program with tiny sizes on a machine without a GPU.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bench.gpu.process import StageProcess
from bench.gpu.report import RESULTS, Report, read_results, without_folders
from bench.gpu.shapes import QWEN25, SIZES
from bench.gpu.summary import Outcome, summary_lines
from bench.gpu.task import PLANES, Clock, DeviceChoice, Task

ROOT = Path(__file__).resolve().parent.parent
SUMMARY = "summary.md"
_RESERVE_S = 3.0
"""Kept at the end: to stop a stage that does not stop by itself, and for the summary."""
_LOG_LINES = 60
_STOOD_STILL = "Timeout ("
"""What Python says where it ends a process that has stood still for too long."""
_ERROR_LINE = re.compile(r"^[\w.]*(Error|Exception|Exit|Fit|Model|Spec)\b.*", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A part of the program. `weight` is its share of the time against the stages after it, what earlier ones left over
    included; it is skipped where that is less than `least_s` on a GPU machine, a fraction of it in a dry run. A stage
    that counts memory is `fresh`: earlier ones leave libraries' workspaces on the device. One that `has_points` goes on
    behind a point that ended its process."""

    name: str
    module: str
    file: str
    weight: float
    least_s: float
    fresh: bool = False
    has_points: bool = False


STAGES = (
    Stage(name="environment", module="bench.gpu.environment", file="machine.md", weight=40, least_s=10),
    Stage(name="compute", module="bench.gpu.compute", file="machine.md", weight=50, least_s=15),
    Stage(name="bandwidth", module="bench.gpu.bandwidth", file="machine.md", weight=50, least_s=20),
    Stage(name="tests", module="bench.gpu.suite", file="tests.md", weight=110, least_s=30),
    Stage(name="compile", module="bench.gpu.compile", file="machine.md", weight=110, least_s=60),
    Stage(name="curve", module="bench.gpu.curve", file="curve.md", weight=300, least_s=60, fresh=True, has_points=True),
    Stage(name="profile", module="bench.gpu.profile", file="profile.md", weight=50, least_s=30),
    Stage(name="resident", module="bench.gpu.resident", file="resident.md", weight=70, least_s=40),
    Stage(name="lengths", module="bench.gpu.lengths", file="curve.md", weight=60, least_s=40),
    Stage(name="twice", module="bench.gpu.twice", file="curve.md", weight=40, least_s=30),
    Stage(
        name="adapters",
        module="bench.gpu.adapters",
        file="curve.md",
        weight=110,
        least_s=40,
        fresh=True,
        has_points=True,
    ),
    Stage(name="table", module="bench.gpu.table", file="curve.md", weight=8, least_s=4),
)
_DRY_RUN_SHARE = 0.1


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to run and on what; the fields that stages use are described in `Task`."""

    out: Path
    device: DeviceChoice
    minutes: float
    stages: Sequence[Stage] = STAGES
    shape: str = ""
    tokens: tuple[int, ...] = ()
    points: tuple[str, ...] = ()
    host_gib: float = 0.0
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))


def main() -> int:
    """Run the stages and print the summary."""
    arguments = _arguments()
    clock = Clock(60 * arguments.minutes)
    build = [sys.executable, str(ROOT / "tools" / "build_kernels.py")]
    built = subprocess.run(build, capture_output=True, text=True, check=False, timeout=max(1.0, clock.left_s))
    if built.returncode:
        # Without it the NumPy reference would run, and every step would measure that.
        sys.exit(f"{without_folders(built.stderr).strip()}\nNothing was measured: the bench needs this kernel.")
    if arguments.device == "cuda":
        _require_gpu(clock)
    arguments.out.mkdir(parents=True, exist_ok=True)
    plan = Plan(
        out=arguments.out,
        device=arguments.device,
        minutes=arguments.minutes,
        stages=[stage for stage in STAGES if stage.name in arguments.stages],
        shape=arguments.shape,
        tokens=tuple(arguments.tokens),
        points=tuple(arguments.points),
        host_gib=arguments.host_gib,
    )
    outcomes = run(plan, clock)
    print((arguments.out / SUMMARY).read_text("utf-8"))
    return 1 if any(outcome.state == "failed" for outcome in outcomes) else 0


def _require_gpu(clock: Clock) -> None:
    # In a process of its own, so that this one holds no memory of the device. Loading torch is not lost: the stages
    # find it in memory.
    code = "import torch; print(torch.cuda.device_count())"
    asked = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=max(1.0, clock.left_s)
    )
    if asked.returncode:
        sys.exit(f"torch cannot be loaded here: {without_folders(asked.stderr).strip().splitlines()[-1]}")
    if asked.stdout.strip() == "0":
        sys.exit("needs 1 CUDA device, found 0; --device cpu is a dry run without one")


def run(plan: Plan, clock: Clock) -> list[Outcome]:
    """Run the stages one after the other; the summary is written again after each."""
    start_s = time.perf_counter()
    for name in (RESULTS, SUMMARY, *{stage.file for stage in plan.stages}):
        (plan.out / name).unlink(missing_ok=True)
    outcomes: list[Outcome] = []
    with (
        _memory_files() as plane_fds,
        tempfile.TemporaryDirectory(prefix="horizon-bench-") as library,
        closing(_Runner(plan, plane_fds, library)) as runner,
    ):
        for index, stage in enumerate(plan.stages):
            weights = sum(other.weight for other in plan.stages[index:])
            seconds = max(0.0, clock.left_s - _RESERVE_S) * stage.weight / weights
            print(f"{stage.name}: up to {seconds:.0f} s", flush=True)
            outcome = runner.run(stage, seconds)
            print(f"{stage.name}: {outcome.state}{outcome.why and f': {outcome.why}'}", flush=True)
            outcomes.append(outcome)
            _write_summary(plan, outcomes, used_s=time.perf_counter() - start_s)
    return outcomes


def _write_summary(plan: Plan, outcomes: Sequence[Outcome], *, used_s: float) -> None:
    try:
        lines = summary_lines(plan.out, outcomes, minutes=plan.minutes, used_s=used_s)
    except (LookupError, TypeError, ValueError) as error:
        # A row that nobody expected must not cost the stages that are still to come.
        lines = [f"The summary could not be made ({error!r}); the other files have the results."]
    (plan.out / SUMMARY).write_text("\n".join(lines) + "\n", "utf-8")


@contextmanager
def _memory_files() -> Iterator[dict[str, int]]:
    """Memory files without size, for the stage that first needs a store; they keep its contents for the next one."""
    fds = {name: os.memfd_create(f"bench-{name}", 0) for name in PLANES}
    try:
        yield fds
    finally:
        for fd in fds.values():
            os.close(fd)


class _Runner:
    """Runs stages in a process that is replaced after a failure, and where a stage wants a fresh one."""

    def __init__(self, plan: Plan, plane_fds: Mapping[str, int], library: str) -> None:
        self._plan, self._plane_fds, self._library = plan, plane_fds, library
        self._process: StageProcess | None = None

    def run(self, stage: Stage, seconds: float) -> Outcome:
        """Run a stage, or skip it, and report what went wrong."""
        plan = self._plan
        report = Report(plan.out, stage=stage.name, file=stage.file)
        least_s = stage.least_s * (1.0 if plan.device == "cuda" else _DRY_RUN_SHARE)
        if seconds < least_s:
            why = f"its share of the time left is {seconds:.0f} s, it needs {least_s:.0f} s"
            report.say(f"{stage.name} was skipped: {why}.")
            return Outcome(stage=stage.name, state="skipped", why=why, seconds=0.0)
        start_s, failures, begun = time.monotonic(), list[str](), self._begun(stage)
        while True:
            left_s = seconds - (time.monotonic() - start_s)
            why = self._run_once(stage, report, left_s)
            failures += [why] if why else []
            before, begun = begun, self._begun(stage)
            # Where the process met its end before the first new point, the next one would too.
            if not why or begun == before or seconds - (time.monotonic() - start_s) < least_s:
                break
        return Outcome(
            stage=stage.name,
            state="failed" if failures else "done",
            why="; ".join(failures),
            seconds=time.monotonic() - start_s,
        )

    def _run_once(self, stage: Stage, report: Report, seconds: float) -> str:
        """Run a stage in the process that is there, or in a new one; returns what went wrong."""
        start_s, plan, task = time.monotonic(), self._plan, self._task(stage, seconds)
        # It may have ended after its last answer too.
        if stage.fresh or (self._process is not None and self._process.ended_with is not None):
            self.close()
        process = self._process = self._process or StageProcess(
            folder=ROOT, environment=_environment(plan), plane_fds=self._plane_fds
        )
        log = process.run(stage.module, task)
        if log is None:
            return ""
        used_s = time.monotonic() - start_s
        why = without_folders(_why(process.ended_with, log, seconds))
        self.close()
        tail = "\n".join(without_folders(log).splitlines()[-_LOG_LINES:])
        report.say(f"\n{stage.name} failed after {used_s:.0f} s: {why}\n\n```\n{tail}\n```")
        return why

    def _begun(self, stage: Stage) -> list[str]:
        """The points that were begun, of a stage that has points."""
        rows = read_results(self._plan.out) if stage.has_points else []
        return [row["begun"] for row in rows if row["stage"] == stage.name and "begun" in row]

    def close(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._process.close()
        self._process = None

    def _task(self, stage: Stage, seconds: float) -> Task:
        plan = self._plan
        return Task(
            stage=stage.name,
            file=stage.file,
            out=str(plan.out.resolve()),
            device=plan.device,
            end_s=time.monotonic() + seconds,
            shape=plan.shape,
            tokens=plan.tokens,
            points=plan.points,
            host_gib=plan.host_gib,
            plane_fds=self._plane_fds,
            library=self._library,
        )


def _environment(plan: Plan) -> dict[str, str]:
    """What a worker of the daemon runs with, and the source tree to import from."""
    folders = [str(ROOT / name) for name in ("", "proto", "server")]
    # Nothing is installed on a bare machine.
    sys.path[:0] = [folder for folder in folders if folder not in sys.path]
    from horizon_server.process_variables import CHILD_VARIABLES

    paths = filter(None, [*folders, plan.environment.get("PYTHONPATH", "")])
    # Rows of many lengths would fragment the allocator's memory.
    settings = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} if plan.device == "cuda" else {}
    return {**settings, **plan.environment, **CHILD_VARIABLES, "PYTHONPATH": os.pathsep.join(paths)}


def _why(code: int | None, log: str, seconds: float) -> str:
    if code is None:
        return f"stopped at its time limit of {seconds:.0f} s"
    if _STOOD_STILL in log:
        return "a point stood still for half of the time left, and was ended"
    if code < 0:
        return f"ended by signal {signal.Signals(-code).name}"
    lines = [match[0] for match in _ERROR_LINE.finditer(log)] or log.strip().splitlines() or [f"exit code {code}"]
    return lines[-1][:300]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu_all", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [stage.name for stage in STAGES]
    parser.add_argument("--out", type=Path, required=True, help="folder for the results; made if it does not exist")
    parser.add_argument("--minutes", type=float, default=40.0, help="time limit for everything (default: 40)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a dry run with tiny sizes")
    parser.add_argument("--stages", nargs="+", choices=names, default=names, help="run only these (default: all)")
    parser.add_argument("--shape", choices=sorted(QWEN25), default="", help="default: the largest that fits; cpu: tiny")
    parser.add_argument("--tokens", type=int, nargs="+", default=[], help="tokens per step of the curve's points")
    parser.add_argument(
        "--points",
        nargs="+",
        choices=sorted({point.name for sizes in SIZES.values() for point in (*sizes.points, *sizes.adapter_points)}),
        default=[],
        metavar="POINT",
        help='points of the curve and the adapters to run, in this order, as "65536, equal, fp8" (default: all)',
    )
    parser.add_argument("--host-gib", type=float, default=0.0, help="host memory to use, where the system reports less")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
