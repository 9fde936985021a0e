"""The ledger's arithmetic; that the device's part is what the engine allocates is held by the golden tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from horizon_server.planning.ledger import DeviceKind, MemoryPlan, logits_chunk_tokens, max_parameters, plan_memory
from horizon_server.planning.model_folder import ModelFolder, ModelShape, open_model_folder
from horizon_server.store.host_store import HostStore
from horizon_server.store.layout import build_layout


@pytest.fixture
def folder(make_model: Callable[..., Path]) -> ModelFolder:
    return open_model_folder(make_model())


def plan_of(
    folder: ModelFolder, *, device_kind: DeviceKind = "host", grad_bytes: int = 4, tokens_per_step: int = 256
) -> MemoryPlan:
    return plan_memory(
        folder.layout,
        model=folder.shape,
        tokens_per_step=tokens_per_step,
        sequence_length=64,
        device_kind=device_kind,
        grad_bytes=grad_bytes,
    )


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, None])
def test_planes_are_planned_to_the_byte(folder: ModelFolder, grad_dtype: torch.dtype | None) -> None:
    store = HostStore.allocate(folder.layout, grad_dtype=grad_dtype, num_threads=1)
    plan = plan_of(folder, grad_bytes=0 if grad_dtype is None else grad_dtype.itemsize)
    assert {component: plan.host[component] for component in store.host_bytes()} == store.host_bytes()


@pytest.mark.parametrize("vocab_size", [1, 100, 4096, 32000, 151936, 300_000])
def test_a_logits_chunk_stays_near_its_bound(vocab_size: int) -> None:
    tokens = logits_chunk_tokens(vocab_size)
    assert 256 <= tokens <= 4096
    assert tokens * vocab_size * 4 <= max(32 << 20, 256 * vocab_size * 4)


def test_the_hosts_sum_holds_the_hosts_device(folder: ModelFolder) -> None:
    plan = plan_of(folder)
    assert set(plan.host) == {"weights", "moments", "gradients", "activations", "staging", "other"}
    assert set(plan.device) == {"weights", "gradients", "activations", "workspace"}
    numbers = 2 * (len(folder.layout.units) + 1) * 8
    assert plan.host["staging"] == plan.device["weights"] + plan.device["gradients"] + numbers
    assert plan.host["activations"] == plan.device["activations"]
    assert plan.host_total_bytes == sum(plan.host.values()) > plan.device_total_bytes


def test_on_cuda_the_device_is_not_host_memory(folder: ModelFolder) -> None:
    plan, on_host = plan_of(folder, device_kind="cuda"), plan_of(folder)
    assert plan.host["activations"] == 0
    assert plan.host["staging"] == 2 * (len(folder.layout.units) + 1) * 8
    assert 2 * plan.device["weights"] == on_host.device["weights"], "bf16 slots are half of fp32"
    largest = max(unit.num_elements for unit in folder.layout.units)
    assert plan.device["gradients"] == on_host.device["gradients"] + 2 * largest, (
        "fp32 everywhere, and room to round in"
    )


def test_more_tokens_need_more_memory_and_nothing_else_changes(folder: ModelFolder) -> None:
    small, large = plan_of(folder), plan_of(folder, tokens_per_step=512)
    assert large.device["activations"] == 2 * small.device["activations"]
    for part in ("weights", "moments", "gradients", "staging"):
        assert large.host[part] == small.host[part]


@pytest.mark.parametrize("gibibytes", [16, 64, 512])
def test_the_largest_model_of_a_machine_fits_it_and_a_larger_one_does_not(gibibytes: int) -> None:
    limit_bytes = gibibytes << 30
    largest = max_parameters(limit_bytes, grad_bytes=4)

    def planned_bytes(num_parameters: float) -> int:
        # Layers of 12 D * D parameters, as many as a model of this size usually has.
        num_layers = 32
        width = int((num_parameters / num_layers / 12) ** 0.5)
        shape = ModelShape.from_config(
            {
                "hidden_size": width,
                "intermediate_size": 4 * width,
                "num_hidden_layers": num_layers,
                "num_attention_heads": 32,
                "vocab_size": 32_000,
                "tie_word_embeddings": True,
            }
        )
        shapes = {"model.embed_tokens.weight": (32_000, width), "model.norm.weight": (width,)}
        shapes |= {f"model.layers.{i}.mlp.w.weight": (12 * width, width) for i in range(num_layers)}
        layout = build_layout(shapes, num_layers=num_layers, tied=True)
        return plan_memory(
            layout, model=shape, tokens_per_step=4096, sequence_length=1024, device_kind="host", grad_bytes=4
        ).host_total_bytes

    assert planned_bytes(0.75 * largest) <= limit_bytes < planned_bytes(1.25 * largest)


@pytest.mark.parametrize(("planes", "planes_on_gpu", "copies"), [(4, 0, 3), (4, 4, 4)])
def test_scores_that_no_kernel_fuses_are_planned_with_their_gradients(
    folder: ModelFolder, planes: int, planes_on_gpu: int, copies: int
) -> None:
    def planned(num_planes: int, num_on_gpu: int) -> int:
        shape = dataclasses.replace(folder.shape, num_score_planes=num_planes, num_score_planes_on_gpu=num_on_gpu)
        return plan_of(dataclasses.replace(folder, shape=shape)).host["other"]

    # Kept by the layer, then in its backward the gradients of both sides of the softmax, and of the mask's copy.
    assert planned(planes, planes_on_gpu) - planned(0, 0) == copies * planes * 64 * 64 * 4
