"""The forecast for a GPU: within a few percent of an independent one, and the page shows what the model says today."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from bench.forecast import TOKENS, VARIANTS, forecast, model_7b, table

PAGE = Path(__file__).resolve().parents[3] / "docs" / "performance.md"
# Useful TFLOP/s at TOKENS, from a model that another person wrote with closed formulas instead of a played schedule.
INDEPENDENT = {
    "now-120": (133, 284, 343, 352, 357),
    "now": (181, 330, 346, 354, 358),
    "now-350": (235, 340, 348, 355, 358),
    "short-rows": (156, 262, 269, 273, 276),
    "1": (185, 348, 368, 377, 381),
    "2": (196, 389, 430, 442, 448),
    "3": (199, 401, 444, 457, 463),
    "4": (201, 405, 449, 462, 469),
    "5": (221, 429, 471, 473, 475),
    "6": (242, 477, 495, 482, 476),
    # These three by a second reviewer, who counted bytes on the traced graphs.
    "rows-today": (195, 353, 366, 370, 372),
    "eager-today": (198, 365, 381, 386, 388),
    "measured": (209, 409, 444, 450, 453),
    # The same, faster by what he has for fewer copies next to attention for Hopper.
    "job": (210, 414, 450, 456, 459),
    "fp8": (246, 532, 652, 658, 660),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_the_forecast_agrees_with_an_independent_one_within_eight_percent(name: str) -> None:
    folder = model_7b()
    found = [forecast(VARIANTS[name], tokens, folder).model_flops_per_s / 1e12 for tokens in TOKENS]
    assert found == [pytest.approx(expected, rel=0.08) for expected in INDEPENDENT[name]]


def test_the_parts_of_a_step_of_64k_tokens_agree_too() -> None:
    parts = forecast(VARIANTS["now"], 65536, model_7b()).parts_s
    # The independent model's seconds at its rates, with the rates that were measured later; attention as it was
    # measured.
    expected = {
        "gemm": 5.05 * 690 / 710,
        "attention": 1.04,
        "elementwise": 1.72 * 2.6 / 2.91,
        "accumulation": 0.47 * 2.2 / 2.48,
        "head": 0.26 * 2.6 / 2.91,
        "adamw": 1.09,
    }
    assert {name: parts[name] for name in expected} == pytest.approx(expected, rel=0.05)
    assert (parts["ramp"], parts["tail"], parts["exposed"]) == pytest.approx((0.17, 0.17, 0.34), abs=0.06)


MEASURED = {
    ("measured", 8192): 211.4,
    ("measured", 32768): 414.4,
    ("measured", 65536): 451.4,
    ("eager-today", 65536): 378.9,
}
"""Useful TFLOP/s of one H100: bench/RESULTS.md, 2026-11-26."""
# Of its host's memory in GB/s: 165 in AdamW's 26 bytes a parameter, and the link's 2 meanwhile.
MEASURED_HOST = 165 * 28 / 26


@pytest.mark.parametrize(("name", "tokens"), MEASURED)
def test_the_forecast_is_within_four_percent_of_what_an_h100_did(name: str, tokens: int) -> None:
    variant = dataclasses.replace(VARIANTS[name], host_gbps=MEASURED_HOST)
    found = forecast(variant, tokens, model_7b()).model_flops_per_s / 1e12
    assert found == pytest.approx(MEASURED[name, tokens], rel=0.04)
    row = f"{tokens:,} tokens{', eager layers' if name == 'eager-today' else ''} |"
    (line,) = (line for line in PAGE.read_text("utf-8").splitlines() if line.startswith(f"| {row}"))
    assert f"| {MEASURED[name, tokens]:.0f} | {found:.0f} |" in line, "the page says something else"


def test_the_page_shows_what_the_model_says() -> None:
    text = PAGE.read_text("utf-8")
    assert "\n".join(table()) in text, "run python -m bench.forecast and paste its table into docs/performance.md"
