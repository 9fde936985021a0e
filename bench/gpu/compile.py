"""Stage: how long the compiler takes for each kind of layer, how much faster its code is, and how the engine's calls of it behave.

Compiled here, in the stage's own process, with what a job's compiling child is given; the stages after it use the result.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from bench.gpu.engine import target_of
from bench.gpu.report import Report
from bench.gpu.shapes import SIZES
from bench.gpu.steps import choose_model
from bench.gpu.task import Task
from horizon_server.engine.compiled.build import build_missing
from horizon_server.engine.compiled.layers import call_patterns
from horizon_server.engine.compiled.library import CodeLibrary, layer_key
from horizon_server.planning.gpu_compiler import compiler_environment, what_is_missing


def run(task: Task, report: Report) -> None:
    """A row for each kind of layer."""
    model, library = choose_model(task), CodeLibrary(Path(task.library))
    scratch = library.make_scratch()
    os.environ.update(TORCHINDUCTOR_CACHE_DIR=str(scratch), TMPDIR=str(scratch))
    if task.device == "cuda":
        # Read when the compiler is first loaded, which is below.
        os.environ.update(compiler_environment(os.environ, scratch))
        for missing in what_is_missing(os.environ):
            report.say(f"Compiling for the GPU lacks {missing}.")
    target = target_of(model, SIZES[task.device].row_tokens)
    model.template.place_buffers(lambda tensor: tensor.to(target.device))
    start_s = time.perf_counter()
    refusals = build_missing(model.template, library, target, report.say)
    seconds = time.perf_counter() - start_s
    report.table(
        "Compiled layers",
        {"kind": "d", "kernels": "", "times as fast": ".2f", "error": ".1e", "s": ".1f", "note": ""},
    )
    for kind in call_patterns(model.template, target.dtype):
        entry = library.find(layer_key(model.template, kind, target))
        if entry is None or entry.refusal:
            why = entry.refusal if entry else "; ".join(refusals) or "it cannot be traced"
            report.row(kind=kind, s=seconds, note=why)
        else:
            report.row(
                kind=kind, kernels=entry.kernels, times_as_fast=entry.speedup, error=entry.error, s=entry.compile_s
            )
    if task.device == "cuda":
        torch.cuda.synchronize()
