"""State folders as the releases have left them, packed into tests/data by tools/make_upgrade_fixture.py."""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parent.parent / "data"
RELEASES = {file.name.removeprefix("state-").removesuffix(".tar.xz"): file for file in sorted(DATA.glob("state-*"))}
"""The archive of each release."""
STATE, FACTS_FILE = "state", "facts.json"
"""In an archive: the state folder, and what no state folder says."""
_PACKAGES = ("proto", "client", "server")
SETTINGS: dict[str, float | str] = {"num_threads": 1}
NEWER_SETTINGS: dict[str, None] = {"spare_worker": None, "compile_pushed_models": None}
"""What every daemon of a test sets, and the oldest release does not know."""
"""Of the daemon that made the state, and of those that continue it: the number of threads decides the last bits."""


def unpack(release: str, folder: Path) -> dict[str, Any]:
    """Unpack the state folder of a release as `folder`/state, and return the facts."""
    with tarfile.open(RELEASES[release]) as archive:
        archive.extractall(folder, filter="data")
    facts: dict[str, Any] = json.loads((folder / FACTS_FILE).read_bytes())
    return facts


def code_of(release: str, folder: Path) -> dict[str, str]:
    """Unpack the code of a release, as it was when its daemon made the state folder, into `folder`. Return the
    variables with which Python runs it; none where this checkout does not have that part of the history."""
    commit = _git("log", "-1", "--format=%H", "--", str(RELEASES[release])).decode().strip()
    packed = _git("archive", commit, *_PACKAGES) if commit else b""
    if not packed:
        return {}
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    return {"PYTHONPATH": os.pathsep.join(str(folder / package) for package in _PACKAGES)}


def _git(*arguments: str) -> bytes:
    """What git answers; nothing where it fails, or is not there."""
    try:
        done = subprocess.run(["git", *arguments], cwd=DATA.parents[1], capture_output=True, check=False, timeout=240)
    except FileNotFoundError:
        return b""
    return done.stdout if done.returncode == 0 else b""


def schemas_of(environment: dict[str, str]) -> list[str]:
    """The schemas that the code of a release knows."""
    show = "from horizon_server.db.database_file import known_schemas; print(*known_schemas())"
    done = subprocess.run(
        [sys.executable, "-c", show],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    return done.stdout.split()


def kind_of_machine() -> str:
    """Return a name of all that decides the bits of a result besides the job: the kind of processor and the version of
    torch."""
    lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    processor = sorted({line for line in lines if line.startswith(("model name", "flags", "CPU part", "Features"))})
    return hashlib.sha256("\n".join([platform.machine(), *processor, version("torch")]).encode()).hexdigest()
