"""`horizon plan`: a machine that is only asked about, through the daemon itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

Run = Callable[..., Result]


def _job_yaml() -> str:
    Path("job.yaml").write_text(json.dumps({"name": "first", "model": "tiny-base", "dataset": "gsm8k"}))
    return "job.yaml"


ELSEWHERE = ("plan", "--gpu", "h100", "--host-gbps", "200")


def test_a_plan_for_a_machine_that_nobody_has(run: Run) -> None:
    """Through the daemon itself: a model by its name, without a job file."""
    result = run(*ELSEWHERE, "--model", "tiny-base", "--tokens-per-step", "4096", "--sequence-length", "128")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("PREDICTION\n")
    assert "h100, host memory 200 GB/s, its usual link" in result.stdout
    assert "estimated from data sheets, NOT measured" in result.stdout
    assert "for 4,096 tokens" in result.stdout and "adamw" in result.stdout
    answer = json.loads(run(*ELSEWHERE, _job_yaml(), "--link-gbps", "25", "-o", "json").stdout)["plan"]
    assert (answer["device"], answer["fits"], answer["prediction"]["measured"]) == ("cuda", True, False)
    assert answer["prediction"]["parts_s"]["gemm"] > 0
    assert run(*ELSEWHERE, _job_yaml(), "-o", "name").stdout == "fits\n"
    small = run(*ELSEWHERE, _job_yaml(), "--host-gib", "0.01", "-o", "name")
    assert (small.exit_code, small.stdout) == (1, "does-not-fit\n")


def test_a_machine_with_drives(run: Run) -> None:
    """What a job takes without drives decides whether it has states on them."""
    job = (_job_yaml(), "--set", "train.max_steps=1000")
    need = sum(json.loads(run(*ELSEWHERE, *job, "-o", "json").stdout)["plan"]["host_bytes"].values())
    short = (*job, "--host-gib", f"{(need - 200_000) / 2**30:.9f}")
    drives = ("--drive-read-gbps", "27", "--drive-write-gbps", "11", "--drive-tbw", "56000")
    assert run(*ELSEWHERE, *short, "-o", "name").stdout == "does-not-fit\n"
    result = run(*ELSEWHERE, *short, *drives, "--set", "memory.tier=drive")
    assert "drives 27 / 11 GB/s" in result.stdout and "on drives: states of" in result.stdout
    assert "of what the drives are rated for" in result.stdout
    half = run(*ELSEWHERE, *short, *drives[:2], "--set", "memory.tier=drive")
    assert half.exit_code == 2 and "one of both speeds is given" in half.stderr


def test_a_plan_elsewhere_pushes_no_data(run: Run, tmp_path: Path) -> None:
    (tmp_path / "cwd" / "rows.jsonl").write_text('{"text": "a"}\n')
    result = run(*ELSEWHERE, _job_yaml(), "--set", "dataset=rows.jsonl")
    assert (result.exit_code, "pushing" in result.stderr) == (0, False), result.stderr


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--gpu", "abacus", "--host-gbps", "200", "--model", "tiny-base"), "known GPUs: h100, h100-pcie, h200"),
        (("--gpu", "h100", "--host-gbps", "0", "--model", "tiny-base"), "'--host-gbps': 0.0 is not in the range x>0"),
        (("--gpu", "h100", "--host-gbps", "nan", "--model", "tiny-base"), "host_gbps is nan; it must be above 0"),
        (("--gpu", "h100", "--model", "tiny-base"), "Missing option '--host-gbps'"),
        (("--gpu", "h100", "--host-gbps", "200"), "give a job file or --model"),
    ],
)
def test_a_plan_elsewhere_refuses_what_cannot_be(run: Run, arguments: tuple[str, ...], why: str) -> None:
    result = run("plan", *arguments)
    assert result.exit_code == 2
    assert why in result.stderr
