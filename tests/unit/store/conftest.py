from __future__ import annotations

from tests.qwen3_folders import make_model

__all__ = ["make_model"]
