"""Fixtures of the golden tests."""

from __future__ import annotations

from tests.support.tiny_models import documents, engine, pack, plain_loss, quiet_transformers, start, tiny_model

__all__ = ["documents", "engine", "pack", "plain_loss", "quiet_transformers", "start", "tiny_model"]
