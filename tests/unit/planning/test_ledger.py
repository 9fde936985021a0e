"""The ledger's arithmetic; that the device's part is what the engine allocates is held by the golden tests."""

from __future__ import annotations

import dataclasses
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.plans import ledger_of, settings
from transformers import AutoConfig, AutoModelForCausalLM

from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.micro_batch import MicroBatch
from horizon_server.engine.template import Template
from horizon_server.engine.trainer import Trainer
from horizon_server.planning import ledger
from horizon_server.planning.ledger import max_parameters
from horizon_server.planning.model_folder import POSITION_MASKS, ModelFolder, ModelShape, open_model_folder
from horizon_server.planning.working_memory import logits_chunk_tokens
from horizon_server.records.execution import DeviceKind
from horizon_server.records.plan import Ledger
from horizon_server.store import checkpoint
from horizon_server.store.host_store import HostStore
from horizon_server.store.layout import build_layout


@pytest.fixture
def folder(make_model: Callable[..., Path]) -> ModelFolder:
    return open_model_folder(make_model())


def plan_of(
    folder: ModelFolder,
    *,
    device_kind: DeviceKind = "host",
    grad_bytes: int = 4,
    tokens_per_step: int = 256,
    sequence_length: int = 64,
    in_fp8: bool = False,
    **more: Any,
) -> Ledger:
    return ledger_of(
        folder.layout,
        folder.shape,
        tokens_per_step=tokens_per_step,
        sequence_length=sequence_length,
        device_kind=device_kind,
        grad_bytes=grad_bytes,
        matmul="fp8" if in_fp8 else "bf16",
        **more,
    )


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, None])
def test_planes_are_planned_to_the_byte(folder: ModelFolder, grad_dtype: torch.dtype | None) -> None:
    store = HostStore.allocate(folder.layout, grad_dtype=grad_dtype, num_threads=1)
    plan = plan_of(folder, grad_bytes=0 if grad_dtype is None else grad_dtype.itemsize)
    assert {component: plan.host_bytes[component] for component in store.host_bytes()} == store.host_bytes()


@pytest.mark.parametrize("vocab_size", [1, 100, 4096, 32000, 151936, 300_000])
def test_a_logits_chunk_stays_near_its_bound(vocab_size: int) -> None:
    tokens = logits_chunk_tokens(vocab_size)
    assert 512 <= tokens <= 8192
    assert tokens * vocab_size * 4 <= max(64 << 20, 512 * vocab_size * 4)


@pytest.mark.parametrize("device_kind", ["host", "cuda"])
def test_fp8_takes_two_bytes_more_for_every_weight_of_a_layer(folder: ModelFolder, device_kind: DeviceKind) -> None:
    full, in_fp8 = (plan_of(folder, device_kind=device_kind, in_fp8=on) for on in (False, True))
    layer = max(unit.num_elements for unit in folder.layout.units if unit.kind == "layer")
    assert in_fp8.device_bytes["workspace"] >= full.device_bytes["workspace"] + 2 * layer
    assert in_fp8.device_bytes["weights"] == full.device_bytes["weights"]


@pytest.mark.parametrize("device_kind", ["host", "cuda"])
def test_weight_gradients_in_fp8_take_more_beside_them(folder: ModelFolder, device_kind: DeviceKind) -> None:
    partly, fully = (
        ledger_of(
            folder.layout,
            folder.shape,
            device_kind=device_kind,
            tokens_per_step=256,
            sequence_length=64,
            matmul=matmul,
        )
        for matmul in ("fp8", "fp8_full")
    )
    assert fully.device_bytes["workspace"] > partly.device_bytes["workspace"]


def test_rows_of_shorter_documents_need_no_more_than_the_longest_document(folder: ModelFolder) -> None:
    """Which are computed together up to `micro_batch_tokens`, so that is what a layer's working memory is for."""

    def workspace(**known: Any) -> int:
        plan = plan_of(folder, tokens_per_step=8192, sequence_length=8192, micro_batch_tokens=2048, **known)
        return plan.device_bytes["workspace"]

    assert workspace() == workspace(longest_document=8192) == workspace(longest_document=100_000)
    assert workspace(longest_document=1) == workspace(longest_document=2048)
    assert workspace(longest_document=2048) < workspace(longest_document=4096) < workspace()
    masked = dataclasses.replace(folder, shape=dataclasses.replace(folder.shape, needs_masks=True))
    rows, documents = (plan_of(masked, longest_document=longest) for longest in (None, 1))
    assert rows == documents


def test_the_hosts_sum_holds_the_hosts_device(folder: ModelFolder) -> None:
    plan = plan_of(folder)
    assert set(plan.host_bytes) == {"weights", "moments", "gradients", "activations", "staging", "other"}
    assert set(plan.device_bytes) == {"weights", "gradients", "activations", "workspace"}
    numbers = 2 * (len(folder.layout.units) + 1) * 8
    assert plan.host_bytes["staging"] == plan.device_bytes["weights"] + plan.device_bytes["gradients"] + numbers
    assert plan.host_bytes["activations"] == plan.device_bytes["activations"]
    assert plan.host_total_bytes == sum(plan.host_bytes.values()) > plan.device_total_bytes


def test_on_cuda_the_device_is_not_host_memory(folder: ModelFolder) -> None:
    plan, on_host = plan_of(folder, device_kind="cuda"), plan_of(folder)
    assert plan.host_bytes["activations"] == 0
    assert plan.host_bytes["staging"] == 2 * (len(folder.layout.units) + 1) * 8
    assert 2 * plan.device_bytes["weights"] == on_host.device_bytes["weights"], "bf16 slots are half of fp32"
    largest = max(unit.num_elements for unit in folder.layout.units)
    assert plan.device_bytes["gradients"] == on_host.device_bytes["gradients"] + 2 * largest, (
        "fp32 everywhere, and room to round in"
    )


def test_more_tokens_need_more_memory_and_nothing_else_changes(folder: ModelFolder) -> None:
    small, large = plan_of(folder), plan_of(folder, tokens_per_step=512)
    assert large.device_bytes["activations"] == 2 * small.device_bytes["activations"]
    for part in ("weights", "moments", "gradients", "staging"):
        assert large.host_bytes[part] == small.host_bytes[part]


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
        return ledger_of(
            layout, shape, tokens_per_step=4096, sequence_length=1024, device_kind="host", grad_bytes=4
        ).host_total_bytes

    assert planned_bytes(0.75 * largest) <= limit_bytes < planned_bytes(1.25 * largest)


MASKED: dict[str, dict[str, Any]] = {
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    "openai-gpt": {"n_layer": 2, "n_head": 4, "n_embd": 64, "n_positions": 256},
}


@pytest.mark.parametrize("model_type", sorted(POSITION_MASKS))
def test_the_masks_that_layers_hold_are_as_large_as_planned(model_type: str) -> None:
    sizes = {"hidden_size": 64, "vocab_size": 64, "max_position_embeddings": 256}
    config = AutoConfig.for_model(model_type, **{**sizes, **MASKED[model_type]})
    model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    masks = [buffer.nbytes for name, buffer in model.named_buffers() if name.endswith("bias")]

    assert masks == [POSITION_MASKS[model_type] * 256**2] * 2
    assert ModelShape.from_config(config.to_dict()).position_mask_bytes == masks[0]


def test_every_layers_mask_is_planned_on_the_host_and_one_on_the_device(folder: ModelFolder) -> None:
    masked = dataclasses.replace(folder, shape=dataclasses.replace(folder.shape, position_mask_bytes=1 << 20))
    for device_kind in ("host", "cuda"):
        without, with_masks = plan_of(folder, device_kind=device_kind), plan_of(masked, device_kind=device_kind)
        assert with_masks.device_total_bytes - without.device_total_bytes == 1 << 20
        assert with_masks.host_total_bytes - without.host_total_bytes == folder.shape.num_hidden_layers << 20


@pytest.mark.parametrize("row_tokens", [64, 256])
def test_a_mask_of_all_positions_is_in_the_plan_of_the_workspace(row_tokens: int) -> None:
    config = AutoConfig.for_model(
        "gpt_neo", **MASKED["gpt_neo"], hidden_size=64, vocab_size=64, max_position_embeddings=1024
    )
    template = Template.from_config(config)
    store, device = HostStore.allocate(template.layout, num_threads=1), HostDevice(num_threads=1)
    store.plane("hi").normal_(std=0.02)
    trainer = Trainer(template, store, device, *settings(learning_rate=0.0, optimizer_threads=1), num_steps=2)
    ids_T, half = torch.arange(row_tokens) % 64, row_tokens // 2
    row = MicroBatch(
        input_ids_T=ids_T,
        position_ids_T=torch.arange(row_tokens) % half,
        labels_T=ids_T,
        document_lengths=(half, half),
    )
    used_bytes = trainer.train_step([row]).device_memory_bytes["workspace"]
    trainer.close()
    device.close()
    store.close()

    plan = ledger_of(
        template.layout,
        ModelShape.from_config(config.to_dict()),
        tokens_per_step=row_tokens,
        sequence_length=row_tokens,
        device_kind="host",
        grad_bytes=4,
    )
    assert 0.75 <= used_bytes / plan.device_bytes["workspace"] <= 1.0


def test_what_a_checkpoint_converts_at_once_is_in_the_plan(
    folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ledger.CHECKPOINT_PIECE_ELEMENTS == checkpoint._PIECE_ELEMENTS
    piece_elements, name = 1 << 14, "model.embed_tokens.weight"
    monkeypatch.setattr(checkpoint, "_PIECE_ELEMENTS", piece_elements)
    shapes = {name: (64, 1 << 10), "model.layers.0.w.weight": (1, 1), "model.norm.weight": (1,)}
    store = HostStore.allocate(build_layout(shapes, num_layers=1, tied=True), grad_dtype=None, num_threads=1)
    # The worst case: every weight is halfway between two numbers in bf16, so that each piece is converted.
    store.plane("hi").fill_(1.0078125)
    store.plane("lo").fill_(-32768)
    peaks = []
    tracemalloc.start()
    for stem, dtype in (("model", "BF16"), ("rounding", "U8")):
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        for _ in checkpoint._pieces(store, name, stem, dtype, None):
            pass
        peaks.append(tracemalloc.get_traced_memory()[1] - before)
    tracemalloc.stop()
    store.close()

    num_threads = checkpoint.NUM_WRITERS
    assert 0.8 <= num_threads * max(peaks) / (piece_elements * ledger._CHECKPOINT_BYTES) <= 1.2
    table = folder.layout.units[0].tensors[0]
    smaller = dataclasses.replace(
        folder,
        layout=build_layout(
            {"model.embed_tokens.weight": (1, 1), "model.layers.0.w.weight": (1, 1), "model.norm.weight": (1,)},
            num_layers=1,
            tied=True,
        ),
    )
    grown = (
        plan_of(folder, device_kind="cuda").host_bytes["other"]
        - plan_of(smaller, device_kind="cuda").host_bytes["other"]
    )
    assert grown == (table.num_elements - 1) * ledger._CHECKPOINT_BYTES


@pytest.mark.parametrize(("planes", "planes_on_gpu", "copies"), [(4, 0, 3), (4, 4, 4)])
def test_scores_that_no_kernel_fuses_are_planned_with_their_gradients(
    folder: ModelFolder, planes: int, planes_on_gpu: int, copies: int
) -> None:
    def planned(num_planes: int, num_on_gpu: int) -> int:
        shape = dataclasses.replace(folder.shape, num_score_planes=num_planes, num_score_planes_on_gpu=num_on_gpu)
        return plan_of(dataclasses.replace(folder, shape=shape)).host_bytes["other"]

    # Kept by the layer, then in its backward the gradients of both sides of the softmax, and of the mask's copy.
    assert planned(planes, planes_on_gpu) - planned(0, 0) == copies * planes * 64 * 64 * 4
