"""What a plan says of the pass over the data before the first step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.plans import step_work
from tests.support.rates import RATES

from horizon_server.planning.data_size import DataSize
from horizon_server.planning.machine import Accelerator, HostMemory
from horizon_server.planning.model_folder import open_model_folder
from horizon_server.planning.planner import Planner
from horizon_server.planning.step_parts import StepWork
from horizon_server.planning.step_time import predict_forward, predict_step
from horizon_server.records.execution import DeviceKind
from horizon_server.records.plan import Plan
from horizon_server.settings import load_settings
from horizon_server.spec import JobSpec, parse_job_spec

GIB = 1 << 30


@pytest.fixture
def folder(make_model: Callable[..., Path]) -> Path:
    return make_model(tied=False)


def work_of(folder: Path, device_kind: DeviceKind) -> StepWork:
    return step_work(
        open_model_folder(folder),
        tokens_per_step=160,
        sequence_length=64,
        device_kind=device_kind,
        grad_bytes=4,
        activation_placement="device",
    )


def planner(**changes: Any) -> Planner:
    known: dict[str, Any] = {"accelerators": (), "rates": lambda: {"host": RATES, "cuda": RATES}, **changes}
    return Planner(
        load_settings(host_memory_reserve_bytes=0, device_arena_bytes=GIB, numa_interleave=False),
        memory=lambda: HostMemory(limit_bytes=64 * GIB, available_bytes=64 * GIB),
        num_threads=1,
        **known,
    )


def spec_of(method: str = "dpo", **train: Any) -> JobSpec:
    sizes = {"max_steps": 10, "sequence_length": 64, "tokens_per_step": 160, **train}
    return parse_job_spec({"name": "j", "model": "m", "dataset": "d", "method": method, "train": sizes})


def test_on_the_host_the_forward_of_every_unit_adds_up(folder: Path) -> None:
    work = work_of(folder, "host")
    layer, head, num_layers = work.layer, work.head, len(work.layers)
    per_layer = layer.forward_flops / 1e9 + layer.attention_flops / 5e8 + layer.forward_bytes / 2e8
    of_head = head.forward_flops / 1e9 + head.forward_bytes / 3e8
    up = sum(unit.upload_bytes for unit in (*work.layers, work.head_traffic)) / 1e8
    found = predict_forward(work, RATES, shares_processors=True)
    assert found == pytest.approx(num_layers * per_layer + of_head + up + work.embedding.rows_up_bytes / 6e7)
    # A third of the head's three products.
    assert head.forward_flops == pytest.approx(head.flops / 3)


def test_on_a_gpu_uploads_are_hidden_and_layers_that_stay_are_not_uploaded(folder: Path) -> None:
    work = work_of(folder, "cuda")
    alone = predict_forward(work, dataclasses.replace(RATES, h2d_bytes_per_s=1e15), shares_processors=False)
    beside = predict_forward(work, RATES, shares_processors=False)
    assert alone <= beside < alone + sum(unit.upload_bytes for unit in work.layers) / 1e8
    slow = dataclasses.replace(RATES, h2d_bytes_per_s=1e4)
    resident = dataclasses.replace(work, layers=tuple(dataclasses.replace(unit, resident=True) for unit in work.layers))
    saved = predict_forward(work, slow, shares_processors=False) - predict_forward(
        resident, slow, shares_processors=False
    )
    assert saved == pytest.approx(sum(unit.upload_bytes for unit in work.layers) / 1e4, rel=0.05)
    assert beside < predict_step(work, RATES, shares_processors=False).step_s


@pytest.mark.parametrize("method", ["dpo", "ipo", "kto"])
def test_a_plan_has_the_pass_on_a_line_of_its_own_and_in_the_whole_time(folder: Path, method: str) -> None:
    plan = planner().plan(spec_of(method), folder, data=DataSize(num_tokens=16_000, is_estimated=True))
    references, prediction = plan.references, plan.prediction
    assert references is not None and prediction is not None and references.total_s is not None
    assert (references.num_tokens, references.tokens_estimated) == (16_000, True)
    forward_s = predict_forward(work_of(folder, "host"), RATES, shares_processors=True)
    assert references.tokens_per_second == pytest.approx(160 / forward_s)
    assert references.total_s == pytest.approx(100 * forward_s)
    assert prediction.total_s == pytest.approx(10 * prediction.step_s + references.total_s)
    found = plan.with_steps(20).prediction
    assert found is not None and found.total_s == pytest.approx(20 * prediction.step_s + references.total_s)


@pytest.mark.parametrize("method", ["sft", "orpo", "simpo", "policy"])
def test_methods_without_references_have_no_pass(folder: Path, method: str) -> None:
    plan = planner().plan(spec_of(method), folder)
    assert plan.references is None
    assert plan.prediction is not None and plan.prediction.total_s == pytest.approx(10 * plan.prediction.step_s)


def test_without_the_data_its_speed_is_known_and_without_rates_nothing(folder: Path) -> None:
    def parts(plan: Plan) -> tuple[Any, ...]:
        assert plan.references is not None
        return plan.references.num_tokens, plan.references.total_s, plan.references.tokens_per_second > 0

    assert parts(planner().plan(spec_of(), folder)) == (None, None, True)
    assert planner(rates=dict).plan(spec_of(), folder).references is None


def test_once_the_data_is_prepared_its_tokens_are_counted(folder: Path) -> None:
    gpu = Accelerator(index=0, name="H100", memory_bytes=80 * GIB)
    for accelerators in ((), (gpu,)):
        found = (
            planner(accelerators=accelerators)
            .plan_to_start(spec_of(), folder, data=DataSize(num_tokens=320))
            .references
        )
        assert found is not None
        assert (found.num_tokens, found.tokens_estimated) == (320, False)


def test_weights_of_targets_are_planned_until_the_data_is_known_to_have_none(folder: Path) -> None:
    gpu = Accelerator(index=0, name="H100", memory_bytes=80 * GIB)

    def bytes_of(data: DataSize | None, method: str = "sft") -> tuple[int, int]:
        spec = spec_of(method).model_copy(update={"device": "cuda"})
        plan = planner(accelerators=(gpu,)).plan_to_start(spec, folder, data=data)
        return plan.device_bytes["workspace"], plan.host_bytes["other"]

    plain = bytes_of(DataSize(num_tokens=320, may_have_weights=False))
    weighted = bytes_of(DataSize(num_tokens=320))
    assert [after - before for before, after in zip(plain, weighted, strict=True)] == [4 * 160, 4 * 160]
    assert bytes_of(None) == weighted
    # Objectives have numbers of their own.
    assert bytes_of(DataSize(num_tokens=320), "dpo") == bytes_of(None, "dpo")


def test_tokens_are_estimated_from_bytes_and_never_more_than_rows_hold() -> None:
    def estimated(num_bytes: int, documents_per_row: int) -> int:
        return DataSize.estimated(
            num_bytes=num_bytes, num_rows=10, documents_per_row=documents_per_row, sequence_length=100
        ).num_tokens

    assert estimated(400, 1) == 100
    # Half of a pair is its prompt, which is in both of its documents.
    assert estimated(400, 2) == 150
    assert (estimated(10**6, 1), estimated(10**6, 2)) == (1000, 2000)
    total = DataSize.total([DataSize(num_tokens=5), DataSize(num_tokens=7, is_estimated=True)])
    assert total == DataSize(num_tokens=12, is_estimated=True)
