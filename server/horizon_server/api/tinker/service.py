"""What a client asks first: its settings, a session, what there is; and what is not served here."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field

from horizon_server.api.audited import Asked
from horizon_server.api.openai.bodies import read_body
from horizon_server.api.services import Services
from horizon_server.api.tinker.calls import Body, Calling, Changing, notes_of
from horizon_server.api.tinker.futures import MAX_WAITING
from horizon_server.errors import HorizonError, InvalidSpec, NotFound
from horizon_server.records.account import Principal
from horizon_server.services.tinker.models import TOKENS_PER_CALL
from horizon_server.services.tinker.names import new_session, require_own
from horizon_server.store.adapter_files import PEFT_LORA

router = APIRouter(prefix="/api/v1")
unserved = APIRouter(prefix="/api/v1")
"""After all others."""

MAX_MODELS = 200
"""Bases that get_server_capabilities lists, the newest."""
_BYTES_PER_TOKEN = 12
"""The fewest that the SDK counts for a token of a document and its target."""
_CONFIG = {
    "pjwt_auth_enabled": False,
    "credential_default_source": "api_key",
    # Few are sent at the same time, as each would be on a connection of its own too.
    "sample_dispatch_bytes_semaphore_size": 512,
    "inflight_response_bytes_semaphore_size": 50 * 2**20,
    # The calls of a model are done in the order in which they come.
    "parallel_fwdbwd_chunks": False,
    "proto_compress_fwdbwd": False,
    "fwdbwd_max_chunk_len": 1024,
    "fwdbwd_max_chunk_bytes_count": TOKENS_PER_CALL * _BYTES_PER_TOKEN,
    "fwdbwd_dispatch_bytes_semaphore_size": 50_000_000,
    "billing_exception_max_pause_duration_sec": 0,
    "sample_no_retries": False,
    "sample_enable_stuck_detection": True,
    # Each waits on a connection of its own, of which a user may have 64 (`api.connections`).
    "sample_max_concurrent_requests": MAX_WAITING,
    "use_pyqwest_transport": True,
    "sample_use_retrieve_futures": False,
    "custom_loss_server_side": False,
    "sample_join_sampling_session": False,
}
_UNSERVED = {
    "auth/token": "there are no short-lived keys; use tml-TOKEN",
    "auth/apikey/me": "see: horizon whoami",
    "audit": "see: horizond audit",
    "billing/usage/events": "nothing is billed; see: horizon usage",
    "billing/usage/checkpoints/current": "nothing is billed; see: horizon usage",
    "copy_weights": "checkpoints are not copied between projects; create a model from the checkpoint",
    "create_custom_loss": "custom losses are computed by the client",
    "join_sampling_session": "copies of a sampling client number their samples themselves",
    "retrieve_futures": "each sample is fetched with retrieve_future",
    "sessions/search": "see: GET /api/v1/sessions",
    "sessions/*/project": "a session belongs to no project; its models do: user_metadata horizon.project",
    "sessions/*/trace_export": "there are no traces of sessions",
    "unload_model": "a model gives its memory back when it is not called; finish its session to end it",
}


class ConfigBody(Body):
    """Asks for the settings of a client."""

    sdk_version: str = Field(max_length=100)


class SessionBody(Body):
    """Opens a session. Tags, notes and names of a session are not kept: those of its models are."""

    tags: tuple[str, ...] = ()
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = Field(default="", max_length=100)
    project_id: str | None = None
    display_name: str | None = None


class HeartbeatBody(Body):
    """Says that a client is still there."""

    session_id: str


class FinishReason(Body):
    """How a program has ended."""

    type: Literal["success", "errored", "interrupted"]


class FinishBody(Body):
    """Ends a session."""

    reason: FinishReason
    detail: str | None = None


@router.get("/healthz")
async def healthz(_change: Calling) -> dict[str, str]:
    """Say that the server answers."""
    return {"status": "ok"}


@router.post("/client/config")
async def client_config(_change: Calling, request: Request) -> dict[str, Any]:
    """Say how a client should behave here."""
    await read_body(request, ConfigBody)
    return _CONFIG


@router.post("/client/dynamic_config")
async def client_dynamic_config(_change: Calling, request: Request) -> dict[str, Any]:
    """Say what of it may change while the client runs."""
    await read_body(request, ConfigBody)
    return {"refresh_interval_sec": 3600, "sample_cancel_enabled": True, "sample_cancel_max_batch_size": 16}


@router.post("/telemetry")
async def telemetry(_change: Calling, request: Request) -> dict[str, str]:
    """Take what the SDK tells of itself, and drop it."""
    await request.body()
    return {"status": "accepted"}


@router.get("/get_server_capabilities")
async def get_server_capabilities(change: Calling) -> dict[str, Any]:
    """List the newest bases that the caller may use."""
    page, _ = await change.services.models.list(change.caller, page_size=MAX_MODELS)
    bases = [record.name for record in page if record.ready and record.architecture != PEFT_LORA]
    found = [await _supported(change.services, change.caller, name) for name in dict.fromkeys(bases)]
    return {"supported_models": [one for one in found if one]}


async def _supported(services: Services, caller: Principal, name: str) -> dict[str, Any]:
    try:
        longest = await services.tinker_models.longest(caller, name)
    except HorizonError:  # deleted meanwhile, or several of other users have the name
        return {}
    return {"model_name": name, "max_context_length": longest, "trainable": True, "sampleable": True}


@router.post("/create_session")
async def create_session(change: Calling, request: Request) -> dict[str, Any]:
    """Begin a session: the name that its models have in common."""
    body = await read_body(request, SessionBody)
    if body.project_id is not None:
        raise InvalidSpec.of(
            "project_id", "project_id is not for here: a model names its project in user_metadata, as horizon.project"
        )
    notes_of(body.user_metadata)
    return {"type": "create_session", "session_id": new_session(change.caller)}


@router.post("/session_heartbeat")
async def session_heartbeat(change: Calling, request: Request) -> dict[str, str]:
    """Note nothing: a session is written home when it is not called, and a program that ends loses nothing."""
    require_own(change.caller, (await read_body(request, HeartbeatBody)).session_id)
    return {"type": "session_heartbeat"}


@router.post("/sessions/{session_id}/finish")
async def finish_session(change: Changing, request: Request, session_id: str) -> None:
    """Close the models of a session; their checkpoints stay."""
    body = await read_body(request, FinishBody)
    require_own(change.caller, session_id)
    asked = Asked(resource=session_id, values={"finish": body.reason.type})
    work = partial(change.services.tinker_models.finish, change.caller, session_id)
    await change.carry_out("SessionService/CallSession", asked, work, lambda _: "")


@unserved.api_route("/{path:path}", methods=["GET", "POST", "PUT", "DELETE"])
async def refuse(_change: Calling, path: str) -> None:
    """Say of a path of Tinker's that nothing here is meant by it, and what there is instead."""
    whys = (why for pattern, why in _UNSERVED.items() if fnmatchcase(path, pattern))
    raise NotFound(f"/api/v1/{path:.200} is not served here{': ' if (why := next(whys, '')) else ''}{why}")
