"""What crosses the network of a job on several nodes: the page shows what the planner counts today."""

from __future__ import annotations

from pathlib import Path

from bench.nodes import table

PAGE = Path(__file__).resolve().parents[3] / "docs" / "nodes.md"


def test_the_page_shows_what_the_planner_counts() -> None:
    assert "\n".join(table()) in PAGE.read_text("utf-8")
