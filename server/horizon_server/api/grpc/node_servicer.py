"""NodeService on the wire."""

from __future__ import annotations

from typing import Any

from horizon_proto.v1 import node_pb2, node_pb2_grpc
from horizon_server.api.grpc.convert import to_message
from horizon_server.api.grpc.interceptor import caller
from horizon_server.services.node import NodeFacts


class NodeServicer(node_pb2_grpc.NodeServiceServicer):
    """Describes the machine."""

    def __init__(self, node: NodeFacts) -> None:
        self._node = node

    async def GetNode(self, request: node_pb2.GetNodeRequest, context: Any) -> node_pb2.GetNodeResponse:
        return node_pb2.GetNodeResponse(node=to_message(await self._node.describe(caller()), node_pb2.Node))
