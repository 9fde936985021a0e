"""Everything that takes long in an attempt counts as progress while it runs: the daemon kills a worker that makes
none."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from tests.support.worker_attempts import EVALUATED, Daemon, always, attempt, spec_of

from horizon_server import progress
from horizon_server.children.entry import Line
from horizon_server.events import AttemptReady, CheckpointWritten, EvalDone, StepDone
from horizon_server.store.safetensors_files import PIECE_BYTES

Inputs = Callable[[str], Path]


def counts_of(folder: Path, *, num_steps: int, resume_at: int | None = None) -> list[tuple[str, int]]:
    """How far the count was when the attempt began and when it reported each of what takes long."""
    counts = [("begin", progress.count())]

    def react(line: Line) -> bytes:
        if isinstance(line, AttemptReady | StepDone | EvalDone | CheckpointWritten):
            counts.append((type(line).__name__, progress.count()))
        return always(line)

    spec = spec_of(num_steps, checkpoint={"every_steps": 2}, **EVALUATED)
    attempt(folder, spec, Daemon(react), resume_at=resume_at)
    return counts


def test_loading_steps_evaluations_and_checkpoints_count(inputs: Inputs) -> None:
    folder = inputs("job")
    counts = counts_of(folder, num_steps=4)
    assert {name for name, _ in counts} == {"begin", "AttemptReady", "StepDone", "EvalDone", "CheckpointWritten"}
    # Two layers, the embedding and the head: each is asked for at least once by whatever uses the weights.
    assert all(after - before >= 4 for (_, before), (_, after) in pairwise(counts)), counts


def test_loading_a_checkpoint_counts(inputs: Inputs) -> None:
    folder = inputs("job")
    counts_of(folder, num_steps=4)
    shutil.rmtree(folder / "checkpoints/step-00000004")
    [(_, before), (name, after), *_] = counts_of(folder, num_steps=4, resume_at=2)
    assert name == "AttemptReady" and after - before >= 4


def test_a_large_file_counts_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from horizon_server.store import safetensors_files
    from horizon_server.store.safetensors_files import TensorBytes, write_sharded

    assert PIECE_BYTES <= 2**26, "a slow disk writes a piece within seconds"
    monkeypatch.setattr(safetensors_files, "PIECE_BYTES", 1024)
    data = memoryview(bytes(10 * 1024))
    before = progress.count()
    tensor = TensorBytes(name="w", dtype="U8", shape=(data.nbytes,), size_bytes=data.nbytes, pieces=lambda: [data])
    write_sharded(tmp_path, "model", [tensor])
    assert progress.count() - before == 10
