"""The part of torch.cuda that the engine uses: streams, events, pinning, limits. The only module that calls it.

Small on purpose: everything else of the cuda device runs, and is tested, without one.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor


class Mark(Protocol):
    """A point in a stream, with the time at which the device passed it."""

    def record(self, stream: Any) -> None:
        """Record it after what the stream has been given so far."""

    def query(self) -> bool:
        """Whether the device has passed it."""

    def synchronize(self) -> None:
        """Block the calling thread until it has; at once where it was never recorded."""

    def elapsed_time(self, later: Any) -> float:
        """Milliseconds to a later mark; both have been passed."""


class Runtime(Protocol):
    """A device's driver. Thread: any."""

    @property
    def device(self) -> torch.device:
        """Where tensors live."""

    def new_stream(self) -> Any:
        """A queue of the device's own."""

    def using(self, stream: Any) -> AbstractContextManager[Any]:
        """Inside, what this thread launches goes to the stream."""

    def new_mark(self) -> Mark:
        """A mark that is not in any stream yet."""

    def wait(self, stream: Any, mark: Any) -> None:
        """Let what the stream is given later wait for a mark that was recorded before this call. Does not block."""

    def synchronize(self) -> None:
        """Block until the device has nothing left to do."""

    def pinned(self, num_bytes: int) -> Tensor:
        """A little host memory of bytes that is copied at full speed."""

    def register(self, address: int, num_bytes: int) -> int:
        """Pin host memory that exists; returns the driver's error code, 0 for success."""

    def unregister(self, address: int) -> None:
        """Undo `register`."""

    def place(self, tensor: Tensor) -> Tensor:
        """A copy on the device, complete when it returns."""

    def limit_memory(self, num_bytes: int | None) -> None:
        """Have allocations beyond this fail as out of memory; None lifts the limit."""

    def release_cached(self) -> None:
        """Give back to the driver what the allocator holds beyond all tensors."""

    def peak_allocated_bytes(self) -> int:
        """The most that tensors have held on the device."""

    def peak_reserved_bytes(self) -> int:
        """The most that the allocator has taken from the driver: what tensors held, and the gaps between them."""

    def generator(self) -> torch.Generator:
        """What dropout on the device draws from."""


class TorchCuda:
    """The real one, for one CUDA device of those that the process sees."""

    def __init__(self, index: int = 0) -> None:
        self.device = torch.device("cuda", index)
        # With a mask and a row length of 64 beyond a multiple of 128, cuDNN's backward of attention gives NaN on Hopper
        # (pytorch#196678), and it compiles a plan for every new row length. Flash and memory-efficient attention do
        # neither.
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.cuda.init()  # type: ignore[no-untyped-call]
        # What an earlier device of this process held at its peak is not ours.
        torch.cuda.reset_peak_memory_stats(self.device)

    def new_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def using(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def new_mark(self) -> Mark:
        # Blocking: a thread that waits sleeps, where it would spin on a core that the optimizer needs.
        return torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]

    def wait(self, stream: torch.cuda.Stream, mark: torch.cuda.Event) -> None:
        stream.wait_event(mark)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def pinned(self, num_bytes: int) -> Tensor:
        """From torch's own allocator, which rounds up to a power of two."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def register(self, address: int, num_bytes: int) -> int:
        # 0 is cudaHostRegisterDefault.
        return self._call_driver("cudaHostRegister", address, num_bytes, 0)

    def unregister(self, address: int) -> None:
        self._call_driver("cudaHostUnregister", address)

    def place(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device)

    def limit_memory(self, num_bytes: int | None) -> None:
        total_bytes = torch.cuda.get_device_properties(self.device).total_memory
        share = 1.0 if num_bytes is None else min(1.0, num_bytes / total_bytes)
        torch.cuda.set_per_process_memory_fraction(share, self.device)

    def release_cached(self) -> None:
        torch.cuda.empty_cache()

    def peak_allocated_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)

    def peak_reserved_bytes(self) -> int:
        return torch.cuda.max_memory_reserved(self.device)

    def generator(self) -> torch.Generator:
        return torch.cuda.default_generators[self.device.index]

    def _call_driver(self, name: str, *arguments: int) -> int:
        def call() -> int:
            # The current device is each thread's own.
            torch.cuda.set_device(self.device)
            return int(getattr(torch.cuda.cudart(), name)(*arguments))  # type: ignore[no-untyped-call]

        # On a thread of its own: a refusal stays that thread's last error, which no later launch reports.
        with ThreadPoolExecutor(max_workers=1) as pool:
            return pool.submit(call).result()
