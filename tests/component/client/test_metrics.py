"""`client.jobs.metrics`: each step once, evaluations beside the step that they follow, whatever happens to the line."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from horizon_client import Client, InvalidRequest, NotFound
from horizon_client.metrics import MetricsTable
from horizon_proto.v1 import job_pb2
from horizon_server.events import EvalDone, Payload, StepDone
from horizon_server.figures import EvalSetFigures
from horizon_server.records.job import JobRecord, JobState

if TYPE_CHECKING:
    from tests.component.client.conftest import Daemon

MakeStep = Callable[..., StepDone]


def evaluation(step: int, loss: float) -> EvalDone:
    held = EvalSetFigures(name="held", loss=loss, num_targets=10, num_correct=5, accuracy=0.5, exact_match=0.25)
    return EvalDone(step=step, eval_loss=loss, num_targets=10, num_tokens=20, duration_s=1.0, sets=(held,))


@pytest.fixture
def evaluated(daemon: Daemon, make_step: MakeStep) -> JobRecord:
    """Steps 1 to 4 with evaluations at 0, 2 and 4; then 3 and 4 again, as after a restart from a checkpoint of 2."""
    job = daemon.add_job("first", state=JobState.RUNNING)
    first: list[Payload] = [
        evaluation(0, 9.0),
        make_step(1),
        make_step(2),
        evaluation(2, 5.0),
        make_step(3),
        make_step(4),
    ]
    again: list[Payload] = [
        make_step(3, loss=0.3, method_figures={"kl": 0.5}),
        make_step(4, loss=float("nan")),
        evaluation(4, 4.0),
    ]
    return daemon.append(job, *first, evaluation(4, 8.0), *again)


def test_each_step_has_a_row_with_its_evaluation(client: Client, evaluated: JobRecord) -> None:
    metrics = client.jobs.metrics("first")
    assert [row.step for row in metrics] == [0, 1, 2, 3, 4]
    assert [row.loss for row in metrics] == [None, 1.0, 0.5, 0.3, None], "NaN is no value"
    assert [row.eval_loss for row in metrics] == [9.0, None, 5.0, None, 4.0], "what was done again counts once"
    assert metrics.curve("held/accuracy") == ([0, 2, 4], [0.5, 0.5, 0.5])
    assert metrics.curve("method/kl") == ([3], [0.5])
    assert metrics[2].time.tzinfo is not None
    assert metrics[-2:][0].figures["grad_norm"] == 0.5
    assert metrics.last() | {"loss": 0.3, "eval_loss": 4.0, "held/exact_match": 0.25} == metrics.last()
    assert repr(metrics).startswith(f"JobMetrics('{evaluated.job_id}', 5 rows, figures: eval_loss, held/loss, ")
    assert "<td>4.0" not in metrics._repr_html_() and "<td>4</td>" in metrics._repr_html_()


def test_rows_and_frames(client: Client, evaluated: JobRecord) -> None:
    metrics = client.jobs.metrics("first")
    rows = metrics.to_rows()
    assert (rows[0]["step"], rows[0]["eval_loss"], rows[0]["loss"]) == (0, 9.0, None)
    pytest.importorskip("pandas", reason="pandas is not installed")
    frame = metrics.to_pandas()
    assert list(frame.columns) == ["step", "time", *metrics.names]
    assert list(frame["step"]) == [0, 1, 2, 3, 4] and math.isnan(frame["loss"][0])
    assert str(frame["time"].dtype).startswith("datetime64")


def test_a_cut_line_loses_and_repeats_nothing(
    client: Client, daemon: Daemon, make_step: MakeStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("horizon_server.api.grpc.metric_rows._ROWS_AT_ONCE", 3)
    daemon.add_job("first", *map(make_step, range(1, 11)), state=JobState.SUCCEEDED)
    daemon.line.cuts["GetJobMetrics"] = [0, 2, 1]
    assert client.jobs.metrics("first").curve("loss") == ([*range(1, 11)], [1 / step for step in range(1, 11)])


def test_a_job_without_steps_and_an_unknown_figure(client: Client, daemon: Daemon) -> None:
    daemon.add_job("first")
    metrics = client.jobs.metrics("first")
    assert (len(metrics), list(metrics), metrics.last()) == (0, [], {})
    with pytest.raises(InvalidRequest, match="has no figure 'loss'; figures: none yet"):
        metrics.curve("loss")
    with pytest.raises(NotFound, match="job 'nope' does not exist"):
        client.jobs.metrics("nope")


def test_a_figure_that_comes_late_is_absent_before() -> None:
    table = MetricsTable()
    column = job_pb2.MetricColumn
    loss = column(name="loss", values=[3.0, 2.0])
    table.add(
        job_pb2.GetJobMetricsResponse(
            last_sequence=2, steps=[1, 2], times_s=[1, 2], are_evals=[False, False], columns=[loss]
        )
    )
    late = [column(name="loss", values=[1.0]), column(name="method/kl", values=[7.0])]
    table.add(job_pb2.GetJobMetricsResponse(last_sequence=3, steps=[2], times_s=[3], are_evals=[False], columns=late))
    metrics = table.metrics("job_1")
    assert metrics.curve("loss") == ([1, 2], [3.0, 1.0])
    assert metrics.curve("method/kl") == ([2], [7.0])
