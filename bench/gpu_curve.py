"""The engine on a GPU as a curve over tokens per step, in one script of at most ten minutes, and the same model resident in PyTorch.

    PYTHONPATH=server:. python tools/build_kernels.py            # once: the optimizer kernel, needs g++
    PYTHONPATH=server:. python -m bench.gpu_curve --output curve.md

Needs torch, transformers, numpy and safetensors, nothing of the daemon. Weights are random. Every point is the median of the steps
after a first one, with clipping at 1.0, so that each step pays for the deferred update of the step before. Padding there is none.

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
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from bench.models import random_rows
from bench.throughput import plain_step
from horizon_server.engine.device.factory import device_for
from horizon_server.engine.device.protocol import Device
from horizon_server.engine.micro_batch import MicroBatch
from horizon_server.engine.report import StepReport
from horizon_server.engine.template import Template
from horizon_server.engine.trainer import TrainConfig, Trainer
from horizon_server.errors import DoesNotFit
from horizon_server.store.cpus import available_cpus
from horizon_server.store.host_store import HostStore
from horizon_server.store.ledger import ActivationPlacement, DeviceKind, MemoryPlan, ModelShape, plan_memory
from horizon_server.store.native import kernel_info

QWEN25: dict[str, dict[str, Any]] = {
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
             "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
    "7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
           "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False},
    "tiny": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 512, "tie_word_embeddings": True},
}  # fmt: skip
TOKENS = (4096, 16384, 65536, 262144)
SEQUENCES = (1024, 4096)
LINK_BYTES = 1 << 30
_LARGE_TOKENS = 65536
"""Beyond this a point is one step after the first."""
HEADER = (
    "| shape | tokens/step | seq | inputs on | tokens/s | 6PT TFLOP/s | model TFLOP/s | hardware TFLOP/s | overlap | h2d exposed s "
    "| d2h exposed s | update exposed s | step s | device peak GiB | plan GiB | resident tokens/s |"
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
        """Whether so many seconds are left."""
        return time.perf_counter() + cost_s < self._end_s


def main() -> int:
    """Measure what was asked for, and print and write the table."""
    arguments = _arguments()
    clock, kind = Clock(60 * arguments.minutes), arguments.device
    info = kernel_info()
    lines = [
        f"torch {torch.__version__}, {_device_name(kind)}, {available_cpus()} CPUs, optimizer kernel: {info.isa}",
        *([] if info.available else [f"no compiled kernel ({info.reason}): update times are those of NumPy"]),
        "",
    ]
    if kind == "cuda":
        lines += [*_link_lines(), ""]
    lines += [HEADER, "|" + " --- |" * (HEADER.count("|") - 1)]
    _say(lines)
    for shape in arguments.shape:
        for line in curve(shape, kind=kind, tokens=arguments.tokens, sequences=arguments.sequence, clock=clock):
            lines.append(line)
            _say([line])
    if arguments.output is not None:
        arguments.output.write_text("\n".join(lines) + "\n", "utf-8")
    return 0


def curve(shape: str, *, kind: DeviceKind, tokens: list[int], sequences: list[int], clock: Clock) -> Iterator[str]:
    """The rows of the table for one shape, smallest steps first, as long as there is time."""
    config = _config(shape, max_tokens=max(sequences))
    template = Template.from_config(config)
    resident = {
        sequence: _resident_tokens_per_s(config, sequence=sequence, kind=kind, clock=clock) for sequence in sequences
    }
    store = filled_store(template, kind=kind)
    points = [_point(template, config, t, s, kind=kind) for t in sorted(tokens) for s in sequences if s <= t]
    seconds_per_token = 0.0
    # One device for the curve: pinning the planes takes longer than a point.
    device = device_for(kind, num_threads=available_cpus())
    try:
        for point in points:
            if not clock.allows(3 * seconds_per_token * point.tokens):
                yield _row(shape, point, ["no time left"])
                continue
            try:
                reports = steps(template, store, device, point)
            except DoesNotFit as error:
                yield _row(shape, point, [f"does not fit: {error.message}"])
                device.close()
                device = device_for(kind, num_threads=available_cpus())
                continue
            seconds_per_token = reports[-1].duration_s / point.tokens
            cells = _cells(template, config, point, reports, kind=kind, resident=resident[point.sequence])
            yield _row(shape, point, cells)
            _forget(kind)
        yield from (f"> {refusal}" for refusal in device.refusals)
    finally:
        device.close()
        store.close()


def steps(template: Template, store: HostStore, device: Device, point: Point) -> list[StepReport]:
    """Train some steps of a point on a new trainer; the first one warms up."""
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
        num_steps = 3 if point.tokens <= _LARGE_TOKENS else 2
        return [trainer.train_step(rows) for _ in range(num_steps)]
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
    limit_bytes = torch.cuda.get_device_properties(0).total_memory * 0.92 if kind == "cuda" else 1 << 30
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
        if plan.device_total_bytes <= limit_bytes:
            break
    return Point(tokens=tokens, sequence=sequence, placement=placement, plan=plan)


def _rows(vocab_size: int, point: Point) -> list[MicroBatch]:
    return random_rows(vocab_size, num_rows=point.tokens // point.sequence, row_tokens=point.sequence)


def _cells(
    template: Template,
    config: PretrainedConfig,
    point: Point,
    reports: list[StepReport],
    *,
    kind: DeviceKind,
    resident: str,
) -> list[str]:
    step_s = statistics.median(report.duration_s for report in reports[1:])
    last = reports[-1]
    matrices = sum(_size(shape) for name, shape in template.shapes.items() if len(shape) > 1)
    head = config.vocab_size * config.hidden_size
    trained = matrices if template.tied else matrices - head
    model_flops = last.model_flops
    hardware_flops = model_flops * 4 / 3 - 2 * head * point.tokens
    peak_bytes = torch.cuda.max_memory_allocated() if kind == "cuda" else sum(last.device_memory.values())
    return [
        f"{point.tokens / step_s:,.0f}",
        f"{6 * trained * point.tokens / step_s / 1e12:.2f}",
        f"{model_flops / step_s / 1e12:.2f}",
        f"{hardware_flops / step_s / 1e12:.2f}",
        f"{last.overlap_ratio:.3f}",
        f"{last.transfer['h2d'].exposed_s:.3f}",
        f"{last.transfer['d2h'].exposed_s:.3f}",
        f"{last.optimizer_exposed_s:.3f}",
        f"{step_s:.3f}",
        f"{peak_bytes / 2**30:.2f}",
        f"{point.plan.device_total_bytes / 2**30:.2f}",
        resident,
    ]


def _row(shape: str, point: Point, cells: list[str]) -> str:
    first = [shape, f"{point.tokens}", f"{point.sequence}", point.placement]
    blank = [""] * (HEADER.count("|") - 1 - len(first) - len(cells))
    return "| " + " | ".join([*first, *cells, *blank]) + " |"


def _resident_tokens_per_s(config: PretrainedConfig, *, sequence: int, kind: DeviceKind, clock: Clock) -> str:
    """The plain loop with everything on the device: bf16, gradient checkpointing, clip 1.0, fused AdamW with bf16 moments."""
    tokens = 4 * sequence
    if not clock.allows(60):
        return "no time left"
    try:
        model, optimizer = _resident(config, torch.device(kind if kind == "cuda" else "cpu"))
        rows = [_moved(row, model) for row in random_rows(config.vocab_size, num_rows=4, row_tokens=sequence)]
        seconds = []
        for _ in range(3):
            start_s = time.perf_counter()
            plain_step(model, optimizer, rows)
            _synchronize(kind)
            seconds.append(time.perf_counter() - start_s)
        return f"{tokens / statistics.median(seconds[1:]):,.0f}"
    except torch.OutOfMemoryError:
        return "does not fit"
    finally:
        model = optimizer = None  # type: ignore[assignment]
        _forget(kind)


def _resident(config: PretrainedConfig, device: torch.device) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    module: torch.nn.Module = model.train()
    return module, torch.optim.AdamW(module.parameters(), lr=1e-6, fused=True)


def _moved(row: MicroBatch, model: torch.nn.Module) -> MicroBatch:
    device = next(model.parameters()).device
    return MicroBatch(
        input_ids_T=row.input_ids_T.to(device),
        position_ids_T=row.position_ids_T.to(device),
        labels_T=row.labels_T.to(device),
        document_lengths=row.document_lengths,
    )


def _link_lines() -> list[str]:
    """GB/s of the link in each direction alone and in both at once, between pinned host memory and the device."""
    host = [torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    device = [torch.empty(LINK_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]  # type: ignore[no-untyped-call]

    def seconds(*, up: bool, down: bool) -> float:
        times = []
        for _ in range(4):
            torch.cuda.synchronize()
            start_s = time.perf_counter()
            if up:
                with torch.cuda.stream(streams[0]):
                    device[0].copy_(host[0], non_blocking=True)
            if down:
                with torch.cuda.stream(streams[1]):
                    host[1].copy_(device[1], non_blocking=True)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start_s)
        return statistics.median(times[1:])

    gigabytes = LINK_BYTES / 1e9
    alone_up, alone_down = gigabytes / seconds(up=True, down=False), gigabytes / seconds(up=False, down=True)
    both = 2 * gigabytes / seconds(up=True, down=True)
    return [f"link: h2d {alone_up:.1f} GB/s, d2h {alone_down:.1f} GB/s, both at once {both:.1f} GB/s together"]


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


def _synchronize(kind: DeviceKind) -> None:
    if kind == "cuda":
        torch.cuda.synchronize()


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size


def _say(lines: list[str]) -> None:
    print("\n".join(lines), flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_curve", description=__doc__)
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
