"""The Device protocol, its two implementations, and the choice between them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from horizon_server.engine.device.cuda import CudaDevice
from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.device.timeline import Trace
from horizon_server.errors import InvalidSpec
from horizon_server.planning.ledger import DEFAULT_COMPUTE_DTYPE, ComputeDtype, DeviceKind

TORCH_DTYPE: Mapping[ComputeDtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def device_for(
    kind: DeviceKind,
    *,
    compute_dtype: ComputeDtype | None = None,
    limit_bytes: int | None = None,
    num_threads: int | None = None,
    trace: Trace | None = None,
) -> HostDevice | CudaDevice:
    """A device of a kind; `num_threads` is for the host's compute, `trace` receives what its queues do.

    Without a `compute_dtype`, the kind's default.

    Raises:
        InvalidSpec: the kind is cuda and torch finds no CUDA device.
    """
    dtype = TORCH_DTYPE[compute_dtype or DEFAULT_COMPUTE_DTYPE[kind]]
    if kind == "host":
        return HostDevice(compute_dtype=dtype, limit_bytes=limit_bytes, num_threads=num_threads, trace=trace)
    assert dtype is CudaDevice.compute_dtype, "the planner refuses others"
    if not torch.cuda.is_available():
        raise InvalidSpec(
            f"device: cuda needs a CUDA device, and torch {torch.__version__} finds none on this node; use device: host"
        )
    return CudaDevice(limit_bytes=limit_bytes, trace=trace)
