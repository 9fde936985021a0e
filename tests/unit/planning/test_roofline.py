"""The predicted step: exact arithmetic over given rates, and what decides it. That it meets real steps is bench/prediction.py's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from horizon_server.planning.ledger import ActivationPlacement, DeviceKind
from horizon_server.planning.model_folder import ModelFolder, open_model_folder
from horizon_server.planning.roofline import DeviceRates, FlopsCount, StepWork, WidthRates, predict_step, work_of_step

WIDTH = WidthRates(hidden_size=32, layer_flops_per_s=1e9, head_flops_per_s=2e9)
RATES = DeviceRates(
    name="host",
    num_threads=2,
    peak_flops_per_s=4e9,
    attention_flops_per_s=5e8,
    widths=(WIDTH,),
    h2d_bytes_per_s=1e8,
    d2h_bytes_per_s=5e7,
    adamw_bytes_per_s=1e9,
)
TOKENS, ROW = 160, 64
QUERY, KEY = 4 * 8, 2 * 8
LAYER_MATRICES = 32 * (QUERY + KEY + KEY) + QUERY * 32 + 3 * 32 * 48
TABLE = 128 * 32
PAIRS = 2 * (64 * 65 // 2) + 32 * 33 // 2
LAYERS_FLOPS = 6 * 3 * LAYER_MATRICES * TOKENS
ATTENTION_FLOPS = 12 * 3 * QUERY * PAIRS


@pytest.fixture
def folder(make_model: Callable[..., Path]) -> ModelFolder:
    return open_model_folder(make_model(tied=True))


def work_of(
    folder: ModelFolder,
    device_kind: DeviceKind = "host",
    *,
    grad_bytes: int = 4,
    placement: ActivationPlacement = "device",
) -> StepWork:
    return work_of_step(
        folder,
        tokens_per_step=TOKENS,
        sequence_length=ROW,
        device_kind=device_kind,
        grad_bytes=grad_bytes,
        activation_placement=placement,
    )


def elements(folder: ModelFolder, *kinds: str) -> int:
    return sum(unit.num_elements for unit in folder.layout.units if unit.kind in kinds)


def test_forward_computes_the_layers_once_and_backward_three_times(folder: ModelFolder) -> None:
    work = work_of(folder)
    assert work.forward.layer_flops == pytest.approx(LAYERS_FLOPS / 3)
    assert work.backward.layer_flops == LAYERS_FLOPS
    assert (work.forward.head_flops, work.backward.head_flops) == (0, 6 * TABLE * TOKENS)
    assert work.forward.attention_flops == pytest.approx(ATTENTION_FLOPS / 3)
    assert work.backward.attention_flops == ATTENTION_FLOPS


def test_weights_cross_twice_and_gradients_once(folder: ModelFolder) -> None:
    layers, ends, rows = elements(folder, "layer"), elements(folder, "embedding", "head"), 128 * 32
    work, last_two = work_of(folder), sum(unit.num_elements for unit in folder.layout.units[-3:-1])
    # But for the last two layers, which backward finds in their slots.
    assert work.forward.h2d_bytes + work.backward.h2d_bytes == 4 * (2 * layers - last_two + ends + 2 * rows)
    assert (work.forward.d2h_bytes, work.backward.d2h_bytes) == (0, 4 * (layers + ends))
    on_cuda = work_of(folder, "cuda", grad_bytes=2)
    assert 2 * on_cuda.forward.h2d_bytes == work.forward.h2d_bytes, "bf16 is half of fp32"
    assert 2 * on_cuda.backward.d2h_bytes == work.backward.d2h_bytes


def test_an_untied_model_sends_the_gradients_of_the_rows_in_use(make_model: Callable[..., Path]) -> None:
    folder = open_model_folder(make_model(tied=False))
    work = work_of(folder)
    assert work.backward.d2h_bytes == 4 * (elements(folder, "layer", "head") + 128 * 32)
    assert work.forward.h2d_bytes == 4 * (elements(folder, "layer", "head") + 128 * 32)


def test_layer_inputs_that_wait_on_the_host_cross_once_each_way(folder: ModelFolder) -> None:
    kept, offloaded = work_of(folder, "cuda", grad_bytes=2), work_of(folder, "cuda", grad_bytes=2, placement="host")
    num_bytes = 2 * 2 * TOKENS * 32
    assert offloaded.forward.d2h_bytes - kept.forward.d2h_bytes == num_bytes
    assert offloaded.backward.h2d_bytes - kept.backward.h2d_bytes == num_bytes


def test_the_update_is_in_forward_unless_no_gradient_is_kept(folder: ModelFolder) -> None:
    num_elements = folder.layout.num_elements
    deferred, landed = work_of(folder), work_of(folder, grad_bytes=0)
    assert (deferred.forward.host_bytes, deferred.backward.host_bytes) == (28 * num_elements, 0)
    assert (landed.forward.host_bytes, landed.backward.host_bytes) == (0, 28 * num_elements)
    assert work_of(folder, "cuda", grad_bytes=2).forward.host_bytes == 26 * num_elements


def test_on_the_host_everything_adds_up(folder: ModelFolder) -> None:
    work = work_of(folder)
    up, down = work.forward.h2d_bytes + work.backward.h2d_bytes, work.backward.d2h_bytes
    compute_s = LAYERS_FLOPS * 4 / 3 / 1e9 + 6 * TABLE * TOKENS / 2e9 + ATTENTION_FLOPS * 4 / 3 / 5e8
    expected_s = compute_s + up / 1e8 + down / 5e7 + 28 * folder.layout.num_elements / 1e9
    found = predict_step(work, RATES, device_kind="host", max_steps=10)
    assert found.step_s == pytest.approx(expected_s)
    assert found.tokens_per_second == pytest.approx(TOKENS / expected_s)
    assert found.total_s == pytest.approx(10 * expected_s)
    assert (found.bound, found.peak_flops_per_s) == ("compute", 4e9)
    assert predict_step(work, RATES, device_kind="host").total_s is None


def test_on_cuda_each_phase_takes_as_long_as_its_slowest_queue(folder: ModelFolder) -> None:
    work = work_of(folder, "cuda", grad_bytes=2)
    forward, backward = work.forward, work.backward
    slow_memory = dataclasses.replace(RATES, adamw_bytes_per_s=1e6, h2d_bytes_per_s=1e12, d2h_bytes_per_s=1e12)
    traffic = forward.host_bytes + forward.h2d_bytes
    expected_s = traffic / 1e6 + max(
        backward.layer_flops / 1e9 + backward.head_flops / 2e9 + backward.attention_flops / 5e8,
        (backward.h2d_bytes + backward.d2h_bytes) / 1e6,
    )
    found = predict_step(work, slow_memory, device_kind="cuda")
    assert found.step_s == pytest.approx(expected_s)
    assert found.bound == "host memory"


@pytest.mark.parametrize(
    ("change", "bound"),
    [
        ({"h2d_bytes_per_s": 1e3}, "h2d"),
        ({"d2h_bytes_per_s": 1e3}, "d2h"),
        ({"adamw_bytes_per_s": 1e3}, "host memory"),
        ({"attention_flops_per_s": 1e3}, "compute"),
    ],
)
@pytest.mark.parametrize("device_kind", ["host", "cuda"])
def test_the_bound_is_what_takes_the_most(
    folder: ModelFolder, device_kind: DeviceKind, change: dict[str, float], bound: str
) -> None:
    work = work_of(folder, device_kind, grad_bytes=2)
    assert predict_step(work, dataclasses.replace(RATES, **change), device_kind=device_kind).bound == bound  # type: ignore[arg-type]


def test_the_nearest_width_speaks_for_a_model() -> None:
    widths = tuple(dataclasses.replace(WIDTH, hidden_size=size) for size in (256, 512, 1024))
    rates = dataclasses.replace(RATES, widths=widths)
    assert [rates.at(size).hidden_size for size in (64, 256, 361, 363, 900, 8192)] == [256, 256, 256, 512, 1024, 1024]


def test_rates_survive_being_plain_and_nonsense_is_refused() -> None:
    plain: dict[str, Any] = dataclasses.asdict(RATES)
    assert DeviceRates.from_mapping(plain) == RATES
    for broken in (
        {**plain, "h2d_bytes_per_s": 0.0},
        {**plain, "peak_flops_per_s": float("nan")},
        {**plain, "widths": []},
        {**plain, "widths": [{**plain["widths"][0], "layer_flops_per_s": -1.0}]},
    ):
        with pytest.raises(ValueError, match="above zero"):
            DeviceRates.from_mapping(broken)


@pytest.mark.parametrize("tied", [True, False])
def test_the_daemon_counts_what_the_engine_counts(make_model: Callable[..., Path], tied: bool) -> None:
    folder = open_model_folder(make_model(tied=tied))
    config = AutoConfig.from_pretrained(folder.path)
    shapes = {tensor.name: tensor.shape for _, tensor in folder.layout.tensors()}
    engine = FlopsCount(shapes, config.to_dict(), tied=tied, embedding_name="model.embed_tokens.weight")
    assert FlopsCount.of_folder(folder).of([7, 64]) == engine.of([7, 64])


EMBEDDING, PROJECTION = "model.embed_tokens.weight", "lm_head.weight"


def config_of(**changes: Any) -> dict[str, Any]:
    return {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 3, "vocab_size": 100, **changes}


def of_matrices(count: FlopsCount, num_tokens: int) -> float:
    return count.of([num_tokens]) - count.of_attention([num_tokens])


def test_six_per_matrix_parameter_and_token_plus_causal_attention() -> None:
    shapes = {EMBEDDING: (100, 8), "model.layers.0.w": (8, 16), "model.norm.weight": (8,), PROJECTION: (100, 8)}
    untied = FlopsCount(shapes, config_of(), tied=False, embedding_name=EMBEDDING)

    pairs = (4 * 5 // 2) + (6 * 7 // 2)
    assert untied.of([4, 6]) == 6 * (128 + 800) * 10 + 12 * 3 * 8 * pairs
    assert untied.of_attention([4, 6]) == 12 * 3 * 8 * pairs


def test_a_tied_table_counts_once_as_projection() -> None:
    shapes = {EMBEDDING: (100, 8), "model.layers.0.w": (8, 16)}
    tied = FlopsCount(shapes, config_of(), tied=True, embedding_name=EMBEDDING)

    assert of_matrices(tied, 10) == 6 * (128 + 800) * 10


def test_a_window_bounds_the_pairs_of_sliding_layers() -> None:
    layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
    count = FlopsCount({}, config_of(layer_types=layer_types, sliding_window=3), tied=True, embedding_name=EMBEDDING)

    sliding, full = 1 + 2 + 3 + 3 + 3, 1 + 2 + 3 + 4 + 5
    assert count.of([5]) == 12 * 8 * (2 * sliding + full)


def test_only_the_visited_share_of_experts_counts() -> None:
    shapes = {"model.layers.0.experts": (4, 8, 8)}
    count = FlopsCount(shapes, config_of(num_experts=4, num_experts_per_tok=1), tied=True, embedding_name=EMBEDDING)

    assert of_matrices(count, 1) == 6 * 64


def test_experts_count_the_same_stacked_and_one_by_one() -> None:
    choice = config_of(num_experts=4, num_experts_per_tok=2)
    stacked = FlopsCount({"model.layers.0.mlp.experts.up": (4, 8, 8)}, choice, tied=True, embedding_name=EMBEDDING)
    names = [f"model.layers.0.mlp.experts.{i}.up_proj.weight" for i in range(4)]
    one_by_one = FlopsCount(dict.fromkeys(names, (8, 8)), choice, tied=True, embedding_name=EMBEDDING)

    assert of_matrices(stacked, 3) == of_matrices(one_by_one, 3) == 6 * 2 * 64 * 3


@pytest.mark.parametrize(
    "names",
    [
        {"num_local_experts": 8, "num_experts_per_tok": 2},
        {"n_routed_experts": 8, "num_experts_per_tok": 2},
        {"n_routed_experts": 8, "moe_topk": 2},
        {"moe_num_experts": 8, "moe_k": 2},
        {"ffn_config": {"moe_num_experts": 8, "moe_top_k": 2}},
    ],
)
def test_experts_count_under_every_name_that_configs_have_for_them(names: dict[str, Any]) -> None:
    shapes = {"model.layers.0.mlp.experts.up": (8, 8, 8)}
    assert of_matrices(FlopsCount(shapes, config_of(**names), tied=True, embedding_name=EMBEDDING), 1) == 6 * 2 * 64
