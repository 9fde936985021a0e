"""The GPU bench on a machine without a GPU: the whole program with tiny sizes, stages that fail, and a time limit that
holds."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from bench.gpu.report import read_results, without_folders
from bench.gpu.summary import MAX_LINES, Outcome
from bench.gpu.task import Clock
from bench.gpu.variants import VARIANTS
from bench.gpu_all import STAGES, Plan, Stage, run
from tests.conftest import INSIDE_A_TEST

ROOT = Path(__file__).parents[3]
NAMES = [stage.name for stage in STAGES]


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the whole program wrote."""
    out = tmp_path_factory.mktemp("gpu") / "results"
    flags = ["--device", "cpu", "--out", str(out), "--minutes", "40"]
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu_all", *flags],
        cwd=ROOT,
        # One of its stages runs tests.
        env={**os.environ, INSIDE_A_TEST: "1"},
        check=False,
        capture_output=True,
        text=True,
        timeout=570,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith((out / "summary.md").read_text("utf-8") + "\n")
    return out


def rows_of_stage(out: Path, stage: str, table: str = "") -> list[dict[str, Any]]:
    return [row for row in read_results(out) if row["stage"] == stage and row.get("table", "").startswith(table or " ")]


def test_every_stage_leaves_its_table_and_the_folder_stays_small(dry_run: Path) -> None:
    assert {row["stage"] for row in read_results(dry_run) if "table" in row} == set(NAMES)
    files = {file.name for file in dry_run.iterdir()}
    assert files == {"summary.md", "results.jsonl", "trace.json.gz", *(stage.file for stage in STAGES)}
    # Places that results are copied from may limit how many files they hand over.
    assert len(files) <= 8


def test_the_summary_has_sixty_lines_at_most_and_says_what_was_done(dry_run: Path) -> None:
    lines = (dry_run / "summary.md").read_text("utf-8").splitlines()
    assert len(lines) <= MAX_LINES
    text = "\n".join(lines)
    assert all(f"{name} " in lines[-1] for name in NAMES)
    for part in (
        "processor: ",
        "AdamW: ",
        "link, GB/s",
        "tests/gpu: ",
        "| tiny | 256 | packed |",
        "streamed / resident",
    ):
        assert part in text


def test_no_result_names_a_folder_of_this_machine(dry_run: Path) -> None:
    for file in dry_run.iterdir():
        raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        for folder in (ROOT, dry_run, Path(sys.prefix), Path.home()):
            assert f"{folder}/".encode() not in raw, f"{file.name} names {folder}"


def test_points_of_the_curve_have_rates_and_the_memory_that_was_planned(dry_run: Path) -> None:
    points = rows_of_stage(dry_run, "curve", "The curve")
    assert {(point["rows"], point["clip"]) for point in points} == {
        ("equal", "on"),
        ("packed", "on"),
        ("varied", "on"),
        ("short", "on"),
        ("equal", "off"),
        ("equal of 128", "on"),
    }
    # The point that asks for a host memory which no machine has says so, and costs the others nothing.
    (absent,) = (point for point in points if not point["step s"])
    assert absent["engine"] == "job, host 1e+06"
    assert absent["note"].startswith("no number of update threads gives 1e+06 GB/s here: the nearest is ")
    points.remove(absent)
    for point in points:
        assert point["tokens/s"] > 0 and point["useful TFLOP/s"] > 0 and point["loss"] > 0 and not point["note"]
        # Compiled layers take less than is planned for eager ones; here a device reports the peak of all its points.
        least, most = {"job": (0.7, 1.05), "eager": (0.9, 1.05), "row by row": (0.9, 1.2)}[point["engine"]]
        assert least < point["allocated/planned"] <= most
        assert point["clip"] == "off" or point["of forecast"] > 0
        # Layers are compiled where a job's would be, all of them.
        assert point["compiled"] == ("3 of 3" if point["engine"] == "job" else "0 of 3")
    assert {point["engine"] for point in points} == {"job", "eager", "row by row"}
    memory = rows_of_stage(dry_run, "curve", "Memory")
    assert len(memory) == len(points)
    assert all(row["reserved GiB"] >= row["allocated GiB"] > 0 and row["host planned GiB"] > 0 for row in memory)


def test_the_compiler_is_a_stage_of_its_own(dry_run: Path) -> None:
    rows = rows_of_stage(dry_run, "compile", "Compiled")
    assert [row["layers of"] for row in rows] == ["the model", "adapters"]
    for row in rows:
        assert row["s"] > 0 and row["times as fast"] > 0 and row["error"] < 1e-5 and row["kernels"] == "inductor"
    assert rows_of_stage(dry_run, "profile", "One step by class of kernel, job")


def test_it_says_when_the_host_returns_from_launching_and_what_comes_back(dry_run: Path) -> None:
    (row,) = rows_of_stage(dry_run, "compile", "When the host")
    # A processor computes what it is called for.
    assert 0 < row["host returned ms"] == row["all ended ms"] and row["share"] == 1.0
    for row in rows_of_stage(dry_run, "curve", "What comes back"):
        assert (
            row["down GB"] > 0 and row["update s"] > 0 and row["predicted down s"] > 0 and row["predicted update s"] > 0
        )


def test_adapters_train_next_to_a_base_in_bf16_and_in_4_bits(dry_run: Path) -> None:
    points = {point["shape"]: point for point in rows_of_stage(dry_run, "adapters", "The curve")}
    assert points.keys() == {"tiny LoRA bf16", "tiny LoRA nf4"}
    for point in points.values():
        assert point["tokens/s"] > 0 and point["loss"] > 0 and point["of forecast"] > 0 and not point["note"]
        assert point["compiled"] == "3 of 3"
        assert 0.6 < point["allocated/planned"] <= 1.05
    (row,) = rows_of_stage(dry_run, "compute", "Weights in 4 bits")
    assert row["ms a layer"] > 0


def test_the_same_steps_give_the_same_bits_on_a_processor(dry_run: Path) -> None:
    rows = rows_of_stage(dry_run, "twice", "2 steps")
    found = [(row["engine"], row["compiled"]) for row in rows]
    assert found == [("job", "3 of 3"), ("eager", "0 of 3"), ("job, deterministic", "3 of 3")]
    for row in rows:
        assert row["first loss"] == row["all losses"] == row["gradient norms"] == row["weights and moments"] == "same"
        assert row["losses"][0] == row["losses"][1] and row["losses"][0][0] != row["losses"][0][1]


def test_another_kernel_for_attention_is_measured_or_said_to_be_absent(dry_run: Path) -> None:
    rows = {row["kind"]: row for row in rows_of_stage(dry_run, "compute", "Attention")}
    assert rows["ours"]["same twice"] == rows["ours, deterministic"]["same twice"] == "same"
    assert rows["ours, FA4"]["forward"] == "not available: the package flash-attn-4 is not installed"


def test_the_whole_table_has_predictions_beside_what_was_measured_or_why_it_was_not(dry_run: Path) -> None:
    rows = {row["variant"]: row for row in rows_of_stage(dry_run, "table", "Useful")}
    assert list(rows) == [variant.title for variant in VARIANTS]
    for row in rows.values():
        assert all(value["predicted"] > 0 and value["predicted_s"] > 0 for value in row["values"])
        measured = [value["measured"] for value in row["values"] if value["measured"]]
        assert measured or row["note"]
    for title in ("a job: joined rows, compiled layers", "joined rows, eager layers", "LoRA, bf16 base, a job"):
        assert any(value["measured"] for value in rows[title]["values"])
    assert rows["+ embedding table resident"]["note"] == "the engine does not have it"
    parts = {row["what"]: row for row in rows_of_stage(dry_run, "table", "Parts")}
    assert parts["AdamW, GB/s of host memory"]["measured"] > 0
    assert parts["FlashAttention 4 forward, TFLOP/s"]["note"].endswith("flash-attn-4 is not installed")
    assert parts["the same bits twice, job"]["measured"] == "same"


def test_streamed_and_resident_compute_the_same_loss_bit_for_bit(dry_run: Path) -> None:
    (row,) = rows_of_stage(dry_run, "resident", "Streamed")
    assert row["streamed loss"] == row["resident loss"] > 0
    assert row["streamed/resident"] > 0


def test_the_profile_accounts_for_the_step_and_the_trace_joins_queues_and_operators(dry_run: Path) -> None:
    classes = {row["class"]: row for row in rows_of_stage(dry_run, "profile", "One step by class of kernel, eager")}
    assert {"GEMM", "attention", "norm", "rotary", "swiglu", "add", "copy", "other"} <= classes.keys()
    assert sum(row["share"] for row in classes.values()) == pytest.approx(1.0)
    assert all(classes[name]["s"] > 0 for name in ("GEMM", "attention", "norm", "rotary", "swiglu"))

    events = json.loads(gzip.decompress((dry_run / "trace.json.gz").read_bytes()))["traceEvents"]
    work = [event for event in events if event.get("cat") == "work" and event["name"].startswith("forward")]
    operators = [event for event in events if event.get("cat") == "cpu_op" and event["name"] == "aten::mm"]
    assert work and operators
    # One time line: the products lie within the queues' work, to the precision of two clocks.
    slack_us = 20_000
    first, last = (
        min(event["ts"] for event in work),
        max(event["ts"] + event["dur"] for event in events if "dur" in event),
    )
    assert all(first - slack_us <= event["ts"] <= last + slack_us for event in operators)


def test_rows_of_many_lengths_show_their_first_and_second_step(dry_run: Path) -> None:
    rows = rows_of_stage(dry_run, "lengths", "First")
    assert [row["rows"] for row in rows] == ["one document each", "packed"]
    assert all(row["first s"] > 0 and row["second s"] > 0 for row in rows)


BROKEN = {
    "misleads": "from bench.gpu.report import Report\ndef run(task, report):\n"
    "    report = Report(task.folder, stage='curve', file='c.md')\n    report.table('The curve', {'a': ''})\n    "
    "report.row(a=1)\n",
    "raises": 'def run(task, report):\n    raise RuntimeError(f"broken in {__file__}")\n',
    "crashes": "import os, signal\ndef run(task, report):\n    report.say('begun')\n    os.kill(os.getpid(), "
    "signal.SIGSEGV)\n",
    "hangs": "import subprocess, sys\ndef run(task, report):\n    report.say('begun')\n"
    "    subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])\n",
    "points": """
import os, signal, time
from bench.gpu import curve
from bench.gpu.shapes import Point
from bench.gpu.steps import choose_model
from horizon_server.errors import DoesNotFit

def measure(task, model, store, device, point, threads):
    if point.tokens == 1:
        raise RuntimeError("no such kernel\\nand more")
    if point.tokens == 2:
        os.kill(os.getpid(), signal.SIGSEGV)
    if point.tokens == 3:
        time.sleep(600)
    raise DoesNotFit("device memory: nothing is there") if point.tokens == 4 else ValueError(point.tokens)

def run(task, report):
    curve._measure, curve._LEAST_LIMIT_S, curve._LIMIT_SHARE = measure, 6.0, 0.0
    points = [Point(tokens=tokens, engine="eager") for tokens in (1, 2, 3, 4, 5)]
    curve.run_points(task, report, points, lambda _: choose_model(task), "The curve")
""",
    "works": "def run(task, report):\n    report.table('T', {'a b': '.1f'})\n    report.row(a_b=1.25, more=[1])\n",
}


def broken_plan(folder: Path, *names: str, minutes: float) -> Plan:
    for name in names:
        (folder / f"stage_{name}.py").write_text(BROKEN[name])
    stages = [
        Stage(
            name=name,
            module=f"stage_{name}",
            file=f"{name}.md",
            # Its share of the time is waited for.
            weight=0.25 if name == "hangs" else 1,
            least_s=1.0,
            has_points=name == "points",
        )
        for name in names
    ]
    out = folder / "out"
    out.mkdir()
    return Plan(out=out, device="cpu", minutes=minutes, stages=stages, environment={"PYTHONPATH": str(folder)})


def test_a_stage_that_fails_crashes_or_hangs_does_not_stop_the_others(tmp_path: Path) -> None:
    plan = broken_plan(tmp_path, "raises", "crashes", "hangs", "works", minutes=1.0)
    start_s = time.monotonic()

    outcomes = run(plan, Clock(60 * plan.minutes))

    assert time.monotonic() - start_s < 300, "what hangs would for 600 s"
    assert [(outcome.stage, outcome.state) for outcome in outcomes] == [
        ("raises", "failed"),
        ("crashes", "failed"),
        ("hangs", "failed"),
        ("works", "done"),
    ]
    reasons = {outcome.stage: outcome.why for outcome in outcomes}
    assert reasons["raises"] == "RuntimeError: broken in stage_raises.py"
    assert reasons["crashes"] == "ended by signal SIGSEGV"
    assert reasons["hangs"].startswith("stopped at its time limit of ")
    assert (
        "Traceback" in (plan.out / "raises.md").read_text()
        and str(tmp_path) not in (plan.out / "raises.md").read_text()
    )
    assert (plan.out / "hangs.md").read_text().startswith("begun")
    assert "| 1.2 |" in (plan.out / "works.md").read_text()
    assert {"stage": "works", "table": "T", "a b": 1.25, "more": [1]} in read_results(plan.out)
    summary = (plan.out / "summary.md").read_text()
    assert "- raises failed: RuntimeError: broken in stage_raises.py" in summary and "- done: works" in summary


def test_points_behind_one_that_ends_its_process_run_in_another(tmp_path: Path) -> None:
    # The point that hangs ends after 6 s in any case; the rest is for three starts of a process under load.
    plan = broken_plan(tmp_path, "points", "works", minutes=10.0)

    outcomes = run(plan, Clock(60 * plan.minutes))

    assert [(outcome.stage, outcome.state) for outcome in outcomes] == [("points", "failed"), ("works", "done")]
    assert outcomes[0].why == "ended by signal SIGSEGV; a point stood still for half of the time left, and was ended"
    rows = {row["point_name"]: row for row in read_results(plan.out) if "point_name" in row}
    ended = "its process ended; the file of this table says how"
    assert {name: row["note"] for name, row in rows.items()} == {
        "1, equal, eager": "failed: RuntimeError: no such kernel",
        "2, equal, eager": ended,
        "3, equal, eager": ended,
        "4, equal, eager": "device memory: nothing is there",
        "5, equal, eager": "failed: ValueError: 5",
    }


def test_the_time_limit_holds_whatever_stages_do(tmp_path: Path) -> None:
    plan = broken_plan(tmp_path, "hangs", "works", minutes=0.1)
    start_s = time.monotonic()

    outcomes = run(plan, Clock(60 * plan.minutes))

    assert time.monotonic() - start_s < 300, "what hangs would for 600 s"
    assert outcomes[0].state == "failed"


def test_what_has_no_time_left_is_skipped_with_a_reason(tmp_path: Path) -> None:
    plan = broken_plan(tmp_path, "hangs", "works", minutes=0.0)

    outcomes = run(plan, Clock(60 * plan.minutes))

    why = "its share of the time left is 0 s, it needs 0 s"
    assert outcomes == [Outcome(stage=name, state="skipped", why=why, seconds=0.0) for name in ("hangs", "works")]
    assert (plan.out / "works.md").read_text() == f"works was skipped: {why}.\n\n"
    assert f"- works skipped: {why}" in (plan.out / "summary.md").read_text()


def test_a_row_that_the_summary_cannot_read_does_not_stop_the_stages(tmp_path: Path) -> None:
    plan = broken_plan(tmp_path, "misleads", "works", minutes=0.5)

    outcomes = run(plan, Clock(60 * plan.minutes))

    assert [outcome.state for outcome in outcomes] == ["done", "done"]
    assert (plan.out / "summary.md").read_text().startswith("The summary could not be made (KeyError(")


def test_without_a_compiler_nothing_is_measured_and_the_reason_is_said(tmp_path: Path) -> None:
    for name in ("bench", "tools"):
        shutil.copytree(ROOT / name, tmp_path / name)
    store = "server/horizon_server/store"
    (tmp_path / store / "kernels").mkdir(parents=True)
    shutil.copy(ROOT / store / "native.py", tmp_path / store)
    for source in (ROOT / store / "kernels").glob("*.cpp"):
        shutil.copy(source, tmp_path / store / "kernels")

    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu_all", "--device", "cpu", "--out", "out"],
        cwd=tmp_path,
        env={"CXX": "no-such-compiler"},
        check=False,
        capture_output=True,
        text=True,
        timeout=240,
    )

    assert done.returncode == 1
    assert "no C++ compiler found; install g++" in done.stderr and "Nothing was measured" in done.stderr
    assert not (tmp_path / "out").exists()


def test_without_a_gpu_it_names_the_dry_run(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu_all", "--out", str(tmp_path / "out")],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        check=False,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 1
    assert done.stderr.strip() == "needs 1 CUDA device, found 0; --device cpu is a dry run without one"
    assert not (tmp_path / "out").exists()


ON_A_BARE_MACHINE = ("torch", "transformers", "numpy", "safetensors", "psutil", "jinja2")
IMPORTS_WITHOUT = """
import importlib, sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {blocked!r} else self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Without, sys.meta_path)
for name in {wanted!r}:
    importlib.import_module(name)
print("imported")
"""


def with_what_they_require(names: tuple[str, ...]) -> set[str]:
    """Distributions and all that they cannot be installed without."""
    found: set[str] = set()
    left = list(names)
    while left:
        name = re.sub(r"[-_.]+", "-", left.pop()).lower()
        if name in found:
            continue
        try:
            requirements = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        found.add(name)
        left += [re.split(r"[^\w.-]", line)[0] for line in requirements if "extra ==" not in line]
    return found


def test_it_imports_with_what_a_bare_gpu_machine_has() -> None:
    there = with_what_they_require(ON_A_BARE_MACHINE)
    blocked = {
        package
        for package, owners in metadata.packages_distributions().items()
        if not package.startswith(("horizon_", "_"))
        and not {re.sub(r"[-_.]+", "-", owner).lower() for owner in owners} & there
    }
    # A package of theirs may name it as a requirement and still load without.
    blocked.add("pydantic")
    assert {"pydantic_settings", "fastapi", "sqlalchemy", "grpc", "structlog", "pytest", "hypothesis"} <= blocked
    modules = ["bench.gpu_all", "bench.gpu.child", *(stage.module for stage in STAGES)]
    script = IMPORTS_WITHOUT.format(blocked=sorted(blocked), wanted=modules)
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, check=False, capture_output=True, text=True, timeout=200
    )
    assert done.stdout.strip() == "imported", done.stderr


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('File "/home/me/tree/bench/gpu/curve.py", line 3', 'File "curve.py", line 3'),
        (f'File "{ROOT}/bench/gpu/curve.py", line 3', 'File "bench/gpu/curve.py", line 3'),
        ('File "/opt/x/.venv/lib/python3.12/site-packages/torch/a.py"', 'File "torch/a.py"'),
        ("12 GB/s of 13 tokens/s", "12 GB/s of 13 tokens/s"),
        ("see https://example.org/a/b.html", "see https://example.org/a/b.html"),
        ("-c /dev/null tests/gpu/test_x.py", "-c null tests/gpu/test_x.py"),
    ],
)
def test_folders_are_cut_off_and_nothing_else(text: str, shown: str) -> None:
    assert without_folders(text) == shown
