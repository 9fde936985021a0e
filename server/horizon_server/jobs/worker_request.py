"""What a worker is asked to do, as the plain data of its request file. `worker.request.WorkerRequest` is the other side."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from horizon_server.jobs.folders import JobFolders
from horizon_server.planning.machine import Accelerator, Gpu
from horizon_server.planning.planner import WorkerMemory
from horizon_server.records.job import JobRecord
from horizon_server.store.adapter_files import is_adapter_folder


def worker_request(
    job: JobRecord,
    memory: WorkerMemory,
    folders: JobFolders,
    *,
    model: Path,
    prepared: Path,
    evaluations: Mapping[str, Path],
    num_threads: int,
    numa_interleave: bool,
    device: str,
    gpu: Accelerator | None,
    trace: Path | None,
) -> dict[str, Any]:
    """Return the request of an attempt's first worker, without the planes."""
    checkpoints, limits = folders.checkpoints(job.job_id), job.spec.limits
    start = folders.start(job.job_id)
    newest = checkpoints.newest()
    deadline_s = None if limits.max_hours is None else job.started_s + 3600.0 * limits.max_hours
    return {
        "job_id": job.job_id,
        "attempt": job.attempt,
        "spec": job.spec.to_mapping(),
        "model": str(model),
        "prepared": str(prepared),
        "evaluations": {name: str(folder) for name, folder in evaluations.items()},
        "checkpoints": str(checkpoints.path),
        "min_free_bytes": folders.min_free_bytes,
        "adapter": str(start) if is_adapter_folder(start) else None,
        "resume_from": None if newest is None else str(newest),
        "grad_dtype_bytes": memory.grad_dtype_bytes,
        "num_threads": num_threads,
        "device": memory.device_kind,
        "compute_dtype": memory.compute_dtype,
        "gpu": gpu.uuid if memory.device_kind == "cuda" and isinstance(gpu, Gpu) else "",
        "numa_interleave": numa_interleave,
        "device_limit_bytes": memory.plan.device_limit_bytes,
        "activation_placement": memory.activation_placement,
        "micro_batch_tokens": memory.micro_batch_tokens,
        "resident_layers": memory.kept.resident_layers,
        "product_layers": memory.kept.product_layers,
        "max_product_bytes": memory.kept.product_bytes,
        "compiled": str(folders.compiled),
        "digests": str(folders.digests),
        "turns": True,
        "device_lock": str(folders.device_lock(device)),
        "limits": {"max_steps": limits.max_steps, "deadline_s": deadline_s},
        "trace": None if trace is None else str(trace),
    }
