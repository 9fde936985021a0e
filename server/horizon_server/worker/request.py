"""What the daemon asks a worker for, and what of it the engine needs to know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horizon_server.engine.trainer import TrainConfig
from horizon_server.planning.compute import ComputeDtype, DeviceKind
from horizon_server.planning.ledger import ActivationPlacement
from horizon_server.spec import JobSpec, parse_job_spec
from horizon_server.store.base_digest import DigestBook, file_digest, model_digest
from horizon_server.store.cpus import update_threads
from horizon_server.store.prepared import TOKENS_FILE
from horizon_server.worker.ending import RunLimits


@dataclass(frozen=True, kw_only=True)
class WorkerRequest:
    """One attempt: a JSON file next to its log, so that people can look at it, and run it again by hand."""

    job_id: str
    attempt: int
    spec: JobSpec
    model: Path
    prepared: Path
    evaluations: dict[str, Path]
    """The prepared folder of each eval set, by its name."""
    checkpoints: Path
    resume_from: Path | None
    """The newest checkpoint, None where there is none."""
    planes: dict[str, int]
    """Descriptors that the daemon created and lends; the worker only maps them."""
    grad_dtype_bytes: int
    num_threads: int
    device: DeviceKind
    compute_dtype: ComputeDtype
    device_limit_bytes: int
    activation_placement: ActivationPlacement
    gpu: str = ""
    """UUID of the GPU that `device: cuda` means; empty where it is the first that torch finds."""
    numa_interleave: bool = True
    micro_batch_tokens: int = 0
    """Documents are computed together up to this; 0 computes row by row."""
    resident_layers: int = 0
    """Layers whose weights stay on the device from step to step."""
    product_layers: int = 0
    """The last layers, which keep the products of forward for backward, within `max_product_bytes`."""
    max_product_bytes: int = 0
    compiled: Path | None = None
    """The library of compiled layers."""
    digests: Path | None = None
    """The book of the digests of models; None where a person runs the worker by hand."""
    trace: Path | None = None
    """Where to write what ran when on the device's queues."""
    resume_from_memory: bool = False
    """Whether the planes hold what a killed worker of this job left; where that cannot be continued, `resume_from` is."""
    turns: bool = False
    """Whether the daemon grants turns on the device; without, it is this worker's all the time."""
    device_lock: Path | None = None
    """Locked by the worker that uses the device."""
    adapter: Path | None = None
    """The folder of the adapter that a job with `init_from` starts with."""
    limits: RunLimits = RunLimits()
    min_free_bytes: int | None = None
    """Bytes that checkpoints leave free on their disk; None takes the default for the disk."""

    @classmethod
    def from_mapping(cls, plain: Mapping[str, Any]) -> WorkerRequest:
        """Return the request that the daemon wrote; both are of one version, so a malformed one is a defect."""
        paths = (
            "model",
            "prepared",
            "checkpoints",
            "resume_from",
            "compiled",
            "digests",
            "trace",
            "device_lock",
            "adapter",
        )
        return cls(
            **{
                **plain,
                **{name: Path(plain[name]) if plain.get(name) else None for name in paths},
                "evaluations": {str(name): Path(folder) for name, folder in plain.get("evaluations", {}).items()},
                "spec": parse_job_spec(plain["spec"]),
                "planes": {str(name): int(fd) for name, fd in plain["planes"].items()},
                "limits": RunLimits(**plain.get("limits", {})),
            }
        )

    def model_digest(self) -> str:
        """Return the digest of the model folder: from the book, or by reading all weights. Raises InvalidModel."""
        return model_digest(self.model) if self.digests is None else DigestBook(self.digests).digest(self.model)

    def tokens_digest(self, prepared: Path) -> str:
        """Return the digest of the tokens of a prepared folder, of its data alone; empty where there is no such folder any more."""
        file = prepared / TOKENS_FILE
        if not file.is_file():
            return ""
        return file_digest(file) if self.digests is None else DigestBook(self.digests).of_file(file)


def train_config(request: WorkerRequest, num_steps: int) -> TrainConfig:
    """Return what the engine needs to know of the job for this attempt."""
    train = request.spec.train
    return TrainConfig(
        num_steps=num_steps,
        learning_rate=train.learning_rate,
        lr_schedule=train.lr_schedule,
        warmup_steps=train.warmup_steps,
        min_lr_ratio=train.min_lr_ratio,
        lr_decay_ratio=train.lr_decay_ratio,
        label_smoothing=train.label_smoothing,
        neftune_noise_alpha=train.neftune_noise_alpha,
        weight_decay=train.weight_decay,
        betas=train.betas,
        eps=train.eps,
        max_grad_norm=train.max_grad_norm,
        max_skipped_steps=train.max_skipped_steps,
        seed=train.seed,
        optimizer_threads=update_threads(request.num_threads, device_kind=request.device),
        tokens_per_step=train.tokens_per_step,
        activation_placement=request.activation_placement,
        matmul=train.matmul,
        micro_batch_tokens=request.micro_batch_tokens,
        resident_layers=request.resident_layers,
        product_layers=request.product_layers,
        max_product_bytes=request.max_product_bytes,
        adapter_scale=train.lora.scale,
        adapter_dropout=train.lora.dropout,
    )
