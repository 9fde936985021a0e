"""The Device protocol, its two implementations, and the choice between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from horizon_server.engine.device.cuda import CudaDevice
from horizon_server.engine.device.cuda_runtime import TorchCuda
from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.device.timeline import Trace
from horizon_server.errors import InvalidSpec
from horizon_server.records.execution import DEFAULT_COMPUTE_DTYPE, ComputeDtype, DeviceKind

TORCH_DTYPE: Mapping[ComputeDtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def device_for(
    kind: DeviceKind,
    *,
    compute_dtype: ComputeDtype | None = None,
    limit_bytes: int | None = None,
    num_threads: int | None = None,
    trace: Trace | None = None,
    gpu: str = "",
) -> HostDevice | CudaDevice:
    """A device of a kind; `num_threads` is for the host's compute, `trace` receives what its queues do, `gpu` is the
    UUID of the one that cuda means, where it is not the first.

    Without a `compute_dtype`, the kind's default.

    Raises:
        InvalidSpec: the kind is cuda and torch finds no CUDA device, or not that one.
    """
    dtype = TORCH_DTYPE[compute_dtype or DEFAULT_COMPUTE_DTYPE[kind]]
    if kind == "host":
        return HostDevice(compute_dtype=dtype, limit_bytes=limit_bytes, num_threads=num_threads, trace=trace)
    assert dtype is CudaDevice.compute_dtype, "the planner refuses others"
    if not torch.cuda.is_available():
        raise InvalidSpec(
            f"device: cuda needs a CUDA device, and torch {torch.__version__} finds none on this node; use device: host"
        )
    uuids = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    return CudaDevice(limit_bytes=limit_bytes, trace=trace, runtime=TorchCuda(index_of_gpu(gpu, uuids)))


def index_of_gpu(gpu: str, uuids: Sequence[str]) -> int:
    """The number that torch has given to the GPU with a UUID; the first where none is asked for.

    Raises:
        InvalidSpec: torch does not see it.
    """
    # The driver writes GPU-..., torch leaves that out.
    wanted = gpu.removeprefix("GPU-")
    if wanted in uuids or not wanted:
        return uuids.index(wanted) if wanted else 0
    raise InvalidSpec(
        f"torch does not find the GPU {gpu} that the daemon planned with (it finds {', '.join(uuids) or 'none'}); "
        "look at the daemon's gpu setting and at CUDA_VISIBLE_DEVICES"
    )
