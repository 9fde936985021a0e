"""The Device protocol, its two implementations, and the choice between them."""

from __future__ import annotations

import torch

from horizon_server.engine.device.cuda import CudaDevice
from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.device.timeline import Trace
from horizon_server.errors import InvalidSpec
from horizon_server.planning.ledger import DeviceKind


def device_for(
    kind: DeviceKind,
    *,
    limit_bytes: int | None = None,
    num_threads: int | None = None,
    trace: Trace | None = None,
) -> HostDevice | CudaDevice:
    """A device of a kind; `num_threads` is for the host's compute, `trace` receives what its queues do.

    Raises:
        InvalidSpec: the kind is cuda and torch finds no CUDA device.
    """
    if kind == "host":
        return HostDevice(limit_bytes=limit_bytes, num_threads=num_threads, trace=trace)
    if not torch.cuda.is_available():
        raise InvalidSpec(
            f"device: cuda needs a CUDA device, and torch {torch.__version__} finds none on this node; use device: host"
        )
    return CudaDevice(limit_bytes=limit_bytes, trace=trace)
