"""Metrics follow events, and forget a job when it has left the device."""

from __future__ import annotations

import dataclasses
import math

import pytest
from prometheus_client import generate_latest

from horizon_server.events import CheckpointWritten, EvalDone, Message, StepDone
from horizon_server.figures import CollectiveFigures, EvalFigures, EvalSetFigures, RankFigures, TransferFigures
from horizon_server.records.job import JobRecord, JobState
from horizon_server.records.plan import Plan, StepPrediction
from horizon_server.records.sharing import ShareUse
from horizon_server.spec import JobSpec, parse_job_spec
from horizon_server.telemetry.exposition import CONTENT_TYPE
from horizon_server.telemetry.families import NEWEST_ENDED
from horizon_server.telemetry.gpus import GpuFigures
from horizon_server.telemetry.metrics import Metrics

NOW_S = 1_700_000_000.0


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = NOW_S

    def __call__(self) -> float:
        return self.now_s


def _plan(device: str = "host") -> Plan:
    return Plan(
        host_bytes={"weights": 100, "moments": 200},
        device_bytes={"weights": 10},
        host_limit_bytes=1000,
        num_parameters=50,
        device=device,
    )


def _job(job_state: JobState = JobState.RUNNING, *, job_id: str = "job-1", device: str = "host") -> JobRecord:
    return JobRecord(
        job_id=job_id,
        owner="ada",
        spec=JobSpec(name="toy", model="m", dataset="d", project="lab"),
        model_id="m-1",
        dataset_id="d-1",
        eval_dataset_id="",
        job_state=job_state,
        created_s=NOW_S - 40.0,
        queued_s=NOW_S,
        plan=_plan(device),
    )


def _step(step: int = 1, **changes: object) -> StepDone:
    figures = StepDone(
        step=step,
        num_steps=10,
        loss=2.5,
        grad_norm=0.75,
        learning_rate=1e-4,
        epoch=0.1,
        num_input_tokens_seen=64 * step,
        num_tokens=64,
        tokens_per_second=32.0,
        duration_s=2.0,
        h2d=TransferFigures(bytes=1000, busy_s=1.0, exposed_s=0.25),
        d2h=TransferFigures(bytes=500, busy_s=0.5, exposed_s=0.0),
        compute_s=1.5,
        optimizer_s=0.5,
        optimizer_exposed_s=0.125,
        host_memory_bytes={"weights": 90, "moments": 180},
        device_memory_bytes={"weights": 8, "workspace": 1},
    )
    return dataclasses.replace(figures, **changes)  # type: ignore[arg-type]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def metrics(clock: Clock) -> Metrics:
    return Metrics(version="9.9", clock=clock)


def _value(metrics: Metrics, name: str, /, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_a_step_fills_every_figure(metrics: Metrics) -> None:
    metrics.on_payload(_job(), _step())
    job = {"job_id": "job-1"}
    assert _value(metrics, "horizon_train_loss", **job) == 2.5
    assert _value(metrics, "horizon_grad_norm", **job) == 0.75
    assert _value(metrics, "horizon_learning_rate", **job) == 1e-4
    assert _value(metrics, "horizon_tokens_per_second", **job) == 32.0
    assert _value(metrics, "horizon_job_progress_ratio", **job) == 0.1
    assert _value(metrics, "horizon_host_memory_bytes", **job, component="moments") == 180
    assert _value(metrics, "horizon_host_memory_planned_bytes", **job, component="moments") == 200
    assert _value(metrics, "horizon_device_memory_bytes", **job, device="host", component="workspace") == 1
    assert _value(metrics, "horizon_device_memory_planned_bytes", **job, device="host", component="weights") == 10
    assert _value(metrics, "horizon_step_duration_seconds_sum") == 2.0
    assert _value(metrics, "horizon_tokens_total", project="lab") == 64


def test_a_job_on_the_device_has_its_names(metrics: Metrics) -> None:
    names = {"name": "toy", "owner": "ada", "project": "lab", "model": "m", "dataset": "d"}
    metrics.on_job_state(_job(JobState.QUEUED), None)
    assert _value(metrics, "horizon_job_info", job_id="job-1", **names) is None
    metrics.on_job_state(_job(JobState.PREPARING), "QUEUED")
    assert _value(metrics, "horizon_job_info", job_id="job-1", **names) == 1
    metrics.on_job_state(_job(JobState.SUCCEEDED), "RUNNING")
    assert _value(metrics, "horizon_job_info", job_id="job-1", **names) is None


def test_the_disk_and_the_certificate_are_shown(metrics: Metrics) -> None:
    assert _value(metrics, "horizon_tls_certificate_expiry_timestamp_seconds") == 0
    metrics.set_disk(total_bytes=1000, free_bytes=30)
    metrics.set_certificate_expiry(NOW_S)
    assert _value(metrics, "horizon_disk_total_bytes") == 1000
    assert _value(metrics, "horizon_disk_free_bytes") == 30
    assert _value(metrics, "horizon_tls_certificate_expiry_timestamp_seconds") == NOW_S


def test_counters_add_up_over_steps_and_jobs(metrics: Metrics) -> None:
    for job_id in ("job-1", "job-2"):
        for step in (1, 2):
            metrics.on_payload(_job(job_id=job_id), _step(step))
    h2d, d2h = ({"device": "host", "direction": direction} for direction in ("h2d", "d2h"))
    assert _value(metrics, "horizon_transfer_bytes_total", **h2d) == 4000
    assert _value(metrics, "horizon_transfer_bytes_total", **d2h) == 2000
    assert _value(metrics, "horizon_transfer_seconds_total", **h2d) == 4.0
    assert _value(metrics, "horizon_transfer_exposed_seconds_total", **h2d) == 1.0
    assert _value(metrics, "horizon_compute_seconds_total", device="host") == 6.0
    assert _value(metrics, "horizon_optimizer_seconds_total") == 2.0
    assert _value(metrics, "horizon_optimizer_exposed_seconds_total") == 0.5
    assert _value(metrics, "horizon_tokens_total", project="lab") == 256


def test_overlap_is_taken_over_the_last_steps_only(metrics: Metrics) -> None:
    job = _job()
    metrics.on_payload(job, _step(h2d=TransferFigures(bytes=1, busy_s=100.0, exposed_s=100.0)))
    assert _value(metrics, "horizon_transfer_overlap_ratio", job_id="job-1", direction="h2d") == 0.0
    for step in range(2, 22):
        metrics.on_payload(job, _step(step))
    assert _value(metrics, "horizon_transfer_overlap_ratio", job_id="job-1", direction="h2d") == 0.75
    assert _value(metrics, "horizon_transfer_overlap_ratio", job_id="job-1", direction="d2h") == 1.0


def test_what_the_devices_of_a_job_do_with_each_other_is_counted_by_device_and_rank(metrics: Metrics) -> None:
    job = _job(device="host:0,host:1")
    ranks = tuple(
        RankFigures(
            path="gloo",
            collectives=(CollectiveFigures(kind="gradients", bytes=100 * (1 + rank), busy_s=0.5, exposed_s=0.25),),
            wait_s=0.5 + rank,
        )
        for rank in range(2)
    )
    for step in (1, 2):
        metrics.on_payload(job, _step(step, ranks=ranks))
    for rank in range(2):
        own = {"device": f"host:{rank}", "kind": "gradients", "path": "gloo"}
        assert _value(metrics, "horizon_collective_bytes_total", **own) == 200 * (1 + rank)
        assert _value(metrics, "horizon_collective_seconds_total", **own) == 1.0
        assert _value(metrics, "horizon_collective_exposed_seconds_total", **own) == 0.5
        assert _value(metrics, "horizon_rank_wait_seconds_total", job_id="job-1", rank=str(rank)) == 1 + 2 * rank
    assert _value(metrics, "horizon_job_ranks", job_id="job-1") == 2
    # A worker that tells of more ranks than the plan has makes no series.
    metrics.on_payload(job, _step(3, ranks=(*ranks, *ranks)))
    assert _value(metrics, "horizon_rank_wait_seconds_total", job_id="job-1", rank="2") is None
    metrics.on_job_state(dataclasses.replace(job, job_state=JobState.SUCCEEDED), "RUNNING")
    assert _value(metrics, "horizon_rank_wait_seconds_total", job_id="job-1", rank="0") is None


def test_without_transfers_nothing_is_exposed(metrics: Metrics) -> None:
    metrics.on_payload(_job(), _step(h2d=TransferFigures(), d2h=TransferFigures()))
    assert _value(metrics, "horizon_transfer_overlap_ratio", job_id="job-1", direction="h2d") == 1.0


@pytest.mark.parametrize(
    ("device", "seconds"),
    [("host", 0.0), ("host:0,host:1", 0.0), ("cuda:0", 2.0), ("cuda", 2.0), ("cuda:0,cuda:1", 4.0)],
)
def test_gpu_seconds_count_on_gpus_only(metrics: Metrics, device: str, seconds: float) -> None:
    metrics.on_payload(_job(device=device), _step())
    assert _value(metrics, "horizon_gpu_seconds_total", project="lab", user="ada") == seconds


def test_a_plan_for_cuda_is_labelled_with_its_number(metrics: Metrics) -> None:
    metrics.on_payload(_job(device="cuda"), _step())
    assert _value(metrics, "horizon_compute_seconds_total", device="cuda:0") == 1.5


@pytest.mark.parametrize("last", [JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.PAUSED])
def test_series_of_a_job_vanish_when_it_leaves_the_device(metrics: Metrics, last: JobState) -> None:
    job = _job()
    metrics.on_job_state(job, "STARTING")
    metrics.on_payload(job, _step())
    metrics.on_payload(job, EvalDone(step=1, eval_loss=2.0, num_targets=9))
    metrics.on_payload(job, CheckpointWritten(step=1, duration_s=3.0, size_bytes=7))
    metrics.on_payload(_job(job_id="job-2"), _step())
    assert metrics.render()[0].count(b'job_id="job-1"') >= 15
    ended = _job(last)
    metrics.on_job_state(ended, "RUNNING")
    # Late events still count, but bring no series back.
    metrics.on_payload(ended, _step(2))
    metrics.on_payload(ended, EvalDone(step=2, eval_loss=2.0, num_targets=9))
    metrics.on_payload(ended, CheckpointWritten(step=2, duration_s=3.0, size_bytes=7))
    text = metrics.render()[0].decode()
    assert 'job_id="job-1"' not in text
    assert 'job_id="job-2"' in text
    assert _value(metrics, "horizon_tokens_total", project="lab") == 192
    assert _value(metrics, "horizon_checkpoint_duration_seconds_count") == 2


def test_utilization_is_the_models_flops_of_the_measured_peak(metrics: Metrics) -> None:
    name = "horizon_model_flops_utilization_ratio"
    metrics.on_payload(_job(), _step(model_flops=1e12))
    assert _value(metrics, name, job_id="job-1") is None, "nothing is known to compare with"
    prediction = StepPrediction(step_s=1.0, tokens_per_second=64.0, bound="compute", peak_flops_per_s=2e12)
    measured = dataclasses.replace(_job(), plan=dataclasses.replace(_plan(), prediction=prediction))
    metrics.on_payload(measured, _step(model_flops=1e12))
    assert _value(metrics, name, job_id="job-1") == 1e12 / 2.0 / 2e12


def test_a_component_that_is_gone_loses_its_series(metrics: Metrics) -> None:
    metrics.on_payload(_job(), _step(host_memory_bytes={"weights": 1, "staging": 2}))
    metrics.on_payload(_job(), _step(2, host_memory_bytes={"weights": 3}))
    assert _value(metrics, "horizon_host_memory_bytes", job_id="job-1", component="weights") == 3
    assert _value(metrics, "horizon_host_memory_bytes", job_id="job-1", component="staging") is None


def test_checkpoint_and_evaluation(metrics: Metrics, clock: Clock) -> None:
    metrics.on_payload(_job(), EvalDone(step=1, eval_loss=1.25, num_targets=9))
    clock.now_s += 5
    metrics.on_payload(_job(), CheckpointWritten(step=1, duration_s=3.0, size_bytes=7))
    assert _value(metrics, "horizon_eval_loss", job_id="job-1") == 1.25
    assert _value(metrics, "horizon_checkpoint_last_success_timestamp_seconds", job_id="job-1") == NOW_S + 5
    assert _value(metrics, "horizon_checkpoint_duration_seconds_sum") == 3.0


def test_each_set_of_the_spec_has_series_of_its_own(metrics: Metrics) -> None:
    def figures(name: str, exact_match: float | None = None) -> EvalSetFigures:
        measured = EvalSetFigures.of(name, EvalFigures(eval_loss=2.0, num_targets=4, num_correct=1))
        return dataclasses.replace(measured, exact_match=exact_match)

    spec = parse_job_spec({"name": "j", "model": "m", "dataset": "d", "eval": {"sets": {"a": "d", "b": "d"}}})
    job = dataclasses.replace(_job(), spec=spec)
    sets = (figures("a", 0.5), figures("b"), figures("not-in-the-spec"))
    metrics.on_payload(job, EvalDone(step=1, eval_loss=1.25, num_targets=9, sets=sets))
    for name in ("a", "b"):
        assert _value(metrics, "horizon_eval_set_loss", job_id="job-1", set=name) == 2.0
        assert _value(metrics, "horizon_eval_set_accuracy", job_id="job-1", set=name) == 0.25
    assert _value(metrics, "horizon_eval_set_exact_match", job_id="job-1", set="a") == 0.5
    assert _value(metrics, "horizon_eval_set_exact_match", job_id="job-1", set="b") is None
    assert _value(metrics, "horizon_eval_set_loss", job_id="job-1", set="not-in-the-spec") is None
    metrics.on_job_state(dataclasses.replace(job, job_state=JobState.SUCCEEDED), "RUNNING")
    assert _value(metrics, "horizon_eval_set_loss", job_id="job-1", set="a") is None


def test_what_an_evaluation_moves_is_counted_and_is_no_part_of_the_overlap_ratio(metrics: Metrics) -> None:
    job = _job(device="cuda")
    metrics.on_payload(job, _step())
    metrics.on_payload(
        job,
        EvalDone(
            step=1,
            eval_loss=1.25,
            num_targets=9,
            duration_s=4.0,
            h2d=TransferFigures(bytes=7, busy_s=3.0, exposed_s=3.0),
            compute_s=0.5,
            optimizer_s=0.25,
            optimizer_exposed_s=0.125,
        ),
    )
    h2d = {"device": "cuda:0", "direction": "h2d"}
    assert _value(metrics, "horizon_transfer_bytes_total", **h2d) == 1007
    assert _value(metrics, "horizon_transfer_exposed_seconds_total", **h2d) == 3.25
    assert _value(metrics, "horizon_compute_seconds_total", device="cuda:0") == 2.0
    assert _value(metrics, "horizon_optimizer_seconds_total") == 0.75
    assert _value(metrics, "horizon_optimizer_exposed_seconds_total") == 0.25
    assert _value(metrics, "horizon_gpu_seconds_total", project="lab", user="ada") == 6.0
    assert _value(metrics, "horizon_transfer_overlap_ratio", job_id="job-1", direction="h2d") == 0.75


def test_a_skipped_step_is_counted_and_its_loss_shown(metrics: Metrics) -> None:
    metrics.on_payload(_job(), _step(skipped="non-finite", loss=math.nan))
    assert _value(metrics, "horizon_steps_skipped_total", reason="non-finite") == 1
    assert math.isnan(_value(metrics, "horizon_train_loss", job_id="job-1") or 0.0)


def test_transitions_and_queue_wait(metrics: Metrics, clock: Clock) -> None:
    metrics.on_job_state(_job(JobState.QUEUED), None)
    clock.now_s += 30
    metrics.on_job_state(_job(JobState.PREPARING), "QUEUED")
    metrics.on_job_state(dataclasses.replace(_job(JobState.FAILED), reason="WORKER_FAILED"), "PREPARING")
    assert _value(metrics, "horizon_job_transitions_total", to="QUEUED", reason="") == 1
    assert _value(metrics, "horizon_job_transitions_total", to="FAILED", reason="WORKER_FAILED") == 1
    assert _value(metrics, "horizon_job_queue_wait_seconds_sum") == 30.0
    assert _value(metrics, "horizon_job_queue_wait_seconds_count") == 1


def test_the_wait_of_a_job_queued_before_a_restart_is_known(metrics: Metrics) -> None:
    metrics.on_job_state(dataclasses.replace(_job(JobState.PREPARING), attempt=2, queued_s=NOW_S - 40.0), "QUEUED")
    assert _value(metrics, "horizon_job_queue_wait_seconds_sum") == 40.0


def test_leaving_the_queue_without_starting_is_no_wait(metrics: Metrics) -> None:
    metrics.on_job_state(_job(JobState.QUEUED), None)
    metrics.on_job_state(_job(JobState.CANCELLED), "QUEUED")
    assert _value(metrics, "horizon_job_queue_wait_seconds_count") == 0


def test_every_state_has_a_series_from_the_start(metrics: Metrics) -> None:
    assert _value(metrics, "horizon_jobs", state="RUNNING") == 0
    metrics.set_jobs({"RUNNING": 1, "QUEUED": 4})
    metrics.set_jobs({"QUEUED": 3})
    assert _value(metrics, "horizon_jobs", state="RUNNING") == 0
    assert _value(metrics, "horizon_jobs", state="QUEUED") == 3


def test_service_figures(metrics: Metrics) -> None:
    metrics.set_host_memory(1000, 400)
    metrics.on_worker_restart("daemon-restarted")
    metrics.on_upload(77, "stored")
    metrics.on_grpc("horizon_proto.v1.JobService", "GetJob", "NOT_FOUND", 0.02)
    metrics.on_http("GET", "/horizon/v1/jobs/{id}", 200, 0.5)
    metrics.on_http("XYZZY", "unmatched", 404, 0.5)
    labels = {"grpc_service": "horizon_proto.v1.JobService", "grpc_method": "GetJob"}
    assert _value(metrics, "horizon_host_memory_available_bytes") == 400
    assert _value(metrics, "horizon_worker_restarts_total", reason="daemon-restarted") == 1
    assert _value(metrics, "horizon_upload_bytes_total", result="stored") == 77
    assert _value(metrics, "grpc_server_handled_total", **labels, grpc_code="NOT_FOUND") == 1
    assert _value(metrics, "grpc_server_handling_seconds_sum", **labels) == 0.02
    http = "http_request_duration_seconds_count"
    assert _value(metrics, http, method="GET", route="/horizon/v1/jobs/{id}", code="200") == 1
    assert _value(metrics, http, method="other", route="unmatched", code="404") == 1


@pytest.mark.parametrize("result", ["stored", "partial", "refused", "cut"])
def test_uploads_start_at_zero_so_that_a_rate_sees_the_first(metrics: Metrics, result: str) -> None:
    assert _value(metrics, "horizon_upload_bytes_total", result=result) == 0


def test_rendering(metrics: Metrics) -> None:
    metrics.on_payload(_job(), Message(level="info", text="nothing to count"))
    body, content_type = metrics.render()
    assert content_type == CONTENT_TYPE
    assert b'horizon_build_info{version="9.9"} 1.0' in body
    assert b"process_resident_memory_bytes" in body
    assert b"_created" not in body


def test_the_text_is_what_the_library_writes(metrics: Metrics) -> None:
    odd = dataclasses.replace(_job(), owner='a "quoted" \\ one\nof two lines, \u00e4', reason="R")
    metrics.on_job_state(odd, "STARTING")
    metrics.on_payload(odd, _step(loss=math.nan, grad_norm=math.inf, learning_rate=1e-9))
    metrics.on_grpc("s", "GetJob", "OK", 0.02)

    def without_the_process(text: bytes) -> list[bytes]:
        return [line for line in text.splitlines() if b"process_" not in line]

    expected = without_the_process(generate_latest(metrics.registry))
    assert len(expected) > 250
    assert without_the_process(metrics.render()[0]) == expected


def test_two_daemons_in_one_process_share_nothing(metrics: Metrics) -> None:
    metrics.on_payload(_job(), _step())
    assert _value(Metrics(), "horizon_tokens_total", project="lab") is None


def test_a_turn_is_charged_to_project_and_user(metrics: Metrics) -> None:
    for device_s in (12.5, 2.5):
        metrics.on_device_use("cuda:0", project="lab", user="ada", device_s=device_s)
        metrics.on_turn("cuda:0")
    metrics.on_turn_wait("cuda:0", 40.0)
    metrics.on_handover("cuda:0", 0.004)
    assert _value(metrics, "horizon_device_seconds_total", project="lab", user="ada", device="cuda:0") == 15.0
    assert _value(metrics, "horizon_device_turns_total", device="cuda:0") == 2
    assert _value(metrics, "horizon_device_turn_wait_seconds_sum", device="cuda:0") == 40.0
    assert _value(metrics, "horizon_device_handover_seconds_bucket", device="cuda:0", le="0.005") == 1
    assert _value(metrics, "horizon_device_handover_seconds_bucket", device="cuda:0", le="0.002") == 0


def test_who_is_no_longer_there_has_no_series(metrics: Metrics) -> None:
    metrics.set_residents({"cuda:0": 3, "cuda:1": 1}, promised_bytes=700)
    metrics.set_residents({"cuda:0": 2}, promised_bytes=500)
    assert _value(metrics, "horizon_resident_jobs", device="cuda:0") == 2
    assert _value(metrics, "horizon_resident_jobs", device="cuda:1") is None
    assert _value(metrics, "horizon_host_memory_promised_bytes") == 500
    metrics.set_job_shares({"job-1": 0.75, "job-2": 0.25})
    metrics.set_job_shares({"job-1": 1.0})
    assert _value(metrics, "horizon_job_share_ratio", job_id="job-1") == 1.0
    assert _value(metrics, "horizon_job_share_ratio", job_id="job-2") is None
    metrics.on_job_state(_job(JobState.SUCCEEDED), "RUNNING")
    assert _value(metrics, "horizon_job_share_ratio", job_id="job-1") is None


def test_use_is_shown_with_the_weights_that_divide_it(metrics: Metrics) -> None:
    uses = [
        ShareUse(project="lab", user=user, device_s=seconds, as_of_s=NOW_S)
        for user, seconds in (("ada", 60.0), ("bob", 20.0))
    ]
    metrics.set_share_uses(uses, lambda holder, name: 3.0 if (holder, name) == ("user", "ada") else 1.0)
    assert _value(metrics, "horizon_share_use_seconds", project="lab", user="ada") == 60.0
    assert _value(metrics, "horizon_user_weight", user="ada") == 3.0
    assert _value(metrics, "horizon_user_weight", user="bob") == 1.0
    assert _value(metrics, "horizon_project_weight", project="lab") == 1.0
    metrics.set_share_uses(uses[1:])
    assert _value(metrics, "horizon_user_weight", user="ada") is None


def test_a_node_that_is_closed_says_so(metrics: Metrics) -> None:
    assert _value(metrics, "horizon_node_open") == 1
    metrics.set_node_open(False)
    assert _value(metrics, "horizon_node_open") == 0


def test_displaced_jobs_and_overruns_are_counted(metrics: Metrics) -> None:
    metrics.on_job_state(dataclasses.replace(_job(JobState.QUEUED), reason="DISPLACED"), "STOPPING")
    metrics.on_turn_overrun()
    assert _value(metrics, "horizon_jobs_displaced_total") == 1
    assert _value(metrics, "horizon_turn_overruns_total") == 1


def test_the_longest_wait_counts_from_when_a_job_was_queued(metrics: Metrics, clock: Clock) -> None:
    assert _value(metrics, "horizon_oldest_queued_timestamp_seconds") == 0
    metrics.set_queued([dataclasses.replace(_job(JobState.QUEUED, job_id="job-0"), queued_s=NOW_S - 500.0)])
    metrics.on_job_state(_job(JobState.QUEUED), None)
    assert _value(metrics, "horizon_oldest_queued_timestamp_seconds") == NOW_S - 500.0
    metrics.on_job_state(_job(JobState.PREPARING, job_id="job-0"), "QUEUED")
    assert _value(metrics, "horizon_oldest_queued_timestamp_seconds") == NOW_S


def _series(metrics: Metrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every series of a job, with its value."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if "job_id" in sample.labels
    }


def test_a_job_that_is_taken_over_has_the_series_that_it_had_and_counts_nothing_twice(clock: Clock) -> None:
    before, after = Metrics(version="9.9", clock=clock), Metrics(version="9.9", clock=clock)
    spec = parse_job_spec(
        {"name": "toy", "model": "m", "dataset": "d", "project": "lab", "eval_dataset": "e", "train": {"max_steps": 10}}
    )
    name = next(iter(spec.eval_sets))
    evaluation = EvalDone(
        step=1,
        eval_loss=3.0,
        num_targets=8,
        sets=(EvalSetFigures(name=name, loss=3.0, accuracy=0.5, num_targets=8, num_correct=4),),
    )
    running = dataclasses.replace(_job(), spec=spec, step=1, num_steps=10, last_step=_step(), last_eval=evaluation)
    before.on_job_state(dataclasses.replace(running, job_state=JobState.PREPARING), "QUEUED")
    before.on_job_state(running, "STARTING")
    for payload in (evaluation, _step(), CheckpointWritten(step=1, duration_s=1.0, size_bytes=10)):
        before.on_payload(running, payload)
    after.take_over(running, {"attempt": NOW_S, "step": NOW_S, "eval": NOW_S, "checkpoint": NOW_S})
    assert len(_series(before)) > 15
    assert _series(after) == _series(before)
    assert after.render(lambda labels, owners: owners.get(labels.get("job_id", ""), ("",))[0] == "ada")[0].count(
        b"job-1"
    )
    assert not _value(after, "horizon_tokens_total", project="lab")
    assert not _value(after, "horizon_step_duration_seconds_count")
    after.on_job_state(dataclasses.replace(running, job_state=JobState.SUCCEEDED), "RUNNING")
    assert _series(after) == {}


def test_a_job_shows_since_when_it_is_being_loaded_until_it_has_asked_for_its_first_turn(
    metrics: Metrics, clock: Clock
) -> None:
    name = "horizon_job_loading_since_timestamp_seconds"
    metrics.on_job_state(_job(JobState.PREPARING), "QUEUED")
    assert _value(metrics, name, job_id="job-1", state="PREPARING") == NOW_S
    clock.now_s += 10
    metrics.on_job_state(_job(JobState.STARTING), "PREPARING")
    assert _value(metrics, name, job_id="job-1", state="PREPARING") is None
    assert _value(metrics, name, job_id="job-1", state="STARTING") == NOW_S + 10
    metrics.on_loaded("job-1")  # it waits for its first turn, still STARTING
    assert _value(metrics, name, job_id="job-1", state="STARTING") is None
    # Its worker died, and the next one is being loaded.
    metrics.on_job_state(_job(JobState.STARTING), "RUNNING")
    assert _value(metrics, name, job_id="job-1", state="STARTING") == NOW_S + 10
    metrics.on_job_state(_job(JobState.RUNNING), "STARTING")
    assert _value(metrics, name, job_id="job-1", state="STARTING") is None


def test_ends_are_counted_by_user_and_their_counter_is_there_before_the_first(metrics: Metrics) -> None:
    name, whose = "horizon_jobs_ended_total", {"project": "lab", "user": "ada"}
    metrics.on_job_state(_job(JobState.QUEUED), None)
    assert _value(metrics, name, **whose, state="FAILED") == 0
    metrics.on_job_state(_job(JobState.PREPARING), "QUEUED")
    metrics.on_job_state(_job(JobState.FAILED), "PREPARING")
    assert _value(metrics, name, **whose, state="FAILED") == 1
    assert _value(metrics, name, **whose, state="SUCCEEDED") == 0


def test_the_queue_is_shown_by_whose_jobs_wait(metrics: Metrics) -> None:
    name, whose = "horizon_queued_jobs", {"project": "lab", "user": "ada"}
    metrics.set_queued([_job(JobState.QUEUED, job_id="job-0")])
    metrics.on_job_state(_job(JobState.QUEUED), None)
    assert _value(metrics, name, **whose) == 2
    for job_id in ("job-0", "job-1"):
        metrics.on_job_state(_job(JobState.PREPARING, job_id=job_id), "QUEUED")
    assert _value(metrics, name, **whose) == 0


def _ended(metrics: Metrics) -> dict[str, str]:
    """The jobs that are listed as ended last, with their states."""
    (family,) = [one for one in metrics.registry.collect() if one.name == "horizon_ended_job_timestamp_seconds"]
    return {sample.labels["ended_job"]: sample.labels["state"] for sample in family.samples}


def test_the_jobs_that_ended_last_are_listed_until_they_are_resumed_or_deleted(metrics: Metrics) -> None:
    metrics.set_ended([dataclasses.replace(_job(JobState.FAILED, job_id="old"), ended_s=NOW_S - 9)])
    metrics.on_job_state(_job(JobState.SUCCEEDED), "RUNNING")
    assert _ended(metrics) == {"old": "FAILED", "job-1": "SUCCEEDED"}
    metrics.on_job_state(_job(JobState.QUEUED, job_id="old"), "FAILED")
    metrics.forget("job-1")
    assert _ended(metrics) == {}
    for number in range(NEWEST_ENDED + 3):
        metrics.on_job_state(_job(JobState.SUCCEEDED, job_id=f"job-{number}"), "RUNNING")
    assert list(_ended(metrics)) == [f"job-{number}" for number in range(3, NEWEST_ENDED + 3)]


def test_the_number_of_series_does_not_depend_on_how_many_jobs_have_ended(metrics: Metrics) -> None:
    """So the time of a scrape does not either."""

    def run(*job_ids: str) -> int:
        for job_id in job_ids:
            job = _job(job_id=job_id)
            for state, before in (("QUEUED", None), ("PREPARING", "QUEUED"), ("RUNNING", "PREPARING")):
                metrics.on_job_state(dataclasses.replace(job, job_state=JobState(state)), before)
            metrics.on_payload(job, _step())
            metrics.on_payload(job, CheckpointWritten(step=1, duration_s=1.0, size_bytes=10))
            metrics.on_job_state(dataclasses.replace(job, job_state=JobState.SUCCEEDED), "RUNNING")
        return sum(len(family.samples) for family in metrics.registry.collect())

    few = run(*(f"job-{number}" for number in range(NEWEST_ENDED)))
    assert run(*(f"job-{number}" for number in range(NEWEST_ENDED, 300))) == few


def test_what_a_job_did_last_has_its_time(metrics: Metrics, clock: Clock) -> None:
    job = dataclasses.replace(_job(JobState.PREPARING), attempt=2)
    metrics.on_job_state(job, "QUEUED")
    clock.now_s += 1
    metrics.on_job_state(_job(), "STARTING")
    last_step = "horizon_job_last_step_timestamp_seconds"
    assert _value(metrics, last_step, job_id="job-1") == NOW_S + 1
    clock.now_s += 1
    metrics.on_payload(_job(), _step())
    clock.now_s += 1
    metrics.on_payload(_job(), EvalDone(step=1, eval_loss=1.0, num_targets=1))
    began = "horizon_job_attempt_start_timestamp_seconds"
    assert _value(metrics, began, job_id="job-1", attempt="2") == NOW_S
    assert _value(metrics, last_step, job_id="job-1") == NOW_S + 2
    assert _value(metrics, "horizon_job_last_evaluation_timestamp_seconds", job_id="job-1") == NOW_S + 3


def test_a_gpu_that_is_silent_loses_its_figures_and_keeps_its_name(metrics: Metrics) -> None:
    gpu = GpuFigures(device="cuda:0", name="H100", utilization=0.5, pcie_bytes_per_second={"h2d": 3.0})
    metrics.set_gpus([gpu])
    assert _value(metrics, "horizon_gpu_utilization_ratio", device="cuda:0") == 0.5
    assert _value(metrics, "horizon_gpu_pcie_bytes_per_second", device="cuda:0", direction="h2d") == 3.0
    assert _value(metrics, "horizon_gpu_power_watts", device="cuda:0") is None, "this one does not tell"
    metrics.set_gpus([gpu.silent])
    assert _value(metrics, "horizon_gpu_info", device="cuda:0", name="H100") == 1
    assert _value(metrics, "horizon_gpu_up", device="cuda:0") == 0
    assert _value(metrics, "horizon_gpu_utilization_ratio", device="cuda:0") is None
    assert _value(metrics, "horizon_gpu_pcie_bytes_per_second", device="cuda:0", direction="h2d") is None


def test_node_figures_that_boards_need(metrics: Metrics) -> None:
    metrics.set_maintenance(NOW_S, NOW_S + 60)
    metrics.set_stored({"ada": 7})
    metrics.set_page_url("https://gpubox:7172")
    assert _value(metrics, "horizon_maintenance_end_timestamp_seconds") == NOW_S + 60
    assert _value(metrics, "horizon_stored_bytes", user="ada") == 7
    assert _value(metrics, "horizon_web_page_info", url="https://gpubox:7172") == 1
