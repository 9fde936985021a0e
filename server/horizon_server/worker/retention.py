"""Which checkpoints stay: the newest few, and the best by eval loss."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from horizon_server.store.checkpoint import is_complete, read_manifest

_STEP_FOLDER = re.compile(r"step-(\d{8,})")


def folder_of_step(checkpoints: Path, step: int) -> Path:
    """Return where the checkpoint of a step lies."""
    return checkpoints / f"step-{step:08d}"


def size_bytes(folder: Path) -> int:
    """Return the bytes of all files of a checkpoint."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def apply_retention(checkpoints: Path, *, keep_last: int, keep_best: bool) -> None:
    """Remove complete checkpoints that are neither among the newest `keep_last` nor the best.

    A folder loses its name first, so that a cut in between leaves nothing that looks complete.
    """
    assert keep_last >= 1, "the newest is what a job resumes from"
    steps = {
        int(m.group(1)): p for p in checkpoints.iterdir() if (m := _STEP_FOLDER.fullmatch(p.name)) and is_complete(p)
    }
    kept = set(sorted(steps)[-keep_last:])
    if keep_best:
        losses = {step: read_manifest(path).get("eval_loss") for step, path in steps.items()}
        judged = {step: loss for step, loss in losses.items() if loss is not None}
        if judged:
            kept.add(min(judged, key=lambda step: judged[step]))
    for step in sorted(set(steps) - kept):
        doomed = steps[step].with_name(f".deleted-{steps[step].name}")
        steps[step].rename(doomed)
        shutil.rmtree(doomed)
