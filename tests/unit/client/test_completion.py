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

from horizon_proto.v1 import dataset_pb2, job_pb2, model_pb2

if TYPE_CHECKING:
    from tests.unit.client.conftest import FakeDaemon

Run = Callable[..., Result]


@pytest.fixture
def tab(run: Run, daemon: FakeDaemon) -> Callable[..., list[str]]:
    """Return what bash is offered for the last of some words."""
    daemon.add_job(job_pb2.JobSpec(name="gsm8k-sft"))
    daemon.models["tiny-base"] = model_pb2.Model(name="tiny-base")
    daemon.datasets["gsm8k"] = dataset_pb2.Dataset(name="gsm8k")

    def complete(*words: str) -> list[str]:
        code = "from horizon_client.cli import main; main()"
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
            timeout=60,
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
        (("job", "watch", ""), ["plain,gsm8k-sft", "plain,job-1"]),
        (("job", "cancel", "job"), ["plain,job-1"]),
        (("checkpoint", "list", "gsm"), ["plain,gsm8k-sft"]),
        (("model", "get", ""), ["plain,tiny-base"]),
        (("dataset", "delete", "g"), ["plain,gsm8k"]),
        (("dataset", "preview", "gsm8k", "--model", "t"), ["plain,tiny-base"]),
        (("job", "submit", "a.yaml", "--set", "train.lr"), ["plain,train.lr_schedule="]),
        (("jo",), ["plain,job"]),
    ],
)  # fmt: skip
def test_tab(tab: Callable[..., list[str]], words: tuple[str, ...], offered: list[str]) -> None:
    assert tab(*words) == offered


def test_a_server_that_is_away_offers_nothing_and_says_nothing(
    tab: Callable[..., list[str]], daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon.stop()
    assert tab("job", "watch", "") == []
    monkeypatch.delenv("HORIZON_SERVER")
    assert tab("job", "watch", "") == []


def test_the_options_before_are_used(
    tab: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, daemon: FakeDaemon
) -> None:
    monkeypatch.delenv("HORIZON_SERVER")
    assert tab("--server", daemon.address, "model", "get", "") == ["plain,tiny-base"]
    assert tab("model", "get", "--server", daemon.address, "") == ["plain,tiny-base"]


def test_the_bash_script_is_valid(run: Run, tmp_path: Path) -> None:
    script = run("completion", "bash").stdout
    assert "compopt -o nospace" in script
    checked = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")
