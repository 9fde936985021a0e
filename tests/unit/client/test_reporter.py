"""What a transfer reports without a terminal to draw a bar on."""

from __future__ import annotations

import pytest

from horizon_client import Progress
from horizon_client.cli.session import progress_line

MIB = 2**20


def at(done_bytes: int, total_bytes: int = 100 * MIB) -> Progress:
    return Progress(phase="upload", name="a.jsonl", done_bytes=done_bytes, total_bytes=total_bytes)


@pytest.mark.parametrize(
    ("progress", "moved_bytes", "elapsed_s", "expected"),
    [
        (at(0), 0, 0.0, "uploading a.jsonl: 0% of 100.0 MiB"),
        (at(50 * MIB), 20 * MIB, 2.0, "uploading a.jsonl: 50% of 100.0 MiB, 10.0 MiB/s, ETA 0:00:05"),
        (at(100 * MIB), 50 * MIB, 5.0, "uploading a.jsonl: 100% of 100.0 MiB, 10.0 MiB/s"),
        (at(50 * MIB), MIB, 0.1, "uploading a.jsonl: 50% of 100.0 MiB"),
        (at(50 * MIB), 0, 60.0, "uploading a.jsonl: 50% of 100.0 MiB"),
        (at(0, 0), 0, 9.0, "uploading a.jsonl"),
    ],
)
def test_a_line_has_share_rate_and_eta(progress: Progress, moved_bytes: int, elapsed_s: float, expected: str) -> None:
    assert progress_line(progress, moved_bytes, elapsed_s) == expected
