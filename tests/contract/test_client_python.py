"""The client runs on Python 3.10: nothing in it is newer, and where such an interpreter is at hand it imports it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OLDEST = "3.10"
PARTS = ("client/horizon_client", "proto/horizon_formats")


def test_nothing_of_the_client_is_newer_than_its_oldest_python() -> None:
    # The checker knows since when each name of the standard library is there.
    command = [sys.executable, "-m", "mypy", "--python-version", OLDEST, "--cache-dir", os.devnull, *PARTS]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert found.returncode == 0, found.stdout


def test_the_oldest_python_imports_what_needs_no_package() -> None:
    python = _oldest_python()
    if python is None:
        pytest.skip(f"no Python {OLDEST} on this machine")
    path = json.dumps([str(ROOT / Path(part).parent) for part in PARTS])
    code = f"""
import sys
sys.path[:0] = {path}
import horizon_client, horizon_client.resources, horizon_client.metrics, horizon_client.memory_data
import horizon_formats.checks, horizon_formats.files
from horizon_formats.formats import DatasetFormat
assert f"{{DatasetFormat.KTO}}" == str(DatasetFormat.KTO) == "kto" == DatasetFormat.KTO
horizon_client.errors.InvalidRequest.of("a", "b")
print(sys.version_info[:2])
"""
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "(3, 10)", done.stderr


def _oldest_python() -> str | None:
    for name in (f"python{OLDEST}", *map(str, Path.home().glob(f".pyenv/versions/{OLDEST}.*/bin/python"))):
        found = shutil.which(name)
        # What a version manager puts on the path may lead nowhere.
        if found and subprocess.run([found, "-c", ""], capture_output=True, check=False, timeout=240).returncode == 0:
            return found
    return None
