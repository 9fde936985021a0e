"""Stage: tests/gpu, in a process of its own; every result is on disk as soon as pytest prints it."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

from bench.gpu.report import Report
from bench.gpu.task import Task

ROOT = Path(__file__).resolve().parent.parent.parent
COMMAND = (
    "-c",
    "/dev/null",
    "--rootdir",
    ".",
    "--import-mode=importlib",
    "-p",
    "no:cacheprovider",
    "-v",
    "--durations=5",
    "--color=no",
    "tests/gpu",
)
_RESULT = re.compile(r"^(tests/gpu/\S+\.py)::(.+?) (PASSED|FAILED|ERROR|SKIPPED)\b")
_MAX_TEXT = 100_000


def run(task: Task, report: Report) -> None:
    """One row per test, then what pytest says about those that failed."""
    if importlib.util.find_spec("pytest") is None:
        report.say("pytest is not installed here, so no test was run.")
        return
    spec = importlib.util.find_spec("tests")
    found = list(spec.submodule_search_locations or []) if spec else []
    if found[:1] != [str(ROOT / "tests")]:
        report.say("Another package named `tests` is installed here and hides the project's, so no test was run.")
        return
    report.table("tests/gpu", {"test": "", "outcome": ""})
    environment = {**os.environ, "HORIZON_REQUIRE_GPU": "1" if task.device == "cuda" else "0"}
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *COMMAND],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert process.stdout is not None
    counts: Counter[str] = Counter()
    rest: list[str] = []
    # The stage's own limit ends this loop too: the parent kills the whole group of processes.
    for line in process.stdout:
        match = _RESULT.match(line)
        if match is None:
            rest.append(line)
            continue
        outcome = match[3].lower()
        # A test that fails and whose clean-up fails as well is reported twice.
        counts[outcome] += 1
        report.row(test=match[2], outcome=outcome)
    code = process.wait()
    text = "".join(rest)
    report.say(f"\n{_total(counts)}\n\n```\n{text[-_MAX_TEXT:]}\n```")
    # 5 is pytest's code for "no test was found".
    if code not in (0, 1, 5):
        sys.exit(f"pytest ended with code {code}: {text.strip().splitlines()[-1] if text.strip() else 'no output'}")


def _total(counts: Counter[str]) -> str:
    return ", ".join(f"{counts[name]} {name}" for name in ("passed", "failed", "error", "skipped"))
