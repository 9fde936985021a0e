"""What the shell offers after TAB: files where a file belongs, names that the server knows, fields of a spec."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import Result

if TYPE_CHECKING:
    from tests.component.client.conftest import Daemon

Run = Callable[..., Result]


@pytest.fixture
def tab(run: Run, daemon: Daemon) -> Callable[..., list[str]]:
    """Return what bash is offered for the last of some words."""
    daemon.add_job("gsm8k-sft")

    def complete(*words: str) -> list[str]:
        # A person at the TAB key waits for a few seconds; on a busy machine that may not be enough.
        code = "from horizon_client.cli import completion, main; completion._PATIENCE_S = 240.0; main()"
        request = {
            "_HORIZON_COMPLETE": "bash_complete",
            "COMP_WORDS": "\n".join(["horizon", *words]),
            "COMP_CWORD": str(len(words)),
        }
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | request,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.stderr == ""
        return done.stdout.split()

    return complete


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("job", "submit", "jo"), ["file,jo"]),
        (("job", "plan", ""), ["file,"]),
        (("dataset", "push", "a.jsonl", "b"), ["file,b"]),
        (("model", "push", "./"), ["dir,./"]),
        (("login", "gpubox", "--token-file", ""), ["file,"]),
        (("node", "status", "--ca", ""), ["file,"]),
        (("checkpoint", "pull", "x", "--to", ""), ["dir,"]),
        (("job", "watch", ""), ["plain,gsm8k-sft", "plain,JOB"]),
        (("job", "cancel", "job"), ["plain,JOB"]),
        (("checkpoint", "list", "gsm"), ["plain,gsm8k-sft"]),
        (("model", "get", ""), ["plain,tiny-base"]),
        (("dataset", "delete", "g"), ["plain,gsm8k"]),
        (("dataset", "preview", "gsm8k", "--model", "t"), ["plain,tiny-base"]),
        (
            ("job", "submit", "a.yaml", "--set", "train.lr"),
            ["plain,train.lr_schedule=", "plain,train.lr_decay_ratio=", "plain,train.lr_groups="],
        ),
        (("jo",), ["plain,job"]),
    ],
)
def test_tab(tab: Callable[..., list[str]], daemon: Daemon, words: tuple[str, ...], offered: list[str]) -> None:
    (job,) = daemon.jobs()
    assert tab(*words) == [one.replace("JOB", job.job_id) for one in offered]


def test_a_server_that_is_away_offers_nothing_and_says_nothing(
    tab: Callable[..., list[str]], daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon.line.stop()
    assert tab("job", "watch", "") == []
    monkeypatch.delenv("HORIZON_SERVER")
    assert tab("job", "watch", "") == []


def test_the_options_before_are_used(
    tab: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, daemon: Daemon
) -> None:
    monkeypatch.delenv("HORIZON_SERVER")
    assert tab("--server", daemon.address, "model", "get", "") == ["plain,tiny-base"]
    assert tab("model", "get", "--server", daemon.address, "") == ["plain,tiny-base"]


def test_the_bash_script_is_valid(run: Run, tmp_path: Path) -> None:
    script = run("completion", "bash").stdout
    assert "compopt -o nospace" in script
    checked = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False, timeout=240)
    assert (checked.returncode, checked.stderr) == (0, "")
