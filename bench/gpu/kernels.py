"""What a profiled step spent its time on: device kernels (on the CPU: operators) by class, and how long compute's
stream ran any.

Names decide the class, so a multiplication in a norm that is not fused counts as `other`; the longest kernels are
listed by name.
"""

from __future__ import annotations

import gzip
import json
import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
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
    ("rotary", r"rope|rotary|(?<![a-z])(cos|sin|cat|neg)"),
    ("swiglu", r"silu|swiglu|sigmoid"),
    ("copy", r"copy|_to_copy|clone|fill|zero"),
    ("other", r"scatter|gather|index|embedding"),
    ("add", r"add"),
)
CLASSES = tuple(sorted({"other", *(name for name, _ in _CLASSES)}, key=str.lower))
DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")


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


def device_kernels(events: Iterable[Mapping[str, Any]]) -> list[Kernel]:
    """What ran on a GPU, the longest first, from the profiler's events."""
    micros: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for event in events:
        if event.get("cat") in DEVICE_CATEGORIES:
            micros[event["name"]] += event["dur"]
            counts[event["name"]] += 1
    return [
        Kernel(name=name, kind=class_of(name), seconds=total / 1e6, count=counts[name])
        for name, total in micros.most_common()
    ]


def host_operators(profiler: torch.profiler.profile) -> list[Kernel]:
    """What ran on the CPU, the longest first, each without what it called."""
    operators = [
        Kernel(name=event.key, kind=class_of(event.key), seconds=event.self_cpu_time_total / 1e6, count=event.count)
        for event in profiler.key_averages()
    ]
    return sorted(operators, key=lambda operator: -operator.seconds)


def busy_s(events: Iterable[Mapping[str, Any]]) -> float:
    """How long the busiest stream, which is compute's, ran kernels. Copies do not count, and what other streams ran
    meanwhile neither."""
    intervals: dict[object, list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "kernel":
            intervals[event.get("args", {}).get("stream")].append((event["ts"], event["ts"] + event["dur"]))
    return max(map(_union_s, intervals.values()), default=0.0)


def _union_s(intervals: list[tuple[float, float]]) -> float:
    total, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
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
    file: Path, trace: Trace, events: Sequence[Mapping[str, Any]], *, epoch_minus_clock_s: float, zero_us: float
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
    # Without the calls to the driver and the arrows from them, which are most of the file.
    kept = [event for event in events if event["ph"] == "M" or event.get("cat") in (*DEVICE_CATEGORIES, "cpu_op")]
    with gzip.open(file, "wt", encoding="utf-8", compresslevel=6) as out:
        json.dump({"displayTimeUnit": "ms", "traceEvents": [*own, *kept]}, out)
