"""When a plan says that trainers which keep everything on several GPUs are likely to be faster: only where all of a
job's state fits there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from horizon_server.planning.machine import Gpu, HostMemory
from horizon_server.planning.planner import Planner
from horizon_server.records.plan import Plan, PlannedMachine
from horizon_server.settings import load_settings
from horizon_server.spec import parse_job_spec
from horizon_server.store.safetensors_files import write_outline

GIB = 1 << 30
LAYERS, WIDTH, INNER = 40, 4096, 16384
PARAMETERS = LAYERS * WIDTH * INNER + 2 * 64 * WIDTH + WIDTH
CONFIG = {
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "vocab_size": 64,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(CONFIG))
    shapes = {"model.embed_tokens.weight": (64, WIDTH), "model.norm.weight": (WIDTH,), "lm_head.weight": (64, WIDTH)}
    shapes |= {f"model.layers.{index}.mlp.up_proj.weight": (INNER, WIDTH) for index in range(LAYERS)}
    write_outline(path / "model.safetensors", [(name, "BF16", shape) for name, shape in shapes.items()])
    return path


def planned(
    folder: Path, gpus: int | str, *, device: str = "cuda", of_each: int = 24 * GIB, uneven: bool = False, **train: Any
) -> Plan:
    sizes = [of_each] * 8 if not uneven else [10 * of_each] * 7 + [of_each]
    spec = {"name": "j", "model": "m", "dataset": "d", "device": device, "gpus": gpus}
    planner = Planner(
        load_settings(host_memory_reserve_bytes=0, numa_interleave=False, host_devices=8),
        memory=lambda: HostMemory(limit_bytes=256 * GIB, available_bytes=256 * GIB),
        num_threads=8,
        accelerators=[Gpu(index=i, name="g", memory_bytes=size, uuid=f"GPU-{i}") for i, size in enumerate(sizes)],
    )
    return planner.plan(parse_job_spec({**spec, "train": {"max_steps": 1, **train}}), folder)


def test_a_job_whose_whole_state_fits_in_its_gpus_is_told_what_keeps_it_there(folder: Path) -> None:
    plan = planned(folder, 4)
    assert (plan.num_parameters, plan.prediction) == (PARAMETERS, None)
    assert f"{16 * PARAMETERS / GIB:.2f} {4 * plan.device_limit_bytes / GIB:.2f}" == "40.01 88.16"
    assert plan.hint == (
        "all 40.01 GiB of the job's weights, gradients and moments would fit in the 88.16 GiB that it may use of 4 "
        "GPUs: FSDP2, as in torchtitan, Axolotl or TRL, keeps them there and is likely to be faster for this job"
    )
    # What is not stored here without clipping, other trainers have all the same.
    assert planned(folder, 4, max_grad_norm=None).hint == plan.hint


def test_it_is_said_up_to_seven_tenths_of_each_gpu(folder: Path) -> None:
    for share, fits in ((0.69, True), (0.71, False)):
        limit_bytes = 16 * PARAMETERS / 2 / share
        plan = planned(folder, 2, of_each=int((limit_bytes + GIB) / 0.96))
        assert plan.device_limit_bytes == pytest.approx(limit_bytes, rel=1e-6)
        assert bool(plan.hint) == fits, share


def test_of_gpus_that_differ_the_smallest_counts(folder: Path) -> None:
    assert planned(folder, 8, uneven=True).hint == planned(folder, 8).hint != ""
    assert planned(folder, 8, uneven=True, of_each=8 * GIB).hint == ""


def test_a_frozen_weight_counts_as_it_is_kept(folder: Path) -> None:
    # 5 GiB in bf16 on two GPUs of 4 GiB, and 1.3 GiB in four bits.
    assert planned(folder, 2, of_each=4 * GIB, trainable="lora", lora={"base": "source"}).hint == ""
    packed = planned(folder, 2, of_each=4 * GIB, trainable="lora", lora={"base": "nf4"})
    assert packed.hint.startswith("all 1.")
    plan = planned(folder, 2, trainable="lora", lora={"rank": 8})
    trained = plan.num_trained_parameters
    assert trained == LAYERS * 8 * (WIDTH + INNER)
    assert plan.hint.startswith(f"all {(16 * trained + 2 * PARAMETERS) / GIB:.2f} GiB of the job's weights")
    layers = planned(folder, 2, trainable=[r"layers\.[0-9]\."])
    assert 0 < layers.num_trained_parameters < PARAMETERS
    state = 14 * layers.num_trained_parameters + 2 * PARAMETERS
    assert layers.hint.startswith(f"all {state / GIB:.2f} GiB of the job's weights")


def test_one_gpu_and_processors_are_told_nothing(folder: Path) -> None:
    assert planned(folder, 1, of_each=640 * GIB).hint == ""
    plan = planned(folder, 4, device="host")
    assert (plan.num_devices, plan.is_on_host, plan.hint) == (4, True, "")


def test_a_machine_that_is_asked_about_is_told_too(folder: Path) -> None:
    settings = load_settings(host_memory_reserve_bytes=0, numa_interleave=False)
    planner = Planner(settings, memory=lambda: HostMemory(limit_bytes=GIB, available_bytes=GIB), num_threads=1)
    hints = []
    for gpus in (1, 2, 8):
        spec = {"name": "j", "model": "m", "dataset": "d", "gpus": gpus, "train": {"max_steps": 1}}
        machine = PlannedMachine(gpu="rtx-4090", host_gbps=200)
        hints.append(planner.plan_elsewhere(parse_job_spec(spec), folder, machine).hint)
    assert hints[:2] == ["", ""] and "that it may use of 8 GPUs" in hints[2]
