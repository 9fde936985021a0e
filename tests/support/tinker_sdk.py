"""Tinker's SDK, connected to a daemon of a test."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tinker import RestClient, ServiceClient


@contextmanager
def without_leaks() -> Iterator[None]:
    """Have what the SDK leaves open be collected here: elsewhere it would be the error of a test that has nothing to do
    with it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield
        gc.collect()


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
