"""The blocking client is generated from the async one, the records from the wire contract, and the committed code is
fresh."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from horizon_client import AsyncClient, Client

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("generator", ["generate_client_resources", "generate_sync_client"])
def test_the_generated_code_is_fresh(generator: str) -> None:
    command = [sys.executable, f"tools/{generator}.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("member", ["jobs", "datasets", "models", "checkpoints", "node", "sharing", "housekeeping"])
async def test_both_clients_have_the_same_methods(member: str) -> None:
    with Client("127.0.0.1:1") as blocking:
        async with AsyncClient("127.0.0.1:1") as inner:
            ours, theirs = _methods(getattr(blocking, member)), _methods(getattr(inner, member))
    assert ours.keys() == theirs.keys()
    for name, method in ours.items():
        assert inspect.getdoc(method) == inspect.getdoc(theirs[name]), "with the docstring"
        assert inspect.signature(method).parameters == inspect.signature(theirs[name]).parameters
        assert not inspect.iscoroutinefunction(method)


def _methods(thing: object) -> dict[str, Any]:
    return {
        name: value for name, value in inspect.getmembers(type(thing), inspect.isfunction) if not name.startswith("_")
    }
