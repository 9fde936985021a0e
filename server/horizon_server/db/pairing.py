"""Whether the database is the one that belongs to the state folder. Every sweep asks this first: a wrong one would name
everything unused.

The database and the file `state-id` carry the same id, and a number that both raise at each check. So a database that
was created again has another id, and one that was put back from a backup has a lower number than the folder has seen.
"""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import exists, select

from horizon_server.db.database import Database
from horizon_server.db.tables import DatasetRow, ModelRow, StateFolderRow
from horizon_server.durable import replace_file

STATE_ID_FILE = "state-id"


class Pairing:
    """Checks that one database and one state folder belong together."""

    def __init__(self, database: Database, state_dir: Path) -> None:
        self._database = database
        self._state_dir = state_dir
        self._file = state_dir / STATE_ID_FILE

    async def problem(self, *, only_look: bool = False) -> str | None:
        """Return why the database may be the wrong one and what to do about it, or None when they belong together.

        With `only_look` the check is not counted, and nothing is written.
        """
        async with self._database.session() as session:
            row = (await session.scalars(select(StateFolderRow))).one()
            is_empty = not await session.scalar(select(exists(select(DatasetRow)) | exists(select(ModelRow))))
            if why := doubt(self._state_dir, row.state_id, row.num_checks, is_empty=is_empty):
                accept = f"echo '{row.state_id} {row.num_checks}' > {self._file}"
                return (
                    f"{why}; put the right horizon.db back and start again, or accept this one (what it does not list "
                    f"goes to the trash) with: {accept}"
                )
            if only_look:
                return None
            row.num_checks += 1
            state_id, num_checks = row.state_id, row.num_checks
        # After the commit: a crash in between leaves the database ahead of the folder, which is harmless.
        pair(self._state_dir, state_id, num_checks)
        return None


def doubt(state_dir: Path, state_id: str, num_checks: int, *, is_empty: bool) -> str | None:
    """Return why a database with this identity may be the wrong one for the state folder; `is_empty`: it has no
    datasets and models."""
    file = state_dir / STATE_ID_FILE
    try:
        seen_id, _, number = file.read_text("ascii").strip().partition(" ")
        num_seen = int(number)
    except FileNotFoundError:  # a new folder
        if is_empty and any((state_dir / "blobs").glob("*/*")):
            return f"the database is new, but {state_dir / 'blobs'} holds contents"
        return None
    except ValueError:
        return f"{file} cannot be read"
    if seen_id != state_id:
        return f"the database does not belong to {state_dir}: it was created again, or comes from another folder"
    if num_seen > num_checks:
        return f"the database is older than the contents of {state_dir}: a backup was put back"
    return None


def pair(state_dir: Path, state_id: str, num_checks: int) -> None:
    """Note in the state folder that the database with this identity belongs to it."""
    replace_file(state_dir / STATE_ID_FILE, f"{state_id} {num_checks}\n")
