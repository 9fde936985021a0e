"""Stage: how long the compiler takes for each kind of layer, how much faster its code is, and how the engine's calls of
it behave.

Compiled here, in the stage's own process, with what a job's compiling child is given; the stages after it use the
result.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from bench.gpu.engine import target_of
from bench.gpu.report import Report
from bench.gpu.shapes import SIZES
from bench.gpu.steps import Model, choose_model, model_of
from bench.gpu.task import Task
from horizon_server.engine.compiled.build import build_missing
from horizon_server.engine.compiled.call_pattern import NotCompilable
from horizon_server.engine.compiled.layers import call_patterns
from horizon_server.engine.compiled.library import CodeLibrary, Target, layer_key
from horizon_server.engine.compiled.package import LayerCode
from horizon_server.planning.gpu_compiler import compiler_environment, what_is_missing

RETURN_COLUMNS = {"tokens": ",d", "host returned ms": ".2f", "all ended ms": ".2f", "share": ".2f", "note": ""}
COMPILED_COLUMNS = {
    "layers of": "",
    "kind": "d",
    "kernels": "",
    "times as fast": ".2f",
    "error": ".1e",
    "s": ".1f",
    "note": "",
}
_NUM_RUNS, _MOST_TOKENS = 10, 4096


def run(task: Task, report: Report) -> None:
    """A row for each kind of layer, of the model and next to adapters; then how far the host runs ahead."""
    model, library = choose_model(task), CodeLibrary(Path(task.library))
    scratch = library.make_scratch()
    os.environ.update(TORCHINDUCTOR_CACHE_DIR=str(scratch), TMPDIR=str(scratch))
    if task.device == "cuda":
        # Read when the compiler is first loaded, which is below.
        os.environ.update(compiler_environment(os.environ, scratch))
        for missing in what_is_missing(os.environ):
            report.say(f"Compiling for the GPU lacks {missing}.")
    target = target_of(model, SIZES[task.device].row_tokens)
    # A base in 4 bits is computed by the same code as one in bf16: its layers find bf16 on the device.
    for what, one in (("the model", model), ("adapters", model_of(model.shape, model.kind, "bf16"))):
        rows = _compile(one, library, target, what, report)
        # Now, in case that the next one does not end in time.
        report.table(f"Compiled layers, {what}", COMPILED_COLUMNS)
        for row in rows:
            report.row(**row)
        if what == "the model":
            code = next(
                filter(None, (_code(one, library, target, kind) for kind in set(one.template.layer_kinds))), None
            )
            report.table("When the host returns from ten runs of a layer", RETURN_COLUMNS)
            report.row(**_host_returns(one, code, target))
    if task.device == "cuda":
        torch.cuda.synchronize()


def _compile(model: Model, library: CodeLibrary, target: Target, what: str, report: Report) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    model.template.place_buffers(lambda tensor: tensor.to(target.device))
    start_s = time.perf_counter()
    # Not next to adapters, of which no point keeps products.
    keeping = model.template.num_layers if what == "the model" else 0
    refusals = build_missing(model.template, library, target, report.say, product_layers=keeping)
    seconds = time.perf_counter() - start_s
    for kind in call_patterns(model.template, target.dtype):
        cells: dict[str, object] = {"layers_of": what, "kind": kind}
        entry = library.find(layer_key(model.template, kind, target))
        if entry is None or entry.refusal:
            why = entry.refusal if entry else "; ".join(refusals) or "it cannot be traced"
            rows.append({**cells, "s": seconds, "note": why})
        else:
            figures = {"times_as_fast": entry.speedup, "error": entry.error, "s": entry.compile_s}
            rows.append({**cells, **figures, "kernels": entry.kernels})
    return rows


def _code(model: Model, library: CodeLibrary, target: Target, kind: int) -> tuple[int, LayerCode] | None:
    key = layer_key(model.template, kind, target)
    entry = library.find(key)
    return None if entry is None or entry.refusal else (kind, LayerCode(library.code(key)))


def _host_returns(model: Model, found: tuple[int, LayerCode] | None, target: Target) -> dict[str, object]:
    """A host that runs ahead of the device has launched ten runs long before the device has ended them."""
    if found is None:
        return {"note": "no layer was compiled"}
    (kind, code), template = found, model.template
    tokens = min(target.num_tokens, _MOST_TOKENS)
    try:
        (pattern, call) = (
            call_patterns(template, target.dtype)[kind],
            template.probe_calls((tokens,), target.dtype)[kind],
        )
        tensors = None if isinstance(pattern, NotCompilable) else pattern.tensors_of(call)
        if tensors is None:
            return {"note": "the layer's call has no pattern"}
        places = template.places[kind + 1]
        inputs = [
            torch.zeros(place.piece.shape, dtype=place.dtype_in(target.dtype), device=target.device) for place in places
        ]
        hidden = torch.zeros(1, tokens, template.hidden_size, dtype=target.dtype, device=target.device)
        _wait(target)
        with torch.no_grad():
            code.forward([*inputs, hidden, *tensors])
            _wait(target)
            start_s = time.perf_counter()
            for _ in range(_NUM_RUNS):
                code.forward([*inputs, hidden, *tensors])
            returned_s = time.perf_counter() - start_s
            _wait(target)
            # A processor has nothing left to end: another look at the clock would show who else is on it.
            ended_s = time.perf_counter() - start_s if target.device.type == "cuda" else returned_s
    except Exception as error:  # noqa: BLE001  # the layers are compiled, which the stages after this one need
        return {"note": f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"}
    note = "" if target.device.type == "cuda" else "a processor runs what it is called for"
    return {
        "tokens": tokens,
        "host_returned_ms": 1e3 * returned_s,
        "all_ended_ms": 1e3 * ended_s,
        "share": returned_s / ended_s,
        "note": note,
    }


def _wait(target: Target) -> None:
    if target.device.type == "cuda":
        torch.cuda.synchronize()
