"""The engine on a GPU as a curve over tokens per step, in one script of at most ten minutes, and the same model resident in PyTorch.

    PYTHONPATH=server:. python tools/build_kernels.py            # once: the optimizer kernel, needs g++
    PYTHONPATH=server:. python -m bench.gpu_curve --output curve.md

Needs torch, transformers, numpy and safetensors, nothing of the daemon. Weights are random. A point is the median of one to three
steps after a small one of two rows, with clipping at 1.0, so that each step pays for the deferred update of the step before. Padding
there is none. Rows are printed, and written, as they come; what would not end in time, or not fit, is a row that says so.

Model TFLOP/s count what training is worth: 6 per parameter in a matrix product and token, and attention. 6PT leaves attention out.
Hardware TFLOP/s add the recomputed forward of the layers. `--device host --shape tiny` runs the same code on a machine without a GPU.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig

from bench.gpu_machine import deepspeed_line, device_limit_bytes, free_host_bytes, link_line
from bench.gpu_resident import Resident, measure_resident
from bench.models import random_rows
from horizon_server.engine.device import device_for
from horizon_server.engine.device.protocol import Device
from horizon_server.engine.micro_batch import MicroBatch
from horizon_server.engine.template import Template
from horizon_server.engine.trainer import TrainConfig, Trainer
from horizon_server.errors import DoesNotFit
from horizon_server.figures import StepFigures
from horizon_server.planning.ledger import ActivationPlacement, DeviceKind, MemoryPlan, plan_memory
from horizon_server.planning.model_folder import ModelShape
from horizon_server.store.cpus import available_cpus
from horizon_server.store.host_store import HostStore
from horizon_server.store.native import kernel_info

QWEN25: dict[str, dict[str, Any]] = {
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
             "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
    "7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
           "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False},
    "tiny": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 512, "tie_word_embeddings": True},
}  # fmt: skip
TOKENS = tuple(1 << power for power in range(12, 19))
SEQUENCES = (1024, 4096)
_STEPS = ((1 << 15, 3), (1 << 17, 2))
"""Number of steps of a point up to this many tokens; one above that."""
_RESIDENT_SHARE = 0.3
HEADER = (
    "| shape | tokens/step | seq | inputs on | tokens/s | 6PT TFLOP/s | model TFLOP/s | hardware TFLOP/s "
    "| overlap | h2d overlap | d2h overlap | h2d exposed s | d2h exposed s | update exposed s | step s "
    "| device peak GiB | plan GiB | peak / plan | resident tokens/s | of resident |"
)


@dataclass(frozen=True, kw_only=True)
class Point:
    """One cell of the curve."""

    tokens: int
    sequence: int
    placement: ActivationPlacement
    plan: MemoryPlan


class Clock:
    """Says whether another piece of work of known cost still fits into the time given."""

    def __init__(self, budget_s: float) -> None:
        self._end_s = time.perf_counter() + budget_s

    def allows(self, cost_s: float) -> bool:
        """Whether this many seconds are left."""
        return time.perf_counter() + cost_s < self._end_s

    def part(self, share: float) -> Clock:
        """A clock for some of what is left."""
        return Clock(share * max(0.0, self._end_s - time.perf_counter()))


def main() -> int:
    """Measure what was asked for, and print and write the table."""
    arguments = _arguments()
    clock, kind = Clock(60 * arguments.minutes), arguments.device
    info = kernel_info()
    table = _Table(arguments.output)
    table.say(f"torch {torch.__version__}, {_device_name(kind)}, {available_cpus()} CPUs, optimizer kernel: {info.isa}")
    if not info.available:
        table.say(f"no compiled kernel ({info.reason}): update times are those of NumPy")
    if kind == "cuda":
        table.say(link_line())
    table.say(deepspeed_line())
    table.say("")
    table.say(HEADER)
    table.say("|" + " --- |" * (HEADER.count("|") - 1))
    for index, shape in enumerate(arguments.shape):
        part = clock.part(1 / (len(arguments.shape) - index))
        for line in curve(shape, kind=kind, tokens=arguments.tokens, sequences=arguments.sequence, clock=part):
            table.say(line)
    return 0


class _Table:
    """Lines on the screen and in a file, each at once, so that what was measured outlives whatever comes next."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        if file is not None:
            file.write_text("", "utf-8")

    def say(self, line: str) -> None:
        print(line, flush=True)
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as out:
                out.write(line + "\n")


def curve(shape: str, *, kind: DeviceKind, tokens: list[int], sequences: list[int], clock: Clock) -> Iterator[str]:
    """The rows of the table for one shape, smallest steps first, as long as there is time."""
    config = _config(shape, max_tokens=max(sequences))
    template = Template.from_config(config)
    points = [_point(template, config, t, s, kind=kind) for t in sorted(tokens) for s in sequences if s <= t]
    points_that_fit = []
    for point in points:
        why_not = _lack_of_memory(point, kind)
        if why_not:
            yield _row(shape, point, [why_not])
        else:
            points_that_fit.append(point)
    if not points_that_fit:
        return
    resident = measure_resident(
        config,
        [(point.tokens, point.sequence) for point in points_that_fit],
        num_parameters=template.layout.num_elements,
        kind=kind,
        limit_bytes=device_limit_bytes(kind),
        allows=clock.part(_RESIDENT_SHARE).allows,
    )
    _forget(kind)
    store = filled_store(template, kind=kind)
    seconds_per_token = 0.0
    # One device for the curve: pinning the planes takes longer than a point.
    device = device_for(kind, num_threads=available_cpus())
    try:
        for point in points_that_fit:
            if not clock.allows((_num_steps(point) + 0.5) * seconds_per_token * point.tokens):
                yield _row(shape, point, ["no time left"])
                continue
            try:
                reports = steps(template, store, device, point)
            except DoesNotFit as error:
                yield _row(shape, point, [f"does not fit: {error.message}"])
                device.close()
                _forget(kind)
                device = device_for(kind, num_threads=available_cpus())
                continue
            seconds_per_token = statistics.median(report.duration_s for report in reports) / point.tokens
            yield _row(shape, point, _cells(template, config, point, reports, kind=kind, resident=resident))
            _forget(kind)
        yield from (f"> {refusal}" for refusal in device.refusals)
    finally:
        device.close()
        store.close()


def _lack_of_memory(point: Point, kind: DeviceKind) -> str:
    """Why a point is not tried, in numbers."""
    device_bytes, device_limit = point.plan.device_total_bytes, device_limit_bytes(kind)
    if device_bytes > device_limit:
        return (
            f"does not fit: {device_bytes / 2**30:.1f} GiB planned on the device, {device_limit / 2**30:.1f} GiB there"
        )
    host_bytes, free_bytes = point.plan.host_total_bytes, free_host_bytes()
    if host_bytes > free_bytes:
        return f"does not fit: {host_bytes / 2**30:.1f} GiB planned on the host, {free_bytes / 2**30:.1f} GiB free"
    return ""


def _num_steps(point: Point) -> int:
    return next((steps for tokens, steps in _STEPS if point.tokens <= tokens), 1)


def steps(template: Template, store: HostStore, device: Device, point: Point) -> list[StepFigures]:
    """Train some steps of a point on a new trainer, after a small one that warms up."""
    config = TrainConfig(
        num_steps=1000,
        learning_rate=1e-6,
        lr_schedule="constant",
        max_grad_norm=1.0,
        tokens_per_step=point.tokens,
        activation_placement=point.placement,
        optimizer_threads=available_cpus(),
    )
    trainer = Trainer(template, store, device, config)
    try:
        rows = _rows(template.vocab_size, point)
        trainer.train_step(rows[:2])
        return [trainer.train_step(rows) for _ in range(_num_steps(point))]
    finally:
        trainer.close()


def filled_store(template: Template, *, kind: DeviceKind) -> HostStore:
    """A store with small random weights, the same few millions over and over, and ones for norms."""
    store = HostStore.allocate(template.layout, grad_dtype=torch.float32 if kind == "host" else torch.bfloat16)
    block = (0.02 * torch.randn(1 << 22, generator=torch.Generator().manual_seed(0))).bfloat16()
    plane = store.plane("hi")
    for start in range(0, plane.numel(), block.numel()):
        part = plane[start : start + block.numel()]
        part.copy_(block[: part.numel()])
    for name, shape in template.shapes.items():
        if len(shape) == 1:
            store.write_master(name, torch.ones(shape) if "norm" in name else torch.zeros(shape))
    return store


def _point(template: Template, config: PretrainedConfig, tokens: int, sequence: int, *, kind: DeviceKind) -> Point:
    """Inputs stay on the device where the plan says that they fit."""
    shape = ModelShape.from_config(config.to_dict())
    placements: tuple[ActivationPlacement, ...] = ("device", "host")
    for placement in placements:
        plan = plan_memory(
            template.layout,
            model=shape,
            tokens_per_step=tokens,
            sequence_length=sequence,
            device_kind=kind,
            grad_bytes=2 if kind == "cuda" else 4,
            num_threads=available_cpus(),
            activation_placement=placement,
        )
        if plan.device_total_bytes <= device_limit_bytes(kind):
            break
    return Point(tokens=tokens, sequence=sequence, placement=placement, plan=plan)


def _rows(vocab_size: int, point: Point) -> list[MicroBatch]:
    return random_rows(vocab_size, num_rows=point.tokens // point.sequence, row_tokens=point.sequence)


def hardware_flops_of(template: Template, *, model_flops: float, num_tokens: int) -> float:
    """What is really computed: layers once more than the model's own operations, but for the products that their recompute leaves out."""
    not_recomputed = template.vocab_size * template.hidden_size + template.num_skipped_parameters
    return model_flops * 4 / 3 - 2 * not_recomputed * num_tokens


def _cells(
    template: Template,
    config: PretrainedConfig,
    point: Point,
    reports: list[StepFigures],
    *,
    kind: DeviceKind,
    resident: Resident,
) -> list[str]:
    step_s = statistics.median(report.duration_s for report in reports)
    last = reports[-1]
    plain = resident.tokens_per_s.get((point.tokens, point.sequence))
    matrices = sum(_size(shape) for name, shape in template.shapes.items() if len(shape) > 1)
    head = config.vocab_size * config.hidden_size
    trained = matrices if template.tied else matrices - head
    model_flops = last.model_flops
    hardware_flops = hardware_flops_of(template, model_flops=model_flops, num_tokens=point.tokens)
    peak_bytes = torch.cuda.max_memory_allocated() if kind == "cuda" else sum(last.device_memory_bytes.values())
    return [
        f"{point.tokens / step_s:,.0f}",
        f"{6 * trained * point.tokens / step_s / 1e12:.2f}",
        f"{model_flops / step_s / 1e12:.2f}",
        f"{hardware_flops / step_s / 1e12:.2f}",
        f"{last.overlap_ratio:.3f}",
        f"{last.h2d.overlap_ratio:.3f}",
        f"{last.d2h.overlap_ratio:.3f}",
        f"{last.h2d.exposed_s:.3f}",
        f"{last.d2h.exposed_s:.3f}",
        f"{last.optimizer_exposed_s:.3f}",
        f"{step_s:.3f}",
        f"{peak_bytes / 2**30:.2f}",
        f"{point.plan.device_total_bytes / 2**30:.2f}",
        f"{peak_bytes / point.plan.device_total_bytes:.3f}",
        f"{plain:,.0f}" if plain else resident.why_not,
        f"{point.tokens / step_s / plain:.2f}" if plain else "",
    ]


def _row(shape: str, point: Point, cells: list[str]) -> str:
    first = [shape, f"{point.tokens}", f"{point.sequence}", point.placement]
    blank = [""] * (HEADER.count("|") - 1 - len(first) - len(cells))
    return "| " + " | ".join([*first, *cells, *blank]) + " |"


def _config(shape: str, *, max_tokens: int) -> PretrainedConfig:
    config: PretrainedConfig = AutoConfig.for_model("qwen2", **QWEN25[shape], max_position_embeddings=max_tokens)
    return config


def _device_name(kind: DeviceKind) -> str:
    return torch.cuda.get_device_name(0) if kind == "cuda" else "the host device"


def _forget(kind: DeviceKind) -> None:
    gc.collect()
    if kind == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu_curve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "host"], default="cuda")
    parser.add_argument("--shape", choices=sorted(QWEN25), nargs="+", default=["1.5b", "7b"])
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS), help="tokens per step")
    parser.add_argument("--sequence", type=int, nargs="+", default=list(SEQUENCES), help="tokens per row")
    parser.add_argument("--minutes", type=float, default=9.0, help="start nothing that would end later")
    parser.add_argument("--output", type=Path, help="write the table here as well")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("needs 1 CUDA device, found 0; --device host --shape tiny runs the same code without one")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
