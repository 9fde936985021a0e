"""What a job with `init_from` starts with: the weights or the adapter of another job's checkpoint, or a pushed
adapter."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from horizon_server.errors import InvalidSpec, NotFound
from horizon_server.jobs.folders import CheckpointFolder, link_or_copy
from horizon_server.planning.adapter_start import check_adapter
from horizon_server.planning.data_size import DataSize
from horizon_server.planning.planner import Planner
from horizon_server.records.job import CheckpointRecord, JobRecord
from horizon_server.records.plan import Plan
from horizon_server.spec import LORA, JobSpec, OptimizerStates
from horizon_server.store.adapter_files import ADAPTER_CONFIG_FILE, ADAPTER_FILE, BASE_SHA256_FILE, read_base_sha256
from horizon_server.store.checkpoint_parts import adapter_part, model_part


@dataclass(frozen=True, kw_only=True)
class PushedAdapter:
    """A pushed adapter that a job starts with."""

    name: str
    folder: Path

    @property
    def text(self) -> str:
        """What the job reports of its start."""
        says_base = (self.folder / BASE_SHA256_FILE).is_file()
        compared = (
            "; the digest of the model that it was trained on is that of this job's model"
            if says_base
            else "; it does not say which weights it was trained on, so it was compared with the model by names and "
            "shapes only"
        )
        return f"starts with the adapter {self.name}{compared}"

    def base_sha256(self) -> str:
        """Return the digest of the model that it was trained on; empty where it does not say. Blocking. Raises
        InvalidModel."""
        return read_base_sha256(self.folder)

    def plan(self, planner: Planner, spec: JobSpec, model: Path, *, data: DataSize | None) -> Plan:
        """Return the job's plan, where the adapter is what it asks for. Blocking. Raises InvalidSpec, InvalidModel."""
        check_adapter(self.folder, model, spec.train)
        return planner.plan(spec, model, data=data)

    def link(self, target: Path) -> None:
        """Give the job files of its own. Blocking."""
        target.mkdir(parents=True)
        for name in (ADAPTER_FILE, ADAPTER_CONFIG_FILE, BASE_SHA256_FILE):
            if (self.folder / name).is_file():
                link_or_copy(self.folder / name, target / name)


@dataclass(frozen=True, kw_only=True)
class CheckpointStart:
    """A part of another job's checkpoint that a job starts with: its adapter, or its model."""

    source: JobRecord
    step: int
    checkpoints: CheckpointFolder
    part: str
    is_adapter: bool
    states: OptimizerStates
    """Those of the job that starts."""

    @property
    def text(self) -> str:
        """What the job reports of its start."""
        what = "adapter" if self.is_adapter else "weights"
        text = (
            f"starts with the {what} of the checkpoint of step {self.step} of job {self.source.job_id} "
            f"({self.source.spec.name})"
        )
        if (before := self.source.spec.train.optimizer_states) == self.states:
            return text
        how = "rounded to 24 bits" if self.states == "compressed" else "as they are"
        return f"{text}, {how}: that job's optimizer states are {before}, and this job's {self.states}"

    def base_sha256(self) -> str:
        """Return the digest of the model that an adapter is for; empty for weights of a model itself. Blocking. Raises
        NotFound."""
        base = self.checkpoints.manifest(self.step).base if self.is_adapter else None
        return "" if base is None else base.sha256

    def plan(self, planner: Planner, spec: JobSpec, model: Path, *, data: DataSize | None) -> Plan:
        """Return the job's plan, with the numbers of the files that it starts from. Blocking. Raises InvalidSpec,
        InvalidModel."""
        with self.checkpoints.reading(self.step):
            folder = self.checkpoints.of_step(self.step) / self.part
            if not self.is_adapter:
                return planner.plan(spec, folder, data=data)
            check_adapter(folder, model, spec.train)
            return planner.plan(spec, model, data=data)

    def link(self, target: Path) -> None:
        """Give the job files of its own. Blocking. Raises NotFound."""
        self.checkpoints.link_part(self.step, self.part, target)


Start = PushedAdapter | CheckpointStart


def require_lora(spec: JobSpec) -> None:
    """Refuse a pushed adapter for a job that trains no adapters. Raises InvalidSpec."""
    if spec.train.trainable != LORA:
        raise InvalidSpec.of(
            "init_from",
            f"init_from: {spec.init_from} is without an @, so it names a pushed adapter, and this job trains none; set "
            "train.trainable: "
            "lora, or name a checkpoint: JOB@last",
        )


async def start_at(
    spec: JobSpec, model_id: str, source: JobRecord, which: str, checkpoints: CheckpointFolder
) -> CheckpointStart:
    """Return the checkpoint of `source` that `which` (last, best or a step) means.

    Raises:
        NotFound: when there is none.
        InvalidSpec: when it is of another model, or holds an adapter alone and the job trains none.
    """
    records: Sequence[CheckpointRecord] = await asyncio.to_thread(checkpoints.all)
    found = [
        record
        for record in records
        if (which == "last" and record.last)
        or (which == "best" and record.best)
        or (which.isdecimal() and record.step == int(which))
    ]
    if not found:
        steps = ", ".join(str(record.step) for record in records) or "none"
        asked = "evaluated checkpoint" if which == "best" else "checkpoint"
        at = f" of step {which}" if which.isdecimal() else ""
        raise NotFound(f"init_from: job {source.job_id} has no {asked}{at}; it has checkpoints of steps: {steps}")
    if source.model_id != model_id:
        raise InvalidSpec.of(
            "init_from",
            f"init_from: job {source.job_id} has trained the model {source.spec.model}, which is not the model "
            f"{spec.model} of this "
            "job; a job starts from a checkpoint of its own model",
        )
    step, files, states = found[0].step, [file.path for file in found[0].files], spec.train.optimizer_states
    adapter, model = adapter_part(files), model_part(files)
    if adapter is not None and spec.train.trainable == LORA:
        return CheckpointStart(
            source=source, step=step, checkpoints=checkpoints, part=adapter, is_adapter=True, states=states
        )
    if adapter is not None and model is None:
        raise InvalidSpec.of(
            "init_from",
            f"init_from: the checkpoint of step {step} of job {source.job_id} holds an adapter, and this job trains "
            f"the model itself; merge it first (horizon checkpoint merge {source.job_id}@{step}), or set "
            "train.trainable: lora",
        )
    return CheckpointStart(
        source=source, step=step, checkpoints=checkpoints, part=model or "", is_adapter=False, states=states
    )
