"""Layers compiled for real in two ways, with the compiler's own kernels and with Triton's operators: the faster one is
used."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.tiny_models import config_of, template_of
from tests.support.traced_layers import trace

from horizon_server.engine.compiled import build
from horizon_server.engine.compiled.call_pattern import CallPattern, LayerCase
from horizon_server.engine.compiled.graphs import LayerGraphs
from horizon_server.engine.compiled.layers import CompiledLayers, call_patterns
from horizon_server.engine.compiled.library import CodeLibrary, Target, layer_key
from horizon_server.engine.compiled.package import CompilerFailed, LayerCode, build_package
from horizon_server.engine.compiled.trial import Trial, try_layer
from horizon_server.engine.fused.graphs import fuse_sums, has_fused_operators
from horizon_server.engine.fused.substitution import Substitution
from horizon_server.engine.template import Template
from horizon_server.store.layout import with_trained

# The compiler uses parts of torch that are to be replaced.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

TARGET = Target(dtype=torch.float32, device=torch.device("cpu"), num_threads=1, num_tokens=48)
TEMPLATE = template_of(config_of("llama"))


@pytest.fixture
def timings(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Trial]]:
    """Has builds of this test make both candidates on a CPU, and gives their trials these timings; collects the
    trials."""

    def set_timings(*speedups: float, errors: tuple[float, ...] = ()) -> list[Trial]:
        trials: list[Trial] = []

        def timed(*args: Any, **kwargs: Any) -> Trial:
            trials.append(try_layer(*args, **kwargs))
            number = len(trials) - 1
            error = errors[number] if errors else trials[-1].error
            return dataclasses.replace(trials[-1], speedup=speedups[number], error=error)

        monkeypatch.setattr(build, "runs_triton", lambda device: True)
        monkeypatch.setattr(build, "try_layer", timed)
        return trials

    return set_timings


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The code of the layer with Triton's operators, compiled once."""
    if shutil.which("g++") is None:
        pytest.skip("compiling layers takes g++")
    folder = tmp_path_factory.mktemp("code")
    (pattern,) = call_patterns(TEMPLATE, TARGET.dtype).values()
    assert isinstance(pattern, CallPattern)
    with Substitution(TEMPLATE.groups[0]).active():
        graphs = trace(TEMPLATE, 0, pattern)
    for graph in (graphs.forward, graphs.backward):
        fuse_sums(graph.module)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "compiler"))
        build_package(graphs, folder / "code.pt2")
    return folder / "code.pt2"


@pytest.fixture
def compiled(code: Path, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Gives both candidates that code, because to compile takes long; collects whether operators were in what was to be
    compiled."""
    found: list[bool] = []

    def compile_once(graphs: LayerGraphs, path: Path) -> None:
        found.append(has_fused_operators(graphs.forward.module))
        shutil.copy(code, path)

    monkeypatch.setattr(build, "build_package", compile_once)
    return found


def test_the_faster_candidate_is_used(
    timings: Callable[..., list[Trial]], compiled: list[bool], tmp_path: Path
) -> None:
    trials, texts = timings(1.5, 2.0), list[str]()
    library = CodeLibrary(tmp_path / "library")

    assert build.build_missing(TEMPLATE, library, TARGET, texts.append) == []

    assert compiled == [False, True]
    assert len(trials) == 2 and all(trial.error <= 2e-6 for trial in trials)
    assert texts[1] == "compiling layers: kind 1 of 1 again, with Triton's kernels"
    assert "2.00 times as fast" in texts[2] and "kernels: triton" in texts[2]
    key = layer_key(TEMPLATE, 0, TARGET)
    entry = library.find(key)
    assert entry is not None and (entry.kernels, entry.speedup) == ("triton", 2.0)
    # Nothing is left but the code, its facts and the lock.
    assert sorted(path.suffix for path in (tmp_path / "library").glob(f"{key}*")) == [".json", ".lock", ".pt2"]
    assert list(library.scratch.glob(f"{key}*")) == []
    # What `CompiledLayers` runs is that code, for other rows too.
    assert CompiledLayers.load(TEMPLATE, library, TARGET).num_layers == TEMPLATE.num_layers
    (pattern,) = call_patterns(TEMPLATE, TARGET.dtype).values()
    assert isinstance(pattern, CallPattern)
    case = LayerCase(
        template=TEMPLATE,
        layer=0,
        pattern=pattern,
        lengths=(20, 9),
        dtype=TARGET.dtype,
        device=TARGET.device,
    )
    again = try_layer(case, LayerCode(library.code(key)), entry.returned)
    assert again.error <= 2e-6
    # A process that only loads code knows the operators.
    check = "import sys; from horizon_server.engine.compiled.package import LayerCode; LayerCode(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", check, str(library.code(key))], timeout=240, check=False)
    assert done.returncode == 0


def test_every_kind_of_layer_of_a_partly_frozen_model_has_both_candidates(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    layout = with_trained(TEMPLATE.layout, lambda name: "layers.1.mlp" in name, is_bfloat16=lambda _: False)
    template, found, texts = Template.from_config(config_of("llama"), layout=layout), list[bool](), list[str]()
    assert (template.layer_groups, template.layer_kinds) == ([0, 0, 0], [0, 1, 0])

    def noted(graphs: LayerGraphs, path: Path) -> None:
        found.append(has_fused_operators(graphs.forward.module))
        path.touch()

    monkeypatch.setattr(build, "runs_triton", lambda device: True)
    monkeypatch.setattr(build, "build_package", noted)
    monkeypatch.setattr(build, "LayerCode", lambda file: None)
    monkeypatch.setattr(build, "try_layer", lambda *args, **kwargs: Trial(error=0.0, worst="", speedup=2.0))
    assert build.build_missing(template, CodeLibrary(tmp_path), TARGET, texts.append) == []
    assert found == [False, True] * 2
    assert not any("not with" in text for text in texts)


@pytest.mark.parametrize(
    ("speedups", "errors", "kernels", "heard"),
    [
        ((1.5, 1.4), (), "inductor", ""),
        ((1.5, 2.0), (0.0, 1.0), "inductor", "not with Triton's kernels: compiled and eager layer differ by 1.0e+00"),
        (
            (1.5, 2.0),
            (0.0, float("nan")),
            "inductor",
            "not with Triton's kernels: compiled and eager layer differ by nan",
        ),
        ((1.5, 1.4), (1.0, 0.0), "triton", ""),
    ],
    ids=["slower", "wrong", "not a number", "only one that is right"],
)
def test_which_candidate_is_used(
    speedups: tuple[float, ...],
    errors: tuple[float, ...],
    kernels: str,
    heard: str,
    timings: Callable[..., list[Trial]],
    compiled: list[bool],
    tmp_path: Path,
) -> None:
    trials, texts, library = timings(*speedups, errors=errors), list[str](), CodeLibrary(tmp_path)
    assert build.build_missing(TEMPLATE, library, TARGET, texts.append) == []
    entry = library.find(layer_key(TEMPLATE, 0, TARGET))
    assert entry is not None and entry.kernels == kernels and len(trials) == len(compiled) == 2
    assert heard in "\n".join(texts) and ("not with" in "\n".join(texts)) == bool(heard)


def test_a_compiler_that_ended_the_process_is_not_asked_again(
    timings: Callable[..., list[Trial]], compiled: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, left = CodeLibrary(tmp_path / "library"), tmp_path / "left"
    compile_once = build.__dict__["build_package"]

    def keeps_what_a_crash_would_leave(graphs: LayerGraphs, path: Path) -> None:
        compile_once(graphs, path)
        if compiled[-1]:
            shutil.copytree(library.scratch, left)

    monkeypatch.setattr(build, "build_package", keeps_what_a_crash_would_leave)
    timings(1.5, 2.0)
    build.build_missing(TEMPLATE, library, TARGET, lambda text: None)

    after = CodeLibrary(tmp_path / "after")
    shutil.copytree(left, after.scratch)
    trials = timings(1.5)
    assert build.build_missing(TEMPLATE, after, TARGET, lambda text: None) == []
    entry = after.find(layer_key(TEMPLATE, 0, TARGET))
    assert len(trials) == 1 and entry is not None and entry.kernels == "inductor"


def test_a_layer_without_norms_rotations_and_gates_has_one_candidate(
    timings: Callable[..., list[Trial]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    timings()
    template, library, asked = template_of(config_of("gpt2")), CodeLibrary(tmp_path), list[bool]()

    def compile_nothing(graphs: LayerGraphs, path: Path) -> None:
        asked.append(has_fused_operators(graphs.forward.module))
        path.touch()

    monkeypatch.setattr(build, "build_package", compile_nothing)
    monkeypatch.setattr(build, "LayerCode", lambda path: None)
    monkeypatch.setattr(build, "try_layer", lambda *_, **__: Trial(error=0.0, worst="", speedup=1.5))
    assert build.build_missing(template, library, TARGET, lambda text: None) == []
    entry = library.find(layer_key(template, 0, TARGET))
    assert asked == [False] and entry is not None and entry.kernels == "inductor"


def test_no_compiler_means_no_second_candidate(
    timings: Callable[..., list[Trial]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timings()

    def fails(graphs: LayerGraphs, path: Path) -> None:
        raise CompilerFailed("there is none")

    monkeypatch.setattr(build, "build_package", fails)
    library, texts = CodeLibrary(tmp_path), list[str]()
    assert build.build_missing(TEMPLATE, library, TARGET, texts.append) == ["there is none"]
    assert library.find(layer_key(TEMPLATE, 0, TARGET)) is None and len(texts) == 1


def test_a_second_candidate_that_fails_costs_nothing(
    timings: Callable[..., list[Trial]], compiled: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timings(1.5)
    texts = list[str]()

    def fails(*_: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(build, "fuse_sums", fails)
    library = CodeLibrary(tmp_path)
    assert build.build_missing(TEMPLATE, library, TARGET, texts.append) == []
    entry = library.find(layer_key(TEMPLATE, 0, TARGET))
    assert entry is not None and entry.kernels == "inductor" and compiled == [False]
    assert "compiling layers: kind 1 of 1: not with Triton's kernels (RuntimeError: no such kernel)" in texts


def test_code_is_loaded_for_one_thread(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For several, each run would wait until a GPU has ended the run before, and hold Python's lock meanwhile."""
    loader, asked = torch._C._aoti.AOTIModelPackageLoader, list[bool]()

    def load(path: str, name: str, run_single_threaded: bool, num_runners: int, device: int) -> Any:
        asked.append(run_single_threaded)
        return loader(path, name, run_single_threaded, num_runners, device)

    monkeypatch.setattr(torch._C._aoti, "AOTIModelPackageLoader", load)
    LayerCode(code)
    assert asked == [True, True]
