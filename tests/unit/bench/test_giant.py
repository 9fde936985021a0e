"""The forecast for the largest open models: the page shows what the planner says today."""

from __future__ import annotations

from pathlib import Path

from bench.giant import table

PAGE = Path(__file__).resolve().parents[3] / "docs" / "larger.md"


def test_the_page_shows_what_the_planner_says() -> None:
    assert "\n".join(table()) in PAGE.read_text("utf-8")
