"""Results on disk as they come: a markdown table in the stage's file, and each row as a line of JSON in results.jsonl.

All stages share results.jsonl and some share a markdown file, so that a run leaves few files: they are easy to copy off
a machine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.gpu.task import Task

RESULTS = "results.jsonl"
_ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = re.compile(r"(?<![\w./])/[^\s\"']*/(?:site|dist)-packages/")
_FOLDERS = re.compile(r"(?<![\w./])/(?!/)(?:[^\s/:;,\"'()<>]+/)+")


class Report:
    """Writes one stage's results. Every row is on disk when `row` returns, so that it outlives whatever comes next."""

    def __init__(self, folder: Path, *, stage: str, file: str) -> None:
        self._results, self._file, self._stage = folder / RESULTS, folder / file, stage
        self._table, self._columns = "", dict[str, str]()

    @classmethod
    def of(cls, task: Task) -> Report:
        """The report of a task."""
        return cls(task.folder, stage=task.stage, file=task.file)

    def say(self, text: str) -> None:
        """A paragraph; as JSON too, under `note`."""
        text = without_folders(text)
        self._append(self._file, f"{text}\n")
        self._append(self._results, json.dumps({"stage": self._stage, "note": text}))

    def table(self, title: str, columns: Mapping[str, str]) -> None:
        """Begin a table; `columns` are names with the format of their numbers."""
        self._table, self._columns = title, dict(columns)
        names = " | ".join(columns)
        self._append(self._file, f"\n## {title}\n\n| {names} |\n|{' --- |' * len(columns)}")

    def row(self, **more: Any) -> None:
        """A row of the table begun last. Keys are column names with _ for each space; others are for JSON alone."""
        cells = {name: more.pop(name.replace(" ", "_"), "") for name in self._columns}
        shown = (_shown(value, self._columns[name]) for name, value in cells.items())
        self._append(self._file, f"| {' | '.join(shown)} |")
        line = {"stage": self._stage, "table": self._table, **cells, **more}
        self._append(self._results, without_folders(json.dumps(line, default=str)))

    def note(self, **values: Any) -> None:
        """Values for JSON alone."""
        self._append(self._results, json.dumps({"stage": self._stage, **values}))

    @staticmethod
    def _append(file: Path, text: str) -> None:
        with file.open("a", encoding="utf-8") as out:
            out.write(text + "\n")


def without_folders(text: str) -> str:
    """The text with each absolute path cut down to what is below the source tree or the packages, else to its last
    part.

    Results are made to be passed on, the machine is not.
    """
    return _FOLDERS.sub("", _PACKAGES.sub("", text.replace(f"{_ROOT}/", "")))


def read_results(folder: Path) -> list[dict[str, Any]]:
    """All lines of results.jsonl so far; a last line that was cut off is left out."""
    file = folder / RESULTS
    lines = file.read_text("utf-8").splitlines() if file.exists() else []
    results = []
    for line in lines:
        try:
            results.append(json.loads(line))
        except ValueError:
            continue
    return results


def _shown(value: object, spec: str) -> str:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and spec:
        return format(value, spec)
    return without_folders(str(value)).replace("|", "/").replace("\n", " ")
