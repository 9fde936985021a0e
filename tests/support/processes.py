"""Processes that tests look for."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import psutil

from horizon_server.worker_link.protocol import PID_FILE


def processes_of(module: str, state_dir: Path) -> list[int]:
    """Processes that run `module` for this state folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_bytes()
                if module.encode() in command and str(state_dir).encode() in command:
                    found.append(int(entry.name))
    return found


def processes_with(variable: str, value: str) -> list[int]:
    """Processes whose environment has a variable of that value: a daemon, its children, and theirs, whoever their
    parent is now."""
    wanted, found = f"{variable}={value}".encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def children_of(pid: int) -> list[int]:
    """The living children of a process."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, task.read_text("ascii").split())
    return found


def collect_workers(folder: Path) -> None:
    """Collect the workers of attempts below `folder` that have ended and are this process's children still.

    A real daemon that leaves them ends itself, and the system collects them; one inside a test's process does not end.
    """
    for file in folder.rglob(PID_FILE):
        with contextlib.suppress(OSError, ValueError, IndexError):
            pid, started = file.read_text("ascii").split()
            if Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()[19] == started:
                os.waitpid(int(pid), os.WNOHANG)


def zombies_of(pid: int) -> set[int]:
    """The children of a process that have ended and that it has not collected."""
    found = set()
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() == psutil.STATUS_ZOMBIE:
                found.add(child.pid)
    return found


def command_of(pid: int) -> str:
    """The command line of a process; empty when it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
    return ""


def start_time_of(pid: int) -> str | None:
    """When a process began, in the kernel's ticks; None when it is gone, whether or not its parent has collected it."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()
        return None if fields[0] == "Z" else fields[19]
    return None
