"""Settles how a job runs on devices that are given: how they divide a step, where layer inputs wait, what stays on the
device. Loads no torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from horizon_server.errors import InvalidModel, InvalidSpec
from horizon_server.planning.advice import why_not
from horizon_server.planning.case import Case, placed
from horizon_server.planning.drives import kept_first
from horizon_server.planning.layer_deal import deal_layers
from horizon_server.planning.ledger import attention_output_bytes
from horizon_server.planning.residency import SPARE_USABLE, choose_residency, possible_ends, product_bytes
from horizon_server.records.execution import Execution, Residency
from horizon_server.records.plan import DeviceRange, Ledger, PredictedWays, StepPrediction
from horizon_server.spec import Span

MAX_PLAN_BYTES = 1 << 60
"""Sizes travel as 64-bit numbers."""


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
    both = (by_rows, by_layers)
    others = [way.execution.parallel for way in both if way is not None and way is not taken and way.fits]
    return Settled(
        execution=taken.execution,
        ledger=taken.ledger,
        prediction=taken.prediction,
        message="" if taken.fits else why_not(case, taken.execution, taken.ledger, others),
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
        execution = placed(case, execution)
        ledger, prediction = case.ledger(execution), case.prediction(execution)
        if max(ledger.host_total_bytes, ledger.device_total_bytes) > MAX_PLAN_BYTES:
            raise InvalidModel(
                "the sizes in config.json ask for more than an exbibyte (2**60 bytes) of memory; correct its widths, "
                "heads or experts"
            )
        fits = case.fits(ledger, execution)
        if prediction is not None and uses_spare:
            for chosen in (_attention_outputs, _residency):
                residency = chosen(case, execution, ledger)
                if residency is not None:
                    execution = kept_first(case.folder, dataclasses.replace(execution, residency=residency))
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


def _attention_outputs(case: Case, execution: Execution, ledger: Ledger) -> Residency | None:
    """Use what is left of the host's memory for attention's outputs of rows in chunks, where that makes steps faster
    and the device has room for those of two chunks."""
    layout, recipe = case.folder.layout, case.spec.train.recipe
    num_kept = case.folder.shape.num_hidden_layers - layout.num_skipped_layers
    if not case.spec.memory.keep_attention_outputs or not case.chunked_tokens(execution) or not num_kept:
        return None
    a_layer = attention_output_bytes(case.folder.shape, recipe.tokens_per_step, execution.element_bytes)

    def with_layers(number: int) -> Execution:
        kept = Residency(attention_layers=number, attention_bytes=number * a_layer)
        return dataclasses.replace(execution, residency=kept)

    room_bytes = int(SPARE_USABLE * case.host_limit_bytes) - ledger.host_total_bytes
    # On the host device, the room for two chunks is host memory too.
    room_bytes -= case.ledger(with_layers(1)).host_total_bytes - ledger.host_total_bytes - a_layer
    most = min(num_kept, room_bytes // a_layer)
    if most <= 0 or case.ledger(with_layers(1)).device_total_bytes > execution.device_limit_bytes:
        return None

    def step_s(number: int) -> float:
        prediction = case.prediction(with_layers(number))
        assert prediction is not None, "there was one without"
        return prediction.step_s

    # Fewer where the link has no time for all.
    best = min({most, most // 2, most // 4, 0}, key=lambda number: (step_s(number), number))
    if not best:
        return None
    return dataclasses.replace(with_layers(best).residency, saved_share=1 - step_s(best) / step_s(0))


def _residency(case: Case, execution: Execution, ledger: Ledger) -> Residency | None:
    """Use what is left of a GPU's memory, where that makes steps faster. On the host nothing crosses a link."""
    room_bytes = int(SPARE_USABLE * execution.device_limit_bytes) - ledger.device_total_bytes
    if execution.device_kind == "host" or execution.activation_placement == "host" or room_bytes <= 0:
        return None
    before = execution.residency

    def beside(residency: Residency) -> Execution:
        """With the outputs of attention that are kept already, and the drives' layers in their order."""
        kept = dataclasses.replace(
            residency, attention_layers=before.attention_layers, attention_bytes=before.attention_bytes
        )
        return kept_first(case.folder, dataclasses.replace(execution, residency=kept))

    def step_s(residency: Residency) -> float:
        prediction = case.prediction(beside(residency))
        assert prediction is not None, "there was one without"
        return prediction.step_s

    def weight_bytes(residency: Residency) -> int:
        # Products alone are counted apart.
        return case.ledger(beside(residency)).device_total_bytes - ledger.device_total_bytes

    layout = case.folder.layout
    # Layers that run eagerly keep none.
    keeps_products = case.layer is None and case.compiles(execution) and not execution.chunk_tokens
    # Several ranks update what is in memory that they share, and the gradients of calls add up there. The device has no
    # kernel for compressed states.
    has_states = execution.num_ranks == 1 and not execution.adds_up and not layout.is_compressed
    found = choose_residency(
        step_s,
        room_bytes=room_bytes,
        # Layers whose experts come in pages stay nowhere as a whole.
        num_layers=0 if execution.expert_page_elements else case.folder.shape.num_hidden_layers,
        weight_bytes=weight_bytes,
        layer_product_bytes=product_bytes(case.folder, case.spec.train.recipe, execution) if keeps_products else 0,
        is_packed=any(unit.packed_bytes for unit in layout.units) and not execution.expert_page_elements,
        keeps_states=has_states,
        # Of several ranks, each brings a part of the head, and rows come from those that own them.
        ends=possible_ends(layout) if execution.num_ranks == 1 else (),
    )
    share = 1 - (1 - before.saved_share) * (1 - found.saved_share)
    return dataclasses.replace(beside(found).residency, saved_share=share)
