"""Steps of the engine as the stages run them: a model of a named shape, its store in the shared memory files, rows, and
a trainer.

Units: bytes, seconds.
"""

from __future__ import annotations

import gc
import math
import os
import random
import statistics
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig

from bench.gpu.machine import device_limit_bytes, free_host_bytes
from bench.gpu.shapes import MAX_POSITIONS, QWEN25, RANK, SIZES, Base, RowKind
from bench.gpu.task import PLANES, Task
from bench.models import rows_of
from horizon_server.engine.compiled.layers import CompiledLayers
from horizon_server.engine.device import device_for
from horizon_server.engine.device.cuda import CudaDevice
from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.device.protocol import Device
from horizon_server.engine.device.timeline import Trace
from horizon_server.engine.micro_batch import MicroBatch
from horizon_server.engine.template import Template
from horizon_server.engine.trainer import Trainer
from horizon_server.errors import DoesNotFit
from horizon_server.planning.ledger import plan_memory
from horizon_server.planning.model_folder import ModelFolder, ModelShape
from horizon_server.recipe import Recipe
from horizon_server.records.execution import (
    DEFAULT_COMPUTE_DTYPE,
    ActivationPlacement,
    DeviceKind,
    Execution,
)
from horizon_server.records.plan import Ledger
from horizon_server.store.adapters import with_adapters
from horizon_server.store.cpus import available_cpus
from horizon_server.store.host_store import HostStore
from horizon_server.store.layout import StoreLayout, plane_sizes

ADAPTER_SCALE = 2.0
"""The default of a job: `alpha` is 32, its rank 16."""
_LARGEST_WEIGHT = 0.06
_MEAN_DOCUMENT_TOKENS, _SPREAD = 200, 0.8
"""Of packed documents: lognormal, as the rows of instruction data sets are."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A shape's template, and the device kind that it runs on. With a `base` adapters are trained next to it."""

    shape: str
    config: PretrainedConfig
    template: Template
    kind: DeviceKind
    base: Base = ""

    @property
    def grad_dtype(self) -> torch.dtype:
        """What gradients are stored as where they are kept."""
        return torch.bfloat16 if self.kind == "cuda" else torch.float32


def choose_model(task: Task) -> Model:
    """The model asked for, or the one whose store exists already, or the largest that host memory has room for.

    Raises:
        DoesNotFit: no shape has room; the message has the numbers.
    """
    free_bytes = int(task.host_gib * 2**30) or free_host_bytes()
    refusals = []
    for shape in [task.shape] if task.shape else SIZES[task.device].shapes:
        model = model_of(shape, "cuda" if task.device == "cuda" else "host")
        needed_bytes = sum(_sizes(model).values())
        if os.fstat(task.plane_fds["hi"]).st_size == _sizes(model)["hi"] or needed_bytes <= free_bytes:
            return model
        refusals.append(f"{shape} {needed_bytes / 2**30:.1f} GiB")
    raise DoesNotFit(
        f"host memory: {' and '.join(refusals)} for weights and moments, {free_bytes / 2**30:.1f} GiB are free; choose "
        "a smaller "
        "--shape, or give --host-gib where the system reports less than there is"
    )


def model_of(shape: str, kind: DeviceKind, base: Base = "") -> Model:
    """A Qwen2 model of a named shape, as a whole or frozen with adapters."""
    config = AutoConfig.for_model("qwen2", **QWEN25[shape], max_position_embeddings=MAX_POSITIONS)
    template = Template.from_config(config)
    if base:
        template = Template.from_config(config, layout=with_base(template.layout, base))
        # Compiled code goes by it, before a trainer sets it.
        template.adapter_scale = ADAPTER_SCALE
    return Model(shape=shape, config=config, template=template, kind=kind, base=base)


def with_base(layout: StoreLayout, base: Base) -> StoreLayout:
    """The layout with adapters at every matrix of its layers, and all else frozen; without pydantic, which a job's spec
    takes."""
    matrices = {
        tensor.name: (tensor.shape[1], tensor.shape[0])
        for unit, tensor in layout.tensors()
        if unit.kind == "layer" and len(tensor.shape) == 2
    }
    return with_adapters(
        layout,
        matrices,
        rank=RANK,
        decay="trainer",
        is_bfloat16=lambda _: True,
        packing_of=lambda name: "nf4" if base == "nf4" and name in matrices else "none",
    )


def folder_of(model: Model) -> ModelFolder:
    """The model as a plan sees it."""
    config = model.config.to_dict()
    shape = ModelShape.from_config(config)
    return ModelFolder(path=Path(), config=config, shape=shape, headers={}, layout=model.template.layout)


def choose_base(task: Task, base: Base) -> Model:
    """The largest model that host memory has room for next to adapters.

    Raises:
        DoesNotFit: no shape has room; the message has the numbers.
    """
    free_bytes = int(task.host_gib * 2**30) or free_host_bytes()
    refusals = []
    for shape in [task.shape] if task.shape else SIZES[task.device].shapes:
        model = model_of(shape, "cuda" if task.device == "cuda" else "host", base)
        needed_bytes = sum(_sizes(model).values())
        if needed_bytes <= free_bytes:
            return model
        refusals.append(f"{shape} {needed_bytes / 2**30:.1f} GiB")
    raise DoesNotFit(
        f"host memory: {' and '.join(refusals)} for a base in {base}, {free_bytes / 2**30:.1f} GiB are free"
    )


def base_store(model: Model, *, keep_gradients: bool = True) -> HostStore:
    """A store of adapters and their frozen base, on memory of its own, with small random values and ones for norms."""
    layout = model.template.layout
    store = HostStore.allocate(layout, grad_dtype=model.grad_dtype if keep_gradients else None)
    generator = torch.Generator().manual_seed(0)
    fill(store.plane("hi"), generator)
    for name, shape in model.template.shapes.items():
        if len(shape) == 1:
            store.write_master(name, torch.ones(shape) if "norm" in name else torch.zeros(shape))
    if model.base == "nf4":
        # What packing random weights gives, without the minutes that packing billions of them takes.
        block = torch.randint(0, 256, (1 << 22,), dtype=torch.uint8, generator=generator)
        plane = store.plane("packed")
        for start in range(0, plane.numel(), block.numel()):
            part = plane[start : start + block.numel()]
            part.copy_(block[: part.numel()])
        for unit in layout.units:
            for packed in unit.packed_parts.values():
                store.unit(unit.index, "packed")[packed.group_scales].view(torch.float32).fill_(_LARGEST_WEIGHT)
    return store


def fill(plane: torch.Tensor, generator: torch.Generator) -> None:
    """Small random numbers, the same ones again and again: billions of new ones take minutes."""
    block = (0.02 * torch.randn(1 << 22, generator=generator)).bfloat16()
    for start in range(0, plane.numel(), block.numel()):
        part = plane[start : start + block.numel()]
        part.copy_(block[: part.numel()])


def open_store(task: Task, model: Model, *, keep_gradients: bool = True) -> HostStore:
    """The store in the task's memory files, made where it is not there, with small random weights and ones for norms.

    Without gradients each unit is updated as its gradient lands, which is how the daemon trains without clipping.
    """
    for name, num_bytes in _sizes(model).items():
        if os.fstat(task.plane_fds[name]).st_size != num_bytes:
            os.ftruncate(task.plane_fds[name], num_bytes)
    fds = {name: task.plane_fds[name] for name in PLANES}
    store = HostStore.attach(model.template.layout, fds, grad_dtype=model.grad_dtype if keep_gradients else None)
    # Again in every process: an earlier one may have been stopped in the middle of a step.
    fill(store.plane("hi"), torch.Generator().manual_seed(0))
    for name, shape in model.template.shapes.items():
        if len(shape) == 1:
            store.write_master(name, torch.ones(shape) if "norm" in name else torch.zeros(shape))
    return store


@contextmanager
def opened(
    task: Task, model: Model, *, keep_gradients: bool = True, trace: Trace | None = None
) -> Iterator[tuple[HostStore, HostDevice | CudaDevice]]:
    """A store, and a device that is closed before it: what the device has pinned must be unpinned while the memory is
    there."""
    make = partial(base_store, model) if model.base else partial(open_store, task, model)
    with (
        closing(make(keep_gradients=keep_gradients)) as store,
        closing(device_for(model.kind, num_threads=available_cpus(), trace=trace)) as device,
    ):
        yield store, device


def rows_for(vocab_size: int, *, kind: RowKind, tokens: int, row_tokens: int) -> list[MicroBatch]:
    """Rows of random tokens that have `tokens` in all."""
    draw = random.Random(f"{kind}-{tokens}")
    lengths: list[tuple[int, ...]] = []
    while (left := tokens - sum(map(sum, lengths))) > 0:
        if kind == "packed":
            lengths.append(_documents(draw, min(row_tokens, left)))
        elif kind == "varied":
            lengths.append((min(left, draw.randint(row_tokens // 8, row_tokens)),))
        else:
            lengths.append((min(left, row_tokens if kind == "equal" else row_tokens // 4),))
    return rows_of(vocab_size, lengths)


def _documents(draw: random.Random, num_tokens: int) -> tuple[int, ...]:
    mean = min(_MEAN_DOCUMENT_TOKENS, num_tokens / 4)
    lengths: list[int] = []
    while (left := num_tokens - sum(lengths)) > 0:
        length = int(draw.lognormvariate(math.log(mean) - _SPREAD**2 / 2, _SPREAD))
        lengths.append(min(left, max(2, length)))
    return tuple(lengths)


def job_of(model: Model, rows: Sequence[MicroBatch], **more: Any) -> tuple[Recipe, Execution]:
    """What a job of these rows trains by, with room for them, and how it runs here before anything is chosen for it."""
    recipe = Recipe(
        learning_rate=1e-6,
        lr_schedule="constant",
        tokens_per_step=sum(row.num_tokens for row in rows),
        sequence_length=max(row.num_tokens for row in rows),
        adapter_scale=ADAPTER_SCALE if model.base else 1.0,
        **more,
    )
    execution = Execution(
        device_kind=model.kind,
        compute_dtype=DEFAULT_COMPUTE_DTYPE[model.kind],
        device_limit_bytes=int(device_limit_bytes(model.kind)),
        grad_bytes=model.grad_dtype.itemsize,
        num_threads=available_cpus(),
    )
    return recipe, execution


def placed(model: Model, recipe: Recipe, execution: Execution) -> tuple[Ledger, Execution]:
    """The memory of a job; layer inputs stay on the device where they fit.

    Raises:
        DoesNotFit: it needs more than the device has, wherever layer inputs are.
    """
    placements: tuple[ActivationPlacement, ...] = ("device", "host")
    for placement in placements:
        tried = replace(execution, activation_placement=placement)
        ledger = plan_memory(folder_of(model), recipe, tried)
        if ledger.device_total_bytes <= execution.device_limit_bytes:
            return ledger, tried
    raise DoesNotFit(
        f"device memory: {ledger.device_total_bytes / 2**30:.1f} GiB are planned for {recipe.tokens_per_step} tokens, "
        f"{execution.device_limit_bytes / 2**30:.1f} GiB are there"
    )


def trainer_for(
    model: Model,
    store: HostStore,
    device: Device,
    job: tuple[Recipe, Execution],
    compiled: CompiledLayers | None = None,
) -> Trainer:
    """A trainer of a job; without a `grad` plane it does not clip."""
    recipe, execution = job
    recipe = replace(recipe, max_grad_norm=None if store.grad_dtype is None else 1.0)
    return Trainer(model.template, store, device, recipe, execution, num_steps=1000, compiled=compiled)


def forget(kind: DeviceKind) -> None:
    """Free what an earlier measurement has left on the device, and forget its peak."""
    gc.collect()
    if kind == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def typical_s(steps_s: Sequence[float]) -> float:
    """The median of all steps but the first, where there are more: the first may prepare what later ones find."""
    return statistics.median(steps_s[1:] or steps_s)


def hardware_flops_of(template: Template, *, model_flops: float, num_tokens: int) -> float:
    """What is really computed: layers once more than the model's own operations, but for the products that their
    recompute leaves out."""
    not_recomputed = template.vocab_size * template.hidden_size + template.num_skipped_parameters
    return model_flops * 4 / 3 - 2 * not_recomputed * num_tokens


def _sizes(model: Model) -> dict[str, int]:
    return plane_sizes(model.template.layout, grad_dtype_bytes=model.grad_dtype.itemsize)
