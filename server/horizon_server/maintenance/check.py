"""Checks a state folder or a backup of one: the database, what refers to what, and with `full` every byte."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from horizon_server.db.database_file import DatabaseFile, PushedFiles, known_schemas, opened_file
from horizon_server.db.pairing import doubt
from horizon_server.errors import InvalidModel
from horizon_server.maintenance.backup import BACKUP_FILE, DATABASE_ENTRY, file_problem, read_backup
from horizon_server.store.manifest import FileRecord, read_manifest
from horizon_server.texts import size_text

_RESTORE = "put it back with: horizond restore BACKUP_DIR --replace"
_STEP_FOLDERS = "jobs/*/checkpoints/step-*"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong (error) or worth knowing (note): where, what, and what to do."""

    level: Literal["error", "note"]
    where: str
    what: str
    advice: str = ""


@dataclass
class Report:
    """What a check has found, and how much it has looked at."""

    findings: list[Finding] = field(default_factory=list)
    num_files: int = 0
    num_bytes_read: int = 0

    @property
    def is_good(self) -> bool:
        """Whether nothing is wrong."""
        return not any(finding.level == "error" for finding in self.findings)

    def error(self, where: str, what: str, advice: str = _RESTORE) -> None:
        """Add something that is wrong."""
        self.findings.append(Finding(level="error", where=where, what=what, advice=advice))

    def note(self, where: str, what: str, advice: str = "") -> None:
        """Add something that is worth knowing."""
        self.findings.append(Finding(level="note", where=where, what=what, advice=advice))

    def file(self, path: Path, *, sha256: str, size_bytes: int, full: bool) -> str | None:
        """Count a file and return what is wrong with it, or None."""
        self.num_files += 1
        problem = file_problem(path, FileRecord(size_bytes=size_bytes, sha256=sha256), full=full)
        self.num_bytes_read += size_bytes if full and problem is None else 0
        return problem


def check_state_dir(state_dir: Path, *, full: bool = False) -> Report:
    """Check a state folder, also while its daemon runs. Without `full`, files are compared by size only.

    Raises BadSetting: there is no readable database, or a newer version made it.
    """
    report = Report()
    with opened_file(state_dir / DATABASE_ENTRY) as database:
        _check_database(report, database, state_dir)
        pushed, job_ids = database.pushed(), database.job_ids()
    _check_contents(report, state_dir, pushed, full=full)
    for path in sorted((state_dir / "jobs").glob("*")):
        if path.name not in job_ids and not path.name.startswith("."):
            report.note(f"jobs/{path.name}", "belongs to no job of the database")
    for folder in sorted(state_dir.glob(_STEP_FOLDERS)):
        _check_checkpoint(report, state_dir, folder, full=full)
    return report


def check_backup(source: Path, *, full: bool = False) -> Report:
    """Check a backup. Raises NotFound: there is no complete one; BadSetting: its list is damaged, or a newer version
    made it."""
    report, backup = Report(), read_backup(source)
    for path, record in backup.files.items():
        if problem := report.file(source / path, sha256=record.sha256, size_bytes=record.size_bytes, full=full):
            report.error(path, problem, "take it from another copy of the backup")
    for problem in backup.problems:
        report.note(BACKUP_FILE, f"when it was made: {problem}")
    return report


def _check_database(report: Report, database: DatabaseFile, state_dir: Path) -> None:
    damage = database.damage()
    for text in damage:
        report.error(DATABASE_ENTRY, text)
    if damage:  # what a damaged file says of itself is worth nothing
        return
    if database.schema != known_schemas()[-1]:
        report.note(
            DATABASE_ENTRY,
            f"has format {database.schema}; the daemon migrates it to {known_schemas()[-1]} at its start",
        )
    for text in database.contradictions():
        report.error(DATABASE_ENTRY, text)
    for text in database.jobs_without_data():
        report.note(DATABASE_ENTRY, text, "push it again or cancel the job")
    why = doubt(state_dir, *database.identity, is_empty=not database.pushed())
    if why is not None:
        report.error(DATABASE_ENTRY, why, "put the right horizon.db back; until then the daemon removes nothing")


def _check_contents(report: Report, state_dir: Path, pushed: list[PushedFiles], *, full: bool) -> None:
    """Check the blobs that datasets and models are made of, and the folders of models."""
    checked: set[str] = set()
    problems: list[tuple[PushedFiles, str, str]] = []
    copies: list[int] = []
    for each in pushed:
        for file in each.files if each.is_ready else ():
            blob = state_dir / "blobs" / file.sha256[:2] / file.sha256
            if file.sha256 not in checked:
                checked.add(file.sha256)
                if problem := report.file(blob, sha256=file.sha256, size_bytes=file.size_bytes, full=full):
                    problems.append((each, str(blob.relative_to(state_dir)), problem))
            if each.kind == "model":
                linked = state_dir / "models" / each.resource_id / file.path
                # The same file, so its bytes are checked above.
                if linked.exists() and blob.exists() and linked.samefile(blob):
                    continue
                if problem := report.file(linked, sha256=file.sha256, size_bytes=file.size_bytes, full=full):
                    problems.append((each, str(linked.relative_to(state_dir)), problem))
                else:
                    copies.append(file.size_bytes)
    if copies:
        report.note(
            "models",
            f"{len(copies)} files of {size_text(sum(copies))} are copies of their contents instead of links, as a copy "
            "of the folder "
            "leaves them that does not keep hard links; nothing is lost",
            "they only take more space; copy with cp -a or rsync -aH next time",
        )
    deleted: set[str] = set()
    if problems:  # what was deleted while this looked at it is not lost
        with opened_file(state_dir / DATABASE_ENTRY) as database:
            deleted = {each.resource_id for each in pushed} - {each.resource_id for each in database.pushed()}
    for each, where, problem in problems:
        if each.resource_id not in deleted:
            report.error(where, f"of {each} {problem}", f"{_RESTORE}; or delete the {each.kind} and push it again")
    referenced = {file.sha256 for each in pushed for file in each.files}
    unused = [path.stat().st_size for path in _files(state_dir / "blobs") if path.name not in referenced]
    if unused:
        report.note(
            "blobs",
            f"{len(unused)} files of {size_text(sum(unused))} belong to nothing",
            "the daemon moves them to the trash",
        )


def _check_checkpoint(report: Report, state_dir: Path, folder: Path, *, full: bool) -> None:
    inner = str(folder.relative_to(state_dir))
    advice = f"{_RESTORE}; until then its job continues from an older checkpoint"
    try:
        problems = [
            (name, problem)
            for name, file in read_manifest(folder).files.items()
            if (problem := report.file(folder / name, sha256=file.sha256, size_bytes=file.size_bytes, full=full))
        ]
    except InvalidModel as error:
        if folder.exists():
            report.error(inner, error.message, advice)
        return
    # A checkpoint that is deleted while it is read has another name by then.
    if folder.exists():
        for name, problem in problems:
            report.error(f"{inner}/{name}", problem, advice)


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.glob("*/*") if path.is_file())
