"""docs/security.md: each limit of its tables is the one of the code and has a test, and no limit of the code is missing
there."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

from horizon_server.settings import Settings

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs/security.md").read_text("utf-8")
_UNITS = {
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "min": 60,
    "h": 3600,
    "days": 86400,
    "(days)": 1,
    "bytes": 1,
    "characters": 1,
    "s": 1,
    "ms": 1,
    "times": 1,
    "": 1,
}
# Folders of the server in which a MAX_... bounds what a caller sends. The others plan, compute and draw.
_GUARDED = ("api", "blobs", "children", "datasets", "db", "jobs", "records", "services", "spec", "scheduling")


@dataclass(frozen=True)
class Limit:
    """One row of a table."""

    what: str
    value: str
    where: str
    test: str


def _rows() -> list[Limit]:
    rows = []
    for line in PAGE.partition("## Limits")[2].splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("| ") and len(cells) == 4 and cells[0] not in ("What", "---"):
            rows.append(Limit(*cells))
    return rows


LIMITS = _rows()


def _module(name: str) -> Any:
    return importlib.import_module(name if name.startswith("horizon_") else f"horizon_server.{name}")


def _value_of(where: str) -> Any:
    """Return the constant, default of a setting, or default of an argument that a cell names."""
    name = re.fullmatch(r"(setting )?`([\w.:()[\]]+)`", where)
    assert name is not None, f"{where} names neither `module:NAME` nor setting `name`"
    if name[1]:
        return Settings.model_fields[name[2]].default
    module, _, attribute = name[2].partition(":")
    if argument := re.fullmatch(r"(\w+)\((\w+)\)", attribute):
        return inspect.signature(getattr(_module(module), argument[1])).parameters[argument[2]].default
    attribute, _, key = attribute.rstrip("]").partition("[")
    value = attrgetter(attribute)(_module(module))
    return value[key] if key else value


def _number(text: str) -> float:
    digits, _, unit = text.removesuffix(" a second").partition(" ")
    base, _, power = digits.partition("^")
    number = int(base) if base.isdigit() else float(base)
    return (number ** int(power) if power else number) * _UNITS[unit]


def test_every_limit_is_the_one_of_the_code() -> None:
    assert len(LIMITS) > 80
    wrong = [
        f"{limit.what}: {limit.value}, in the code {_value_of(limit.where)}"
        for limit in LIMITS
        if _value_of(limit.where) != _number(limit.value)
    ]
    assert not wrong, "\n".join(wrong)


def test_every_limit_has_a_test() -> None:
    absent = [f"{limit.what}: {limit.test}" for limit in LIMITS if limit.test.strip("`") not in _tests()]
    assert not absent, "\n".join(absent)


@cache
def _tests() -> frozenset[str]:
    found = set()
    for path in (REPOSITORY / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(f"{path.relative_to(REPOSITORY / 'tests').as_posix()}::{node.name}")
    return frozenset(found)


def test_no_limit_of_what_callers_send_is_missing() -> None:
    listed = set(re.findall(r"`([\w.]+:\w+)", "".join(limit.where for limit in LIMITS)))
    missing = []
    for folder in _GUARDED:
        root = REPOSITORY / "server/horizon_server" / folder
        for path in sorted([root] if root.is_file() else root.rglob("*.py")):
            module = ".".join(path.relative_to(REPOSITORY / "server/horizon_server").with_suffix("").parts)
            for name in re.findall(r"^(_?MAX_[A-Z_]+|_?MOST_[A-Z_]+)(?::.*)? =", path.read_text("utf-8"), re.MULTILINE):
                missing += [f"{module}:{name}"] * (f"{module}:{name}" not in listed)
    assert not missing, f"add to the tables of docs/security.md, with a test: {', '.join(missing)}"
