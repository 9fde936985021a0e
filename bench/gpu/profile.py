"""Stage: one step kernel by kernel, what the device did not compute during it, and a trace for Perfetto."""

from __future__ import annotations

import time
from collections import defaultdict

import torch
from torch.profiler import ProfilerActivity

from bench.gpu.engine import job_trainer, set_up
from bench.gpu.kernels import CLASSES, Kernel, busy_s, device_kernels, host_operators, trace_events, write_trace
from bench.gpu.report import Report
from bench.gpu.shapes import SIZES, Engine
from bench.gpu.steps import choose_model, opened, rows_for
from bench.gpu.task import Task
from horizon_server.engine.device.timeline import Trace
from horizon_server.figures import StepFigures

TRACE = "trace.json.gz"
_NUM_LISTED = 25


def run(task: Task, report: Report) -> None:
    """Three tables for each engine; the trace's file is of the first."""
    for number, engine in enumerate(SIZES[task.device].profile_engines):
        _run(task, report, engine, writes_trace=number == 0)


def _run(task: Task, report: Report, engine: Engine, *, writes_trace: bool) -> None:
    sizes, model, trace = SIZES[task.device], choose_model(task), Trace()
    on_gpu = task.device == "cuda"
    rows = rows_for(model.template.vocab_size, kind="equal", tokens=sizes.profile_tokens, row_tokens=sizes.row_tokens)
    found = set_up(task, model, rows, engine)
    with opened(task, model, trace=trace) as (store, device):
        trainer = job_trainer(model, store, device, found)
        try:
            trainer.train_step(rows)
            plain = trainer.train_step(rows)
            trace.clear()
            # On a GPU kernels alone, which costs little; the host's operators would slow the launches that are measured
            # here.
            with torch.profiler.profile(
                activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU],
                # The host's operators run on compute's own thread.
                experimental_config=None
                if on_gpu
                else torch._C._profiler._ExperimentalConfig(profile_all_threads=True),
            ) as profiler:
                epoch_minus_clock_s = _epoch_minus_clock_s()
                profiled = trainer.train_step(rows)
        finally:
            trainer.close()
    events, zero_us = trace_events(profiler)
    kernels = device_kernels(events) if on_gpu else host_operators(profiler)
    _classes(kernels, report, engine)
    kernel_s = busy_s(events) if on_gpu else sum(kernel.seconds for kernel in kernels)
    _gaps(plain, profiled, kernel_s, report, engine)
    report.table(f"The longest, {engine}", {"kernel": "", "class": "", "s": ".4f", "count": "d", "each us": ".1f"})
    for kernel in kernels[:_NUM_LISTED]:
        cells = {"class": kernel.kind, "each_us": kernel.seconds / kernel.count * 1e6}
        report.row(kernel=kernel.name[:120], s=kernel.seconds, count=kernel.count, **cells)
    if not writes_trace:
        return
    write_trace(task.folder / TRACE, trace, events, epoch_minus_clock_s=epoch_minus_clock_s, zero_us=zero_us)
    report.say(f"\n{TRACE} opens in Perfetto: the engine's queues and what the profiler saw, on one time line.")


def _epoch_minus_clock_s() -> float:
    """How far two clocks are apart, by the quickest of a few looks: a thread may lose the processor in between."""
    looks = []
    for _ in range(9):
        before_s, epoch_s, after_s = time.perf_counter(), time.time(), time.perf_counter()
        looks.append((after_s - before_s, epoch_s - before_s))
    return min(looks)[1]


def _classes(kernels: list[Kernel], report: Report, engine: Engine) -> None:
    by_class: dict[str, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        by_class[kernel.kind].append(kernel)
    total_s = sum(kernel.seconds for kernel in kernels)
    report.table(f"One step by class of kernel, {engine}", {"class": "", "s": ".4f", "share": ".1%", "count": ",d"})
    for kind in CLASSES:
        seconds = sum(kernel.seconds for kernel in by_class[kind])
        count = sum(kernel.count for kernel in by_class[kind])
        report.row(**{"class": kind}, s=seconds, share=seconds / total_s if total_s else 0.0, count=count)


def _gaps(plain: StepFigures, profiled: StepFigures, kernel_s: float, report: Report, engine: Engine) -> None:
    """The engine counts a piece of work from its first launch to its end, so gaps between its kernels count as
    computing."""
    exposed_s = profiled.h2d.exposed_s + profiled.d2h.exposed_s + profiled.optimizer_exposed_s
    report.table(f"Where the step's time went, {engine}", {"what": "", "s": ".4f", "share": ".1%"})
    for what, seconds in (
        ("step without the profiler", plain.duration_s),
        ("step", profiled.duration_s),
        ("kernels ran on compute's stream", kernel_s),
        ("compute queue busy", profiled.compute_s),
        ("of it while the host launched", profiled.launching_s),
        ("launch gaps: queue busy, no kernel", max(0.0, profiled.compute_s - kernel_s)),
        ("exposed: copies and update", exposed_s),
        ("neither", profiled.duration_s - profiled.compute_s - exposed_s),
    ):
        report.row(what=what, s=seconds, share=seconds / profiled.duration_s)
