"""The engine as a job runs it: rows joined, layers compiled, residents chosen as a plan does, and what is predicted for it.

A point may ask for less: `eager` leaves out the compiled layers, `row by row` the joining too, `products` keeps products instead of
compiling, `fp8` has its products in FP8. `streamed` is a job without residents, `resident` one with all that fit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.gpu.machine import device_limit_bytes
from bench.gpu.predicted import with_fp8, with_unpacking
from bench.gpu.shapes import Engine
from bench.gpu.steps import ADAPTER_SCALE, Model, folder_of
from bench.gpu.task import Task
from bench.gpu.variants import HOST_GBPS, PREDICTED_FOR
from horizon_server.engine.compiled.layers import CompiledLayers
from horizon_server.engine.compiled.library import CodeLibrary, Target
from horizon_server.engine.device.protocol import Device
from horizon_server.engine.micro_batch import MicroBatch
from horizon_server.engine.trainer import TrainConfig, Trainer
from horizon_server.errors import DoesNotFit
from horizon_server.planning.gpus import estimated_rates
from horizon_server.planning.kept import NOTHING_KEPT, SPARE_USABLE, KeptOnDevice, choose_kept, product_bytes
from horizon_server.planning.ledger import ActivationPlacement, MemoryPlan, micro_batch_tokens, plan_memory
from horizon_server.planning.step_time import predict_step
from horizon_server.planning.step_work import TODAY, StepWork, work_of_step
from horizon_server.records.plan import StepPrediction
from horizon_server.store.cpus import available_cpus, update_threads
from horizon_server.store.host_store import HostStore

_COMPILED: frozenset[Engine] = frozenset({"job", "streamed", "resident"})
_NOTHING_STAYS: frozenset[Engine] = frozenset({"row by row", "streamed"})
_NO_MICRO_BATCHES: frozenset[Engine] = frozenset({"row by row"})


@dataclass(frozen=True, kw_only=True)
class SetUp:
    """How a point runs. `predicted` is for one H100. `update_threads` None: those of a job."""

    plan: MemoryPlan
    placement: ActivationPlacement
    micro_batch_tokens: int
    kept: KeptOnDevice
    product_bytes: int
    predicted: StepPrediction
    update_threads: int | None = None

    def text(self) -> str:
        """For the table."""
        parts = [f"{self.kept.resident_layers} resident"] if self.kept.resident_layers else []
        parts += [f"{self.kept.product_layers} keep products"] if self.kept.product_layers else []
        return ", ".join(parts) or "nothing"


def target_of(model: Model, num_tokens: int) -> Target:
    """What layers are compiled for; the same for every point, so that one stage compiles and all use it."""
    on_gpu = model.kind == "cuda"
    return Target(
        dtype=torch.bfloat16 if on_gpu else torch.float32,
        device=torch.device("cuda" if on_gpu else "cpu"),
        num_threads=available_cpus(),
        num_tokens=max(num_tokens, micro_batch_tokens(model.config.hidden_size, model.kind)),
    )


def compiled_layers(task: Task, model: Model, num_tokens: int) -> CompiledLayers:
    """What the stage `compile` has made; without it layers run eagerly, and `refusals` says why."""
    if not task.library:
        return CompiledLayers(model.template)
    return CompiledLayers.load(model.template, CodeLibrary(Path(task.library)), target_of(model, num_tokens))


def set_up(model: Model, rows: Sequence[MicroBatch], engine: Engine = "job", *, host_gbps: float = 0.0) -> SetUp:
    """What a job's plan would be for a step of these rows. `host_gbps` is that of the prediction, if it is another one.

    Raises:
        DoesNotFit: it needs more than the device has, wherever layer inputs are.
    """
    folder = folder_of(model)
    shape, layout, on_gpu = folder.shape, folder.layout, model.kind == "cuda"
    tokens, longest = sum(row.num_tokens for row in rows), max(row.num_tokens for row in rows)
    together = 0 if engine in _NO_MICRO_BATCHES else micro_batch_tokens(shape.hidden_size, model.kind)
    limit_bytes = device_limit_bytes(model.kind)

    def plan_with(placement: ActivationPlacement, kept: KeptOnDevice) -> MemoryPlan:
        return plan_memory(
            layout,
            model=shape,
            tokens_per_step=tokens,
            sequence_length=longest,
            device_kind=model.kind,
            grad_bytes=model.grad_dtype.itemsize,
            num_threads=available_cpus(),
            activation_placement=placement,
            micro_batch_tokens=together,
            in_fp8=engine == "fp8",
            kept=kept,
        )

    rates = estimated_rates(PREDICTED_FOR, host_bytes_per_s=(host_gbps or HOST_GBPS) * 1e9)

    def work(placement: ActivationPlacement, kept: KeptOnDevice) -> StepWork:
        # Rows of their full length: a single row's documents may be shorter, which attention alone knows.
        return work_of_step(
            folder,
            tokens_per_step=tokens,
            sequence_length=max(max(row.document_lengths) for row in rows),
            device_kind="cuda",
            grad_bytes=2,
            activation_placement=placement,
            facts=dataclasses.replace(TODAY, micro_batch_tokens=together, fused=engine in _COMPILED),
            kept=kept,
        )

    def planned_s(kept: KeptOnDevice) -> float:
        # As a plan predicts it, which knows nothing of casts and of packed weights.
        return predict_step(work("device", kept), rates, shares_processors=False).step_s

    choices: tuple[ActivationPlacement, ...] = ("device", "host")
    plans = {placement: plan_with(placement, NOTHING_KEPT) for placement in choices}
    placement = next((p for p in choices if plans[p].device_total_bytes <= limit_bytes), None)
    if placement is None:
        needed_gib = plans["host"].device_total_bytes / 2**30
        raise DoesNotFit(
            f"device memory: {needed_gib:.1f} GiB are planned for {tokens} tokens, {limit_bytes / 2**30:.1f} GiB are there"
        )
    needed, kept, products = plans[placement].device_total_bytes, NOTHING_KEPT, 0
    room_bytes = int(SPARE_USABLE * limit_bytes) - needed
    # On the host nothing crosses a link, as in a job's plan.
    if on_gpu and placement == "device" and room_bytes > 0 and engine not in _NOTHING_STAYS:
        if engine == "products":
            products = product_bytes(layout, shape, num_tokens=tokens, element_bytes=2)

        def resident_bytes(num_layers: int) -> int:
            return plan_with("device", KeptOnDevice(resident_layers=num_layers)).device_total_bytes - needed

        if engine == "resident":
            counts = range(shape.num_hidden_layers, -1, -1)
            kept = KeptOnDevice(resident_layers=next(n for n in counts if resident_bytes(n) <= room_bytes))
        else:
            kept = choose_kept(
                planned_s,
                room_bytes=room_bytes,
                num_layers=shape.num_hidden_layers,
                resident_bytes=resident_bytes,
                layer_product_bytes=products,
            )
    elif engine == "resident" and not on_gpu:
        # A dry run goes the same way.
        kept = KeptOnDevice(resident_layers=shape.num_hidden_layers)
    counted = work(placement, kept)
    if engine == "fp8":
        counted = with_fp8(counted, "eager")
    if model.base == "nf4":
        counted = with_unpacking(counted, layout, rates)
    return SetUp(
        plan=plan_with(placement, kept),
        placement=placement,
        micro_batch_tokens=together,
        kept=kept,
        product_bytes=products * kept.product_layers,
        predicted=predict_step(counted, rates, shares_processors=False),
    )


def job_trainer(
    task: Task, model: Model, store: HostStore, device: Device, rows: Sequence[MicroBatch], found: SetUp, engine: Engine
) -> tuple[Trainer, CompiledLayers]:
    """A trainer with what the worker would give it, and its compiled layers; without a `grad` plane it does not clip."""
    tokens = sum(row.num_tokens for row in rows)
    more: dict[str, Any] = {"matmul": "fp8"} if engine == "fp8" else {}
    if model.base:
        more["adapter_scale"] = ADAPTER_SCALE
    config = TrainConfig(
        num_steps=1000,
        learning_rate=1e-6,
        lr_schedule="constant",
        max_grad_norm=None if store.grad_dtype is None else 1.0,
        optimizer_threads=found.update_threads or update_threads(available_cpus(), device_kind=model.kind),
        tokens_per_step=tokens,
        activation_placement=found.placement,
        micro_batch_tokens=found.micro_batch_tokens,
        resident_layers=found.kept.resident_layers,
        product_layers=found.kept.product_layers,
        max_product_bytes=found.product_bytes or None,
        **more,
    )
    longest = max(row.num_tokens for row in rows)
    layers = compiled_layers(task, model, longest) if engine in _COMPILED else CompiledLayers(model.template)
    return Trainer(model.template, store, device, config, layers), layers
