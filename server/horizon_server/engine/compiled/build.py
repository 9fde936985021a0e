"""Makes the compiled layers of a model: traces, compiles and tries each kind that the library does not have yet.

Source: regional compilation as in torch.compile, https://docs.pytorch.org/tutorials/recipes/regional_compilation.html:
one layer's code serves all layers of its kind.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from horizon_server.engine.compiled.call_pattern import CallPattern, LayerCase, NotCompilable
from horizon_server.engine.compiled.graphs import LayerGraphs, trace_layer
from horizon_server.engine.compiled.layers import call_patterns
from horizon_server.engine.compiled.library import CodeLibrary, Entry, Kernels, Target, layer_key, sha256_of
from horizon_server.engine.compiled.package import CompilerFailed, LayerCode, build_package
from horizon_server.engine.compiled.trial import TOLERANCE, try_layer
from horizon_server.engine.fused.graphs import fuse_sums, has_fused_operators
from horizon_server.engine.fused.substitution import Substitution
from horizon_server.engine.template import Template
from horizon_server.store.triton_kernels import runs_triton

Report = Callable[[str], None]
# Documents of the row that layers are tried on, in shares: several, because packed rows are the rule.
_NUM_DOCUMENTS = 3


def build_missing(template: Template, library: CodeLibrary, target: Target, report: Report) -> list[str]:
    """Compile the kinds of layers that the library lacks, and return why some could not be."""
    patterns = call_patterns(template, target.dtype)
    refusals = []
    for number, (layer, pattern) in enumerate(patterns.items(), start=1):
        if isinstance(pattern, NotCompilable):
            continue  # `CompiledLayers.load` reports the reason
        key = layer_key(template, layer, target)
        kind = f"kind {number} of {len(patterns)}"
        with library.locked(key):
            entry = library.find(key)
            if entry is None:
                expected_s = library.expected_s()
                about = "" if expected_s is None else f", about {expected_s:.0f} s"
                report(f"compiling layers: {kind}{about}; later jobs of this model use the result")

                def report_of_kind(text: str, kind: str = kind) -> None:
                    report(f"compiling layers: {kind}{text}")

                entry = _Build(template, layer, pattern, library, key, target, report_of_kind).run()
        if entry.refusal:
            refusals.append(entry.refusal)
        else:
            report(
                f"compiled layers, {kind}: {entry.speedup:.2f} times as fast, differences up to {entry.error:.1e}, "
                f"kernels: {entry.kernels}, compiled in {entry.compile_s:.0f} s"
            )
    return refusals


@dataclass(frozen=True)
class _Build:
    """The making of one kind of layer, of which `layer` is the first. Candidates: what TorchInductor makes of the
    layer, and the same with Triton's operators in it.
    """

    template: Template
    layer: int
    pattern: CallPattern
    library: CodeLibrary
    key: str
    target: Target
    report: Report

    def run(self) -> Entry:
        """Compile and try the candidates; the fastest of those that compute the same is the library's."""
        started_s = time.monotonic()
        # Once, because it may empty the folder.
        self.library.make_scratch()
        with ExitStack() as stack:
            files = {kernels: stack.enter_context(self._partial(kernels)) for kernels in ("inductor", "triton")}
            try:
                entry = self._try(trace_layer(self._case()), files["inductor"], "inductor")
            except CompilerFailed as error:
                # Not kept, so that a compiler that is installed later is used.
                return Entry(refusal=str(error))
            except NotCompilable as error:
                entry = Entry(refusal=str(error))
            else:
                entry = self._better(entry, files["triton"])
            entry = replace(entry, compile_s=time.monotonic() - started_s)
            if not entry.refusal:
                files[entry.kernels].replace(self.library.code(self.key))
        self.library.add(self.key, entry)
        return entry

    def _better(self, entry: Entry, file: Path) -> Entry:
        """Of `entry` and the candidate with Triton's operators: the faster one, or the one that computes the same."""
        # Where the compiler crashes, takes too long or is stopped, this process ends; the next one finds the mark and
        # leaves it out.
        mark = self.library.scratch / f"{self.key}.tried"
        if not runs_triton(self.target.device) or mark.exists():
            return entry
        try:
            graphs = self._fused()
            if graphs is None:
                return entry
            mark.touch()
            self.report(" again, with Triton's kernels")
            other = self._try(graphs, file, "triton")
        except Exception as error:  # noqa: BLE001  # Triton and drivers raise anything; the first candidate is there
            (first_line, *_) = str(error).strip().splitlines() or ["no message"]
            self.report(f": not with Triton's kernels ({type(error).__name__}: {first_line[:300]})")
            return entry
        finally:
            mark.unlink(missing_ok=True)
        if other.refusal:
            self.report(f": not with Triton's kernels: {other.refusal}")
            return entry
        return other if entry.refusal or other.speedup > entry.speedup else entry

    def _fused(self) -> LayerGraphs | None:
        """The graphs of the layer with operators where it computes what they do, or None where it does so nowhere."""
        with Substitution(self.template.groups[self.template.layer_groups[self.layer]]).active():
            graphs = trace_layer(self._case())
        modules = (graphs.forward.module, graphs.backward.module)
        for module in modules:
            fuse_sums(module)
        return graphs if any(has_fused_operators(module) for module in modules) else None

    def _try(self, graphs: LayerGraphs, file: Path, kernels: Kernels) -> Entry:
        """Compile and try one candidate.

        Raises:
            NotCompilable: the compiler failed, or the code's gradients are not those of the layer.
        """
        build_package(graphs, file)
        trial = try_layer(self._case(), LayerCode(file), graphs.returned)
        refusal, tolerance = "", TOLERANCE[self.target.dtype]
        # Written so that a NaN does not pass.
        if not trial.error <= tolerance:
            refusal = (
                f"compiled and eager layer differ by {trial.error:.1e} in {trial.worst}; rounding explains at "
                f"most {tolerance:.0e}"
            )
        ranges = [graph.token_range(self.target.num_tokens) for graph in (graphs.forward, graphs.backward)]
        return Entry(
            refusal=refusal,
            sha256=sha256_of(file),
            returned=graphs.returned,
            min_tokens=max(least for least, _ in ranges),
            max_tokens=min(most for _, most in ranges),
            error=trial.error,
            speedup=trial.speedup,
            kernels=kernels,
        )

    def _case(self) -> LayerCase:
        num_tokens = self.target.num_tokens
        share = num_tokens // _NUM_DOCUMENTS
        lengths = [share] * (_NUM_DOCUMENTS - 1) + [num_tokens - share * (_NUM_DOCUMENTS - 1)]
        return LayerCase(
            template=self.template,
            layer=self.layer,
            pattern=self.pattern,
            lengths=tuple(lengths),
            dtype=self.target.dtype,
            device=self.target.device,
        )

    @contextmanager
    def _partial(self, kernels: Kernels) -> Iterator[Path]:
        # Not in its place, because a compiler that is killed leaves a partial file.
        path = self.library.scratch / f"{self.key}.{os.getpid()}.{kernels}.pt2"
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)
