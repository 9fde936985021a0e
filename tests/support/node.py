"""A daemon with a user, a model and a dataset, and the real `horizon` command as people type it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from tests.support.daemon_process import DaemonProcess
from tests.support.pushed_state import PushedState

from horizon_client import Client
from horizon_client.job_spec_types import JobSpec

HORIZON = [sys.executable, "-m", "horizon_client"]
HORIZOND = [sys.executable, "-m", "horizon_server"]


@dataclass(frozen=True)
class Shell:
    """A laptop: a server, a token, a configuration folder of its own."""

    server: str
    token: str | None
    home: Path
    extra: dict[str, str] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HORIZON")}
        own = {"HORIZON_SERVER": self.server, "HORIZON_CONFIG_DIR": str(self.home / "config"), **self.extra}
        return kept | own | ({"HORIZON_TOKEN": self.token} if self.token else {})

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*HORIZON, *arguments],
            env=self.environment(),
            cwd=self.home,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def run(self, *arguments: str, timeout_s: float = 240.0) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*HORIZON, *arguments],
            env=self.environment(),
            cwd=self.home,
            text=True,
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )

    def fails(self, code: int, *arguments: str) -> str:
        """Run it, and return the sentence it fails with."""
        done = self.run(*arguments)
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        assert done.stdout == ""
        return done.stderr

    def works(self, *arguments: str) -> str:
        done = self.run(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def run_horizond(*arguments: str, timeout_s: float = 240.0) -> subprocess.CompletedProcess[str]:
    """Run an administrator's command."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HORIZON")}
    return subprocess.run(
        [*HORIZOND, *arguments], env=kept, text=True, capture_output=True, timeout=timeout_s, check=False
    )


@dataclass(frozen=True)
class Node:
    """A daemon that `ada` uses, with the built-in model and dataset pushed as `demo-model` and `demo-chats`."""

    daemon: DaemonProcess
    token: str
    model: Path
    dataset: Path

    def shell(self, home: Path, token: str | None = None) -> Shell:
        return Shell(self.daemon.endpoints["grpc"], token or self.token, home)

    def client(self) -> Client:
        return self.daemon.client(self.token)


def node_of(daemon: DaemonProcess, pushed: PushedState) -> Node:
    """Start a daemon over a copy of what was pushed."""
    return Node(daemon.start(), pushed.token, pushed.model, pushed.dataset)


def quick_spec(name: str, *, checkpoint: dict[str, Any] | None = None, **train: Any) -> JobSpec:
    """A job of two steps over what `node_of` has pushed."""
    spec = {
        "name": name,
        "model": "demo-model",
        "dataset": "demo-chats",
        "train": {
            "max_steps": 2,
            "sequence_length": 64,
            "tokens_per_step": 128,
            "warmup_steps": 0,
            # Some tests start a job of very many steps and wait for its first ones.
            "compile": "off",
            **train,
        },
        "checkpoint": checkpoint or {"every_steps": 0},
    }
    return cast("JobSpec", spec)
