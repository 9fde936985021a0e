"""Makes the environments that peers run in: a venv each, with the packages of a requirements file."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from bench.peers.process import environment

_HERE = Path(__file__).resolve().parent


class NotInstalled(Exception):
    """The packages could not be installed; the message says which."""


def requirements(name: str) -> Path:
    """The file with an environment's packages."""
    return _HERE / f"requirements-{name}.txt"


def made(folder: Path, name: str, report: Callable[[str], None]) -> Path:
    """The Python of an environment, which is made where it is not there with these very packages.

    Raises:
        NotInstalled: pip refused.
    """
    own, python = folder / name, folder / name / "bin" / "python"
    stamp, digest = own / "installed", hashlib.sha256(requirements(name).read_bytes()).hexdigest()
    if stamp.is_file() and stamp.read_text("ascii") == digest:
        return python
    report(f"making the environment {name} in {own}")
    own.parent.mkdir(parents=True, exist_ok=True)
    commands = [
        [sys.executable, "-m", "venv", "--clear", str(own)],
        [str(python), "-m", "pip", "install", "--quiet", "--requirement", str(requirements(name))],
    ]
    if name == "deepspeed":
        # Minutes, and gigabytes of the compiler's, that are no part of training.
        commands.append([str(python), "-m", "bench.peers.deepspeed", "build"])
    for command in commands:
        # venv makes the Python that pip and DeepSpeed run with.
        programs = python.parent if python.is_file() else None
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment(programs))
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
            raise NotInstalled(f"{name}: {lines[-1][:200]}")
    stamp.write_text(digest, "ascii")
    return python
