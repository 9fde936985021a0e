"""The GPU curve's own test: the same script on the host device, and without the daemon's libraries."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from bench.gpu_curve import _config, hardware_flops_of
from bench.gpu_machine import free_host_bytes
from bench.gpu_resident import ResidentModel
from bench.models import random_rows

from horizon_server.engine.template import Template

ROOT = Path(__file__).parents[3]
FORBIDDEN = ("fastapi", "starlette", "pydantic", "sqlalchemy", "grpc", "structlog")


def test_it_runs_without_a_gpu_and_writes_its_table(tmp_path: Path) -> None:
    table = tmp_path / "curve.md"
    flags = ["--device", "host", "--shape", "tiny", "--tokens", "64", "128", "--sequence", "32", "64", "--output"]
    subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "bench.gpu_curve", *flags, str(table)],
        cwd=ROOT, check=True, capture_output=True, timeout=150,
    )  # fmt: skip

    lines = [line for line in table.read_text().splitlines() if line.startswith("|")]
    columns = [cell.strip() for cell in lines[0].split("|")]
    assert len(lines) == 2 + 4, "a header and four points"
    for line in lines[2:]:
        cells = dict(zip(columns, (cell.strip() for cell in line.split("|")), strict=True))
        assert float(cells["tokens/s"].replace(",", "")) > 0
        assert float(cells["resident tokens/s"].replace(",", "")) > 0
        assert float(cells["of resident"]) > 0
        assert 0 <= float(cells["overlap"]) <= 1
        assert 0.9 < float(cells["peak / plan"]) <= 1.05


def test_what_does_not_fit_and_what_has_no_time_left_are_rows_that_say_so(tmp_path: Path) -> None:
    table = tmp_path / "curve.md"
    flags = ["--device", "host", "--shape", "tiny", "--tokens", "64", str(1 << 23), "--sequence", "64", "--output"]
    subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "bench.gpu_curve", "--minutes", "0", *flags, str(table)],
        cwd=ROOT, check=True, capture_output=True, timeout=150,
    )  # fmt: skip

    lines = table.read_text().splitlines()
    (small,) = [line for line in lines if line.startswith("| tiny | 64 |")]
    (large,) = [line for line in lines if line.startswith(f"| tiny | {1 << 23} |")]
    assert "| no time left |" in small
    assert "does not fit: " in large and "GiB planned on the device, 1.0 GiB there" in large


def test_what_is_not_computed_again_does_not_count_as_computed() -> None:
    config = _config("tiny", max_tokens=32)
    template = Template.from_config(config)
    head = config.vocab_size * config.hidden_size
    left_out = config.num_hidden_layers * config.intermediate_size * config.hidden_size
    layers = 1_000_000

    computed = hardware_flops_of(template, model_flops=6 * (layers + head), num_tokens=1)

    assert computed == pytest.approx(8 * layers - 2 * left_out + 6 * head)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")
def test_the_resident_loop_learns_and_keeps_its_master_in_fp32() -> None:
    torch.manual_seed(0)  # an unlucky start would need more steps than these
    config = _config("tiny", max_tokens=32)
    resident = ResidentModel(config, torch.device("cpu"), learning_rate=1e-3)
    rows = random_rows(config.vocab_size, num_rows=2, row_tokens=32)
    before = [weight.detach().clone() for weight in resident.masters]

    losses = [float(resident.step(rows)) for _ in range(6)]

    assert losses[0] == pytest.approx(math.log(config.vocab_size), rel=0.1)
    assert losses[-1] < losses[0]
    assert all(not torch.equal(old, new) for old, new in zip(before, resident.masters, strict=True))
    for weight, master in zip(resident.model.parameters(), resident.masters, strict=True):
        assert torch.equal(weight, master.bfloat16()) and master.dtype == torch.float32 and weight.grad is None


def test_a_control_groups_limit_counts_and_its_page_cache_does_not(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 900 kB\nMemAvailable: 800 kB\n")
    assert free_host_bytes(meminfo=meminfo, cgroup=tmp_path) == 800 << 10
    for name, text in (("max", "500000"), ("current", "300000"), ("stat", "anon 1\nactive_file 200000\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert free_host_bytes(meminfo=meminfo, cgroup=tmp_path) == 400_000
    (tmp_path / "memory.max").write_text("max")
    assert free_host_bytes(meminfo=meminfo, cgroup=tmp_path) == 800 << 10


def test_it_needs_nothing_of_the_daemon() -> None:
    script = f"import bench.gpu_curve, sys; print([name for name in {FORBIDDEN} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, text=True, timeout=100
    )
    assert done.stdout.strip() == "[]"
