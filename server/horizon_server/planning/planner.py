"""The memory plan of a job: the store's own arithmetic over safetensors headers, held against this node's limits. Loads no torch."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from horizon_server.errors import InvalidModel, InvalidSpec
from horizon_server.planning.compute import DEFAULT_COMPUTE_DTYPE, ELEMENT_BYTES, ComputeDtype, DeviceKind
from horizon_server.planning.data_size import DataSize
from horizon_server.planning.gpus import gpu_named, rates_of_machine, usable_device_bytes
from horizon_server.planning.kept import NOTHING_KEPT, SPARE_USABLE, KeptOnDevice, choose_kept, product_bytes
from horizon_server.planning.layer_probe import LayerProbe
from horizon_server.planning.ledger import ActivationPlacement, LayerMemory, MemoryPlan, micro_batch_tokens, plan_memory
from horizon_server.planning.machine import (
    Accelerator,
    HostMemory,
    RateBook,
    RatesByDevice,
    host_memory,
    rates_name,
)
from horizon_server.planning.model_folder import ModelFolder
from horizon_server.planning.objective import with_objective, with_weights
from horizon_server.planning.rates import DeviceRates
from horizon_server.planning.sampling import with_answers
from horizon_server.planning.spec_warnings import spec_warnings
from horizon_server.planning.step_time import predict_forward, predict_step
from horizon_server.planning.step_work import TODAY, StepWork, work_of_step
from horizon_server.planning.trainable import open_for_training
from horizon_server.records.plan import JobPlan, KeptMemory, PlannedMachine, ReferencePass, StepPrediction, size_text
from horizon_server.settings import Settings, child_environment
from horizon_server.spec import EVERYTHING, LORA, WITH_OPTIONS, JobSpec, needs_references
from horizon_server.store.generations import lent_planes
from horizon_server.store.layout import StoreLayout
from horizon_server.store.planes import create_memory_file

# Below this gain, predicted, bf16 is not worth a line in the plan.
_LEAST_GAIN = 1.2

# Sizes travel as 64-bit numbers.
_MAX_PLAN_BYTES = 1 << 60

_GIGA = 1e9


@dataclass(frozen=True, kw_only=True)
class WorkerMemory:
    """The plan of one attempt and the sizes of the planes that the daemon lends its worker."""

    plan: JobPlan
    plane_bytes: dict[str, int]
    grad_dtype_bytes: int
    """0 where no gradient is kept: each unit is updated as its gradient lands."""
    device_kind: DeviceKind
    compute_dtype: ComputeDtype
    activation_placement: ActivationPlacement
    micro_batch_tokens: int
    """Documents are computed together up to this."""
    kept: KeptMemory
    """What stays on the device because there is room."""

    @contextmanager
    def lent(self) -> Iterator[dict[str, int]]:
        """Create the planes as anonymous memory files and give them back at the end: plane -> descriptor.

        They belong to the daemon: a worker that dies leaves them whole.
        """
        descriptors: dict[str, int] = {}
        try:
            for plane, size_bytes in self.plane_bytes.items():
                descriptors[plane] = create_memory_file(plane, size_bytes)
            yield descriptors
        finally:
            for descriptor in descriptors.values():
                os.close(descriptor)


@dataclass(frozen=True, kw_only=True)
class _Choice:
    """How a job runs here: on what and in what, with what gradients kept, and where layer inputs wait."""

    device_kind: DeviceKind
    compute_dtype: ComputeDtype
    device_limit_bytes: int
    grad_bytes: int
    activation_placement: ActivationPlacement = "device"
    micro_batch_tokens: int = 0
    longest_document: int | None = None
    """Where the data is prepared."""
    layer: LayerMemory | None = None
    """What a layer keeps, where it was counted on the model."""
    rates: DeviceRates | None = None
    """How fast the device is, where that is known."""
    kept: KeptOnDevice = NOTHING_KEPT
    """What stays on the device because there is room."""
    data: DataSize | None = None
    """Of all documents, where something is known of them."""

    def num_steps(self, spec: JobSpec) -> int | None:
        """The steps of the whole job, as far as they are known."""
        of_data = None if self.data is None else self.data.num_steps
        # A limit alone says what the job has at most, not how long it takes.
        if spec.train.max_steps is None and of_data is None:
            return None
        return min(steps for steps in (of_data, spec.most_steps) if steps is not None)


class Planner:
    """Plans jobs against the limits of this node. `accelerators` are those that a worker's torch can use, of which a job may use any;
    `rates` says how fast it is, where that is known; `layer_memory` what a model's layers keep, where no formula says it; `has_bf16`
    whether its CPU has instructions for bf16."""

    def __init__(
        self,
        *,
        memory: Callable[[], HostMemory],
        limit_bytes: int | None,
        reserve_bytes: int,
        arena_limit_bytes: int,
        num_threads: int,
        accelerators: Sequence[Accelerator] = (),
        rates: Callable[[], RatesByDevice] = dict,
        layer_memory: Callable[[ModelFolder], LayerMemory | None] = lambda _: None,
        has_bf16: bool = True,
    ) -> None:
        self._memory = memory
        self._accelerators = tuple(sorted(accelerators, key=lambda gpu: -gpu.memory_bytes))
        self._rates = rates
        self._layer_memory = layer_memory
        self._has_bf16 = has_bf16
        self._limit_bytes = limit_bytes
        self._reserve_bytes = reserve_bytes
        self._arena_limit_bytes = arena_limit_bytes
        self._num_threads = num_threads

    @classmethod
    def of_node(cls, settings: Settings, book: RateBook, accelerators: Sequence[Accelerator]) -> Planner:
        """Return the planner of this node, by its settings; `book` holds its speed."""
        return cls(
            memory=host_memory,
            limit_bytes=settings.host_memory_limit_bytes,
            reserve_bytes=settings.host_memory_reserve_bytes,
            arena_limit_bytes=settings.arena_limit(host_memory().limit_bytes),
            num_threads=book.machine.num_threads,
            accelerators=accelerators,
            rates=book.read,
            layer_memory=LayerProbe(child_environment()),
            has_bf16=book.machine.has_bf16,
        )

    def plan(self, spec: JobSpec, folder: Path, *, data: DataSize | None = None) -> JobPlan:
        """Return the ledger of the job against the node's limit, whatever else is running; `data` is what its pass before the first
        step goes over, and the steps of its epochs.

        Raises:
            InvalidModel: when the folder's config or safetensors cannot be read.
            InvalidSpec: when the spec asks for what the model or this node cannot do.
        """
        choice = dataclasses.replace(self._choice(spec), data=data)
        return self._against(self.host_limit_bytes, spec, folder, choice)[0]

    def plan_elsewhere(
        self, spec: JobSpec, folder: Path, machine: PlannedMachine, *, data: DataSize | None = None
    ) -> JobPlan:
        """Return the ledger and the predicted step on a machine that is asked about. What this node has measured on the same GPU counts.

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
        choice = _Choice(
            device_kind="cuda",
            compute_dtype=DEFAULT_COMPUTE_DTYPE["cuda"],
            device_limit_bytes=usable_device_bytes(gpu_named(machine.gpu).memory_bytes),
            grad_bytes=_grad_bytes(spec, DEFAULT_COMPUTE_DTYPE["cuda"]),
            rates=rates,
            data=data,
        )
        limit_bytes = _MAX_PLAN_BYTES if machine.host_memory_bytes is None else machine.host_memory_bytes
        return self._against(limit_bytes, spec, folder, choice)[0]

    @property
    def host_limit_bytes(self) -> int:
        """Host memory that all resident jobs may have together: the limit that holds for this process, less the reserve."""
        machine = self._memory().limit_bytes
        limit = machine if self._limit_bytes is None else min(machine, self._limit_bytes)
        return max(0, limit - self._reserve_bytes)

    def worker_memory(
        self,
        spec: JobSpec,
        folder: Path,
        *,
        longest_document: int | None = None,
        data: DataSize | None = None,
        other_bytes: int = 0,
        gpu: Accelerator | None = None,
    ) -> WorkerMemory:
        """Return the ledger against what is free now, with the planes to lend.

        Args:
            longest_document: that of the data, once prepared.
            data: all its documents, which the pass before the first step goes over, and the steps that they make.
            other_bytes: planned for the other resident jobs, whether they have taken it yet or not.
            gpu: the one that the job is to use; None means the first.
        """
        free = self._memory().available_bytes - self._reserve_bytes
        limit = max(0, min(self.host_limit_bytes - other_bytes, free))
        wanted = dataclasses.replace(self._choice(spec, gpu), longest_document=longest_document, data=data)
        plan, layout, choice = self._against(limit, spec, folder, wanted)
        return WorkerMemory(
            plan=plan,
            plane_bytes=lent_planes(layout, grad_dtype_bytes=choice.grad_bytes),
            grad_dtype_bytes=choice.grad_bytes,
            device_kind=choice.device_kind,
            compute_dtype=choice.compute_dtype,
            activation_placement=choice.activation_placement,
            micro_batch_tokens=choice.micro_batch_tokens,
            kept=plan.kept or KeptMemory(),
        )

    def _against(
        self, limit_bytes: int, spec: JobSpec, folder: Path, choice: _Choice
    ) -> tuple[JobPlan, StoreLayout, _Choice]:
        found = open_for_training(folder, spec.train)
        choice = dataclasses.replace(
            choice,
            layer=self._layer_memory(found),
            micro_batch_tokens=micro_batch_tokens(found.shape.hidden_size, choice.device_kind),
        )
        longest = found.shape.max_position_embeddings
        if spec.train.sequence_length > longest:
            what = (
                f"train.sequence_length is {spec.train.sequence_length}; the model allows at most {longest} positions"
            )
            raise InvalidSpec.of("train.sequence_length", what)
        ledger, choice = self._placed(spec, found, choice, limit_bytes)
        if max(ledger.host_total_bytes, ledger.device_total_bytes) > _MAX_PLAN_BYTES:
            raise InvalidModel(
                "the sizes in config.json ask for more than an exbibyte (2**60 bytes) of memory; correct its widths, heads or experts"
            )
        prediction = self._prediction(spec, found, choice)
        kept = None
        if prediction is not None and (found_kept := self._with_kept(spec, found, choice, ledger, prediction))[1]:
            choice, kept = found_kept
            ledger, prediction = self._ledger(spec, found, choice), self._prediction(spec, found, choice)
        plan = JobPlan(
            host_bytes=dict(ledger.host),
            device_bytes=dict(ledger.device),
            host_limit_bytes=limit_bytes,
            device_limit_bytes=choice.device_limit_bytes,
            num_parameters=found.layout.num_parameters,
            num_trained_parameters=found.layout.num_trained_parameters,
            device=choice.device_kind,
            compute_dtype=choice.compute_dtype,
            message=self._why_not(spec, found, ledger, limit_bytes, choice),
            warnings=tuple(self._warnings(spec, found, choice)),
            prediction=prediction,
            kept=kept,
        )
        plan = dataclasses.replace(plan, hint=self._hint(plan, spec, found, choice))
        plan = self._with_references(plan, spec, found, choice)
        if (num_steps := choice.num_steps(spec)) is not None:
            of_files = choice.data is not None and choice.data.is_estimated
            plan = plan.with_steps(num_steps, estimated=of_files and num_steps != spec.most_steps)
        return plan, found.layout, choice

    def _prediction(self, spec: JobSpec, found: ModelFolder, choice: _Choice) -> StepPrediction | None:
        if choice.rates is None:
            return None
        return predict_step(
            _work(spec, found, choice),
            choice.rates,
            shares_processors=choice.device_kind == "host",
        )

    def _with_references(self, plan: JobPlan, spec: JobSpec, found: ModelFolder, choice: _Choice) -> JobPlan:
        """Count the pass over the data before the first step, where the method needs it."""
        if plan.prediction is None or choice.rates is None or not needs_references(spec):
            return plan
        work, data = _work(spec, found, choice), choice.data
        forward_s = predict_forward(work, choice.rates, shares_processors=choice.device_kind == "host")
        rate = work.num_tokens / forward_s
        references = ReferencePass(
            tokens_per_second=rate,
            num_tokens=None if data is None else data.num_tokens,
            tokens_estimated=data is not None and data.is_estimated,
            total_s=None if data is None else data.num_tokens / rate,
        )
        return dataclasses.replace(plan, references=references)

    def _choice(self, spec: JobSpec, gpu: Accelerator | None = None) -> _Choice:
        if spec.device == "cuda" and not self._accelerators:
            raise InvalidSpec(
                "device: cuda needs a CUDA device, and this node has none that a worker's torch can use; use device: host or auto"
            )
        # A default must have been tried: `auto` stays on the host until tests/gpu has passed on a GPU.
        device_kind: DeviceKind = "cuda" if spec.device == "cuda" else "host"
        limit_bytes = self._arena_limit_bytes
        if device_kind == "cuda":
            limit_bytes = usable_device_bytes((gpu or self._accelerators[0]).memory_bytes)
        asked = spec.train.compute_dtype
        # fp32 on the host although bf16 may be faster: a job's result must not depend on the CPU that it happens to run on.
        compute_dtype: ComputeDtype = DEFAULT_COMPUTE_DTYPE[device_kind] if asked == "auto" else asked
        if device_kind == "cuda" and compute_dtype == "float32":
            what = "train.compute_dtype is float32, which only the host device computes in; use bfloat16 or auto, or device: host"
            raise InvalidSpec.of("train.compute_dtype", what)
        if spec.train.compile == "on" and spec.train.matmul == "fp8":
            what = "train.compile is on, and layers whose products are in fp8 are never compiled; use auto or off, or train.matmul: bf16"
            raise InvalidSpec.of("train.compile", what)
        return _Choice(
            device_kind=device_kind,
            compute_dtype=compute_dtype,
            device_limit_bytes=limit_bytes,
            grad_bytes=_grad_bytes(spec, compute_dtype),
            rates=self._rates().get(rates_name(device_kind, compute_dtype)),
        )

    def _placed(
        self, spec: JobSpec, found: ModelFolder, choice: _Choice, limit_bytes: int
    ) -> tuple[MemoryPlan, _Choice]:
        """Keep layer inputs on the device while they fit there; offload them where that makes the job fit."""
        kept = self._ledger(spec, found, choice)
        if kept.device_total_bytes <= choice.device_limit_bytes:
            return kept, choice
        elsewhere = dataclasses.replace(choice, activation_placement="host")
        offloaded = self._ledger(spec, found, elsewhere)
        fits = offloaded.device_total_bytes <= choice.device_limit_bytes and offloaded.host_total_bytes <= limit_bytes
        return (offloaded, elsewhere) if fits else (kept, choice)

    def _with_kept(
        self, spec: JobSpec, found: ModelFolder, choice: _Choice, ledger: MemoryPlan, plain: StepPrediction
    ) -> tuple[_Choice, KeptMemory | None]:
        """Use what is left of a GPU's memory, where that makes steps faster. On the host nothing crosses a link."""
        room_bytes = int(SPARE_USABLE * choice.device_limit_bytes) - ledger.device_total_bytes
        if choice.device_kind == "host" or choice.activation_placement == "host" or room_bytes <= 0:
            return choice, None

        def keeping(kept: KeptOnDevice) -> _Choice:
            return dataclasses.replace(choice, kept=kept)

        def step_s(kept: KeptOnDevice) -> float:
            prediction = self._prediction(spec, found, keeping(kept))
            assert prediction is not None, "there was one without"
            return prediction.step_s

        def resident_bytes(num_layers: int) -> int:
            weights = self._ledger(spec, found, keeping(KeptOnDevice(resident_layers=num_layers))).device["weights"]
            return weights - ledger.device["weights"]

        # Compiled layers recompute inside one function, and take nothing that was kept.
        is_eager = spec.train.compile == "off" or spec.train.matmul == "fp8"
        element_bytes, num_tokens = ELEMENT_BYTES[choice.compute_dtype], spec.train.tokens_per_step
        products = 0
        if is_eager and choice.layer is None:
            products = product_bytes(
                found.layout,
                found.shape,
                num_tokens=num_tokens,
                element_bytes=element_bytes,
                adapter_dropout=spec.train.lora.dropout,
            )
        kept = choose_kept(
            step_s,
            room_bytes=room_bytes,
            num_layers=found.shape.num_hidden_layers,
            resident_bytes=resident_bytes,
            layer_product_bytes=products,
        )
        if kept == NOTHING_KEPT:
            return choice, None
        return keeping(kept), KeptMemory(
            resident_layers=kept.resident_layers,
            resident_bytes=resident_bytes(kept.resident_layers),
            product_layers=kept.product_layers,
            product_bytes=kept.product_layers * products,
            saved_share=1 - step_s(kept) / plain.step_s,
        )

    def _ledger(self, spec: JobSpec, found: ModelFolder, choice: _Choice) -> MemoryPlan:
        ledger = plan_memory(
            found.layout,
            model=found.shape,
            tokens_per_step=spec.train.tokens_per_step,
            sequence_length=spec.train.sequence_length,
            device_kind=choice.device_kind,
            grad_bytes=choice.grad_bytes,
            compute_dtype=choice.compute_dtype,
            num_threads=self._num_threads,
            activation_placement=choice.activation_placement,
            layer=choice.layer,
            in_fp8=spec.train.matmul == "fp8",
            micro_batch_tokens=choice.micro_batch_tokens,
            longest_document=choice.longest_document,
            kept=choice.kept,
            adapter_dropout=spec.train.lora.dropout,
        )
        if spec.method in WITH_OPTIONS:
            ledger = with_objective(ledger, tokens_per_step=spec.train.tokens_per_step, device_kind=choice.device_kind)
        elif choice.data is None or choice.data.may_have_weights:
            ledger = with_weights(ledger, tokens_per_step=spec.train.tokens_per_step, device_kind=choice.device_kind)
        return with_answers(ledger, spec, found)

    def _why_not(self, spec: JobSpec, found: ModelFolder, ledger: MemoryPlan, limit_bytes: int, choice: _Choice) -> str:
        """Return why it does not fit, with the numbers and the smallest change that would make it fit; empty where it fits."""
        need, arena = ledger.host_total_bytes, ledger.device_total_bytes
        if need <= limit_bytes and arena <= choice.device_limit_bytes:
            return ""
        if need > limit_bytes:
            short = f"the job needs {size_text(need)} of host memory and {size_text(limit_bytes)} are available"
        else:
            short = (
                f"the job needs {size_text(arena)} on the device and {size_text(choice.device_limit_bytes)} are allowed"
            )
        store = sum(ledger.host[part] for part in ("weights", "moments", "gradients"))
        if store > limit_bytes:
            billions = found.layout.num_parameters / 1e9
            held = f"{size_text(store)} of it hold the {billions:.2f} B parameters and their moments"
            return f"{short}; {held}: {self._smaller(spec, found, limit_bytes, choice)}"
        return f"{short}; {self._advice(spec, found, limit_bytes, choice)}"

    def _smaller(self, spec: JobSpec, found: ModelFolder, limit_bytes: int, choice: _Choice) -> str:
        """What to do where the store alone does not fit: train adapters, where that fits."""
        if spec.train.trainable != EVERYTHING:
            return "only a smaller model fits"
        train = spec.train.model_copy(update={"trainable": LORA, "lr_groups": ()})
        with suppress(InvalidSpec):
            adapted = open_for_training(found.path, train)
            ledger, _ = self._placed(spec.model_copy(update={"train": train}), adapted, choice, limit_bytes)
            what = (
                f"train.trainable: lora (adapters next to the frozen model) needs {size_text(ledger.host_total_bytes)}"
            )
            fits = ledger.host_total_bytes <= limit_bytes and ledger.device_total_bytes <= choice.device_limit_bytes
            return f"{what}, which fits" if fits else f"only a smaller model fits; {what}"
        return "only a smaller model fits"

    def _warnings(self, spec: JobSpec, found: ModelFolder, choice: _Choice) -> list[str]:
        """What is likely not meant although it fits."""
        warnings = spec_warnings(
            spec,
            found,
            num_steps=choice.num_steps(spec),
            estimated=choice.data is not None and choice.data.is_estimated,
        )
        if (choice.device_kind, choice.compute_dtype) == ("host", "bfloat16") and not self._has_bf16:
            warnings.append(
                "this node's CPU has no bf16 instructions, so train.compute_dtype: bfloat16 is slower on it than float32"
            )
        return warnings

    def _hint(self, plan: JobPlan, spec: JobSpec, found: ModelFolder, choice: _Choice) -> str:
        if plan.prediction is None or choice.device_kind != "host" or spec.train.compute_dtype != "auto":
            return ""
        grad_bytes = ELEMENT_BYTES["bfloat16"] if choice.grad_bytes else 0
        rates = self._rates().get(rates_name("host", "bfloat16"))
        faster = dataclasses.replace(choice, compute_dtype="bfloat16", grad_bytes=grad_bytes, rates=rates)
        prediction = self._prediction(spec, found, faster)
        if prediction is None or plan.prediction.step_s < _LEAST_GAIN * prediction.step_s:
            return ""
        gain = plan.prediction.step_s / prediction.step_s
        return f"train.compute_dtype: bfloat16 is predicted to be {gain:.1f} times as fast on this CPU, at the precision of bf16"

    def _advice(self, spec: JobSpec, found: ModelFolder, limit_bytes: int, choice: _Choice) -> str:
        tokens = spec.train.tokens_per_step
        while tokens > 8:
            tokens //= 2
            length = min(spec.train.sequence_length, tokens)
            train = spec.train.model_copy(update={"tokens_per_step": tokens, "sequence_length": length})
            ledger, _ = self._placed(spec.model_copy(update={"train": train}), found, choice, limit_bytes)
            if ledger.host_total_bytes <= limit_bytes and ledger.device_total_bytes <= choice.device_limit_bytes:
                shorter = f" and train.sequence_length: {length}" if length < spec.train.sequence_length else ""
                return f"it would fit with train.tokens_per_step: {tokens}{shorter}"
        return "no smaller train.tokens_per_step makes it fit; use a smaller model or a node with more memory"


def _work(spec: JobSpec, found: ModelFolder, choice: _Choice) -> StepWork:
    return work_of_step(
        found,
        tokens_per_step=spec.train.tokens_per_step,
        sequence_length=spec.train.sequence_length,
        device_kind=choice.device_kind,
        grad_bytes=choice.grad_bytes,
        activation_placement=choice.activation_placement,
        compute_dtype=choice.compute_dtype,
        facts=dataclasses.replace(
            TODAY, micro_batch_tokens=choice.micro_batch_tokens, two_pass_head=spec.method in WITH_OPTIONS
        ),
        kept=choice.kept,
        adapter_dropout=spec.train.lora.dropout,
    )


def _grad_bytes(spec: JobSpec, compute_dtype: ComputeDtype) -> int:
    """Of one stored gradient; none is stored where no clipping waits for the norm."""
    return 0 if spec.train.max_grad_norm is None else ELEMENT_BYTES[compute_dtype]
