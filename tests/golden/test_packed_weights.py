"""Frozen weights in 8 or 4 bits: training is that of a model which has the unpacked values, bit for bit, on every
device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch
from tests.cpu_runtime import CpuRuntime
from tests.support.further import further
from tests.support.traced_layers import traced_layers

from horizon_server.engine.device.cuda import CudaDevice
from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.template import Template
from horizon_server.store.layout import Packing, with_trained

if TYPE_CHECKING:
    from tests.support.tiny_models import Engine, TinyModel

TRAINED = ("norm", "ln_", "bias", "embed_tokens", "wte")
DEVICES: dict[str, Callable[[], HostDevice | CudaDevice]] = {
    "host, fp32": lambda: HostDevice(num_threads=1),
    "host, bf16": lambda: HostDevice(num_threads=1, compute_dtype=torch.bfloat16, max_delay_s=0.0005),
    "cuda": lambda: CudaDevice(runtime=CpuRuntime(), staging_bytes=1 << 16),
}


def is_trained(name: str) -> bool:
    return any(part in name for part in TRAINED)


def packed(model: TinyModel, kind: Packing, dtype: torch.dtype = torch.float32) -> tuple[TinyModel, TinyModel]:
    """The model with its layers' matrices packed, and one that has the values that they are unpacked to in a dtype,
    frozen as well."""
    matrices = {
        tensor.name
        for unit, tensor in model.template.layout.tensors()
        if unit.kind == "layer" and len(tensor.shape) > 1 and not is_trained(tensor.name)
    }
    assert matrices

    def with_packing(packing_of: Callable[[str], Packing]) -> Template:
        layout = with_trained(model.template.layout, is_trained, is_bfloat16=lambda _: False, packing_of=packing_of)
        return Template.from_config(model.config, layout=layout)

    small = dataclasses.replace(model, template=with_packing(lambda name: kind if name in matrices else "none"))
    store, weights = small.store(), dict(model.weights)
    for unit in small.template.layout.units:
        flat = torch.empty(unit.num_elements)
        store.merge_master(unit.index, flat)
        for place in unit.tensors:
            values = flat[place.offset : place.offset + place.num_elements].view(place.shape)
            # The store's own halves round a tie the other way.
            weights[place.name] = values.to(dtype).float() if place.packing != "none" else values.clone()
    store.close()
    assert all(not torch.equal(weights[name], model.weights[name]) for name in matrices)
    return small, dataclasses.replace(model, template=with_packing(lambda _: "none"), weights=weights)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["int8", "nf4"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe", *further("qwen3", "gpt2", "gemma2")])
def test_training_is_that_of_the_unpacked_values(
    architecture: str,
    kind: Packing,
    device: str,
    engine: Engine,
) -> None:
    rows = [engine.pack(engine.documents(11, 20, seed=1)), engine.pack(engine.documents(16, 9, seed=2))]
    devices = [DEVICES[device]() for _ in range(2)]
    small, plain = packed(engine.tiny_model(architecture), kind, devices[0].compute_dtype)
    runs = [
        engine.start(model, device=own, learning_rate=1e-2) for model, own in zip((small, plain), devices, strict=True)
    ]
    figures = [[run.trainer.train_step(rows) for _ in range(3)] for run in runs]
    for one, other in zip(*figures, strict=True):
        assert (one.loss, one.grad_norm) == (other.loss, other.grad_norm)
    for run in runs:
        run.trainer.flush()
    for plane in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(runs[0].store.plane(plane), runs[1].store.plane(plane))
    for name in filter(is_trained, small.weights):
        for plane in ("hi", "lo"):
            assert torch.equal(runs[0].store.tensor(name, plane), runs[1].store.tensor(name, plane)), name


@pytest.mark.parametrize(
    "options", [{"resident_layers": 2}, {"product_layers": 2}, {"activation_placement": "host"}], ids=str
)
def test_nothing_that_changes_memory_or_time_changes_a_bit(
    options: dict[str, object],
    engine: Engine,
) -> None:
    rows = [engine.pack(engine.documents(11, 20, seed=1)), engine.pack(engine.documents(16, 9, seed=2))]
    small, _ = packed(engine.tiny_model("qwen3"), "nf4")
    # Only compiled layers keep products.
    compiled = traced_layers(small.template, product_layers=2) if "product_layers" in options else None
    runs = [engine.start(small, store=small.store(), compiled=compiled, **chosen) for chosen in ({}, options)]
    for run in runs:
        for _ in range(3):
            run.trainer.train_step(rows)
            run.trainer.release_device()
        run.trainer.flush()
    for plane in ("hi", "lo", "packed", "exp_avg", "exp_avg_sq"):
        assert torch.equal(runs[0].store.plane(plane), runs[1].store.plane(plane)), plane


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_fewer_bytes_cross_the_link(
    kind: Packing,
    engine: Engine,
) -> None:
    rows = [engine.pack(engine.documents(11, 20, seed=1))]
    moved = []
    for model in packed(engine.tiny_model("llama"), kind):
        device = HostDevice(num_threads=1, compute_dtype=torch.bfloat16)
        moved.append(engine.start(model, device=device).trainer.train_step(rows).h2d.bytes)
    # Norms, the embedding's rows and the head are as large as before, and small models have little else.
    assert moved[0] < moved[1] * {"int8": 0.8, "nf4": 0.7}[kind]


@pytest.mark.parametrize("device", DEVICES)
def test_of_a_resident_layer_only_what_is_trained_goes_up_again(
    device: str,
    engine: Engine,
) -> None:
    rows = [engine.pack(engine.documents(11, 20, seed=1))]
    small, _ = packed(engine.tiny_model("llama"), "int8")
    made = DEVICES[device]()
    num_layers = small.template.num_layers
    run = engine.start(small, device=made, resident_layers=num_layers)
    # Whole layers have gone up before the first step, for the trial of packing.
    first, second, third = (run.trainer.train_step(rows).h2d.bytes for _ in range(3))
    layers = [unit for unit in small.template.layout.units if unit.kind == "layer"]
    trained = sum(unit.trained_elements * made.compute_dtype.itemsize for unit in layers)
    assert second - first == third - first == trained
