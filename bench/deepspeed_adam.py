"""The AdamW kernel against DeepSpeedCPUAdam, where deepspeed can be imported and can compile its own kernel (it is no dependency of ours).

Same parameters, threads and run, in turn. What each has to do for mixed precision is counted: ours keeps the fp32 master split, so
that the bf16 half *is* what is streamed; DeepSpeed updates fp32 parameters and then copies them to bf16, or updates bf16 parameters,
which have no master.

    pip install deepspeed ninja && python -m bench.deepspeed_adam
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from horizon_server.store import native
from horizon_server.store.cpus import available_cpus


def seconds(run: Callable[[], object]) -> float:
    """Wall seconds of one call."""
    started_s = time.perf_counter()
    run()
    return time.perf_counter() - started_s


def our_update(num_parameters: int, grad: torch.Tensor, num_threads: int) -> Callable[[], object]:
    """One update of our kernel over planes of that many parameters."""
    kernel = native.library()
    assert kernel is not None, native.kernel_info().reason
    hi = torch.zeros(num_parameters, dtype=torch.bfloat16)
    lo = torch.zeros(num_parameters, dtype=torch.int16)
    moments = [torch.zeros(num_parameters) for _ in range(2)]
    segments = (native.Segment * 1)(native.Segment(0, num_parameters, 1.0))
    scalars = native.Scalars(1.0, 0.9, 0.1, 0.999, 0.001, 1.0, 1e-8, 1e-3)
    tensors = [hi, lo, *moments, grad]

    def run() -> None:
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
        kernel.hz_adamw(*pointers, grad.dtype == torch.bfloat16, segments, 1, scalars, num_threads)

    return run


def deepspeed_update(num_parameters: int, grad: torch.Tensor, dtype: torch.dtype) -> Callable[[], object]:
    """One update of DeepSpeedCPUAdam; from fp32 parameters the bf16 copy follows."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    parameter = torch.nn.Parameter(torch.zeros(num_parameters, dtype=dtype))
    optimizer: Any = DeepSpeedCPUAdam([parameter], lr=1e-3, adamw_mode=True)
    streamed = torch.empty(num_parameters, dtype=torch.bfloat16)
    parameter.grad = grad.to(dtype)

    def run() -> None:
        optimizer.step()
        if dtype is torch.float32:
            streamed.copy_(parameter.data)

    return run


def main() -> int:
    """Print a line per comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=1 << 25)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--threads", type=int, default=available_cpus())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    generator = torch.Generator().manual_seed(0)
    fp32 = torch.randn(arguments.parameters, generator=generator)
    print(f"| against | ours, M params/s | theirs, M params/s | ratio (median of {arguments.pairs} pairs) |")
    print("| --- | --- | --- | --- |")
    for name, dtype in (("fp32 and its bf16 copy", torch.float32), ("bf16 parameters", torch.bfloat16)):
        grad = fp32.to(torch.bfloat16) if dtype is torch.bfloat16 else fp32
        ours = our_update(arguments.parameters, grad, arguments.threads)
        theirs = deepspeed_update(arguments.parameters, grad, dtype)
        ours()
        theirs()
        pairs = [(seconds(ours), seconds(theirs)) for _ in range(arguments.pairs)]
        rates = [arguments.parameters / 1e6 / statistics.median(column) for column in zip(*pairs, strict=True)]
        ratio = statistics.median(b / a for a, b in pairs)
        print(f"| {name} | {rates[0]:,.0f} | {rates[1]:,.0f} | {ratio:.2f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
