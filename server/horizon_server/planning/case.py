"""What is planned: a job, its model, and what is known of the machine, with what follows from an execution. Loads no
torch."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any

from horizon_server.planning.compiling import flops_of_job, is_worth_compiling
from horizon_server.planning.data_size import DataSize
from horizon_server.planning.drives import RINGS, NodeDrives, planned_ring, with_drives
from horizon_server.planning.ledger import LayerMemory, chunked_row_tokens, plan_memory
from horizon_server.planning.model_folder import ModelFolder
from horizon_server.planning.nodes import network_bytes, of_one_node, with_network
from horizon_server.planning.objective import with_objective, with_weights
from horizon_server.planning.rates import DeviceRates
from horizon_server.planning.sampling import with_answers
from horizon_server.planning.step_parts import TODAY, StepWork
from horizon_server.planning.step_time import layer_seconds, predict_forward, predict_step
from horizon_server.planning.step_work import work_of_step
from horizon_server.records.execution import NOTHING_ON_DRIVES, NOTHING_STAYS, Execution
from horizon_server.records.plan import Ledger, ReferencePass, StepPrediction
from horizon_server.spec import METHODS, JobSpec
from horizon_server.store.drive_layout import DriveLayout


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is planned: a job's spec and its model folder, laid out for it, with what is known of its data and of the
    device's speed."""

    spec: JobSpec
    folder: ModelFolder
    host_limit_bytes: int
    rates: DeviceRates | None
    """How fast the device is, where that is known."""
    rates_of_ranks: tuple[DeviceRates, ...] = ()
    """How fast each rank's device is, where they differ and that is known; else all are as `rates` say."""
    layer: LayerMemory | None
    """What a layer keeps, where it was counted on the model."""
    data: DataSize | None
    """Of all documents, where something is known of them."""
    longest_document: int | None
    """Where the data is prepared."""
    network_bytes_per_s: float | None = None
    """Between nodes, in each direction; None where it is not known."""
    drives: NodeDrives | None = None
    """Of the node; whether the job uses them is in its spec."""

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
        """What a step does; of several nodes, each."""
        recipe, num_nodes = self.spec.train.recipe, execution.num_nodes
        # Experts that are chosen by value cannot be compiled, nor dropout.
        can_be = self.folder.shape.experts is None and not recipe.adapter_dropout
        # Chunks are computed eagerly.
        can_be = can_be and not self.chunked_tokens(execution)
        fused = execution.device_kind == "cuda" and can_be and self.compiles(execution)
        facts = dataclasses.replace(TODAY, two_pass_head=METHODS[self.spec.method].has_objective, fused=fused)
        if num_nodes > 1:
            recipe = dataclasses.replace(recipe, tokens_per_step=-(-recipe.tokens_per_step // num_nodes))
        return work_of_step(self.folder, recipe, of_one_node(execution), facts=facts)

    def chunked_tokens(self, execution: Execution) -> int:
        """Tokens of the longest row that is computed in chunks; 0 where none is."""
        longest = min(self.spec.train.sequence_length, self.longest_document or self.spec.train.sequence_length)
        return chunked_row_tokens(self.spec.train.recipe, execution, longest=longest)

    def prediction(self, execution: Execution) -> StepPrediction | None:
        """How long it takes; None where the device's speed is not known."""
        if self.rates is None:
            return None
        work = self.work(execution)
        predicted = predict_step(
            work, self.rates, speeds=self.speeds(work), shares_processors=execution.device_kind == "host"
        )
        if execution.num_nodes == 1:
            return predicted
        return with_network(
            predicted,
            network_bytes(self.folder.layout, execution),
            num_nodes=execution.num_nodes,
            bytes_per_s=self.network_bytes_per_s,
        )

    def references(self, execution: Execution) -> ReferencePass | None:
        """The pass over the data before the first step, where the method needs it."""
        if self.rates is None or not self.spec.needs_references:
            return None
        work, data, on_host = self.work(execution), self.data, execution.device_kind == "host"
        seconds = predict_forward(work, self.rates, speeds=self.speeds(work), shares_processors=on_host)
        rate = work.num_tokens / seconds
        return ReferencePass(
            tokens_per_second=execution.num_nodes * rate,
            num_tokens=None if data is None else data.num_tokens,
            tokens_estimated=self.is_estimated,
            total_s=None if data is None else data.num_tokens / (execution.num_nodes * rate),
        )

    def compiles(self, execution: Execution) -> bool:
        """Whether the worker will compile the job's layers, if they can be; not where it is not known how many steps it
        has, unless it asks for it."""
        train = self.spec.train
        flops = flops_of_job(self.folder, train, self.num_steps or 0)
        return is_worth_compiling(train.compile, execution.device_kind, flops)

    def speeds(self, work: StepWork) -> tuple[float, ...]:
        """How fast each rank's device computes a layer, in units of `rates`; empty where they do not differ."""
        if self.rates is None:
            return ()
        own_s = layer_seconds(work, self.rates)
        return tuple(own_s / layer_seconds(work, rates) for rates in self.rates_of_ranks)

    def with_train(self, **changes: Any) -> Case:
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


def placed(case: Case, execution: Execution) -> Execution:
    """Keep layer inputs on the device while they fit there; offload them where that makes the job fit, or other ranks
    need them. What an earlier plan has on drives or on the device is not asked for."""
    execution = dataclasses.replace(execution, residency=NOTHING_STAYS, drives=NOTHING_ON_DRIVES)
    if execution.parallel == "layers":
        return dataclasses.replace(execution, activation_placement="host", deals_lanes=False)
    on_device = on_drives(case, execution)
    if case.ledger(on_device).device_total_bytes <= execution.device_limit_bytes:
        return on_device
    offloading = on_drives(case, dataclasses.replace(execution, activation_placement="host"))
    return offloading if case.fits(case.ledger(offloading), offloading) else on_device


def on_drives(case: Case, execution: Execution) -> Execution:
    """Put states on drives, where the job may and its host memory is not enough; what is left of that is for the ring
    that they pass through, as far as it makes steps faster: drives work ahead while other units are updated."""
    if case.spec.memory.tier != "drive" or (drives := case.drives) is None:
        return execution

    def fits(other: Execution) -> bool:
        return case.ledger(other).host_total_bytes <= case.host_limit_bytes

    @functools.cache
    def with_ring(num_slots: int) -> Execution:
        return with_drives(case.folder, execution, drives, fits, ring_slots=num_slots)

    def step_s(num_slots: int) -> float:
        other = with_ring(num_slots)
        if not fits(other):
            return math.inf
        prediction = case.prediction(other)
        assert prediction is not None, "the device's speed is known"
        return prediction.step_s

    smallest = with_ring(RINGS[0])
    if case.rates is None or not smallest.drives.units or not fits(smallest):
        return smallest
    layout = DriveLayout(case.folder.layout, smallest.drives)
    return with_ring(planned_ring(sum(len(layout.parts(unit)) for unit in smallest.drives.units), step_s))
