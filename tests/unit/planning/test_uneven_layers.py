"""When a plan deals layers by the speed of the devices, and what it predicts for uneven ones."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from tests.support.rates import RATES
from tests.unit.planning.test_by_layers import planner_of, spec_of, written

from horizon_server.codec import from_plain, to_plain
from horizon_server.planning.machine import Gpu
from horizon_server.planning.planner import Planner
from horizon_server.planning.rates import DeviceRates
from horizon_server.records.plan import Plan

GIB = 1 << 30
FAST, SLOW = (
    Gpu(index=index, name=name, memory_bytes=80 * GIB, uuid=f"GPU-{name}") for index, name in enumerate(("a", "b"))
)


def with_compute(rates: DeviceRates, times: float) -> DeviceRates:
    """Rates of a device that computes this many times as fast; its links are the same."""

    def faster(curve: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
        return tuple((tokens, times * rate) for tokens, rate in curve)

    widths = tuple(
        dataclasses.replace(
            width,
            gemm_flops_per_s=faster(width.gemm_flops_per_s),
            elementwise_bytes_per_s=times * width.elementwise_bytes_per_s,
            head_bytes_per_s=times * width.head_bytes_per_s,
        )
        for width in rates.widths
    )
    return dataclasses.replace(
        rates,
        widths=widths,
        attention_forward_flops_per_s=faster(rates.attention_forward_flops_per_s),
        attention_backward_flops_per_s=faster(rates.attention_backward_flops_per_s),
        accumulate_bytes_per_s=times * rates.accumulate_bytes_per_s,
    )


COMPUTE_BOUND = dataclasses.replace(
    RATES,
    h2d_bytes_per_s=1e15,
    d2h_bytes_per_s=1e15,
    gather_bytes_per_s=1e15,
    scatter_bytes_per_s=1e15,
    adamw_bytes_per_s=1e15,
    compressed_parameters_per_s=1e15,
)
LINK_BOUND = dataclasses.replace(with_compute(RATES, 1e6), h2d_bytes_per_s=1e3, d2h_bytes_per_s=1e3)


def planner(rates: DeviceRates, slow: float | None) -> Planner:
    """Of a node whose second GPU computes at this part of the first one's speed; None: it has not been measured."""
    measured = {"host": RATES, "cuda": rates} | ({} if slow is None else {"cuda b": with_compute(rates, slow)})
    return planner_of(rates=measured, accelerators=(FAST, SLOW), arena_bytes=80 * GIB)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return written(tmp_path)


def planned(model: Path, rates: DeviceRates = COMPUTE_BOUND, slow: float | None = 0.5, **spec: Any) -> Plan:
    asked = {"device": "cuda", "parallel": "layers", "tokens_per_step": 4096, **spec}
    return planner(rates, slow).plan(spec_of(**asked), model)


def step_s(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_s


def test_the_faster_device_gets_more_layers_where_compute_decides(model: Path) -> None:
    plan = planned(model)
    assert (plan.parallel, plan.execution.layer_ranks) == ("layers", (0, 1, 0, 0, 1, 0))
    assert " by 2 devices in 8 lanes, by layers dealt 4:2, predicted " in plan.summary
    alike = planned(model, slow=1.0)
    assert alike.execution.layer_ranks == planned(model, slow=None).execution.layer_ranks == ()
    assert step_s(alike) < step_s(plan)
    # Memory does not depend on who has which layer.
    assert (plan.host_bytes, plan.device_bytes) == (alike.host_bytes, alike.device_bytes)


def test_the_devices_are_in_the_order_of_the_ranks(model: Path) -> None:
    spec = spec_of(device="cuda", parallel="layers", tokens_per_step=4096)
    of_node = planner(COMPUTE_BOUND, 0.5)
    found = [of_node.plan_to_start(spec, model, gpus=gpus) for gpus in ((FAST, SLOW), (SLOW, FAST))]
    assert [plan.execution.layer_ranks for plan in found] == [(0, 1, 0, 0, 1, 0), (1, 0, 1, 1, 0, 1)]
    assert [plan.execution.gpu for plan in found] == ["GPU-a,GPU-b", "GPU-b,GPU-a"]


def test_where_links_decide_layers_go_round_in_turn(model: Path) -> None:
    assert planned(model, LINK_BOUND, tokens_per_step=1024).execution.layer_ranks == ()


def test_a_job_with_a_range_of_devices_has_them_in_turn(model: Path) -> None:
    """What it continues on is not known when its memory is kept."""
    assert planned(model, gpus="1-2").execution.layer_ranks == ()


def test_by_rows_the_prediction_knows_uneven_devices_too(model: Path) -> None:
    """Or the ways could not be compared."""
    alike, uneven = (planned(model, slow=slow, parallel="rows") for slow in (1.0, 0.5))
    # Of eight lanes the slow one computes two, or three: six at full speed take as long as three at half.
    assert step_s(uneven) == pytest.approx(step_s(alike) * 6 / 4, rel=0.02)
    assert uneven.execution.layer_ranks == () and uneven.execution.deals_lanes
    assert uneven.ways is not None and uneven.ways.layers_s == step_s(planned(model))


def test_an_older_plan_has_its_layers_in_turn(model: Path) -> None:
    plan = planned(model)
    assert from_plain(Plan, to_plain(plan)) == plan
    older = to_plain(plan)
    older["execution"] = {name: value for name, value in older["execution"].items() if name != "layer_ranks"}
    assert from_plain(Plan, older).execution.layer_ranks == ()
