from __future__ import annotations

import pytest

from horizon_server.engine.report import TransferReport, overlap_ratio


@pytest.mark.parametrize(
    ("busy_s", "exposed_s", "ratio"), [(2.0, 0.5, 0.75), (2.0, 0.0, 1.0), (0.0, 0.0, 1.0), (1.0, 3.0, 0.0)]
)
def test_overlap_is_the_hidden_share_of_copying(busy_s: float, exposed_s: float, ratio: float) -> None:
    assert overlap_ratio(busy_s=busy_s, exposed_s=exposed_s) == ratio
    assert TransferReport(bytes=1, busy_s=busy_s, exposed_s=exposed_s).overlap_ratio == ratio
