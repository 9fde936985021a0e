"""The calls of a session and their results, as files: what both ends of the link agree on.

The daemon writes a call before it is acknowledged, so that neither end forgets one; the worker does them in the order
of their numbers, and writes a result when what it tells of is done. Both are one JSON file each, durable and whole or
not there: `00000012.call.json`, `00000012.result.json`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from horizon_server.codec import from_plain, to_plain
from horizon_server.durable import remove_half_files, replace_file
from horizon_server.errors import WorkerFailed
from horizon_server.records.session import CALLS, RESULTS, Call, Result, name_of

_CALL, _RESULT = ".call.json", ".result.json"
_SEQUENCES = "sequences.json"


class CallFiles:
    """The files of one session. Thread: blocking; one process writes calls, another one results, and any reads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def open(self) -> None:
        """Make the folder, and clear away what a process that was killed has left half written."""
        self.folder.mkdir(parents=True, exist_ok=True)
        remove_half_files(self.folder)

    def write_call(self, number: int, call: Call) -> int:
        """Keep a call, durably; returns its bytes. Raises OSError when it cannot be written; then it is not there."""
        return self._write(self._call_file(number).name, call)

    def write_result(self, number: int, result: Result) -> None:
        """Keep the result of a call, durably."""
        self._write(f"{number:08d}{_RESULT}", result)

    def write_sequences(self, numbers: Mapping[int, int]) -> None:
        """Keep, durably, which of a caller's own numbers is which call. Raises OSError."""
        replace_file(self.folder / _SEQUENCES, json.dumps({str(key): value for key, value in numbers.items()}))

    def sequences(self) -> dict[int, int]:
        """Return what was kept of a caller's own numbers."""
        try:
            plain = json.loads((self.folder / _SEQUENCES).read_bytes())
            return {int(key): int(value) for key, value in plain.items()}
        except FileNotFoundError:
            return {}
        except (ValueError, AttributeError, TypeError, RecursionError) as error:
            raise WorkerFailed(f"the file {_SEQUENCES} of a session is damaged ({type(error).__name__})") from error

    def call(self, number: int) -> Call | None:
        """Return a call; None where there is none of that number."""
        found: Call | None = self._read(self._call_file(number).name, CALLS)
        return found

    def result(self, number: int) -> Result | None:
        """Return the result of a call; None while there is none."""
        found: Result | None = self._read(f"{number:08d}{_RESULT}", RESULTS)
        return found

    def has_result(self, number: int) -> bool:
        """Whether a call has been done."""
        return (self.folder / f"{number:08d}{_RESULT}").exists()

    def prune(self, *, done: int, kept_results: int) -> None:
        """Remove the calls up to `done`, which nothing does again, and of their results all but the newest."""
        results = self.result_sizes()
        for number in [number for number in self.sizes() if number <= done]:
            self.forget_call(number)
        oldest = max(results, default=0) - kept_results
        for number in [number for number in results if number <= min(done, oldest)]:
            (self.folder / f"{number:08d}{_RESULT}").unlink(missing_ok=True)

    def last_number(self) -> int:
        """Return the number of the newest call, 0 where there was none."""
        return max([*self.sizes(), *self.result_sizes()], default=0)

    def num_done(self, done: int, last: int) -> int:
        """Return up to which number all calls have been done, of `last`; up to `done` they have."""
        if done == 0:
            # What is removed was done.
            return next((number - 1 for number in self.sizes() if not self.has_result(number)), last)
        while done < last and (self.has_result(done + 1) or not self._call_file(done + 1).exists()):
            done += 1
        return done

    def sizes(self) -> dict[int, int]:
        """Return the bytes of every call that is kept, by its number, in order."""
        return self._sizes(_CALL)

    def result_sizes(self) -> dict[int, int]:
        """Return the bytes of every result that is kept, by its number, in order."""
        return self._sizes(_RESULT)

    def forget_call(self, number: int) -> None:
        """Remove a call that nothing does again; its result stays."""
        self._call_file(number).unlink(missing_ok=True)

    def _call_file(self, number: int) -> Path:
        return self.folder / f"{number:08d}{_CALL}"

    def _sizes(self, suffix: str) -> dict[int, int]:
        found: dict[int, int] = {}
        for file in self.folder.glob(f"[0-9]*{suffix}"):
            with contextlib.suppress(FileNotFoundError):  # just removed
                found[int(file.name.removesuffix(suffix))] = file.stat().st_size
        return dict(sorted(found.items()))

    def _write(self, name: str, record: Call | Result) -> int:
        # With NaN and infinity, which JSON does not have but Python reads back: a loss may be either.
        text = json.dumps({"kind": name_of(record), **to_plain(record)}, separators=(",", ":"))
        replace_file(self.folder / name, text)
        return len(text)

    def _read(self, name: str, kinds: Mapping[str, type[Any]]) -> Any:
        try:
            content = (self.folder / name).read_bytes()
        except FileNotFoundError:
            return None
        try:
            plain = json.loads(content)
            return from_plain(kinds[plain.pop("kind")], plain)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise WorkerFailed(f"the file {name} of a session is damaged ({type(error).__name__})") from error
