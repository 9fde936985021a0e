"""Watching and logs: every event once and in order, whatever happens to the connection."""

from __future__ import annotations

import gc
import itertools
import sys
from types import FrameType
from typing import TYPE_CHECKING, Any

import pytest
from tests.unit.client.recorder import Recorder

from horizon_client import AsyncClient, Client, DeadlineExceeded, NotFound, Unavailable, event_loop
from horizon_client.cli.output import to_plain
from horizon_client.connection import RetryPolicy
from horizon_client.conversion import from_message
from horizon_client.resources import JobEvent, MessageEvent, StateEvent, StepEvent
from horizon_proto.v1 import job_pb2
from horizon_server.records.job import JobRecord, JobState

if TYPE_CHECKING:
    from tests.component.client.conftest import Daemon

QUICK = RetryPolicy(max_attempts=1000, max_elapsed_s=120.0, first_wait_s=0.001, longest_wait_s=0.05)


def _sequences(events: list[JobEvent]) -> list[int]:
    return [event.sequence for event in events]


def test_watch_yields_all_events(client: Client, finished_job: JobRecord) -> None:
    events = list(client.jobs.watch(finished_job.job_id))
    assert _sequences(events) == list(range(1, 16))
    assert isinstance(events[0], StateEvent)
    assert [event.state for event in events if event.kind == "state"] == [
        "QUEUED",
        "PREPARING",
        "STARTING",
        "RUNNING",
        "SUCCEEDED",
    ]
    assert isinstance(events[4], StepEvent)
    assert events[4].loss == 1.0


@pytest.mark.parametrize("cuts", [[0], [1, 1, 1], [5, 0, 3], [14], [15]])
def test_watch_resumes_without_gap_or_repeat(
    client: Client, daemon: Daemon, finished_job: JobRecord, cuts: list[int]
) -> None:
    daemon.line.cuts["WatchJob"] = list(cuts)
    notices: list[str] = []
    events = list(client.jobs.watch("first", reporter=Recorder(on_notice=notices.append)))
    assert _sequences(events) == list(range(1, 16))
    assert len(notices) == len([cut for cut in cuts if cut < 15])


def test_watch_survives_a_restart_of_the_daemon(client: Client, daemon: Daemon, finished_job: JobRecord) -> None:
    events: list[JobEvent] = []
    for event in client.jobs.watch(finished_job.job_id):
        events.append(event)
        if event.sequence == 4:
            daemon.restart()
    assert _sequences(events) == list(range(1, 16))


def test_watch_continues_from_a_sequence(client: Client, finished_job: JobRecord) -> None:
    assert _sequences(list(client.jobs.watch(finished_job.job_id, after_sequence=12))) == [13, 14, 15]


def test_stream_that_ends_before_the_job_counts_as_cut(client: Client, daemon: Daemon, finished_job: JobRecord) -> None:
    daemon.line.ends["WatchJob"] = [6]
    assert _sequences(list(client.jobs.watch(finished_job.job_id))) == list(range(1, 16))
    assert daemon.calls.count("WatchJob") == 2


def test_watch_gives_up_after_its_time(daemon: Daemon, finished_job: JobRecord) -> None:
    short = RetryPolicy(max_attempts=3, first_wait_s=0.001, longest_wait_s=0.001)
    with Client(daemon.address, token=daemon.token, unary_retry=short, stream_retry=short) as client:
        daemon.line.refuse("WatchJob", "UNAVAILABLE", "draining", reason="DRAINING", times=3)
        with pytest.raises(Unavailable, match="draining") as caught:
            list(client.jobs.watch(finished_job.job_id))
    assert caught.value.reason == "DRAINING"
    assert daemon.calls.count("WatchJob") == 3


def test_watch_of_an_unknown_job_fails_at_once(client: Client, daemon: Daemon) -> None:
    with pytest.raises(NotFound, match="job 'nope' does not exist"):
        list(client.jobs.watch("nope"))
    assert daemon.calls == ["GetJob", "ListJobs"]  # the second for similar names


def test_watch_can_be_left_and_the_client_used_on(client: Client, finished_job: JobRecord) -> None:
    for event in client.jobs.watch(finished_job.job_id):
        if event.sequence == 3:
            break
    assert client.jobs.get(finished_job.job_id).state == "SUCCEEDED"


async def test_the_async_face_yields_the_same(daemon: Daemon, client: Client, finished_job: JobRecord) -> None:
    daemon.line.cuts["WatchJob"] = [4]
    async with AsyncClient(daemon.address, token=daemon.token, unary_retry=QUICK, stream_retry=QUICK) as inner:
        events = [event async for event in inner.jobs.watch(finished_job.job_id)]
    assert _sequences(events) == list(range(1, 16))


def test_an_event_of_an_unknown_kind_is_a_message(client: Client, daemon: Daemon, finished_job: JobRecord) -> None:

    def of_a_later_version(answer: job_pb2.WatchJobResponse) -> None:
        if answer.event.sequence == 6:
            answer.event.ClearField("step")

    daemon.line.change["WatchJob"] = of_a_later_version
    events = list(client.jobs.watch(finished_job.job_id))
    assert isinstance(events[5], MessageEvent)
    assert "upgrade" in events[5].text
    assert _sequences(events) == list(range(1, 16))


@pytest.mark.parametrize("cuts", [[], [0], [30, 10]])
def test_logs_resume_at_the_byte(client: Client, daemon: Daemon, finished_job: JobRecord, cuts: list[int]) -> None:
    log = bytes(range(256)) * 2
    daemon.write_log(finished_job, log)
    daemon.line.cuts["GetJobLogs"] = list(cuts)
    assert b"".join(client.jobs.logs(finished_job.job_id)) == log
    daemon.line.cuts["GetJobLogs"] = list(cuts)
    assert b"".join(client.jobs.logs(finished_job.job_id, offset=15)) == log[15:]


def test_plain_form_has_the_names_that_notebooks_know() -> None:
    message = job_pb2.StepEvent(step=3, loss=float("nan"), grad_norm=1.0, h2d=job_pb2.TransferFigures(bytes=5))
    plain: dict[str, Any] = to_plain(from_message(StepEvent, message, sequence=7))
    names = {"loss", "grad_norm", "learning_rate", "epoch", "step", "num_input_tokens_seen", "tokens_per_second"}
    assert names <= set(plain)
    assert plain["event"] == "step"
    assert plain["loss"] is None  # NaN is not JSON
    assert plain["h2d"] == {"bytes": 5, "busy_s": 0.0, "exposed_s": 0.0}
    assert plain["d2h"] is None


@pytest.mark.parametrize("state", [JobState.SUCCEEDED, JobState.FAILED])
def test_wait_returns_the_ended_job(client: Client, daemon: Daemon, state: JobState) -> None:
    daemon.add_job("first", state=state)
    daemon.line.cuts["WatchJob"] = [0]
    assert client.jobs.wait("first", timeout_s=240).state == state
    assert "WatchJob" in daemon.calls


def test_wait_follows_a_job_to_its_end(client: Client, daemon: Daemon, running_job: JobRecord) -> None:
    daemon.line.cuts["WatchJob"] = [0]

    def end(notice: str) -> None:
        daemon.move(running_job, JobState.SUCCEEDED)

    assert client.jobs.wait("first", reporter=Recorder(on_notice=end)).state == "SUCCEEDED"


def test_wait_gives_up_after_its_time_and_leaves_the_job(
    client: Client, daemon: Daemon, running_job: JobRecord
) -> None:
    with pytest.raises(DeadlineExceeded, match=r"job first has not ended after 0\.2 s; it continues"):
        client.jobs.wait("first", timeout_s=0.2)
    assert "CancelJob" not in daemon.calls


async def test_what_is_printed_of_clients_and_checkpoints_is_short(daemon: Daemon, client: Client) -> None:
    job = daemon.add_job()
    daemon.add_checkpoint(job, 10, {f"model-{n:05}.safetensors": b"x" for n in range(50)})
    assert repr(client) == f"Client('{daemon.address}')"
    async with AsyncClient(daemon.address, token=daemon.token) as inner:
        assert repr(inner) == f"AsyncClient('{daemon.address}')"
        (checkpoint,) = await inner.checkpoints.list(job.job_id)
    assert repr(checkpoint) == (
        f"Checkpoint(job_id='{job.job_id}', step=10, size_bytes=50, create_time={checkpoint.create_time!r}, "
        "eval_loss=None, last=True, "
        "best=False, kept=False, names=())"
    )
    shown = repr(client.jobs.get(job.job_id))
    assert shown.startswith(f"Job(job_id='{job.job_id}', name=") and "state='QUEUED'" in shown and len(shown) < 400


def test_an_interrupt_at_any_moment_of_a_watch_is_an_interrupt(
    client: Client, running_job: JobRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = iter(client.jobs.watch(running_job.job_id))
    assert _sequences([next(events) for _ in range(6)]) == [1, 2, 3, 4, 5, 6]
    loop = client._loop._loop
    schedule = loop.call_soon_threadsafe

    def interrupted(callback: Any, *args: Any) -> Any:
        monkeypatch.setattr(loop, "call_soon_threadsafe", schedule)
        schedule(callback, *args)
        raise KeyboardInterrupt  # the step runs, but nothing waits for it yet

    monkeypatch.setattr(loop, "call_soon_threadsafe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(events)
    assert client.jobs.get(running_job.job_id).state == "RUNNING", "and the client can still be used"


def test_an_interrupt_at_any_line_of_a_call_leaves_nothing_behind(client: Client, running_job: JobRecord) -> None:
    for number in itertools.count(1):
        left = number

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal left
            if frame.f_code.co_filename != event_loop.__file__:
                return None
            left -= event == "line"
            if not left:
                sys.settrace(None)
                raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            job = client.jobs.get(running_job.job_id)
            break  # past the last line
        except KeyboardInterrupt:
            gc.collect()  # a coroutine that was never awaited warns now, and a warning is an error here
        finally:
            sys.settrace(None)
    assert number > 5, "lines were interrupted"
    assert job.state == "RUNNING", "and the client can still be used"
