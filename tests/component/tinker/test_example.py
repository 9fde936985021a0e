"""The example runs as it is written."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.support.pushed_state import MODEL, PushedState

EXAMPLE = Path(__file__).parents[3] / "examples" / "tinker_training.py"


def test_a_model_is_trained_and_asked(url: str, key_of: Callable[..., str], pushed: PushedState) -> None:
    command = [sys.executable, str(EXAMPLE), "--model", MODEL, "--tokenizer", str(pushed.model), "--steps", "4"]
    environment = os.environ | {"TINKER_BASE_URL": url, "TINKER_API_KEY": key_of()}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    losses = [float(line.rpartition(" ")[2]) for line in done.stdout.splitlines() if line.startswith("step ")]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert "saved as tinker://" in done.stdout
    assert done.stdout.count("answer: ") == 2
