"""Layers compiled for real, by the child process that a worker starts: the same training as with eager layers, to the
bit where a job is resumed.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.further import further
from tests.support.plans import folder_of, settings
from tests.support.processes import children_of, command_of
from tests.support.tiny_models import Engine, TinyModel, config_of
from torch import Tensor
from transformers import AutoModelForCausalLM

from horizon_server.children.entry import EventWriter
from horizon_server.engine.compiled import build
from horizon_server.engine.compiled.call_pattern import NotCompilable
from horizon_server.engine.compiled.layers import CompiledCall, CompiledLayers, call_patterns, is_complete
from horizon_server.engine.compiled.library import CodeLibrary, Target, layer_key
from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.micro_batch import MicroBatch
from horizon_server.engine.template import Template
from horizon_server.engine.trainer import Trainer
from horizon_server.errors import InvalidSpec
from horizon_server.events import Message
from horizon_server.jobs.compile_request import CompileRequest, MadeBook
from horizon_server.planning.model_folder import ModelShape
from horizon_server.planning.residency import product_bytes
from horizon_server.planning.trainable import open_for_training
from horizon_server.records.job import StopRequest
from horizon_server.spec import LORA, LoraSpec, TrainSpec
from horizon_server.store.adapters import MAGNITUDE
from horizon_server.store.checkpoint import load_checkpoint, save_checkpoint
from horizon_server.store.host_store import HostStore
from horizon_server.worker.compilation import Compilation, target_of

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="compiling layers takes g++")

# The documents of each row of each step. Not the 48 tokens that the code is best for, and one row of a single token,
# which runs eagerly.
ROWS: list[list[tuple[int, ...]]] = [[(9, 14, 30)], [(40,), (3, 5, 2), (21, 20)], [(17, 17), (1,)], [(60,), (2,)]]
MODEL = "qwen3"


class Heard(EventWriter):
    """Keeps the messages that were sent."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def send(self, line: Any) -> None:
        assert isinstance(line, Message)
        self.texts.append(line.text)


class Orders:
    current = StopRequest.NOTHING


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder, only for its config: the child makes weights of its own."""
    folder = tmp_path_factory.mktemp("model")
    model: Any = AutoModelForCausalLM.from_config(config_of(MODEL))  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)
    return folder


def request_for(folder: Path, library: Path, dtype: str = "float32", **more: Any) -> CompileRequest:
    return CompileRequest(
        model=str(folder), library=str(library), dtype=dtype, device="cpu", num_threads=1, num_tokens=48, **more
    )


def compilation_of(template: Template, request: CompileRequest, choice: Any) -> tuple[Compilation, Heard]:
    heard = Heard()
    return Compilation(template, request, choice=choice, events=heard, orders=Orders()), heard  # type: ignore[arg-type]


@dataclass(frozen=True)
class Filled:
    """A library that a worker has filled, and what it said."""

    path: Path
    heard: Heard
    killed: list[int]
    num_layers: int


@pytest.fixture(scope="module")
def filled(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Filled:
    """Compiled once for all tests that only need such code; its first compiler is killed."""
    path = tmp_path_factory.mktemp("state") / "compiled"
    compilation, heard = compilation_of(Template.from_folder(folder), request_for(folder, path), "on")
    killed: list[int] = []

    def kill_first() -> None:
        until = time.monotonic() + 240
        while not (found := compilers()) and time.monotonic() < until:
            time.sleep(0.002)
        killed.extend(found[:1])
        os.kill(killed[0], signal.SIGKILL)

    killer = threading.Thread(target=kill_first)
    killer.start()
    layers = compilation.layers(model_flops=1.0, before=None)
    killer.join()
    return Filled(path, heard, killed, layers.num_layers)


@pytest.fixture(scope="module")
def library(filled: Filled, folder: Path) -> Path:
    num_layers = Template.from_folder(folder).num_layers
    assert filled.num_layers == num_layers
    assert any("compiling layers: kind 1 of 1" in text for text in filled.heard.texts)
    assert filled.heard.texts[-1] == f"compiled layers: {num_layers} of {num_layers}"
    return filled.path


def test_a_compilation_that_is_killed_is_repeated(filled: Filled, folder: Path) -> None:
    """Else the job would fail, or train with eager layers, whose last bits are others."""
    assert filled.num_layers == Template.from_folder(folder).num_layers
    assert sum("was killed by SIGKILL" in text for text in filled.heard.texts) == 1
    assert filled.killed


def compilers() -> list[int]:
    return [pid for pid in children_of(os.getpid()) if "horizon_server.worker.compilation" in command_of(pid)]


def target(dtype: torch.dtype = torch.float32) -> Target:
    return Target(dtype=dtype, device=torch.device("cpu"), num_threads=1, num_tokens=48)


Pack = Callable[[Sequence[Tensor]], MicroBatch]


@pytest.fixture
def batches(engine: Engine) -> list[list[MicroBatch]]:
    return [
        [engine.pack(engine.documents(*lengths, seed=10 * step + index)) for index, lengths in enumerate(batch)]
        for step, batch in enumerate(ROWS)
    ]


@dataclass
class Trained:
    losses: list[float]
    norms: list[float]
    planes: dict[str, Tensor]
    compiled_calls: int
    activation_bytes: int


def train(
    model: TinyModel,
    batches: Sequence[Sequence[MicroBatch]],
    library: Path | None,
    monkeypatch: pytest.MonkeyPatch,
    *,
    dtype: torch.dtype = torch.float32,
    store: HostStore | None = None,
    state: dict[str, Any] | None = None,
    save_to: tuple[int, Path, Path] | None = None,
    scale: float = 1.0,
    product_layers: int = 0,
) -> Trained:
    """Take the steps that are left; with `save_to`, stop after that many and save there, with the model folder's
    files."""
    template, device = model.template, HostDevice(num_threads=1, compute_dtype=dtype)
    compiled = None
    if library is not None:
        compiled = CompiledLayers.load(template, CodeLibrary(library), target(dtype), product_layers=product_layers)
    calls: list[object] = []
    if compiled is not None:
        serve = compiled.serve

        def counted(*of: Any) -> CompiledCall | None:
            if call := serve(*of):
                calls.append(call)
            return call

        monkeypatch.setattr(compiled, "serve", counted)
    store = store or model.store(grad_dtype=dtype)
    recipe, execution = settings(optimizer_threads=1, adapter_scale=scale, product_layers=product_layers)
    trainer = Trainer(template, store, device, recipe, execution, num_steps=len(batches), compiled=compiled)
    if state is not None:
        trainer.restore(state)
    losses, norms, activation_bytes = [], [], 0
    for batch in batches[trainer.step :]:
        figures = trainer.train_step(batch)
        losses.append(figures.loss)
        norms.append(figures.grad_norm)
        activation_bytes = max(activation_bytes, figures.device_memory_bytes["activations"])
        if save_to is not None and figures.step == save_to[0]:
            save_checkpoint(store, save_to[1], source=save_to[2], trainer_state=trainer.state())
            break
    trainer.close()
    device.close()
    planes = {name: store.plane(name).clone() for name in ("hi", "lo", "exp_avg", "exp_avg_sq")}
    return Trained(
        losses=losses, norms=norms, planes=planes, compiled_calls=len(calls), activation_bytes=activation_bytes
    )


def test_compiled_training_is_eager_training_within_rounding(
    library: Path,
    batches: list[list[MicroBatch]],
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = engine.tiny_model(MODEL)
    eager, compiled = (train(model, batches, where, monkeypatch) for where in (None, library))
    assert compiled.losses == pytest.approx(eager.losses, rel=2e-6)
    assert compiled.norms == pytest.approx(eager.norms, rel=2e-6)
    # Forward and backward of every layer and row, but for the one of a single token; and the forward of the three rows
    # of the packing trial.
    num_rows = sum(len(batch) for batch in ROWS) - 1
    assert compiled.compiled_calls == (2 * num_rows + 3) * model.template.num_layers


def test_layers_that_keep_products_train_with_the_same_bits(
    library: Path,
    folder: Path,
    batches: list[list[MicroBatch]],
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    model, keeping = engine.tiny_model(MODEL), tmp_path / "compiled"
    shutil.copytree(library, keeping)
    template = Template.from_folder(folder)
    assert not is_complete(template, CodeLibrary(keeping), target(), product_layers=2)
    compilation, heard = compilation_of(template, request_for(folder, keeping, product_layers=2), "on")
    layers = compilation.layers(model_flops=1.0, before=None)
    assert layers.num_keeping == 2, heard.texts
    # The layer itself is not compiled again.
    assert [text for text in heard.texts if text.startswith("compiling")] == [
        "compiling layers: kind 1 of 1 again, to keep its products"
    ]
    assert any("with products kept" in text for text in heard.texts)
    assert is_complete(template, CodeLibrary(keeping), target(), product_layers=2)

    plain, kept = (train(model, batches, keeping, monkeypatch, product_layers=n) for n in (0, 2))

    assert (kept.losses, kept.norms) == (plain.losses, plain.norms)
    for name, plane in plain.planes.items():
        assert torch.equal(plane, kept.planes[name]), name
    shape = ModelShape.from_config(model.config.to_dict(), names=model.weights)
    # The largest step.
    tokens = max(sum(map(sum, batch)) for batch in ROWS[:2])
    a_layer = product_bytes(folder_of(model.template.layout, shape), *settings(tokens_per_step=tokens))
    assert kept.activation_bytes - plain.activation_bytes == 2 * a_layer


def test_layers_compiled_in_bf16_train_as_eager_ones(
    folder: Path,
    batches: list[list[MicroBatch]],
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    model = engine.tiny_model(MODEL)
    compilation, _ = compilation_of(model.template, request_for(folder, tmp_path, "bfloat16"), "on")
    assert compilation.layers(model_flops=1.0, before=None).num_layers == model.template.num_layers
    eager, compiled = (train(model, batches, where, monkeypatch, dtype=torch.bfloat16) for where in (None, tmp_path))
    # Fused operations round once where eager ones round after each: both are that far from the truth.
    assert compiled.losses == pytest.approx(eager.losses, rel=1e-3)
    assert compiled.norms == pytest.approx(eager.norms, rel=2e-2)
    assert compiled.compiled_calls > 0


def test_layers_that_are_frozen_in_part_or_whole_compile_as_kinds_of_their_own(
    folder: Path,
    batches: list[list[MicroBatch]],
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    # The first and the last layer are frozen: backward passes through the last one, and ends before the first.
    trainable = (r"layers\.1\.self_attn",)
    layout = open_for_training(folder, TrainSpec(trainable=trainable)).layout
    model = dataclasses.replace(engine.tiny_model(MODEL), template=Template.from_folder(folder, layout=layout))
    compilation, heard = compilation_of(model.template, request_for(folder, tmp_path, trainable=trainable), "on")
    assert compilation.layers(model_flops=1.0, before=None).num_layers == model.template.num_layers
    assert any("kind 2 of 2" in text for text in heard.texts)
    eager, compiled = (train(model, batches, where, monkeypatch) for where in (None, tmp_path))
    assert compiled.losses == pytest.approx(eager.losses, rel=2e-6)
    assert compiled.norms == pytest.approx(eager.norms, rel=2e-6)
    num_rows = sum(len(batch) for batch in ROWS) - 1
    # Forward of all layers and backward of two; and the packing trial.
    num_layers = model.template.num_layers
    assert compiled.compiled_calls == num_rows * (num_layers + 2) + 3 * num_layers


# DoRA's layers compute what LoRA's do, and more.
@pytest.mark.parametrize("dora", [True, *further(False)])
def test_layers_with_adapters_compile_with_their_scale_and_not_with_dropout(
    dora: bool,
    folder: Path,
    batches: list[list[MicroBatch]],
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    lora = LoraSpec(rank=4, alpha=6.0, dora=dora)
    layout = open_for_training(folder, TrainSpec(trainable=LORA, lora=lora)).layout
    generator = torch.Generator().manual_seed(3)
    added = {t.name: 0.1 * torch.randn(t.shape, generator=generator) for _, t in layout.tensors() if t.adapts}
    # Magnitudes of about the norms that the model's weights have.
    added |= {name: values + 1 for name, values in added.items() if name.endswith(MAGNITUDE)}
    tiny = engine.tiny_model(MODEL)
    template = Template.from_folder(folder, layout=layout)
    template.adapter_scale = lora.scale
    model = dataclasses.replace(tiny, template=template, weights={**tiny.weights, **added})
    request = dataclasses.replace(request_for(folder, tmp_path, trainable=LORA), lora=lora.model_dump(mode="json"))
    compilation, heard = compilation_of(template, request, "on")
    assert compilation.layers(model_flops=1.0, before=None).num_layers == template.num_layers, heard.texts
    eager, compiled = (train(model, batches, where, monkeypatch, scale=lora.scale) for where in (None, tmp_path))
    assert compiled.losses == pytest.approx(eager.losses, rel=2e-6)
    assert compiled.norms == pytest.approx(eager.norms, rel=2e-6)
    assert compiled.compiled_calls > 0
    # Code with another scale is other code.
    template.adapter_scale = 1.0
    assert not is_complete(template, CodeLibrary(tmp_path), target_of(request))
    template.adapter_dropout = 0.1
    assert all(isinstance(found, NotCompilable) for found in call_patterns(template, torch.float32).values())


def test_a_resumed_job_has_the_bits_of_one_that_was_not_stopped(
    library: Path,
    folder: Path,
    batches: list[list[MicroBatch]],
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    model = engine.tiny_model(MODEL)
    whole = train(model, batches, library, monkeypatch)
    saved = tmp_path / "step-2"
    train(model, batches, library, monkeypatch, save_to=(2, saved, folder))
    store = model.store()
    state = load_checkpoint(store, saved)
    rest = train(model, batches, library, monkeypatch, store=store, state=state)
    assert rest.losses == whole.losses[2:]
    for name, plane in whole.planes.items():
        assert torch.equal(plane, rest.planes[name]), name


def test_a_second_job_compiles_nothing(library: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    template = Template.from_folder(folder)
    monkeypatch.setattr("subprocess.Popen", None)
    compilation, heard = compilation_of(template, request_for(folder, library), "on")
    assert compilation.layers(model_flops=1.0, before=None).num_layers == template.num_layers
    assert heard.texts == [f"compiled layers: {template.num_layers} of {template.num_layers}"]
    # And where a second job waited for the first one's compiler.
    monkeypatch.setattr(build, "build_package", None)
    texts: list[str] = []
    assert build.build_missing(template, CodeLibrary(library), target(), texts.append) == []
    assert not any("compiling" in text for text in texts)


def test_the_daemon_knows_from_files_alone_what_was_compiled(library: Path, folder: Path) -> None:
    book, request = MadeBook(library), request_for(folder, library)
    assert book.has(request.identity())
    assert not book.has(dataclasses.replace(request, num_tokens=49).identity())
    # Who asks, and how urgently, does not matter.
    assert book.has(dataclasses.replace(request, urgency="idle").identity())
    assert (book.expected_s("cpu") or 0.0) > 0.0 and book.expected_s("cuda") is None


def test_torn_code_is_never_loaded(library: Path, folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "compiled"
    shutil.copytree(library, copy)
    template = Template.from_folder(folder)
    code = CodeLibrary(copy).code(layer_key(template, 0, target()))
    code.write_bytes(code.read_bytes()[:-100])
    layers = CompiledLayers.load(template, CodeLibrary(copy), target())
    assert (layers.num_layers, layers.refusals) == (0, ["there is no compiled code of it"])


def test_a_layer_that_computes_something_else_is_refused(
    library: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = Template.from_folder(folder)
    key = layer_key(template, 0, target())
    code = CodeLibrary(library).code(key)
    # What was compiled, but the layer has changed meanwhile.
    monkeypatch.setattr(build, "build_package", lambda graphs, path: shutil.copy(code, path))
    plain = template.layer
    monkeypatch.setattr(template, "layer", lambda *of: plain(*of) * 1.001)
    other = CodeLibrary(tmp_path)
    (refusal,) = build.build_missing(template, other, target(), lambda text: None)
    assert "compiled and eager layer differ by 1.0e-03" in refusal
    assert not other.code(key).exists()


def test_a_job_says_why_layers_are_not_compiled(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    template, request = Template.from_folder(folder), request_for(folder, tmp_path / "library")
    compilation, heard = compilation_of(template, request, "auto")
    assert compilation.layers(model_flops=1e18, before=None).num_layers == 0
    assert heard.texts[-1].startswith("compiled layers: 0 of 3; the others run eagerly: there is no C++ compiler (g++)")
    compilation, _ = compilation_of(template, request, "on")
    with pytest.raises(InvalidSpec, match=r"train\.compile is on, but not all .*there is no C\+\+ compiler"):
        compilation.layers(model_flops=1.0, before=None)


def test_a_stop_ends_the_compiler(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compilation, _ = compilation_of(Template.from_folder(folder), request_for(folder, tmp_path / "library"), "on")
    monkeypatch.setattr(Orders, "current", StopRequest.DRAIN)
    # Not refused, although nothing was compiled: the attempt ends before its first step.
    assert compilation.layers(model_flops=1.0, before=None).num_layers == 0


@pytest.mark.parametrize(
    ("choice", "flops", "before"), [("off", 1e18, None), ("auto", 1e12, None), ("on", 1e18, []), ("auto", 1e18, [])]
)
def test_short_jobs_and_those_that_began_with_eager_layers_compile_nothing(
    choice: str, flops: float, before: list[str] | None, folder: Path, tmp_path: Path
) -> None:
    compilation, heard = compilation_of(Template.from_folder(folder), request_for(folder, tmp_path / "none"), choice)
    assert compilation.layers(model_flops=flops, before=before).num_layers == 0
    assert not (tmp_path / "none").exists() and heard.texts == []
