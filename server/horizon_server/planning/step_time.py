"""How long a step takes at given rates, by part: the schedule of `planning.step_work` played through on its four
queues. Torch-free.

Units go through the queues as in the engine: a unit's upload waits for its slot and for the last step's update of it,
its compute for the upload, its gradient's way down for the compute, and its update for the end of the step (with
clipping) or for the gradient alone. So a phase takes as long as its slowest queue, and what is exposed at both ends of
a step comes out of the play.

The host device's queues share the same processors and memory, so there all that they do adds up.

Units: seconds.
Source: docs/architecture.md, "How fast a job will be"; Williams et al., Roofline (CACM 52:4).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from horizon_server.planning.rates import LOOPBACK_BYTES_PER_S, DeviceRates, rate_at
from horizon_server.planning.step_work import StepWork
from horizon_server.records.execution import NUM_SLOTS
from horizon_server.records.plan import Bound, StepPrediction

# The first step finds nothing updated, the second is like all later ones; one more, because queues may need a step to
# settle.
_NUM_PLAYED = 3
BACKWARD_OF_ATTENTION = 2.5
"""Operations of attention's backward, scores computed again, in units of its forward."""

Ring = Literal["layer", "edge"]
Parts = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Visit:
    """One unit's turn in a pass. `download_s` is what d2h does after it; `gradient` says that this is the unit's
    gradient. `unit` counts from the embedding (0) to the head. A `resident` unit has a slot of its own in the ring's
    place."""

    unit: int
    ring: Ring
    upload_s: float
    compute_s: float
    download_s: float = 0.0
    gradient: bool = False
    resident: bool = False


@dataclass(kw_only=True)
class Timeline:
    """A step as it was played. `ramp_s` is from its start to the first layer's start, `tail_s` from the last work to
    its end; both are in `exposed_s`, in which compute has nothing to do."""

    step_s: float = 0.0
    compute_s: float = 0.0
    ramp_s: float = 0.0
    tail_s: float = 0.0

    @property
    def exposed_s(self) -> float:
        """All seconds in which compute waits."""
        return self.step_s - self.compute_s


@dataclass
class _Queues:
    """When each queue has done what was played so far, and each unit was updated; from one step to the next."""

    now: float = 0.0
    optimizer: float = 0.0
    updated: dict[int, float] = field(default_factory=dict)
    landing: dict[Ring, deque[float]] = field(
        default_factory=lambda: {"layer": deque([0.0] * NUM_SLOTS), "edge": deque([0.0])}
    )


def play(visits: Sequence[Visit], updates: Sequence[tuple[int, float]], *, updates_in_backward: bool) -> Timeline:
    """Play the visits of one step again and again, and return the last step. `updates` are (unit, seconds) in the order
    of forward; a unit may come twice, and what is read first waits for the first."""
    queues, timeline = _Queues(), Timeline()
    in_backward: dict[int, float] = {}
    for unit, seconds in updates if updates_in_backward else ():
        in_backward[unit] = in_backward.get(unit, 0.0) + seconds
    for _ in range(_NUM_PLAYED):
        timeline = _play_step(visits, in_backward, queues)
        if not updates_in_backward:
            queues.updated.clear()
            for unit, seconds in updates:
                queues.optimizer = max(queues.optimizer, queues.now) + seconds
                queues.updated.setdefault(unit, queues.optimizer)
    return timeline


def _play_step(visits: Sequence[Visit], in_backward: Mapping[int, float], queues: _Queues) -> Timeline:
    """One step from where the last one has ended; its queues are idle then, but for the optimizer's. `in_backward` are
    the seconds of updates that come as soon as a unit's gradient has landed."""
    start = h2d = compute = d2h = queues.now
    slots: dict[Ring, deque[float]] = {"layer": deque([start] * NUM_SLOTS), "edge": deque([start])}
    gradients: dict[Ring, deque[float]] = {"layer": deque([start] * NUM_SLOTS), "edge": deque([start])}
    timeline, has_ramp = Timeline(), False
    for visit in visits:
        # Uploads keep their order, so one that waits for its update holds up all later ones.
        slot_s = start if visit.resident else slots[visit.ring].popleft()
        h2d = max(h2d, slot_s, queues.updated.get(visit.unit, 0.0)) + visit.upload_s
        begin = max(compute, h2d)
        if visit.gradient:
            begin = max(begin, gradients[visit.ring].popleft())
        if visit.ring == "layer" and not has_ramp:
            timeline.ramp_s, has_ramp = begin - start - timeline.compute_s, True
        compute = begin + visit.compute_s
        timeline.compute_s += visit.compute_s
        if not visit.resident:
            slots[visit.ring].append(compute)
        if visit.download_s or visit.gradient:
            updates = visit.gradient and visit.unit in in_backward
            # A gradient that no plane keeps lands in a slot, which is free after the update from it.
            landing_s = queues.landing[visit.ring].popleft() if updates else start
            d2h = max(d2h, compute, landing_s) + visit.download_s
            if updates:
                queues.optimizer = queues.updated[visit.unit] = max(queues.optimizer, d2h) + in_backward[visit.unit]
                queues.landing[visit.ring].append(queues.optimizer)
        if visit.gradient:
            gradients[visit.ring].append(d2h)
    queues.now = max(compute, d2h)
    timeline.step_s, timeline.tail_s = queues.now - start, queues.now - compute
    return timeline


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """What each queue has to do in a step, had it the machine to itself. `layer_forward` and `layer_backward` are one
    layer's compute by part, `head` and `embedding` likewise; the rest is by unit. The last `product_layers`, whose
    products stay, take `layer_kept` in backward."""

    layer_forward: Parts
    layer_backward: Parts
    layer_kept: Parts
    product_layers: int
    head: Parts
    embedding: Parts
    visits: tuple[Visit, ...]
    updates: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, work: StepWork, rates: DeviceRates) -> Seconds:
        """Divide the work by the rates."""
        layer, width, clear = work.layer, rates.at(work.hidden_size), rates.accumulate_bytes_per_s
        gemm = rate_at(width.gemm_flops_per_s, work.micro_batch_tokens)
        attend_s = layer.attention_flops / rate_at(rates.attention_forward_flops_per_s, work.document_tokens)
        back = rate_at(rates.attention_backward_flops_per_s, work.document_tokens)
        forward = {
            "gemm": layer.forward_flops / gemm,
            "attention": attend_s,
            "elementwise": layer.forward_bytes / width.elementwise_bytes_per_s,
        }
        backward = {
            "gemm": (layer.recompute_flops + layer.backward_flops) / gemm,
            "attention": attend_s + BACKWARD_OF_ATTENTION * layer.attention_flops / back,
            "elementwise": (layer.recompute_bytes + layer.backward_bytes) / width.elementwise_bytes_per_s,
            "accumulation": layer.accumulate_bytes / rates.accumulate_bytes_per_s,
            "clearing": sum(unit.clear_bytes for unit in work.layers) / len(work.layers) / clear,
        }
        kept = {**backward, "gemm": layer.backward_flops / gemm, "attention": backward["attention"] - attend_s}
        head = {
            "gemm": work.head.flops / gemm,
            "head": work.head.elementwise_bytes / width.head_bytes_per_s
            + work.head.accumulate_bytes / rates.accumulate_bytes_per_s,
            "clearing": work.head_traffic.clear_bytes / clear,
        }
        embedding = {"embedding": work.embedding.gradient_bytes / width.elementwise_bytes_per_s}
        for parts, launch_s in (
            (forward, rates.forward_launch_s),
            (backward, rates.backward_launch_s),
            (kept, rates.backward_launch_s),
            (embedding, rates.ends_launch_s),
        ):
            launches_s = launch_s * work.num_micro_batches
            # A device of its own works while the host starts what comes next.
            hidden_s = 0.0 if rates.launches_add else sum(parts.values())
            parts["launches"] = max(0.0, launches_s - hidden_s)
        computed = [sum(parts.values()) for parts in (forward, backward, kept, head, embedding)]
        visits, updates = _visits(work, rates, computed), _updates(work, rates)
        return cls(
            layer_forward=forward,
            layer_backward=backward,
            layer_kept=kept,
            product_layers=work.product_layers,
            head=head,
            embedding=embedding,
            visits=visits,
            updates=updates,
        )

    def compute(self) -> dict[str, float]:
        """Seconds of compute by kind of work, over the whole step."""
        total: dict[str, float] = {}
        forward = sum(visit.ring == "layer" and not visit.gradient for visit in self.visits)
        backward = sum(visit.ring == "layer" and visit.gradient for visit in self.visits)
        kept = min(self.product_layers, backward)
        for parts, times in (
            (self.layer_forward, forward),
            (self.layer_backward, backward - kept),
            (self.layer_kept, kept),
            (self.head, 1),
            (self.embedding, sum(visit.unit == 0 and visit.gradient for visit in self.visits)),
        ):
            for name, seconds in parts.items():
                total[name] = total.get(name, 0.0) + times * seconds
        return total

    def busy(self) -> dict[Bound, float]:
        """Seconds by queue, over the whole step."""
        return {
            "compute": sum(visit.compute_s for visit in self.visits),
            "h2d": sum(visit.upload_s for visit in self.visits),
            "d2h": sum(visit.download_s for visit in self.visits),
            "host memory": sum(seconds for _, seconds in self.updates),
        }


def _visits(work: StepWork, rates: DeviceRates, computed: Sequence[float]) -> tuple[Visit, ...]:
    """The program of a step: embedding, layers, head, layers again, embedding again."""
    forward_s, backward_s, kept_s, head_s, embedding_s = computed
    rows, up, down = work.embedding, rates.h2d_bytes_per_s, rates.d2h_bytes_per_s
    # Between devices what a link brings, which is little where they have ways of their own: none was measured yet.
    peer = LOOPBACK_BYTES_PER_S if work.peers_are_processes else up
    head = len(work.layers) + 1
    rows_up_s = rows.rows_up_bytes / rates.gather_bytes_per_s
    rows_down_s = rows.rows_down_bytes / rates.scatter_bytes_per_s + rows.table_down_bytes / down
    numbered = list(enumerate(work.layers, 1))
    # Backward finds the last layers of forward in their slots, and those that have one of their own.
    reused = [index for index, unit in numbered if not unit.resident][-NUM_SLOTS:]
    first_kept = head - work.product_layers
    return (
        Visit(unit=0, ring="edge", upload_s=rows_up_s, compute_s=0.0),
        *(
            Visit(
                unit=index,
                ring="layer",
                upload_s=unit.upload_bytes / up + unit.peer_up_bytes / peer,
                compute_s=forward_s,
                download_s=unit.offload_bytes / down,
                resident=unit.resident,
            )
            for index, unit in numbered
        ),
        Visit(
            unit=head,
            ring="edge",
            upload_s=work.head_traffic.upload_bytes / up + work.head_traffic.peer_up_bytes / peer,
            compute_s=head_s,
            download_s=work.head_traffic.download_bytes / down + work.head_traffic.peer_down_bytes / peer,
            gradient=True,
        ),
        *(
            Visit(
                unit=index,
                ring="layer",
                upload_s=((0 if unit.resident or index in reused else unit.upload_bytes) + unit.offload_bytes) / up
                + (0 if unit.resident or index in reused else unit.peer_up_bytes) / peer,
                compute_s=kept_s if index >= first_kept else backward_s,
                download_s=unit.download_bytes / down + unit.peer_down_bytes / peer,
                gradient=True,
                resident=unit.resident,
            )
            for index, unit in reversed(numbered)
            if index >= work.first_trained
        ),
        *(
            Visit(
                unit=0,
                ring="edge",
                upload_s=rows_up_s,
                compute_s=embedding_s,
                download_s=rows_down_s + rows.clear_host_bytes / rates.zero_bytes_per_s,
                gradient=True,
            )
            for _ in range(work.first_trained == 0)
        ),
    )


def _updates(work: StepWork, rates: DeviceRates) -> tuple[tuple[int, float], ...]:
    """Unit and seconds of each update, in the optimizer's order; what remains of the embedding comes last."""
    units = (*work.layers, work.head_traffic)
    rest_s = work.embedding.last_update_bytes / rates.adamw_bytes_per_s
    return (
        (0, work.embedding.first_update_bytes / rates.adamw_bytes_per_s),
        *((index, unit.update_bytes / rates.adamw_bytes_per_s) for index, unit in enumerate(units, 1)),
        *([(0, rest_s)] if rest_s else []),
    )


def predict_step(
    work: StepWork, rates: DeviceRates, *, shares_processors: bool, max_steps: int | None = None
) -> StepPrediction:
    """Return how long a step takes at these rates, by part, and `max_steps` of them.

    `shares_processors`: all queues run on the processors that compute, as on the host device without an emulated link.
    """
    seconds = Seconds.of(work, rates)
    queues = seconds.busy()
    parts = seconds.compute() | {
        "upload": queues["h2d"],
        "download": queues["d2h"],
        "adamw": queues["host memory"],
    }
    # Python starts all work of a step before it waits, and holds up the thread that launches kernels meanwhile.
    submit_s = rates.submit_s * (20 * len(work.layers) + 2 * (len(work.layers) + 1) * work.num_micro_batches)
    if shares_processors:
        step_s, bound = sum(queues.values()) + submit_s, max(queues, key=queues.__getitem__)
        parts |= {"ramp": 0.0, "tail": 0.0, "exposed": step_s - queues["compute"] - submit_s}
    else:
        played = play(seconds.visits, seconds.updates, updates_in_backward=work.updates_in_backward)
        step_s, bound = played.step_s + submit_s, _bound(seconds, updates_in_backward=work.updates_in_backward)
        parts |= {"ramp": played.ramp_s, "tail": played.tail_s, "exposed": played.exposed_s}
    return StepPrediction(
        step_s=step_s,
        tokens_per_second=work.num_tokens / step_s,
        bound=bound,
        peak_flops_per_s=rates.peak_flops_per_s,
        total_s=None if max_steps is None else max_steps * step_s,
        model_flops_per_s=work.model_flops / step_s,
        parts_s=parts | {"submission": submit_s},
        machine=rates.name,
        measured=rates.measured,
    )


def predict_forward(work: StepWork, rates: DeviceRates, *, shares_processors: bool) -> float:
    """Return the seconds of a pass forward over the tokens of a step, for their log-probabilities: nothing is kept for
    a backward, nothing comes down, and no weight has changed since it was last on the device. `shares_processors` as in
    `predict_step`."""
    seconds, width = Seconds.of(work, rates), rates.at(work.hidden_size)
    gemm = rate_at(width.gemm_flops_per_s, work.micro_batch_tokens)
    head_s = work.head.forward_flops / gemm + work.head.forward_bytes / width.head_bytes_per_s
    layers = (visit for visit in seconds.visits if not visit.gradient)
    visits = [
        *(replace(visit, upload_s=0.0 if visit.resident else visit.upload_s, download_s=0.0) for visit in layers),
        Visit(
            unit=len(work.layers) + 1,
            ring="edge",
            upload_s=work.head_traffic.upload_bytes / rates.h2d_bytes_per_s,
            compute_s=head_s,
        ),
    ]
    submit_s = rates.submit_s * (10 * len(work.layers) + (len(work.layers) + 1) * work.num_micro_batches)
    if shares_processors:
        return sum(visit.upload_s + visit.compute_s for visit in visits) + submit_s
    return play(visits, (), updates_in_backward=False).step_s + submit_s


def _bound(seconds: Seconds, *, updates_in_backward: bool) -> Bound:
    """The queue without which the step would be the shortest."""

    def without(queue: Bound) -> float:
        visits = [
            replace(
                visit,
                upload_s=0.0 if queue == "h2d" else visit.upload_s,
                compute_s=0.0 if queue == "compute" else visit.compute_s,
                download_s=0.0 if queue == "d2h" else visit.download_s,
            )
            for visit in seconds.visits
        ]
        updates = [(unit, 0.0 if queue == "host memory" else update_s) for unit, update_s in seconds.updates]
        return play(visits, updates, updates_in_backward=updates_in_backward).step_s

    queues: tuple[Bound, ...] = ("compute", "h2d", "d2h", "host memory")
    return min(queues, key=without)
