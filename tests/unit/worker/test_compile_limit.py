"""A compilation has a limit of time: training then starts without it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from horizon_server.engine.compiled.library import CodeLibrary
from horizon_server.jobs import compile_request
from horizon_server.jobs.compile_request import CompileRequest
from horizon_server.records.job import StopRequest
from horizon_server.worker import compilation
from horizon_server.worker.compilation import Compilation
from horizon_server.worker_link.orders import Orders


def waiting(folder: Path, *, order: StopRequest = StopRequest.NOTHING) -> Any:
    """What `_run_child` reads of a compilation, with a request for a model that is not there."""
    request = CompileRequest(
        model=str(folder), library=str(folder), dtype="float32", device="cpu", num_threads=1, num_tokens=64
    )
    orders = Orders()
    orders.current = order
    return cast(Any, SimpleNamespace(_request=request, _library=CodeLibrary(folder), _orders=orders))


@pytest.mark.parametrize(
    ("order", "refusals"),
    [(StopRequest.NOTHING, ["compiling took more than 0 s"]), (StopRequest.DRAIN, []), (StopRequest.CANCEL, [])],
)
def test_a_compilation_ends_at_its_limit_and_with_its_attempt(
    order: StopRequest, refusals: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if order is StopRequest.NOTHING:
        monkeypatch.setattr(compile_request, "MAX_COMPILE_S", 0.0)
        monkeypatch.setattr(compilation, "MAX_COMPILE_S", 0.0)
    assert asyncio.run(Compilation._run_child(waiting(tmp_path, order=order))) == refusals
