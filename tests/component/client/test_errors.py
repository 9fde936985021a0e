"""gRPC statuses become leaves with reason, violations and exit code; idempotent calls are made again, others are
not."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING

import pytest

from horizon_client import (
    AlreadyExists,
    Client,
    DeadlineExceeded,
    DoesNotFit,
    HorizonClientError,
    InvalidRequest,
    NotAllowed,
    NotAvailableYet,
    NotFound,
    ServerFailed,
    Unauthenticated,
    Unavailable,
    WrongJobState,
    connection,
)
from horizon_client.connection import Backoff, RetryPolicy
from horizon_client.job_spec_types import JobSpec
from horizon_client.reporter import Reporter
from horizon_server.records.job import JobState

if TYPE_CHECKING:
    from tests.component.client.conftest import Daemon


class Said(Reporter):
    """Keeps the notices."""

    def __init__(self) -> None:
        self.notices: list[str] = []

    def notice(self, message: str) -> None:
        self.notices.append(message)


SPEC: JobSpec = {"name": "n", "model": "tiny-base", "dataset": "gsm8k"}


@pytest.mark.parametrize(
    ("code", "kind", "exit_code"),
    [
        ("INVALID_ARGUMENT", InvalidRequest, 2),
        ("OUT_OF_RANGE", InvalidRequest, 2),
        ("ALREADY_EXISTS", AlreadyExists, 2),
        ("FAILED_PRECONDITION", WrongJobState, 2),
        ("RESOURCE_EXHAUSTED", DoesNotFit, 2),
        ("UNIMPLEMENTED", NotAvailableYet, 2),
        ("UNAUTHENTICATED", Unauthenticated, 3),
        ("PERMISSION_DENIED", NotAllowed, 3),
        ("NOT_FOUND", NotFound, 4),
        ("DEADLINE_EXCEEDED", DeadlineExceeded, 5),
        ("INTERNAL", ServerFailed, 5),
        ("UNKNOWN", ServerFailed, 5),
        ("DATA_LOSS", ServerFailed, 5),
    ],
)
def test_every_status_has_its_leaf(
    client: Client, daemon: Daemon, code: str, kind: type[HorizonClientError], exit_code: int
) -> None:
    violations = (("train.seed", "train.seed is -1; it must be 0 or more"), ("line[3].text", "is empty"))
    daemon.line.refuse("CancelJob", code, "that went wrong", reason="SOME_REASON", violations=violations)
    with pytest.raises(kind) as caught:
        client.jobs.cancel("x")
    error = caught.value
    assert (error.message, error.reason, error.exit_code) == ("that went wrong", "SOME_REASON", exit_code)
    assert [(v.field, v.description) for v in error.violations] == list(violations)


def test_hundred_violations_arrive(client: Client, daemon: Daemon) -> None:
    violations = tuple((f"line[{n}].text", "this field must not be empty in any row " * 2) for n in range(100))
    daemon.line.refuse("GetJob", "INVALID_ARGUMENT", "bad data", reason="INVALID_DATA", violations=violations)
    with pytest.raises(InvalidRequest) as caught:
        client.jobs.get("x")
    assert len(caught.value.violations) == 100


def test_idempotent_calls_are_made_again(client: Client, daemon: Daemon) -> None:
    daemon.line.refuse("SubmitJob", "UNAVAILABLE", "try later", reason="DRAINING", times=3)
    job = client.jobs.submit(SPEC)
    assert daemon.calls == ["SubmitJob"] * 4
    assert [stored.job_id for stored in daemon.jobs()] == [job.job_id]


def test_other_calls_are_not(client: Client, daemon: Daemon) -> None:
    job = daemon.add_job(state=JobState.FAILED)
    daemon.line.refuse("ResumeJob", "UNAVAILABLE", "try later", reason="DRAINING")
    with pytest.raises(Unavailable, match="try later"):
        client.jobs.resume(job.job_id)
    assert daemon.calls == ["ResumeJob"]
    daemon.line.refuse("ResumeJob", "UNAVAILABLE", "Socket closed")
    with pytest.raises(
        Unavailable, match=r"the connection was cut.*it may have been carried out: look before you repeat it"
    ):
        client.jobs.resume(job.job_id)
    assert daemon.calls == ["ResumeJob"] * 2


def test_retries_are_bounded(daemon: Daemon) -> None:
    daemon.line.refuse("GetJob", "UNAVAILABLE", "try later", reason="DATABASE_UNAVAILABLE", times=50)
    policy = RetryPolicy(max_attempts=4, first_wait_s=0.001, longest_wait_s=0.001)
    with Client(daemon.address, token=daemon.token, unary_retry=policy) as client, pytest.raises(Unavailable):
        client.jobs.get("x")
    assert daemon.calls == ["GetJob"] * 4


def test_a_drain_is_limited_by_time_only(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_NOTICE_AFTER_S", 30)  # the nine waits are 9 ms, on a machine that is not busy
    said = Said()
    policy = RetryPolicy(max_attempts=2, max_elapsed_s=60, first_wait_s=0.001, longest_wait_s=0.001)
    daemon.line.refuse("SubmitJob", "UNAVAILABLE", "the daemon is shutting down", reason="DRAINING", times=9)
    with Client(daemon.address, token=daemon.token, unary_retry=policy, reporter=said) as client:
        assert client.jobs.submit(SPEC).state == "QUEUED"
    assert daemon.calls == ["SubmitJob"] * 10
    assert said.notices == []  # it was over before a person would wonder


def test_a_long_wait_is_said_once(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    # The first wait counts as long: on a busy machine the second one may not come within the time.
    monkeypatch.setattr(connection, "_NOTICE_AFTER_S", 0.1)
    said = Said()
    daemon.line.stop()
    policy = RetryPolicy(max_elapsed_s=3.0, longest_wait_s=0.2)
    with Client(daemon.address, token=daemon.token, unary_retry=policy, reporter=said) as client:
        for _ in range(2):
            with pytest.raises(Unavailable):
                client.jobs.resume("x")
        [notice] = said.notices
        assert notice.startswith(f"cannot reach horizond at {daemon.address}: nothing listens there")
        assert notice.endswith("; trying again for up to 3 s")
        daemon.line.start()
        # However long it takes to find the daemon again. The policy is frozen.
        monkeypatch.setitem(vars(policy), "max_elapsed_s", 60.0)
        daemon.add_job("back", state=JobState.FAILED)
        assert client.jobs.resume("back").state == "QUEUED"
    assert daemon.calls == ["ResumeJob"]


def test_same_request_id_gives_the_same_job(client: Client, daemon: Daemon) -> None:
    request_id = str(uuid.uuid4())
    first = client.jobs.submit(SPEC, request_id=request_id)
    assert client.jobs.submit(SPEC, request_id=request_id) == first
    assert client.jobs.submit(SPEC).job_id != first.job_id


def test_an_unreachable_server_is_one_message(daemon: Daemon) -> None:
    daemon.line.stop()
    policy = RetryPolicy(max_elapsed_s=0.1, first_wait_s=0.001)
    with Client(daemon.address, token=daemon.token, unary_retry=policy) as client, pytest.raises(Unavailable) as caught:
        client.node.status()
    assert f"cannot reach horizond at {daemon.address}: nothing listens there" in caught.value.message


def test_retry_info_is_respected() -> None:
    backoff = Backoff(RetryPolicy(first_wait_s=0.001, longest_wait_s=0.01, max_elapsed_s=10))
    wait_s = backoff.wait_s(Unavailable("later", retry_after_s=4.0))
    assert wait_s is not None
    assert wait_s >= 4.0
    assert backoff.wait_s(Unavailable("much later", retry_after_s=11.0)) is None


def test_retry_info_of_the_server_arrives(client: Client, daemon: Daemon) -> None:
    daemon.line.refuse("ResumeJob", "UNAVAILABLE", "draining", reason="DRAINING", retry_after_s=7)
    with pytest.raises(Unavailable) as caught:
        client.jobs.resume("x")
    assert caught.value.retry_after_s == 7.0


def test_backoff_grows_and_forgets() -> None:
    policy = RetryPolicy(max_attempts=100, first_wait_s=1.0, longest_wait_s=8.0, max_elapsed_s=1000)
    backoff = Backoff(policy)
    problem = Unavailable("x")
    waits = [backoff.wait_s(problem) or 0.0 for _ in range(6)]
    assert 0.75 <= waits[0] <= 1.25
    assert all(6.0 <= wait <= 10.0 for wait in waits[3:])
    backoff.succeeded()
    assert (backoff.wait_s(problem) or 9.0) <= 1.25


def test_closed_client_says_so(daemon: Daemon) -> None:
    client = Client(daemon.address, token=daemon.token)
    client.close()
    client.close()
    with pytest.raises(RuntimeError, match="closed"):
        client.node.status()


def test_abandoned_client_leaves_no_thread(daemon: Daemon) -> None:
    import gc
    import threading

    client = Client(daemon.address, token=daemon.token)
    client.node.status()
    del client
    gc.collect()
    deadline = time.monotonic() + 60
    while any(t.name == "horizon-client" for t in threading.enumerate()):
        assert time.monotonic() < deadline
