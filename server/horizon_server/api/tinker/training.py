"""The calls of a model: each is one of its session, in the order of the program's numbers, and answers with a
future."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field

from horizon_server.api.audited import Asked
from horizon_server.api.http.changes import Change
from horizon_server.api.openai.bodies import read_body
from horizon_server.api.tinker.calls import Body, Calling, Changing, SequencedBody, notes_of, require_sequence, short
from horizon_server.api.tinker.futures import Future
from horizon_server.api.tinker.messages import read_forward_backward, with_names_of_tinker
from horizon_server.errors import InvalidData, InvalidSpec
from horizon_server.records.session import Call, OptimStep, SaveState
from horizon_server.services.tinker.models import Adapters
from horizon_server.services.tinker.names import (
    CheckpointName,
    Kind,
    ModelName,
    Target,
    checkpoint_name,
    require_own,
    sampler_id,
)
from horizon_server.spec.lora import MAX_RANK
from horizon_server.spec.training import LORA

router = APIRouter(prefix="/api/v1")

ADAM = {"type": "adamw"}
_PROTOBUF = "application/x-protobuf"
_CALL = "SessionService/CallSession"


class OptimizerConfig(Body):
    """The optimizer of a model."""

    version: int | None = None


class LoraConfig(Body):
    """What the adapters of a model are; rank 0 trains all parameters."""

    rank: int = Field(ge=0, le=MAX_RANK)
    seed: int | None = Field(default=None, ge=0, le=2**63 - 1)
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class CreateBody(Body):
    """Makes a model."""

    session_id: str
    model_seq_id: int = Field(ge=0, lt=10**6)
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig | None = None


class LoadBody(Body):
    """Loads weights into a model, or makes one with them."""

    path: str
    optimizer: bool
    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = Field(default=None, ge=0, lt=10**6)
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: str | None = None


class InfoBody(Body):
    """Asks what a model is."""

    model_id: str


class AdamParams(Body):
    """A step of Adam."""

    learning_rate: float = 0.0001
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class StepBody(SequencedBody):
    """A step of the optimizer."""

    adam_params: AdamParams | None = None
    optimizer_params: dict[str, Any] | None = None


class SaveBody(SequencedBody):
    """Writes a checkpoint. It stays until it is deleted, whatever ttl_seconds says; notes of it are not kept."""

    path: str | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, Any] | None = None


class SaveSamplerBody(SequencedBody):
    """Writes a checkpoint for sampling clients; without a name for one of them."""

    path: str | None = None
    sampling_session_seq_id: int | None = Field(default=None, ge=0, lt=10**9)
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: int | None = None
    user_metadata: dict[str, Any] | None = None


class SaveExternalBody(SequencedBody):
    """Writes a checkpoint to download."""

    path: str
    ttl_seconds: int | None = None
    age_encryption_recipients: list[str] | None = None


@router.post("/create_model")
async def create_model(change: Changing, request: Request) -> dict[str, Any]:
    """Open a session for a model. The same request again is the same model."""
    body = await read_body(request, CreateBody)
    require_own(change.caller, body.session_id)
    _require_adam(body.optimizer_config)
    name = ModelName(session=body.session_id, number=body.model_seq_id)
    adapters = None
    if body.lora_config is not None:
        adapters = Adapters(**body.lora_config.model_dump(exclude={"type"}))
    notes = notes_of(body.user_metadata)
    create = partial(change.services.tinker_models.create, change.caller, name, body.base_model, adapters, notes)
    await change.carry_out("JobService/SubmitJob", Asked(resource=name.job_name), create, lambda job: job.job_id)
    return Future(what="model", model_id=name.text, number=0).body()


@router.post("/load_weights")
async def load_weights(change: Changing, request: Request) -> dict[str, Any]:
    """Have a model take the weights of a checkpoint, or make one that begins with them."""
    body = await read_body(request, LoadBody)
    _require_adam(body.optimizer_config)
    if body.weights_access_token is not None:
        raise InvalidSpec.of(
            "weights_access_token", "weights_access_token is not for here; its owner shares the project of a model"
        )
    models, path = change.services.tinker_models, short(body.path, "path")
    if body.session_id is not None and body.model_seq_id is not None and body.model_id is None:
        require_own(change.caller, body.session_id)
        name = ModelName(session=body.session_id, number=body.model_seq_id)
        begin = partial(
            models.create_from,
            change.caller,
            name,
            path,
            optimizer=body.optimizer,
            base=body.base_model or "",
            notes=notes_of(body.user_metadata),
        )
        asked = Asked(resource=name.job_name, values={"checkpoint": path})
        number = await change.carry_out("JobService/SubmitJob", asked, begin, lambda _: "")
        return Future(what="loaded", model_id=name.text, number=number).body()
    if body.model_id is None or body.session_id is not None:
        raise InvalidSpec.of("model_id", "either model_id and seq_id, or session_id and model_seq_id are required")
    sequence = require_sequence(body.seq_id)
    load = partial(models.load, change.caller, body.model_id, path, optimizer=body.optimizer, sequence=sequence)
    asked = Asked(resource=body.model_id, values={"checkpoint": path})
    number = await change.carry_out(_CALL, asked, load, lambda _: "")
    return Future(what="loaded", model_id=body.model_id, number=number).body()


@router.post("/get_info")
async def get_info(change: Calling, request: Request) -> dict[str, Any]:
    """Say what a model is."""
    body = await read_body(request, InfoBody)
    job = await change.services.tinker_models.find(change.caller, body.model_id)
    train, base = job.spec.train, job.spec.model
    is_lora = train.trainable == LORA
    return {
        "type": "get_info",
        "model_id": body.model_id,
        "model_name": base,
        "model_data": {"arch": None, "model_name": base, "tokenizer_id": base},
        "optimizer_config": ADAM,
        "is_lora": is_lora,
        "lora_rank": train.lora.rank if is_lora else None,
    }


@router.post("/forward_backward")
async def forward_backward(change: Calling, request: Request) -> dict[str, Any]:
    """Compute a loss, and its gradient where it is not forward_only."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != _PROTOBUF or request.headers.get("content-encoding", "identity") != "identity":
        raise InvalidSpec.of("Content-Type", f"Content-Type must be {_PROTOBUF}, without a Content-Encoding")
    content = await request.body()
    model_id, seq_id, call = await asyncio.to_thread(read_forward_backward, content)
    try:
        return await _called(change, model_id, require_sequence(seq_id), call, "computed")
    except InvalidData as error:
        raise with_names_of_tinker(error) from error


@router.post("/optim_step")
async def optim_step(change: Calling, request: Request) -> dict[str, Any]:
    """Change the weights with the gradients since the last step."""
    body = await read_body(request, StepBody)
    if body.optimizer_params is not None:
        raise InvalidSpec.of(
            "optimizer_params",
            f"the optimizer {body.optimizer_params.get('type')!r:.40} is not here; use AdamParams",
        )
    params = body.adam_params or AdamParams()
    step = OptimStep(
        learning_rate=params.learning_rate,
        beta1=params.beta1,
        beta2=params.beta2,
        eps=params.eps,
        weight_decay=params.weight_decay,
        max_grad_norm=params.grad_clip_norm,
    )
    return await _called(change, body.model_id, body.sequence, step, "stepped")


@router.post("/save_weights")
async def save_weights(change: Calling, request: Request) -> dict[str, Any]:
    """Write a checkpoint that can be loaded."""
    body = await read_body(request, SaveBody)
    return await _saved(change, body, "training", body.path, overwrites=body.overwrite)


@router.post("/save_weights_for_sampler")
async def save_weights_for_sampler(change: Calling, request: Request) -> dict[str, Any]:
    """Write a checkpoint that sampling clients ask; or for one of them, which is made with it."""
    body = await read_body(request, SaveSamplerBody)
    if body.path is not None:
        return await _saved(change, body, "sampler", body.path, overwrites=False)
    if body.sampling_session_seq_id is None:
        raise InvalidSpec.of("path", "path or sampling_session_seq_id is required")
    model = ModelName.parse(body.model_id)
    require_own(change.caller, model.session)
    models = change.services.tinker_models
    job = await models.find(change.caller, body.model_id)
    if body.kind == "inflight":
        # Its samples are calls that come after those before it.
        sampler = sampler_id(model.session, body.sampling_session_seq_id, Target(model=body.model_id))
        return Future(what="sampler", model_id=body.model_id, number=0, name=sampler).body()
    number = await models.save_unnamed(change.caller, job, body.sequence)
    name = str(body.sampling_session_seq_id)
    return Future(what="unnamed", model_id=body.model_id, number=number, name=name).body()


@router.post("/save_weights_external")
async def save_weights_external(change: Calling, request: Request) -> dict[str, Any]:
    """Write a checkpoint whose files can be downloaded: a model folder, or an adapter as PEFT has them."""
    body = await read_body(request, SaveExternalBody)
    if body.age_encryption_recipients:
        raise InvalidSpec.of("age_encryption_recipients", "age_encryption_recipients: files are not encrypted here")
    return await _saved(change, body, "external", body.path, overwrites=False)


async def _saved(
    change: Change, body: SequencedBody, kind: Kind, path: str | None, *, overwrites: bool
) -> dict[str, Any]:
    name = CheckpointName(model=ModelName.parse(body.model_id), kind=kind, name=checkpoint_name(path))
    call = SaveState(name=name.stored, taken="moved" if overwrites else "refused")
    return await _called(change, body.model_id, body.sequence, call, "saved", name=name.path)


async def _called(
    change: Change, model_id: str, sequence: int, call: Call, what: str, *, name: str = ""
) -> dict[str, Any]:
    job = await change.services.tinker_models.find(change.caller, model_id)
    number = await change.services.sessions.call(change.caller, job.job_id, call, sequence=sequence)
    return Future(what=what, model_id=model_id, number=number, name=name).body()


def _require_adam(config: OptimizerConfig | None) -> None:
    if config is not None and config.type != "adamw":
        raise InvalidSpec.of("optimizer_config.type", f"the optimizer {config.type!r:.40} is not here; only adamw is")
