"""The predicted step: the schedule played by hand on small cases, exact arithmetic over given rates, and what decides
the time. That it meets real steps is bench/prediction.py's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from tests.support.plans import step_work
from tests.support.rates import RATES

from horizon_server.planning.model_folder import ModelFolder, open_model_folder
from horizon_server.planning.play import Visit, play
from horizon_server.planning.rates import DeviceRates
from horizon_server.planning.step_parts import StepWork
from horizon_server.planning.step_time import Seconds, predict_step
from horizon_server.records.execution import DeviceKind

TOKENS, ROW = 160, 64


@pytest.fixture
def folder(make_model: Callable[..., Path]) -> ModelFolder:
    return open_model_folder(make_model(tied=False))


def work_of(
    folder: ModelFolder, device_kind: DeviceKind = "cuda", *, grad_bytes: int = 2, tokens: int = TOKENS
) -> StepWork:
    return step_work(
        folder,
        tokens_per_step=tokens,
        sequence_length=ROW,
        device_kind=device_kind,
        grad_bytes=grad_bytes,
        activation_placement="device",
    )


def program(num_layers: int, *, upload: float, forward: float, backward: float, download: float) -> list[Visit]:
    """Equal layers between an embedding and a head that take no time."""
    layers = range(1, num_layers + 1)
    edges = [
        Visit(unit=u, ring="edge", upload_s=0, compute_s=0, gradient=g)
        for u, g in ((0, False), (num_layers + 1, True), (0, True))
    ]
    up = [Visit(unit=i, ring="layer", upload_s=upload, compute_s=forward) for i in layers]
    down = [
        Visit(unit=i, ring="layer", upload_s=upload, compute_s=backward, download_s=download, gradient=True)
        for i in reversed(layers)
    ]
    return [edges[0], *up, edges[1], *down, edges[2]]


def updates(num_layers: int, seconds: float) -> list[tuple[int, float]]:
    return [(0, 0.0), *((i, seconds) for i in range(1, num_layers + 1)), (num_layers + 1, 0.0)]


def test_compute_hides_all_but_the_first_upload_and_the_last_download() -> None:
    found = play(program(4, upload=1, forward=3, backward=9, download=2), updates(4, 0), updates_in_backward=False)
    assert found.compute_s == 4 * 3 + 4 * 9
    assert (found.ramp_s, found.tail_s) == (1, 2)
    assert found.step_s == found.compute_s + found.exposed_s == 48 + 3


def test_a_link_that_is_slower_than_compute_decides_both_passes() -> None:
    found = play(program(4, upload=5, forward=1, backward=2, download=3), updates(4, 0), updates_in_backward=False)
    # Eight uploads one after the other; then the last layer's compute and its gradient's way down.
    assert found.step_s == 8 * 5 + 2 + 3


def test_with_clipping_the_updates_of_the_last_step_come_before_the_uploads_of_this_one() -> None:
    found = play(program(4, upload=1, forward=1, backward=6, download=1), updates(4, 10), updates_in_backward=False)
    # The fourth update ends at 40, its layer is up at 41 and through at 42; backward is hidden but for its last
    # download.
    assert found.step_s == 42 + 4 * 6 + 1
    # The first layer waits for its own update only.
    assert found.ramp_s == 11


def test_without_clipping_the_updates_run_under_backward() -> None:
    free = play(program(4, upload=1, forward=1, backward=6, download=1), updates(4, 0), updates_in_backward=True)
    hidden = play(program(4, upload=1, forward=1, backward=6, download=1), updates(4, 5), updates_in_backward=True)
    # Only the first layer's update, which comes last, still runs when the next step wants its weights.
    assert hidden.step_s == free.step_s + 5
    slow = play(program(4, upload=1, forward=1, backward=6, download=1), updates(4, 20), updates_in_backward=True)
    # Four updates in a row; from the last one on the first layer goes up, forward and backward reach the last layer's
    # gradient.
    assert slow.step_s == 4 * 20 + 1 + 4 + 6 + 1


def test_a_unit_that_is_updated_in_two_parts_is_read_after_the_first() -> None:
    visits = program(2, upload=1, forward=1, backward=1, download=0)
    whole = play(visits, [(0, 10.0), (1, 0.0), (2, 0.0), (3, 0.0)], updates_in_backward=False)
    rows_first = play(visits, [(0, 1.0), (1, 0.0), (2, 0.0), (3, 0.0), (0, 3.0)], updates_in_backward=False)
    assert whole.step_s - rows_first.step_s == 9


def test_the_seconds_of_each_part_are_its_work_over_its_rate(folder: ModelFolder) -> None:
    work = work_of(folder)
    parts = Seconds.of(work, RATES).compute()
    layer, head = work.layer, work.head
    products = 3 * (layer.forward_flops + layer.recompute_flops + layer.backward_flops) + head.flops
    assert parts["gemm"] == pytest.approx(products / 1e9)
    assert parts["attention"] == pytest.approx(3 * layer.attention_flops * (2 / 5e8 + 2.5 / 2.5e8))
    assert parts["elementwise"] == pytest.approx(
        3 * (layer.forward_bytes + layer.recompute_bytes + layer.backward_bytes) / 2e8
    )
    assert parts["accumulation"] == pytest.approx(3 * layer.accumulate_bytes / 4e8)
    assert parts["head"] == pytest.approx(head.elementwise_bytes / 3e8 + head.accumulate_bytes / 4e8)
    assert parts["clearing"] == pytest.approx(sum(u.clear_bytes for u in (*work.layers, work.head_traffic)) / 4e8)
    assert parts["launches"] == 0


def test_launches_are_hidden_on_a_device_of_its_own_and_add_up_on_the_host(folder: ModelFolder) -> None:
    work, slow = work_of(folder), dataclasses.replace(RATES, forward_launch_s=1.0, backward_launch_s=2.0)
    quiet = Seconds.of(work, RATES)
    hidden, added = (Seconds.of(work, dataclasses.replace(slow, launches_add=adds)) for adds in (False, True))
    assert added.compute()["launches"] == pytest.approx(3 * 3 * (1 + 2))
    layer_s = sum(quiet.layer_forward.values()) + sum(quiet.layer_backward.values())
    assert hidden.compute()["launches"] == pytest.approx(3 * (3 * (1 + 2) - layer_s))


def test_on_the_host_everything_adds_up(folder: ModelFolder) -> None:
    work = work_of(folder, "host", grad_bytes=4)
    found = predict_step(work, RATES, shares_processors=True, max_steps=10)
    seconds = Seconds.of(work, RATES)
    assert found.step_s == pytest.approx(sum(seconds.busy().values()))
    assert found.tokens_per_second == pytest.approx(TOKENS / found.step_s)
    assert found.model_flops_per_s == pytest.approx(work.model_flops / found.step_s)
    assert found.total_s == pytest.approx(10 * found.step_s)
    assert found.parts_s["adamw"] == pytest.approx(28 * folder.layout.num_elements / 1e9)
    assert (found.bound, found.peak_flops_per_s, found.machine, found.measured) == ("compute", 4e9, "host", True)
    assert predict_step(work, RATES, shares_processors=True).total_s is None


def test_parts_that_are_not_hidden_are_the_difference_between_step_and_compute(folder: ModelFolder) -> None:
    found = predict_step(work_of(folder), RATES, shares_processors=False)
    computed = ("gemm", "attention", "elementwise", "accumulation", "head", "clearing", "embedding", "launches")
    assert found.step_s == pytest.approx(sum(found.parts_s[name] for name in computed) + found.parts_s["exposed"])
    assert 0 < found.parts_s["ramp"] + found.parts_s["tail"] <= found.parts_s["exposed"] + 1e-9


@pytest.mark.parametrize(
    ("change", "bound"),
    [
        ({"h2d_bytes_per_s": 1e3}, "h2d"),
        ({"d2h_bytes_per_s": 1e3}, "d2h"),
        ({"adamw_bytes_per_s": 1e3}, "host memory"),
        ({"attention_forward_flops_per_s": ((1, 1e3),)}, "compute"),
    ],
)
@pytest.mark.parametrize("shares_processors", [True, False])
@pytest.mark.parametrize("grad_bytes", [0, 2])
def test_the_bound_is_the_queue_that_decides(
    folder: ModelFolder, shares_processors: bool, grad_bytes: int, change: dict[str, float], bound: str
) -> None:
    rates = dataclasses.replace(RATES, **change)  # type: ignore[arg-type]
    assert (
        predict_step(work_of(folder, grad_bytes=grad_bytes), rates, shares_processors=shares_processors).bound == bound
    )


RATE_NAMES = [field.name for field in dataclasses.fields(DeviceRates) if field.name.endswith("bytes_per_s")]


@pytest.mark.parametrize("name", RATE_NAMES)
@pytest.mark.parametrize("shares_processors", [True, False])
@pytest.mark.parametrize("grad_bytes", [0, 2])
def test_more_bandwidth_never_makes_a_step_longer(
    folder: ModelFolder, shares_processors: bool, grad_bytes: int, name: str
) -> None:
    work = work_of(folder, grad_bytes=grad_bytes)
    steps = []
    for factor in (0.01, 0.1, 1, 10, 100):
        rates = dataclasses.replace(RATES, **{name: factor * getattr(RATES, name)})
        steps.append(predict_step(work, rates, shares_processors=shares_processors).step_s)
    # But for rounding, where the rate does not matter
    assert all(after <= before * (1 + 1e-12) for before, after in pairwise(steps))


def test_backward_finds_the_last_two_layers_in_their_slots(folder: ModelFolder) -> None:
    layers = [visit for visit in Seconds.of(work_of(folder), RATES).visits if visit.ring == "layer"]
    assert [visit.upload_s > 0 for visit in layers] == [True, True, True, False, False, True]
