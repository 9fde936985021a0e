"""One step of each thing that a job can ask of a cuda device, against the same step of the host device in fp32, within
bf16.

tests/gpu runs them on a real device; the golden tests run the same code on the CPU through the driver's port. So a
test's body is known to work before it meets a GPU, and only the device's own arithmetic is new there.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.drives import drive_folders, on_drives, store_on_drives, values_of
from tests.support.tiny_models import Run, TinyModel, micro_batch
from tests.support.traced_layers import traced_layers
from torch import Tensor

from horizon_server.engine.attention import kernels
from horizon_server.engine.compiled.build import build_missing
from horizon_server.engine.compiled.layers import CompiledCall, CompiledLayers
from horizon_server.engine.compiled.library import CodeLibrary, Target
from horizon_server.engine.device.cuda import CudaDevice
from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.fp8 import Fp8Weight, cast_rows, scaled_product, weight_gradient
from horizon_server.engine.generation.generator import TokenGenerator
from horizon_server.engine.generation.sequences import GenerationOptions
from horizon_server.engine.micro_batch import MicroBatch
from horizon_server.engine.template import Template
from horizon_server.errors import DoesNotFit
from horizon_server.planning.gpu_compiler import compiler_environment, what_is_missing
from horizon_server.planning.residency import has_frozen_table
from horizon_server.recipe import Matmul
from horizon_server.records.execution import ActivationPlacement
from horizon_server.store.adamw import STATE_PLANES, AdamWStep, UnitStates, update_states
from horizon_server.store.adapters import with_adapters
from horizon_server.store.host_store import split_master
from horizon_server.store.layout import Packing, build_layout

LOSS, NORM, GRADIENTS = 1e-2, 2e-2, 5e-2
"""How far a step in bf16 may be from one in fp32: relative, of the gradients in their norm."""
LEFT_BYTES, LARGE_STEP_BYTES = 96 << 20, 259 << 20
"""What is left to a step that must not fit, and what it takes: its logits, 4096 x 32768 in bf16, are 256 MiB."""

# Twice what FP8 itself changes in these narrow layers: a difference in a last bit decides which way a value is rounded
# to 8 bits.
_FP8_GRADIENTS = 0.25
_PRODUCT = 6e-3
_RANK, _SCALE = 4, 1.5
_PROMPTS = ([5, 40, 17], list(range(30, 51)), [9])
_NUM_NEW = 12


@dataclass(frozen=True, kw_only=True)
class DeviceSteps:
    """The checks. `new_device` makes a cuda device, the rest are fixtures of the test."""

    new_device: Callable[[], CudaDevice]
    tiny_model: Callable[..., TinyModel]
    start: Callable[..., Run]
    folder: Path
    patch: pytest.MonkeyPatch

    def check_adapters(self, architecture: str, base: Packing) -> None:
        """LoRA, on a base in bf16 or packed."""
        self._check(with_lora(self.tiny_model(architecture), base), adapter_scale=_SCALE)

    def check_frozen_on_device(self, architecture: str, base: Packing) -> None:
        """LoRA, where packed weights, the head and a table that nothing updates stay on the device."""
        model = with_lora(self.tiny_model(architecture), base)
        packed_layers = model.template.num_layers if base != "none" else 0
        ends: dict[str, Any] = {"resident_head": True, "resident_table": has_frozen_table(model.template.layout)}
        self._check(model, adapter_scale=_SCALE, packed_layers=packed_layers, **ends)

    def check_states_on_device(self, architecture: str, max_grad_norm: float | None) -> None:
        """Layers that the device updates, by a kernel of its own where it is a GPU: the bits of the host's, of one
        update of numbers of all sizes, and of the weights and moments after three steps."""
        self._check_update(torch.bfloat16)
        self._check_update(torch.float32)
        model, runs = self.tiny_model(architecture), []
        for kept in ({}, {"resident_layers": 3, "state_layers": 2}):
            device = self.new_device()
            store = model.store(grad_dtype=None if max_grad_norm is None else device.gradient_dtype)
            # Attention's backward may add in the order of arrival otherwise.
            options: dict[str, Any] = {"max_grad_norm": max_grad_norm, "deterministic": True, **kept}
            run = self.start(model, store=store, device=device, **options)
            figures = [run.trainer.train_step(_rows()) for _ in range(3)]
            assert run.trainer._optimizer.states.holds_any == bool(kept)
            run.trainer.flush()
            run.trainer.close()
            planes = [store.plane(plane).view(torch.uint8).clone() for plane in STATE_PLANES]
            runs.append(([one.loss for one in figures], [one.grad_norm for one in figures], planes))
        (losses, norms, planes), (found_losses, found_norms, found_planes) = runs
        assert (found_losses, found_norms) == (losses, norms)
        assert all(torch.equal(*pair) for pair in zip(planes, found_planes, strict=True))

    def check_states_from_drives(self, architecture: str, max_grad_norm: float | None) -> None:
        """Layers that the device updates and whose states have their home on drives: the weights and moments of a run
        in memory, after three steps and another job's turn."""
        model, found = self.tiny_model(architecture), []
        options: dict[str, Any] = {"max_grad_norm": max_grad_norm, "deterministic": True}
        with ExitStack() as stack:
            for kept in ({}, {"resident_layers": 3, "state_layers": 2}):
                device = self.new_device()
                grad_dtype = None if max_grad_norm is None else device.gradient_dtype
                store = model.store(grad_dtype=grad_dtype)
                if kept:
                    on = on_drives(model.template.layout, drive_folders(self.folder), with_lo=True)
                    store = stack.enter_context(store_on_drives(model.template.layout, on, grad_dtype=grad_dtype))
                    for name, weight in model.weights.items():
                        store.write_master(name, weight)
                    store.start_training(1)
                run = self.start(model, store=store, device=device, **options, **kept)
                for _ in range(2):
                    run.trainer.train_step(_rows())
                run.trainer.release_device()
                run.trainer.train_step(_rows())
                run.trainer.flush()
                run.trainer.close()
                names = [tensor.name for _, tensor in store.layout.tensors()]
                places = itertools.product(names, STATE_PLANES)
                values = {(name, plane): values_of(store, name, plane).view(torch.uint8) for name, plane in places}
                found.append(values)
        assert all(torch.equal(values, found[1][place]) for place, values in found[0].items())

    def _check_update(self, grad_dtype: torch.dtype) -> None:
        """AdamW of one unit in the device's memory and in the host's, from the same numbers."""
        shapes = {"model.embed_tokens.weight": (8, 32), "model.norm.weight": (32,)}
        shapes |= {"model.layers.0.proj.weight": (997, 61), "model.layers.0.norm.weight": (37,)}
        unit, device = build_layout(shapes, num_layers=1, tied=True).units[1], self.new_device()
        size, generator = unit.trained_elements, torch.Generator().manual_seed(0)
        exponents = torch.empty(size).uniform_(-140, 20, generator=generator)
        gradient = (torch.randn(size, generator=generator) * torch.exp2(exponents)).to(grad_dtype)
        hi, lo = torch.empty(size, dtype=torch.bfloat16), torch.empty(size, dtype=torch.int16)
        split_master(torch.randn(size, generator=generator) * 0.02, hi, lo)
        host = UnitStates(hi=hi, lo=lo, exp_avg=torch.zeros(size), exp_avg_sq=torch.zeros(size))
        there = UnitStates(**{name: device.place(tensor.clone()) for name, tensor in vars(host).items()})
        placed = device.place(gradient.clone())
        for step in range(1, 4):
            hyper = AdamWStep(
                step=step, learning_rate=3e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, grad_scale=0.37
            )
            update_states(unit, host, gradient, hyper, num_threads=1)
            device.run(partial(update_states, unit, there, placed, hyper, num_threads=1))
        for one, other in zip(host.tensors, there.tensors, strict=True):
            assert torch.equal(one.view(torch.uint8), other.cpu().view(torch.uint8))
        device.close()

    def check_chunks(self, architecture: str, placement: ActivationPlacement, attention_layers: int) -> None:
        """Rows in chunks, whose hidden states stay on the device, or come and go. Of some layers, attention's outputs
        wait on the host."""
        options: dict[str, Any] = {"activation_placement": placement, "attention_layers": attention_layers}
        self._check(self.tiny_model(architecture), chunk_tokens=8, **options)

    def check_fp8(self, architecture: str, matmul: Matmul = "fp8") -> None:
        """Products in FP8, which the host computes by hand: one of each kind, and a step."""
        device = self.new_device()
        generator = torch.Generator().manual_seed(0)
        one, other = (torch.randn(size, 64, generator=generator).bfloat16() for size in (48, 32))
        products = []
        for place in (device.place, torch.clone):
            a, b = place(one), place(other)
            casts = cast_rows(a, torch.float8_e5m2), cast_rows(b, torch.float8_e4m3fn)
            # Of 37 tokens, which are no whole block.
            sums = weight_gradient(a[:37, :48].t(), b.repeat(2, 1)[:37])
            forward = Fp8Weight.of(b, for_backward=False).product(a)
            products.append([scaled_product(*casts, torch.bfloat16), forward, sums])
        device.close()
        for found, wanted in zip(*products, strict=True):
            found, wanted = found.cpu().float(), wanted.float()
            assert float((found - wanted).norm() / wanted.norm()) <= _PRODUCT

        model = self.tiny_model(architecture)
        in_fp8 = self._check(model, limit=_FP8_GRADIENTS, matmul=matmul)[2]
        in_bf16 = self._check(model)[2]
        assert float((in_fp8 - in_bf16).norm() / in_bf16.norm()) > GRADIENTS, "nothing was in FP8"

    def check_paged_experts(self, architecture: str) -> None:
        """Experts in pages of one or two, some of which a micro-batch does not visit. Against whole layers on the same
        device: in bf16, routers choose otherwise than the host's in fp32."""
        model = self.tiny_model(architecture, experts_implementation="eager")
        found, wanted = (
            self._device_step(model, self.new_device(), expert_page_elements=elements) for elements in (5000, 0)
        )
        _compare(wanted, found, _PRODUCT)

    def check_kept_products(self, architecture: str) -> None:
        """Fused attention whose output is kept: backward takes it, for every layer and row. Layers are compiled for a
        GPU; elsewhere their graphs run as plain operations."""
        model, used = self.tiny_model(architecture), list[bool]()
        has_kernel = kernels._has_kernel

        def recorded(*arguments: Any) -> bool:
            used.append(has_kernel(*arguments))
            return used[-1]

        num_layers, device = model.template.num_layers, self.new_device()
        if device.place(torch.zeros(())).is_cuda:
            library, target = self._compiled_for(model, device, product_layers=num_layers)
            layers = CompiledLayers.load(model.template, library, target, product_layers=num_layers)
        else:
            layers = traced_layers(model.template, device.compute_dtype, product_layers=num_layers)
        device.close()
        assert layers.num_keeping == num_layers, (layers.refusals, layers.refusals_to_keep)
        self.patch.setattr(kernels, "_has_kernel", recorded)
        counts = []
        for product_layers in (0, num_layers):
            # The host's attention and the trial of packing are not counted.
            def forget(run: Run) -> None:
                assert run.trainer.supports_packing
                used.clear()

            self._check(model, before=forget, product_layers=product_layers, compiled=layers)
            counts.append(len(used))
            assert all(used), "a fused kernel was not used"
        calls = num_layers * len(_rows())
        # Forward, recompute and backward; then without the recompute.
        assert counts == [3 * calls, 2 * calls]

    def check_compiled(self, architecture: str, matmul: Matmul = "bf16") -> None:
        """Layers that are compiled for the device: every call of the step runs their code."""
        model, rows = self.tiny_model(architecture), _rows()
        wanted = self._host_step(model, matmul=matmul)
        device = self.new_device()
        library, target = self._compiled_for(model, device, matmul)
        layers = CompiledLayers.load(model.template, library, target)
        assert layers.num_layers == model.template.num_layers, layers.refusals
        served: list[CompiledCall | None] = []
        serve = layers.serve

        def recorded(*of: Any) -> CompiledCall | None:
            served.append(serve(*of))
            return served[-1]

        self.patch.setattr(layers, "serve", recorded)
        limit = GRADIENTS if matmul == "bf16" else _FP8_GRADIENTS
        _compare(wanted, self._device_step(model, device, compiled=layers, matmul=matmul), limit)
        assert len(served) >= 2 * layers.num_layers * len(rows) and None not in served

    def _compiled_for(
        self, model: TinyModel, device: CudaDevice, matmul: Matmul = "bf16", *, product_layers: int = 0
    ) -> tuple[CodeLibrary, Target]:
        """Compile a model's layers for a device; skips the test where that is not possible."""
        if shutil.which("g++") is None:
            pytest.skip("compiling layers takes g++")
        place = device.place(torch.zeros(())).device
        library = CodeLibrary(self.folder / "compiled")
        scratch = library.make_scratch()
        environment = {"TORCHINDUCTOR_CACHE_DIR": str(scratch), "TMPDIR": str(scratch)}
        if place.type == "cuda":
            if missing := what_is_missing(os.environ):
                pytest.skip(f"compiling for the GPU lacks {'; '.join(missing)}")
            environment |= compiler_environment(os.environ, scratch)
        for name, value in environment.items():
            self.patch.setenv(name, value)
        model.template.place_buffers(device.place)
        target = Target(dtype=device.compute_dtype, device=place, num_threads=1, num_tokens=48, matmul=matmul)
        refusals = build_missing(model.template, library, target, lambda text: None, product_layers=product_layers)
        assert refusals == []
        return library, target

    def check_generation(self, architecture: str) -> None:
        """Answers: each token is the likeliest one of the model in fp32, or nearly."""
        model, device = lively(self.tiny_model(architecture)), self.new_device()
        template = Template.from_config(copy.deepcopy(model.config), own_attention=False)
        generator = TokenGenerator(template, model.store(), device)
        options = GenerationOptions(max_tokens=_NUM_NEW)
        answers = generator.generate(_PROMPTS, options)
        again = generator.generate(_PROMPTS, options)
        device.close()

        assert again == answers
        reference: Any = model.reference()
        chosen, gaps = [], []
        for prompt, answer in zip(_PROMPTS, answers, strict=True):
            assert len(answer.tokens) == _NUM_NEW
            with torch.no_grad():
                logits_TV = reference(torch.tensor([[*prompt, *answer.tokens]])).logits[0, len(prompt) - 1 : -1]
            for logits_V, token in zip(logits_TV, answer.tokens, strict=True):
                chosen.append(token)
                gaps.append(float((logits_V.max() - logits_V[token]) / logits_V.std()))
        assert len(set(chosen)) > 3, "the answers say nothing"
        assert max(gaps) <= 5e-2

    def check_a_step_that_does_not_fit(self, limit_bytes: Callable[[int], None], held_bytes: Callable[[], int]) -> None:
        """A step of which the memory is left to the next one when it fails. `limit_bytes` limits what may be allocated
        from now on."""
        run, row = self._large_step()
        held_before = held_bytes()
        limit_bytes(LEFT_BYTES)

        with pytest.raises(DoesNotFit, match="device memory: ") as kept:
            run.trainer.train_step([row])

        # The error is still referenced, as in the code that reports it; what the step had allocated is freed.
        assert kept.value is not None
        assert held_bytes() - held_before < LEFT_BYTES // 2

    def take_the_step_that_does_not_fit(self) -> None:
        """The same, where there is room for it."""
        run, row = self._large_step()
        assert run.trainer.train_step([row]).skipped == ""

    def _large_step(self) -> tuple[Run, MicroBatch]:
        model, device = self.tiny_model("llama", vocab_size=32768, max_position_embeddings=4096), self.new_device()
        run = self.start(model, store=model.store(grad_dtype=device.gradient_dtype), device=device)
        return run, micro_batch([torch.randint(96, (4096,), generator=torch.Generator().manual_seed(0))])

    def _check(
        self,
        model: TinyModel,
        *,
        limit: float = GRADIENTS,
        before: Callable[[Run], None] | None = None,
        **options: Any,
    ) -> tuple[float, float, Tensor]:
        """A step of both devices; the host's runs as plainly as it can. Returns the cuda device's."""
        numbers = {name: value for name, value in options.items() if name in ("matmul", "adapter_scale")}
        wanted = self._host_step(model, **numbers)
        found = self._device_step(model, self.new_device(), before=before, **options)
        _compare(wanted, found, limit)
        return found

    def _host_step(self, model: TinyModel, **options: Any) -> tuple[float, float, Tensor]:
        # A template is for one device: its buffers move there, and do not come back.
        template = Template.from_config(copy.deepcopy(model.config), layout=model.template.layout)
        own = dataclasses.replace(model, template=template)
        return _step(self.start(own, device=HostDevice(num_threads=1), **options))

    def _device_step(
        self, model: TinyModel, device: CudaDevice, *, before: Callable[[Run], None] | None = None, **options: Any
    ) -> tuple[float, float, Tensor]:
        run = self.start(model, store=model.store(grad_dtype=device.gradient_dtype), device=device, **options)
        if before is not None:
            before(run)
        return _step(run)


def with_lora(model: TinyModel, base: Packing) -> TinyModel:
    """The model with adapters of random values at every matrix of its layers, whose own weights are frozen in bf16 or
    packed."""
    layout = model.template.layout
    matrices = {
        tensor.name: (tensor.shape[1], tensor.shape[0])
        for unit, tensor in layout.tensors()
        if unit.kind == "layer" and len(tensor.shape) == 2
    }
    layout = with_adapters(
        layout,
        matrices,
        rank=_RANK,
        decay="trainer",
        is_bfloat16=lambda _: True,
        packing_of=lambda name: base if name in matrices else "none",
    )
    generator = torch.Generator().manual_seed(3)
    added = {t.name: 0.1 * torch.randn(t.shape, generator=generator) for _, t in layout.tensors() if t.adapts}
    template = Template.from_config(model.config, layout=layout)
    return dataclasses.replace(model, template=template, weights={**model.weights, **added})


def lively(model: TinyModel) -> TinyModel:
    """With large matrices, or every answer would be one token again and again."""
    weights = {
        name: weight * (4.0 if "embed" in name else 2.0) if weight.dim() > 1 else weight
        for name, weight in model.weights.items()
    }
    return dataclasses.replace(model, weights=weights)


def _rows() -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(0)

    def row(*lengths: int) -> MicroBatch:
        return micro_batch([torch.randint(96, (length,), generator=generator) for length in lengths])

    return [row(14, 22), row(25)]


def _step(run: Run) -> tuple[float, float, Tensor]:
    """Loss, norm and gradients of the parameters that are trained."""
    figures = run.trainer.train_step(_rows())
    assert figures.skipped == ""
    trained: Sequence[str] = [tensor.name for _, tensor in run.store.layout.tensors() if tensor.trained]
    gradients = torch.cat([run.gradient(name).reshape(-1).float().cpu() for name in trained])
    run.trainer.flush()
    run.trainer.close()
    return figures.loss, figures.grad_norm, gradients


def _compare(wanted: tuple[float, float, Tensor], found: tuple[float, float, Tensor], limit: float = GRADIENTS) -> None:
    loss, norm, gradients = wanted
    assert found[0] == pytest.approx(loss, rel=LOSS)
    assert found[1] == pytest.approx(norm, rel=NORM)
    error = float((found[2] - gradients).norm() / gradients.norm())
    assert error <= limit, f"the gradients differ by {error:.1e}"
