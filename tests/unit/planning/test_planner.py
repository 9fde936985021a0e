"""What a job is planned to run on, and with what kept where."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.support.rates import RATES

from horizon_server.errors import InvalidSpec
from horizon_server.planning.data_size import DataSize
from horizon_server.planning.machine import (
    Accelerator,
    Gpu,
    HostMemory,
    RatesByDevice,
    find_accelerators,
    usable_accelerators,
)
from horizon_server.planning.model_folder import open_model_folder
from horizon_server.planning.planner import Planner
from horizon_server.planning.rates import DeviceRates, WidthRates
from horizon_server.records.plan import DeviceRange, Plan, PlannedMachine
from horizon_server.settings import load_settings
from horizon_server.spec import JobSpec, parse_job_spec
from horizon_server.store.cpus import update_threads
from horizon_server.store.generations import PLANE

GIB = 1 << 30
H100 = Accelerator(index=0, name="H100", memory_bytes=80 * GIB)
CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 40,
    "vocab_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    shapes = {"model.embed_tokens.weight": (64, 32), "model.norm.weight": (32,), "lm_head.weight": (64, 32)}
    shapes |= {f"model.layers.{index}.mlp.up_proj.weight": (48, 32) for index in range(40)}
    save_file(
        {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()},
        tmp_path / "model.safetensors",
    )
    return tmp_path


def spec_of(*, device: str = "auto", gpus: int | str = 1, **train: Any) -> JobSpec:
    return parse_job_spec(
        {
            "gpus": gpus,
            "name": "j",
            "model": "m",
            "dataset": "d",
            "device": device,
            "train": {"max_steps": 1, "tokens_per_step": 4096, **train},
        }
    )


def worker_memory(
    folder: Path,
    spec: JobSpec,
    *,
    accelerators: tuple[Accelerator, ...] = (),
    arena_bytes: int = GIB,
    rates: RatesByDevice | None = None,
    has_bf16: bool = True,
    gpus: tuple[Accelerator, ...] = (),
    num_threads: int = 1,
    host_devices: int = 1,
) -> Plan:
    planner = planner_of(
        accelerators=accelerators,
        arena_bytes=arena_bytes,
        rates=rates,
        has_bf16=has_bf16,
        num_threads=num_threads,
        host_devices=host_devices,
    )
    return planner.plan_to_start(spec, folder, gpus=gpus)


def planner_of(
    *,
    accelerators: tuple[Accelerator, ...] = (),
    arena_bytes: int = GIB,
    rates: RatesByDevice | None = None,
    has_bf16: bool = True,
    num_threads: int = 1,
    host_devices: int = 1,
    host_bytes: int = 64 * GIB,
    free_devices: tuple[str, ...] | None = None,
) -> Planner:
    return Planner(
        load_settings(
            host_memory_reserve_bytes=0,
            device_arena_bytes=arena_bytes,
            numa_interleave=False,
            host_devices=host_devices,
        ),
        memory=lambda: HostMemory(limit_bytes=host_bytes, available_bytes=host_bytes),
        num_threads=num_threads,
        accelerators=accelerators,
        rates=lambda: rates or {},
        has_bf16=has_bf16,
        free_devices=None if free_devices is None else lambda: free_devices,
    )


def bytes_per_parameter(memory: Plan) -> float:
    planes = [size for name, size in memory.plane_bytes.items() if name != PLANE]
    return sum(planes) / (memory.plane_bytes["hi"] / 2)


def test_a_sequence_longer_than_the_model_allows_is_refused_by_field(folder: Path) -> None:
    with pytest.raises(
        InvalidSpec, match=r"train\.sequence_length is 4097; the model allows at most 4096 positions"
    ) as caught:
        worker_memory(folder, spec_of(sequence_length=4097))

    assert [violation.field for violation in caught.value.violations] == ["train.sequence_length"]
    assert worker_memory(folder, spec_of(sequence_length=4096)).num_parameters > 0


def test_a_learning_rate_group_that_fits_no_tensor_is_refused_by_field(folder: Path) -> None:
    with pytest.raises(
        InvalidSpec, match=r"train\.lr_groups: 'experts' fits none of the model's \d+ tensors"
    ) as caught:
        worker_memory(folder, spec_of(lr_groups=[{"match": "experts", "scale": 2}]))

    assert [violation.field for violation in caught.value.violations] == ["train.lr_groups"]
    assert worker_memory(folder, spec_of(lr_groups=[{"match": "norm", "scale": 2}])).num_parameters > 0


def test_the_limit_of_a_model_that_calls_it_max_seq_len_counts(folder: Path) -> None:
    config = {name: value for name, value in CONFIG.items() if name != "max_position_embeddings"}
    (folder / "config.json").write_text(json.dumps({**config, "max_seq_len": 2048}))
    with pytest.raises(InvalidSpec, match=r"train\.sequence_length is 2049; the model allows at most 2048 positions"):
        worker_memory(folder, spec_of(sequence_length=2049))


@pytest.mark.parametrize(
    ("accelerators", "device", "wanted"),
    [
        ((), "auto", "host"),
        ((), "host", "host"),
        ((H100,), "auto", "cuda"),
        ((H100,), "cuda", "cuda"),
        ((H100,), "host", "host"),
    ],
)
def test_auto_means_cuda_where_there_is_one(
    folder: Path, accelerators: tuple[Accelerator, ...], device: str, wanted: str
) -> None:
    memory = worker_memory(folder, spec_of(device=device), accelerators=accelerators)
    assert memory.execution.device_kind == memory.device == wanted
    # Only the host computes in it.
    in_full = worker_memory(folder, spec_of(device="auto", compute_dtype="float32"), accelerators=accelerators)
    assert in_full.device == "host"
    # The table of an untied model has no stored gradient; its rows land in a buffer of their own.
    grad_bytes, table = memory.plane_bytes["grad"], open_model_folder(folder).layout.units[0].num_elements
    assert (memory.plane_bytes["hi"] / 2 - table) * (2 if wanted == "cuda" else 4) == grad_bytes
    assert bytes_per_parameter(memory) == 12 + grad_bytes / (memory.plane_bytes["hi"] / 2)
    assert memory.fits


@pytest.mark.parametrize(
    ("device", "asked", "wanted", "grad_bytes"),
    [
        ("auto", "auto", "bfloat16", 2),
        ("host", "auto", "float32", 4),
        ("host", "float32", "float32", 4),
        ("host", "bfloat16", "bfloat16", 2),
        ("cuda", "auto", "bfloat16", 2),
        ("cuda", "bfloat16", "bfloat16", 2),
    ],
)
def test_the_spec_chooses_the_dtype_and_auto_the_devices_default(
    folder: Path, device: str, asked: str, wanted: str, grad_bytes: int
) -> None:
    memory = worker_memory(folder, spec_of(device=device, compute_dtype=asked), accelerators=(H100,))
    assert memory.compute_dtype == memory.compute_dtype == wanted
    assert memory.execution.grad_bytes == grad_bytes


@pytest.mark.parametrize("matmul", ["fp8", "fp8_full"])
def test_layers_in_fp8_can_be_compiled(folder: Path, matmul: str) -> None:
    assert worker_memory(folder, spec_of(compile="on", matmul=matmul)).execution.device_kind == "host"


def test_float32_on_cuda_is_refused_by_field(folder: Path) -> None:
    with pytest.raises(
        InvalidSpec, match=r"train\.compute_dtype is float32.*use bfloat16 or auto, or device: host"
    ) as caught:
        worker_memory(folder, spec_of(device="cuda", compute_dtype="float32"), accelerators=(H100,))
    assert [violation.field for violation in caught.value.violations] == ["train.compute_dtype"]


def test_bf16_halves_what_the_device_holds_and_streams(folder: Path) -> None:
    exact, rounded = (worker_memory(folder, spec_of(compute_dtype=dtype)) for dtype in ("float32", "bfloat16"))
    for component in ("weights", "activations"):
        assert exact.device_bytes[component] == 2 * rounded.device_bytes[component]
    # Gradients add up in fp32 in either.
    assert exact.device_bytes["gradients"] == rounded.device_bytes["gradients"]


def test_a_cpu_without_bf16_instructions_is_warned_of(folder: Path) -> None:
    spec = spec_of(compute_dtype="bfloat16", warmup_steps=0)
    assert "no bf16 instructions" in worker_memory(folder, spec, has_bf16=False).warnings[0]
    assert worker_memory(folder, spec).warnings == ()
    exact = spec_of(compute_dtype="float32", warmup_steps=0)
    assert worker_memory(folder, exact, has_bf16=False).warnings == ()


def test_the_plan_predicts_in_its_dtype_and_hints_at_a_faster_one(folder: Path) -> None:
    def rates(flops_per_s: float) -> DeviceRates:
        width = WidthRates(
            hidden_size=32,
            gemm_flops_per_s=((1, flops_per_s),),
            elementwise_bytes_per_s=1e15,
            head_bytes_per_s=1e15,
        )
        copies = dict.fromkeys((name for name in vars(RATES) if name.endswith("bytes_per_s")), 1e15)
        plain = {**vars(RATES), **copies, "widths": (width,), "peak_flops_per_s": flops_per_s}
        for name in ("attention_forward_flops_per_s", "attention_backward_flops_per_s"):
            plain[name] = ((1, flops_per_s),)
        return DeviceRates(**plain)

    both = {"host": rates(1e9), "host_bfloat16": rates(3e9)}
    exact, rounded = (worker_memory(folder, spec_of(compute_dtype=dtype), rates=both) for dtype in ("auto", "bfloat16"))
    assert exact.prediction is not None and rounded.prediction is not None
    assert exact.prediction.step_s == pytest.approx(3 * rounded.prediction.step_s, rel=0.05)
    assert (
        exact.hint
        == "train.compute_dtype: bfloat16 is predicted to be 3.0 times as fast on this CPU, at the precision of bf16"
    )
    assert rounded.hint == ""
    # No hint where the spec names a dtype, where bf16 gains nothing, or where no rates were measured.
    assert worker_memory(folder, spec_of(compute_dtype="float32"), rates=both).hint == ""
    assert worker_memory(folder, spec_of(), rates={"host": rates(1e9), "host_bfloat16": rates(1e9)}).hint == ""
    assert worker_memory(folder, spec_of(), rates={"host": rates(1e9)}).hint == ""


@pytest.mark.parametrize("accelerators", [(), (H100,)])
def test_a_method_besides_cross_entropy_takes_64_bytes_a_token_and_a_second_forward_of_the_head(
    folder: Path, accelerators: tuple[Accelerator, ...]
) -> None:
    rates = {"host": RATES, "cuda": RATES}
    plain, preferring = (
        worker_memory(folder, spec, accelerators=accelerators, arena_bytes=64 * GIB, rates=rates)
        for spec in (spec_of(), spec_of().model_copy(update={"method": "dpo"}))
    )
    # A plain job's targets may have weights, which a GPU holds.
    weights = 4 if accelerators else 0
    assert preferring.device_bytes["workspace"] - plain.device_bytes["workspace"] == (64 - weights) * 4096
    assert (
        plain.host_total_bytes < preferring.host_total_bytes <= plain.host_total_bytes + 2 * 64 * 4096 or accelerators
    )
    assert plain.prediction is not None and preferring.prediction is not None
    assert preferring.prediction.parts_s["head"] > plain.prediction.parts_s["head"]
    assert preferring.prediction.step_s > plain.prediction.step_s


def test_cuda_is_refused_in_one_sentence_where_there_is_none(folder: Path) -> None:
    with pytest.raises(InvalidSpec, match="device: cuda needs a CUDA device, and this node has none"):
        worker_memory(folder, spec_of(device="cuda"))


@pytest.mark.parametrize("accelerators", [(), (H100,)])
def test_without_clipping_no_gradient_is_kept(folder: Path, accelerators: tuple[Accelerator, ...]) -> None:
    memory = worker_memory(folder, spec_of(max_grad_norm=None), accelerators=accelerators)
    assert bytes_per_parameter(memory) == 12
    assert memory.execution.grad_bytes == memory.host_bytes["gradients"] == 0


def test_the_device_limit_is_that_of_the_gpu_that_the_job_is_given_and_else_of_the_largest(folder: Path) -> None:
    small = Accelerator(index=1, name="small", memory_bytes=24 * GIB)
    for accelerators in ((small, H100), (H100, small)):
        memory = worker_memory(folder, spec_of(device="cuda"), accelerators=accelerators)
        assert memory.device_limit_bytes > 70 * GIB
    memory = worker_memory(folder, spec_of(device="cuda"), accelerators=(H100, small), gpus=(small,))
    assert 20 * GIB < memory.device_limit_bytes < 23 * GIB


def test_a_job_of_several_gpus_has_the_limit_of_the_smallest_and_the_names_of_all(folder: Path) -> None:
    large, small = (Gpu(index=i, name="g", memory_bytes=size * GIB, uuid=f"GPU-{i}") for i, size in enumerate((80, 24)))
    spec = spec_of(device="cuda", gpus=2)
    execution = worker_memory(folder, spec, accelerators=(small, large), gpus=(large, small)).execution
    assert (execution.num_ranks, execution.lanes, execution.gpu) == (2, 8, "GPU-0,GPU-1")
    assert 20 * GIB < execution.device_limit_bytes < 23 * GIB
    # Before it is known which they are: the largest ones.
    third = dataclasses.replace(small, index=2, memory_bytes=40 * GIB)
    execution = worker_memory(folder, spec, accelerators=(small, large, third)).execution
    assert execution.gpu == ""
    assert 36 * GIB < execution.device_limit_bytes < 39 * GIB


def test_a_rank_of_a_host_job_has_its_part_of_the_processors(folder: Path) -> None:
    for num_threads, host_devices, wanted in ((7, 1, 7), (7, 2, 3), (2, 4, 1)):
        execution = worker_memory(folder, spec_of(), num_threads=num_threads, host_devices=host_devices).execution
        assert (execution.num_ranks, execution.num_threads, execution.optimizer_threads) == (1, wanted, wanted)
    on_gpu = worker_memory(folder, spec_of(), accelerators=(H100,), num_threads=8, host_devices=2).execution
    assert on_gpu.num_threads == 8


@pytest.mark.parametrize(
    ("gpus", "lanes", "wanted"),
    [
        (1, None, 1),
        (1, 4, 4),
        (2, None, 8),
        (8, None, 8),
        (9, None, 16),
        (4, 4, 4),
        ("1-2", None, 8),
        ("1-9", None, 16),
        ("2-64", None, 64),
        ("2-4", 4, 4),
    ],
)
def test_the_lanes_of_a_step_are_those_of_the_spec_and_else_enough_for_all_devices(
    folder: Path, gpus: int | str, lanes: int | None, wanted: int
) -> None:
    spec = spec_of(gpus=gpus, lanes=lanes)
    assert worker_memory(folder, spec, host_devices=16).execution.lanes == wanted


@pytest.mark.parametrize(
    ("accelerators", "host_devices", "gpus", "lanes", "field", "message"),
    [
        ((H100,), 1, 4, None, "gpus", "gpus is 4 and this node has 1 GPU that a worker's torch can use; use gpus: 1"),
        ((H100, H100), 8, 4, None, "gpus", "gpus is 4 and this node has 2 GPUs .*; use gpus: 2$"),
        ((), 1, 2, None, "gpus", "gpus is 2 and this node's processors are one device; use gpus: 1, or ask an admin"),
        ((), 2, 3, None, "gpus", "gpus is 3 and this node's processors are divided into 2 devices; use gpus: 2, or"),
        ((), 8, 5, 4, "train.lanes", "train.lanes is 4 and gpus is 5, .*; use train.lanes: 8 or gpus: 4"),
        ((), 8, "2-5", 4, "train.lanes", "train.lanes is 4 and gpus is 2-5, .*; use train.lanes: 8 or gpus: 2-4"),
        ((), 2, "3-8", None, "gpus", "gpus is 3-8 and this node's processors are divided into 2 devices; use gpus: 2,"),
        ((H100,), 1, "2-4", None, "gpus", "gpus is 2-4 and this node has 1 GPU that .*; use gpus: 1"),
    ],
)
def test_more_devices_than_the_node_or_the_step_has_are_refused_with_what_would_fit(
    folder: Path,
    accelerators: tuple[Accelerator, ...],
    host_devices: int,
    gpus: int | str,
    lanes: int | None,
    field: str,
    message: str,
) -> None:
    with pytest.raises(InvalidSpec, match=message) as caught:
        worker_memory(folder, spec_of(gpus=gpus, lanes=lanes), accelerators=accelerators, host_devices=host_devices)
    assert [violation.field for violation in caught.value.violations] == [field]


def test_a_job_with_a_range_is_planned_for_what_it_uses_and_keeps_memory_for_any_number_of_it(folder: Path) -> None:
    planner = planner_of(host_devices=4)
    fixed = [planner.plan(spec_of(gpus=number, lanes=8), folder) for number in (2, 3, 4)]
    plan = planner.plan(spec_of(gpus="2-8", lanes=8), folder)
    assert plan.device_range == DeviceRange(
        least=2,
        most=4,
        host_bytes=max(one.host_total_bytes for one in fixed),
        device_bytes=max(one.device_total_bytes for one in fixed),
    )
    assert (plan.num_devices, plan.least_devices, plan.host_bytes) == (4, 2, fixed[2].host_bytes)
    assert "by 4 devices in 8 lanes, by rows (4 of 2 to 4 devices)" in plan.summary
    start = planner.plan_to_start(spec_of(gpus="2-8", lanes=8), folder, num_devices=3)
    assert (start.num_devices, start.host_bytes, start.device_range) == (3, fixed[1].host_bytes, plan.device_range)
    start = planner.plan_to_start(spec_of(gpus="2-8", lanes=8), folder, num_devices=3, longest_document=64)
    # Nothing that decides the bits depends on the number, and the memory is the same.
    data = DataSize(num_tokens=320)
    on_two = planner.plan_to_continue(
        spec_of(gpus="2-8", lanes=8), folder, start, longest_document=64, data=data, num_devices=2, gpus=()
    )
    assert on_two.plane_bytes == start.plane_bytes
    same = [dataclasses.replace(one.execution, num_ranks=1) for one in (plan, start, on_two)]
    assert same[0] == same[1] == same[2]
    assert on_two.host_total_bytes <= on_two.kept_host_bytes == start.kept_host_bytes
    assert fixed[0].device_range is None and fixed[0].kept_host_bytes == fixed[0].host_total_bytes


@pytest.mark.parametrize(
    ("gpus", "free", "wanted"),
    [
        ("1-4", ("host:1", "host:3", "cuda:0"), 2),
        ("1-4", (), 1),
        ("2-3", ("host:0",), 2),
        ("1-2", ("host:0", "host:1", "host:2"), 2),
        (4, ("host:0",), 4),
    ],
)
def test_a_job_is_planned_for_the_devices_that_it_would_start_on(
    folder: Path, gpus: int | str, free: tuple[str, ...], wanted: int
) -> None:
    plan = planner_of(host_devices=4, free_devices=free).plan(spec_of(gpus=gpus), folder)
    assert plan.num_devices == wanted


def test_of_a_range_of_gpus_threads_do_not_depend_on_the_number(folder: Path) -> None:
    gpus = tuple(Gpu(index=index, name="H100", memory_bytes=80 * GIB, uuid=f"GPU-{index}") for index in range(4))
    planner, spec = planner_of(accelerators=gpus, num_threads=32), spec_of(device="cuda", gpus="1-4")
    one, four = (planner.plan_to_start(spec, folder, num_devices=n, gpus=gpus[:n]).execution for n in (1, 4))
    assert (one.num_ranks, one.num_threads, one.gpu) == (1, 8, "GPU-0")
    assert (four.num_ranks, four.num_threads, four.gpu) == (4, 8, "GPU-0,GPU-1,GPU-2,GPU-3")
    assert (one.optimizer_threads, four.optimizer_threads) == tuple(
        update_threads(num, device_kind="cuda") for num in (32, 8)
    )


def test_a_range_of_which_one_number_does_not_fit_is_refused_with_those_that_do(folder: Path) -> None:
    spec = spec_of(gpus="1-4", sequence_length=64)
    needs = [planner_of(host_devices=4).plan(spec_of(gpus=n, lanes=8), folder).host_total_bytes for n in (1, 2, 3, 4)]
    assert sorted(needs) == needs, "each process takes host memory"
    plan = planner_of(host_devices=4, host_bytes=needs[1] + GIB // 64).plan(spec, folder)
    assert not plan.fits
    assert re.match(r"on 3 of gpus: 1-4, the job needs .*; or use gpus: 1-2, which fits$", plan.message), plan.message


def test_layers_need_one_for_each_of_a_range(folder: Path) -> None:
    with pytest.raises(InvalidSpec, match=r"gpus is 2-64 and the model has 40 layers; use gpus: 2-40 or train"):
        planner_of(host_devices=64).plan(spec_of(gpus="2-64", parallel="layers"), folder)


def test_layer_inputs_are_offloaded_where_they_do_not_fit_otherwise(folder: Path) -> None:
    roomy = worker_memory(folder, spec_of(sequence_length=64))
    tight = worker_memory(folder, spec_of(sequence_length=64), arena_bytes=roomy.device_total_bytes - 1)
    assert (roomy.execution.activation_placement, tight.execution.activation_placement) == ("device", "host")
    assert tight.fits
    assert tight.device_bytes["activations"] == 3 * 4096 * 32 * 4
    assert tight.host_bytes["activations"] == tight.device_bytes["activations"] + 39 * 4096 * 32 * 4


def test_what_does_not_fit_either_way_is_refused_with_numbers_and_advice(folder: Path) -> None:
    plan = worker_memory(folder, spec_of(sequence_length=64), arena_bytes=1_500_000)
    assert "MiB on the device and 1.4 MiB are allowed; it would fit with train.tokens_per_step:" in plan.message


async def test_an_accelerator_that_torch_cannot_use_does_not_count() -> None:
    found = (Gpu(index=0, name="NVIDIA H100", memory_bytes=80 * GIB),)
    assert bool(await usable_accelerators(found, os.environ)) == torch.cuda.is_available()


async def test_without_a_driver_no_accelerator_is_found() -> None:
    assert bool(await find_accelerators()) == torch.cuda.is_available()


def planned_elsewhere(
    folder: Path, machine: PlannedMachine, *, measured: DeviceRates | None = None, **train: Any
) -> Plan:
    planner = Planner(
        load_settings(host_memory_reserve_bytes=0, device_arena_bytes=1, numa_interleave=False),
        memory=lambda: HostMemory(limit_bytes=1, available_bytes=1),
        num_threads=1,
        rates=lambda: {} if measured is None else {"cuda": measured},
    )
    return planner.plan_elsewhere(spec_of(device="host", **train), folder, machine)


def test_a_machine_that_is_asked_about_is_planned_with_its_own_gpu_and_memory(folder: Path) -> None:
    plan = planned_elsewhere(folder, PlannedMachine(gpu="h100", host_gbps=200))
    assert (plan.fits, plan.device) == (True, "cuda"), "this node's memory, and the spec's device, say nothing about it"
    assert plan.device_limit_bytes == int(80e9 * 0.96) - (1 << 30)
    assert plan.prediction is not None
    assert (plan.prediction.machine, plan.prediction.measured) == ("h100", False)
    assert plan.prediction.parts_s["adamw"] > 0
    small = planned_elsewhere(folder, PlannedMachine(gpu="h100", host_gbps=200, host_memory_bytes=GIB))
    assert (small.fits, small.host_limit_bytes) == (False, GIB)


def test_more_host_bandwidth_and_a_faster_link_never_make_it_slower(folder: Path) -> None:
    def step_s(*, host_gbps: float = 200, link_gbps: float = 50) -> float:
        machine = PlannedMachine(gpu="h100", host_gbps=host_gbps, link_gbps=link_gbps)
        prediction = planned_elsewhere(folder, machine).prediction
        assert prediction is not None
        return prediction.step_s

    assert step_s(host_gbps=0.1) > step_s(host_gbps=1) >= step_s(host_gbps=100)
    assert step_s(link_gbps=0.01) > step_s(link_gbps=0.1) >= step_s(link_gbps=50)


def test_without_clipping_no_gradients_are_kept_elsewhere_either(folder: Path) -> None:
    plan = planned_elsewhere(folder, PlannedMachine(gpu="h100", host_gbps=200), max_grad_norm=None)
    assert plan.host_bytes["gradients"] == 0


def test_rates_that_this_node_has_measured_on_such_a_gpu_count(folder: Path) -> None:
    measured = dataclasses.replace(RATES, name="NVIDIA H100 80GB HBM3")
    found = planned_elsewhere(folder, PlannedMachine(gpu="h100", host_gbps=200), measured=measured).prediction
    assert found is not None
    assert (found.machine, found.measured, found.peak_flops_per_s) == (measured.name, True, RATES.peak_flops_per_s)


@pytest.mark.parametrize(
    ("machine", "field", "why"),
    [
        (PlannedMachine(gpu="b300", host_gbps=200), "machine.gpu", "known GPUs: h100, h100-pcie, h200, a100-80g"),
        (PlannedMachine(gpu="h100", host_gbps=0), "machine.host_gbps", "host_gbps is 0; it must be above 0"),
        (
            PlannedMachine(gpu="h100", host_gbps=float("nan")),
            "machine.host_gbps",
            "host_gbps is nan; it must be above 0",
        ),
        (
            PlannedMachine(gpu="h100", host_gbps=1, link_gbps=-1),
            "machine.link_gbps",
            "link_gbps is -1; it must be above",
        ),
    ],
)
def test_a_machine_that_cannot_be_is_refused_by_field(
    folder: Path, machine: PlannedMachine, field: str, why: str
) -> None:
    with pytest.raises(InvalidSpec, match=why) as caught:
        planned_elsewhere(folder, machine)
    assert [violation.field for violation in caught.value.violations] == [field]


def test_more_gpus_are_predicted_to_be_faster_where_compute_decides(folder: Path) -> None:
    machine, speeds = PlannedMachine(gpu="h100", host_gbps=400), []
    for gpus in (1, 2, 4):
        plan = planned_elsewhere(folder, machine, gpus=gpus, tokens_per_step=1 << 20, sequence_length=64)
        assert plan.prediction is not None and (plan.num_devices, plan.lanes) == (gpus, 1 if gpus == 1 else 8)
        speeds.append(plan.prediction.tokens_per_second / gpus)
    # Each GPU does a little less than it would alone.
    assert speeds[0] >= speeds[1] >= speeds[2] > 0.5 * speeds[0]


@pytest.mark.parametrize(
    ("train", "warning"),
    [
        ({"tokens_per_step": 8192, "sequence_length": 64, "lanes": 8}, "each of train.lanes 8 has about 1024 tokens"),
        ({"tokens_per_step": 65536, "sequence_length": 64, "lanes": 8}, ""),
        ({"tokens_per_step": 8192, "sequence_length": 64}, ""),
    ],
)
def test_a_lane_below_a_micro_batch_is_warned_of(train: dict[str, Any], warning: str, folder: Path) -> None:
    found = [text for text in worker_memory(folder, spec_of(**train)).warnings if "lanes" in text]
    assert len(found) == bool(warning) and all(text.startswith(warning) for text in found), found


def test_rows_too_long_to_be_divided_among_devices_are_warned_of(folder: Path) -> None:
    plan = worker_memory(folder, spec_of(gpus=2, tokens_per_step=100, sequence_length=64), host_devices=2)
    assert any("a row is not divided, so some devices may wait" in text for text in plan.warnings), plan.warnings
