from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from bench.trace_overlap import overlap_of_step

from horizon_server.engine.device.timeline import Span


def work(queue: str, label: str, start_s: float, end_s: float) -> Span:
    return Span(queue=queue, start_s=start_s, end_s=end_s, label=label)


def one_layer_step() -> list[Span]:
    """An untied model of one layer: every copy takes a second, and compute lacks some of them."""
    return [
        work("h2d", "rows of embed", 0, 1),
        work("h2d", "unit 1", 1, 2),
        work("h2d", "unit 2", 2, 3),
        work("h2d", "unit 1", 3, 4),
        work("h2d", "rows of embed", 4, 5),
        work("compute", "forward 0", 1, 1.5),
        work("compute", "forward 1", 2, 4),
        work("compute", "zero gradient 2", 4, 4),
        work("compute", "backward 2", 4, 5),
        work("compute", "zero gradient 1", 5, 5),
        work("compute", "backward 1", 5, 6),
        work("compute", "zero gradient 0", 6.5, 6.5),
        work("compute", "backward 0", 6.5, 7),
        work("d2h", "gradient 2", 5.5, 6.5),
        work("d2h", "gradient 1", 6.5, 7.5),
        work("d2h", "gradient 0", 7.5, 8.5),
    ]


def test_a_pause_counts_for_the_copy_that_is_missing() -> None:
    overlap = overlap_of_step(one_layer_step(), num_gradient_slots=2)

    assert overlap["h2d"].busy_s == 5
    assert overlap["h2d"].exposed_s == pytest.approx(1 + 0.5), "the embedding's rows, and what is left of the layer"
    assert overlap["d2h"].exposed_s == pytest.approx(0.5 + 1.5), (
        "the head's slot, which the embedding takes, and the tail"
    )
    assert overlap["h2d"].ratio == pytest.approx(0.7)


def test_a_pause_that_no_copy_explains_counts_for_none() -> None:
    late = [
        work(span.queue, span.label, span.start_s + 20, span.end_s + 20) if span.label.startswith("gradient") else span
        for span in one_layer_step()
        if span.label != "backward 0"
    ]
    late = [*late, work("compute", "backward 0", 30, 31)]

    overlap = overlap_of_step(late, num_gradient_slots=2)

    assert overlap["h2d"].exposed_s == pytest.approx(1.5), "its rows had arrived long before"


def test_a_pause_before_work_of_no_unit_counts_for_what_the_next_unit_lacks() -> None:
    changes: dict[str, dict[str, Any]] = {
        "zero gradient 2": {"label": "zero hidden gradient"},
        "forward 1": {"end_s": 2.5},
    }
    spans = [replace(span, **changes.get(span.label, {})) for span in one_layer_step()]

    overlap = overlap_of_step(spans, num_gradient_slots=2)

    assert overlap["h2d"].exposed_s == pytest.approx(1 + 0.5 + 0.5), "the head is on its way until 3"


def test_a_layer_that_writes_into_its_slot_at_once_waits_for_it_too() -> None:
    spans = [span for span in one_layer_step() if span.label != "zero gradient 0"]

    overlap = overlap_of_step(spans, num_gradient_slots=2)

    assert overlap["d2h"].exposed_s == pytest.approx(0.5 + 1.5)


def test_a_tied_head_waits_for_its_table() -> None:
    spans = [
        work("h2d", "rows of embed", 0, 1),
        work("h2d", "unit 1", 1, 2),
        work("h2d", "unit 2", 2, 3),
        work("h2d", "unit 0", 3, 6),
        work("compute", "forward 0", 1, 2),
        work("compute", "forward 1", 2, 3),
        work("compute", "backward 2", 6, 7),
        work("d2h", "gradient 2", 7, 7),
    ]

    assert overlap_of_step(spans, num_gradient_slots=2)["h2d"].exposed_s == pytest.approx(1 + 3)


def test_layer_0_comes_ahead_of_the_embedding_and_the_last_layers_once() -> None:
    spans = [
        work("h2d", "unit 1", 0, 1),
        work("h2d", "rows of embed", 1, 3),
        work("h2d", "unit 2", 3, 5),
        work("h2d", "rows of embed", 5, 6),
        work("compute", "forward 0", 3, 3.5),
        work("compute", "forward 1", 3.5, 4),
        work("compute", "backward 2", 5, 6),
        work("compute", "backward 1", 7, 8),
        work("compute", "backward 0", 8, 9),
        work("d2h", "gradient 0", 9, 9),
    ]

    assert overlap_of_step(spans, num_gradient_slots=2)["h2d"].exposed_s == pytest.approx(3 + 1)


def test_waits_the_engine_logged_are_not_looked_at() -> None:
    spans = one_layer_step()
    logged = Span(queue="compute", start_s=0, end_s=100, waits_for="h2d")

    assert overlap_of_step([logged, *spans], num_gradient_slots=2) == overlap_of_step(spans, num_gradient_slots=2)
