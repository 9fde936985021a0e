"""Backups of a daemon that runs, put back into empty and into damaged state folders, and what `horizond check` finds."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
from tests.conftest import MakeDaemon
from tests.daemon_parts import DaemonParts, chat_rows
from tests.support.later_schemas import NEWEST, later_migrations

from horizon_server.errors import BadSetting, DiskFull, InUse, NotFound
from horizon_server.maintenance.backup import BackupResult, make_backup
from horizon_server.maintenance.backup_folder import DATABASE_ENTRY, BackupFolder, Entry
from horizon_server.maintenance.check import check_backups, check_state_dir
from horizon_server.maintenance.restore import restore
from horizon_server.records.account import Principal
from horizon_server.records.job import JobRecord, JobState
from horizon_server.state_dir import UNFINISHED_RESTORE_FILE, held_state_dir


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
        daemon.write_checkpoint(job, step, {"model.safetensors": bytes([step]) * 5000, "config.json": b"{}"})
    daemon.write_log(job, b"a line\n")
    (daemon.state_dir / "tls").mkdir()
    (daemon.state_dir / "tls" / "ca.pem").write_bytes(b"certificate")
    return ada, job


def files(root: Path, *, without: tuple[str, ...] = ()) -> dict[str, bytes]:
    """Everything that a backup has of a state folder, but the database."""
    found = {str(path.relative_to(root)): path for path in root.rglob("*") if path.is_file()}
    kept = ("blobs/", "models/", "jobs/", "tls/")
    return {name: path.read_bytes() for name, path in found.items() if name.startswith(kept) and name not in without}


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


async def test_only_what_has_changed_is_copied_again(daemon: DaemonParts, tmp_path: Path) -> None:
    ada, job = await filled(daemon)
    first = make_backup(daemon.state_dir, tmp_path / "backup")
    assert first.num_copied > 5
    again = make_backup(daemon.state_dir, tmp_path / "backup")
    # The database was not written to either.
    assert again.num_copied == 0
    assert unchanged(again) == unchanged(first)
    daemon.write_log(job, b"a line\nanother one\n")
    await daemon.dataset(ada, "more", chat_rows(3))
    third = make_backup(daemon.state_dir, tmp_path / "backup")
    assert third.num_copied == 3  # the log, the dataset's file, the database
    assert len(BackupFolder(tmp_path / "backup").names()) == 3


def unchanged(result: BackupResult) -> list[Entry]:
    return [entry for entry in result.backup.entries if entry.path != DATABASE_ENTRY]


async def test_the_checkpoints_of_a_backup_are_chosen(daemon: DaemonParts, tmp_path: Path) -> None:
    _, job = await filled(daemon)
    for checkpoints, steps in (("none", set()), ("newest", {3}), ("all", {2, 3})):
        backup = make_backup(daemon.state_dir, tmp_path / checkpoints, checkpoints=checkpoints).backup
        found = {entry.path.split("/")[3] for entry in backup.entries if entry.path.startswith(f"jobs/{job.job_id}/ch")}
        assert found == {f"step-{step:08d}" for step in steps}


async def test_old_backups_go_with_what_only_they_need(daemon: DaemonParts, tmp_path: Path) -> None:
    ada, _ = await filled(daemon)
    record = await daemon.dataset(ada, "more", chat_rows(3))
    folder = BackupFolder(tmp_path / "backup")
    make_backup(daemon.state_dir, folder.path)
    await daemon.services.datasets.delete(ada, record.dataset_id)
    sha256 = record.files[0].sha256
    make_backup(daemon.state_dir, folder.path, keep=2)
    assert folder.content(sha256).exists()
    result = make_backup(daemon.state_dir, folder.path, keep=2)
    assert result.removed_bytes > 0
    assert not folder.content(sha256).exists()
    assert len(folder.names()) == 2
    assert check_backups(folder.path, full=True).is_good


async def test_hard_links_take_no_space(daemon: DaemonParts, tmp_path: Path) -> None:
    _, job = await filled(daemon)
    make_backup(daemon.state_dir, tmp_path / "backup", hard_links=True)
    folder = BackupFolder(tmp_path / "backup")
    checkpoint = daemon.state_dir / "jobs" / job.job_id / "checkpoints" / "step-00000003" / "model.safetensors"
    [entry] = [entry for entry in folder.read().entries if entry.path.endswith("step-00000003/model.safetensors")]
    assert folder.content(entry.sha256).samefile(checkpoint)
    # What may still change is a copy.
    [log] = [entry for entry in folder.read().entries if entry.path.endswith("worker.log")]
    assert folder.content(log.sha256).stat().st_nlink == 1
    assert check_backups(folder.path, full=True).is_good


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
    for _ in range(4):
        result = await asyncio.to_thread(make_backup, daemon.state_dir, tmp_path / "backup")
        assert result.backup.problems == ()
    over.set()
    assert await changing > 0
    for number, name in enumerate(BackupFolder(tmp_path / "backup").names()):
        restore(tmp_path / "backup", tmp_path / f"restored{number}", name=name)
        report = check_state_dir(tmp_path / f"restored{number}", full=True)
        assert report.findings == []


async def test_a_lost_file_is_reported_and_the_rest_backed_up(daemon: DaemonParts, tmp_path: Path) -> None:
    ada, _ = await filled(daemon)
    record = await daemon.dataset(ada, "more", chat_rows(3))
    daemon.services.blobs.store.path(record.files[0].sha256).unlink()
    result = make_backup(daemon.state_dir, tmp_path / "backup")
    [problem] = result.backup.problems
    assert problem.endswith("of dataset more of ada: is missing")
    report = check_backups(tmp_path / "backup", full=True)
    assert report.is_good
    assert [finding.level for finding in report.findings] == ["note"]
    restore(tmp_path / "backup", tmp_path / "restored")
    [finding] = check_state_dir(tmp_path / "restored").findings
    assert (finding.level, finding.what) == ("error", "of dataset more of ada is missing")


async def test_a_damaged_file_never_becomes_a_backup(daemon: DaemonParts, tmp_path: Path) -> None:
    ada, job = await filled(daemon)
    record = await daemon.dataset(ada, "more", chat_rows(3))
    rot(daemon.services.blobs.store.path(record.files[0].sha256))
    rot(daemon.state_dir / "jobs" / job.job_id / "checkpoints" / "step-00000003" / "model.safetensors")
    result = make_backup(daemon.state_dir, tmp_path / "backup")
    assert len(result.backup.problems) == 2
    assert not any("step-00000003" in entry.path for entry in result.backup.entries)
    assert check_backups(tmp_path / "backup", full=True).is_good


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
        daemon.write_checkpoint(job, 4, {"model.safetensors": b"4" * 100})
        for _ in range(3):
            await daemon.parts.pairing.problem()
        model = await daemon.services.models.get_ready(ada, "tiny")
    good = files(state)
    rot(state / "blobs" / model.files[0].sha256[:2] / model.files[0].sha256)
    shutil.rmtree(state / "models" / model.model_id)
    shutil.rmtree(state / "jobs" / job.job_id / "checkpoints" / "step-00000002" / "trainer")
    (state / "horizon.db").write_bytes(b"\0" * 8192)
    with pytest.raises(BadSetting, match="cannot be read as a database"):
        check_state_dir(state)
    with pytest.raises(BadSetting, match=r"is not empty \(.*--replace"):
        restore(tmp_path / "backup", state)
    result = restore(tmp_path / "backup", state, replace=True)
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
    daemon: DaemonParts, tmp_path: Path
) -> None:
    await filled(daemon)
    make_backup(daemon.state_dir, tmp_path / "backup", checkpoints="all")
    folder = BackupFolder(tmp_path / "backup")
    [entry] = [entry for entry in folder.read().entries if entry.path.endswith("step-00000003/config.json")]
    content = folder.content(entry.sha256).read_bytes()
    folder.content(entry.sha256).unlink()
    with pytest.raises(BadSetting, match=r"lacks the content of jobs/.*use another backup"):
        restore(folder.path, tmp_path / "restored")
    assert not (tmp_path / "restored" / "horizon.db").exists()
    with (
        pytest.raises(BadSetting, match="was interrupted; run it again: horizond restore"),
        held_state_dir(tmp_path / "restored"),
    ):
        pass
    folder.content(entry.sha256).write_bytes(content)
    restore(folder.path, tmp_path / "restored")
    assert not (tmp_path / "restored" / UNFINISHED_RESTORE_FILE).exists()
    assert files(tmp_path / "restored") == files(daemon.state_dir)


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


async def test_a_damaged_backup_is_found_and_never_restored(daemon: DaemonParts, tmp_path: Path) -> None:
    await filled(daemon)
    make_backup(daemon.state_dir, tmp_path / "backup")
    folder = BackupFolder(tmp_path / "backup")
    [entry] = [entry for entry in folder.read().entries if entry.path.endswith("step-00000003/model.safetensors")]
    rot(folder.content(entry.sha256))
    assert check_backups(folder.path).is_good
    report = check_backups(folder.path, full=True)
    assert [finding.where.partition(": ")[2] for finding in report.findings] == [entry.path]
    with pytest.raises(BadSetting, match="has a damaged content of jobs/"):
        restore(folder.path, tmp_path / "restored")


async def test_a_backup_of_a_newer_version_is_refused(daemon: DaemonParts, tmp_path: Path) -> None:
    await filled(daemon)
    name = make_backup(daemon.state_dir, tmp_path / "backup").backup.name
    file = tmp_path / "backup" / f"{name}.json"
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
    assert restore(tmp_path / "backup", tmp_path / "restored").backup.schema == NEWEST
    async with make_daemon(tmp_path / "restored") as later:
        assert (await later.job(job.job_id)).job_state is JobState.SUCCEEDED
        assert await later.parts.pairing.problem() is None


_KILLED = """
import os, signal, sys
from pathlib import Path
from horizon_server.maintenance.backup import make_backup
from horizon_server.maintenance.backup_folder import BackupFolder
from horizon_server.maintenance.check import check_backups
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
    if what == "backup" and BackupFolder(target).names():
        assert check_backups(target, full=True).findings == []
    if what == "restore" and (target / "horizon.db").exists():
        assert (target / UNFINISHED_RESTORE_FILE).exists()
    num_changes += 2
print(num_changes)
"""


def killed_again_and_again(what: str, source: Path, target: Path) -> int:
    """Back up or restore in processes that are killed before their first change of the disk, their third, and so on; return how often."""
    command = [sys.executable, "-c", _KILLED, what, str(source), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return int(done.stdout) // 2


async def test_a_kill_at_any_moment_costs_nothing_but_time(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    state, backup, restored = tmp_path / "state", tmp_path / "backup", tmp_path / "restored"
    async with make_daemon(state) as daemon:
        await daemon.parts.pairing.problem()
        await filled(daemon)
    assert killed_again_and_again("backup", state, backup) > 5
    assert check_backups(backup, full=True).findings == []
    assert killed_again_and_again("restore", backup, restored) > 5
    assert check_state_dir(restored, full=True).findings == []


async def test_a_list_that_leads_out_of_the_state_folder_is_refused(daemon: DaemonParts, tmp_path: Path) -> None:
    await filled(daemon)
    name = make_backup(daemon.state_dir, tmp_path / "backup").backup.name
    file = tmp_path / "backup" / f"{name}.json"
    document = json.loads(file.read_text())
    document["files"][0]["path"] = "../outside"
    file.write_text(json.dumps(document))
    with pytest.raises(BadSetting, match="outside the state folder"):
        restore(tmp_path / "backup", tmp_path / "restored")
    file.write_text("{")
    with pytest.raises(BadSetting, match=r"cannot be read .*use another backup"):
        restore(tmp_path / "backup", tmp_path / "restored")


async def test_backups_are_refused_where_they_cannot_be(daemon: DaemonParts, tmp_path: Path) -> None:
    await filled(daemon)
    with pytest.raises(BadSetting, match="is inside the state folder"):
        make_backup(daemon.state_dir, daemon.state_dir / "backup")
    with pytest.raises(BadSetting, match="does not exist; choose the daemon's state folder"):
        make_backup(tmp_path / "nothing", tmp_path / "backup")
    assert not (tmp_path / "backup").exists()
    folder = BackupFolder(tmp_path / "backup")
    with folder.held(), pytest.raises(InUse, match="another backup is being made"):
        make_backup(daemon.state_dir, folder.path)
    # One that no disk has room for.
    files = json.dumps([{"path": "a.jsonl", "sha256": "ab" * 32, "size_bytes": 10**18}])
    with sqlite3.connect(daemon.state_dir / "horizon.db") as connection:
        connection.execute("UPDATE datasets SET files = ?", [files])
    connection.close()
    with pytest.raises(DiskFull, match=r"needs .* free; .*--with-checkpoints"):
        make_backup(daemon.state_dir, folder.path)
    assert folder.names() == []


async def test_what_a_killed_backup_leaves_does_no_harm(daemon: DaemonParts, tmp_path: Path) -> None:
    await filled(daemon)
    first = make_backup(daemon.state_dir, tmp_path / "backup")
    (tmp_path / "backup" / first.backup.name).with_suffix(".json").unlink()
    leftovers = [tmp_path / "backup" / "contents" / ".17.partial", tmp_path / "backup" / ".database.partial-journal"]
    leftovers.append(tmp_path / "backup" / ".database.partial")
    for leftover in leftovers:
        leftover.write_bytes(b"half")
    again = make_backup(daemon.state_dir, tmp_path / "backup")
    assert again.num_copied == 0
    assert not any(leftover.exists() for leftover in leftovers)
    assert check_backups(tmp_path / "backup", full=True).is_good


async def test_the_first_backup_of_all_is_private(daemon: DaemonParts, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("text", ["[" * 200_000, "[]", "{", '{"format_version": 1, "files": 5}'])
def test_a_damaged_list_of_a_backup_is_a_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "20260101T000000Z.json").write_text(text)
    with pytest.raises(BadSetting, match=r"cannot be read.*use another backup"):
        restore(tmp_path, tmp_path / "state")
    assert not (tmp_path / "state").exists()


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
        "has other bytes than when it was written", "of model tiny of ada is missing", "has 5 bytes, not 2", "without a reference",
        "events, but numbered", "the database does not belong to",
    ):  # fmt: skip
        assert expected in texts, expected
    assert all(finding.advice for finding in check_state_dir(daemon.state_dir).findings if finding.level == "error")
