"""The engine as a job runs it: rows joined, layers compiled, residents chosen as a plan does, and what is predicted for it.

A point may ask for less: `eager` leaves out the compiled layers, `row by row` the joining too, `products` keeps products instead of
compiling, `fp8` has its products in FP8.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.gpu.machine import device_limit_bytes
from bench.gpu.shapes import Engine
from bench.gpu.steps import Model
from bench.gpu.task import Task
from horizon_server.engine.compiled.layers import CompiledLayers
from horizon_server.engine.compiled.library import CodeLibrary, Target
from horizon_server.engine.device.protocol import Device
from horizon_server.engine.micro_batch import MicroBatch
from horizon_server.engine.trainer import TrainConfig, Trainer
from horizon_server.errors import DoesNotFit
from horizon_server.planning.gpus import estimated_rates
from horizon_server.planning.kept import NOTHING_KEPT, SPARE_USABLE, KeptOnDevice, choose_kept, product_bytes
from horizon_server.planning.ledger import ActivationPlacement, MemoryPlan, micro_batch_tokens, plan_memory
from horizon_server.planning.model_folder import ModelFolder, ModelShape
from horizon_server.planning.step_time import predict_step
from horizon_server.planning.step_work import TODAY, work_of_step
from horizon_server.records.plan import StepPrediction
from horizon_server.store.cpus import available_cpus, update_threads
from horizon_server.store.host_store import HostStore

PREDICTED_FOR, HOST_GBPS = "h100", 200.0
"""The machine of predictions; its rates are those of `planning/gpus.py`."""
_COMPILED: frozenset[Engine] = frozenset({"job"})
_NO_MICRO_BATCHES: frozenset[Engine] = frozenset({"row by row"})


@dataclass(frozen=True, kw_only=True)
class SetUp:
    """How a point runs. `predicted` is for one H100, None for what the model of a step knows nothing of."""

    plan: MemoryPlan
    placement: ActivationPlacement
    micro_batch_tokens: int
    kept: KeptOnDevice
    product_bytes: int
    predicted: StepPrediction | None

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


def set_up(model: Model, rows: Sequence[MicroBatch], engine: Engine = "job") -> SetUp:
    """What a job's plan would be for a step of these rows.

    Raises:
        DoesNotFit: it needs more than the device has, wherever layer inputs are.
    """
    shape = ModelShape.from_config(model.config.to_dict())
    layout, on_gpu = model.template.layout, model.kind == "cuda"
    folder = ModelFolder(path=Path(), config=model.config.to_dict(), shape=shape, headers={}, layout=layout)
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

    def predicted(placement: ActivationPlacement, kept: KeptOnDevice) -> StepPrediction:
        facts = dataclasses.replace(TODAY, micro_batch_tokens=together, fused=engine in _COMPILED)
        # Rows of their full length: a single row's documents may be shorter, which attention alone knows.
        work = work_of_step(
            folder,
            tokens_per_step=tokens,
            sequence_length=max(max(row.document_lengths) for row in rows),
            device_kind="cuda",
            grad_bytes=2,
            activation_placement=placement,
            facts=facts,
            kept=kept,
        )
        return predict_step(
            work, estimated_rates(PREDICTED_FOR, host_bytes_per_s=HOST_GBPS * 1e9), shares_processors=False
        )

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
    if on_gpu and placement == "device" and room_bytes > 0 and engine != "row by row":
        if engine == "products":
            products = product_bytes(layout, shape, num_tokens=tokens, element_bytes=2)

        def resident_bytes(num_layers: int) -> int:
            return plan_with("device", KeptOnDevice(resident_layers=num_layers)).device_total_bytes - needed

        kept = choose_kept(
            lambda kept: predicted("device", kept).step_s,
            room_bytes=room_bytes,
            num_layers=shape.num_hidden_layers,
            resident_bytes=resident_bytes,
            layer_product_bytes=products,
        )
    return SetUp(
        plan=plan_with(placement, kept),
        placement=placement,
        micro_batch_tokens=together,
        kept=kept,
        product_bytes=products * kept.product_layers,
        predicted=None if engine == "fp8" else predicted(placement, kept),
    )


def job_trainer(
    task: Task, model: Model, store: HostStore, device: Device, rows: Sequence[MicroBatch], found: SetUp, engine: Engine
) -> tuple[Trainer, CompiledLayers]:
    """A trainer with what the worker would give it, and its compiled layers; without a `grad` plane it does not clip."""
    tokens = sum(row.num_tokens for row in rows)
    more: dict[str, Any] = {"matmul": "fp8"} if engine == "fp8" else {}
    config = TrainConfig(
        num_steps=1000,
        learning_rate=1e-6,
        lr_schedule="constant",
        max_grad_norm=None if store.grad_dtype is None else 1.0,
        optimizer_threads=update_threads(available_cpus(), device_kind=model.kind),
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
