"""The AdamW kernel against DeepSpeedCPUAdam, where deepspeed can be imported and can compile its own kernel (it is not
a dependency).

Same parameters, threads and run, in turn, and each with what mixed precision asks of it. Ours keeps the fp32 master
split, so that its bf16 half *is* what is streamed; gradients come in fp32 (the host device) or bf16 (the cuda device).
DeepSpeed updates fp32 parameters and copies them to bf16 afterwards, or updates bf16 parameters, which have no master;
it takes gradients in the parameters' dtype.

DeepSpeed's kernel is compiled for one instruction set, ours has no use for more than AVX2. So each of its builds runs
in a process of its own: the one it would make for an AVX2 machine, and its own choice for this one. torch, which makes
the copies, is limited alike.

    pip install deepspeed ninja && python -m bench.deepspeed_adam
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from horizon_server.settings import child_environment
from horizon_server.store import native
from horizon_server.store.cpus import available_cpus

AVX2, THIS_MACHINE = "avx2", "this machine's"
_AVX2_FLAGS = {"simd_width": "-D__AVX256__", "cpu_arch": "-march=haswell"}


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
    segments = (native.Segment * 1)(native.Segment(0, num_parameters, 1.0, 1.0))
    scalars = native.Scalars(1.0, 0.9, 0.1, 0.999, 0.001, 1e-8, 1e-3, 7.3)
    tensors = [hi, lo, *moments, grad]

    def run() -> None:
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
        kernel.hz_adamw(*pointers, grad.dtype == torch.bfloat16, segments, 1, scalars, num_threads)

    return run


def deepspeed_update(grad: torch.Tensor) -> Callable[[], object]:
    """One update of DeepSpeedCPUAdam on parameters of the gradient's dtype; from fp32 ones the bf16 copy follows."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    parameter = torch.nn.Parameter(torch.zeros_like(grad))
    optimizer: Any = DeepSpeedCPUAdam([parameter], lr=1e-3, adamw_mode=True)
    streamed = torch.empty(grad.numel(), dtype=torch.bfloat16)
    parameter.grad = grad

    def run() -> None:
        optimizer.step()
        if grad.dtype is torch.float32:
            streamed.copy_(parameter.data)

    return run


def compare(build: str, arguments: argparse.Namespace) -> None:
    """Print the rows of one of DeepSpeed's builds."""
    if build == AVX2:
        from deepspeed.ops.op_builder import CPUAdamBuilder

        for method, flag in _AVX2_FLAGS.items():
            setattr(CPUAdamBuilder, method, lambda self, flag=flag: flag)
    torch.set_num_threads(arguments.threads)
    grad = {torch.float32: torch.randn(arguments.parameters, generator=torch.Generator().manual_seed(0))}
    grad[torch.bfloat16] = grad[torch.float32].bfloat16()
    theirs = {dtype: deepspeed_update(values) for dtype, values in grad.items()}
    ours = {dtype: our_update(arguments.parameters, values, arguments.threads) for dtype, values in grad.items()}
    for their_dtype, our_dtype in (
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
    ):
        a, b = ours[our_dtype], theirs[their_dtype]
        a()
        b()
        # Who goes first alternates, so that neither always finds the other's caches.
        pairs = [
            (seconds(a), seconds(b)) if turn % 2 else (seconds(b), seconds(a))[::-1] for turn in range(arguments.pairs)
        ]
        rates = [arguments.parameters / 1e6 / statistics.median(column) for column in zip(*pairs, strict=True)]
        ratios = sorted(b_s / a_s for a_s, b_s in pairs)
        what = "fp32 and their bf16 copy" if their_dtype is torch.float32 else "bf16, no master"
        print(
            f"| {build} | {what} | {'fp32' if our_dtype is torch.float32 else 'bf16'} | {rates[0]:,.0f} | "
            f"{rates[1]:,.0f} | **{statistics.median(ratios):.2f}** | {ratios[0]:.2f} to {ratios[-1]:.2f} |",
            flush=True,
        )


def main() -> int:
    """Print a row per comparison, each build of DeepSpeed's in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=1 << 25)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--threads", type=int, default=available_cpus())
    parser.add_argument("--build", choices=[AVX2, THIS_MACHINE], help="the rows of one build only")
    arguments = parser.parse_args()
    if arguments.build:
        compare(arguments.build, arguments)
        return 0
    info = native.kernel_info()
    print(f"our kernel: {info.isa}, {arguments.parameters / 1e6:.1f} M parameters, {arguments.threads} threads\n")
    print(
        "| their build | their parameters | our gradients | ours, M params/s | theirs, M params/s "
        f"| ratio (median of {arguments.pairs} pairs) | from, to |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    code = 0
    for build in (AVX2, THIS_MACHINE):
        command = [sys.executable, "-m", "bench.deepspeed_adam", *sys.argv[1:], "--build", build]
        code |= subprocess.run(command, env=_environment(build), check=False).returncode
    return code


def _environment(build: str) -> dict[str, str]:
    """DeepSpeed keeps its builds apart by folder only, and would take the one for the other."""
    environment = child_environment()
    folder = Path(environment.get("TORCH_EXTENSIONS_DIR", Path.home() / ".cache" / "torch_extensions"))
    environment["TORCH_EXTENSIONS_DIR"] = str(folder / f"horizon-bench-{'avx2' if build == AVX2 else 'native'}")
    if build == AVX2:
        environment["ATEN_CPU_CAPABILITY"] = "avx2"
    return environment


if __name__ == "__main__":
    sys.exit(main())
