"""What the daemon asks of one worker: a JSON file next to the log, so that people can look at an attempt, and run it again by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horizon_server.planning.ledger import ActivationPlacement, DeviceKind
from horizon_server.spec import JobSpec, parse_job_spec


@dataclass(frozen=True, kw_only=True)
class WorkerRequest:
    """One attempt. `planes` maps plane names to descriptors that the daemon created and
    lends; the worker only maps them."""

    job_id: str
    attempt: int
    spec: JobSpec
    model: Path
    prepared: Path
    evaluation: Path | None
    checkpoints: Path
    resume_from: Path | None
    planes: dict[str, int]
    grad_dtype_bytes: int
    num_threads: int
    device: DeviceKind
    device_limit_bytes: int
    activation_placement: ActivationPlacement
    trace: Path | None = None
    """Where to write what ran when on the device's queues, next to the request."""

    @classmethod
    def from_mapping(cls, plain: Mapping[str, Any]) -> WorkerRequest:
        """Return the request that the daemon wrote; both are of one version, so a malformed one is a defect."""
        return cls(
            job_id=plain["job_id"],
            attempt=plain["attempt"],
            spec=parse_job_spec(plain["spec"]),
            model=Path(plain["model"]),
            prepared=Path(plain["prepared"]),
            evaluation=Path(plain["evaluation"]) if plain["evaluation"] else None,
            checkpoints=Path(plain["checkpoints"]),
            resume_from=Path(plain["resume_from"]) if plain["resume_from"] else None,
            planes={str(name): int(fd) for name, fd in plain["planes"].items()},
            grad_dtype_bytes=plain["grad_dtype_bytes"],
            num_threads=plain["num_threads"],
            device=plain["device"],
            device_limit_bytes=plain["device_limit_bytes"],
            activation_placement=plain["activation_placement"],
            trace=Path(plain["trace"]) if plain["trace"] else None,
        )
