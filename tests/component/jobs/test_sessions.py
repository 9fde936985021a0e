"""Calls of sessions as the daemon takes and keeps them; no worker does them here."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.conftest import MakeDaemon
from tests.daemon_parts import DaemonParts

from horizon_server.errors import (
    HorizonError,
    InvalidData,
    InvalidSpec,
    NotFound,
    RequestIdReused,
    TooLarge,
    TooManyCalls,
    WrongJobState,
)
from horizon_server.records.job import JobState, StopRequest
from horizon_server.records.sample import (
    MAX_ANSWERS,
    MAX_SAMPLES,
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
    MAX_TOP_LOGPROBS,
    SampleOptions,
    SamplePrompt,
)
from horizon_server.records.session import (
    Call,
    Close,
    Datum,
    ForwardBackward,
    LoadState,
    OptimStep,
    Sample,
    SaveState,
    Stepped,
)
from horizon_server.services import session_checks, sessions
from horizon_server.services.sessions import Sessions
from horizon_server.spec import parse_job_spec
from horizon_server.worker_link.calls import CallFiles

STEP = OptimStep(learning_rate=0.1)


@pytest_asyncio.fixture
async def still(make_daemon: MakeDaemon, tmp_path: Path) -> AsyncIterator[DaemonParts]:
    """A daemon whose queue does not run."""
    async with make_daemon(tmp_path / "state", queue=False) as made:
        yield made


def spec(**changes: Any) -> Any:
    return parse_job_spec({"name": "s", "model": "tiny", "method": "session", **changes})


@pytest_asyncio.fixture
async def opened(still: DaemonParts) -> tuple[DaemonParts, Any, str]:
    ann = await still.user("ann")
    await still.model(ann, "tiny")
    job = await still.services.sessions.open(ann, spec(train={"sequence_length": 8, "tokens_per_step": 16}))
    return still, ann, job.job_id


def files_of(daemon: DaemonParts, job_id: str) -> CallFiles:
    return CallFiles(daemon.services.jobs.folders.calls(job_id))


async def test_a_call_that_is_sent_again_is_one_call(opened: tuple[DaemonParts, Any, str]) -> None:
    daemon, ann, job_id = opened
    service = daemon.services.sessions
    assert [await service.call(ann, job_id, STEP, number=number) for number in (1, 1, 2, 2, 1)] == [1, 1, 2, 2, 1]
    assert await service.call(ann, job_id, STEP) == 3
    with pytest.raises(RequestIdReused, match="call 2 of the session was another one"):
        await service.call(ann, job_id, SaveState(name="a"), number=2)
    with pytest.raises(InvalidSpec, match="number is 5; the session's next call has 4"):
        await service.call(ann, job_id, STEP, number=5)
    # As a daemon that starts anew finds them.
    again = Sessions(daemon.services.jobs, space=daemon.services.sessions._space)
    assert await again.last_number(ann, job_id) == 3


async def test_a_result_is_waited_for(opened: tuple[DaemonParts, Any, str]) -> None:
    daemon, ann, job_id = opened
    service = daemon.services.sessions
    await service.call(ann, job_id, STEP)
    assert await service.result(ann, job_id, 1, wait_s=0.01) is None
    waiting = asyncio.create_task(service.result(ann, job_id, 1, wait_s=60))
    await asyncio.sleep(0.05)
    result = Stepped(step=1, grad_norm=math.nan, skipped="non_finite_gradient")
    files_of(daemon, job_id).write_result(1, result)
    daemon.services.jobs.scheduler.runtime.calls.tell(job_id)
    found = await waiting
    assert isinstance(found, Stepped) and math.isnan(found.grad_norm) and found.skipped == result.skipped
    with pytest.raises(NotFound, match="has no call 2; its newest is 1"):
        await service.result(ann, job_id, 2)


async def test_sessions_of_others_are_not_there(opened: tuple[DaemonParts, Any, str]) -> None:
    daemon, _, job_id = opened
    eve = await daemon.user("eve")
    for ask in (
        daemon.services.sessions.call(eve, job_id, STEP),
        daemon.services.sessions.result(eve, job_id, 1),
        daemon.services.sessions.last_number(eve, job_id),
    ):
        with pytest.raises(NotFound):
            await ask


async def test_calls_that_wait_and_their_bytes_are_bounded(
    opened: tuple[DaemonParts, Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon, ann, job_id = opened
    service = daemon.services.sessions
    monkeypatch.setattr(sessions, "MAX_CALLS_IN_FLIGHT", 3)
    for _ in range(3):
        await service.call(ann, job_id, STEP)
    with pytest.raises(TooManyCalls, match="3 calls of session"):
        await service.call(ann, job_id, STEP)
    for number in (1, 2, 3):
        files_of(daemon, job_id).write_result(number, Stepped(step=number, grad_norm=1.0))
    monkeypatch.setattr(sessions, "MAX_KEPT_BYTES", 300)
    with pytest.raises(TooLarge, match="call optim_step before more data"):
        await service.call(ann, job_id, STEP)
    # Once a checkpoint has them.
    files_of(daemon, job_id).prune(done=3, kept_results=2)
    assert await service.call(ann, job_id, STEP) == 4
    assert list(files_of(daemon, job_id).result_sizes()) == [2, 3]


async def test_a_caller_waits_a_minute_at_most(
    opened: tuple[DaemonParts, Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon, ann, job_id = opened
    monkeypatch.setattr(sessions, "MAX_WAIT_S", 0.05)
    await daemon.services.sessions.call(ann, job_id, STEP)
    assert await daemon.services.sessions.result(ann, job_id, 1, wait_s=math.inf) is None


async def test_nothing_is_called_after_the_end_or_during_a_pause(opened: tuple[DaemonParts, Any, str]) -> None:
    daemon, ann, job_id = opened
    service = daemon.services.sessions
    await daemon.services.jobs.pause(ann, job_id)
    with pytest.raises(WrongJobState, match=f"paused by a user; resume it: horizon job resume {job_id}"):
        await service.call(ann, job_id, STEP)
    await daemon.services.jobs.resume(ann, job_id)
    await service.call(ann, job_id, Close())
    with pytest.raises(WrongJobState, match="is closed by its call 1"):
        await service.call(ann, job_id, STEP)
    await daemon.services.jobs.cancel(ann, job_id)
    with pytest.raises(WrongJobState, match="is CANCELLED"):
        await service.result(ann, job_id, 1, wait_s=60)


async def test_the_next_call_brings_an_idle_session_back(opened: tuple[DaemonParts, Any, str]) -> None:
    daemon, ann, job_id = opened
    state, reason, message = StopRequest.IDLE.end("s")
    job = await daemon.job(job_id)
    await daemon.services.jobs.journal.move(job, state, reason=reason, message=message)
    await daemon.services.sessions.call(ann, job_id, STEP)
    assert (await daemon.job(job_id)).job_state is JobState.QUEUED


async def test_only_sessions_are_called_and_only_sessions_have_no_data(still: DaemonParts) -> None:
    ann = await still.user("ann")
    await still.model(ann, "tiny")
    await still.dataset(ann)
    with pytest.raises(InvalidSpec, match="a session has method: session"):
        await still.services.sessions.open(ann, still.spec())
    job = await still.submit(ann)
    with pytest.raises(InvalidSpec, match="has method sft; it is not a session"):
        await still.services.sessions.call(ann, job.job_id, STEP)


GOOD = Datum(tokens=(1, 2), targets=(2, -100))
SAMPLES = {"logprobs": (0.0, 0.0), "advantages": (1.0, 0.0)}


def call_with(loss: Any = "cross_entropy", options: Any = None, **changes: Any) -> ForwardBackward:
    return ForwardBackward(data=(dataclasses.replace(GOOD, **changes),), loss=loss, options=options or {})


def sample_with(**options: Any) -> Sample:
    return Sample(prompts=(SamplePrompt(ids=(1,)),), options=SampleOptions(**options))


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (ForwardBackward(data=()), r"data has 0 documents; it must have 1 to"),
        (ForwardBackward(data=(GOOD,) * 9), r"data has 18 tokens, and the session was planned for 16"),
        (call_with(targets=(-100, -100)), "data has no target"),
        (call_with(tokens=(1,) * 9, targets=(2,) * 9), r"data\[0\].tokens has 9 tokens; it must have 1 to 8"),
        (call_with(tokens=(-1, 2)), r"data\[0\].tokens has a number below 0"),
        (call_with(targets=(-5, 2)), r"data\[0\].targets has a number that is neither a token nor -100"),
        (call_with(targets=(2,)), r"data\[0\].targets has 1 numbers for 2 tokens"),
        (call_with(weights=(1.0,)), r"data\[0\].weights has 1 numbers for 2 tokens"),
        (call_with(weights=(1.0, math.nan)), r"data\[0\].weights has a number that is not finite"),
        (call_with(**SAMPLES), r"data\[0\].logprobs is for other losses than cross_entropy"),
        (call_with("ppo"), r"data\[0\].logprobs has 0 numbers for 2 tokens"),
        (call_with("dro", {"clip": 1.0}, **SAMPLES), r"options.clip is no option of loss dro; it has: beta"),
        (call_with("ppo", {"clip_low_threshold": -1.0}, **SAMPLES), r"options.clip_low_threshold is -1"),
        (OptimStep(learning_rate=11), "learning_rate is 11; it must be from 0 to 10"),
        (OptimStep(learning_rate=1, beta1=1.0), "beta1 is 1; it must be from 0 to below 1"),
        (SaveState(name="a/b"), "name is 'a/b'"),
        (LoadState(checkpoint="a", optimizer=True), "checkpoint is 'a'; it must be JOB@STEP"),
        (sample_with(max_tokens=0), "max_tokens is 0; it must be 1 to 4096"),
        (
            sample_with(num_samples=MAX_SAMPLES + 1),
            f"num_samples is 129.*1 to {MAX_SAMPLES}, and at most {MAX_ANSWERS}",
        ),
        (sample_with(top_k=-1), "top_k is -1"),
        (sample_with(stop=("a",) * (MAX_STOPS + 1)), f"stop must be at most {MAX_STOPS} texts"),
        (sample_with(stop=("a" * (MAX_STOP_CHARACTERS + 1),)), f"1 to {MAX_STOP_CHARACTERS} characters"),
        (sample_with(stop_ids=(1,) * (MAX_STOPS + 1)), "stop_ids must be at most 16 tokens"),
        (sample_with(logprobs=MAX_TOP_LOGPROBS + 1), "logprobs is 21; it must be 0 to 20"),
        (sample_with(prompt_logprobs=-1), "prompt_logprobs is -1; it must be 0 to 20"),
    ],
)
async def test_a_call_that_cannot_be_done_is_refused_by_field(
    call: Call, why: str, opened: tuple[DaemonParts, Any, str]
) -> None:
    daemon, ann, job_id = opened
    with pytest.raises(HorizonError, match=why) as refused:
        await daemon.services.sessions.call(ann, job_id, call)
    assert isinstance(refused.value, InvalidData | InvalidSpec) and refused.value.violations
    assert await daemon.services.sessions.last_number(ann, job_id) == 0


async def test_documents_of_a_call_are_bounded(
    opened: tuple[DaemonParts, Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon, ann, job_id = opened
    monkeypatch.setattr(session_checks, "MAX_DATA", 1)
    with pytest.raises(InvalidData, match="data has 2 documents; it must have 1 to 1"):
        await daemon.services.sessions.call(ann, job_id, ForwardBackward(data=(GOOD,) * 2))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"dataset": "d"}, "dataset is for jobs with data"),
        ({"eval_dataset": "d"}, "eval_dataset is for jobs with data"),
        ({"gpus": 2}, "gpus is 2, and a session is computed on one device"),
        ({"train": {"learning_rate": 0.5}}, "train.learning_rate is for jobs with data; in a session the calls say it"),
        ({"limits": {"max_steps": 3}}, "limits.max_steps is for jobs with data"),
        ({"session": {"idle_minutes": 0}}, "session.idle_minutes is 0; it must be a number above 0"),
        ({"method": "sft", "dataset": "d", "session": {"idle_minutes": 1}}, "session has options of method session"),
    ],
)
def test_what_a_session_has_not_is_refused_by_field(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidSpec, match=why):
        spec(**changes)
