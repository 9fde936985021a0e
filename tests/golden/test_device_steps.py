"""The steps that tests/gpu runs on a real device, run here on the CPU through the driver's port."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.cpu_runtime import CpuRuntime
from tests.support.device_steps import LARGE_STEP_BYTES, DeviceSteps
from tests.support.tracking_runtime import TrackingRuntime, count_losses_as_of_a_kernel

from horizon_server.engine.device.cuda import CudaDevice
from horizon_server.recipe import Matmul
from horizon_server.records.execution import ActivationPlacement
from horizon_server.store.layout import Packing

if TYPE_CHECKING:
    from tests.support.tiny_models import Engine


@pytest.fixture
def steps(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DeviceSteps:
    return DeviceSteps(
        new_device=lambda: CudaDevice(runtime=CpuRuntime(), poison_on_free=True),
        tiny_model=engine.tiny_model,
        start=engine.start,
        folder=tmp_path,
        patch=monkeypatch,
    )


@pytest.mark.parametrize("attention_layers", [0, 2])
@pytest.mark.parametrize("placement", ["device", "host"])
@pytest.mark.parametrize("architecture", ["qwen3", "gemma2", "gpt2"])
def test_rows_in_chunks(
    architecture: str, placement: ActivationPlacement, attention_layers: int, steps: DeviceSteps
) -> None:
    steps.check_chunks(architecture, placement, attention_layers)


@pytest.mark.parametrize("base", ["none", "int8", "nf4"])
@pytest.mark.parametrize("architecture", ["qwen3", "gemma2"])
def test_adapters_on_a_base_in_bf16_or_fewer_bits(architecture: str, base: Packing, steps: DeviceSteps) -> None:
    steps.check_adapters(architecture, base)


@pytest.mark.parametrize("base", ["none", "int8", "nf4"])
@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_frozen_weights_that_stay_on_the_device(architecture: str, base: Packing, steps: DeviceSteps) -> None:
    steps.check_frozen_on_device(architecture, base)


@pytest.mark.parametrize("architecture", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_experts_in_pages(architecture: str, steps: DeviceSteps) -> None:
    steps.check_paged_experts(architecture)


@pytest.mark.parametrize("max_grad_norm", [1.0, None])
@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_layers_that_the_device_updates(architecture: str, max_grad_norm: float | None, steps: DeviceSteps) -> None:
    steps.check_states_on_device(architecture, max_grad_norm)


@pytest.mark.parametrize("max_grad_norm", [1.0, None])
def test_layers_that_the_device_updates_and_drives_hold(max_grad_norm: float | None, steps: DeviceSteps) -> None:
    steps.check_states_from_drives("llama", max_grad_norm)


@pytest.mark.parametrize("matmul", ["fp8", "fp8_full"])
@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_products_in_fp8(architecture: str, matmul: Matmul, steps: DeviceSteps) -> None:
    steps.check_fp8(architecture, matmul)


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_fused_attention_whose_output_is_kept(architecture: str, steps: DeviceSteps) -> None:
    steps.check_kept_products(architecture)


# The compiler uses parts of torch that are to be replaced.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("matmul", ["bf16", "fp8"])
def test_compiled_layers(matmul: Matmul, steps: DeviceSteps) -> None:
    steps.check_compiled("qwen3", matmul)


@pytest.mark.parametrize("architecture", ["qwen3", "gemma2"])
def test_answers(architecture: str, steps: DeviceSteps) -> None:
    steps.check_generation(architecture)


def test_a_step_that_does_not_fit_takes_what_is_known_and_gives_it_back(
    steps: DeviceSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    count_losses_as_of_a_kernel(monkeypatch)
    runtime = TrackingRuntime()
    tracked = dataclasses.replace(steps, new_device=lambda: CudaDevice(runtime=runtime))
    tracked.take_the_step_that_does_not_fit()
    assert runtime.allocations.peak_bytes == pytest.approx(LARGE_STEP_BYTES, rel=0.02)

    def limit_bytes(left_bytes: int) -> None:
        runtime.limit_memory(runtime.allocations.held_bytes + left_bytes)

    tracked.check_a_step_that_does_not_fit(limit_bytes, lambda: runtime.allocations.held_bytes)
