"""Rates: curves between their points, the nearest width, and what is refused when a file is read."""

from __future__ import annotations

import dataclasses

import pytest
from tests.support.rates import RATES

from horizon_server.codec import from_json, from_plain, to_json, to_plain
from horizon_server.planning.rates import DeviceRates, rate_at


def test_a_curve_is_straight_in_logarithms_and_level_beyond_its_ends() -> None:
    curve = ((64, 1e9), (256, 4e9))
    assert [rate_at(curve, tokens) for tokens in (1, 64, 256, 9999)] == [1e9, 1e9, pytest.approx(4e9), 4e9]
    assert rate_at(curve, 128) == pytest.approx(2e9)


def test_the_nearest_width_speaks_for_a_model() -> None:
    widths = tuple(dataclasses.replace(RATES.widths[0], hidden_size=size) for size in (256, 512, 1024))
    rates = dataclasses.replace(RATES, widths=widths)
    assert [rates.at(size).hidden_size for size in (64, 256, 361, 363, 900, 8192)] == [256, 256, 256, 512, 1024, 1024]


def test_rates_survive_a_file_and_nonsense_is_refused() -> None:
    assert from_json(DeviceRates, to_json(RATES)).checked() == RATES
    plain = to_plain(RATES)
    for broken in (
        {**plain, "h2d_bytes_per_s": 0.0},
        {**plain, "peak_flops_per_s": float("nan")},
        {**plain, "attention_forward_flops_per_s": []},
        {**plain, "attention_forward_flops_per_s": [[1, -1.0]]},
        {**plain, "widths": []},
        {**plain, "widths": [{**plain["widths"][0], "elementwise_bytes_per_s": -1.0}]},
    ):
        with pytest.raises(ValueError, match="above zero"):
            from_plain(DeviceRates, broken).checked()
