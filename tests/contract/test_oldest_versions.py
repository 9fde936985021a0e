"""`make test-oldest` tests the lowest versions that pyproject.toml allows of what the engine computes with."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_oldest_versions_are_those_that_pyproject_allows() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    listed = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    found = (re.match(r"([\w-]+)\s*>=\s*([\d.]+)", one) for one in listed)
    lowest = {match[1]: match[2] for match in found if match}
    pinned = re.findall(r"^([\w-]+)==([\d.]+)", (ROOT / "constraints-oldest.txt").read_text("utf-8"), re.MULTILINE)
    assert {name for name, _ in pinned} >= {"torch", "transformers", "triton"}
    for name, version in pinned:
        assert re.fullmatch(rf"{re.escape(lowest[name])}(\.0)*", version), f"{name}: pyproject.toml and the file differ"
