"""The light client of horizon: `Client` and `AsyncClient` have the same methods, the first blocks and the second awaits.

    from horizon_client import Client

    with Client() as client:  # the profile of `horizon login`; or Client("gpubox:7171", token=..., ca_file=...)
        client.datasets.push(["train.jsonl"], name="notes")
        job = client.jobs.submit({"name": "first", "model": "tiny-base", "dataset": "notes"})
        for event in client.jobs.watch(job.job_id):
            if event.kind == "step":
                print(event.step, event.loss)

Answers are frozen dataclasses (`horizon_client.resources`), never generated messages: they print well, compare by value and stay the
same when the wire grows. Errors are leaves of `HorizonClientError`. Importing this package loads neither grpc nor protobuf; naming
`Client` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from horizon_client.errors import (
    AlreadyExists,
    BadConfig,
    BadFile,
    CorruptDownload,
    DeadlineExceeded,
    FileConflict,
    HorizonClientError,
    InvalidRequest,
    NotAllowed,
    NotAuthenticated,
    NotAvailable,
    NotFound,
    ServerFailed,
    Unavailable,
    Violation,
    WouldNotFit,
    WrongState,
)

if TYPE_CHECKING:
    from horizon_client.async_client import AsyncClient
    from horizon_client.sync_client import Client

__all__ = [
    "AlreadyExists",
    "AsyncClient",
    "BadConfig",
    "BadFile",
    "Client",
    "CorruptDownload",
    "DeadlineExceeded",
    "FileConflict",
    "HorizonClientError",
    "InvalidRequest",
    "NotAllowed",
    "NotAuthenticated",
    "NotAvailable",
    "NotFound",
    "ServerFailed",
    "Unavailable",
    "Violation",
    "WouldNotFit",
    "WrongState",
]


def __getattr__(name: str) -> object:
    """Load the clients when they are first named, so that a bare import stays cheap."""
    if name == "Client":
        from horizon_client.sync_client import Client

        return Client
    if name == "AsyncClient":
        from horizon_client.async_client import AsyncClient

        return AsyncClient
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
