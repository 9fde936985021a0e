"""Fixtures of the golden tests."""

from __future__ import annotations

from tests.support.tiny_models import documents, pack, plain_loss, quiet_transformers, start, tiny_model

__all__ = ["documents", "pack", "plain_loss", "quiet_transformers", "start", "tiny_model"]
