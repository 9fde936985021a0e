"""The two kinds of daemons that scenarios run against, and the job they submit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
from tests.support.daemon_process import DaemonProcess
from tests.support.pushed_state import PushedState
from tests.support.served_daemon import ServedDaemon

from horizon_client.job_spec_types import JobSpec
from horizon_server.demo.recipe import DEMO_SPEC

AnyDaemon = DaemonProcess | ServedDaemon
KINDS = ("in-process", "process")


def make_one(kind: str, state_dir: Path, pushed: PushedState, *flags: str, **settings: float | str) -> AnyDaemon:
    """Make a daemon of that kind; `settings` are lines of its configuration."""
    if kind == "process":
        return pushed.daemon(state_dir, *flags, **settings).let_children_rest()
    assert not flags, "only a process has flags"
    scripts = state_dir / "scripts"
    scripts.mkdir(parents=True)
    # So slow that a test can catch a job of some dozen steps in the middle.
    (scripts / "any.json").write_text(json.dumps({"step_s": 0.04}))
    return ServedDaemon(state_dir, model_folder=pushed.model, **settings)


def process_only(reason: str, fixture: str = "make_daemon") -> pytest.MarkDecorator:
    """Run a scenario against `horizond` only; `reason` is what a daemon in the test's process does not have."""
    assert reason
    return pytest.mark.parametrize(fixture, ["process"], indirect=True)


def demo_spec(name: str = "job", *, checkpoint: dict[str, Any] | None = None, **train: Any) -> JobSpec:
    """A short job over the built-in model and dataset, with steps of a tenth of a second."""
    spec = {
        **DEMO_SPEC,
        "name": name,
        "model": "demo-model",
        "dataset": "demo-chats",
        # Not compiled, because some tests start a job of very many steps and wait for its first ones.
        "train": {**DEMO_SPEC["train"], "max_steps": 6, "tokens_per_step": 256, "compile": "off", **train},
        "checkpoint": checkpoint or {"every_steps": 0},
    }
    return cast("JobSpec", spec)
