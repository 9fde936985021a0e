"""The rehearsal of large models, on a tiny one: it trains at the speeds that it is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bench.drive import Shape
from bench.giant import FORMS
from bench.giant_rehearsal import over_a_drive, rehearse
from tests.support.drives import drive_folders

_MIXTURE: dict[str, Any] = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 3,
    "num_local_experts": 8,
    "layer_types": ["full_attention"] * 3,
}


@pytest.mark.parametrize("title", ["exact, no clipping", "compressed, clipping, experts in pages"])
def test_a_step_takes_no_less_than_its_queues(tmp_path: Path, title: str) -> None:
    [form] = [form for form in FORMS if form.title == title]
    found = rehearse(_MIXTURE, form, width=64, scale=0.2, num_steps=1, drive=str(tmp_path))
    assert found is not None and not found.drive_s
    assert found.predicted_s == pytest.approx(found.forecast_s, rel=0.15)
    assert found.measured_s > 0.9 * found.predicted_s


@pytest.mark.parametrize("clips", [True, False])
def test_a_step_takes_no_less_than_its_drive(tmp_path: Path, clips: bool) -> None:
    [drive] = drive_folders(tmp_path, 1)
    shape = Shape(name="the drive decides", forward_s=0.1, backward_s=0.2, drive_s=0.6, clips=clips)
    alone_s, step_s, predicted_s = over_a_drive(shape, drive=drive, num_steps=1)
    assert alone_s >= 0.3 and 0.9 * shape.drive_s < step_s
    assert predicted_s >= shape.drive_s
