"""A compilation has a limit of time: training then starts without it."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest

from horizon_server.records.job import StopRequest
from horizon_server.worker import compilation


def test_a_compilation_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "_MAX_COMPILE_S", 0.0)
    waiting = cast(Any, SimpleNamespace(_orders=SimpleNamespace(current=StopRequest.NOTHING)))
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdout=subprocess.PIPE) as child:
        try:
            assert compilation.Compilation._answer_of(waiting, child) == ["compiling took more than 0 s"]
        finally:
            child.kill()
