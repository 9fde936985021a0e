"""The bench of large models for real, on a tiny one: its loss, and the bytes that killed and resumed workers leave."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
from bench.giant_real import SHAPES, prepare, rehearse, table
from tests.support.drives import drive_folders

TINY = SHAPES["tiny"]
_GIB = 2**30


@pytest.mark.parametrize("states", ["exact", "compressed"])
def test_a_killed_and_a_resumed_worker_leave_the_same_bytes(tmp_path: Path, states: str) -> None:
    drives = [Path(folder) for folder in drive_folders(tmp_path)] if states == "exact" else []
    shape = dataclasses.replace(TINY, states=states, has_drive=bool(drives))
    job = prepare(tmp_path, shape, drives, num_tokens=64, saved_step=2)
    if drives:
        # One byte less than in memory alone.
        memory_gib = (job.plan.host_total_bytes - 1) / _GIB
        job = prepare(tmp_path, dataclasses.replace(shape, memory_gib=memory_gib), drives, num_tokens=64, saved_step=2)
        assert job.plan.fits and job.plan.drives is not None
    outcome = rehearse(job, num_steps=3, saved_step=2)
    assert list(outcome.is_same.values()) == [True, True]
    vocab_size = TINY.config["vocab_size"]
    assert outcome.life.steps[1].loss == pytest.approx(math.log(vocab_size), rel=0.01)
    lines = table("tiny", job, outcome, vocab_size)
    assert ("on drives" in lines[0]) == bool(drives) and "| same bytes | same bytes |" in lines[-1]
