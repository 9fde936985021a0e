"""What stays on a device that has memory to spare: which layers, how many bytes, what it saves, and when it is not
worth it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.forecast import model_7b
from safetensors.torch import save_file
from tests.support.plans import settings, step_work
from tests.support.rates import RATES

from horizon_server.planning import compiling
from horizon_server.planning.compiling import flops_of_job, is_worth_compiling
from horizon_server.planning.machine import Accelerator, Gpu, HostMemory
from horizon_server.planning.model_folder import ModelFolder, open_model_folder
from horizon_server.planning.planner import Planner
from horizon_server.planning.rates import DeviceRates
from horizon_server.planning.residency import (
    choose_residency,
    packed_units,
    possible_ends,
    product_bytes,
    resident_units,
    state_units,
)
from horizon_server.planning.step_parts import StepWork
from horizon_server.planning.step_time import Seconds, predict_step
from horizon_server.planning.trainable import open_for_training
from horizon_server.records.execution import NOTHING_STAYS, Residency
from horizon_server.records.plan import Plan
from horizon_server.settings import load_settings
from horizon_server.spec import LoraSpec, TrainSpec, parse_job_spec
from horizon_server.spec.lora import BaseFormat

GIB = 1 << 30
LAYERS = 8
CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "vocab_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
SHAPES = {"self_attn.q_proj": (32, 32), "mlp.gate_proj": (48, 32), "mlp.up_proj": (48, 32), "mlp.down_proj": (32, 48)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    shapes = {"model.embed_tokens.weight": (64, 32), "model.norm.weight": (32,), "lm_head.weight": (64, 32)}
    shapes |= {f"model.layers.{i}.{name}.weight": shape for i in range(LAYERS) for name, shape in SHAPES.items()}
    tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def folder(path: Path) -> ModelFolder:
    return open_model_folder(path)


@pytest.mark.parametrize("num_layers", range(LAYERS + 1))
def test_resident_layers_are_spread_evenly(folder: ModelFolder, num_layers: int) -> None:
    found = [unit.index for unit in resident_units(folder.layout, num_layers)]
    assert len(found) == len(set(found)) == num_layers
    assert all(folder.layout.units[index].kind == "layer" for index in found)
    distances = {after - before for before, after in pairwise(found)}
    assert max(distances, default=0) - min(distances, default=0) <= 1


def test_a_token_keeps_what_every_product_of_a_layer_has_put_out() -> None:
    model = model_7b()
    # Queries, keys, values, attention and its projection, gate and up in bf16; down is only added to the residual. A
    # number per head.
    outputs = 3584 + 512 + 512 + 3584 + 3584 + 2 * 18944
    assert product_bytes(model, *settings(tokens_per_step=3, compute_dtype="bfloat16")) == 3 * (2 * outputs + 4 * 28)


@pytest.mark.parametrize("change", [{"needs_masks": True}, {"latent_size": 8}])
def test_products_that_are_not_counted_are_not_kept(folder: ModelFolder, change: dict[str, Any]) -> None:
    job = settings(tokens_per_step=9, compute_dtype="bfloat16")
    assert product_bytes(folder, *job) > 0
    changed = dataclasses.replace(folder, shape=dataclasses.replace(folder.shape, **change))
    assert product_bytes(changed, *job) == 0


def chosen(step_s: Callable[[Residency], float], *, room: int, products: int = 10) -> tuple[int, int]:
    kept = choose_residency(
        step_s,
        room_bytes=room,
        num_layers=8,
        weight_bytes=lambda kept: 3 * kept.resident_layers,
        layer_product_bytes=products,
    )
    assert (kept.resident_bytes, kept.product_bytes) == (3 * kept.resident_layers, products * kept.product_layers)
    assert kept.saved_share == pytest.approx(1 - step_s(kept) / step_s(NOTHING_STAYS))
    return kept.resident_layers, kept.product_layers


def test_what_saves_most_gets_the_room() -> None:
    by_compute = chosen(lambda kept: 100 - 5 * kept.product_layers - kept.resident_layers * 0.01, room=45)
    assert by_compute == (0, 4)
    by_link = chosen(lambda kept: 100 - 5 * kept.resident_layers - kept.product_layers * 0.01, room=45)
    assert by_link == (8, 0)
    both = chosen(lambda kept: 100 - 5 * kept.resident_layers - 5 * kept.product_layers, room=45)
    assert both == (8, 2)


def test_what_saves_nothing_or_has_no_room_is_not_kept() -> None:
    assert chosen(lambda kept: 100 - 0.05 * kept.product_layers, room=1000) == (0, 0)
    assert chosen(lambda kept: 100 - kept.resident_layers, room=2) == (0, 0)
    assert chosen(lambda kept: 100 - kept.product_layers, room=1000, products=0) == (0, 0)


def chosen_of_packed(step_s: Callable[[Residency], float], *, room: int, ends: int = 0) -> Residency:
    """Of eight layers that take 8 each, or 2 packed, and a head of `ends`."""

    def weight_bytes(kept: Residency) -> int:
        return 8 * kept.resident_layers + 2 * kept.packed_layers + ends * kept.resident_head

    kept = choose_residency(
        step_s,
        room_bytes=room,
        num_layers=8,
        weight_bytes=weight_bytes,
        layer_product_bytes=3,
        is_packed=True,
        ends=[Residency(resident_head=True)] if ends else [],
    )
    assert (kept.resident_bytes, kept.packed_bytes) == (8 * kept.resident_layers, 2 * kept.packed_layers)
    assert kept.end_bytes == (ends if kept.resident_head else 0)
    assert weight_bytes(kept) + kept.product_bytes <= room
    return kept


def test_packed_weights_save_more_for_their_bytes_and_whole_layers_take_what_is_left() -> None:
    def step_s(kept: Residency) -> float:
        return 100 - 5 * kept.packed_layers - 6 * kept.resident_layers - 0.01 * kept.product_layers

    few, all_packed, both, whole = (chosen_of_packed(step_s, room=room) for room in (7, 16, 40, 64))
    assert (few.packed_layers, few.resident_layers) == (3, 0)
    assert (all_packed.packed_layers, all_packed.resident_layers) == (8, 0)
    assert (both.packed_layers, both.resident_layers) == (4, 4)
    assert (whole.packed_layers, whole.resident_layers) == (0, 8)


def test_packed_weights_leave_their_room_to_products_where_the_link_is_fast() -> None:
    kept = chosen_of_packed(lambda kept: 100 - 5 * kept.product_layers - 0.01 * kept.packed_layers, room=30)
    assert (kept.packed_layers, kept.resident_layers, kept.product_layers) == (0, 0, 8)


def test_a_head_stays_where_that_saves_more_than_layers_in_its_place() -> None:
    def step_s(kept: Residency) -> float:
        return 100 - 20 * kept.resident_head - 5 * kept.packed_layers

    assert chosen_of_packed(step_s, room=22, ends=12).resident_head
    assert not chosen_of_packed(step_s, room=11, ends=12).resident_head
    assert not chosen_of_packed(lambda kept: 100 - 5 * kept.packed_layers, room=200, ends=12).resident_head


def work_of(folder: ModelFolder, kept: Residency, *, grad_bytes: int = 2) -> StepWork:
    return step_work(
        folder,
        tokens_per_step=160,
        sequence_length=64,
        device_kind="cuda",
        grad_bytes=grad_bytes,
        residency=kept,
    )


def test_a_resident_layer_goes_up_once_a_step_and_takes_no_slot_from_the_others(folder: ModelFolder) -> None:
    seconds = Seconds.of(work_of(folder, Residency(resident_layers=2)), RATES)
    stay = {unit.index for unit in resident_units(folder.layout, 2)}
    layers = [visit for visit in seconds.visits if visit.ring == "layer"]
    assert {visit.unit for visit in layers if visit.resident} == stay == {4, 8}
    # Forward sends all; backward neither those nor the last two of the others.
    assert [visit.unit for visit in layers if not visit.upload_s] == [8, 7, 6, 4]


def adapters_on(path: Path, base: BaseFormat) -> ModelFolder:
    return open_for_training(path, TrainSpec(trainable=("lora",), lora=LoraSpec(rank=4, base=base)))


def test_a_layer_whose_packed_weights_stay_is_unpacked_from_the_devices_own_memory(path: Path) -> None:
    found = adapters_on(path, "nf4")
    plain, kept = (work_of(found, Residency(packed_layers=n)) for n in (0, 2))
    stay = {unit.index for unit in packed_units(found.layout, Residency(packed_layers=2))}
    for unit, before, after in zip(found.layout.units[1:-1], plain.layers, kept.layers, strict=True):
        assert before.unpack_bytes == after.unpack_bytes > 2 * 32 * 32
        assert before.upload_bytes - after.upload_bytes == (unit.packed_bytes if unit.index in stay else 0)
        assert not after.resident
    rates = dataclasses.replace(RATES, h2d_bytes_per_s=1e4)
    seconds = [
        predict_step(work_of(found, Residency(packed_layers=n)), rates, shares_processors=False).step_s
        for n in range(LAYERS + 1)
    ]
    assert all(after <= before for before, after in pairwise(seconds)) and seconds[-1] < 0.7 * seconds[0]
    whole = work_of(found, Residency(resident_layers=LAYERS))
    assert all(layer.unpack_bytes == 0 for layer in whole.layers)


def test_packed_weights_stay_only_of_layers_that_do_not_stay_as_a_whole(path: Path) -> None:
    layout = adapters_on(path, "nf4").layout
    kept = Residency(resident_layers=2, packed_layers=LAYERS - 2)
    packed = {unit.index for unit in packed_units(layout, kept)}
    assert packed | {unit.index for unit in resident_units(layout, 2)} == set(range(1, LAYERS + 1))
    assert len(packed) == LAYERS - 2


def test_a_frozen_head_and_table_that_stay_spare_the_link_their_bytes(path: Path) -> None:
    found = adapters_on(path, "source")
    plain, head, both = (work_of(found, kept) for kept in (NOTHING_STAYS, *possible_ends(found.layout)))
    assert plain.head_traffic.upload_bytes == 2 * found.layout.units[-1].num_elements
    assert (head.head_traffic.upload_bytes, head.head_traffic.resident) == (0, True)
    assert head.embedding == plain.embedding and plain.embedding.rows_up_bytes == 2 * 64 * 32
    assert (both.embedding.rows_up_bytes, both.embedding.rows_up_again_bytes) == (0, 0)


def test_a_head_that_is_trained_goes_up_in_any_case(folder: ModelFolder) -> None:
    assert possible_ends(folder.layout) == []
    tied = dataclasses.replace(folder, layout=dataclasses.replace(folder.layout, tied=True))
    assert possible_ends(tied.layout) == [Residency(resident_head=True)]
    plain, kept = (work_of(tied, stays) for stays in (NOTHING_STAYS, Residency(resident_head=True)))
    assert kept.head_traffic.upload_bytes == plain.head_traffic.upload_bytes
    # When backward reads the rows, the head has brought the table.
    assert kept.embedding.rows_up_bytes == plain.embedding.rows_up_bytes > 0
    assert (kept.embedding.rows_up_again_bytes, plain.embedding.rows_up_again_bytes) == (0, 2 * 64 * 32)


def test_a_kept_layer_recomputes_no_product(folder: ModelFolder) -> None:
    plain, kept = (Seconds.of(work_of(folder, Residency(product_layers=n)), RATES) for n in (0, 3))
    layer = work_of(folder, NOTHING_STAYS).layer
    saved = {name: seconds - kept.compute()[name] for name, seconds in plain.compute().items()}
    assert saved["gemm"] == pytest.approx(3 * layer.recompute_flops / 1e9)
    assert saved["attention"] == pytest.approx(3 * layer.attention_flops / 5e8)
    assert all(seconds == pytest.approx(0) for name, seconds in saved.items() if name not in ("gemm", "attention"))
    backward = [visit.compute_s for visit in kept.visits if visit.ring == "layer" and visit.gradient]
    assert backward[0] == backward[2] < backward[3] == backward[7]


@pytest.mark.parametrize("grad_bytes", [0, 2])
def test_more_that_stays_never_makes_a_step_longer(folder: ModelFolder, grad_bytes: int) -> None:
    rates = dataclasses.replace(RATES, h2d_bytes_per_s=1e4)
    steps = [
        predict_step(work_of(folder, kept, grad_bytes=grad_bytes), rates, shares_processors=False).step_s
        for kept in (
            *(Residency(resident_layers=n) for n in range(9)),
            Residency(resident_layers=8, product_layers=8),
        )
    ]
    assert all(after <= before * (1 + 1e-12) for before, after in pairwise(steps))
    assert steps[8] < 0.8 * steps[0]


def planned(
    path: Path,
    rates: DeviceRates | None,
    *,
    device: str = "cuda",
    memory: int = 80 * GIB,
    of_session: bool = False,
    **train: Any,
) -> Plan:
    planner = Planner(
        load_settings(host_memory_reserve_bytes=0, device_arena_bytes=GIB, numa_interleave=False),
        memory=lambda: HostMemory(limit_bytes=64 * GIB, available_bytes=64 * GIB),
        num_threads=1,
        accelerators=(Accelerator(index=0, name="H100", memory_bytes=memory),),
        rates=lambda: {} if rates is None else {device: rates},
    )
    spec = {
        "name": "j",
        "model": "m",
        "dataset": "d",
        "device": device,
        "train": {"max_steps": 1, "tokens_per_step": 4096, "sequence_length": 64, **train},
    }
    if of_session:
        spec = {name: spec[name] for name in ("name", "model", "device")}
        spec |= {"method": "session", "train": {"tokens_per_step": 4096, "sequence_length": 64, **train}}
    return planner.plan_to_start(parse_job_spec(spec), path)


SLOW_LINK = dataclasses.replace(RATES, h2d_bytes_per_s=1e4, d2h_bytes_per_s=1e9, gather_bytes_per_s=1e9)


def test_a_slow_link_is_spared_by_weights_that_stay(path: Path) -> None:
    # The gradients of a session's calls add up in host memory, so that no layer's states may stay.
    plan = planned(path, SLOW_LINK, of_session=True)
    kept = plan.execution.residency
    assert plan.kept == kept
    # With every other layer on the device, backward is no longer bound by the link.
    assert (kept.resident_layers, kept.product_layers) == (4, 0)
    without = planned(path, None, of_session=True)
    assert plan.device_bytes["weights"] - without.device_bytes["weights"] == kept.resident_bytes > 0
    assert plan.host_bytes == without.host_bytes
    assert plan.fits
    assert 0.1 < kept.saved_share < 0.3
    assert "weights of 4 layers" in kept.text and "of a step" in kept.text


def test_states_stay_with_the_weights_where_host_memory_or_the_link_is_what_takes_long(path: Path) -> None:
    plan, without = planned(path, SLOW_LINK), planned(path, None)
    kept = plan.execution.residency
    assert (kept.resident_layers, kept.state_layers) == (LAYERS, LAYERS)
    assert plan.device_total_bytes - without.device_total_bytes == kept.resident_bytes + kept.state_bytes
    elements = sum(unit.trained_elements for unit in open_model_folder(path).layout.units if unit.kind == "layer")
    # The low half, both moments, and a gradient in bf16.
    assert kept.state_bytes == (2 + 8 + 2) * elements
    assert plan.host_bytes == without.host_bytes and plan.fits
    assert "optimizer states of 8 layers" in kept.text and kept.saved_share > 0.5


def test_without_clipping_one_gradient_is_on_the_device_for_all(path: Path) -> None:
    kept = planned(path, SLOW_LINK, max_grad_norm=None).execution.residency
    elements = [unit.trained_elements for unit in open_model_folder(path).layout.units if unit.kind == "layer"]
    assert kept.state_layers == LAYERS and kept.state_bytes == (2 + 8) * sum(elements) + 2 * max(elements)


def test_states_take_the_room_that_there_is_and_go_where_they_save_nothing(path: Path) -> None:
    without = planned(path, None)
    usable = int((without.device_total_bytes + 200_000) / 0.95)
    tight = planned(path, SLOW_LINK, memory=int((usable + GIB) / 0.96))
    assert 0 < tight.execution.residency.state_layers < tight.execution.residency.resident_layers <= LAYERS
    assert tight.device_total_bytes <= 0.95 * tight.device_limit_bytes
    fast = dataclasses.replace(
        RATES, h2d_bytes_per_s=1e12, d2h_bytes_per_s=1e12, gather_bytes_per_s=1e12, adamw_bytes_per_s=1e12
    )
    assert planned(path, fast, compile="off").execution.residency.state_layers == 0


def test_a_layer_with_its_states_moves_nothing_and_is_updated_at_the_devices_speed(folder: ModelFolder) -> None:
    plain, kept = (work_of(folder, Residency(resident_layers=2, state_layers=n)) for n in (0, 1))
    stay = {unit.index for unit in state_units(folder.layout, Residency(resident_layers=2, state_layers=1))}
    assert stay < {unit.index for unit in resident_units(folder.layout, 2)}
    for unit, before, after in zip(folder.layout.units[1:-1], plain.layers, kept.layers, strict=True):
        if unit.index in stay:
            assert (after.upload_bytes, after.download_bytes, after.update_bytes) == (0, 0, 0)
            assert after.clear_bytes - before.clear_bytes == 26 * unit.trained_elements
        else:
            assert after == before
    updated = [unit for unit, _ in Seconds.of(kept, RATES).updates]
    assert len(stay) == 1 and not stay & set(updated)


def test_a_packed_base_stays_packed_where_it_fits_and_the_link_is_slow(path: Path) -> None:
    train: dict[str, Any] = {"trainable": "lora", "lora": {"rank": 2, "base": "nf4"}}
    slow = dataclasses.replace(SLOW_LINK, gather_bytes_per_s=1e4)
    plan, without = planned(path, slow, **train), planned(path, None, **train)
    kept = plan.execution.residency
    assert kept.packed_layers + kept.resident_layers == LAYERS and kept.resident_head and kept.resident_table
    num_bytes = kept.resident_bytes + kept.state_bytes + kept.packed_bytes + kept.end_bytes
    assert plan.device_total_bytes - without.device_total_bytes == num_bytes > 0
    assert plan.fits and plan.kept == kept and kept.saved_share > 0.3
    assert "weights of head and embedding (" in kept.text
    needed = int((without.device_total_bytes + kept.end_bytes + 20_000) / 0.95) + 60_000
    tight = planned(path, slow, memory=int((needed + GIB) / 0.96), **train).execution.residency
    assert f"packed weights of {tight.packed_layers} layers (" in tight.text and tight.packed_layers > 4


def test_ends_and_states_stay_on_one_device_alone(path: Path) -> None:
    train = {"trainable": "lora", "lora": {"rank": 2}, "parallel": "rows"}
    planner = Planner(
        load_settings(host_memory_reserve_bytes=0, device_arena_bytes=GIB, numa_interleave=False),
        memory=lambda: HostMemory(limit_bytes=64 * GIB, available_bytes=64 * GIB),
        num_threads=1,
        accelerators=[Gpu(index=i, name="H100", memory_bytes=80 * GIB, uuid=f"GPU-{i}") for i in range(2)],
        rates=lambda: {"cuda": SLOW_LINK},
    )
    spec = {"name": "j", "model": "m", "dataset": "d", "device": "cuda", "gpus": 2}
    spec["train"] = {"max_steps": 1, "tokens_per_step": 4096, "sequence_length": 64, **train}
    kept = planner.plan_to_start(parse_job_spec(spec), path).execution.residency
    assert kept.resident_layers and not kept.resident_head and not kept.resident_table and not kept.state_layers


def test_compiled_layers_keep_products_where_compute_is_what_takes_long(path: Path) -> None:
    compiled, eager = (planned(path, RATES, compile=choice) for choice in ("on", "off"))
    kept = compiled.execution.residency
    assert kept.product_layers == LAYERS and eager.execution.residency.product_layers == 0
    folder = open_model_folder(path)
    a_layer = product_bytes(folder, *settings(tokens_per_step=4096, compute_dtype="bfloat16"))
    assert kept.product_bytes == LAYERS * a_layer
    plain = planned(path, None, compile="on")
    assert compiled.device_bytes["activations"] - plain.device_bytes["activations"] == LAYERS * a_layer
    assert kept.saved_share > 0.05


def test_products_are_planned_where_the_worker_compiles(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def keep(**train: Any) -> bool:
        return planned(path, RATES, **train).execution.residency.product_layers > 0

    train = parse_job_spec({"name": "j", "model": "m", "dataset": "d", "train": {"max_steps": 1}}).train
    job = train.model_copy(update={"tokens_per_step": 4096, "sequence_length": 64})
    flops = flops_of_job(open_model_folder(path), job, 1)
    assert not is_worth_compiling("auto", "cuda", flops) and not keep(compile="auto")
    monkeypatch.setitem(compiling.WORTH_COMPILING_FLOPS, "cuda", 2.5 * flops)
    assert [keep(compile="auto", max_steps=steps) for steps in (1, 2, 3)] == [False, False, True]
    assert keep(compile="auto", max_steps=3, matmul="fp8")


def test_layers_that_will_be_compiled_are_predicted_as_such_on_a_gpu(path: Path) -> None:
    def elementwise_s(**job: Any) -> float:
        predicted = planned(path, RATES, **job).prediction
        assert predicted is not None
        return predicted.parts_s["elementwise"]

    assert elementwise_s(compile="on") < 0.6 * elementwise_s(compile="off")
    # Too little work for `auto`.
    assert elementwise_s(compile="auto") == elementwise_s(compile="off")
    assert elementwise_s(compile="on", device="host") == elementwise_s(compile="off", device="host")


def test_what_is_kept_leaves_a_twentieth_of_the_device_free(path: Path) -> None:
    without = planned(path, None)
    # The context and fragmentation take 4 percent and one GiB of what the GPU has.
    usable = int(without.device_total_bytes / 0.95) + 40_000
    tight = planned(path, SLOW_LINK, memory=int((usable + GIB) / 0.96))
    assert 0 < tight.execution.residency.resident_layers < 4
    assert tight.device_total_bytes <= 0.95 * tight.device_limit_bytes


def test_nothing_is_kept_on_the_host_nor_at_a_speed_that_is_not_known(path: Path) -> None:
    assert planned(path, SLOW_LINK, device="host").kept is None
    assert planned(path, None).kept is None
    assert planned(path, None).execution.residency.resident_layers == 0
