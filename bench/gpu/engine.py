"""The engine as a job runs it: rows joined, layers compiled, residents chosen as a plan does, and what is predicted for
it.

A point may ask for less: `eager` leaves out the compiled layers, `row by row` the joining too, `fp8` has its products
in FP8. `products` keeps products as well, and `states` these and optimizer states, as a plan does; `job` leaves them
out, so that they can be compared.
`streamed` is a job without residents, `resident` one with all layers that fit, `packed resident` one with the packed
weights of all layers, the head and the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bench.gpu.shapes import Engine
from bench.gpu.steps import Model, folder_of, job_of, placed, trainer_for
from bench.gpu.task import Task
from bench.gpu.variants import HOST_GBPS, PREDICTED_FOR
from horizon_server.engine.compiled.layers import CompiledLayers
from horizon_server.engine.compiled.library import CodeLibrary, Target
from horizon_server.engine.device.protocol import Device
from horizon_server.engine.micro_batch import MicroBatch
from horizon_server.engine.trainer import Trainer
from horizon_server.planning.gpus import estimated_rates
from horizon_server.planning.ledger import micro_batch_tokens, plan_memory
from horizon_server.planning.model_folder import ModelFolder
from horizon_server.planning.residency import SPARE_USABLE, choose_residency, possible_ends, product_bytes
from horizon_server.planning.step_parts import TODAY, StepWork
from horizon_server.planning.step_time import predict_step
from horizon_server.planning.step_work import work_of_step
from horizon_server.recipe import Recipe
from horizon_server.records.execution import NOTHING_STAYS, Execution, Residency
from horizon_server.records.plan import Ledger, StepPrediction
from horizon_server.store.cpus import available_cpus, update_threads
from horizon_server.store.host_store import HostStore

_COMPILED: frozenset[Engine] = frozenset({"job", "products", "states", "streamed", "resident", "packed resident"})
_NOTHING_STAYS: frozenset[Engine] = frozenset({"row by row", "streamed"})
_NO_MICRO_BATCHES: frozenset[Engine] = frozenset({"row by row"})


@dataclass(frozen=True, kw_only=True)
class SetUp:
    """How a point runs. `predicted` is for one H100, with layers compiled as they are here."""

    plan: Ledger
    recipe: Recipe
    execution: Execution
    predicted: StepPrediction
    layers: CompiledLayers

    def text(self) -> str:
        """For the table."""
        kept = self.execution.residency
        parts = [f"{kept.resident_layers} resident"] if kept.resident_layers else []
        parts += [f"{kept.state_layers} with states"] if kept.state_layers else []
        parts += [f"{kept.packed_layers} packed"] if kept.packed_layers else []
        parts += [name for name, stays in (("head", kept.resident_head), ("table", kept.resident_table)) if stays]
        parts += [f"{kept.product_layers} keep products"] if kept.product_layers else []
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


def compiled_layers(task: Task, model: Model, num_tokens: int, *, product_layers: int = 0) -> CompiledLayers:
    """What the stage `compile` has made; without it layers run eagerly, and `refusals` says why."""
    if not task.library:
        return CompiledLayers(model.template)
    library, target = CodeLibrary(Path(task.library)), target_of(model, num_tokens)
    return CompiledLayers.load(model.template, library, target, product_layers=product_layers)


def set_up(
    task: Task, model: Model, rows: Sequence[MicroBatch], engine: Engine = "job", *, host_gbps: float = 0.0
) -> SetUp:
    """What a job's plan would be for a step of these rows. `host_gbps` is that of the prediction, if it is another one.

    Raises:
        DoesNotFit: it needs more than the device has, wherever layer inputs are.
    """
    folder = folder_of(model)
    num_layers, on_gpu = folder.shape.num_hidden_layers, model.kind == "cuda"
    recipe, execution = job_of(model, rows, matmul="fp8" if engine == "fp8" else "bf16")
    together = 0 if engine in _NO_MICRO_BATCHES else micro_batch_tokens(folder.shape.hidden_size, model.kind)
    threads = update_threads(available_cpus(), device_kind=model.kind)
    execution = replace(execution, micro_batch_tokens=together, optimizer_threads=threads)
    rates = estimated_rates(PREDICTED_FOR, host_bytes_per_s=(host_gbps or HOST_GBPS) * 1e9)
    layers = CompiledLayers(model.template)
    if engine in _COMPILED:
        keeping = num_layers if engine in ("products", "states") else 0
        layers = compiled_layers(task, model, recipe.sequence_length, product_layers=keeping)
    # Rows of their full length: a single row's documents may be shorter, which attention alone knows.
    documents = replace(recipe, sequence_length=max(max(row.document_lengths) for row in rows))

    def work(residency: Residency) -> StepWork:
        on_h100 = replace(execution, device_kind="cuda", compute_dtype="bfloat16", grad_bytes=2, residency=residency)
        return work_of_step(folder, documents, on_h100, facts=replace(TODAY, fused=layers.num_layers > 0))

    ledger, execution = placed(model, recipe, execution)
    needed, residency = ledger.device_total_bytes, NOTHING_STAYS
    room_bytes = int(SPARE_USABLE * execution.device_limit_bytes) - needed
    # On the host nothing crosses a link, as in a job's plan.
    if on_gpu and execution.activation_placement == "device" and room_bytes > 0 and engine not in _NOTHING_STAYS:

        def weight_bytes(residency: Residency) -> int:
            return plan_memory(folder, recipe, replace(execution, residency=residency)).device_total_bytes - needed

        if engine == "packed resident":
            residency = _packed_resident(folder)
        elif engine == "resident":
            most = (Residency(resident_layers=number) for number in range(num_layers, -1, -1))
            residency = next(kept for kept in most if weight_bytes(kept) <= room_bytes)
        else:
            residency = choose_residency(
                lambda kept: predict_step(work(kept), rates, shares_processors=False).step_s,
                room_bytes=room_bytes,
                num_layers=num_layers,
                weight_bytes=weight_bytes,
                layer_product_bytes=product_bytes(folder, recipe, execution) if layers.num_keeping else 0,
                is_packed=any(unit.packed_bytes for unit in folder.layout.units),
                keeps_states=engine == "states",
                ends=possible_ends(folder.layout),
            )
    elif engine in ("resident", "packed resident", "states") and not on_gpu:
        # A dry run goes the same way.
        whole = Residency(resident_layers=num_layers, state_layers=num_layers if engine == "states" else 0)
        residency = _packed_resident(folder) if engine == "packed resident" else whole
    execution = replace(execution, residency=residency)
    return SetUp(
        plan=plan_memory(folder, recipe, execution),
        recipe=recipe,
        execution=execution,
        predicted=predict_step(work(residency), rates, shares_processors=False),
        layers=layers,
    )


def _packed_resident(folder: ModelFolder) -> Residency:
    """All that a packed base needs, so that only what is trained crosses the link."""
    *_, ends = possible_ends(folder.layout)
    return replace(ends, packed_layers=folder.shape.num_hidden_layers)


def job_trainer(model: Model, store: HostStore, device: Device, found: SetUp) -> Trainer:
    """A trainer with what the worker would give it; without a `grad` plane it does not clip."""
    return trainer_for(model, store, device, (found.recipe, found.execution), found.layers)
