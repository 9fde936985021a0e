"""Settles how a job runs on devices that are given: how they divide a step, where layer inputs wait, what stays on the
device; and says why it does not fit. Loads no torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from horizon_server.errors import InvalidModel, InvalidSpec
from horizon_server.planning.compiling import flops_of_job, is_worth_compiling
from horizon_server.planning.data_size import DataSize
from horizon_server.planning.layer_deal import deal_layers
from horizon_server.planning.ledger import LayerMemory, plan_memory
from horizon_server.planning.model_folder import ModelFolder
from horizon_server.planning.nodes import network_bytes, of_one_node, with_network
from horizon_server.planning.objective import with_objective, with_weights
from horizon_server.planning.pages import why_not_paged
from horizon_server.planning.rates import DeviceRates
from horizon_server.planning.residency import SPARE_USABLE, choose_residency, possible_ends, product_bytes
from horizon_server.planning.sampling import with_answers
from horizon_server.planning.step_time import layer_seconds, predict_forward, predict_step
from horizon_server.planning.step_work import TODAY, StepWork, work_of_step
from horizon_server.planning.trainable import open_for_training
from horizon_server.records.execution import NOTHING_STAYS, Execution, Residency
from horizon_server.records.plan import DeviceRange, Ledger, PredictedWays, ReferencePass, StepPrediction
from horizon_server.spec import EVERYTHING, LORA, METHODS, JobSpec, Span
from horizon_server.store.pages import MOST_PAGE_ELEMENTS
from horizon_server.texts import size_text

MAX_PLAN_BYTES = 1 << 60
"""Sizes travel as 64-bit numbers."""


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
        fused = execution.device_kind == "cuda" and can_be and self.compiles(execution)
        facts = dataclasses.replace(TODAY, two_pass_head=METHODS[self.spec.method].has_objective, fused=fused)
        if num_nodes > 1:
            recipe = dataclasses.replace(recipe, tokens_per_step=-(-recipe.tokens_per_step // num_nodes))
        return work_of_step(self.folder, recipe, of_one_node(execution), facts=facts)

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


@dataclass(frozen=True, kw_only=True)
class Settled:
    """How a job runs, what that takes, and why it does not fit; nothing where it does."""

    execution: Execution
    ledger: Ledger
    prediction: StepPrediction | None
    message: str
    ways: PredictedWays | None = None


def settle(case: Case, execution: Execution, *, uses_spare: bool = True) -> Settled:
    """Settle what `execution`, of these devices, leaves open. Several devices divide a step as the spec says, else as
    is predicted to be faster of what fits. Without `uses_spare`, nothing stays on a device that has memory to spare.

    Raises:
        InvalidModel: no machine has as much memory.
        InvalidSpec: the spec says `layers`, and that is not possible.
    """
    by_rows = taken = _Way.of(case, execution, uses_spare=uses_spare)
    has_choice = execution.num_ranks > 1 and execution.num_nodes == 1
    by_layers = _by_layers(case, execution, uses_spare=uses_spare) if has_choice else None
    if by_layers is not None and (case.spec.train.parallel == "layers" or _is_better(case, by_layers, by_rows)):
        taken = by_layers
    ways = None
    if has_choice and case.rates is not None:
        ways = PredictedWays(rows_s=by_rows.step_s, layers_s=None if by_layers is None else by_layers.step_s)
    others = [way for way in (by_rows, by_layers) if way is not None and way is not taken and way.fits]
    return Settled(
        execution=taken.execution,
        ledger=taken.ledger,
        prediction=taken.prediction,
        message="" if taken.fits else _why_not(case, taken.execution, taken.ledger, others),
        ways=ways,
    )


def settle_range(
    case: Case, execution: Execution, field: Literal["gpus", "nodes"], numbers: Sequence[int]
) -> tuple[Settled, DeviceRange]:
    """Settle a job that may continue on each of these `numbers` of what `field` counts, the smallest first: how it runs
    on as many as `execution` has, and what is kept for it, so that it can. Raises as `settle`."""
    settled = settle(case, execution)
    # The search for what stays on a device takes the most time, and takes only what is to spare.
    each = {
        number: settled if other == execution else settle(case, other, uses_spare=False)
        for number in numbers
        for other in [execution.on(number, field)]
    }
    kept = DeviceRange(
        least=numbers[0],
        most=numbers[-1],
        host_bytes=max(one.ledger.host_total_bytes for one in each.values()),
        device_bytes=max(one.ledger.device_total_bytes for one in each.values()),
    )
    message = ""
    if refused := [number for number in numbers if each[number].message]:
        asked: Span = getattr(case.spec, field)
        message = f"on {refused[0]} of {field}: {asked.plain}, {each[refused[0]].message}"
        if fitting := [number for number in numbers if not each[number].message]:
            first = next(number for number in fitting if set(range(number, fitting[-1])) <= set(fitting))
            message += f"; or use {field}: {Span(least=first, most=fitting[-1]).plain}, which fits"
    return dataclasses.replace(settled, message=message), kept


@dataclass(frozen=True, kw_only=True)
class _Way:
    """One of the ways in which devices may divide a step, with everything else settled for it."""

    execution: Execution
    ledger: Ledger
    prediction: StepPrediction | None
    fits: bool

    @classmethod
    def of(cls, case: Case, execution: Execution, *, uses_spare: bool) -> _Way:
        """Placement and residency of a way."""
        execution = _placed(case, execution)
        ledger, prediction = case.ledger(execution), case.prediction(execution)
        if max(ledger.host_total_bytes, ledger.device_total_bytes) > MAX_PLAN_BYTES:
            raise InvalidModel(
                "the sizes in config.json ask for more than an exbibyte (2**60 bytes) of memory; correct its widths, "
                "heads or experts"
            )
        fits = case.fits(ledger, execution)
        residency = None if prediction is None or not uses_spare else _residency(case, execution, ledger)
        if residency is not None:
            execution = dataclasses.replace(execution, residency=residency)
            ledger, prediction = case.ledger(execution), case.prediction(execution)
        return cls(execution=execution, ledger=ledger, prediction=prediction, fits=fits)

    @property
    def step_s(self) -> float | None:
        """Seconds of a step, where it fits and they are known."""
        return self.prediction.step_s if self.fits and self.prediction is not None else None


def _is_better(case: Case, by_layers: _Way, by_rows: _Way) -> bool:
    """Whether a spec that leaves it open means layers."""
    if case.spec.train.parallel != "auto" or not by_layers.fits:
        return False
    if by_layers.step_s is None or by_rows.step_s is None:
        return not by_rows.fits
    return by_layers.step_s < by_rows.step_s


def _by_layers(case: Case, execution: Execution, *, uses_spare: bool) -> _Way | None:
    """The way in which the devices divide the layers: in turn, or by speed where that is predicted to be faster; None
    where it is not possible. Raises InvalidSpec where it is asked for all the same."""
    num_layers, problem = case.folder.shape.num_hidden_layers, ""
    if execution.grad_bytes == 0:
        problem = (
            "train.parallel is layers, which needs stored gradients, and with train.max_grad_norm: null none is "
            "stored; set train.max_grad_norm (a large one never clips) or use train.parallel: rows"
        )
    elif num_layers < execution.num_ranks:
        gpus = case.spec.gpus
        problem = (
            f"train.parallel is layers, gpus is {gpus.plain} and the model has {num_layers} "
            f"layer{'' if num_layers == 1 else 's'}; use gpus: {gpus.at_most(num_layers).plain} or train.parallel: rows"
        )
    if not problem:
        in_turn = _Way.of(case, dataclasses.replace(execution, parallel="layers"), uses_spare=uses_spare)
        if not (speeds := case.speeds(case.work(in_turn.execution))):
            return in_turn
        dealt = dataclasses.replace(in_turn.execution, layer_ranks=deal_layers(num_layers, speeds))
        by_speed = _Way.of(case, dealt, uses_spare=uses_spare)
        # Where links decide, and not compute, as many layers for each are the better deal.
        return min(in_turn, by_speed, key=lambda way: way.step_s or math.inf)
    if case.spec.train.parallel == "layers":
        raise InvalidSpec.of("train.parallel", problem)
    return None


def _placed(case: Case, execution: Execution) -> Execution:
    """Keep layer inputs on the device while they fit there; offload them where that makes the job fit, or other ranks
    need them."""
    if execution.parallel == "layers":
        return dataclasses.replace(execution, activation_placement="host", deals_lanes=False)
    if case.ledger(execution).device_total_bytes <= execution.device_limit_bytes:
        return execution
    offloading = dataclasses.replace(execution, activation_placement="host")
    return offloading if case.fits(case.ledger(offloading), offloading) else execution


def _residency(case: Case, execution: Execution, ledger: Ledger) -> Residency | None:
    """Use what is left of a GPU's memory, where that makes steps faster. On the host nothing crosses a link."""
    room_bytes = int(SPARE_USABLE * execution.device_limit_bytes) - ledger.device_total_bytes
    if execution.device_kind == "host" or execution.activation_placement == "host" or room_bytes <= 0:
        return None

    def step_s(residency: Residency) -> float:
        prediction = case.prediction(dataclasses.replace(execution, residency=residency))
        assert prediction is not None, "there was one without"
        return prediction.step_s

    def weight_bytes(residency: Residency) -> int:
        kept = dataclasses.replace(execution, residency=residency)
        return case.ledger(kept).device_bytes["weights"] - ledger.device_bytes["weights"]

    layout = case.folder.layout
    # Layers that run eagerly keep none.
    keeps_products = case.layer is None and case.compiles(execution)
    return choose_residency(
        step_s,
        room_bytes=room_bytes,
        # Layers whose experts come in pages stay nowhere as a whole.
        num_layers=0 if execution.expert_page_elements else case.folder.shape.num_hidden_layers,
        weight_bytes=weight_bytes,
        layer_product_bytes=product_bytes(case.folder, case.spec.train.recipe, execution) if keeps_products else 0,
        is_packed=any(unit.packed_bytes for unit in layout.units) and not execution.expert_page_elements,
        # Of several ranks, each brings a part of the head, and rows come from those that own them.
        ends=possible_ends(layout) if execution.num_ranks == 1 else (),
    )


def _why_not(case: Case, execution: Execution, ledger: Ledger, others: Sequence[_Way]) -> str:
    """Return why it does not fit, with the numbers and the smallest change that would make it fit; `others` fit."""
    need, limit_bytes = ledger.host_total_bytes, case.host_limit_bytes
    if need > limit_bytes:
        short = f"the job needs {size_text(need)} of host memory and {size_text(limit_bytes)} are available"
    else:
        arena, allowed = ledger.device_total_bytes, execution.device_limit_bytes
        short = f"the job needs {size_text(arena)} on the device and {size_text(allowed)} are allowed"
    if others:
        return f"{short}; it would fit with train.parallel: {others[0].execution.parallel}"
    if paged := _in_pages(case, execution):
        return f"{short}; {paged}"
    store = sum(ledger.host_bytes[part] for part in ("weights", "moments", "gradients"))
    if store > limit_bytes:
        billions = case.folder.layout.num_parameters / 1e9
        held = f"{size_text(store)} of it hold the {billions:.2f} B parameters and their moments"
        return f"{short}; {held}: {_smaller(case, execution)}"
    return f"{short}; {_advice(case, execution)}"


def _in_pages(case: Case, execution: Execution) -> str:
    """What to do where experts in pages make it fit, and what that costs; empty where they do not, or cannot be."""
    has_choice = execution.num_ranks == 1 and execution.lanes == 1 and not execution.expert_page_elements
    if not has_choice or case.spec.is_session or case.spec.eval.generate is not None:
        return ""
    paged = dataclasses.replace(execution, expert_page_elements=MOST_PAGE_ELEMENTS, residency=NOTHING_STAYS)
    if why_not_paged(case.folder, paged):
        return ""
    paged = _placed(case, paged)
    if not case.fits(case.ledger(paged), paged):
        return ""
    predicted = case.prediction(paged)
    takes = "" if predicted is None else f", with a step of about {predicted.step_s:.3g} s"
    return f"it would fit with memory.experts: paged{takes}"


def _smaller(case: Case, execution: Execution) -> str:
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


def _advice(case: Case, execution: Execution) -> str:
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
