"""A record that is sent many times is converted once, and no receiver can change what the others get."""

from __future__ import annotations

import dataclasses

import pytest

from horizon_proto.v1 import job_pb2
from horizon_server.api.cached_on import cached_on
from horizon_server.api.grpc import convert
from horizon_server.api.grpc.convert import packed, response, to_message
from horizon_server.api.http import routes
from horizon_server.events import JobEvent, Message
from horizon_server.records.job import JobRecord, JobState
from horizon_server.spec import parse_job_spec

JOB = JobRecord(
    job_id="j1",
    owner="ada",
    spec=parse_job_spec({"name": "one", "model": "m", "dataset": "d"}),
    model_id="m",
    dataset_id="d",
    eval_dataset_id="",
    job_state=JobState.SUCCEEDED,
)
EVENT = JobEvent(job_id="j1", sequence=7, time_s=5.0, payload=Message(level="info", text="hello"))


def test_fifty_answers_with_one_record_fill_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    filled: list[object] = []
    fill = convert._filled

    def counted(message: job_pb2.Job, record: object) -> job_pb2.Job:
        filled.append(record)
        return fill(message, record)

    monkeypatch.setattr(convert, "_filled", counted)
    job, event = dataclasses.replace(JOB), dataclasses.replace(EVENT)
    answers = [response(job_pb2.ListJobsResponse, jobs=[job, job]) for _ in range(50)]
    watched = [response(job_pb2.WatchJobResponse, event=event) for _ in range(50)]
    assert [sum(record is one for record in filled) for one in (job, event)] == [1, 1]
    assert len({answer.SerializeToString() for answer in answers}) == 1
    assert len({answer.SerializeToString() for answer in watched}) == 1


def test_an_answer_is_a_copy() -> None:
    first = to_message(JOB, job_pb2.Job)
    first.owner = "eve"
    assert to_message(JOB, job_pb2.Job).owner == "ada"


def test_a_changed_record_is_another_record() -> None:
    assert to_message(JOB, job_pb2.Job).step == 0
    assert to_message(dataclasses.replace(JOB, step=5), job_pb2.Job).step == 5
    assert dataclasses.replace(JOB) == JOB


def test_one_frame_for_all_who_watch_by_http() -> None:
    first = cached_on(EVENT, "sse", lambda: routes._event_frame(EVENT))
    second = cached_on(EVENT, "sse", lambda: routes._event_frame(EVENT))
    assert first is second
    assert first.encode() == second.encode()
    assert b"id: 7" in first.encode()


def test_an_answer_with_one_job_is_made_once_and_is_what_a_message_would_be() -> None:
    job = dataclasses.replace(JOB)
    answer = packed(job_pb2.GetJobResponse, "job", [job])
    assert job_pb2.GetJobResponse.FromString(answer) == response(job_pb2.GetJobResponse, job=job)
    vars(job).pop("horizon_proto.v1.Job")  # of which the answer was made
    assert packed(job_pb2.GetJobResponse, "job", [job]) == answer
    assert "horizon_proto.v1.Job" not in vars(job)
