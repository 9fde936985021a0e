"""What became of a config: the job's fields, each with where it is from, and a line about everything else."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from horizon_client.cli.job_file import job_schema


class Outcome(enum.Enum):
    """What became of a setting, with the heading of the report."""

    CARRIED = "carried over"
    CHANGED = "changed"
    DEFAULT = "not in the config: the default of the tool"
    CHECK = "to be checked"
    NEEDLESS = "no effect here"
    MISSING = "not carried over"


@dataclass(frozen=True, kw_only=True)
class Line:
    """One setting of the config (or several), and what became of it. `field` is the one of the job file."""

    outcome: Outcome
    source: str
    text: str
    field: str = ""

    def __str__(self) -> str:
        arrow = f" -> {self.field}" if self.field else ""
        return f"{self.source}{arrow}{f': {self.text}' if self.text else ''}"


@dataclass(kw_only=True)
class Imported:
    """A job file in the making."""

    tool: str
    file: str
    fields: dict[str, Any] = field(default_factory=dict)
    """By dotted path."""
    lines: list[Line] = field(default_factory=list)

    def put(self, path: str, value: Any, source: str, text: str = "", outcome: Outcome = Outcome.CARRIED) -> None:
        """Set a field of the job."""
        self.fields[path] = value
        self.lines.append(Line(outcome=outcome, source=source, text=text, field=path))

    def say(self, outcome: Outcome, source: str, text: str) -> None:
        """Say what became of a setting that sets no field."""
        self.lines.append(Line(outcome=outcome, source=source, text=text))

    @property
    def is_complete(self) -> bool:
        """Whether everything that matters was carried over."""
        return not any(line.outcome is Outcome.MISSING for line in self.lines)

    @property
    def spec(self) -> dict[str, Any]:
        """The job's spec as a mapping, in the order of the reference page."""
        spec: dict[str, Any] = {}
        order = list(job_schema()["properties"])
        for path, value in sorted(self.fields.items(), key=lambda item: order.index(item[0].partition(".")[0])):
            *sections, name = path.split(".")
            inner = spec
            for section in sections:
                inner = inner.setdefault(section, {})
            inner[name] = value
        return spec

    def grouped(self) -> Iterator[tuple[Outcome, list[Line]]]:
        """Yield the lines by outcome, without empty groups."""
        for outcome in Outcome:
            if found := [line for line in self.lines if line.outcome is outcome]:
                yield outcome, found

    def job_file(self) -> str:
        """Return the job file, with where each field is from as a comment, and what is left to do at its end."""
        comments = {line.field: _comment(line) for line in self.lines if line.field}
        text = [f"# Made by horizon job import from {self.file} ({self.tool})."]
        text += _yaml_lines(self.spec, "", comments, 0)
        for outcome in (Outcome.CHECK, Outcome.MISSING):
            if found := [line for line in self.lines if line.outcome is outcome]:
                text += ["", f"# {outcome.value.capitalize()}:", *(f"#   {line}" for line in found)]
        return "\n".join(text) + "\n"


def _comment(line: Line) -> str:
    return f"{line.source}{f': {line.text}' if line.text and line.outcome is not Outcome.CHECK else ''}"


def _yaml_lines(section: Mapping[str, Any], prefix: str, comments: Mapping[str, str], depth: int) -> Iterator[str]:
    indent = "  " * depth
    for name, value in section.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping) and path not in comments:
            yield f"{indent}{name}:"
            yield from _yaml_lines(value, f"{path}.", comments, depth + 1)
            continue
        written = yaml.safe_dump(value, default_flow_style=True, width=10_000, sort_keys=False).splitlines()[0]
        comment = comments.get(path, "")
        yield f"{indent}{name}: {written}{f'  # {comment}' if comment else ''}"
