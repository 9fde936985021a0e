"""GPUs that a plan can ask about without having one: the parameters of the step-time model from data sheets, estimated,
not measured.

A rate is the data sheet's peak times a share that training kernels reach. Those of the H100 are measured, on one of the
SXM form with torch 2.11 (bench/RESULTS.md, 2026-11-26). In a step of a 7B model, where the power limit lowers the
clock, products ran at 710 of 989 TFLOP/s (722 in runs of a few milliseconds) and attention on documents of 4,096 at 252
forward and 224 backward (290 to 330 and 247 to 269); kernels of compiled layers moved 2.9 of 3.35 TB/s. The other GPUs
get the same shares, but for their products and for attention, whose kernels do not use what is new in Hopper: an H100
is held back by its power limit more than older and smaller GPUs are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from horizon_server.errors import InvalidSpec
from horizon_server.planning.bandwidth import adamw_bytes_per_parameter
from horizon_server.planning.rates import Curve, DeviceRates, WidthRates

# Shares of the peak by the tokens of a micro-batch; the H100's, relative to its share at 4,096 tokens.
_BY_TOKENS = ((256, 0.55), (1024, 0.835), (4096, 1.0), (16384, 1.03))
_ELEMENTWISE, _ACCUMULATE = 0.87, 0.739
# Of PCI Express, pinned memory: 50 of 63 GB/s. Measured: 55 up and 53 down alone, 41 to 48 both at once.
_LINK = 0.8

# Estimated: single-threaded gather and scatter of rows of some KiB, and a memset, on a server's processor.
_GATHER, _SCATTER, _ZERO = 10e9, 5e9, 20e9
# Parameters with compressed states that a host updates a second, in units of those with exact ones. Where one core
# feeds on much memory, by `bench.adamw` (bench/RESULTS.md); with more cores for the same memory it nears 26 / 12.25.
_COMPRESSED = 1.4
# Estimated: Python and CUDA launches of one layer, 34 kernels forward and 114 for recompute with backward; a piece of
# queued work.
_FORWARD_LAUNCH_S, _BACKWARD_LAUNCH_S, _SUBMIT_S = 0.5e-3, 1.7e-3, 25e-6
_WIDTH = 4096

_RESERVE_BYTES = 1 << 30
# What the CUDA context and fragmentation take of an accelerator is not planned with.
_USABLE = 0.96
PROCESS_BYTES = 700 << 20
"""What each further process that uses a GPU takes for its context, code and libraries, with or without tensors. Not
measured yet."""

FP8_TIMES_AS_FAST = 1.55
"""Products in FP8, in units of those in bf16: what an independent review of the engine estimated for an H100. Not
measured yet."""

PCIE_4, PCIE_5 = 31.5e9, 63e9
"""Bytes per second of 16 lanes in one direction."""


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Shares of the peak that attention reaches, by the length of a document."""

    forward: Curve
    backward: Curve


_ESTIMATED_ATTENTION = Attention(forward=((1024, 0.333), (4096, 0.435)), backward=((1024, 0.263), (4096, 0.364)))
_HOPPER_ATTENTION = Attention(
    forward=((256, 0.08), (1024, 0.16), (4096, 0.255), (16384, 0.28)),
    backward=((256, 0.07), (1024, 0.147), (4096, 0.226), (16384, 0.26)),
)


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A data sheet. `bf16_flops_per_s` is dense; `gemm_share` is of it, at 4,096 tokens; `device_name` is a part of the
    driver's name."""

    device_name: str
    memory_bytes: int
    bf16_flops_per_s: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    gemm_share: float
    attention: Attention = _ESTIMATED_ATTENTION


GPUS: Mapping[str, Gpu] = {
    # NVIDIA H100 data sheet, SXM5: 989.4 TFLOP/s, 80 GB at 3.35 TB/s, PCIe 5.
    "h100": Gpu(
        device_name="H100 80GB HBM3",
        memory_bytes=80 * 10**9,
        bf16_flops_per_s=989.4e12,
        memory_bytes_per_s=3.35e12,
        link_bytes_per_s=PCIE_5,
        gemm_share=0.697,
        attention=_HOPPER_ATTENTION,
    ),
    # The same data sheet, PCIe card: 756 TFLOP/s, 80 GB at 2.0 TB/s, 350 W.
    "h100-pcie": Gpu(
        device_name="H100 PCIe",
        memory_bytes=80 * 10**9,
        bf16_flops_per_s=756e12,
        memory_bytes_per_s=2.0e12,
        link_bytes_per_s=PCIE_5,
        gemm_share=0.6,
        attention=_HOPPER_ATTENTION,
    ),
    # NVIDIA H200 data sheet, SXM: 989.4 TFLOP/s, 141 GB at 4.8 TB/s, PCIe 5.
    "h200": Gpu(
        device_name="H200",
        memory_bytes=141 * 10**9,
        bf16_flops_per_s=989.4e12,
        memory_bytes_per_s=4.8e12,
        link_bytes_per_s=PCIE_5,
        gemm_share=0.697,
        attention=_HOPPER_ATTENTION,
    ),
    # NVIDIA A100 data sheet, 80 GB SXM: 312 TFLOP/s, 2.039 TB/s, PCIe 4.
    "a100-80g": Gpu(
        device_name="A100-SXM4-80GB",
        memory_bytes=80 * 10**9,
        bf16_flops_per_s=312e12,
        memory_bytes_per_s=2.039e12,
        link_bytes_per_s=PCIE_4,
        gemm_share=0.8,
    ),
    # NVIDIA L40S data sheet: 362 TFLOP/s dense, 48 GB at 864 GB/s, PCIe 4, 350 W.
    "l40s": Gpu(
        device_name="L40S",
        memory_bytes=48 * 10**9,
        bf16_flops_per_s=362e12,
        memory_bytes_per_s=0.864e12,
        link_bytes_per_s=PCIE_4,
        gemm_share=0.6,
    ),
    # NVIDIA Ada architecture paper, RTX 4090: 165.2 TFLOP/s in bf16 with fp32 sums, 24 GB at 1,008 GB/s, PCIe 4.
    "rtx-4090": Gpu(
        device_name="RTX 4090",
        memory_bytes=24 * 10**9,
        bf16_flops_per_s=165.2e12,
        memory_bytes_per_s=1.008e12,
        link_bytes_per_s=PCIE_4,
        gemm_share=0.85,
    ),
}


def gpu_named(name: str) -> Gpu:
    """The data sheet of a GPU, by the name that users give it.

    Raises:
        InvalidSpec: the GPU is not in the table; the message lists those that are.
    """
    found = GPUS.get(name.strip().lower())
    if found is None:
        raise InvalidSpec.of("machine.gpu", f"gpu is {name!r:.40}, which is not known; known GPUs: {', '.join(GPUS)}")
    return found


def usable_device_bytes(memory_bytes: int) -> int:
    """What a job may take of a GPU's memory."""
    return max(0, int(memory_bytes * _USABLE) - _RESERVE_BYTES)


def estimated_rates(
    name: str, *, host_bytes_per_s: float, link_bytes_per_s: float | None = None, num_threads: int = 1
) -> DeviceRates:
    """The rates of a GPU that was not measured, next to a host whose memory has this bandwidth."""
    gpu = gpu_named(name)
    peak, link = gpu.bf16_flops_per_s, link_bytes_per_s or _LINK * gpu.link_bytes_per_s
    width = WidthRates(
        hidden_size=_WIDTH,
        gemm_flops_per_s=tuple((tokens, peak * gpu.gemm_share * share) for tokens, share in _BY_TOKENS),
        elementwise_bytes_per_s=_ELEMENTWISE * gpu.memory_bytes_per_s,
        head_bytes_per_s=_ELEMENTWISE * gpu.memory_bytes_per_s,
    )
    return DeviceRates(
        name=name.strip().lower(),
        num_threads=num_threads,
        measured=False,
        peak_flops_per_s=peak,
        attention_forward_flops_per_s=tuple((tokens, share * peak) for tokens, share in gpu.attention.forward),
        attention_backward_flops_per_s=tuple((tokens, share * peak) for tokens, share in gpu.attention.backward),
        accumulate_bytes_per_s=_ACCUMULATE * gpu.memory_bytes_per_s,
        widths=(width,),
        h2d_bytes_per_s=link,
        d2h_bytes_per_s=link,
        # Rows are gathered into staging memory first, piece by piece with their copies.
        gather_bytes_per_s=min(_GATHER, link),
        scatter_bytes_per_s=min(_SCATTER, link),
        zero_bytes_per_s=_ZERO,
        adamw_bytes_per_s=host_bytes_per_s,
        compressed_parameters_per_s=_COMPRESSED * host_bytes_per_s / adamw_bytes_per_parameter(2),
        forward_launch_s=_FORWARD_LAUNCH_S,
        backward_launch_s=_BACKWARD_LAUNCH_S,
        submit_s=_SUBMIT_S,
    )


def rates_of_machine(
    name: str, *, host_bytes_per_s: float, link_bytes_per_s: float | None, measured: DeviceRates | None
) -> DeviceRates:
    """The rates of a machine that is asked about. What this node has measured on the same GPU wins over the table; the
    host's bandwidth and the link's, where given, are those that were asked about.

    Raises:
        InvalidSpec: the GPU is not known.
    """
    gpu = gpu_named(name)
    if measured is None or gpu.device_name not in measured.name:
        return estimated_rates(name, host_bytes_per_s=host_bytes_per_s, link_bytes_per_s=link_bytes_per_s)
    # As if the processors differed as the memories do.
    compressed = measured.compressed_parameters_per_s * host_bytes_per_s / measured.adamw_bytes_per_s
    found = dataclasses.replace(measured, adamw_bytes_per_s=host_bytes_per_s, compressed_parameters_per_s=compressed)
    if link_bytes_per_s is None:
        return found
    return dataclasses.replace(found, h2d_bytes_per_s=link_bytes_per_s, d2h_bytes_per_s=link_bytes_per_s)
