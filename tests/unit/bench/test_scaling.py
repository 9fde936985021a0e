"""The forecast for several GPUs: the page shows what the model says today."""

from __future__ import annotations

from pathlib import Path

from bench.scaling import table

PAGE = Path(__file__).resolve().parents[3] / "docs" / "performance.md"


def test_the_page_shows_what_the_model_says() -> None:
    assert "\n".join(table()) in PAGE.read_text("utf-8")
