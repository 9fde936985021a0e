"""`client.sharing`: who has used how much of the node, and what the caller may take."""

from __future__ import annotations

from datetime import datetime, timezone

from google.protobuf.timestamp_pb2 import Timestamp

from horizon_client.connection import Connection
from horizon_client.conversion import from_message
from horizon_client.resources import AllowanceUse, Usage
from horizon_proto.v1 import sharing_pb2


class AsyncSharing:
    """`client.sharing`: what was used, and weights and quotas."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def usage(self, *, since: datetime | None = None) -> list[Usage]:
        """Return what was used since a time, by project and user: your own, and everybody's for admins and viewers.

        `since` is an aware datetime; without it, the last 7 days count. The whole hour that it is in counts.
        """
        request = sharing_pb2.GetUsageRequest(since_time=None if since is None else timestamp(since))
        answer = await self._connection.unary(self._connection.calls.sharing.GetUsage, request)
        return [from_message(Usage, usage) for usage in answer.usages]

    async def quota(self) -> list[AllowanceUse]:
        """Return your weight and quotas and those of your project, and how much of each quota is used."""
        answer = await self._connection.unary(self._connection.calls.sharing.GetQuota, sharing_pb2.GetQuotaRequest())
        return [from_message(AllowanceUse, allowance) for allowance in answer.allowances]


def timestamp(moment: datetime) -> Timestamp:
    """Return a moment as the wire has it."""
    stamp = Timestamp()
    stamp.FromDatetime(moment.astimezone(timezone.utc))
    return stamp
