"""State folders as the releases have left them, packed into tests/data by tools/make_upgrade_fixture.py."""

from __future__ import annotations

import hashlib
import json
import platform
import tarfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parent.parent / "data"
RELEASES = {file.name.removeprefix("state-").removesuffix(".tar.xz"): file for file in sorted(DATA.glob("state-*"))}
"""The archive of each release."""
STATE, FACTS_FILE = "state", "facts.json"
"""In an archive: the state folder, and what no state folder says."""
SETTINGS: dict[str, float | str] = {"num_threads": 1}
"""Of the daemon that made the state, and of those that continue it: the number of threads decides the last bits."""


def unpack(release: str, folder: Path) -> dict[str, Any]:
    """Unpack the state folder of a release as `folder`/state, and return the facts."""
    with tarfile.open(RELEASES[release]) as archive:
        archive.extractall(folder, filter="data")
    facts: dict[str, Any] = json.loads((folder / FACTS_FILE).read_bytes())
    return facts


def kind_of_machine() -> str:
    """Return a name of all that decides the bits of a result besides the job: the kind of processor and the version of
    torch."""
    lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    processor = sorted({line for line in lines if line.startswith(("model name", "flags", "CPU part", "Features"))})
    return hashlib.sha256("\n".join([platform.machine(), *processor, version("torch")]).encode()).hexdigest()
