"""Parameters that transformers keeps in fp32 are computed with in fp32 on a device that computes in bf16."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.cpu_runtime import CpuRuntime
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

from horizon_server.engine.device.cuda import CudaDevice
from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.micro_batch import MicroBatch
from horizon_server.planning.model_folder import KEPT_IN_FP32

if TYPE_CHECKING:
    from tests.support.tiny_models import Engine

Pack = Callable[[list[Tensor]], MicroBatch]
BIAS = "e_score_correction_bias"
# In bf16, which has 8 bits, all of these round to the same value; their order decides on the expert.
NEARLY_EQUAL = 256.0 + torch.arange(8) * 2.0**-6


@pytest.fixture
def seen_bias(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[CudaDevice | HostDevice], list[Tensor]]:
    """Runs a step on a device; returns the correction bias as every expert layer's router saw it."""

    def run_it(device: CudaDevice | HostDevice) -> list[Tensor]:
        model, seen = engine.tiny_model("deepseek_v3"), list[Tensor]()
        names = [tensor.name for _, tensor in model.template.layout.tensors() if tensor.name.endswith(BIAS)]
        grad_dtype = torch.float32 if device.compute_dtype == torch.float32 else torch.bfloat16
        store = model.store(grad_dtype=grad_dtype)
        for name in names:
            store.write_master(name, NEARLY_EQUAL)
        layer = model.template.layer

        def spy(index: int, parameters: dict[str, Tensor], *others: Any) -> Tensor:
            seen.extend(value.clone() for name, value in parameters.items() if name.endswith(BIAS))
            return layer(index, parameters, *others)

        monkeypatch.setattr(model.template, "layer", spy)
        run = engine.start(model, store=store, device=device)
        report = run.trainer.train_step([engine.pack(engine.documents(22))])
        assert report.skipped == "" and len(names) == 2
        # Forward and recompute.
        assert len(seen) == 2 * len(names)
        return seen

    return run_it


def choice(bias: Tensor) -> Tensor:
    """The experts that a router chooses for scores of a few tokens, as DeepSeek-V3's does."""
    scores = torch.rand(64, 8, generator=torch.Generator().manual_seed(0)).mul_(2.0**-7)
    return torch.topk(scores + bias, 2).indices.sort().values


@pytest.mark.parametrize("pinnable_bytes", [1 << 40, 0])
def test_the_experts_are_those_of_the_fp32_bias(
    pinnable_bytes: int, seen_bias: Callable[[CudaDevice | HostDevice], list[Tensor]]
) -> None:
    for bias in seen_bias(CudaDevice(runtime=CpuRuntime(pinnable_bytes=pinnable_bytes), poison_on_free=True)):
        assert bias.dtype == torch.float32
        assert torch.equal(bias, NEARLY_EQUAL)
        assert torch.equal(choice(bias), choice(NEARLY_EQUAL))
    # What the test is about: rounded, the bias chooses others.
    assert not torch.equal(choice(NEARLY_EQUAL.bfloat16()), choice(NEARLY_EQUAL))


def test_in_fp32_they_take_no_other_way(seen_bias: Callable[[CudaDevice | HostDevice], list[Tensor]]) -> None:
    device = HostDevice(num_threads=1)
    for bias in seen_bias(device):
        assert torch.equal(bias, NEARLY_EQUAL)


def test_a_trained_parameter_that_stays_in_fp32_gets_its_gradient(
    engine: Engine,
) -> None:
    model = engine.tiny_model("ernie4_5_moe", num_hidden_layers=2)
    device = CudaDevice(runtime=CpuRuntime())
    run = engine.start(model, store=model.store(grad_dtype=torch.bfloat16), device=device)
    rows = [engine.pack(engine.documents(25, seed=3))]
    run.trainer.train_step(rows)

    # As transformers loads it in bf16: this router in fp32.
    reference: Any = AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    (router,) = [module for name, module in reference.named_modules() if name.endswith("mlp.gate")]
    router.float()
    reference.load_state_dict({**model.weights}, strict=False)
    loss = engine.plain_loss(reference, rows[0]) / rows[0].num_targets
    torch.autograd.backward(loss)
    (name,) = [name for name, _ in reference.named_parameters() if name.endswith("mlp.gate.weight")]
    wanted = reference.get_parameter(name).grad
    assert float((run.store.tensor(name, "grad").float() - wanted).norm() / wanted.norm()) < 5e-2


def test_the_plan_knows_what_the_classes_of_transformers_keep() -> None:
    found = {}
    for config_class in MODEL_FOR_CAUSAL_LM_MAPPING:
        try:
            model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
        except (AttributeError, ImportError, ValueError):
            continue  # a class that needs a package that is not here
        kept = model_class._keep_in_fp32_modules_strict
        if kept:
            found[config_class.model_type] = set(kept)
    assert {name: set(kept) for name, kept in KEPT_IN_FP32.items()} == found
