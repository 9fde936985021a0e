"""The light client of horizon: `Client` blocks, `AsyncClient` has the same methods as coroutines.

    from horizon_client import Client

    with Client() as client:  # the profile of `horizon login`; or Client("gpubox:7171", token=..., ca_file=...)
        client.datasets.push("train.jsonl", name="notes")
        job = client.jobs.submit({"name": "first", "model": "tiny-base", "dataset": "notes"})
        for event in client.jobs.watch(job.job_id):
            if event.kind == "step":
                print(event.step, event.loss)

Answers are frozen dataclasses (`horizon_client.resources`). Errors are subclasses of `HorizonClientError` with the
server's names. To show progress, pass your own `Reporter`. Importing this package loads neither grpc nor protobuf;
using `Client` does.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

from horizon_client import errors
from horizon_client.errors import *  # noqa: F403 - its `__all__` is the list of the public ones
from horizon_client.reporter import Progress, Reporter

if TYPE_CHECKING:
    from horizon_client.async_client import AsyncClient
    from horizon_client.sync_client import Client

__all__ = ["AsyncClient", "Client", "Progress", "Reporter"]
__all__ += errors.__all__


def __getattr__(name: str) -> object:
    """Load a client when it is first used, so that the import alone is fast."""
    modules = {"Client": "sync_client", "AsyncClient": "async_client"}
    if name not in modules:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # grpc reads it when it is imported, and without it writes a line to stderr for each handshake that fails; the error
    # says it too
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    return getattr(importlib.import_module(f"horizon_client.{modules[name]}"), name)
