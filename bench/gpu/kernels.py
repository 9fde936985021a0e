"""What a profiled step spent its time on: device kernels (on the CPU: operators) by class, and how long the device ran any.

Names decide the class, so a multiplication in a norm that is not fused counts as `other`; the longest kernels are listed by name.
"""

from __future__ import annotations

import gzip
import json
import re
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from horizon_server.engine.device.timeline import Trace

# In this order: a fused kernel's name holds all that it does, and its first match is what it is for.
_CLASSES = (
    ("copy", r"memcpy|memset"),
    ("attention", r"flash|fmha|sdpa|attention|cudnn_generated"),
    ("GEMM", r"gemm|nvjet|cutlass|xmma|cublas|wgmma|aten::(add)?mm\b|aten::bmm|mkldnn_linear|scaled_mm|splitk"),
    ("loss", r"softmax|nll_loss|cross_entropy"),
    ("norm", r"norm|rsqrt|mean|pow"),
    ("rotary", r"rope|rotary|\bcos|\bsin|cat|neg"),
    ("swiglu", r"silu|swiglu|sigmoid"),
    ("copy", r"copy|_to_copy|clone|fill|zero"),
    ("add", r"add"),
)
CLASSES = (*dict.fromkeys(name for name, _ in _CLASSES), "other")
_DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """All runs of one kernel or operator."""

    name: str
    kind: str
    seconds: float
    count: int


def class_of(name: str) -> str:
    """The class of a kernel's or operator's name."""
    return next((kind for kind, pattern in _CLASSES if re.search(pattern, name, re.IGNORECASE)), "other")


def kernels_of(profiler: torch.profiler.profile, *, on_device: bool) -> list[Kernel]:
    """What ran, the longest first."""
    kernels = []
    for event in profiler.key_averages():
        is_on_device = event.device_type == torch.autograd.DeviceType.CUDA
        micros = event.self_device_time_total if on_device else event.self_cpu_time_total
        if micros > 0 and is_on_device == on_device:
            kernel = Kernel(name=event.key, kind=class_of(event.key), seconds=micros / 1e6, count=event.count)
            kernels.append(kernel)
    return sorted(kernels, key=lambda kernel: -kernel.seconds)


def busy_s(events: Iterable[dict[str, Any]]) -> float:
    """How long the device ran at least one kernel: the union of their intervals, copies left out."""
    intervals = sorted((event["ts"], event["ts"] + event["dur"]) for event in events if event.get("cat") == "kernel")
    total, end = 0.0, float("-inf")
    for start, stop in intervals:
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total / 1e6


def trace_events(profiler: torch.profiler.profile) -> tuple[list[dict[str, Any]], float]:
    """The profiler's events in Chrome's format, and the microseconds since the epoch that its zero is at."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        plain = json.loads(file.read_text("utf-8", errors="replace"))
    return plain["traceEvents"], plain.get("baseTimeNanoseconds", 0) / 1e3


def write_trace(
    file: Path, trace: Trace, events: Sequence[dict[str, Any]], *, epoch_minus_clock_s: float, zero_us: float
) -> None:
    """One compressed trace for Perfetto: the engine's queues, and below them what the profiler saw, on one time line.

    `epoch_minus_clock_s` turns the queues' clock into seconds since the epoch, `zero_us` is the profiler's zero there.
    """
    with tempfile.TemporaryDirectory() as folder:
        own_file = Path(folder) / "queues.json"
        trace.write(own_file)
        own = json.loads(own_file.read_text("utf-8"))["traceEvents"]
    origin_s = min((span.start_s for span in trace.spans()), default=0.0)
    shift_us = (origin_s + epoch_minus_clock_s) * 1e6 - zero_us
    for event in own:
        event["pid"] = "engine queues"
        if "ts" in event:
            event["ts"] += shift_us
    kept = [event for event in events if event.get("ph") != "X" or event.get("cat") in (*_DEVICE_CATEGORIES, "cpu_op")]
    with gzip.open(file, "wt", encoding="utf-8", compresslevel=6) as out:
        json.dump({"displayTimeUnit": "ms", "traceEvents": [*own, *kept]}, out)
