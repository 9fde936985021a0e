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
from horizon_server.engine.compiled.kept import keeping_products
from horizon_server.engine.compiled.layers import call_patterns, keeping_kinds
from horizon_server.engine.compiled.library import (
    CodeLibrary,
    Entry,
    Kernels,
    Target,
    layer_key,
    products_key,
    sha256_of,
)
from horizon_server.engine.compiled.package import CompilerFailed, LayerCode, build_package
from horizon_server.engine.compiled.trial import Trial, tolerance_of, try_layer
from horizon_server.engine.fused.graphs import fuse_sums, has_fused_operators
from horizon_server.engine.fused.substitution import Substitution
from horizon_server.engine.template import Template
from horizon_server.store.triton_kernels import runs_triton

Report = Callable[[str], None]
# Documents of the row that layers are tried on, in shares: several, because packed rows are the rule.
_NUM_DOCUMENTS = 3


def build_missing(
    template: Template, library: CodeLibrary, target: Target, report: Report, *, product_layers: int = 0
) -> list[str]:
    """Compile the kinds of layers that the library lacks, and return why some could not be. Those of the last
    `product_layers` get a second pair, which keeps products; a reason not to is only reported."""
    patterns, keeping = call_patterns(template, target.dtype), keeping_kinds(template, product_layers)
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
            if layer in keeping and not entry.refusal and library.find(products_key(key)) is None:
                report(f"compiling layers: {kind} again, to keep its products")
                pair = _Build(template, layer, pattern, library, key, target, report).run_keeping(entry)
                report(f"compiled layers, {kind}: {_how_it_keeps(pair)}")
        if entry.refusal:
            refusals.append(entry.refusal)
        else:
            report(
                f"compiled layers, {kind}: {entry.speedup:.2f} times as fast, differences up to {entry.error:.1e}, "
                f"kernels: {entry.kernels}, compiled in {entry.compile_s:.0f} s"
            )
    return refusals


def _how_it_keeps(pair: Entry) -> str:
    if pair.refusal:
        return f"products are not kept: {pair.refusal}"
    return f"with products kept {pair.speedup:.2f} times as fast as without, compiled in {pair.compile_s:.0f} s"


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

    def run_keeping(self, entry: Entry) -> Entry:
        """Compile and try the pair that keeps products, of the candidate that is the library's."""
        started_s = time.monotonic()
        self.library.make_scratch()
        key = products_key(self.key)
        mark = self.library.scratch / f"{key}.tried"
        with self._partial(entry.kernels, key) as file:
            try:
                if mark.exists():
                    # As with the other candidates: the layer itself is compiled, and its job is to start.
                    raise NotCompilable("the compiler ended before it had made the layer that keeps them")
                mark.touch()
                found = self._try_keeping(entry, file)
            except CompilerFailed as error:
                return Entry(refusal=str(error))
            except NotCompilable as error:
                found = Entry(refusal=str(error))
            finally:
                mark.unlink(missing_ok=True)
            found = replace(found, compile_s=time.monotonic() - started_s)
            if not found.refusal:
                file.replace(self.library.code(key))
        self.library.add(key, found)
        return found

    def _try_keeping(self, entry: Entry, file: Path) -> Entry:
        """Compile the pair that keeps products and try it against the other one.

        Raises:
            NotCompilable: the compiler failed, or the two do not compute the same bits.
        """
        graphs = self._fused() if entry.kernels == "triton" else trace_layer(self._case())
        assert graphs is not None, "it has the operators"
        graphs = keeping_products(graphs)
        build_package(graphs, file)
        code, other = LayerCode(file), LayerCode(self.library.code(self.key))
        trial = try_layer(self._case(), code, graphs.returned, against=other)
        # A job's numbers must not depend on what there is room for. A GPU's attention adds up in the order of arrival:
        # gradients of the layer whose own bits differ from run to run can only be near.
        if trial.differing:
            again = try_layer(self._case(), other, entry.returned, against=other)
            if not trial.differing <= again.differing or not trial.error <= tolerance_of(self.target):
                raise NotCompilable(
                    f"{trial.worst} differs by {trial.error:.1e} where products are kept; it must have the same bits"
                )
        return self._entry(graphs, file, entry.kernels, trial)

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
        for module in (*modules, graphs.joint.module):
            fuse_sums(module)
        return graphs if any(has_fused_operators(module) for module in modules) else None

    def _try(self, graphs: LayerGraphs, file: Path, kernels: Kernels) -> Entry:
        """Compile and try one candidate.

        Raises:
            NotCompilable: the compiler failed, or the code's gradients are not those of the layer.
        """
        build_package(graphs, file)
        trial = try_layer(self._case(), LayerCode(file), graphs.returned)
        refusal, tolerance = "", tolerance_of(self.target)
        # Written so that a NaN does not pass.
        if not trial.error <= tolerance:
            refusal = (
                f"compiled and eager layer differ by {trial.error:.1e} in {trial.worst}; rounding explains at "
                f"most {tolerance:.0e}"
            )
        return replace(self._entry(graphs, file, kernels, trial), refusal=refusal)

    def _entry(self, graphs: LayerGraphs, file: Path, kernels: Kernels, trial: Trial) -> Entry:
        ranges = [graph.token_range(self.target.num_tokens) for graph in (graphs.forward, graphs.backward)]
        return Entry(
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
            matmul=self.target.matmul,
        )

    @contextmanager
    def _partial(self, kernels: Kernels, key: str = "") -> Iterator[Path]:
        # Not in its place, because a compiler that is killed leaves a partial file.
        path = self.library.scratch / f"{key or self.key}.{os.getpid()}.{kernels}.pt2"
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)
