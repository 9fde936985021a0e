"""`client.housekeeping`: delete datasets, models, jobs and checkpoints, one or many, and keep what would be deleted."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from datetime import timedelta

from google.protobuf.duration_pb2 import Duration

from horizon_client.connection import Connection
from horizon_client.conversion import enum_choices, enum_number, from_message
from horizon_client.errors import InvalidRequest
from horizon_client.resources import Deletion, Job
from horizon_proto.v1 import housekeeping_pb2, job_pb2


class AsyncHousekeeping:
    """`client.housekeeping`: deletions."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def delete(
        self,
        kind: str,
        keys: Sequence[str] = (),
        *,
        states: Iterable[str] = (),
        older_than: timedelta | None = None,
        owner: str = "",
        dry_run: bool = False,
    ) -> AsyncIterator[Deletion]:
        """Delete datasets, models, jobs or checkpoints one after the other; yield each when it is deleted, or refused
        with the reason.

        `kind` is dataset, model, job or checkpoint. `keys` are names or ids; of checkpoints JOB@STEP, or JOB for all of
        a job. `states` and `older_than` narrow what the keys mean; without keys, they select from what you own, or from
        what `owner` owns, for admins. With `dry_run` nothing is deleted.

        Raises:
            NotFound: when a key means nothing; nothing is deleted then.
            InvalidRequest: when nothing is named.
        """
        choices = enum_choices(job_pb2.JobState.DESCRIPTOR)
        states = list(states)
        for state in states:
            if state.lower() not in choices:
                raise InvalidRequest.of("states", f"state is {state!r}; it must be one of {', '.join(choices)}")
        age = None
        if older_than is not None:
            age = Duration()
            age.FromTimedelta(older_than)
        request = housekeeping_pb2.DeleteRequest(
            kind=enum_number(housekeeping_pb2.ResourceKind, "kind", kind),
            keys=keys,
            states=[job_pb2.JobState.ValueType(choices[state.lower()]) for state in states],
            older_than=age,
            owner=owner,
            dry_run=dry_run,
        )
        # No limit between two answers: the files of one job may take minutes to remove
        async for answer in self._connection.stream(self._connection.calls.housekeeping.Delete, request, stall_s=None):
            yield from_message(Deletion, answer.deletion)

    async def keep(self, job: str) -> Job:
        """Keep the checkpoints of an ended job from being deleted automatically, also where that is announced
        already."""
        request = housekeeping_pb2.KeepJobRequest(job_id=job)
        answer = await self._connection.unary(self._connection.calls.housekeeping.KeepJob, request)
        return from_message(Job, answer.job)
