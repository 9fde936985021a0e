"""What a step does, counted by hand on a small model, and what each change to the engine takes off it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench.forecast import model_7b
from tests.support.plans import step_work

from horizon_server.planning.elementwise import copied_bytes, elementwise_bytes
from horizon_server.planning.gpus import FP8_TIMES_AS_FAST
from horizon_server.planning.model_folder import ModelFolder, open_model_folder
from horizon_server.planning.step_parts import TODAY, EngineFacts, LayerWork, StepWork
from horizon_server.planning.step_work import DETERMINISTIC_BACKWARD
from horizon_server.planning.trainable import open_for_training
from horizon_server.records.execution import ActivationPlacement, DeviceKind
from horizon_server.spec import LoraSpec, TrainSpec

TOKENS, ROW, LAYERS = 160, 64, 3
QUERY, KEY, HIDDEN, INNER = 4 * 8, 2 * 8, 32, 48
LAYER_MATRICES = HIDDEN * (QUERY + KEY + KEY) + QUERY * HIDDEN + 3 * HIDDEN * INNER
TABLE = 128 * HIDDEN
PAIRS = 2 * (64 * 65 // 2) + 32 * 33 // 2


@pytest.fixture
def tied(make_model: Callable[..., Path]) -> ModelFolder:
    return open_model_folder(make_model(tied=True))


@pytest.fixture
def untied(make_model: Callable[..., Path]) -> ModelFolder:
    return open_model_folder(make_model(tied=False))


def work_of(
    folder: ModelFolder,
    device_kind: DeviceKind = "host",
    *,
    grad_bytes: int = 4,
    placement: ActivationPlacement = "device",
    tokens: int = TOKENS,
    micro_batch_tokens: int = 0,
    head_chunk_tokens: int | None = None,
    **facts: bool,
) -> StepWork:
    return step_work(
        folder,
        tokens_per_step=tokens,
        sequence_length=ROW,
        device_kind=device_kind,
        grad_bytes=grad_bytes,
        activation_placement=placement,
        micro_batch_tokens=micro_batch_tokens,
        head_chunk_tokens=head_chunk_tokens,
        facts=dataclasses.replace(EngineFacts(), **facts),
    )


def elements(folder: ModelFolder, *kinds: str) -> list[int]:
    return [unit.num_elements for unit in folder.layout.units if unit.kind in kinds]


def test_a_layer_multiplies_once_forward_and_thrice_in_backward_but_for_the_product_that_is_left_out(
    tied: ModelFolder,
) -> None:
    layer, product = work_of(tied).layer, 2 * TOKENS * LAYER_MATRICES
    assert layer.forward_flops == pytest.approx(product)
    assert layer.backward_flops == pytest.approx(2 * product)
    assert layer.recompute_flops == pytest.approx(product - 2 * TOKENS * HIDDEN * INNER)
    assert work_of(tied, skips_projection=False).layer.recompute_flops == pytest.approx(product)
    assert layer.attention_flops == pytest.approx(4 * QUERY * PAIRS)


def test_a_magnitude_keeps_the_last_product_and_doubles_those_of_dropped_inputs(
    make_model: Callable[..., Path],
) -> None:
    def layer_of(dropout: float, **lora: Any) -> LayerWork:
        folder = open_for_training(make_model(tied=True), TrainSpec(trainable=("lora",), lora=LoraSpec(rank=4, **lora)))
        return step_work(
            folder,
            tokens_per_step=TOKENS,
            sequence_length=ROW,
            device_kind="host",
            grad_bytes=4,
            activation_placement="device",
            adapter_dropout=dropout,
        ).layer

    down, product = 2 * TOKENS * HIDDEN * INNER, 2 * TOKENS * LAYER_MATRICES
    plain, scaled, doubled = layer_of(0.3), layer_of(0.0, dora=True), layer_of(0.3, dora=True)
    assert plain.forward_flops - plain.recompute_flops == pytest.approx(down)
    assert scaled.recompute_flops == pytest.approx(scaled.forward_flops)
    parts = ("forward_flops", "recompute_flops", "backward_flops")
    assert [getattr(doubled, part) - getattr(scaled, part) for part in parts] == [pytest.approx(product)] * 3
    attention = layer_of(0.0, dora=True, targets=("self_attn",))
    assert attention.forward_flops - attention.recompute_flops == pytest.approx(down)


def test_the_head_multiplies_thrice_and_its_logits_cost_traffic(tied: ModelFolder) -> None:
    head = work_of(tied, "cuda", grad_bytes=2).head
    assert (head.flops, head.elementwise_bytes) == (6 * TABLE * TOKENS, 44 * 128 * TOKENS)
    assert head.accumulate_bytes == 10 * TABLE, "one chunk holds all tokens"
    assert work_of(tied, "cuda", grad_bytes=2, head_chunk_tokens=40).head.accumulate_bytes == 4 * 10 * TABLE
    assert work_of(tied, "cuda", fused_head=True).head.elementwise_bytes == pytest.approx(8.2 * 128 * TOKENS)


def test_the_elementwise_traffic_of_a_layer_by_hand(tied: ModelFolder) -> None:
    forward, recompute, backward = elementwise_bytes(tied.shape, 2, fused=False)
    assert forward == 88 * HIDDEN + 20 * (QUERY + KEY) + 10 * INNER
    assert recompute == forward - 4 * HIDDEN
    assert backward == 221 * HIDDEN + 34 * (QUERY + KEY) + 18 * INNER
    assert elementwise_bytes(tied.shape, 4, fused=False)[0] == 2 * forward, "fp32 is twice bf16"
    assert sum(elementwise_bytes(tied.shape, 2, fused=True)) < (forward + recompute + backward) / 2
    layer = work_of(tied, "cuda", grad_bytes=2).layer
    assert (layer.forward_bytes, layer.backward_bytes) == (forward * TOKENS, backward * TOKENS)


def test_fused_layers_of_a_gpu_do_without_copies(tied: ModelFolder) -> None:
    copying = work_of(tied, "cuda", fused=True).layer
    layer = work_of(tied, "cuda", fused=True, fewer_copies=True).layer
    assert copying.forward_bytes - layer.forward_bytes == pytest.approx(4 * QUERY * TOKENS)
    assert copying.recompute_bytes - layer.recompute_bytes == pytest.approx(4 * QUERY * TOKENS)
    backward = 4 * (QUERY + 2 * KEY) + 14 * HIDDEN
    assert copying.backward_bytes - layer.backward_bytes == pytest.approx(backward * TOKENS)
    # Of a 7B layer, by hidden elements: of 35 that a review counted on the traced graph, the copies into the planes of
    # hidden states and of their gradient, of 4 each, are left.
    assert sum(copied_bytes(model_7b().shape, 2)) / model_7b().shape.hidden_size == pytest.approx(35 - 8, rel=0.01)
    # The host's layers are as they were, and eager ones.
    assert work_of(tied, fused=True, fewer_copies=True).layer == work_of(tied, fused=True).layer
    assert work_of(tied, "cuda", fewer_copies=True).layer == work_of(tied, "cuda").layer


def test_attention_in_a_fixed_order_takes_longer_on_a_gpu_alone(tied: ModelFolder) -> None:
    times = [
        step_work(
            tied, tokens_per_step=TOKENS, sequence_length=ROW, device_kind=device_kind, deterministic=deterministic
        ).layer.attention_backward_times
        for device_kind, deterministic in (("cuda", True), ("cuda", False), ("host", True))
    ]
    assert times == [DETERMINISTIC_BACKWARD, 1.0, 1.0]


def test_products_in_fp8_are_faster_and_eager_layers_cast_by_themselves(tied: ModelFolder) -> None:
    def layer_of_job(device_kind: DeviceKind, *, matmul: str, fused: bool) -> LayerWork:
        facts = dataclasses.replace(TODAY, fused=fused)
        given = {"tokens_per_step": TOKENS, "sequence_length": ROW, "device_kind": device_kind, "matmul": matmul}
        return step_work(tied, facts=facts, **given).layer

    usual, traced = (layer_of_job("cuda", matmul=matmul, fused=True) for matmul in ("bf16", "fp8"))
    whole = layer_of_job("cuda", matmul="fp8_full", fused=True)
    assert traced.forward_flops == pytest.approx(usual.forward_flops / FP8_TIMES_AS_FAST)
    assert traced.recompute_flops == pytest.approx(usual.recompute_flops / FP8_TIMES_AS_FAST)
    # Those of weights stay as they are, unless the job asks for them.
    assert traced.backward_flops == pytest.approx(usual.backward_flops * (1 + 1 / FP8_TIMES_AS_FAST) / 2)
    assert whole.backward_flops == pytest.approx(usual.backward_flops / FP8_TIMES_AS_FAST)
    assert traced.forward_bytes == usual.forward_bytes
    eager = [layer_of_job("cuda", matmul=matmul, fused=False) for matmul in ("bf16", "fp8")]
    assert eager[1].forward_bytes - eager[0].forward_bytes == pytest.approx(654 / 3 * HIDDEN * TOKENS)
    # The host emulates it.
    host, emulated = (layer_of_job("host", matmul=matmul, fused=False) for matmul in ("bf16", "fp8"))
    assert host == emulated


def test_gradients_are_summed_once_per_micro_batch(tied: ModelFolder) -> None:
    by_row = work_of(tied, "cuda", grad_bytes=2)
    assert (by_row.num_micro_batches, by_row.micro_batch_tokens) == (3, ROW)
    assert by_row.layer.accumulate_bytes == pytest.approx(3 * 10 * LAYER_MATRICES)
    together = work_of(tied, "cuda", grad_bytes=2, micro_batch_tokens=128)
    assert (together.num_micro_batches, together.micro_batch_tokens) == (2, 128)
    assert together.layer.accumulate_bytes == pytest.approx(2 * 10 * LAYER_MATRICES)
    in_gemm = work_of(tied, "cuda", grad_bytes=2, accumulates_in_gemm=True)
    assert in_gemm.layer.accumulate_bytes == pytest.approx(3 * 3.5 * LAYER_MATRICES)
    cleared = [work.layers[0].clear_bytes / work.layers[0].upload_bytes * 2 for work in (by_row, in_gemm)]
    assert cleared == [9, 5], "nothing is cleared that is overwritten"


@pytest.mark.parametrize(("device_kind", "element"), [("host", 4), ("cuda", 2)])
def test_a_units_weights_gradients_and_moments_cross_what_they_must(
    untied: ModelFolder, device_kind: DeviceKind, element: int
) -> None:
    work = work_of(untied, device_kind, grad_bytes=element)
    sizes = elements(untied, "layer")
    assert [unit.upload_bytes for unit in work.layers] == [size * element for size in sizes]
    assert [unit.download_bytes for unit in work.layers] == [size * element for size in sizes]
    # 24 bytes of weights and moments and the gradient; on a device of its own also the copy of another unit.
    per_parameter = {"host": 28, "cuda": 28}[device_kind]
    assert [unit.update_bytes for unit in work.layers] == [size * per_parameter for size in sizes]
    (head,) = elements(untied, "head")
    assert (work.head_traffic.upload_bytes, work.head_traffic.download_bytes) == (head * element, head * element)
    landed = work_of(untied, device_kind, grad_bytes=0)
    assert landed.updates_in_backward and not work.updates_in_backward
    assert landed.layers[0].update_bytes == sizes[0] * {"host": 28, "cuda": 30}[device_kind]


def test_a_tied_table_goes_up_with_the_head_and_down_with_the_embedding(tied: ModelFolder) -> None:
    work, (table,), (head,) = work_of(tied), elements(tied, "embedding"), elements(tied, "head")
    assert (work.head_traffic.upload_bytes, work.head_traffic.download_bytes) == (4 * (table + head), 4 * head)
    rows = work.embedding
    assert (rows.rows_up_bytes, rows.rows_down_bytes, rows.table_down_bytes) == (4 * TABLE, 0, 4 * table)
    assert (rows.clear_host_bytes, rows.last_update_bytes) == (0, 0)


def test_rows_of_an_untied_table_travel_alone_where_the_engine_sends_rows(untied: ModelFolder) -> None:
    (table,), rows = elements(untied, "embedding"), 80 * HIDDEN
    now, sent = work_of(untied, tokens=80).embedding, work_of(untied, tokens=80, sends_rows=True).embedding
    assert (now.rows_up_bytes, now.rows_down_bytes, now.clear_host_bytes) == (4 * rows, 4 * rows, 4 * table)
    assert (now.first_update_bytes, now.last_update_bytes) == (28 * table, 0)
    assert (sent.clear_host_bytes, sent.first_update_bytes) == (0, 28 * rows)
    assert sent.first_update_bytes + sent.last_update_bytes == now.first_update_bytes
    kept = work_of(untied, tokens=80, keeps_embedding=True).embedding
    assert (kept.rows_up_bytes, kept.rows_down_bytes, kept.first_update_bytes, kept.last_update_bytes) == (0, 0, 0, 0)


def test_layer_inputs_that_wait_on_the_host_are_all_but_the_last(tied: ModelFolder) -> None:
    offloaded = [unit.offload_bytes for unit in work_of(tied, "cuda", grad_bytes=2, placement="host").layers]
    assert offloaded == [2 * TOKENS * HIDDEN] * (LAYERS - 1) + [0]
    assert {unit.offload_bytes for unit in work_of(tied, "cuda", grad_bytes=2).layers} == {0}
