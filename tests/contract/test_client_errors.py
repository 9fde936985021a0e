"""Every error that the server answers is a class of the same name in the client, found by its reason."""

from __future__ import annotations

import copy

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc.aio import AioRpcError, Metadata

import horizon_client
from horizon_client import HorizonClientError
from horizon_client.rpc_errors import from_rpc
from horizon_formats.error_table import ERRORS
from horizon_server import errors
from horizon_server.errors import NotFound


@pytest.mark.parametrize("name", ERRORS)
def test_a_server_error_arrives_under_its_own_name(name: str) -> None:
    kind = getattr(errors, name)
    code = grpc.StatusCode[kind.status.grpc]
    status = status_pb2.Status(code=code.value[0], message="it failed")
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=kind.reason, domain="horizon"))
    trailing = Metadata(("grpc-status-details-bin", status.SerializeToString()))
    arrived = from_rpc(
        AioRpcError(code, Metadata(), trailing, details="it failed", debug_error_string=None), "gpubox:7171"
    )
    ours = getattr(horizon_client, name)
    assert issubclass(ours, HorizonClientError)
    assert (type(arrived), arrived.reason, arrived.message) == (ours, kind.reason, "it failed")
    assert (ours.reason, ours.exit_code) == (kind.reason, kind.status.exit_code)


def test_damaged_details_still_give_an_error() -> None:
    trailing = Metadata(("grpc-status-details-bin", b"\xff\xff\xff"))
    error = AioRpcError(
        grpc.StatusCode.NOT_FOUND, Metadata(), trailing, details="no such thing", debug_error_string=None
    )
    assert isinstance(from_rpc(error, "gpubox:7171"), horizon_client.NotFound)


def test_what_was_named_survives_a_copy() -> None:
    error = copy.copy(NotFound.named("job", "x"))  # by __reduce__, as pickle does
    assert (error.kind, error.name, error.message) == (
        "job",
        "x",
        "job 'x' does not exist, or is not yours; see: horizon job list",
    )
    assert copy.copy(NotFound("gone")).kind == ""
