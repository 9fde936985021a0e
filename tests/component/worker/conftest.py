"""Fixtures of the worker's tests."""

from __future__ import annotations

from tests.support.worker_attempts import inputs

__all__ = ["inputs"]
