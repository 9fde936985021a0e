"""Adapters over a base that is frozen in int8 or nf4, with experts in pages that are cut out of the packed plane: the
bytes of whole layers over the same base."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest
from tests.cpu_runtime import CpuRuntime
from tests.golden.test_paged_experts import check_same, eager_model, filled, result
from tests.support.plans import ledger_of

from horizon_server.engine.device.cuda import CudaDevice
from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.generation.generator import TokenGenerator, generation_template
from horizon_server.engine.generation.sequences import GenerationOptions
from horizon_server.engine.template import Template
from horizon_server.planning.model_folder import ModelShape
from horizon_server.planning.trainable import open_for_training
from horizon_server.spec import LoraSpec, TrainSpec
from horizon_server.store.pages import paged_unit

if TYPE_CHECKING:
    from tests.support.tiny_models import Engine, TinyModel

# Experts in tensors of their own, and stacked ones with biases, of which one ends within a group of blocks.
SIZES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"hidden_size": 64, "moe_intermediate_size": 66, "num_experts": 8},
    "gpt_oss": {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 6},
}
ONE_EXPERT = 16_000
TWO_EXPERTS = 40_000
SCALE = 1.5
Base = Literal["int8", "nf4"]
DEVICES: dict[str, Callable[[], HostDevice | CudaDevice]] = {
    "fp32": lambda: HostDevice(num_threads=1, max_delay_s=0.0005, delay_seed=1, poison_on_free=True),
    "cuda": lambda: CudaDevice(runtime=CpuRuntime(), max_delay_s=0.0005, poison_on_free=True),
}


def over(engine: Engine, architecture: str, base: Base, folder: Path) -> TinyModel:
    """The model with adapters in its attention, over a packed base."""
    model = eager_model(engine, architecture, **SIZES[architecture])
    reference: Any = model.reference()
    reference.save_pretrained(folder)
    lora = LoraSpec(rank=4, alpha=6.0, base=base, targets=("q_proj", "v_proj"))
    layout = open_for_training(folder, TrainSpec(trainable=("lora",), lora=lora)).layout
    packed = {tensor.name for _, tensor in layout.tensors() if tensor.packing == base}
    assert any(".experts." in name for name in packed) and any("self_attn" in name for name in packed)
    paged = paged_unit(layout.units[1], TWO_EXPERTS)
    assert paged is not None and len(paged.pages) >= 3
    return dataclasses.replace(model, template=Template.from_config(model.config, layout=layout))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("elements", [ONE_EXPERT, TWO_EXPERTS, 1 << 28])
@pytest.mark.parametrize("base", ["int8", "nf4"])
@pytest.mark.parametrize("architecture", SIZES)
def test_pages_of_a_packed_base_give_the_bytes_of_whole_layers(
    architecture: str, base: Base, elements: int, device: str, engine: Engine, tmp_path: Path
) -> None:
    model = over(engine, architecture, base, tmp_path)
    rows = [engine.pack(engine.documents(length, seed=length)) for length in (20, 31, 9)]
    found = []
    for most in (0, elements):
        store = filled(model.template.layout)
        model.stores.append(store)
        settings: dict[str, Any] = {"compute_dtype": "bfloat16"} if device == "cuda" else {}
        run = engine.start(
            model,
            store=store,
            device=DEVICES[device](),
            adapter_scale=SCALE,
            expert_page_elements=most,
            max_grad_norm=None if device == "cuda" else 0.5,
            **settings,
        )
        found.append(result(run, rows))
    if device == "cuda":
        # Of a paged layer the squares are summed where its gradient has landed.
        (losses, planes), (others, same) = (([loss for loss, _ in numbers], planes) for numbers, planes in found)
        check_same((losses, planes), (others, same))
    else:
        check_same(*found)


@pytest.mark.parametrize("base", ["int8", "nf4"])
@pytest.mark.parametrize("architecture", SIZES)
def test_answers_and_few_tokens_bring_up_what_they_visit(
    architecture: str, base: Base, engine: Engine, tmp_path: Path
) -> None:
    model = over(engine, architecture, base, tmp_path)
    row = [engine.pack(engine.documents(3, seed=1))]
    found, uploaded = [], []
    for most in (0, ONE_EXPERT):
        store = filled(model.template.layout)
        model.stores.append(store)
        run = engine.start(model, store=store, adapter_scale=SCALE, expert_page_elements=most)
        numbers = result(run, row)
        uploaded.append(run.trainer.evaluate(row).h2d.bytes)
        run.trainer.release_device()
        template = generation_template(
            lambda own: Template.from_config(model.config, layout=model.template.layout, own_attention=own)
        )
        template.adapter_scale = SCALE
        generator = TokenGenerator(template, store, run.device, expert_page_elements=most)
        options = GenerationOptions(max_tokens=6, stop_tokens=frozenset(), logprobs=0)
        found.append((numbers, generator.generate([[5, 9, 33], [7]], options)))
        generator.close()
    check_same(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
    assert uploaded[1] < uploaded[0]


@pytest.mark.parametrize("base", ["int8", "nf4"])
@pytest.mark.parametrize("architecture", SIZES)
def test_the_ledger_knows_what_a_gpu_holds(architecture: str, base: Base, engine: Engine, tmp_path: Path) -> None:
    model = over(engine, architecture, base, tmp_path)
    layout = model.template.layout
    held = {}
    for most in (0, TWO_EXPERTS):
        settings: dict[str, Any] = {"tokens_per_step": 64, "expert_page_elements": most, "compute_dtype": "bfloat16"}
        plan = ledger_of(
            layout,
            ModelShape.from_config(model.config.to_dict(), names=model.weights),
            sequence_length=32,
            device_kind="cuda",
            grad_bytes=0,
            **settings,
        )
        store = filled(layout)
        model.stores.append(store)
        device = CudaDevice(runtime=CpuRuntime())
        run = engine.start(model, store=store, device=device, max_grad_norm=None, adapter_scale=SCALE, **settings)
        report = run.trainer.train_step([engine.pack(engine.documents(32, 20))])
        held[most] = report.device_memory_bytes["weights"]
        assert held[most] == plan.device_bytes["weights"]
    assert held[TWO_EXPERTS] < 0.8 * held[0]
