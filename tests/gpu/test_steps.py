"""A step of each thing that a job can ask for, on a CUDA device with fused attention; golden/test_device_steps.py runs
the same code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from tests.support.device_steps import DeviceSteps

from horizon_server.engine.device.cuda import CudaDevice
from horizon_server.engine.device.cuda_runtime import TorchCuda
from horizon_server.engine.fp8 import check_supported
from horizon_server.errors import InvalidSpec
from horizon_server.recipe import Matmul
from horizon_server.records.execution import ActivationPlacement
from horizon_server.store.layout import Packing

if TYPE_CHECKING:
    from tests.support.tiny_models import Run, TinyModel

pytestmark = pytest.mark.gpu


@pytest.fixture
def steps(
    tiny_model: Callable[..., TinyModel], start: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> DeviceSteps:
    return DeviceSteps(new_device=CudaDevice, tiny_model=tiny_model, start=start, folder=tmp_path, patch=monkeypatch)


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


@pytest.fixture
def _fp8_units() -> None:
    try:
        check_supported(torch.device("cuda"), "fp8")
    except InvalidSpec as error:
        pytest.skip(str(error))


@pytest.mark.usefixtures("_fp8_units")
@pytest.mark.parametrize("matmul", ["fp8", "fp8_full"])
@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_products_in_fp8(architecture: str, matmul: Matmul, steps: DeviceSteps) -> None:
    steps.check_fp8(architecture, matmul)


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_fused_attention_whose_output_is_kept(architecture: str, steps: DeviceSteps) -> None:
    steps.check_kept_products(architecture)


def test_compiled_layers(steps: DeviceSteps) -> None:
    steps.check_compiled("qwen3")


@pytest.mark.usefixtures("_fp8_units")
@pytest.mark.parametrize("matmul", ["fp8", "fp8_full"])
def test_compiled_layers_in_fp8(matmul: Matmul, steps: DeviceSteps) -> None:
    steps.check_compiled("qwen3", matmul)


@pytest.mark.parametrize("architecture", ["qwen3", "gemma2"])
def test_answers(architecture: str, steps: DeviceSteps) -> None:
    steps.check_generation(architecture)


@pytest.mark.usefixtures("whole_device")
def test_a_step_that_does_not_fit_leaves_its_memory_to_the_next_device(steps: DeviceSteps) -> None:
    def limit_bytes(left_bytes: int) -> None:
        TorchCuda().limit_memory(torch.cuda.memory_reserved() + left_bytes)

    steps.check_a_step_that_does_not_fit(limit_bytes, torch.cuda.memory_allocated)
