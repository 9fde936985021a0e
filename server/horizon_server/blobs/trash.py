"""Where unreferenced files go before they are removed: a database that was lost, or put back from a backup, must not
cost anybody's data.

`trash/<date>/blobs/<aa>/<sha256>` and `trash/<date>/models/<model_id>` in the state folder. What the database knows
again is taken back by the next sweep; the rest is removed after `trash_days`. Everything in there may be removed by
hand at any time.
"""

from __future__ import annotations

import contextlib
import datetime
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

import structlog

log = structlog.get_logger(__name__)

_MAX_NAMED = 20


class Trash:
    """The trash of one state folder. Every move is a rename on the same file system: it takes no space and no time.

    Thread: called from threads; callers see to it that the same file is never moved by two.
    """

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir
        self._root = state_dir / "trash"

    def put(self, paths: Iterable[Path]) -> int:
        """Move files and folders of the state folder here, and log their names; return how many were moved."""
        moved, num_bytes = [], 0
        for path in paths:
            inner = path.relative_to(self._state_dir)
            place = self._root / _day(time.time()) / inner
            place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if place.is_dir():
                shutil.rmtree(place)  # the same folder, put here earlier today
            num_bytes += size_of(path)
            path.replace(place)
            moved.append(str(inner))
        if moved:
            log.warning(
                "moved to the trash, as nothing in the database refers to it",
                num_files=len(moved),
                num_bytes=num_bytes,
                names=moved[:_MAX_NAMED],
                trash=str(self._root),
            )
        return len(moved)

    def take_back(self, paths: Iterable[Path]) -> int:
        """Return to their places those of `paths` that are here and not there; return how many."""
        days = sorted(self._root.iterdir(), reverse=True) if self._root.is_dir() else []
        taken = []
        # Without a day there is nothing to look for: `paths` may be every content of the database.
        for path in paths if days else ():
            inner = path.relative_to(self._state_dir)
            # The newest one, if it was moved on several days.
            found = next((day / inner for day in days if (day / inner).exists()), None)
            if found is not None and not path.exists():
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                found.replace(path)
                taken.append(str(inner))
        if taken:
            log.warning("taken back from the trash", num_files=len(taken), names=taken[:_MAX_NAMED])
        return len(taken)

    def held(self, folder: str) -> set[str]:
        """Return the names of what was moved here from a folder of the state folder."""
        return {path.name for path in self._root.glob(f"*/{folder}/*")}

    def expired(self, max_age_s: float) -> list[Path]:
        """Return the folders of days that ended longer ago than that."""
        last_kept = _day(time.time() - max_age_s)
        return [day for day in self._root.glob("????-??-??") if day.name < last_kept]

    def expire(self, max_age_s: float) -> int:
        """Remove what was put here on days that ended longer ago than that; return how many days."""
        old = self.expired(max_age_s)
        for day in old:
            log.warning("emptied from the trash", day=day.name, num_bytes=size_of(day))
            shutil.rmtree(day)
        return len(old)


def _day(time_s: float) -> str:
    # In UTC, so that the names sort by time whatever the machine's zone does.
    return datetime.datetime.fromtimestamp(time_s, datetime.UTC).strftime("%Y-%m-%d")


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of all files below a folder; 0 where there is none."""
    num_bytes = 0
    for entry in [path] if path.is_file() else path.rglob("*"):
        with contextlib.suppress(OSError):  # it may be removed meanwhile
            num_bytes += entry.lstat().st_size if entry.is_file() else 0
    return num_bytes
