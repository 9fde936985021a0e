"""Makes the compiled layers of a model: traces, compiles and tries each kind that the library does not have yet.

Source: regional compilation as in torch.compile, https://docs.pytorch.org/tutorials/recipes/regional_compilation.html: one layer's code
serves all layers of its kind.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from horizon_server.engine.compiled.call_pattern import CallPattern, NotCompilable
from horizon_server.engine.compiled.graphs import trace_layer
from horizon_server.engine.compiled.layers import call_patterns
from horizon_server.engine.compiled.library import CodeLibrary, Entry, Target, layer_key, sha256_of
from horizon_server.engine.compiled.package import CompilerFailed, LayerCode, build_package
from horizon_server.engine.compiled.trial import TOLERANCE, try_layer
from horizon_server.engine.template import Template

Report = Callable[[str], None]
# Documents of the row that layers are tried on, in shares: several, because packed rows are the rule.
_NUM_DOCUMENTS = 3


def build_missing(template: Template, library: CodeLibrary, target: Target, report: Report) -> list[str]:
    """Compile the kinds of layers that the library lacks, and return why some could not be."""
    patterns = call_patterns(template)
    refusals = []
    for number, (group, pattern) in enumerate(patterns.items(), start=1):
        if isinstance(pattern, NotCompilable):
            continue  # `CompiledLayers.load` reports the reason
        key = layer_key(template, group, target)
        with library.locked(key):
            entry = library.find(key)
            if entry is None:
                report(f"compiling layers: kind {number} of {len(patterns)}; later jobs of this model use the result")
                entry = _build(template, group, pattern, library, key, target)
        if entry.refusal:
            refusals.append(entry.refusal)
        else:
            report(
                f"compiled layers, kind {number} of {len(patterns)}: {entry.speedup:.2f} times as fast, differences up to "
                f"{entry.error:.1e}, compiled in {entry.compile_s:.0f} s"
            )
    return refusals


def _build(
    template: Template, group: int, pattern: CallPattern, library: CodeLibrary, key: str, target: Target
) -> Entry:
    started_s = time.monotonic()
    num_tokens, dtype, device = target.num_tokens, target.dtype, target.device
    share = num_tokens // _NUM_DOCUMENTS
    call = template.probe_calls([share] * (_NUM_DOCUMENTS - 1) + [num_tokens - share * (_NUM_DOCUMENTS - 1)])[group]
    # Not in its place, because a compiler that is killed leaves a partial file.
    partial = library.make_scratch() / f"{key}.{os.getpid()}.pt2"
    try:
        graphs = trace_layer(template, group, pattern, call, num_tokens=num_tokens, dtype=dtype, device=device)
        build_package(graphs, partial)
        compile_s = time.monotonic() - started_s
        code = LayerCode(partial)
        trial = try_layer(
            template, group, pattern, call, code, graphs.returned, num_tokens=num_tokens, dtype=dtype, device=device
        )
        refusal = ""
        if trial.error > TOLERANCE[dtype]:
            refusal = (
                f"compiled and eager layer differ by {trial.error:.1e} in {trial.worst}; rounding explains at most "
                f"{TOLERANCE[dtype]:.0e}"
            )
        ranges = [graph.token_range(num_tokens) for graph in (graphs.forward, graphs.backward)]
        entry = Entry(
            refusal=refusal,
            sha256=sha256_of(partial),
            returned=graphs.returned,
            min_tokens=max(least for least, _ in ranges),
            max_tokens=min(most for _, most in ranges),
            error=trial.error,
            speedup=trial.speedup,
            compile_s=compile_s,
        )
        if not refusal:
            partial.replace(library.code(key))
    except CompilerFailed as error:
        # Not kept, so that a compiler that is installed later is used.
        return Entry(refusal=str(error))
    except NotCompilable as error:
        entry = Entry(refusal=str(error))
    finally:
        partial.unlink(missing_ok=True)
    library.add(key, entry)
    return entry
