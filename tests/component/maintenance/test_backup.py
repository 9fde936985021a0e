"""Backups of a daemon that runs, put back into empty and into damaged state folders, and what `horizond check`
finds."""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
from tests.conftest import MakeDaemon
from tests.daemon_parts import DaemonParts, chat_rows
from tests.support.later_schemas import later_migrations

from horizon_server.errors import BadSetting, InUse, InvalidModel, NotFound
from horizon_server.maintenance.backup import BACKUP_FILE, BACKUP_IN_STATE, make_backup, read_backup
from horizon_server.maintenance.check import check_backup, check_state_dir
from horizon_server.maintenance.restore import restore
from horizon_server.records.account import Principal
from horizon_server.records.job import JobRecord, JobState
from horizon_server.state_dir import UNFINISHED_RESTORE_FILE, held_state_dir
from horizon_server.store.manifest import is_complete


@pytest.fixture
def make_daemon(make_daemon: MakeDaemon) -> MakeDaemon:
    return partial(make_daemon, prepared=None, queue=False)


@pytest.fixture
async def daemon(make_daemon: MakeDaemon, tmp_path: Path) -> AsyncIterator[DaemonParts]:
    """A daemon with a user, a dataset, a model, and a job with two checkpoints and a log."""
    async with make_daemon(tmp_path / "state") as daemon:
        assert await daemon.parts.pairing.problem() is None
        yield daemon


async def filled(daemon: DaemonParts) -> tuple[Principal, JobRecord]:
    ada = await daemon.user("ada")
    await daemon.token("ada")
    await daemon.dataset(ada, "chats")
    await daemon.model(ada, "tiny")
    job = await daemon.job_in(JobState.SUCCEEDED, ada, model="tiny")
    for step in (2, 3):
        write_checkpoint(daemon, job, step, bytes([step]) * 5000)
    daemon.write_log(job, b"a line\n")
    (daemon.state_dir / "tls").mkdir()
    (daemon.state_dir / "tls" / "ca.pem").write_bytes(b"certificate")
    return ada, job


def write_checkpoint(daemon: DaemonParts, job: JobRecord, step: int, weights: bytes) -> Path:
    files = {"trainer/trainer_state.json": b'{"last_eval": null}', "model.safetensors": weights, "config.json": b"{}"}
    return daemon.write_checkpoint(job, step, files)


def step_folder(root: Path, job: JobRecord, step: int) -> Path:
    return root / "jobs" / job.job_id / "checkpoints" / f"step-{step:08d}"


def files(root: Path) -> dict[str, bytes]:
    """Everything that a backup has of a state folder, but the database."""
    found = {str(path.relative_to(root)): path for path in root.rglob("*") if path.is_file()}
    kept = ("blobs/", "models/", "jobs/", "tls/")
    return {name: path.read_bytes() for name, path in found.items() if name.startswith(kept)}


async def test_a_backup_of_a_running_daemon_is_a_whole_daemon(
    daemon: DaemonParts, make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    """S10: a copy of horizon.db had 0 jobs where the daemon had 1."""
    ada, job = await filled(daemon)
    make_backup(daemon.state_dir, tmp_path / "backup", checkpoints="all")
    restore(tmp_path / "backup", tmp_path / "restored")
    assert files(tmp_path / "restored") == files(daemon.state_dir)
    async with make_daemon(tmp_path / "restored") as again:
        assert await again.parts.pairing.problem() is None
        assert await again.job(job.job_id) == await daemon.job(job.job_id)
        assert [dataset.name for dataset in (await again.services.datasets.list(ada))[0]] == ["chats"]
        model = await again.services.models.get_ready(ada, "tiny")
        file = model.files[0]
        assert (again.state_dir / "models" / model.model_id / file.path).samefile(
            again.services.blobs.store.path(file.sha256)
        )
        assert await again.services.accounts.tokens() == await daemon.services.accounts.tokens()
    report = check_state_dir(tmp_path / "restored", full=True)
    assert (report.is_good, report.findings) == (True, [])


async def test_a_backup_takes_the_place_of_the_one_before(daemon: DaemonParts, tmp_path: Path) -> None:
    ada, job = await filled(daemon)
    target = daemon.state_dir / BACKUP_IN_STATE
    first = make_backup(daemon.state_dir, target)
    record = await daemon.dataset(ada, "more", chat_rows(3))
    await daemon.services.datasets.delete(ada, "chats")
    write_checkpoint(daemon, job, 4, b"4" * 5000)
    second = make_backup(daemon.state_dir, target)
    assert read_backup(target) == second
    assert [path for path in second.files if "/step-" in path and path not in first.files] != []
    listed = {path for path in second.files if path.startswith("blobs/")}
    assert listed == {str(path.relative_to(target)) for path in target.glob("blobs/*/*")}
    assert any(path.endswith(record.files[0].sha256) for path in listed)
    assert not step_folder(target, job, 3).exists()
    assert check_backup(target, full=True).findings == []


async def test_the_checkpoints_of_a_backup_are_chosen(daemon: DaemonParts, tmp_path: Path) -> None:
    _, job = await filled(daemon)
    for checkpoints, steps in (("none", set()), ("newest", {3}), ("all", {2, 3})):
        backup = make_backup(daemon.state_dir, tmp_path / checkpoints, checkpoints=checkpoints)
        found = {path.split("/")[3] for path in backup.files if path.startswith(f"jobs/{job.job_id}/ch")}
        assert found == {f"step-{step:08d}" for step in steps}


async def test_what_nobody_writes_again_is_linked_and_the_rest_copied(daemon: DaemonParts, tmp_path: Path) -> None:
    _, job = await filled(daemon)
    target = tmp_path / "backup"
    backup = make_backup(daemon.state_dir, target)
    linked = {path for path in backup.files if (target / path).samefile(daemon.state_dir / path)}
    assert linked == {
        path
        for path in backup.files
        if path.startswith("blobs/") or ("/checkpoints/" in path and not path.endswith("manifest.json"))
    }
    daemon.write_log(job, b"a line\nanother one\n")
    assert check_backup(target, full=True).findings == []


async def test_what_is_deleted_after_the_backup_stays_in_it(
    daemon: DaemonParts, make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    """While restic copies it, for hours."""
    ada, job = await filled(daemon)
    before = files(daemon.state_dir)
    make_backup(daemon.state_dir, tmp_path / "backup", checkpoints="all")
    await daemon.services.jobs.delete_checkpoint(ada, job.job_id, 3)
    await daemon.services.jobs.delete(ada, job.job_id)
    await daemon.services.datasets.delete(ada, "chats")
    await daemon.services.models.delete(ada, "tiny")
    assert len(files(daemon.state_dir)) < 3
    assert check_backup(tmp_path / "backup", full=True).findings == []
    restore(tmp_path / "backup", tmp_path / "restored")
    assert files(tmp_path / "restored") == before


async def test_checkpoints_are_written_and_deleted_while_a_backup_is_made(daemon: DaemonParts, tmp_path: Path) -> None:
    """Every backup has a whole checkpoint of the job, the newest of some moment of it."""
    _, job = await filled(daemon)
    checkpoints = daemon.services.jobs.folders.checkpoints(job.job_id)
    over, steps, written_one = threading.Event(), itertools.count(4), threading.Semaphore(0)

    def train() -> int:
        for step in steps:
            partial = step_folder(tmp_path / "half", job, step)
            written = write_checkpoint(daemon, job, 10**7 + step, bytes([step % 256]) * 5000)
            partial.parent.mkdir(parents=True, exist_ok=True)
            # As a worker does: complete, or not there at all.
            written.rename(checkpoints.path / f".{partial.name}.partial").rename(
                step_folder(daemon.state_dir, job, step)
            )
            checkpoints.apply_retention(keep_last=1, keep_best=False)
            written_one.release()
            if over.is_set():
                return step
        raise AssertionError

    training = asyncio.get_running_loop().run_in_executor(None, train)
    try:
        for number in range(20):
            assert await asyncio.to_thread(written_one.acquire, timeout=240)
            target = tmp_path / f"backup{number}"
            backup = await asyncio.to_thread(make_backup, daemon.state_dir, target)
            assert (backup.problems, check_backup(target, full=True).findings) == ((), [])
            found = {Path(path).parts[3] for path in backup.files if "/checkpoints/" in path}
            assert found and all(is_complete(target / "jobs" / job.job_id / "checkpoints" / name) for name in found)
    finally:
        # A thread that went on would keep the test's process from its end.
        over.set()
    assert await training > 20


async def test_writes_continue_while_a_backup_is_made(
    daemon: DaemonParts, make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    """Pushes and deletions all the time: every backup is a whole one."""
    ada, _ = await filled(daemon)
    over = asyncio.Event()

    async def change() -> int:
        number = 0
        while not over.is_set():
            record = await daemon.dataset(ada, f"d{number}", chat_rows(number % 6 + 1) + b"\n" * (number + 1))
            if number % 2:
                await daemon.services.datasets.delete(ada, record.dataset_id)
            number += 1
        return number

    changing = asyncio.create_task(change())
    for number in range(4):
        backup = await asyncio.to_thread(make_backup, daemon.state_dir, tmp_path / f"backup{number}")
        assert backup.problems == ()
    over.set()
    assert await changing > 0
    for number in range(4):
        restore(tmp_path / f"backup{number}", tmp_path / f"restored{number}")
        report = check_state_dir(tmp_path / f"restored{number}", full=True)
        assert report.findings == []


async def test_a_lost_file_is_reported_and_the_rest_backed_up(daemon: DaemonParts, tmp_path: Path) -> None:
    ada, _ = await filled(daemon)
    record = await daemon.dataset(ada, "more", chat_rows(3))
    daemon.services.blobs.store.path(record.files[0].sha256).unlink()
    [problem] = make_backup(daemon.state_dir, tmp_path / "backup").problems
    assert problem.endswith("of dataset more of ada: is missing")
    report = check_backup(tmp_path / "backup", full=True)
    assert report.is_good
    assert [finding.level for finding in report.findings] == ["note"]
    restore(tmp_path / "backup", tmp_path / "restored")
    [finding] = check_state_dir(tmp_path / "restored").findings
    assert (finding.level, finding.what) == ("error", "of dataset more of ada is missing")


async def test_a_damaged_backup_is_named_and_nothing_of_it_restored(daemon: DaemonParts, tmp_path: Path) -> None:
    _, job = await filled(daemon)
    make_backup(daemon.state_dir, tmp_path / "backup")
    # A copy, as rsync makes it: the files of the backup itself are the daemon's.
    copy = shutil.copytree(tmp_path / "backup", tmp_path / "copy")
    blob = next(copy.glob("blobs/*/*"))
    blob.unlink()
    (copy / "jobs" / job.job_id / "attempt-1" / "worker.log").write_bytes(b"a")
    report = check_backup(copy)
    assert sorted(finding.where for finding in report.findings) == [
        str(blob.relative_to(copy)),
        f"jobs/{job.job_id}/attempt-1/worker.log",
    ]
    weights = step_folder(copy, job, 3) / "model.safetensors"
    rot(weights)
    rot(copy / "horizon.db")
    assert len(check_backup(copy).findings) == 2, "sizes only"
    assert len(check_backup(copy, full=True).findings) == 4
    with pytest.raises(BadSetting, match=r"is damaged: .*nothing was restored") as caught:
        restore(copy, tmp_path / "restored")
    for text in (
        f"{blob.relative_to(copy)} is missing",
        "worker.log has 1 bytes, not 7",
        f"{weights.relative_to(copy)} has other bytes",
        "horizon.db has other bytes",
    ):
        assert text in caught.value.message
    assert [path.name for path in (tmp_path / "restored").iterdir()] == ["lock"]
    # The others are as they were.
    assert check_backup(tmp_path / "backup", full=True).is_good
    restore(tmp_path / "backup", tmp_path / "restored")


def rot(path: Path) -> None:
    """Change one byte, as a bad disk does: size and time stay."""
    found = path.stat()
    path.chmod(0o600)
    with path.open("r+b") as stream:
        stream.seek(10)
        stream.write(b"#")
    path.chmod(found.st_mode & 0o777)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


async def test_a_damaged_state_folder_is_repaired(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    state = tmp_path / "state"
    async with make_daemon(state) as daemon:
        await daemon.parts.pairing.problem()
        ada, job = await filled(daemon)
        make_backup(state, tmp_path / "backup", checkpoints="all")
        # After the backup: one that it does not know, and more checks of the pairing.
        later = await daemon.dataset(ada, "later", chat_rows(2))
        write_checkpoint(daemon, job, 4, b"4" * 100)
        for _ in range(3):
            await daemon.parts.pairing.problem()
        model = await daemon.services.models.get_ready(ada, "tiny")
    good = files(state)
    copy = shutil.copytree(tmp_path / "backup", tmp_path / "copy")
    rot(state / "blobs" / model.files[0].sha256[:2] / model.files[0].sha256)
    shutil.rmtree(state / "models" / model.model_id)
    shutil.rmtree(state / "jobs" / job.job_id / "checkpoints" / "step-00000002" / "trainer")
    (state / "horizon.db").write_bytes(b"\0" * 8192)
    with pytest.raises(BadSetting, match="cannot be read as a database"):
        check_state_dir(state)
    with pytest.raises(BadSetting, match=r"is not empty \(.*--replace"):
        restore(copy, state)
    with pytest.raises(BadSetting, match="is damaged"):  # it has the same file
        restore(tmp_path / "backup", state, replace=True)
    result = restore(copy, state, replace=True)
    assert result.old_database is not None
    assert result.old_database.read_bytes() == b"\0" * 8192
    assert files(state) == good
    report = check_state_dir(state, full=True)
    assert [finding.level for finding in report.findings] == ["note"]  # the blob of the later dataset
    assert "1 files of" in report.findings[0].what
    async with make_daemon(state) as daemon:
        assert await daemon.parts.pairing.problem() is None
        with pytest.raises(NotFound):
            await daemon.services.datasets.get(ada, later.dataset_id)
        assert [c.step for c in await daemon.services.jobs.checkpoints(ada, job.job_id)] == [2, 3, 4]


async def test_a_restore_that_was_interrupted_is_not_started_on_and_continues(
    daemon: DaemonParts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await filled(daemon)
    make_backup(daemon.state_dir, tmp_path / "backup", checkpoints="all")
    with monkeypatch.context() as patch, pytest.raises(InvalidModel):
        patch.setattr("horizon_server.maintenance.restore.link_folder", failing)
        restore(tmp_path / "backup", tmp_path / "restored")
    assert not (tmp_path / "restored" / "horizon.db").exists()
    with (
        pytest.raises(BadSetting, match="was interrupted; run it again: horizond restore"),
        held_state_dir(tmp_path / "restored"),
    ):
        pass
    restore(tmp_path / "backup", tmp_path / "restored")
    assert not (tmp_path / "restored" / UNFINISHED_RESTORE_FILE).exists()
    assert files(tmp_path / "restored") == files(daemon.state_dir)


def failing(*_: object) -> None:
    raise InvalidModel("as a kill does")


async def test_a_restore_refuses_a_running_daemon_and_a_worker_that_outlived_one(
    daemon: DaemonParts, tmp_path: Path
) -> None:
    await filled(daemon)
    make_backup(daemon.state_dir, tmp_path / "backup")
    with held_state_dir(tmp_path / "busy"), pytest.raises(InUse, match="is held by another horizond"):
        restore(tmp_path / "backup", tmp_path / "busy", replace=True)
    alive = tmp_path / "busy" / "jobs" / "job_1" / "attempt-1" / "alive"
    alive.parent.mkdir(parents=True)
    with alive.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        with pytest.raises(InUse, match="a worker of job job_1 still runs"):
            restore(tmp_path / "backup", tmp_path / "busy", replace=True)
    restore(tmp_path / "backup", tmp_path / "busy", replace=True)


async def test_a_backup_of_a_newer_version_is_refused(daemon: DaemonParts, tmp_path: Path) -> None:
    await filled(daemon)
    make_backup(daemon.state_dir, tmp_path / "backup")
    file = tmp_path / "backup" / BACKUP_FILE
    document = json.loads(file.read_text())
    file.write_text(json.dumps(document | {"schema": "0099"}))
    with pytest.raises(BadSetting, match=r"made by a newer version of horizon-train .*update horizon-train"):
        restore(tmp_path / "backup", tmp_path / "restored")
    assert not (tmp_path / "restored").exists()


async def test_a_backup_of_an_older_version_is_migrated(
    daemon: DaemonParts, make_daemon: MakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Backups are made before an upgrade; the newer version restores them."""
    _, job = await filled(daemon)
    make_backup(daemon.state_dir, tmp_path / "backup")
    monkeypatch.setattr("horizon_server.db.database.MIGRATIONS", later_migrations(tmp_path))
    restore(tmp_path / "backup", tmp_path / "restored")
    async with make_daemon(tmp_path / "restored") as later:
        assert (await later.job(job.job_id)).job_state is JobState.SUCCEEDED
        assert await later.parts.pairing.problem() is None


_KILLED = """
import os, signal, sys
from pathlib import Path
from horizon_server.maintenance.backup import BACKUP_FILE, make_backup
from horizon_server.maintenance.check import check_backup, check_state_dir
from horizon_server.maintenance.restore import restore
from horizon_server.state_dir import UNFINISHED_RESTORE_FILE

what, source, target = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
left = 0

def killed_before(change):
    def changed(*arguments, **options):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return change(*arguments, **options)
    return changed

def is_killed_after(num_changes):
    global left
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -9
    left = num_changes
    for name in ("rename", "replace", "unlink", "link", "fsync"):
        setattr(os, name, killed_before(getattr(os, name)))
    {"backup": make_backup, "restore": restore}[what](source, target)
    os._exit(0)

num_changes = 0
while is_killed_after(num_changes):
    if what == "backup" and (target / BACKUP_FILE).exists():
        assert check_backup(target, full=True).findings == []
    if what == "restore" and (target / "horizon.db").exists() and not (target / UNFINISHED_RESTORE_FILE).exists():
        assert check_state_dir(target, full=True).findings == []  # killed when all was done
        break
    num_changes += 2
print(num_changes)
"""


def killed_again_and_again(what: str, source: Path, target: Path) -> int:
    """Back up or restore in processes that are killed before their first change of the disk, their third, and so on;
    return how often."""
    command = [sys.executable, "-c", _KILLED, what, str(source), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr
    return int(done.stdout) // 2


async def test_a_kill_at_any_moment_costs_nothing_but_time(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    state, backup, restored = tmp_path / "state", tmp_path / "backup", tmp_path / "restored"
    async with make_daemon(state) as daemon:
        await daemon.parts.pairing.problem()
        await filled(daemon)
    assert killed_again_and_again("backup", state, backup) > 5
    assert check_backup(backup, full=True).findings == []
    assert killed_again_and_again("restore", backup, restored) > 5
    assert check_state_dir(restored, full=True).findings == []


async def test_a_list_that_leads_out_of_the_state_folder_is_refused(daemon: DaemonParts, tmp_path: Path) -> None:
    await filled(daemon)
    make_backup(daemon.state_dir, tmp_path / "backup")
    file = tmp_path / "backup" / BACKUP_FILE
    document = json.loads(file.read_text())
    for path in ("../outside", "/outside"):
        files = document["files"] | {path: {"size_bytes": 1, "sha256": "ab" * 32}}
        file.write_text(json.dumps(document | {"files": files}))
        with pytest.raises(BadSetting, match="outside the state folder"):
            restore(tmp_path / "backup", tmp_path / "restored")


@pytest.mark.parametrize("text", ["[" * 200_000, "[]", "{", '{"schema": "0001", "files": 5}'])
def test_a_damaged_list_of_a_backup_is_a_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / BACKUP_FILE).write_text(text)
    with pytest.raises(BadSetting, match=r"cannot be read as the list of a backup.*another copy"):
        restore(tmp_path, tmp_path / "state")
    assert not (tmp_path / "state").exists()


async def test_backups_are_refused_where_they_cannot_be(daemon: DaemonParts, tmp_path: Path) -> None:
    await filled(daemon)
    with pytest.raises(BadSetting, match=r"is inside the state folder .*/state/backup, or one outside"):
        make_backup(daemon.state_dir, daemon.state_dir / "trash")
    with pytest.raises(BadSetting, match="does not exist; choose the daemon's state folder"):
        make_backup(tmp_path / "nothing", tmp_path / "backup")
    assert not (tmp_path / "backup").exists()
    with pytest.raises(NotFound, match=r"holds no complete backup: it has no backup\.json"):
        restore(tmp_path / "backup", tmp_path / "restored")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "dog.jpg").write_bytes(b"dog")
    for folder in (tmp_path / "photos", tmp_path):
        with pytest.raises(BadSetting, match="has contents and is no backup"):
            make_backup(daemon.state_dir, folder)
    with pytest.raises(BadSetting, match="cannot be used: Not a directory"):
        make_backup(daemon.state_dir, tmp_path / "photos" / "dog.jpg" / "backup")
    assert (tmp_path / "photos" / "dog.jpg").read_bytes() == b"dog"
    make_backup(daemon.state_dir, tmp_path / "backup")
    descriptor = os.open(tmp_path / "backup", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(InUse, match="another backup is being made"):
        make_backup(daemon.state_dir, tmp_path / "backup")
    os.close(descriptor)
    assert check_backup(tmp_path / "backup", full=True).is_good


async def test_a_folder_on_another_disk_is_refused_with_what_to_do(daemon: DaemonParts, tmp_path: Path) -> None:
    await filled(daemon)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        if Path(other).stat().st_dev == tmp_path.stat().st_dev:
            pytest.skip("temporary files are in /dev/shm here")
        make_backup(daemon.state_dir, tmp_path / "backup", checkpoints="all")
        # A copy of a backup stays as it is.
        copy = shutil.copytree(tmp_path / "backup", Path(other) / "copy")
        with pytest.raises(
            BadSetting, match=r"hard links.*same file system, such as .*/state/backup, and copy that with"
        ):
            make_backup(daemon.state_dir, copy)
        assert check_backup(copy, full=True).is_good
        restore(copy, tmp_path / "restored")
    assert files(tmp_path / "restored") == files(daemon.state_dir)


async def test_what_a_killed_backup_leaves_does_no_harm(daemon: DaemonParts, tmp_path: Path) -> None:
    await filled(daemon)
    target = tmp_path / "backup"
    make_backup(daemon.state_dir, target)
    (target / BACKUP_FILE).rename(target / "backup-unfinished")
    (target / "horizon.db-journal").write_bytes(b"half")
    with pytest.raises(NotFound, match="no complete backup"):
        restore(target, tmp_path / "restored")
    make_backup(daemon.state_dir, target)
    assert not (target / "horizon.db-journal").exists()
    assert check_backup(target, full=True).is_good


async def test_a_backup_is_private(daemon: DaemonParts, tmp_path: Path) -> None:
    await filled(daemon)
    (tmp_path / "backup").mkdir(mode=0o755)
    make_backup(daemon.state_dir, tmp_path / "backup")
    assert (tmp_path / "backup").stat().st_mode & 0o077 == 0


async def test_a_copy_without_hard_links_is_good_and_takes_more_space(daemon: DaemonParts, tmp_path: Path) -> None:
    ada, _ = await filled(daemon)
    model = await daemon.services.models.get_ready(ada, "tiny")
    copy = tmp_path / "copy"
    shutil.copytree(daemon.state_dir, copy)
    for full in (False, True):
        report = check_state_dir(copy, full=full)
        [finding] = report.findings
        assert (report.is_good, finding.level, finding.where) == (True, "note", "models")
        assert f"{len(model.files)} files" in finding.what
        assert "delete" not in finding.advice
    rot(copy / "models" / model.model_id / model.files[0].path)
    report = check_state_dir(copy, full=True)
    assert [one.what for one in report.findings if one.level == "error"] == [
        "of model tiny of ada has other bytes than when it was written"
    ]


async def test_a_check_finds_what_is_wrong(daemon: DaemonParts, tmp_path: Path) -> None:
    ada, job = await filled(daemon)
    assert check_state_dir(daemon.state_dir, full=True).findings == []
    model = await daemon.services.models.get_ready(ada, "tiny")
    rot(daemon.services.blobs.store.path(model.files[0].sha256))
    (daemon.state_dir / "models" / model.model_id / model.files[1].path).unlink()
    rot(daemon.state_dir / "jobs" / job.job_id / "checkpoints" / "step-00000003" / "model.safetensors")
    (daemon.state_dir / "jobs" / job.job_id / "checkpoints" / "step-00000002" / "config.json").write_bytes(b"short")
    with sqlite3.connect(daemon.state_dir / "horizon.db") as connection:
        connection.execute("DELETE FROM events WHERE sequence = 2")
        connection.execute("DELETE FROM blob_references WHERE resource_id LIKE 'dataset%'")
    connection.close()
    (daemon.state_dir / "state-id").write_text("other 1\n")
    by_size = {
        (finding.where.rpartition("/")[2], finding.what[:30]) for finding in check_state_dir(daemon.state_dir).findings
    }
    everything = {
        (finding.where.rpartition("/")[2], finding.what[:30])
        for finding in check_state_dir(daemon.state_dir, full=True).findings
    }
    assert by_size < everything
    assert len(everything) == len(by_size) + 2  # the two files with one other byte
    texts = "\n".join(
        f"{finding.where} {finding.what}" for finding in check_state_dir(daemon.state_dir, full=True).findings
    )
    for expected in (
        "has other bytes than when it was written",
        "of model tiny of ada is missing",
        "has 5 bytes, not 2",
        "without a reference",
        "events, but numbered",
        "the database does not belong to",
    ):
        assert expected in texts, expected
    assert all(finding.advice for finding in check_state_dir(daemon.state_dir).findings if finding.level == "error")
