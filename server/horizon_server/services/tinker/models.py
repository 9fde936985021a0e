"""Tinker's models: each is a session, found by the name of its job, with checkpoints that have names."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horizon_server.errors import InvalidSpec, NotFound, WrongJobState
from horizon_server.jobs.folders import NamedCheckpoint
from horizon_server.planning.model_folder import open_model_folder
from horizon_server.records.account import Principal
from horizon_server.records.job import ENDED, JobFilter, JobRecord
from horizon_server.records.sample import MAX_PROMPT_TOKENS
from horizon_server.records.session import Close, LoadState, SaveState
from horizon_server.services.access import require_change
from horizon_server.services.jobs import JobService
from horizon_server.services.pushed import MAX_PAGE_SIZE
from horizon_server.services.sessions import Sessions
from horizon_server.services.tinker.names import (
    UNNAMED,
    CheckpointName,
    ModelName,
    is_of,
    job_prefix,
    no_checkpoint,
    no_model,
)
from horizon_server.spec import JobSpec, parse_job_spec

MAX_RUNS = 1000
"""Models of a caller that are listed, the newest."""
MAX_CHECKPOINTS = 1000
"""Checkpoints that one call looks at to list them, the newest."""
MAX_UNNAMED = 8
"""Checkpoints of a model that were made for a sampling client each: of more, the one that was asked longest ago
goes."""
TOKENS_PER_CALL = 16_384
"""What a model is planned for; clients divide more into several calls."""
ALPHA = 32.0
"""Of every adapter, whatever its rank, as Tinker has it."""
_ATTENTION, _MLP = "attn|attention", "mlp|feed_forward|ffn"
_OPTION = "horizon."
_RUNS_LOOKED_AT = 256
"""For a list of all checkpoints, the newest."""
_REMEMBERED = 4096
"""Checkpoints of which is known when they were asked."""
_UNADAPTED = "train_unembed has no effect: the output layer has no adapter here, as the layers have"


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """What Tinker's lora_config asks for."""

    rank: int
    seed: int | None = None
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True


class TinkerModels:
    """Thread: belongs to one event loop; files are read in threads."""

    def __init__(self, jobs: JobService, sessions: Sessions) -> None:
        self._jobs, self._sessions = jobs, sessions
        # When an unnamed checkpoint was last asked, counted: by job and step.
        self._asked: dict[tuple[str, int], int] = {}
        self._num_asked = 0

    async def longest(self, principal: Principal, base: str) -> int:
        """Return how many tokens a document of a base may have. Raises NotFound."""
        _, folder = await self._jobs.resources.model(principal, base)
        return await asyncio.to_thread(_longest, folder)

    async def create(
        self, principal: Principal, name: ModelName, base: str, adapters: Adapters | None, notes: Mapping[str, str]
    ) -> JobRecord:
        """Open a session for a model, or return the one that the same earlier request opened. Rank 0, or no adapters,
        trains all parameters. Raises as `Sessions.open`."""
        options, metadata = _options(notes)
        longest = await self.longest(principal, base)
        length = options.pop("sequence_length", longest)
        train: dict[str, Any] = {"sequence_length": length, "tokens_per_step": max(length, TOKENS_PER_CALL)}
        if adapters is not None and adapters.rank != 0:
            train |= _lora(adapters)
        session = {"idle_minutes": idle} if (idle := options.pop("idle_minutes", None)) is not None else {}
        project = {"project": project} if (project := options.pop("project", None)) is not None else {}
        spec = {
            "name": name.job_name,
            "model": base,
            "method": "session",
            "metadata": metadata,
            "train": {**train, **options},
            "session": session,
            **project,
        }
        has_note = adapters is not None and adapters.rank != 0 and adapters.train_unembed
        return await self._open(principal, name, parse_job_spec(spec), notes=[_UNADAPTED] if has_note else ())

    async def create_from(
        self, principal: Principal, name: ModelName, path: str, *, optimizer: bool, base: str, notes: Mapping[str, str]
    ) -> int:
        """Open a session like the one that a checkpoint is of, and have it take the checkpoint's weights; returns the
        number of that call. Raises as `Sessions.open`, and NotFound."""
        source, step = await self.loadable(principal, path)
        if base not in ("", source.spec.model):
            raise InvalidSpec.of("base_model", f"base_model is {base!r:.80}; the checkpoint is of {source.spec.model}")
        options, metadata = _options(notes)
        if options:
            raise InvalidSpec.of("user_metadata", "user_metadata has options of horizon; those of the checkpoint stay")
        spec = {**source.spec.to_mapping(), "name": name.job_name, "metadata": metadata}
        job = await self._open(principal, name, parse_job_spec(spec))
        return await self._load(principal, job, source, step, optimizer=optimizer, sequence=0)

    async def load(self, principal: Principal, name: str, path: str, *, optimizer: bool, sequence: int) -> int:
        """Have a model take the weights of a checkpoint; returns the number of the call."""
        source, step = await self.loadable(principal, path)
        job = await self.find(principal, name)
        return await self._load(principal, job, source, step, optimizer=optimizer, sequence=sequence)

    async def _load(
        self, principal: Principal, job: JobRecord, source: JobRecord, step: int, *, optimizer: bool, sequence: int
    ) -> int:
        call = LoadState(checkpoint=f"{source.job_id}@{step}", optimizer=optimizer)
        return await self._sessions.call(principal, job.job_id, call, sequence=sequence)

    async def _open(self, principal: Principal, name: ModelName, spec: JobSpec, notes: Sequence[str] = ()) -> JobRecord:
        request_id = uuid.uuid5(uuid.NAMESPACE_URL, f"tinker:{principal.name}/{name.text}")
        return await self._sessions.open(principal, spec, request_id=str(request_id), notes=notes)

    async def find(self, principal: Principal, model_id: str) -> JobRecord:
        """Return the session of a model. Raises NotFound, also for models of others."""
        name = ModelName.parse(model_id)
        try:
            job = await self._jobs.get(principal, name.job_name)
        except NotFound as error:
            raise no_model(model_id) from error
        if not job.spec.is_session or job.spec.name != name.job_name or not is_of(job.owner, name.session):
            raise no_model(model_id)
        return job

    async def runs(self, principal: Principal, session: str = "") -> list[JobRecord]:
        """Return the caller's models, newest first; those of one session where it is named."""
        only = JobFilter(owner=principal.name, search=job_prefix(session) if session else "tinker-")
        found, _ = await self._jobs.list(principal, page_size=min(MAX_RUNS, MAX_PAGE_SIZE), only=only)
        return [job for job in found if job.spec.is_session and ModelName.of_job(job.spec.name) is not None]

    async def finish(self, principal: Principal, session: str) -> None:
        """Close the models of a session that have not ended: each writes its last checkpoint first. Those that were
        made for sampling clients go."""
        for job in await self.runs(principal, session):
            if job.job_state not in ENDED:
                require_change(principal, job.owner, f"job {job.job_id}", project=job.project)
                await self._drop_unnamed(job, 0)
                with contextlib.suppress(WrongJobState):  # closed before, or paused by its user
                    await self._sessions.call(principal, job.job_id, Close())

    async def save_unnamed(self, principal: Principal, job: JobRecord, sequence: int) -> int:
        """Have a model write a checkpoint for one sampling client; returns the number of the call."""
        call = SaveState(name=f"{UNNAMED}{sequence}")
        number = await self._sessions.call(principal, job.job_id, call, sequence=sequence)
        await self._drop_unnamed(job, MAX_UNNAMED)
        return number

    async def _drop_unnamed(self, job: JobRecord, most: int) -> None:
        checkpoints = self._jobs.folders.checkpoints(job.job_id)
        unnamed = [
            (self._asked.get((job.job_id, one.step), 0), one.step, one.names)
            for one in await asyncio.to_thread(checkpoints.newest_named, MAX_CHECKPOINTS)
            if any(name.startswith(UNNAMED) for name in one.names)
        ]
        for _, step, names in sorted(unnamed)[: max(0, len(unnamed) - most)]:
            self._asked.pop((job.job_id, step), None)
            for name in names:
                if name.startswith(UNNAMED):
                    with contextlib.suppress(NotFound):
                        # The session removes what nothing keeps when it writes its next checkpoint.
                        await asyncio.to_thread(checkpoints.take_name, step, name)

    def asked(self, job: JobRecord, step: int) -> None:
        """Note that a checkpoint answers now."""
        self._num_asked += 1
        self._asked.pop((job.job_id, step), None)
        self._asked[job.job_id, step] = self._num_asked
        if len(self._asked) > _REMEMBERED:
            del self._asked[next(iter(self._asked))]

    async def loadable(self, principal: Principal, path: str) -> tuple[JobRecord, int]:
        """Return what a path of saved state means. Raises NotFound, InvalidSpec for a checkpoint of another kind."""
        name = CheckpointName.parse(path)
        if name.kind != "training":
            raise InvalidSpec.of("path", f"path is {path!r:.200}; only tinker://MODEL/weights/NAME can be loaded")
        return await self.checkpoint(principal, name)

    async def checkpoint(self, principal: Principal, name: CheckpointName) -> tuple[JobRecord, int]:
        """Return the session and the step of a checkpoint. Raises NotFound."""
        try:
            job = await self.find(principal, name.model.text)
        except NotFound as error:
            raise no_checkpoint(name.path) from error
        steps = await asyncio.to_thread(self._jobs.folders.checkpoints(job.job_id).with_name, name.stored)
        if not steps:
            raise no_checkpoint(name.path)
        return job, steps[0]

    async def checkpoints(
        self, job: JobRecord, most: int = MAX_CHECKPOINTS
    ) -> list[tuple[CheckpointName, NamedCheckpoint]]:
        """Return a model's newest checkpoints that have names of Tinker's, newest first."""
        model = ModelName.of_job(job.spec.name)
        assert model is not None, job.spec.name
        found = await asyncio.to_thread(self._jobs.folders.checkpoints(job.job_id).newest_named, most)
        names = [(CheckpointName.of_name(model, name), one) for one in found for name in reversed(one.names)]
        return [(name, one) for name, one in names if name is not None]

    async def all_checkpoints(self, principal: Principal) -> list[tuple[CheckpointName, NamedCheckpoint]]:
        """Return the checkpoints of the caller's newest models, those of a newer model first."""
        found: list[tuple[CheckpointName, NamedCheckpoint]] = []
        for job in (await self.runs(principal))[:_RUNS_LOOKED_AT]:
            left = MAX_CHECKPOINTS - len(found)
            if left <= 0:
                break
            found += (await self.checkpoints(job, left))[:left]
        return found

    async def delete(self, principal: Principal, name: CheckpointName) -> None:
        """Take a name away from a checkpoint, and remove the checkpoint where it has no other and nothing continues
        from it. Raises NotFound, NotAllowed, and InUse while it is being read."""
        job, step = await self.checkpoint(principal, name)
        require_change(principal, job.owner, f"checkpoint {name.path}", project=job.project)
        checkpoints = self._jobs.folders.checkpoints(job.job_id)
        self._jobs.leases.require_unread(checkpoints, [step])
        if not await asyncio.to_thread(checkpoints.take_name, step, name.stored):
            with contextlib.suppress(WrongJobState):  # the session would continue from it, and removes it later
                await self._jobs.delete_checkpoint(principal, job.job_id, step)


def _options(notes: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Divide a program's notes into options of the job, whose names begin with horizon., and what is only kept."""
    options = {name.removeprefix(_OPTION): text for name, text in notes.items() if name.startswith(_OPTION)}
    known = {
        "compute_dtype": str,
        "sequence_length": int,
        "tokens_per_step": int,
        "idle_minutes": float,
        "project": str,
    }
    found: dict[str, Any] = {}
    for name, text in options.items():
        if name not in known:
            raise InvalidSpec.of(
                "user_metadata", f"user_metadata has {_OPTION}{name:.40}; there are {_OPTION}{', '.join(known)}"
            )
        try:
            found[name] = known[name](text)
        except ValueError as error:
            raise InvalidSpec.of("user_metadata", f"{_OPTION}{name} is {text!r:.40}; it must be a number") from error
    return found, {name: text for name, text in notes.items() if not name.startswith(_OPTION)}


def _lora(adapters: Adapters) -> dict[str, Any]:
    targets = [
        *([_ATTENTION] if adapters.train_attn else []),
        *([_MLP] if adapters.train_mlp else []),
    ]
    if not targets:
        raise InvalidSpec.of(
            "lora_config.train_unembed",
            "train_unembed alone trains nothing here: the output layer has no adapter; set train_mlp or train_attn",
        )
    both = adapters.train_attn and adapters.train_mlp
    seed = {} if adapters.seed is None else {"seed": adapters.seed}
    lora = {"rank": adapters.rank, "alpha": ALPHA, "targets": ["all-linear"] if both else targets}
    return {"trainable": "lora", "lora": lora, **seed}


@functools.lru_cache(maxsize=1024)
def _longest(folder: Path) -> int:
    return min(MAX_PROMPT_TOKENS, open_model_folder(folder).shape.max_position_embeddings)
