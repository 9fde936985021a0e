"""`client.node`: the machine the daemon runs on."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from horizon_client.connection import Connection
from horizon_client.conversion import from_message
from horizon_client.resources import Node
from horizon_proto.v1 import node_pb2
from horizon_proto.v1.node_pb2_grpc import NodeServiceStub

if TYPE_CHECKING:
    from horizon_proto.v1.node_pb2_grpc import NodeServiceAsyncStub


class AsyncNode:
    """The node and the caller's standing there."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def status(self) -> Node:
        """Return what the node is, how busy it is, and who the caller is to it."""
        stub = cast("NodeServiceAsyncStub", self._connection.stub(NodeServiceStub))
        return from_message(Node, (await self._connection.unary(stub.GetNode, node_pb2.GetNodeRequest())).node)
