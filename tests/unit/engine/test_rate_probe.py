"""The probe runs the engine's own work on either kind of device, and ends within its budget."""

from __future__ import annotations

from contextlib import closing
from functools import partial

import pytest
import torch
from tests.cpu_runtime import CpuRuntime

from horizon_server.engine import rate_probe
from horizon_server.engine.device import device_for
from horizon_server.engine.device.cuda import CudaDevice
from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.rate_probe import measure_rates
from horizon_server.planning.rates import DeviceRates
from horizon_server.planning.step_time import Seconds
from horizon_server.records.execution import ComputeDtype, DeviceKind

SMALL = rate_probe.Sizes(
    widths=(64, 128, 256),
    attention_width=128,
    row_tokens=32,
    gemm_tokens=(8, 32),
    document_tokens=(16, 32),
    product=64,
    chunk_tokens=16,
    vocabulary=128,
)


@pytest.fixture(autouse=True)
def _small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_probe, "SIZES", {"host": SMALL, "cuda": SMALL})
    monkeypatch.setattr(rate_probe, "_COPY_ELEMENTS", 1 << 16)


def check(rates: DeviceRates) -> None:
    # Eight of one number, attention's two curves of two points, and per width a curve of two points and two numbers.
    numbers = list(rates.numbers())
    assert len(numbers) == 9 + 4 + 4 * len(rates.widths)
    assert all(number > 1e3 for number in numbers), rates
    assert rates.measured


def test_the_host_is_measured_in_all_widths_within_the_budget() -> None:
    rates = measure_rates("host", num_threads=1, budget_s=1000.0)
    assert (rates.name, rates.num_threads, [w.hidden_size for w in rates.widths]) == ("host", 1, [64, 128, 256])
    check(rates)


def test_without_a_budget_the_first_width_is_measured_all_the_same() -> None:
    rates = measure_rates("host", num_threads=1, budget_s=0.0)
    assert [width.hidden_size for width in rates.widths] == [64]


def test_the_host_is_measured_in_the_dtype_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def make(kind: DeviceKind, *, compute_dtype: ComputeDtype, num_threads: int) -> HostDevice:
        device = device_for(kind, compute_dtype=compute_dtype, num_threads=num_threads)
        assert isinstance(device, HostDevice)
        made.append(device.compute_dtype)
        return device

    monkeypatch.setattr(rate_probe, "device_for", make)
    check(measure_rates("host", num_threads=1, compute_dtype="bfloat16", budget_s=0.0))
    assert set(made) == {torch.bfloat16}


def test_the_cuda_devices_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the driver's port, on a machine without a GPU: the calls and the clock's marks, not the speed."""

    def make(kind: DeviceKind, *, compute_dtype: ComputeDtype, num_threads: int) -> CudaDevice:
        assert (kind, compute_dtype) == ("cuda", "bfloat16")
        return CudaDevice(runtime=CpuRuntime())

    monkeypatch.setattr(rate_probe, "device_for", make)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    rates = measure_rates("cuda", num_threads=1, budget_s=0.0)
    assert rates.name == "a GPU"
    check(rates)


@pytest.mark.parametrize("step_s", [0.5, 0.01], ids=["slow layer", "products slower alone than in the layer"])
def test_the_parts_of_a_layer_add_up_to_the_whole_that_was_measured(
    step_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = {rate_probe._FEW_TOKENS: step_s / 500, SMALL.row_tokens: step_s}
    monkeypatch.setattr(rate_probe._Llama, "step_s", lambda self, num_tokens, choose: seconds[num_tokens])
    # Of which a step that short leaves hardly any for what is not a product.
    monkeypatch.setattr(rate_probe._Probe, "product", lambda *_: 1e9)
    rates = measure_rates("host", num_threads=1, budget_s=0.0)
    with closing(rate_probe._Llama(partial(device_for, "host"), 64, SMALL, num_layers=1)) as model:
        work = model.work(SMALL.row_tokens)
    assert sum(Seconds.of(work, rates).compute().values()) == pytest.approx(step_s)


def test_what_starting_layers_takes_is_the_difference_between_few_and_many(monkeypatch: pytest.MonkeyPatch) -> None:
    def step_s(model: rate_probe._Llama, _num_tokens: int, _choose: rate_probe.Choose) -> float:
        return 0.010 + 0.004 * model._folder.shape.num_hidden_layers

    monkeypatch.setattr(rate_probe._Llama, "step_s", step_s)
    rates = measure_rates("host", num_threads=1, budget_s=0.0)
    found = (rates.forward_launch_s, rates.backward_launch_s, rates.ends_launch_s)
    assert found == pytest.approx((0.001, 0.003, 0.010))
