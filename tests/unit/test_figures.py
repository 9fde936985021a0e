"""The figures of a step and of an evaluation."""

from __future__ import annotations

import pytest

from horizon_server.figures import EvalFigures, TransferFigures, overlap_ratio, total_evaluation


@pytest.mark.parametrize(
    ("busy_s", "exposed_s", "ratio"), [(2.0, 0.5, 0.75), (2.0, 0.0, 1.0), (0.0, 0.0, 1.0), (1.0, 3.0, 0.0)]
)
def test_overlap_is_the_hidden_share_of_copying(busy_s: float, exposed_s: float, ratio: float) -> None:
    transfer = TransferFigures(bytes=1, busy_s=busy_s, exposed_s=exposed_s)
    assert transfer.overlap_ratio == overlap_ratio([transfer, transfer]) == ratio


def test_the_parts_of_an_evaluation_count_by_their_targets() -> None:
    parts = [
        EvalFigures(eval_loss=1.0, num_targets=1, num_tokens=4, duration_s=2.0, h2d=TransferFigures(bytes=3)),
        EvalFigures(
            eval_loss=4.0, num_targets=2, num_tokens=5, compute_s=1.0, h2d=TransferFigures(bytes=4, busy_s=1.0)
        ),
    ]
    assert total_evaluation(parts) == EvalFigures(
        eval_loss=3.0,
        num_targets=3,
        num_tokens=9,
        duration_s=2.0,
        compute_s=1.0,
        h2d=TransferFigures(bytes=7, busy_s=1.0),
    )
