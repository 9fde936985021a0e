"""A database file of any version, as it is: copied while the daemon writes to it, checked, and prepared for a restore.
Migrates nothing."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alembic.script import ScriptDirectory

from horizon_server.codec import from_json
from horizon_server.db.database import BUSY_TIMEOUT_MS, migrations
from horizon_server.errors import BadSetting
from horizon_server.events import StateChanged, encode
from horizon_server.records.blob import BlobFile
from horizon_server.records.job import ENDED, RESIDENT, JobState, StopRequest

RESTORED = "RESTORED"
"""Reason of a job that a restore has queued again."""

_MAX_REPORTED = 20


@dataclass(frozen=True, kw_only=True)
class PushedFiles:
    """The files that one dataset or model is made of, and who it belongs to."""

    kind: str
    resource_id: str
    owner: str
    name: str
    is_ready: bool
    files: tuple[BlobFile, ...]

    def __str__(self) -> str:
        return f"{self.kind} {self.name} of {self.owner}"


def known_schemas() -> tuple[str, ...]:
    """Return the schemas that this version can read and migrate, oldest first."""
    newest_first = ScriptDirectory.from_config(migrations()).walk_revisions()
    return tuple(script.revision for script in newest_first)[::-1]


def copy_database(source: Path, target: Path) -> None:
    """Make `target` a consistent copy of a database that may be in use: one file, without a journal next to it.

    Raises BadSetting: `source` cannot be read, or is not a database.
    """
    with _explained(source), _connected(source) as live, contextlib.closing(sqlite3.connect(target)) as copy:
        # All pages in one go: that is one read transaction, which blocks no writer. In pieces, every write in between
        # would start it again.
        live.backup(copy, pages=-1)
        copy.execute("PRAGMA journal_mode=DELETE")


@contextmanager
def opened_file(path: Path) -> Iterator[DatabaseFile]:
    """Open a database for reading. Raises BadSetting: it is missing, is not a database, or a newer version made it."""
    with _explained(path), _connected(path) as connection:
        connection.execute("BEGIN")  # one transaction, so that all answers are of the same moment
        file = DatabaseFile(connection)
        if file.schema not in known_schemas():
            raise BadSetting(
                f"the database {path} was made by a newer version of horizon-train (format {file.schema}; this one "
                f"knows up to {known_schemas()[-1]}); update horizon-train"
            )
        yield file


def requeue_resident(path: Path, is_left: Callable[[str, int], bool], message: str) -> int:
    """Queue the jobs again that had an attempt when this database was copied, and return how many.

    A user's order to cancel or pause is carried out instead. `is_left` says by id and attempt that a worker's reports
    are still there: the daemon then continues from them by itself. Only columns and events are written that all
    versions have in the same form.
    """
    # In memory: a journal file that a killed restore leaves would be applied to the next copy of this name.
    with _explained(path), contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute("PRAGMA journal_mode=MEMORY")
        marks = ", ".join("?" * len(RESIDENT))
        query = f"SELECT job_id, attempt, wanted, last_sequence, name FROM jobs WHERE job_state IN ({marks})"
        found = [row for row in database.execute(query, sorted(RESIDENT)).fetchall() if not is_left(*row[:2])]
        now_s = time.time()
        for job_id, attempt, wanted, last_sequence, name in found:
            order = StopRequest(wanted)
            state, reason, text = order.end(name) if order else (JobState.QUEUED, RESTORED, message)
            event = StateChanged(job_state=state.value, reason=reason, message=text, attempt=attempt)
            database.execute(
                "INSERT INTO events (job_id, sequence, time_s, body) VALUES (?, ?, ?, ?)",
                (job_id, last_sequence + 1, now_s, encode(event)),
            )
            database.execute(
                "UPDATE jobs SET job_state = ?, reason = ?, message = ?, wanted = '', queued_s = ?, ended_s = ?, "
                "last_sequence = ? WHERE job_id = ?",
                (state.value, reason, text, now_s, now_s if state in ENDED else 0.0, last_sequence + 1, job_id),
            )
        return len(found)


class DatabaseFile:
    """What is in a database, whichever version made it. Blocking."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        is_empty = not self._rows("SELECT 1 FROM sqlite_master LIMIT 1")
        self.schema: str = "" if is_empty else self._rows("SELECT version_num FROM alembic_version")[0][0]

    @property
    def identity(self) -> tuple[str, int]:
        """The id of the state folder it belongs to and its number of checks, see `db.pairing`."""
        [(state_id, num_checks)] = self._rows("SELECT state_id, num_checks FROM state_folder")
        return state_id, num_checks

    def pushed(self) -> list[PushedFiles]:
        """Return all datasets and models."""
        found = []
        for kind in ("dataset", "model"):
            query = f"SELECT {kind}_id, owner, name, ready, files FROM {kind}s ORDER BY created_s"
            for resource_id, owner, name, is_ready, files in self._rows(query):
                made_of = from_json(tuple[BlobFile, ...], files)
                found.append(
                    PushedFiles(
                        kind=kind,
                        resource_id=resource_id,
                        owner=owner,
                        name=name,
                        is_ready=bool(is_ready),
                        files=made_of,
                    )
                )
        return found

    def job_ids(self) -> frozenset[str]:
        """Return the ids of all jobs."""
        return frozenset(job_id for (job_id,) in self._rows("SELECT job_id FROM jobs"))

    def damage(self) -> list[str]:
        """Return what SQLite finds wrong with the file itself, the first few of each kind."""
        found = [str(text) for (text,) in self._rows(f"PRAGMA integrity_check({_MAX_REPORTED})")]
        if found != ["ok"]:
            return found
        orphans = self._rows("PRAGMA foreign_key_check")[:_MAX_REPORTED]
        return [f"a row of {table} refers to a row of {parent} that does not exist" for table, _, parent, _ in orphans]

    def contradictions(self) -> list[str]:
        """Return where tables do not agree with each other."""
        gaps = self._rows(
            "SELECT jobs.job_id, last_sequence, count(sequence) FROM jobs LEFT JOIN events ON events.job_id = "
            "jobs.job_id GROUP BY jobs.job_id HAVING count(sequence) <> last_sequence OR coalesce(max(sequence), 0) <> "
            "last_sequence"
        )
        found = [f"job {job_id} has {count} events, but numbered {last} of them" for job_id, last, count in gaps]
        listed = {(file.sha256, pushed.resource_id) for pushed in self.pushed() for file in pushed.files}
        referred = set(self._rows("SELECT sha256, resource_id FROM blob_references"))
        found += [f"{resource_id} contains {sha256}, without a reference" for sha256, resource_id in listed - referred]
        found += [f"a reference to {sha256} is left of {resource_id}" for sha256, resource_id in referred - listed]
        return found

    def jobs_without_data(self) -> list[str]:
        """Return the jobs that have not ended and whose dataset or model is deleted, as messages."""
        ended = ", ".join(f"'{state}'" for state in sorted(ENDED))
        found = []
        for column, kind in (("dataset_id", "dataset"), ("eval_dataset_id", "dataset"), ("model_id", "model")):
            # A model_id with a slash is a folder of the node.
            query = (
                f"SELECT job_id, {column} FROM jobs WHERE job_state NOT IN ({ended}) AND {column} <> '' AND {column} "
                f"NOT LIKE '/%' AND {column} NOT IN (SELECT {kind}_id FROM {kind}s)"
            )
            found += [f"job {job_id} needs {kind} {needed}, which is deleted" for job_id, needed in self._rows(query)]
        query = (
            f"SELECT job_id, value FROM jobs, json_each(jobs.eval_set_ids) WHERE job_state NOT IN ({ended}) "
            "AND value NOT IN (SELECT dataset_id FROM datasets)"
        )
        found += [f"job {job_id} needs dataset {needed}, which is deleted" for job_id, needed in self._rows(query)]
        return found

    def _rows(self, query: str) -> list[Any]:
        return self._connection.execute(query).fetchall()


@contextmanager
def _connected(path: Path) -> Iterator[sqlite3.Connection]:
    if not path.is_file():
        raise BadSetting(f"{path} does not exist; choose the daemon's state folder with --state-dir")
    # Read-only, so that no mistake here can change it.
    uri = f"{path.absolute().as_uri()}?mode=ro"
    with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_MS / 1000)) as connection:
        connection.isolation_level = None
        yield connection


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.DatabaseError as error:
        raise BadSetting(f"{path} cannot be read as a database: {error}; put it back with: horizond restore") from error
