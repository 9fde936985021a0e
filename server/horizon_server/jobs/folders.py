"""A job's files below the state folder: where they are, which checkpoints are complete, and a log that may still
grow."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import json
import os
import re
import shutil
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from horizon_server.errors import HorizonError, InUse, InvalidModel, NotFound
from horizon_server.records.job import CheckpointFile, CheckpointRecord, JobRecord
from horizon_server.store.checkpoint_parts import MERGED_FOLDER, NEW_MERGED_FOLDER
from horizon_server.store.manifest import (
    MANIFEST_FILE,
    TRAINER_FOLDER,
    FileRecord,
    Manifest,
    is_complete,
    read_manifest,
    write_manifest,
)
from horizon_server.worker_link.protocol import REQUEST_FILE

LOG_PIECE_BYTES = 64 * 1024
_LOG_POLL_S = 0.3
UNFINISHED_REFERENCES = "references"
"""The folder of a job with what its worker has computed of the reference log-probabilities before it was stopped."""
_DELETED = ".deleted-"
_STEP_FOLDER = re.compile(r"step-(\d{8,})")
_LOOKS = 5


class JobFolders:
    """The folders of all jobs. Knows the layout on disk and nothing of the jobs themselves."""

    def __init__(self, state_dir: Path, *, min_free_bytes: int | None = None) -> None:
        """`min_free_bytes` are left free on the disk by checkpoints; None takes the default for the disk."""
        self.state_dir, self.min_free_bytes = state_dir, min_free_bytes
        self._jobs = state_dir / "jobs"
        self.compiled = state_dir / "compiled"
        """The library of compiled layers, which all jobs share."""
        self.digests = state_dir / "digests"
        """The book of the digests of models (`store.base_digest.DigestBook`)."""
        self.prepared = state_dir / "prepared"
        """Prepared data, which all jobs share."""

    def log(self, job_id: str, attempt: int) -> Path:
        """Return where an attempt logs, whether or not it has begun; its other files are next to it."""
        return self._jobs / job_id / f"attempt-{attempt}" / "worker.log"

    def device_lock(self, device: str) -> Path:
        """Return the file that the worker which uses a device locks."""
        folder = self.state_dir / "devices"
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder / f"{device}.lock"

    def resident_since_s(self, job: JobRecord) -> float:
        """Return about since when a job has been in memory that an earlier daemon began (Unix seconds)."""
        if job.queued_s <= job.started_s:  # it left the queue once
            return job.started_s
        # The request of the first worker since then.
        times = []
        for attempt in self.attempts(job.job_id):
            with contextlib.suppress(OSError):
                times.append((self.log(job.job_id, attempt).parent / REQUEST_FILE).stat().st_mtime)
        return min((time_s for time_s in times if time_s >= job.queued_s), default=time.time())

    def checkpoints(self, job_id: str) -> CheckpointFolder:
        """Return a job's checkpoints, whether or not there are any."""
        return CheckpointFolder(self._jobs / job_id / "checkpoints", job_id)

    def start(self, job_id: str) -> Path:
        """Return the model folder that a job with `init_from` starts from, whether or not it exists."""
        return self._jobs / job_id / "start"

    def calls(self, job_id: str) -> Path:
        """Return where the calls of a session are, whether or not it exists."""
        return self._jobs / job_id / "calls"

    def named(self, job: JobRecord, error: HorizonError) -> HorizonError:
        """Return an error about a job with the names of its inputs and checkpoints that its owner knows."""
        checkpoints = self.checkpoints(job.job_id)
        names = {
            self.state_dir / "models" / job.model_id: f"the model {job.spec.model}",
            self.start(job.job_id): f"init_from ({job.spec.init_from})",
            checkpoints.path: "the job's checkpoints",
        }
        for folder in () if error.file is None else (error.file, *error.file.parents):
            if folder.parent == checkpoints.path and _STEP_FOLDER.fullmatch(folder.name):
                names[folder] = f"the checkpoint of step {checkpoints.step_of(folder)}"
        return error.with_names(names)

    def unfinished_references(self, job_id: str) -> Path:
        """Return where a job's unfinished reference log-probabilities are, whether or not there are any."""
        return self._jobs / job_id / UNFINISHED_REFERENCES

    def of_job(self, job_id: str) -> Path:
        """Return where all files of a job are."""
        return self._jobs / job_id

    def ids(self) -> list[str]:
        """Return the ids of all jobs that have files. Blocking."""
        return [path.name for path in self._jobs.iterdir() if path.name[0] != "."] if self._jobs.is_dir() else []

    def attempts(self, job_id: str) -> list[int]:
        """Return the numbers of the attempts that have files, oldest first. Blocking."""
        names = (path.name.removeprefix("attempt-") for path in self.of_job(job_id).glob("attempt-*"))
        return sorted(int(name) for name in names if name.isdecimal())

    def remove_job(self, job_id: str) -> None:
        """Remove all files of a job whose attempts have ended. Blocking. Raises InUse while one of its checkpoints is
        being downloaded."""
        folder, gone = self.of_job(job_id), self._jobs / f"{_DELETED}{job_id}"
        with contextlib.ExitStack() as locks:
            for step in folder.glob("checkpoints/step-*"):
                locks.enter_context(_locked(step, fcntl.LOCK_EX))
            if folder.is_dir():
                # First its name, so that a cut leaves nothing that looks whole.
                folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)

    def leftovers(self) -> list[Path]:
        """Return what deletions have left that were cut short. Blocking."""
        return [*self._jobs.glob(f"{_DELETED}*"), *self._jobs.glob(f"*/checkpoints/{_DELETED}*")]

    def with_merges(self) -> list[Path]:
        """Return the checkpoints that hold a merged model, or what is left of one. Blocking."""
        return sorted({path.parent for path in self._jobs.glob(f"[!.]*/checkpoints/step-*/*{MERGED_FOLDER}*")})

    def checkpoint_bytes(self, *, kept_only: bool = False) -> dict[str, int]:
        """Return the bytes of the checkpoints of every job that has any, by job id; or of those alone that are kept.
        Blocking."""
        found: dict[str, int] = {}
        for folder in self._jobs.glob("[!.]*/checkpoints/step-*"):
            with contextlib.suppress(InvalidModel, OSError):  # not complete, or just deleted
                written_ns = (folder / MANIFEST_FILE).stat().st_mtime_ns
                job_id = folder.parent.parent.name
                size_bytes, is_kept, _ = _manifest_facts(folder, written_ns)
                if is_kept or not kept_only:
                    found[job_id] = found.get(job_id, 0) + size_bytes
        return found


@functools.lru_cache(maxsize=65536)
def _manifest_facts(folder: Path, _written_ns: int) -> tuple[int, bool, tuple[str, ...]]:
    # A checkpoint never changes, and the manifests of all of them take long to read.
    manifest = read_manifest(folder)
    return manifest.size_bytes, manifest.kept, manifest.names


@dataclass(frozen=True, kw_only=True)
class NamedCheckpoint:
    """What is told of a checkpoint without its files."""

    step: int
    size_bytes: int
    created_s: float
    names: tuple[str, ...]


class CheckpointFolder:
    """One job's checkpoints below `path`. A partially written or deleted one has another name and is never seen."""

    def __init__(self, path: Path, job_id: str) -> None:
        self.path = path
        self._job_id = job_id

    def of_step(self, step: int) -> Path:
        """Return the folder of a step's checkpoint, whether or not it exists."""
        return self.path / f"step-{step:08d}"

    @staticmethod
    def step_of(folder: Path) -> int:
        """Return the step of a checkpoint's folder."""
        match = _STEP_FOLDER.fullmatch(folder.name)
        assert match is not None, folder
        return int(match.group(1))

    def all(self) -> list[CheckpointRecord]:
        """Return the complete checkpoints, oldest first. Without evaluations none is the best."""
        found = [self._record(step) for step in self.steps()]
        if not found:
            return []
        judged = [(cost, record) for record in found if (cost := self._cost(record)) is not None]
        best = min(judged, key=itemgetter(0))[1] if judged else None
        return [replace(record, last=record is found[-1], best=record is best) for record in found]

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, oldest first."""
        if not self.path.is_dir():
            return []
        # Again where all that were listed are gone: a newer one was there before the last of them was deleted.
        for _ in range(_LOOKS):
            found = [(match, entry) for entry in self.path.iterdir() if (match := _STEP_FOLDER.fullmatch(entry.name))]
            steps = sorted(int(match.group(1)) for match, entry in found if is_complete(entry))
            if steps or not found:
                return steps
        return []

    def newest(self) -> Path | None:
        """Return the folder to resume from."""
        steps = self.steps()
        return self.of_step(steps[-1]) if steps else None

    def file(self, step: int, path: str) -> Path:
        """Return one file of a checkpoint; only those that its manifest lists can be reached. Raises NotFound."""
        self._require(step)
        if path not in read_manifest(self.of_step(step)).files:
            raise NotFound(
                f"the checkpoint of step {step} of job {self._job_id} has no file {path!r:.200}; list it to see its "
                "files"
            )
        return self.of_step(step) / path

    @contextmanager
    def reading(self, step: int) -> Iterator[None]:
        """Keep every process from removing a checkpoint until the end of the block. Raises NotFound when there is no
        such one."""
        self._require(step)
        with contextlib.ExitStack() as lock:
            try:
                lock.enter_context(_locked(self.of_step(step), fcntl.LOCK_SH))
            except InUse as error:
                raise NotFound(f"the checkpoint of step {step} of job {self._job_id} is being deleted") from error
            yield

    def manifest(self, step: int) -> Manifest:
        """Return what a checkpoint holds. Blocking. Raises NotFound."""
        self._require(step)
        return read_manifest(self.of_step(step))

    def link_part(self, step: int, part: str, target: Path) -> None:
        """Make `target` a folder of the files of a checkpoint whose names begin with `part`, without those of other
        parts. Blocking.

        The files are hard links, so that they take no space and stay when the checkpoint is deleted; where the file
        system has no links they are copies. Raises NotFound.
        """
        others = [f"{folder}/" for folder in (TRAINER_FOLDER, MERGED_FOLDER) if not part.startswith(f"{folder}/")]
        with self.reading(step):
            folder, manifest = self.of_step(step), self.manifest(step)
            for name in manifest.files:
                if name.startswith(part) and not name.startswith(tuple(others)):
                    file = target / name.removeprefix(part)
                    file.parent.mkdir(parents=True, exist_ok=True)
                    link_or_copy(folder / name, file)

    def add_merged(self, step: int, files: Mapping[str, FileRecord]) -> None:
        """Make the files of the folder merged/ part of a checkpoint. Blocking."""
        folder = self.of_step(step)
        manifest = read_manifest(folder)
        added = {f"{MERGED_FOLDER}/{name}": record for name, record in files.items()}
        self._write_manifest(folder, replace(manifest, files=dict(sorted({**manifest.files, **added}.items()))))

    def remove_merged(self, step: int) -> None:
        """Remove the folder merged/ from a checkpoint. Blocking. Raises InUse while it is being downloaded."""
        folder = self.of_step(step)
        with _locked(folder, fcntl.LOCK_EX):
            self._unlist_merged(folder)

    def replace_merged(self, step: int, files: Mapping[str, FileRecord]) -> None:
        """Put the folder merged.new/ in the place of merged/. Blocking. Raises InUse while the checkpoint is being
        downloaded.

        A cut leaves the old model, the new one, or a checkpoint without either.
        """
        folder = self.of_step(step)
        with _locked(folder, fcntl.LOCK_EX):
            self._unlist_merged(folder)
            (folder / NEW_MERGED_FOLDER).rename(folder / MERGED_FOLDER)
            self.add_merged(step, files)

    def _unlist_merged(self, folder: Path) -> None:
        manifest = read_manifest(folder)
        kept = {n: record for n, record in manifest.files.items() if not n.startswith(f"{MERGED_FOLDER}/")}
        if len(kept) < len(manifest.files):
            self._write_manifest(folder, replace(manifest, files=kept))
        shutil.rmtree(folder / MERGED_FOLDER, ignore_errors=True)

    def set_kept(self, step: int, *, kept: bool, name: str = "") -> CheckpointRecord:
        """Keep a checkpoint from being deleted automatically, or end that, and give it a name more; return it as it is
        now. Blocking. Raises NotFound."""
        with self.reading(step), self._names_locked():
            folder = self.of_step(step)
            manifest = read_manifest(folder)
            names = tuple(dict.fromkeys([*manifest.names, *([name] if name else [])]))
            self._write_manifest(folder, replace(manifest, kept=kept, names=names))
        return next(record for record in self.all() if record.step == step)

    def take_name(self, step: int, name: str) -> tuple[str, ...]:
        """Take a name away from a checkpoint, and return those that are left; without any it is not kept any more.
        Blocking. Raises NotFound."""
        with self.reading(step), self._names_locked():
            folder = self.of_step(step)
            manifest = read_manifest(folder)
            names = tuple(one for one in manifest.names if one != name)
            if names != manifest.names:
                self._write_manifest(folder, replace(manifest, kept=manifest.kept and bool(names), names=names))
        return names

    def newest_named(self, most: int) -> list[NamedCheckpoint]:
        """Return what is known of the newest checkpoints, newest first. Blocking."""
        found = []
        for step in reversed(self.steps()[-most:]):
            with contextlib.suppress(InvalidModel, OSError):  # just deleted
                written = (self.of_step(step) / MANIFEST_FILE).stat()
                size_bytes, _, names = _manifest_facts(self.of_step(step), written.st_mtime_ns)
                found.append(NamedCheckpoint(step=step, size_bytes=size_bytes, created_s=written.st_mtime, names=names))
        return found

    def with_name(self, name: str) -> list[int]:
        """Return the steps of the checkpoints that have a name, newest first. Blocking."""
        return [one.step for one in self.newest_named(sys.maxsize) if name in one.names]

    @contextmanager
    def _names_locked(self) -> Iterator[None]:
        """Keep other processes from changing which checkpoint has which name: the daemon and a worker both do."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def delete(self, step: int) -> None:
        """Remove one checkpoint. Raises NotFound when there is no such one, InUse while it is being downloaded."""
        self._require(step)
        self._remove(step)

    def useless_optimizer_files(self) -> dict[int, int]:
        """Return the bytes of the trainer state of all checkpoints but the newest, the best and those that are kept, by
        step; those without are left out."""
        found: dict[int, int] = {}
        for record in self.all():
            size = sum(file.size_bytes for file in record.files if _is_trainer_state(file.path))
            if size and not (record.last or record.best or record.kept):
                found[record.step] = size
        return found

    def remove_optimizer(self, step: int) -> None:
        """Remove the files of a checkpoint that only training needs. Raises InUse while it is being downloaded."""
        folder = self.of_step(step)
        with _locked(folder, fcntl.LOCK_EX):
            manifest = read_manifest(folder)
            kept = {name: record for name, record in manifest.files.items() if not _is_trainer_state(name)}
            # The manifest first: a cut leaves a whole checkpoint, and files of it that the next call removes.
            self._write_manifest(folder, replace(manifest, files=kept))
            for path in (folder / TRAINER_FOLDER).glob("*.safetensors*"):
                path.unlink()

    def apply_retention(self, *, keep_last: int, keep_best: bool) -> None:
        """Remove complete checkpoints that are neither among the newest `keep_last`, nor the best by eval loss, nor
        kept by a user."""
        assert keep_last >= 1, "the newest is what a job resumes from"
        records = self.all()
        kept = {record.step for record in records[-keep_last:]}
        kept |= {record.step for record in records if keep_best and record.best}
        for record in records:
            if record.step not in kept:
                with contextlib.suppress(InUse):  # it is removed after one of the next checkpoints
                    self._remove(record.step, unless_kept=True)
        for leftover in self.path.glob(f"{_DELETED}*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def _last_eval(self, step: int) -> Any:
        state = self.of_step(step) / TRAINER_FOLDER / "trainer_state.json"
        return json.loads(state.read_bytes())["last_eval"]

    def _cost(self, record: CheckpointRecord) -> float | None:
        """The figure that decides which checkpoint is the best, as a number that is the better the lower; None where
        there is none."""
        if record.eval_loss is None:
            return None
        _, _, figure, prefers_high = self._last_eval(record.step)
        return None if figure is None else -float(figure) if prefers_high else float(figure)

    @staticmethod
    def _write_manifest(folder: Path, manifest: Manifest) -> None:
        """Change what a checkpoint lists."""
        written_ns = (folder / MANIFEST_FILE).stat().st_mtime_ns
        write_manifest(folder, manifest)
        # It is still of that age; the nanosecond makes the sizes that are kept of it in memory invalid.
        os.utime(folder / MANIFEST_FILE, ns=(written_ns, written_ns + 1))

    def _record(self, step: int) -> CheckpointRecord:
        folder = self.of_step(step)
        last_eval, manifest = self._last_eval(step), read_manifest(folder)
        return CheckpointRecord(
            job_id=self._job_id,
            step=step,
            files=tuple(
                CheckpointFile(path=path, sha256=record.sha256, size_bytes=record.size_bytes)
                for path, record in sorted(manifest.files.items())
            ),
            created_s=(folder / MANIFEST_FILE).stat().st_mtime,
            kept=manifest.kept,
            names=manifest.names,
            # The newest evaluation may be of an earlier step, with other weights.
            eval_loss=float(last_eval[1]) if last_eval and last_eval[0] == step else None,
        )

    def _require(self, step: int) -> None:
        steps = self.steps()
        if step not in steps:
            listed = ", ".join(map(str, steps)) or "none"
            raise NotFound(f"job {self._job_id} has no checkpoint of step {step}; it has: {listed}")

    def _remove(self, step: int, *, unless_kept: bool = False) -> None:
        folder = self.of_step(step)
        with _locked(folder, fcntl.LOCK_EX):
            if unless_kept and read_manifest(folder).kept:
                return
            # First its name, so that a cut leaves nothing that looks complete.
            gone = folder.rename(folder.with_name(f"{_DELETED}{folder.name}"))
        # The daemon's sweep may have removed it at the same time.
        shutil.rmtree(gone, ignore_errors=True)


def link_or_copy(source: Path, target: Path) -> None:
    """Give a file a second name, or a copy where the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _is_trainer_state(name: str) -> bool:
    # The planes of weights and moments, not the small files that say what the checkpoint is, nor an adapter.
    return name.startswith(f"{TRAINER_FOLDER}/") and ".safetensors" in name and name.count("/") == 1


@contextmanager
def _locked(folder: Path, mode: int) -> Iterator[None]:
    """Hold a checkpoint's folder, shared for a reader, exclusive for who removes it. Raises InUse when it is held the
    other way."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise NotFound(f"{folder.name} does not exist any more") from error
    try:
        try:
            # The kernel's lock, because the daemon reads checkpoints that workers remove; it ends with the process that
            # holds it.
            fcntl.flock(descriptor, mode | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InUse(
                f"the checkpoint {folder.name} is being downloaded; wait for the end of the download", retry_after_s=5.0
            ) from error
        yield
    finally:
        os.close(descriptor)


def read_log_part(path: Path, *, offset: int | None, limit: int) -> tuple[int, int, bytes]:
    """Return the size of a log, and a part of it from an offset on, or to its end: where that begins, and its bytes.
    Blocking.

    It is of whole lines, but for a line that is longer than the limit or not ended yet.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = max(0, size - limit) if offset is None else min(offset, size)
            file.seek(start)
            content = file.read(limit)
    except FileNotFoundError:
        return 0, 0, b""
    if offset is None and start:
        first = content.find(b"\n") + 1
        start, content = start + first, content[first:]
    elif start + len(content) < size and (end := content.rfind(b"\n") + 1):
        content = content[:end]
    return size, start, content


async def read_log(
    path: Path, *, offset: int, grows: Callable[[], Awaitable[bool]] | None
) -> AsyncIterator[tuple[int, bytes]]:
    """Yield (offset, bytes) from `offset` to the end; with `grows`, wait for more as long as it returns true."""

    def read() -> bytes:
        try:
            with path.open("rb") as file:
                # Before the seek, which some file systems refuse far beyond the end.
                if offset >= os.fstat(file.fileno()).st_size:
                    return b""
                file.seek(offset)
                return file.read(LOG_PIECE_BYTES)
        except FileNotFoundError:
            return b""

    while True:
        # Asked before the read, so that what is written until the end is read too.
        more = grows is not None and await grows()
        while piece := await asyncio.to_thread(read):
            yield offset, piece
            offset += len(piece)
        if not more:
            return
        await asyncio.sleep(_LOG_POLL_S)
