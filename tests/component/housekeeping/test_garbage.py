"""What the sweep finds: caches, attempts, logs and journals; a dry run finds the same and removes nothing."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import subprocess
import threading
import time
from pathlib import Path

import pytest
from tests.component.housekeeping.conftest import ended_job
from tests.conftest import MakeDaemon
from tests.daemon_parts import DaemonParts
from tests.support.node import run_horizond

from horizon_server.main import sweep
from horizon_server.records.account import Principal
from horizon_server.records.housekeeping import Garbage
from horizon_server.records.job import JobState
from horizon_server.services.housekeeping.requests import answer_request

S = JobState
DAY = 86400.0


def age(path: Path, days: float) -> None:
    then = time.time() - days * DAY
    os.utime(path, (then, then))


def files_of(state: Path) -> set[str]:
    return {
        str(path.relative_to(state)) for path in state.rglob("*") if path.is_file() and "horizon.db" not in path.name
    }


async def swept(daemon: DaemonParts) -> list[tuple[str, str]]:
    """Sweep, after a dry run that finds the same and changes nothing; return what went."""
    before = files_of(daemon.state_dir) - {"state-id"}
    would, _ = await daemon.parts.sweep.run(dry_run=True)
    assert files_of(daemon.state_dir) - {"state-id"} == before
    found, problem = await daemon.parts.sweep.run()
    assert problem == ""
    assert found == would
    assert (await daemon.parts.sweep.run())[0] == [], "nothing is left to do"
    return [(one.kind, one.place) for one in found]


async def test_prepared_data_that_no_job_uses_goes_and_what_a_job_uses_stays(
    daemon: DaemonParts, ada: Principal
) -> None:
    digest = (await daemon.services.datasets.get(ada, "chats")).digest
    root = daemon.state_dir / "prepared" / digest
    for name in ("old", "new", "used", "old.tmp-x"):
        (root / name).mkdir(parents=True)
        (root / name / "tokens.safetensors").write_bytes(b"tokens")
        age(root / name, 0 if name == "new" else 31)
    running = await daemon.job_in(S.RUNNING, ada)
    daemon.write_log(running, b"")
    request = daemon.state_dir / "jobs" / running.job_id / "attempt-1" / "request.json"
    request.write_text(json.dumps({"prepared": str(root / "used"), "evaluation": None}))
    assert await swept(daemon) == [("prepared data", f"prepared/{digest}/old")]
    assert {path.name for path in root.iterdir()} == {"new", "used", "old.tmp-x"}


async def test_compiled_layers_that_no_job_uses_go_but_not_one_that_is_being_made(daemon: DaemonParts) -> None:
    root = daemon.state_dir / "compiled"
    root.mkdir()
    for name, days in (("old", 31.0), ("new", 1.0), ("locked", 31.0), ("refused", 31.0)):
        for suffix in (".json",) if name == "refused" else (".json", ".pt2", ".lock"):
            (root / f"{name}{suffix}").write_bytes(b"{}")
            age(root / f"{name}{suffix}", days)
    with (root / "locked.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        await daemon.parts.sweep.run()
    assert {path.stem for path in root.iterdir()} == {"new", "locked"}
    assert await swept(daemon) == [
        ("compiled layers", "compiled/locked.json"),
        ("compiled layers", "compiled/locked.pt2"),
    ]


async def test_what_is_known_of_compilations_goes_with_its_layers(daemon: DaemonParts) -> None:
    root = daemon.state_dir / "compiled" / "made"
    root.mkdir(parents=True)
    for name, days in (("old", 31.0), ("new", 1.0)):
        (root / f"{name}.json").write_bytes(b"{}")
        age(root / f"{name}.json", days)
    await daemon.parts.sweep.run()
    assert [path.name for path in root.iterdir()] == ["new.json"]


async def test_unfinished_references_stay_as_long_as_the_job_may_continue(daemon: DaemonParts, ada: Principal) -> None:
    def left() -> set[str]:
        return {path.parent.name for path in (daemon.state_dir / "jobs").glob("*/references")}

    jobs = {}
    for state in (S.RUNNING, S.QUEUED, S.FAILED, S.CANCELLED, S.SUCCEEDED):
        jobs[state] = (await daemon.job_in(state, ada, name=state.lower())).job_id
        folder = daemon.state_dir / "jobs" / jobs[state] / "references"
        folder.mkdir(parents=True)
        (folder / "0123").write_bytes(b"numbers")
    removed = {("unfinished references", f"jobs/{jobs[state]}/references") for state in (S.CANCELLED, S.SUCCEEDED)}
    assert set(await swept(daemon)) >= removed
    assert left() == {jobs[state] for state in (S.RUNNING, S.QUEUED, S.FAILED)}
    await daemon.services.jobs.finish_deletion(jobs[S.FAILED])
    assert left() == {jobs[state] for state in (S.RUNNING, S.QUEUED)}


async def test_of_old_attempts_the_last_three_and_the_logs_of_failed_ones_stay(
    daemon: DaemonParts, ada: Principal
) -> None:
    job = await daemon.job_in(S.RUNNING, ada)
    await daemon.parts.journal.move(job, S.FAILED, attempt=1)
    for number in range(1, 7):
        folder = daemon.state_dir / "jobs" / job.job_id / f"attempt-{number}"
        folder.mkdir(parents=True)
        for name in ("worker.log", "request.json", "trace.json"):
            (folder / name).write_bytes(b"x")
    await daemon.parts.journal.store.set(job.job_id, attempt=6)
    await swept(daemon)
    folders = {number: daemon.state_dir / "jobs" / job.job_id / f"attempt-{number}" for number in range(1, 7)}
    left = {number: sorted(path.name for path in folder.glob("*")) for number, folder in folders.items()}
    whole = ["request.json", "trace.json", "worker.log"]
    assert left == {1: ["worker.log"], 2: [], 3: [], 4: whole, 5: whole, 6: whole}


async def test_the_journal_of_an_ended_attempt_goes_and_that_of_a_living_one_stays(
    daemon: DaemonParts, ada: Principal
) -> None:
    done, alive = await ended_job(daemon, ada, "done"), await ended_job(daemon, ada, "alive")
    journals = []
    for job in (done, alive):
        daemon.write_log(job, b"")
        folder = daemon.state_dir / "jobs" / job.job_id / "attempt-1"
        (folder / "journal.jsonl").write_bytes(b"{}")
        (folder / "alive").touch()
        journals.append(folder / "journal.jsonl")
    with (journals[1].parent / "alive").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        await daemon.parts.sweep.run()
    assert [path.exists() for path in journals] == [False, True]


async def test_of_a_long_log_the_ends_stay(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    limit = 2**20
    async with make_daemon(tmp_path / "state", queue=False, prepared=None, max_log_bytes=limit) as daemon:
        ada = await daemon.user("ada")
        await daemon.dataset(ada)
        job = await ended_job(daemon, ada)
        lines = b"".join(b"line %d\n" % number for number in range(300_000))
        daemon.write_log(job, b"first\n" + lines + b"last\n")
        assert await swept(daemon) == [("logs", f"jobs/{job.job_id}/attempt-1/worker.log")]
        log = (daemon.state_dir / "jobs" / job.job_id / "attempt-1" / "worker.log").read_bytes()
        assert len(log) <= limit + 100
        assert log.startswith(b"first\nline 0\n")
        assert log.endswith(b"line 299999\nlast\n")
        assert b" bytes were removed, as the log was too long" in log


async def test_files_of_a_job_that_the_database_does_not_know_go_to_the_trash_and_come_back(
    daemon: DaemonParts, ada: Principal
) -> None:
    job = await ended_job(daemon, ada)
    folder = daemon.state_dir / "jobs" / job.job_id
    unknown = daemon.state_dir / "jobs" / "job_unknown"
    folder.rename(unknown)
    assert await swept(daemon) == [("jobs", "jobs/job_unknown")]
    [kept] = (daemon.state_dir / "trash").glob("*/jobs/job_unknown")
    kept.rename(kept.with_name(job.job_id))
    await daemon.parts.sweep.run()
    assert [record.step for record in await daemon.services.jobs.checkpoints(ada, job.job_id)] == [5]


async def test_what_cut_deletions_left_goes(daemon: DaemonParts, ada: Principal) -> None:
    job = await ended_job(daemon, ada)
    checkpoints = daemon.state_dir / "jobs" / job.job_id / "checkpoints"
    (checkpoints / ".deleted-step-00000001").mkdir()
    (daemon.state_dir / "jobs" / ".deleted-job_x").mkdir()
    assert {kind for kind, _ in await swept(daemon)} == {"deleted"}
    assert [path.name for path in checkpoints.iterdir()] == ["step-00000005"]
    assert [path.name for path in (daemon.state_dir / "jobs").iterdir()] == [job.job_id]


async def test_a_part_that_cannot_be_swept_keeps_no_other_from_it(
    daemon: DaemonParts, ada: Principal, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise OSError("a disk in trouble")

    await daemon.upload("ada", b"given up")
    for entry in (daemon.state_dir / "uploads").glob("*/*"):
        age(entry, 30)
    monkeypatch.setattr("horizon_server.services.housekeeping.caches.unused_tokens", broken)
    await sweep(daemon.parts)
    assert len(list((daemon.state_dir / "trash").glob("*/blobs/*/*"))) == 1


async def test_gc_asks_a_running_daemon(daemon: DaemonParts, ada: Principal) -> None:
    await daemon.upload("ada", b"given up")
    for entry in (daemon.state_dir / "uploads").glob("*/*"):
        age(entry, 30)
    answers: list[tuple[list[Garbage], str]] = []

    def ask(dry_run: bool) -> None:
        from horizon_server.services.housekeeping.requests import ask_daemon

        answers.append(ask_daemon(daemon.state_dir, dry_run=dry_run, timeout_s=240))

    for dry_run in (True, False):
        asking = threading.Thread(target=ask, args=(dry_run,))
        asking.start()
        async with asyncio.timeout(240):
            while asking.is_alive():  # as the daemon does
                await answer_request(daemon.state_dir, daemon.parts.sweep)
                await asyncio.sleep(0.01)
        assert len(list((daemon.state_dir / "trash").glob("*/blobs/*/*"))) == (0 if dry_run else 1)
    assert answers[0] == answers[1]
    assert {one.kind for one in answers[0][0]} == {"uploads", "contents"}
    assert not list(daemon.state_dir.glob("gc-*"))


async def test_gc_works_without_a_daemon(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    state = tmp_path / "state"
    async with make_daemon(state, queue=False, prepared=None) as daemon:
        await daemon.user("ada")
        await daemon.parts.sweep.run()
        await daemon.upload("ada", b"given up")
    for entry in (state / "uploads").glob("*/*"):
        age(entry, 30)

    async def gc(*options: str) -> subprocess.CompletedProcess[str]:
        return await asyncio.to_thread(run_horizond, "gc", *options, "--state-dir", str(state), timeout_s=120)

    would = await gc("--dry-run")
    assert would.returncode == 0, would.stderr
    assert "contents" in would.stdout
    assert "2 would be removed, 0.0 MiB in all" in would.stderr
    done = await gc("-o", "json")
    assert done.returncode == 0, done.stderr
    assert {one["kind"] for one in json.loads(done.stdout)} == {"uploads", "contents"}
    assert len(list((state / "trash").glob("*/blobs/*/*"))) == 1
    (state / "state-id").write_text("another 1\n")
    refused = await gc()
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "nothing is removed: the database does not belong to" in refused.stderr
