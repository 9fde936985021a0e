"""The memory plan of a job: the store's own arithmetic over safetensors headers, held against this node's limits. Loads
no torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horizon_server.errors import InvalidModel, InvalidSpec
from horizon_server.planning.data_size import DataSize
from horizon_server.planning.gpus import gpu_named, rates_of_machine, usable_device_bytes
from horizon_server.planning.layer_probe import LayerProbe
from horizon_server.planning.ledger import LayerMemory, micro_batch_tokens, plan_memory
from horizon_server.planning.machine import (
    Accelerator,
    HostMemory,
    RateBook,
    RatesByDevice,
    gpu_uuids,
    host_memory,
    rates_name,
)
from horizon_server.planning.model_folder import ModelFolder
from horizon_server.planning.objective import with_objective, with_weights
from horizon_server.planning.rates import DeviceRates
from horizon_server.planning.residency import SPARE_USABLE, choose_residency, product_bytes
from horizon_server.planning.sampling import evaluated_folder, with_answers
from horizon_server.planning.spec_warnings import spec_warnings
from horizon_server.planning.step_time import predict_forward, predict_step
from horizon_server.planning.step_work import TODAY, StepWork, work_of_step
from horizon_server.planning.trainable import open_for_training
from horizon_server.records.execution import (
    DEFAULT_COMPUTE_DTYPE,
    ELEMENT_BYTES,
    ComputeDtype,
    DeviceKind,
    Execution,
    Residency,
)
from horizon_server.records.plan import Ledger, Plan, PlannedMachine, ReferencePass, StepPrediction
from horizon_server.settings import Settings, child_environment
from horizon_server.spec import EVERYTHING, LORA, METHODS, JobSpec
from horizon_server.store.cpus import update_threads
from horizon_server.store.generations import lent_planes
from horizon_server.texts import size_text

# Below this gain, predicted, bf16 is not worth a line in the plan.
_LEAST_GAIN = 1.2

# Sizes travel as 64-bit numbers.
_MAX_PLAN_BYTES = 1 << 60

_GIGA = 1e9

# Of a step that several devices compute: the same on 2, 4 and 8 of them, so that the result is.
_DEFAULT_LANES = 8


@dataclass(frozen=True, kw_only=True)
class _Case:
    """What is planned: a job's spec and its model folder, laid out for it, with what is known of its data and of the
    device's speed."""

    spec: JobSpec
    folder: ModelFolder
    host_limit_bytes: int
    rates: DeviceRates | None
    """How fast the device is, where that is known."""
    layer: LayerMemory | None
    """What a layer keeps, where it was counted on the model."""
    data: DataSize | None
    """Of all documents, where something is known of them."""
    longest_document: int | None
    """Where the data is prepared."""

    def ledger(self, execution: Execution) -> Ledger:
        """The memory that it takes."""
        recipe = self.spec.train.recipe
        ledger = plan_memory(self.folder, recipe, execution, layer=self.layer, longest_document=self.longest_document)
        if METHODS[self.spec.method].has_objective:
            ledger = with_objective(ledger, recipe, execution)
        elif self.data is None or self.data.may_have_weights:
            ledger = with_weights(ledger, recipe, execution)
        return with_answers(ledger, self.spec, self.folder)

    def fits(self, ledger: Ledger, execution: Execution) -> bool:
        """Whether that is within both limits."""
        on_device = ledger.device_total_bytes <= execution.device_limit_bytes
        return on_device and ledger.host_total_bytes <= self.host_limit_bytes

    def work(self, execution: Execution) -> StepWork:
        """What a step does."""
        facts = dataclasses.replace(TODAY, two_pass_head=METHODS[self.spec.method].has_objective)
        return work_of_step(self.folder, self.spec.train.recipe, execution, facts=facts)

    def prediction(self, execution: Execution) -> StepPrediction | None:
        """How long it takes; None where the device's speed is not known."""
        if self.rates is None:
            return None
        return predict_step(self.work(execution), self.rates, shares_processors=execution.device_kind == "host")

    def with_train(self, **changes: Any) -> _Case:
        """The case of a job with other fields of `train`, on the same layout."""
        train = self.spec.train.model_copy(update=changes)
        return dataclasses.replace(self, spec=self.spec.model_copy(update={"train": train}))

    @property
    def num_steps(self) -> int | None:
        """The steps of the whole job, as far as they are known."""
        of_data = None if self.data is None else self.data.num_steps
        # A limit alone says what the job has at most, not how long it takes.
        if self.spec.train.max_steps is None and of_data is None:
            return None
        return min(steps for steps in (of_data, self.spec.most_steps) if steps is not None)

    @property
    def is_estimated(self) -> bool:
        """Whether what is known of the data is estimated from its files."""
        return self.data is not None and self.data.is_estimated


class Planner:
    """Plans jobs against the limits of a node.

    Args:
        settings: of the daemon: the limits of host memory and of the arena, and where a worker's memory lies.
        memory: returns the host memory that there is.
        num_threads: of a worker.
        accelerators: those that a worker's torch can use; a job may use any of them.
        rates: returns how fast each device is, where that is known.
        layer_memory: returns what a model's layers keep, where no formula says it.
        has_bf16: whether the CPU has instructions for bf16.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        memory: Callable[[], HostMemory],
        num_threads: int,
        accelerators: Sequence[Accelerator] = (),
        rates: Callable[[], RatesByDevice] = dict,
        layer_memory: Callable[[ModelFolder], LayerMemory | None] = lambda _: None,
        has_bf16: bool = True,
    ) -> None:
        self._settings = settings
        self._memory = memory
        self._num_threads = num_threads
        self._accelerators = tuple(sorted(accelerators, key=lambda gpu: -gpu.memory_bytes))
        self._rates = rates
        self._layer_memory = layer_memory
        self._has_bf16 = has_bf16
        self._arena_limit_bytes = settings.arena_limit(memory().limit_bytes)

    @classmethod
    def of_node(cls, settings: Settings, book: RateBook, accelerators: Sequence[Accelerator]) -> Planner:
        """Return the planner of this node; `book` holds its speed."""
        return cls(
            settings,
            memory=host_memory,
            num_threads=book.machine.num_threads,
            accelerators=accelerators,
            rates=book.read,
            layer_memory=LayerProbe(child_environment()),
            has_bf16=book.machine.has_bf16,
        )

    def plan(self, spec: JobSpec, folder: Path, *, data: DataSize | None = None) -> Plan:
        """Plan a job against the node's limit, whatever else is running; `data` is what its pass before the first step
        goes over, and the steps of its epochs.

        Raises:
            InvalidModel: when the folder's config or safetensors cannot be read.
            InvalidSpec: when the spec asks for what the model or this node cannot do.
        """
        return self._planned(spec, folder, self._execution(spec), self.host_limit_bytes, data=data)

    def plan_elsewhere(
        self, spec: JobSpec, folder: Path, machine: PlannedMachine, *, data: DataSize | None = None
    ) -> Plan:
        """Plan a job on a machine that is asked about. What this node has measured on the same GPU counts.

        Raises:
            InvalidModel: as `plan`.
            InvalidSpec: as `plan`, and when the machine's GPU is unknown or a number of it cannot be.
        """
        for name, value in (("host_gbps", machine.host_gbps), ("link_gbps", machine.link_gbps)):
            if value is not None and not 0 < value < math.inf:
                raise InvalidSpec.of(
                    f"machine.{name}", f"{name} is {value:g}; it must be above 0, in GB (10^9 bytes) per second"
                )
        rates = rates_of_machine(
            machine.gpu,
            host_bytes_per_s=machine.host_gbps * _GIGA,
            link_bytes_per_s=None if machine.link_gbps is None else machine.link_gbps * _GIGA,
            measured=self._rates().get("cuda"),
        )
        execution = Execution(
            device_kind="cuda",
            compute_dtype=DEFAULT_COMPUTE_DTYPE["cuda"],
            device_limit_bytes=usable_device_bytes(gpu_named(machine.gpu).memory_bytes),
            grad_bytes=_grad_bytes(spec, DEFAULT_COMPUTE_DTYPE["cuda"]),
            num_ranks=spec.gpus,
            lanes=_lanes(spec),
            num_threads=self._num_threads,
        )
        limit_bytes = _MAX_PLAN_BYTES if machine.host_memory_bytes is None else machine.host_memory_bytes
        return self._planned(spec, folder, execution, limit_bytes, rates=rates, data=data)

    @property
    def host_limit_bytes(self) -> int:
        """Host memory that all resident jobs may have together: the limit that holds for this process, less the
        reserve."""
        machine = self._memory().limit_bytes
        limit = min(machine, self._settings.host_memory_limit_bytes or machine)
        return max(0, limit - self._settings.host_memory_reserve_bytes)

    def plan_to_start(
        self,
        spec: JobSpec,
        folder: Path,
        *,
        longest_document: int | None = None,
        data: DataSize | None = None,
        other_bytes: int = 0,
        gpus: Sequence[Accelerator] = (),
    ) -> Plan:
        """Plan a job against what is free now.

        Args:
            longest_document: that of the data, once prepared.
            data: all its documents, which the pass before the first step goes over, and the steps that they make.
            other_bytes: planned for the other resident jobs, whether they have taken it yet or not.
            gpus: those that the job is to use, in the order of its ranks; without, the first ones.
        """
        free = self._memory().available_bytes - self._settings.host_memory_reserve_bytes
        limit = max(0, min(self.host_limit_bytes - other_bytes, free))
        execution = self._execution(spec, gpus)
        return self._planned(spec, folder, execution, limit, data=data, longest_document=longest_document)

    def plan_evaluation(self, spec: JobSpec, path: Path) -> tuple[Execution, Ledger]:
        """Return how a checkpoint of a job is evaluated besides the job, on the host, and the memory that takes: as the
        job's own evaluations on the host, without moments and gradients.

        Raises: InvalidModel, InvalidSpec as `plan`.
        """
        # By one process, in the job's lanes: sums of losses are in their order.
        lanes = _lanes(spec)
        spec, folder = spec.model_copy(update={"device": "host", "gpus": 1}), evaluated_folder(path, spec.train)
        together = micro_batch_tokens(folder.shape.hidden_size, "host")
        execution = dataclasses.replace(self._execution(spec), grad_bytes=0, micro_batch_tokens=together, lanes=lanes)
        case = _Case(
            spec=spec,
            folder=folder,
            host_limit_bytes=self.host_limit_bytes,
            rates=None,
            layer=self._layer_memory(folder),
            data=None,
            longest_document=None,
        )
        return execution, case.ledger(execution)

    def _planned(
        self,
        spec: JobSpec,
        path: Path,
        execution: Execution,
        limit_bytes: int,
        *,
        rates: DeviceRates | None = None,
        data: DataSize | None = None,
        longest_document: int | None = None,
    ) -> Plan:
        folder = open_for_training(path, spec.train)
        longest = folder.shape.max_position_embeddings
        if spec.train.sequence_length > longest:
            what = (
                f"train.sequence_length is {spec.train.sequence_length}; the model allows at most {longest} positions"
            )
            raise InvalidSpec.of("train.sequence_length", what)
        case = _Case(
            spec=spec,
            folder=folder,
            host_limit_bytes=limit_bytes,
            rates=rates or self._rates().get(rates_name(execution.device_kind, execution.compute_dtype)),
            layer=self._layer_memory(folder),
            data=data,
            longest_document=longest_document,
        )
        together = micro_batch_tokens(folder.shape.hidden_size, execution.device_kind)
        execution = _placed(case, dataclasses.replace(execution, micro_batch_tokens=together))
        ledger, prediction = case.ledger(execution), case.prediction(execution)
        if max(ledger.host_total_bytes, ledger.device_total_bytes) > _MAX_PLAN_BYTES:
            raise InvalidModel(
                "the sizes in config.json ask for more than an exbibyte (2**60 bytes) of memory; correct its widths, "
                "heads or experts"
            )
        message = _why_not(case, execution, ledger)
        if prediction is not None and (residency := _residency(case, execution, ledger)) is not None:
            execution = dataclasses.replace(execution, residency=residency)
            ledger, prediction = case.ledger(execution), case.prediction(execution)
        plan = Plan(
            **vars(ledger),
            execution=execution,
            device=execution.device_kind,
            host_limit_bytes=limit_bytes,
            plane_bytes=lent_planes(folder.layout, grad_dtype_bytes=execution.grad_bytes, max_ranks=execution.lanes),
            num_parameters=folder.layout.num_parameters,
            num_trained_parameters=folder.layout.num_trained_parameters,
            message=message,
            warnings=tuple(self._warnings(case, execution)),
            prediction=prediction,
            hint=self._hint(case, execution, prediction),
            references=_references(case, execution),
        )
        if (num_steps := case.num_steps) is not None:
            plan = plan.with_steps(num_steps, estimated=case.is_estimated and num_steps != spec.most_steps)
        return plan

    def _execution(self, spec: JobSpec, gpus: Sequence[Accelerator] = ()) -> Execution:
        """On what a job of this spec computes here, and in which numbers; placement and residency depend on the
        model."""
        if spec.device == "cuda" and not self._accelerators:
            raise InvalidSpec(
                "device: cuda needs a CUDA device, and this node has none that a worker's torch can use; use device: "
                "host or auto"
            )
        asked = spec.train.compute_dtype
        # `auto` is the GPU where there is one, but for what only the host computes in.
        on_gpu = spec.device == "cuda" or (spec.device == "auto" and bool(self._accelerators) and asked != "float32")
        device_kind: DeviceKind = "cuda" if on_gpu else "host"
        self._check_devices(spec.gpus, device_kind)
        limit_bytes, num_threads, differ = self._arena_limit_bytes, self._num_threads, False
        if device_kind == "cuda":
            chosen = gpus or self._accelerators[: spec.gpus]
            limit_bytes = usable_device_bytes(min(gpu.memory_bytes for gpu in chosen))
            num_threads = max(1, num_threads // spec.gpus)
            differ = len({gpu.name for gpu in chosen}) > 1
        else:
            num_threads = max(1, num_threads // self._settings.host_devices)
        # fp32 on the host although bf16 may be faster: a job's result must not depend on the CPU that it happens to run
        # on.
        compute_dtype: ComputeDtype = DEFAULT_COMPUTE_DTYPE[device_kind] if asked == "auto" else asked
        if device_kind == "cuda" and compute_dtype == "float32":
            what = (
                "train.compute_dtype is float32, which only the host device computes in; use bfloat16 or auto, or "
                "device: host"
            )
            raise InvalidSpec.of("train.compute_dtype", what)
        if spec.train.compile == "on" and spec.train.matmul == "fp8":
            what = (
                "train.compile is on, and layers whose products are in fp8 are never compiled; use auto or off, or "
                "train.matmul: bf16"
            )
            raise InvalidSpec.of("train.compile", what)
        return Execution(
            device_kind=device_kind,
            compute_dtype=compute_dtype,
            device_limit_bytes=limit_bytes,
            gpu=gpu_uuids(gpus) if device_kind == "cuda" else "",
            num_ranks=spec.gpus,
            lanes=_lanes(spec),
            deals_lanes=differ,
            num_threads=num_threads,
            optimizer_threads=update_threads(num_threads, device_kind=device_kind),
            numa_interleave=self._settings.numa_interleave,
            grad_bytes=_grad_bytes(spec, compute_dtype),
        )

    def _check_devices(self, num_devices: int, kind: DeviceKind) -> None:
        """Raises InvalidSpec where a job asks for more devices of the kind than this node has."""
        if kind == "cuda" and num_devices > (num := len(self._accelerators)):
            what = f"this node has {num} GPU{'' if num == 1 else 's'} that a worker's torch can use; use gpus: {num}"
        elif kind == "host" and num_devices > (num := self._settings.host_devices):
            divided = "one device" if num == 1 else f"divided into {num} devices"
            what = f"this node's processors are {divided}; use gpus: {num}, or ask an admin to set host_devices"
        else:
            return
        raise InvalidSpec.of("gpus", f"gpus is {num_devices} and {what}")

    def _warnings(self, case: _Case, execution: Execution) -> list[str]:
        """What is likely not meant although it fits."""
        warnings = spec_warnings(case.spec, case.folder, num_steps=case.num_steps, estimated=case.is_estimated)
        warnings += _of_lanes(case.spec, execution)
        if (execution.device_kind, execution.compute_dtype) == ("host", "bfloat16") and not self._has_bf16:
            warnings.append(
                "this node's CPU has no bf16 instructions, so train.compute_dtype: bfloat16 is slower on it than "
                "float32"
            )
        return warnings

    def _hint(self, case: _Case, execution: Execution, prediction: StepPrediction | None) -> str:
        if prediction is None or execution.device_kind != "host" or case.spec.train.compute_dtype != "auto":
            return ""
        grad_bytes = ELEMENT_BYTES["bfloat16"] if execution.grad_bytes else 0
        in_bf16 = dataclasses.replace(execution, compute_dtype="bfloat16", grad_bytes=grad_bytes)
        rates = self._rates().get(rates_name("host", "bfloat16"))
        faster = dataclasses.replace(case, rates=rates).prediction(in_bf16)
        if faster is None or prediction.step_s < _LEAST_GAIN * faster.step_s:
            return ""
        gain = prediction.step_s / faster.step_s
        return (
            f"train.compute_dtype: bfloat16 is predicted to be {gain:.1f} times as fast on this CPU, at the "
            "precision of bf16"
        )


def _lanes(spec: JobSpec) -> int:
    """The parts that a step is divided into. Raises InvalidSpec where a device would have none."""
    lanes, least = spec.train.lanes, 1 << (spec.gpus - 1).bit_length()
    if lanes is None:
        return 1 if spec.gpus == 1 else max(_DEFAULT_LANES, least)
    if lanes < spec.gpus:
        what = (
            f"train.lanes is {lanes} and gpus is {spec.gpus}, and each device computes one lane at least; use "
            f"train.lanes: {least} or gpus: {lanes}"
        )
        raise InvalidSpec.of("train.lanes", what)
    return lanes


def _of_lanes(spec: JobSpec, execution: Execution) -> list[str]:
    """What slows down a step that is divided among lanes or devices."""
    if execution.lanes == 1:
        return []
    tokens, of_lane = spec.train.tokens_per_step, spec.train.tokens_per_step // execution.lanes
    if execution.num_ranks > 1 and spec.train.sequence_length * execution.num_ranks > tokens:
        return [
            f"train.tokens_per_step is {tokens} for {execution.num_ranks} devices, and a row may have "
            f"train.sequence_length, {spec.train.sequence_length}: a row is not divided, so some devices may wait for "
            "others; use a larger train.tokens_per_step"
        ]
    if 0 < of_lane < execution.micro_batch_tokens:
        return [
            f"each of train.lanes {execution.lanes} has about {of_lane} tokens of a step, fewer than the "
            f"{execution.micro_batch_tokens} that are computed at once where there are as many; use a larger "
            "train.tokens_per_step or fewer lanes"
        ]
    return []


def _placed(case: _Case, execution: Execution) -> Execution:
    """Keep layer inputs on the device while they fit there; offload them where that makes the job fit."""
    if case.ledger(execution).device_total_bytes <= execution.device_limit_bytes:
        return execution
    offloading = dataclasses.replace(execution, activation_placement="host")
    return offloading if case.fits(case.ledger(offloading), offloading) else execution


def _residency(case: _Case, execution: Execution, ledger: Ledger) -> Residency | None:
    """Use what is left of a GPU's memory, where that makes steps faster. On the host nothing crosses a link."""
    room_bytes = int(SPARE_USABLE * execution.device_limit_bytes) - ledger.device_total_bytes
    if execution.device_kind == "host" or execution.activation_placement == "host" or room_bytes <= 0:
        return None

    def step_s(residency: Residency) -> float:
        prediction = case.prediction(dataclasses.replace(execution, residency=residency))
        assert prediction is not None, "there was one without"
        return prediction.step_s

    def resident_bytes(num_layers: int) -> int:
        resident = dataclasses.replace(execution, residency=Residency(resident_layers=num_layers))
        return case.ledger(resident).device_bytes["weights"] - ledger.device_bytes["weights"]

    recipe = case.spec.train.recipe
    # Compiled layers recompute inside one function, and take nothing that was kept.
    is_eager = case.spec.train.compile == "off" or recipe.matmul == "fp8"
    return choose_residency(
        step_s,
        room_bytes=room_bytes,
        num_layers=case.folder.shape.num_hidden_layers,
        resident_bytes=resident_bytes,
        layer_product_bytes=product_bytes(case.folder, recipe, execution) if is_eager and case.layer is None else 0,
    )


def _references(case: _Case, execution: Execution) -> ReferencePass | None:
    """The pass over the data before the first step, where the method needs it."""
    if case.rates is None or not case.spec.needs_references:
        return None
    work, data = case.work(execution), case.data
    rate = work.num_tokens / predict_forward(work, case.rates, shares_processors=execution.device_kind == "host")
    return ReferencePass(
        tokens_per_second=rate,
        num_tokens=None if data is None else data.num_tokens,
        tokens_estimated=case.is_estimated,
        total_s=None if data is None else data.num_tokens / rate,
    )


def _why_not(case: _Case, execution: Execution, ledger: Ledger) -> str:
    """Return why it does not fit, with the numbers and the smallest change that would make it fit; empty where it
    fits."""
    if case.fits(ledger, execution):
        return ""
    need, limit_bytes = ledger.host_total_bytes, case.host_limit_bytes
    if need > limit_bytes:
        short = f"the job needs {size_text(need)} of host memory and {size_text(limit_bytes)} are available"
    else:
        arena, allowed = ledger.device_total_bytes, execution.device_limit_bytes
        short = f"the job needs {size_text(arena)} on the device and {size_text(allowed)} are allowed"
    store = sum(ledger.host_bytes[part] for part in ("weights", "moments", "gradients"))
    if store > limit_bytes:
        billions = case.folder.layout.num_parameters / 1e9
        held = f"{size_text(store)} of it hold the {billions:.2f} B parameters and their moments"
        return f"{short}; {held}: {_smaller(case, execution)}"
    return f"{short}; {_advice(case, execution)}"


def _smaller(case: _Case, execution: Execution) -> str:
    """What to do where the store alone does not fit: train adapters, where that fits."""
    if case.spec.train.trainable != EVERYTHING:
        return "only a smaller model fits"
    changes: dict[str, Any] = {"trainable": LORA, "lr_groups": ()}
    with suppress(InvalidSpec):
        adapted = case.with_train(**changes)
        adapted = dataclasses.replace(adapted, folder=open_for_training(case.folder.path, adapted.spec.train))
        execution = _placed(adapted, execution)
        ledger = adapted.ledger(execution)
        what = f"train.trainable: lora (adapters next to the frozen model) needs {size_text(ledger.host_total_bytes)}"
        return f"{what}, which fits" if adapted.fits(ledger, execution) else f"only a smaller model fits; {what}"
    return "only a smaller model fits"


def _advice(case: _Case, execution: Execution) -> str:
    tokens, sequence_length = case.spec.train.tokens_per_step, case.spec.train.sequence_length
    while tokens > 8:
        tokens //= 2
        length = min(sequence_length, tokens)
        smaller = case.with_train(tokens_per_step=tokens, sequence_length=length)
        placed = _placed(smaller, execution)
        if smaller.fits(smaller.ledger(placed), placed):
            shorter = f" and train.sequence_length: {length}" if length < sequence_length else ""
            return f"it would fit with train.tokens_per_step: {tokens}{shorter}"
    return "no smaller train.tokens_per_step makes it fit; use a smaller model or a node with more memory"


def _grad_bytes(spec: JobSpec, compute_dtype: ComputeDtype) -> int:
    """Of one stored gradient; none is stored where no clipping waits for the norm."""
    return 0 if spec.train.max_grad_norm is None else ELEMENT_BYTES[compute_dtype]
