"""The forecast of what stays on a device, as the documentation shows it."""

from __future__ import annotations

from pathlib import Path

from bench.residents import table

DOCUMENT = Path(__file__).parents[3] / "docs" / "performance.md"


def test_the_documentation_shows_what_the_forecast_prints() -> None:
    assert "\n".join(table()) in DOCUMENT.read_text()


def test_packed_weights_that_stay_are_as_good_as_whole_ones_within_a_hundredth() -> None:
    for line in table()[2:]:
        nothing, packed, whole = (float(cell) for cell in line.split("|")[2:5])
        assert packed < nothing and packed <= 1.01 * whole
