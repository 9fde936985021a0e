"""A file that is written in parts, over several processes: what was kept is there after a crash, and the next process
appends to it.

Next to the file is a record of how much of it is whole: its facts (what it is about), a place in the caller's work, the
number of bytes and their checksum. The record is replaced after the bytes are on disk, so that it never promises more
than there is. Torch-free.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from horizon_server import progress
from horizon_server.durable import PARTIAL_SUFFIX, replace_file, sync_folder
from horizon_server.store.safetensors_files import PIECE_BYTES

# What is appended is kept at most this often, and so seldom that keeping it takes this part of the time at most.
_LEAST_PAUSE_S = 1.0
_MAX_SHARE = 0.02
_RECORD_SUFFIX = ".json"


class GrowingFile:
    """Use it as a context manager: leaving closes it, and what was kept stays until `finish` or `remove`.

    `place` is that of the last `keep`, 0 for a new file: what comes before it is in the file. Thread: not thread-safe.
    """

    def __init__(self, path: Path, *, facts: str, header: bytes = b"", is_kept: bool = True) -> None:
        """Continue the file where its record has the same facts and checksum, else begin it again with `header`.

        With `is_kept` False nothing is kept, and leaving removes the file: for a caller that has no place where it
        would be looked for.

        Raises:
            OSError: it cannot be opened or written.
        """
        self._path, self._facts, self._is_kept = path, facts, is_kept
        self._record = path.with_name(path.name + _RECORD_SUFFIX)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.place, num_bytes = self._continued()
        self._stream: IO[bytes] = path.open("r+b" if num_bytes else "wb")
        # Behind what is recorded may be bytes that were not on disk yet.
        self._stream.truncate(num_bytes)
        self._stream.seek(num_bytes)
        self._last_kept_s, self._pause_s = time.monotonic(), _LEAST_PAUSE_S
        self._place = self.place
        if not num_bytes:
            self._digest = hashlib.blake2b()
            self._write(header)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # After a full disk there are bytes that cannot be written any more, and need not be.
        with contextlib.suppress(OSError):
            self._stream.close()
        if not self._is_kept:
            self.remove()

    def append(self, data: bytes, *, place: int) -> None:
        """Write at the end; `place` is how far the caller's work is with this. It is kept now and then. Raises
        OSError."""
        self._write(data)
        self._place = place
        if time.monotonic() >= self._last_kept_s + self._pause_s:
            self.keep()

    def keep(self) -> None:
        """Have all that was appended survive a crash. Raises OSError."""
        if not self._is_kept or self._place == self.place:
            return
        begin_s = time.monotonic()
        self._stream.flush()
        os.fsync(self._stream.fileno())
        record = {
            "facts": self._facts,
            "place": self._place,
            "bytes": self._stream.tell(),
            "blake2b": self._digest.hexdigest(),
        }
        replace_file(self._record, json.dumps(record) + "\n")
        self.place, self._last_kept_s = self._place, time.monotonic()
        self._pause_s = max(_LEAST_PAUSE_S, (self._last_kept_s - begin_s) / _MAX_SHARE)

    def finish(self, target: Path) -> None:
        """Make the file `target`, durably, in place of what was there. Raises OSError."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        try:
            self._path.replace(target)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            # Another file system: under another name first, so that the target is never there in part.
            partial = target.with_name(f".{target.name}.{os.getpid()}{PARTIAL_SUFFIX}")
            try:
                shutil.copyfile(self._path, partial)
                with partial.open("rb") as copied:
                    os.fsync(copied.fileno())
                partial.replace(target)
            finally:
                partial.unlink(missing_ok=True)
        sync_folder(target.parent)
        self.remove()

    def remove(self) -> None:
        """Remove the file and its record."""
        # The record first: without it, a file counts as nothing.
        self._record.unlink(missing_ok=True)
        self._path.unlink(missing_ok=True)

    def _write(self, data: bytes) -> None:
        self._stream.write(data)
        self._digest.update(data)

    def _continued(self) -> tuple[int, int]:
        """Return the place and the bytes that are there for certain; 0 and 0 where nothing can be continued."""
        self._digest = hashlib.blake2b()
        try:
            known = json.loads(self._record.read_bytes())
            if known["facts"] != self._facts:
                return 0, 0
            left = num_bytes = int(known["bytes"])
            with self._path.open("rb") as stream:
                while left and (piece := stream.read(min(left, PIECE_BYTES))):
                    self._digest.update(piece)
                    left -= len(piece)
                    progress.advance()
            if left or self._digest.hexdigest() != known["blake2b"]:
                return 0, 0
            return int(known["place"]), num_bytes
        except (OSError, ValueError, KeyError, TypeError):
            # No record, or a damaged one.
            return 0, 0


def remove_others(folder: Path, names: set[str]) -> None:
    """Remove the growing files in `folder` that have none of these names, with their records; and the folder, where
    none is left."""
    with contextlib.suppress(FileNotFoundError):
        for path in folder.iterdir():
            if path.name.removesuffix(_RECORD_SUFFIX) not in names:
                path.unlink(missing_ok=True)
        if not names:
            folder.rmdir()
