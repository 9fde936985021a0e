"""`AsyncClient`, and `client.node`. The blocking `Client` is generated from the async classes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import datetime
from types import MappingProxyType
from typing import Any

from horizon_client.account import AsyncAccounts
from horizon_client.checkpoints import AsyncCheckpoints
from horizon_client.connection import STREAM_RETRY, UNARY_RETRY, Connection, RetryPolicy
from horizon_client.conversion import enum_choices, from_message
from horizon_client.errors import InvalidRequest
from horizon_client.housekeeping import AsyncHousekeeping
from horizon_client.jobs import AsyncJobs
from horizon_client.profiles import resolve_endpoint
from horizon_client.pushed import AsyncDatasets, AsyncModels
from horizon_client.reporter import SILENT, Reporter
from horizon_client.resources import Node
from horizon_client.sessions import AsyncSession, session_spec
from horizon_client.sharing import AsyncSharing, timestamp
from horizon_client.webhooks import AsyncWebhooks
from horizon_proto.v1 import node_pb2


class AsyncNodeInfo:
    """`client.node`: the machine that the daemon runs on, and whether jobs start on it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def status(self) -> Node:
        """Return the node's hardware, free memory, jobs, and the caller's user and role."""
        answer = await self._connection.unary(self._connection.calls.node.GetNode, node_pb2.GetNodeRequest())
        return from_message(Node, answer.node)

    async def set_mode(self, mode: str, *, message: str = "") -> Node:
        """Open, cordon or drain the node: `open`, `cordoned` or `drained`. A maintenance window stays. For admins.

        `message` is shown to everybody whose jobs wait for the node.

        Raises:
            NotAllowed: when you are not an admin.
        """
        choices = enum_choices(node_pb2.NodeMode.DESCRIPTOR)
        if mode not in choices:
            raise InvalidRequest.of("mode", f"mode is {mode!r}; it must be one of {', '.join(choices)}")
        condition = await self._condition()
        condition.mode, condition.message = node_pb2.NodeMode.ValueType(choices[mode]), message
        return await self._set(condition)

    async def set_maintenance(self, start: datetime, end: datetime, *, message: str = "") -> Node:
        """Drain the node from one time to another, and open it again after that. Replaces an earlier window. For
        admins.

        Raises:
            NotAllowed: when you are not an admin.
        """
        condition = await self._condition()
        condition.window_start_time.CopyFrom(timestamp(start))
        condition.window_end_time.CopyFrom(timestamp(end))
        condition.message = message
        return await self._set(condition)

    async def cancel_maintenance(self) -> Node:
        """Remove the maintenance window. For admins."""
        condition = await self._condition()
        for field in ("window_start_time", "window_end_time", "message"):
            condition.ClearField(field)
        return await self._set(condition)

    async def withdraw(self, device: str) -> Node:
        """Take a device out of service: jobs leave it at the end of a step, and none uses it. For admins.

        Raises:
            InvalidRequest: when the node has no device of that name.
            NotAllowed: when you are not an admin.
        """
        condition = await self._condition()
        if device not in condition.withdrawn:
            condition.withdrawn.append(device)
        return await self._set(condition)

    async def restore(self, device: str) -> Node:
        """Put a device into service again that was withdrawn, or that has failed. For admins.

        Raises:
            InvalidRequest: when the device is in service, or the node has none of that name.
            NotAllowed: when you are not an admin.
        """
        node = await self.status()
        if not (out := [one.name for one in node.devices if one.out_of_service]).count(device):
            raise InvalidRequest.of("device", f"device is {device!r}; out of service are: {', '.join(out) or 'none'}")
        condition = await self._condition()
        if device in condition.withdrawn:
            condition.withdrawn.remove(device)
        return await self._set(condition)

    async def _condition(self) -> node_pb2.NodeCondition:
        answer = await self._connection.unary(self._connection.calls.node.GetNode, node_pb2.GetNodeRequest())
        return answer.node.condition

    async def _set(self, condition: node_pb2.NodeCondition) -> Node:
        request = node_pb2.SetNodeRequest(condition=condition)
        answer = await self._connection.unary(self._connection.calls.node.SetNode, request)
        return from_message(Node, answer.node)


class AsyncClient:
    """A connection to one daemon, opened by the first call and closed by `close` or by leaving the `with` block.

    What is not given comes from the environment (HORIZON_SERVER, HORIZON_TOKEN, HORIZON_CA, HORIZON_PROFILE), then from
    the profile that `horizon login` wrote. While the daemon is away, as during its restart, calls wait for it:
    `unary_retry` limits for how long, and `reporter` receives a notice.

    Raises:
        BadConfig: when no server is known, or when the connection would be plain text to another machine.
    """

    def __init__(
        self,
        server: str | None = None,
        *,
        token: str | None = None,
        ca_file: str | os.PathLike[str] | None = None,
        client_cert: str | os.PathLike[str] | None = None,
        client_key: str | os.PathLike[str] | None = None,
        profile: str | None = None,
        unary_retry: RetryPolicy = UNARY_RETRY,
        stream_retry: RetryPolicy = STREAM_RETRY,
        reporter: Reporter = SILENT,
    ) -> None:
        endpoint = resolve_endpoint(
            server,
            token=token,
            ca_file=None if ca_file is None else os.fspath(ca_file),
            client_cert=None if client_cert is None else os.fspath(client_cert),
            client_key=None if client_key is None else os.fspath(client_key),
            profile=profile,
        )
        self._connection = Connection(endpoint, unary_retry=unary_retry, stream_retry=stream_retry, reporter=reporter)
        self.server = endpoint.server
        self.datasets = AsyncDatasets(self._connection)
        self.models = AsyncModels(self._connection)
        self.jobs = AsyncJobs(self._connection, self.datasets, self.models)
        self.checkpoints = AsyncCheckpoints(self._connection)
        self.node = AsyncNodeInfo(self._connection)
        self.sharing = AsyncSharing(self._connection)
        self.housekeeping = AsyncHousekeeping(self._connection)
        self.account = AsyncAccounts(self._connection)
        self.webhooks = AsyncWebhooks(self._connection)

    def session(
        self,
        model: str = "",
        *,
        name: str = "session",
        lora: Mapping[str, Any] | None = None,
        max_tokens: int = 1024,
        max_tokens_per_call: int = 16384,
        idle_minutes: float = 15.0,
        spec: Mapping[str, Any] = MappingProxyType({}),
        attach: str = "",
        reporter: Reporter = SILENT,
    ) -> AsyncSession:
        """A session on `model`, for a block of `async with`: every weight is trained, or adapters where `lora`
        gives their options, such as {"rank": 16}.

        The node plans its memory for documents of `max_tokens` tokens, and `max_tokens_per_call` in one call. After
        `idle_minutes` without a call it gives its memory back; the next call brings it back. `spec` has further fields
        of the job spec. `attach` continues the session of that id or name instead.
        """
        made = session_spec(
            model,
            name=name,
            lora=lora,
            max_tokens=max_tokens,
            max_tokens_per_call=max_tokens_per_call,
            idle_minutes=idle_minutes,
            spec=spec,
        )
        return AsyncSession(self._connection, self.jobs, made, attach=attach, reporter=reporter)

    async def close(self) -> None:
        """Close the connection."""
        await self._connection.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *leaving: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"AsyncClient({self.server!r})"
