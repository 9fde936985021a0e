"""What there is: models, their checkpoints, and the files of those that were saved to be downloaded."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse

from horizon_server.api.audited import Asked
from horizon_server.api.http.middleware import Services, until_answered
from horizon_server.api.openai.bodies import read_body
from horizon_server.api.tinker.calls import Body, Calling, Changing, short
from horizon_server.api.tinker.training import ADAM
from horizon_server.blobs.concurrency import in_thread
from horizon_server.errors import InvalidSpec, NotAllowed, NotFound, Unauthenticated
from horizon_server.jobs.folders import NamedCheckpoint
from horizon_server.records.account import Principal
from horizon_server.records.job import JobRecord, JobState
from horizon_server.services.tinker.models import TinkerModels
from horizon_server.services.tinker.names import CheckpointName, ModelName, require_own
from horizon_server.spec.training import LORA
from horizon_server.store.checkpoint_parts import adapter_part, model_part

router = APIRouter(prefix="/api/v1")

MAX_PAGE = 1000
"""Of one list."""
MAX_DOWNLOADS = 64
"""Checkpoints that a user may download at the same time: of more, the oldest address ends."""
MAX_DOWNLOAD_S = 3600.0
"""How long an address of a file can be used."""
_LISTED_OF_RUN = 16
_PIECE_BYTES = 2**20
Limit = Annotated[int, Query(ge=1, le=MAX_PAGE)]
Offset = Annotated[int, Query(ge=0, le=10**9)]
Scope = Literal["owned", "accessible"]


class WeightsInfoBody(Body):
    """Asks what a checkpoint is."""

    tinker_path: str


class TtlBody(Body):
    """Says when a checkpoint is to go."""

    ttl_seconds: int | None = None


@dataclass(frozen=True, kw_only=True)
class _Download:
    """What an address with a secret gives: files of one checkpoint, to whom it was made for."""

    principal: Principal
    job_id: str
    step: int
    part: str
    files: frozenset[str]
    ends_s: float


def _page(limit: int, offset: int, total: int) -> dict[str, int]:
    return {"offset": offset, "limit": limit, "total_count": total}


def _time(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat()


def _checkpoint(name: CheckpointName, found: NamedCheckpoint) -> dict[str, Any]:
    return {
        "checkpoint_id": name.checkpoint_id,
        "checkpoint_type": name.kind,
        "time": _time(found.created_s),
        "tinker_path": name.path,
        "size_bytes": found.size_bytes,
        "public": False,
        "user_metadata": None,
        "expires_at": None,
    }


async def _run(models: TinkerModels, job: JobRecord) -> dict[str, Any]:
    found = await models.checkpoints(job, _LISTED_OF_RUN)
    newest = {name.kind: _checkpoint(name, one) for name, one in reversed(found)}
    name = ModelName.of_job(job.spec.name)
    assert name is not None, job.spec.name
    is_lora = job.spec.train.trainable == LORA
    return {
        "training_run_id": name.text,
        "base_model": job.spec.model,
        "model_owner": job.owner,
        "is_lora": is_lora,
        "lora_rank": job.spec.train.lora.rank if is_lora else None,
        "corrupted": job.job_state is JobState.FAILED,
        "last_request_time": _time(max(job.created_s, job.started_s, job.ended_s)),
        "last_checkpoint": newest.get("training"),
        "last_sampler_checkpoint": newest.get("sampler"),
        "user_metadata": dict(job.spec.metadata) or None,
    }


@router.get("/training_runs")
async def list_training_runs(
    change: Calling, limit: Limit = 20, offset: Offset = 0, access_scope: Scope = "owned", project_id: str = ""
) -> dict[str, Any]:
    """List the caller's newest models."""
    if project_id:
        raise InvalidSpec.of("project_id", "project_id is not for here; see: horizon job list --project")
    models = change.services.tinker_models
    found = await models.runs(change.caller)
    page = [await _run(models, job) for job in found[offset : offset + min(limit, 100)]]
    return {"training_runs": page, "cursor": _page(limit, offset, len(found))}


@router.get("/training_runs/{model_id}")
async def get_training_run(change: Calling, model_id: str, access_scope: Scope = "owned") -> dict[str, Any]:
    """Show one model."""
    models = change.services.tinker_models
    return await _run(models, await models.find(change.caller, model_id))


@router.get("/training_runs/{model_id}/checkpoints")
async def list_checkpoints(change: Calling, model_id: str) -> dict[str, Any]:
    """List the newest checkpoints of a model."""
    models = change.services.tinker_models
    found = await models.checkpoints(await models.find(change.caller, model_id))
    return {"checkpoints": [_checkpoint(name, one) for name, one in found], "cursor": None}


@router.get("/checkpoints")
async def list_user_checkpoints(change: Calling, limit: Limit = 100, offset: Offset = 0) -> dict[str, Any]:
    """List the checkpoints of the caller's newest models."""
    found = await change.services.tinker_models.all_checkpoints(change.caller)
    page = [_checkpoint(name, one) for name, one in found[offset : offset + limit]]
    return {"checkpoints": page, "cursor": _page(limit, offset, len(found))}


@router.get("/sessions")
async def list_sessions(
    change: Calling, limit: Limit = 20, offset: Offset = 0, access_scope: Scope = "owned"
) -> dict[str, Any]:
    """List the caller's sessions that have models, the newest first."""
    names = [ModelName.of_job(job.spec.name) for job in await change.services.tinker_models.runs(change.caller)]
    found = list(dict.fromkeys(name.session for name in names if name is not None))
    return {"sessions": found[offset : offset + limit]}


@router.get("/sessions/{session_id}")
async def get_session(change: Calling, session_id: str, access_scope: Scope = "owned") -> dict[str, Any]:
    """Show the models of a session."""
    require_own(change.caller, session_id)
    names = [
        ModelName.of_job(job.spec.name) for job in await change.services.tinker_models.runs(change.caller, session_id)
    ]
    runs = sorted((name.number, name.text) for name in names if name is not None)
    return {"training_run_ids": [text for _, text in runs], "sampler_ids": [], "user_metadata": None}


@router.post("/weights_info")
async def weights_info(change: Calling, request: Request) -> dict[str, Any]:
    """Say what a checkpoint can be loaded into."""
    body = await read_body(request, WeightsInfoBody)
    name = CheckpointName.parse(short(body.tinker_path, "tinker_path"))
    job, _ = await change.services.tinker_models.checkpoint(change.caller, name)
    lora, is_lora = job.spec.train.lora, job.spec.train.trainable == LORA
    targets = " ".join(lora.targets)
    both = targets == "all-linear"
    return {
        "base_model": job.spec.model,
        "optimizer_config": ADAM,
        "is_lora": is_lora,
        "lora_rank": lora.rank if is_lora else None,
        "train_unembed": False if is_lora else None,
        "train_mlp": both or "mlp" in targets if is_lora else None,
        "train_attn": both or "attn" in targets if is_lora else None,
    }


@router.delete("/training_runs/{model_id}/checkpoints/{kind}/{name}")
async def delete_checkpoint(change: Changing, model_id: str, kind: str, name: str) -> None:
    """Remove a checkpoint."""
    found = CheckpointName.parse(f"tinker://{model_id}/{kind}/{name}")
    delete = partial(change.services.tinker_models.delete, change.caller, found)
    await change.carry_out("CheckpointService/DeleteCheckpoint", Asked(resource=found.path), delete, lambda _: "")


@router.api_route("/training_runs/{model_id}/checkpoints/{kind}/{name}/publish", methods=["POST", "DELETE"])
async def publish_checkpoint(change: Changing, model_id: str, kind: str, name: str) -> None:
    """Refuse: nothing here is public."""
    await _existing(change.services.tinker_models, change.caller, model_id, kind, name)
    raise NotAllowed("checkpoints cannot be published; the members of a model's project can load its checkpoints")


@router.put("/training_runs/{model_id}/checkpoints/{kind}/{name}/ttl")
async def set_checkpoint_ttl(change: Changing, request: Request, model_id: str, kind: str, name: str) -> None:
    """Take that a checkpoint never expires, and refuse everything else."""
    body = await read_body(request, TtlBody)
    await _existing(change.services.tinker_models, change.caller, model_id, kind, name)
    if body.ttl_seconds is not None:
        raise InvalidSpec.of("ttl_seconds", "ttl_seconds: a checkpoint stays until it is deleted; delete it")


@router.get("/training_runs/{model_id}/checkpoints/external_weights/{name}/external_weights_urls")
async def external_weights_urls(change: Calling, request: Request, model_id: str, name: str) -> dict[str, Any]:
    """Return an address for each file of a checkpoint; who has it needs no key until it ends."""
    services, caller = change.services, change.caller
    found = CheckpointName.parse(f"tinker://{model_id}/external_weights/{name}")
    job, step = await services.tinker_models.checkpoint(caller, found)

    async def sign() -> _Download:
        manifest = await in_thread(lambda: services.jobs.folders.checkpoints(job.job_id).manifest(step))
        part = adapter_part(manifest.files)
        part = model_part(manifest.files) or "" if part is None else part
        names = [path.removeprefix(part) for path in manifest.files if path.startswith(part)]
        # Folders hold other parts: a merged model, and what only training needs.
        files = frozenset(name for name in names if "/" not in name)
        ends_s = time.time() + MAX_DOWNLOAD_S
        return _Download(principal=caller, job_id=job.job_id, step=step, part=part, files=files, ends_s=ends_s)

    asked = Asked(resource=found.path)
    download = await change.carry_out("CheckpointService/ReadCheckpointFile", asked, sign, lambda _: job.job_id)
    secret = _offer(_downloads(request), download)
    root = f"{request.url.scheme}://{request.url.netloc}/api/v1/downloads/{secret}"
    return {"urls": {file: f"{root}/{file}" for file in sorted(download.files)}, "expires": _time(download.ends_s)}


@router.get("/downloads/{secret}/{file}")
async def download_file(services: Services, request: Request, secret: str, file: str) -> StreamingResponse:
    """Send a file of a checkpoint to who has its address, while the token that it was made with is accepted."""
    download = _downloads(request).get(secret)
    if download is None or download.ends_s < time.time() or file not in download.files:
        raise NotFound("this address does not exist, or has ended; ask for new ones")
    accepted = await services.accounts.still_accepted({download.principal.token_id})
    if (principal := accepted.get(download.principal.token_id)) is None:
        raise Unauthenticated("the token that this address was made with is not accepted any more")
    opened = until_answered(request)
    await opened.enter_async_context(services.limits.of_user(principal.name))
    path = await opened.enter_async_context(
        services.jobs.checkpoint_file(principal, download.job_id, download.step, download.part + file)
    )
    size = await in_thread(lambda: path.stat().st_size)

    async def pieces() -> AsyncIterator[bytes]:
        with path.open("rb") as stream:
            while piece := await in_thread(lambda: stream.read(_PIECE_BYTES)):
                yield piece

    headers = {"Content-Length": str(size)}
    return StreamingResponse(pieces(), media_type="application/octet-stream", headers=headers)


async def _existing(
    models: TinkerModels, caller: Principal, model_id: str, kind: str, name: str
) -> tuple[JobRecord, int]:
    return await models.checkpoint(caller, CheckpointName.parse(f"tinker://{model_id}/{kind}/{name}"))


def _downloads(request: Request) -> dict[str, _Download]:
    found: dict[str, _Download] = request.app.state.tinker_downloads
    return found


def _offer(downloads: dict[str, _Download], download: _Download) -> str:
    now_s = time.time()
    for secret in [secret for secret, one in downloads.items() if one.ends_s < now_s]:
        del downloads[secret]
    own: Sequence[str] = [key for key, one in downloads.items() if one.principal.name == download.principal.name]
    for secret in own[: max(0, len(own) - MAX_DOWNLOADS + 1)]:
        del downloads[secret]
    made = secrets.token_urlsafe(32)
    downloads[made] = download
    return made
