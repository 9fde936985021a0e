"""The example runs as it is written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from openai import OpenAI
from tests.support.daemon_process import DaemonProcess

EXAMPLE = Path(__file__).parents[3] / "examples" / "openai_fine_tuning.py"


def test_a_model_is_tuned_and_asked(client: OpenAI, daemon: DaemonProcess) -> None:
    url = f"http://{daemon.endpoints['http']}/v1"
    command = [sys.executable, str(EXAMPLE), "--base-url", url, "--model", "demo-model", "--epochs", "1"]
    environment = os.environ | {"OPENAI_API_KEY": client.api_key}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "The job is SUCCEEDED" in done.stdout
    assert "ft:demo-model:ada:parcels:job_" in done.stdout
