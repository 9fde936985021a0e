"""The GPU curve's own test: the same script on the host device, and without the daemon's libraries."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
        assert 0 <= float(cells["overlap"]) <= 1


def test_it_needs_nothing_of_the_daemon() -> None:
    script = f"import bench.gpu_curve, sys; print([name for name in {FORBIDDEN} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, text=True, timeout=100
    )
    assert done.stdout.strip() == "[]"
