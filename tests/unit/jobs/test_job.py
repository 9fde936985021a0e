"""What a job record says of itself."""

from __future__ import annotations

import dataclasses

import pytest

from horizon_server.events import StepDone
from horizon_server.records.execution import Execution
from horizon_server.records.job import JobRecord, JobState
from horizon_server.records.plan import Plan, ReferencePass, StepPrediction
from horizon_server.spec import parse_job_spec

GIB = 1 << 30
PREDICTION = StepPrediction(step_s=2.0, tokens_per_second=4096.4, bound="compute", peak_flops_per_s=1e12)
PLAN = Plan(
    host_bytes={"weights": 3 * GIB},
    device_bytes={"weights": GIB // 2},
    host_limit_bytes=8 * GIB,
    execution=Execution(device_limit_bytes=GIB),
    num_parameters=1,
    device="host",
    prediction=PREDICTION,
)


def job(job_state: JobState = JobState.RUNNING, *, max_steps: int | None = None, num_steps: int = 0) -> JobRecord:
    spec = parse_job_spec({"name": "a", "model": "m", "dataset": "d", "train": {"max_steps": max_steps}})
    return JobRecord(
        job_id="job_1",
        owner="ada",
        spec=spec,
        model_id="m1",
        dataset_id="d1",
        eval_dataset_id="",
        job_state=job_state,
        num_steps=num_steps,
        plan=PLAN,
    )


def test_a_plan_in_one_sentence() -> None:
    assert (
        PLAN.summary == "planned 3.00 GiB on the host, computed in float32, predicted 4,096 tokens/s, bound by compute"
    )
    on_cuda = dataclasses.replace(PLAN, device="cuda", prediction=None)
    assert on_cuda.summary == "planned 3.00 GiB on the host and 512.0 MiB on the device, computed in float32"


def test_the_whole_time_is_known_with_the_steps() -> None:
    prediction = PLAN.with_steps(30).prediction
    assert prediction is not None and prediction.total_s == 60.0
    unknown = dataclasses.replace(PLAN, prediction=None)
    assert unknown.with_steps(30) == dataclasses.replace(unknown, num_steps=30)


def test_before_the_first_step_the_time_left_is_the_predicted_one() -> None:
    assert job(num_steps=7).eta_s == 14.0
    assert job(JobState.STARTING, max_steps=9).eta_s == 18.0
    assert job(JobState.STARTING).eta_s is None, "the number of steps is not known yet"
    assert dataclasses.replace(job(num_steps=7), plan=None).eta_s is None


def test_the_pass_before_the_first_step_counts_until_it_is_done() -> None:
    references = ReferencePass(tokens_per_second=10.0, num_tokens=50, total_s=5.0)
    plan = dataclasses.replace(PLAN, references=references)
    waiting = dataclasses.replace(job(JobState.QUEUED, max_steps=9), plan=plan)
    assert waiting.remaining_device_s == 9 * 2.0 + 5.0
    begun = dataclasses.replace(waiting, plan=plan.with_references_done(0.4))
    assert begun.remaining_device_s == 9 * 2.0 + 3.0
    assert PLAN.with_references_done(0.4) == PLAN
    # A job that has run keeps the number of its steps, and finds the numbers of its pass.
    assert dataclasses.replace(waiting, num_steps=9).remaining_device_s == 9 * 2.0
    prediction = plan.with_steps(30).prediction
    assert prediction is not None and prediction.total_s == 65.0


def test_after_a_step_its_pace_counts() -> None:
    step = StepDone(
        step=1,
        num_steps=7,
        loss=1.0,
        grad_norm=1.0,
        learning_rate=0.1,
        epoch=0.1,
        num_input_tokens_seen=1,
        num_tokens=1,
        tokens_per_second=1.0,
        duration_s=1.0,
        eta_s=6.5,
    )
    assert dataclasses.replace(job(num_steps=7), last_step=step).eta_s == 6.5


@pytest.mark.parametrize("job_state", [JobState.QUEUED, JobState.PAUSED, JobState.SUCCEEDED])
def test_a_job_off_the_device_has_no_time_left(job_state: JobState) -> None:
    assert job(job_state, num_steps=7).eta_s is None
