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
from horizon_server.planning.machine import Accelerator, HostMemory
from horizon_server.planning.model_folder import ModelFolder, open_model_folder
from horizon_server.planning.planner import Planner
from horizon_server.planning.rates import DeviceRates
from horizon_server.planning.residency import choose_residency, product_bytes, resident_units
from horizon_server.planning.step_time import Seconds, predict_step
from horizon_server.planning.step_work import StepWork
from horizon_server.records.execution import NOTHING_STAYS, Residency
from horizon_server.records.plan import Plan
from horizon_server.settings import load_settings
from horizon_server.spec import parse_job_spec

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
        step_s, room_bytes=room, num_layers=8, resident_bytes=lambda n: 3 * n, layer_product_bytes=products
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
    path: Path, rates: DeviceRates | None, *, device: str = "cuda", memory: int = 80 * GIB, **train: Any
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
    return planner.plan_to_start(parse_job_spec(spec), path)


SLOW_LINK = dataclasses.replace(RATES, h2d_bytes_per_s=1e4, d2h_bytes_per_s=1e9, gather_bytes_per_s=1e9)


def test_a_slow_link_is_spared_by_weights_that_stay(path: Path) -> None:
    plan = planned(path, SLOW_LINK)
    kept = plan.execution.residency
    assert plan.kept == kept
    # With every other layer on the device, backward is no longer bound by the link.
    assert (kept.resident_layers, kept.product_layers) == (4, 0)
    without = planned(path, None)
    assert plan.device_bytes["weights"] - without.device_bytes["weights"] == kept.resident_bytes > 0
    assert plan.host_bytes == without.host_bytes
    assert plan.fits
    assert 0.1 < kept.saved_share < 0.3
    assert "weights of 4 layers" in kept.text and "of a step" in kept.text


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
    assert not keep(compile="auto", max_steps=3, matmul="fp8")


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
