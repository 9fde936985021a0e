"""The schedule of the largest models rehearsed: real training steps of the same models at a part of their width, with
all their layers and experts, on a host device whose speeds are those of the forecast's machine.

Real are the engine, its queues, stores and updates, and the reads and writes of states on a drive with their checksums.
Emulated are speeds: computing a layer, updating a unit, crossing the link, and reading and writing the drive each take
as long as the forecast says, times a scale; where this machine is done sooner, the thread sleeps. So what is measured
is whether copies, updates and drives hide behind each other as the planner says, not how fast anything is.

The first table does that for the forms of `bench.giant`, with nothing kept on the device. The second takes a small
model and speeds of `bench.drive`: steps over an emulated drive against the larger of compute and drive.

python -m bench.giant --rehearse
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest import mock

import torch

from bench.drive import NUM_LAYERS, SHAPES, Shape, emulated_drive, predicted
from bench.giant import DRIVES, FORMS, GPU, HOST_GBPS, MODELS, NUM_TOKENS, Form, outline, plan_of, spec_of
from bench.models import SHAPES as MODEL_SHAPES
from bench.models import random_rows
from horizon_server.engine import optimizer
from horizon_server.engine.device import TORCH_DTYPE
from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.template import Template
from horizon_server.engine.trainer import Trainer
from horizon_server.errors import InvalidSpec
from horizon_server.planning.gpus import estimated_rates
from horizon_server.planning.model_folder import ModelFolder
from horizon_server.planning.pages import PagesPlan
from horizon_server.planning.rates import DeviceRates
from horizon_server.planning.step_time import Seconds
from horizon_server.planning.step_work import work_of_step
from horizon_server.planning.trainable import open_for_training
from horizon_server.recipe import Recipe
from horizon_server.records.execution import NOTHING_STAYS, Execution, OnDrives
from horizon_server.spec import LORA
from horizon_server.store.adamw import update_unit
from horizon_server.store.drive_files import lent_files
from horizon_server.store.drive_layout import INDEX_PLANE, DriveLayout, driven_planes
from horizon_server.store.host_store import HostStore
from horizon_server.store.layout import COMPRESSED_GROUP, plane_sizes
from horizon_server.store.planes import lent_memory

# As many tokens as let nearly all of 128 experts be used.
_ROW_TOKENS = 128
_RATES = estimated_rates(GPU, host_bytes_per_s=HOST_GBPS * 1e9)
# Sizes of a config that are divided; a head's size is not.
_WIDTHS = ("num_attention_heads", "num_key_value_heads", "vocab_size")
_ALIGNED_WIDTHS, _ALIGNMENT = ("hidden_size", "intermediate_size"), 8
_NUM_WARM = 2
# At a 16th of the width; a narrower model has less to do in earnest, and less time for it.
_SCALES, _SCALED_WIDTH = {"gpt-oss-120B": 3.2, "123B, dense": 0.8}, 16


def narrowed(config: Mapping[str, Any], width: int) -> dict[str, Any]:
    """The configuration at that part of its width."""
    from transformers import AutoConfig

    whole = AutoConfig.for_model(**config).to_dict()
    # Grouped products of experts want rows of whole 16 bytes.
    aligned = {name: -(-whole[name] // (width * _ALIGNMENT)) * _ALIGNMENT for name in _ALIGNED_WIDTHS}
    return {**config, **{name: max(1, whole[name] // width) for name in _WIDTHS}, **aligned}


@dataclass(frozen=True, kw_only=True)
class Tempo:
    """How long work takes, at least: seconds by label of the compute queue and by updated unit, and bytes per second of
    the link and of the drive. A label's seconds are divided among its first `parts` pieces of work: a layer whose
    experts come in pages has one for each page, and one before and after them."""

    compute_s: Mapping[str, float]
    parts: int = 1
    updates_s: Mapping[int, float] = field(default_factory=dict)
    link_bytes_per_s: float | None = None
    drive_bytes_per_s: float | None = None


def tempo_of(seconds: Seconds, *, parts: int, **rates: float | None) -> Tempo:
    """That of a step as the planner has it."""
    head = max(visit.unit for visit in seconds.visits)
    compute_s = {
        "head loss" if visit.unit == head else f"{'backward' if visit.gradient else 'forward'} {visit.unit}": (
            visit.compute_s
        )
        for visit in seconds.visits
    }
    compute_s[f"backward {head}"] = compute_s["head loss"]
    return Tempo(compute_s=compute_s, parts=parts, updates_s=dict(seconds.updates), **rates)


def _until(until_s: float) -> None:
    time.sleep(max(0.0, until_s - time.perf_counter()))


@contextmanager
def paced(device: HostDevice, tempo: Tempo) -> Iterator[None]:
    """Have the work of a device's compute queue, updates and the drive take as long as that, at least."""
    submit, last, number = device.compute.submit, "", 0

    def slow(work: Callable[[], object], seconds: float) -> None:
        started_s = time.perf_counter()
        work()
        _until(started_s + seconds)

    def submit_slowly(work: Callable[[], object], *, label: str = "", **more: Any) -> None:
        nonlocal last, number
        seconds = tempo.compute_s.get(label, 0.0) / tempo.parts
        if seconds:
            last, number = label, number + 1 if label == last else 1
            # What a visit queues besides is short, and belongs to its time.
            seconds = seconds if number <= tempo.parts else 0.0
        submit(partial(slow, work, seconds) if seconds else work, label=label, **more)

    update = update_unit

    def update_slowly(store: HostStore, unit_index: int, *arguments: Any, part: slice, **more: Any) -> None:
        # What is on a drive is updated span by span.
        share = (part.stop - part.start) / store.layout.units[unit_index].trained_elements
        seconds = min(1.0, share) * tempo.updates_s.get(unit_index, 0.0)
        slow(lambda: update(store, unit_index, *arguments, part=part, **more), seconds)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(device.compute, "submit", submit_slowly))
        stack.enter_context(mock.patch.object(optimizer, "update_unit", update_slowly))
        if tempo.drive_bytes_per_s is not None:
            stack.enter_context(emulated_drive(tempo.drive_bytes_per_s))
        yield


@contextmanager
def filled_store(folder: ModelFolder, execution: Execution) -> Iterator[HostStore]:
    """A store with small random weights, of which a part may be on drives."""
    layout, drives = folder.layout, DriveLayout(folder.layout, execution.drives)
    memory = plane_sizes(layout, grad_dtype_bytes=execution.grad_bytes)
    if execution.drives.units:
        memory[INDEX_PLANE] = drives.index_bytes
    grad_dtype = TORCH_DTYPE[execution.compute_dtype] if execution.grad_bytes else None
    generator = torch.Generator().manual_seed(0)
    with ExitStack() as stack:
        planes = stack.enter_context(lent_memory(memory))
        files = stack.enter_context(lent_files(execution.drives.folders, drives.file_bytes))
        store = HostStore.attach(layout, planes | files, grad_dtype=grad_dtype, drives=execution.drives)
        stack.callback(store.close)
        for _, place in layout.tensors():
            is_norm = len(place.shape) == 1
            weights = torch.ones(place.shape) if is_norm else 0.02 * torch.randn(place.shape, generator=generator)
            store.write_master(place.name, weights)
        yield store


def step_seconds(folder: ModelFolder, recipe: Recipe, execution: Execution, tempo: Tempo, *, num_steps: int) -> float:
    """The quickest of real steps at a tempo, after those in which queues fill: what else the machine does can only slow
    a step down."""
    template = Template.from_folder(folder.path, layout=folder.layout, recipe=recipe)
    rows = random_rows(template.vocab_size, num_rows=1, row_tokens=min(recipe.tokens_per_step, recipe.sequence_length))
    dtype = TORCH_DTYPE[execution.compute_dtype]
    with filled_store(folder, execution) as store, ExitStack() as stack:
        device = HostDevice(compute_dtype=dtype, num_threads=1, link_bytes_per_s=tempo.link_bytes_per_s)
        stack.callback(device.close)
        stack.enter_context(paced(device, tempo))
        trainer = Trainer(template, store, device, recipe, execution, num_steps=1000)
        stack.callback(trainer.close)
        taken = []
        for _ in range(_NUM_WARM + num_steps):
            started_s = time.perf_counter()
            trainer.train_step(rows)
            taken.append(time.perf_counter() - started_s)
        trainer.flush()
    return min(taken[_NUM_WARM:])


@dataclass(frozen=True, kw_only=True)
class Rehearsed:
    """A step: as forecast, as the planner plays it at the rehearsal's speeds, and as it was. Seconds of the machine of
    the forecast: those here over the scale."""

    forecast_s: float
    predicted_s: float
    measured_s: float
    drive_s: float
    bound: str


def rehearse(
    config: Mapping[str, Any], form: Form, *, width: int, scale: float, num_steps: int, drive: str
) -> Rehearsed | None:
    """Rehearse a form of a model, with states on a drive in that folder where the forecast has them on drives; None
    where the forecast says that it does not fit."""
    with outline(config) as path:
        plan = plan_of(path, form, num_tokens=NUM_TOKENS)
        if not plan.fits:
            return None
        assert plan.prediction is not None, "the GPU is in the table"
        # What stays on a device is left out: the streams are what is rehearsed.
        whole_execution = replace(plan.execution, residency=NOTHING_STAYS)
        spec = spec_of(form, num_tokens=NUM_TOKENS)
        whole_folder = open_for_training(path, spec.train)
        rates = replace(_RATES, drives=DRIVES.rates)
        whole = Seconds.of(work_of_step(whole_folder, spec.train.recipe, whole_execution), rates)
        in_backward = plan.execution.grad_bytes == 0
        forecast_s = whole.played(updates_in_backward=in_backward).step_s
    small_spec = spec_of(form, num_tokens=_ROW_TOKENS)
    with outline(narrowed(config, width)) as path:
        folder = open_for_training(path, small_spec.train)
        execution = _small(whole_execution, whole_folder, folder, width, drive)
        work = work_of_step(folder, small_spec.train.recipe, execution)
        slow = _rates_at_scale(whole, Seconds.of(work, _unit_rates(rates)), rates, scale)
        seconds = _at_tempo(Seconds.of(work, slow), whole, scale)
        predicted_s = seconds.played(updates_in_backward=in_backward).step_s
        drive_rate = None
        if seconds.drives.seconds and slow.drives is not None:
            drive_rate = slow.drives.read_bytes_per_s
        pages = PagesPlan.of(folder.layout, execution.expert_page_elements).units.values()
        parts = max((len(paged.pages) + 2 for paged in pages), default=1)
        tempo = tempo_of(seconds, parts=parts, link_bytes_per_s=slow.h2d_bytes_per_s, drive_bytes_per_s=drive_rate)
        measured_s = step_seconds(folder, small_spec.train.recipe, execution, tempo, num_steps=num_steps)
    return Rehearsed(
        forecast_s=forecast_s,
        predicted_s=predicted_s / scale,
        measured_s=measured_s / scale,
        drive_s=sum(seconds.drives.seconds.values()) / scale,
        bound=plan.prediction.bound,
    )


def _small(execution: Execution, whole: ModelFolder, folder: ModelFolder, width: int, drive: str) -> Execution:
    """The execution of the narrow model: on the host, in the same dtypes, with the states of the same layers on one
    drive, in about as many spans."""
    drives = execution.drives
    if drives.units:
        planes = driven_planes(folder.layout, with_lo="lo" in drives.planes or "lo8" in drives.planes)
        share = _layer_elements(folder) / _layer_elements(whole)
        groups = max(1, round(share * drives.span_elements / COMPRESSED_GROUP))
        drives = replace(drives, planes=planes, folders=(drive,), span_elements=groups * COMPRESSED_GROUP)
    return Execution(
        compute_dtype=execution.compute_dtype,
        grad_bytes=execution.grad_bytes,
        optimizer_threads=1,
        expert_page_elements=execution.expert_page_elements // width**2,
        drives=drives,
    )


def _layer_elements(folder: ModelFolder) -> int:
    return max(unit.trained_elements for unit in folder.layout.units if unit.kind == "layer")


def _unit_rates(rates: DeviceRates) -> DeviceRates:
    """With these, the seconds of copies, updates and drives are their bytes."""
    drives = None if rates.drives is None else replace(rates.drives, read_bytes_per_s=2.0, write_bytes_per_s=2.0)
    return replace(
        rates,
        h2d_bytes_per_s=1.0,
        d2h_bytes_per_s=1.0,
        adamw_bytes_per_s=1.0,
        compressed_parameters_per_s=math.inf,
        drives=drives,
    )


def _rates_at_scale(whole: Seconds, in_bytes: Seconds, rates: DeviceRates, scale: float) -> DeviceRates:
    """Rates at which the narrow model's layers take as long as the whole model's, times the scale."""

    def uploaded(seconds: Seconds) -> float:
        return sum(visit.upload_s for visit in seconds.visits if visit.ring == "layer" and not visit.gradient)

    def updated(seconds: Seconds) -> float:
        return sum(update_s for unit, update_s in seconds.updates if unit)

    link = uploaded(in_bytes) / (scale * uploaded(whole))
    found = replace(
        rates,
        h2d_bytes_per_s=link,
        d2h_bytes_per_s=link,
        gather_bytes_per_s=link,
        adamw_bytes_per_s=updated(in_bytes) / (scale * updated(whole)),
        compressed_parameters_per_s=math.inf,
        submit_s=0.0,
    )
    if whole.drives.seconds and rates.drives is not None:
        moved = sum(in_bytes.drives.seconds.values()) / (scale * sum(whole.drives.seconds.values()))
        # Reading and writing alike: each takes its half of the time.
        found = replace(found, drives=replace(rates.drives, read_bytes_per_s=2 * moved, write_bytes_per_s=2 * moved))
    return found


def _at_tempo(seconds: Seconds, whole: Seconds, scale: float) -> Seconds:
    """The narrow model's step with the whole model's compute, times the scale."""
    visits = tuple(
        replace(visit, compute_s=scale * other.compute_s)
        for visit, other in zip(seconds.visits, whole.visits, strict=True)
    )
    return replace(seconds, visits=visits)


def forms_table(
    models: Mapping[str, Mapping[str, Any]], scales: Mapping[str, float], *, width: int, num_steps: int, drive: str
) -> Iterator[str]:
    """The first table, line by line."""
    yield "| model | form | forecast, s | rehearsed, predicted s | measured s | measured / predicted | bound by |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for name, config in models.items():
        for form in FORMS:
            if form.train.get("trainable") == LORA:
                continue
            scale = max(scales[name], _least_scale(form))
            try:
                found = rehearse(config, form, width=width, scale=scale, num_steps=num_steps, drive=drive)
            except InvalidSpec:
                # A dense model has no experts.
                continue
            if found is not None:
                yield (
                    f"| {name} | {form.title} | {found.forecast_s:.2f} | {found.predicted_s:.2f} "
                    f"| {found.measured_s:.2f} | **{found.measured_s / found.predicted_s:.2f}** | {found.bound} |"
                )


def _least_scale(form: Form) -> float:
    """What is done in earnest takes time: experts that Python computes one by one, and a step's thousand spans."""
    return 1.0 if "experts" in form.memory else 0.2 if "tier" in form.memory else 0.0


def over_a_drive(shape: Shape, *, drive: str, num_steps: int) -> tuple[float, float, float]:
    """Seconds of a real step of a small model at the speeds of a shape: without a drive, with the states of all layers
    there, and that as predicted."""
    sizes = {**MODEL_SHAPES["thin"], "num_hidden_layers": NUM_LAYERS}
    config = {"model_type": "qwen3", **sizes, "tie_word_embeddings": True}
    form = Form(title="", train={} if shape.clips else {"max_grad_norm": None})
    spec = spec_of(form, num_tokens=_ROW_TOKENS)
    with outline(config) as path:
        folder = open_for_training(path, spec.train)
        units = tuple(unit.index for unit in folder.layout.units if unit.kind == "layer")
        planes = driven_planes(folder.layout, with_lo=True)
        on = OnDrives(units=units, planes=planes, folders=(drive,))
        grad_bytes = 2 if shape.clips else 0
        alone = Execution(compute_dtype="bfloat16", grad_bytes=grad_bytes, optimizer_threads=1)
        with_drive = replace(alone, drives=on)
        forward_s, backward_s = shape.forward_s / len(units), shape.backward_s / len(units)
        compute_s = {f"forward {unit}": forward_s for unit in units}
        compute_s |= {f"backward {unit}": backward_s for unit in units}
        rate = 2 * DriveLayout(folder.layout, on).num_bytes / shape.drive_s
        tempo = Tempo(compute_s=compute_s)
        alone_s = step_seconds(folder, spec.train.recipe, alone, tempo, num_steps=num_steps)
        slow = replace(tempo, drive_bytes_per_s=rate)
        step_s = step_seconds(folder, spec.train.recipe, with_drive, slow, num_steps=num_steps)
    return alone_s, step_s, predicted(shape, alone_s, len(units))


def drives_table(*, drive: str, num_steps: int, shapes: Sequence[Shape] = SHAPES) -> Iterator[str]:
    """The second table, line by line."""
    yield "| step | compute s | drive s | step s | step / max(compute, drive) | predicted s | step / predicted |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for shape in shapes:
        alone_s, step_s, predicted_s = over_a_drive(shape, drive=drive, num_steps=num_steps)
        yield (
            f"| {shape.name} | {alone_s:.2f} | {shape.drive_s:.2f} | {step_s:.2f} "
            f"| **{step_s / max(alone_s, shape.drive_s):.2f}** | {predicted_s:.2f} | **{step_s / predicted_s:.2f}** |"
        )


def print_tables(what: str, *, width: int, drive: str, num_steps: int = 2) -> None:
    """That of the `forms`, that of `drives`, or `all`, with a drive's states in that folder."""
    if what != "drives":
        scales = {name: scale * (_SCALED_WIDTH / width) ** 2 for name, scale in _SCALES.items()}
        for line in forms_table(MODELS, scales, width=width, num_steps=num_steps, drive=drive):
            print(line, flush=True)
        print(flush=True)
    if what != "forms":
        for line in drives_table(drive=drive, num_steps=num_steps):
            print(line, flush=True)
