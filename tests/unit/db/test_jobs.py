"""Jobs and events in the database: numbered without gaps, moved only where the state machine allows."""

from __future__ import annotations

import dataclasses
import math
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from horizon_server.db.database import Database
from horizon_server.db.jobs import JobStore
from horizon_server.errors import WrongJobState
from horizon_server.events import EvalAnswer, EvalDone, Message, StateChanged, StepDone
from horizon_server.figures import EvalFigures, EvalSetFigures
from horizon_server.records.execution import Execution, Residency
from horizon_server.records.job import JobRecord, JobState
from horizon_server.records.plan import Plan, StepPrediction
from horizon_server.spec import parse_job_spec

SPEC = parse_job_spec({"name": "one", "model": "m", "dataset": "d", "train": {"max_grad_norm": None}})
PLAN = Plan(
    host_bytes={"weights": 4},
    device_bytes={},
    host_limit_bytes=9,
    execution=Execution(
        device_limit_bytes=9, residency=Residency(resident_layers=2, resident_bytes=1 << 20, saved_share=0.1)
    ),
    num_parameters=1,
    device="host",
    prediction=StepPrediction(step_s=0.5, tokens_per_second=64.0, bound="h2d", peak_flops_per_s=1e12, total_s=None),
)
STEP = StepDone(
    step=3,
    num_steps=9,
    loss=1.5,
    grad_norm=1.0,
    learning_rate=0.1,
    epoch=0.5,
    num_input_tokens_seen=5,
    num_tokens=5,
    tokens_per_second=1.0,
    duration_s=1.0,
)


def job(job_id: str, owner: str = "ada") -> JobRecord:
    return JobRecord(
        job_id=job_id,
        owner=owner,
        spec=SPEC,
        model_id="m1",
        dataset_id="d1",
        eval_dataset_id="",
        job_state=JobState.QUEUED,
        created_s=5.0,
        plan=PLAN,
    )


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[JobStore]:
    database = await Database.open(tmp_path / "horizon.db")
    yield JobStore(database)
    await database.close()


async def created(store: JobStore, job_id: str, owner: str = "ada") -> JobRecord:
    record, _ = await store.create(job(job_id, owner), request_id=str(uuid.uuid4()))
    return record


async def test_a_job_comes_back_as_it_was(store: JobStore) -> None:
    made = await created(store, "j1")
    assert made == dataclasses.replace(job("j1"), last_sequence=1, queue_position=1)
    assert await store.get("j1") == made
    assert await store.get("j2") is None


async def test_what_the_data_became_is_kept(store: JobStore) -> None:
    assert (await created(store, "j1")).data_report == {}
    changed = await store.set("j1", data_report={"rows": 7, "packed_rows": 2})
    assert changed.data_report == {"rows": 7, "packed_rows": 2}
    assert await store.get("j1") == changed


async def test_the_same_request_gives_the_same_job(store: JobStore) -> None:
    request_id = str(uuid.uuid4())
    first, is_new = await store.create(job("j1"), request_id=request_id)
    again, is_newer = await store.create(job("j2"), request_id=request_id)
    assert (again.job_id, is_new, is_newer) == (first.job_id, True, False)
    assert await store.get("j2") is None


async def test_events_are_numbered_without_gaps_and_keep_their_order(store: JobStore) -> None:
    await created(store, "j1")
    for i in range(5):
        await store.append("j1", Message(level="info", text=str(i)))
    events = await store.events_after("j1", 0, 100)
    assert [event.sequence for event in events] == [1, 2, 3, 4, 5, 6]
    assert [event.payload.text for event in events if isinstance(event.payload, Message)] == list("01234")
    assert [event.sequence for event in await store.events_after("j1", 4, 1)] == [5]


async def test_a_step_is_kept_as_the_newest(store: JobStore) -> None:
    await created(store, "j1")
    record, _ = await store.append("j1", STEP, step=3, num_steps=9, last_step=STEP)
    assert (record.last_step, record.step) == (STEP, 3)
    assert (await store.events_after("j1", 1, 10))[0].payload == STEP


async def test_what_a_job_did_last_has_its_time(store: JobStore) -> None:
    """Of its present attempt, not of earlier ones."""
    await created(store, "j1")
    assert await store.last_times("j1") == {}
    for number in (1, 2):
        await store.move("j1", StateChanged(job_state="PREPARING"), attempt=number)
        await store.append("j1", dataclasses.replace(STEP, loss=math.nan, step=number))
        await store.append("j1", Message(level="info", text='{"kind":"eval"'))
        await store.move("j1", StateChanged(job_state="QUEUED"))
    events = await store.events_after("j1", 0, 100)
    began = [event for event in events if getattr(event.payload, "job_state", "") == "PREPARING"]
    steps = [event for event in events if isinstance(event.payload, StepDone)]
    assert await store.last_times("j1") == {"attempt": began[-1].time_s, "step": steps[-1].time_s}


async def test_the_jobs_that_ended_last_are_found_in_the_order_of_their_ends(store: JobStore) -> None:
    for number in range(4):
        await created(store, f"j{number}")
    for number, ended_s in ((2, 10.0), (0, 30.0), (3, 20.0)):
        await store.move(f"j{number}", StateChanged(job_state="CANCELLED"), ended_s=ended_s)
    assert [job.job_id for job in await store.newest_ended(2)] == ["j3", "j0"]


async def test_a_move_the_machine_forbids_changes_nothing(store: JobStore) -> None:
    await created(store, "j1")
    with pytest.raises(WrongJobState, match="QUEUED and cannot become SUCCEEDED"):
        await store.move("j1", StateChanged(job_state="SUCCEEDED"), step=7)
    found = await store.get("j1")
    assert found is not None
    assert (found.job_state, found.step, found.last_sequence) == (JobState.QUEUED, 0, 1)


async def test_pages_go_back_in_time_and_see_one_owner(store: JobStore) -> None:
    for i in range(5):
        await created(store, f"j{i}", "ada" if i % 2 == 0 else "bob")
    everything = await store.page(owner=None, states=[], before=0, limit=10)
    assert [record.job_id for _, record in everything] == ["j4", "j3", "j2", "j1", "j0"]
    older = await store.page(owner=None, states=[], before=everything[1][0], limit=2)
    assert [record.job_id for _, record in older] == ["j2", "j1"]
    mine = await store.page(owner="ada", states=[JobState.QUEUED], before=0, limit=10)
    assert [record.job_id for _, record in mine] == ["j4", "j2", "j0"]
    assert await store.page(owner="ada", states=[JobState.FAILED], before=0, limit=10) == []


async def test_counts_name_every_state(store: JobStore) -> None:
    await created(store, "j1")
    counts = await store.counts()
    assert counts == {state.value: int(state is JobState.QUEUED) for state in JobState}


async def test_events_are_visited_as_plain_data_those_of_the_kinds_that_are_wanted(store: JobStore) -> None:
    created, _ = await store.create(job("job_1"), request_id=str(uuid.uuid4()))
    odd = dataclasses.replace(STEP, loss=math.nan)
    for payload in (
        STEP,
        Message(level="info", text='{"kind":"step"'),
        EvalDone(
            step=3,
            eval_loss=2.0,
            num_targets=1,
            answers=(EvalAnswer(document=1, prompt="\ud83d", answer="", reference=""),),
        ),
        odd,
    ):
        await store.append("job_1", payload)
    first, seen = created.last_sequence + 1, []
    kinds = ("step", "eval")
    assert await store.visit_events("job_1", 0, 10, kinds, lambda *event: seen.append(event)) == 3
    assert [(number, event["kind"], event["step"]) for number, _, event in seen] == [
        (first, "step", 3),
        (first + 2, "eval", 3),
        (first + 3, "step", 3),
    ]
    assert math.isnan(seen[2][2]["loss"])
    assert seen[1][2]["answers"][0]["prompt"] == "\ud83d"
    assert await store.visit_events("job_1", first, 1, ("step",), lambda *event: seen.append(event)) == 1
    assert seen[-1][0] == first + 3


async def test_many_jobs_of_one_user_do_not_hide_those_of_others(store: JobStore) -> None:
    for i in range(6):
        await created(store, f"a{i}", "ada")
    await created(store, "b0", "bob")
    await created(store, "b1", "bob")
    await store.set("a4", priority=5)
    await store.move("a1", StateChanged(job_state="PAUSED"))
    # The queue is a0 a2 a3 a4 a5 b0 b1: of each user the first two, by priority and age.
    assert [(job.job_id, job.queue_position) for job in await store.heads(4)] == [
        ("a0", 1),
        ("a4", 4),
        ("b0", 6),
        ("b1", 7),
    ]
    assert [job.job_id for job in await store.heads(2)] == ["a4", "b0"]
    assert await store.heads(100) == await store.queued(100)


def evaluated(step: int, accuracy: float) -> EvalDone:
    sets = (EvalSetFigures.of("a", EvalFigures(eval_loss=1.0, num_targets=4, num_correct=2)),)
    answers = (EvalAnswer(document=0, prompt="p", answer="a", reference="r"),)
    return EvalDone(step=step, eval_loss=1.0, num_targets=4, sets=sets, answers=answers, judged=accuracy)


async def test_the_first_the_best_and_the_last_evaluation_stay_with_the_job(store: JobStore) -> None:
    spec = parse_job_spec({**SPEC.to_mapping(), "eval": {"sets": {"a": "d"}, "best_by": "a.accuracy"}})
    one = dataclasses.replace(job("j1"), spec=spec, eval_set_ids={"a": "dataset_x1"})
    await store.create(one, request_id=str(uuid.uuid4()))

    async def known_after(step: int, accuracy: float) -> list[tuple[int, float | None]]:
        record, _ = await store.append("j1", evaluated(step, accuracy))
        found = await store.get("j1")
        assert found is not None
        assert (found.first_eval, found.last_eval) == (record.first_eval, record.last_eval)
        kept = [one for one in (record.first_eval, record.best_eval, record.last_eval) if one is not None]
        assert all(one.answers == () and one.sets == evaluated(0, 0).sets for one in kept)
        return [(one.step, one.judged) for one in kept]

    assert await known_after(0, 0.5) == [(0, 0.5), (0, 0.5), (0, 0.5)]
    assert await known_after(2, 0.75) == [(0, 0.5), (2, 0.75), (2, 0.75)]
    assert await known_after(4, 0.75) == [(0, 0.5), (2, 0.75), (4, 0.75)]
    # It was restarted, and is at step 2 again.
    assert await known_after(2, 0.25) == [(0, 0.5), (0, 0.5), (2, 0.25)]
    assert await known_after(4, 1.0) == [(0, 0.5), (4, 1.0), (4, 1.0)]


async def test_an_eval_set_is_in_use_by_its_job(store: JobStore) -> None:
    one = dataclasses.replace(job("j1"), eval_set_ids={"a": "dataset_x1", "b": "dataset_x2"})
    await store.create(one, request_id=str(uuid.uuid4()))
    assert await store.users_of("dataset_x2") == [("j1", "ada")]
    # Neither a part of an id, nor a name, nor the wildcard of SQL.
    for other in ("dataset_x", "a", "dataset%x1", "datasetax1"):
        assert await store.users_of(other) == []
