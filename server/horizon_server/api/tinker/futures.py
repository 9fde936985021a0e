"""Futures: the name of a call and its number, or of a sample; each is asked for until it is there."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from horizon_server.api.openai.answers import unless_gone
from horizon_server.api.openai.bodies import read_body
from horizon_server.api.services import Services
from horizon_server.api.tinker.calls import Body, Calling, short
from horizon_server.api.tinker.errors import body_of
from horizon_server.api.tinker.messages import forward_backward_output
from horizon_server.errors import Draining, HorizonError, NotFound, TooManyCalls, WrongJobState
from horizon_server.records.account import Principal
from horizon_server.records.job import JobState
from horizon_server.records.session import CallFailed, Computed, Loaded, Result, Saved, Stepped
from horizon_server.services.tinker.drawing import error_of
from horizon_server.services.tinker.names import CheckpointName, ModelName, Target, sampler_id

router = APIRouter(prefix="/api/v1")

MAX_WAIT_S = 40.0
"""Of one question; the SDK asks again, and gives up the connection after 45."""
MAX_WAITING = 40
"""Questions of a user that wait at the same time, each on a connection: the SDK asks again after a while where there
are more."""
_PROTOBUF = "application/x-protobuf"
_GONE = 410
"""The SDK sends a sample anew after it."""
_RESULTS: dict[str, type[Result]] = {
    "computed": Computed,
    "stepped": Stepped,
    "saved": Saved,
    "unnamed": Saved,
    "loaded": Loaded,
}


@dataclass(frozen=True, kw_only=True)
class Future:
    """What a call will answer: `what` it is, of which model, and its number in the session."""

    what: str
    model_id: str
    number: int
    name: str = ""
    """What else is answered: a path, or a sampling client."""

    @classmethod
    def parse(cls, text: str) -> Future:
        """Raises NotFound."""
        what, _, rest = text.partition("/")
        model_id, _, rest = rest.partition("/")
        number, _, name = rest.partition("/")
        if not (number.isascii() and number.isdecimal() and len(number) <= 12) or what not in (
            *_RESULTS,
            "model",
            "sampler",
        ):
            raise NotFound(f"future {text!r:.200} does not exist, or is not yours")
        return cls(what=what, model_id=model_id, number=int(number), name=name)

    @property
    def request_id(self) -> str:
        """Its id."""
        return f"{self.what}/{self.model_id}/{self.number}/{self.name}"

    def body(self) -> dict[str, Any]:
        """Return what the call answers at once."""
        return {"request_id": self.request_id, "model_id": self.model_id}


class RetrieveBody(Body):
    """Asks for the result of a future."""

    request_id: str
    allow_metadata_only: bool = False


class CancelBody(Body):
    """Says that nobody waits for a sample any more."""

    request_id: str


@router.post("/retrieve_future", response_model=None)
async def retrieve_future(change: Calling, request: Request) -> Response | dict[str, Any]:
    """Return the result, after a wait, or that it is not there yet."""
    body = await read_body(request, RetrieveBody)
    request_id = short(body.request_id, "request_id")
    future = None if request_id.startswith("sample/") else Future.parse(request_id)
    with _waiting(request.app.state.tinker_waiting, change.caller.name):
        if future is None:
            return await unless_gone(request, _sample(change.services, change.caller, request_id))
        return await unless_gone(request, _retrieved(change.services, change.caller, future))


@router.post("/cancel_future")
async def cancel_future(change: Calling, request: Request) -> None:
    """Forget a sample."""
    body = await read_body(request, CancelBody)
    change.services.tinker_samples.cancel(change.caller.name, short(body.request_id, "request_id"))


@contextmanager
def _waiting(num_of_user: Counter[str], name: str) -> Iterator[None]:
    """Count the block as a question that waits. Raises TooManyCalls."""
    if num_of_user[name] >= MAX_WAITING:
        raise TooManyCalls(f"{name} waits for {MAX_WAITING} results, the maximum; ask again later", retry_after_s=1.0)
    num_of_user[name] += 1
    try:
        yield
    finally:
        num_of_user[name] -= 1
        if not num_of_user[name]:
            del num_of_user[name]


async def _sample(services: Services, caller: Principal, request_id: str) -> Response | dict[str, Any]:
    try:
        drawn = await services.tinker_samples.result(caller.name, request_id, MAX_WAIT_S)
    except (KeyError, Draining):
        return JSONResponse(
            {"error": "the sample is not kept any more; ask again", "category": "server", "code": "gone"},
            status_code=_GONE,
        )
    except HorizonError as error:
        return body_of(error)
    if drawn is None:
        return _try_again(request_id, "active", "")
    return Response(drawn, media_type=_PROTOBUF)


async def _retrieved(services: Services, caller: Principal, future: Future) -> Response | dict[str, Any]:
    job = await services.tinker_models.find(caller, future.model_id)
    if future.what == "model":
        return {"type": "create_model", "model_id": future.model_id}
    if future.what == "sampler":
        return {"type": "save_weights_for_sampler", "sampling_session_id": future.name}
    try:
        result = await services.sessions.result(caller, job.job_id, future.number, wait_s=MAX_WAIT_S)
    except WrongJobState as error:
        return body_of(error)
    if result is None:
        now = await services.tinker_models.find(caller, future.model_id)
        waits = now.job_state not in (JobState.RUNNING, JobState.STOPPING)
        why = now.outlook.why if waits and now.outlook is not None else now.message if waits else ""
        return _try_again(future.request_id, "paused_capacity" if waits else "active", why)
    if isinstance(result, CallFailed):
        body = body_of(error_of(result))
        if future.what == "saved":
            # The program's own name, without its kind.
            name = CheckpointName.parse(future.name)
            body["error"] = body["error"].replace(name.stored, name.name)
        return body
    if not isinstance(result, _RESULTS[future.what]):
        raise NotFound(f"future {future.request_id!r:.200} does not exist, or is not yours")
    return _answer(future, result)


def _try_again(request_id: str, state: str, why: str) -> dict[str, Any]:
    return {
        "type": "try_again",
        "request_id": request_id,
        "queue_state": state,
        "queue_state_reason": why or None,
    }


def _answer(future: Future, result: Result) -> Response | dict[str, Any]:
    match result:
        case Computed():
            return Response(forward_backward_output(result), media_type=_PROTOBUF)
        case Stepped():
            metrics = {"step": float(result.step), "skipped": float(bool(result.skipped))}
            if math.isfinite(result.grad_norm):
                metrics["grad_norm"] = result.grad_norm
            return {"metrics": metrics}
        case Loaded():
            return {"type": "load_weights", "model_id": future.model_id}
        case Saved() if future.what == "unnamed":
            if not (future.name.isdecimal() and len(future.name) <= 9):
                raise NotFound(f"future {future.request_id!r:.200} does not exist, or is not yours")
            target = Target(model=future.model_id, step=int(result.checkpoint.rpartition("@")[2]))
            session = ModelName.parse(future.model_id).session
            return {
                "type": "save_weights_for_sampler",
                "sampling_session_id": sampler_id(session, int(future.name), target),
            }
        case _:
            return {"path": CheckpointName.parse(future.name).path}
