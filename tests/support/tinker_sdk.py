"""Tinker's SDK, connected to a daemon of a test."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tinker import RestClient, ServiceClient
from tinker.lib import internal_client_holder


@contextmanager
def without_leaks() -> Iterator[None]:
    """Have what the SDK leaves open be collected here: elsewhere it would be the error of a test that has nothing to do
    with it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield
        gc.collect()


def close_connections() -> None:
    """Close what all clients of this process keep open: the SDK itself never does. A client that is used again connects
    again."""
    loop = internal_client_holder._internal_client_holder_thread_singleton.loop_if_started()
    if loop is None:
        return

    async def abort() -> None:
        for transport in list(loop._transports.values()):  # type: ignore[attr-defined]
            transport.abort()
        await asyncio.sleep(0)  # the loop closes the sockets in its next round

    asyncio.run_coroutine_threadsafe(abort(), loop).result(60)
    with without_leaks():
        pass


def service_client(url: str, key: str, **options: Any) -> ServiceClient:
    """Connect, with a session."""
    with without_leaks():
        service = ServiceClient(base_url=url, api_key=key, **options)
        service.holder.get_session_id()
    return service


def rest_client(url: str, key: str) -> RestClient:
    """Connect, without one."""
    with without_leaks():
        return RestClient(base_url=url, api_key=key)
