"""Which checkpoints count, which is best, and which may go."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from horizon_server.errors import NotFound
from horizon_server.jobs import folders
from horizon_server.jobs.folders import CheckpointFolder, JobFolders
from horizon_server.store.manifest import Manifest, is_complete, record_file, write_manifest


def write(folder: CheckpointFolder, step: int, eval_loss: float | None = None, *judged: object) -> Path:
    path = folder.of_step(step)
    (path / "trainer").mkdir(parents=True)
    (path / "model.safetensors").write_bytes(b"x" * step)
    last_eval = None if eval_loss is None else [step, eval_loss, *(judged or (eval_loss, False))]
    (path / "trainer/trainer_state.json").write_text(json.dumps({"last_eval": last_eval}))
    names = ("model.safetensors", "trainer/trainer_state.json")
    write_manifest(path, Manifest(files={name: record_file(path / name) for name in names}, versions={}))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path / "checkpoints", "job_1")


def test_none_yet(folder: CheckpointFolder) -> None:
    assert folder.all() == []
    assert folder.newest() is None


def test_torn_and_foreign_folders_are_not_seen(folder: CheckpointFolder) -> None:
    write(folder, 5)
    (write(folder, 9) / "model.safetensors").write_bytes(b"x" * 8)
    (folder.path / "step-00000010").mkdir()
    (folder.path / ".step-00000011.tmp").mkdir()
    assert [record.step for record in folder.all()] == [5]
    assert folder.newest() == folder.of_step(5)


def test_what_is_replaced_while_it_is_listed_is_seen(folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    old = write(folder, 5)

    def look(path: Path) -> bool:
        if path == old and old.exists():
            write(folder, 10)
            shutil.rmtree(old)
        return is_complete(path)

    monkeypatch.setattr(folders, "is_complete", look)
    assert folder.steps() == [10]


def test_last_and_best_are_marked(folder: CheckpointFolder) -> None:
    for step, loss in ((5, 3.0), (10, 1.0), (15, 2.0)):
        write(folder, step, loss)
    assert [(record.step, record.last, record.best) for record in folder.all()] == [
        (5, False, False),
        (10, False, True),
        (15, True, False),
    ]


def test_the_best_is_by_another_figure_than_the_loss(folder: CheckpointFolder) -> None:
    for step, loss, accuracy in ((5, 1.0, 0.25), (10, 3.0, 0.5), (15, 2.0, 0.5)):
        write(folder, step, loss, accuracy, True)
    assert [(record.step, record.eval_loss, record.best) for record in folder.all()] == [
        (5, 1.0, False),
        (10, 3.0, True),
        (15, 2.0, False),
    ]
    folder.apply_retention(keep_last=1, keep_best=True)
    assert folder.steps() == [10, 15]


def test_without_evaluations_none_is_the_best_and_the_newest_is_kept(folder: CheckpointFolder) -> None:
    write(folder, 5)
    write(folder, 10)
    assert [record.best for record in folder.all()] == [False, False]
    folder.apply_retention(keep_last=1, keep_best=True)
    assert folder.steps() == [10]


def test_retention_keeps_the_newest_and_the_best(folder: CheckpointFolder) -> None:
    for step, loss in ((5, 3.0), (10, 1.0), (15, 2.0), (20, 2.5)):
        write(folder, step, loss)
    folder.apply_retention(keep_last=1, keep_best=True)
    assert [record.step for record in folder.all()] == [10, 20]
    folder.apply_retention(keep_last=1, keep_best=False)
    assert [entry.name for entry in folder.path.iterdir()] == ["step-00000020"]


def test_one_that_is_kept_stays_until_somebody_deletes_it(folder: CheckpointFolder) -> None:
    for step in (5, 10, 15):
        write(folder, step)
    made_s = folder.all()[0].created_s
    assert folder.set_kept(5, kept=True).kept
    folder.apply_retention(keep_last=1, keep_best=True)
    assert [(record.step, record.kept) for record in folder.all()] == [(5, True), (15, False)]
    assert folder.all()[0].created_s == pytest.approx(made_s, abs=1e-3)
    assert not folder.set_kept(5, kept=False).kept
    folder.set_kept(15, kept=True)
    folder.delete(15)
    assert folder.steps() == [5]


def test_only_listed_files_can_be_reached(folder: CheckpointFolder) -> None:
    write(folder, 5)
    assert folder.file(5, "model.safetensors").read_bytes() == b"xxxxx"
    for path in ("../../secret", "/etc/passwd", "trainer", "none"):
        with pytest.raises(NotFound, match="has no file"):
            folder.file(5, path)
    with pytest.raises(NotFound, match="no checkpoint of step 6"):
        folder.file(6, "model.safetensors")


def test_deleting(folder: CheckpointFolder) -> None:
    write(folder, 5)
    folder.delete(5)
    assert list(folder.path.iterdir()) == []
    with pytest.raises(NotFound):
        folder.delete(5)


def test_the_bytes_of_all_jobs_follow_what_is_written_and_deleted(tmp_path: Path) -> None:
    folders = JobFolders(tmp_path)
    assert folders.checkpoint_bytes() == {}
    first, second = folders.checkpoints("job_1"), folders.checkpoints("job_2")
    state_bytes = (write(first, 5) / "trainer/trainer_state.json").stat().st_size
    write(first, 7)
    write(second, 9)
    (first.path / "step-00000010").mkdir()  # being written
    assert folders.checkpoint_bytes() == {"job_1": 12 + 2 * state_bytes, "job_2": 9 + state_bytes}
    first.delete(5)
    second.delete(9)
    (write(second, 9) / "model.safetensors").write_bytes(b"x" * 90)
    names = ("model.safetensors", "trainer/trainer_state.json")
    path = second.of_step(9)
    write_manifest(path, Manifest(files={name: record_file(path / name) for name in names}, versions={}))
    os.utime(path / "trainer/manifest.json", ns=(1, 1))  # a clock may be coarser than this test is fast
    assert folders.checkpoint_bytes() == {"job_1": 7 + state_bytes, "job_2": 90 + state_bytes}
