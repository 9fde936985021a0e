"""How long a step takes at given rates, by part: the schedule of `planning.step_work` played through on the
device's queues and the optimizer's. Torch-free.

Units go through the queues as in the engine: a unit's upload waits for its slot and for the last step's update of it,
its compute for the upload, its gradient's way down for the compute, and its update for the end of the step (with
clipping) or for the gradient alone. So a phase takes as long as its slowest queue, and what is exposed at both ends of
a step comes out of the play.

Where the layers of a step go round several ranks, each rank has such queues, and a layer begins when the one before it
has handed on the first micro-batch.

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
    place. `hop_up_s` and `hop_down_s` are what hidden states of other ranks and for them take besides, in all
    micro-batches of the step."""

    unit: int
    ring: Ring
    upload_s: float
    compute_s: float
    download_s: float = 0.0
    gradient: bool = False
    resident: bool = False
    hop_up_s: float = 0.0
    hop_down_s: float = 0.0


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


def pass_length(num_layers: int, num_micro_batches: int, num_ranks: int) -> int:
    """How long a pass takes whose layers go round the ranks, in units of one layer with one micro-batch.

    A round of the ranks takes what a rank needs for a layer, or with fewer micro-batches than ranks, what one of them
    needs to come round.
    """
    rounds, last = divmod(num_layers - 1, num_ranks)
    return rounds * max(num_micro_batches, num_ranks) + last + num_micro_batches


@dataclass(frozen=True)
class _Landed:
    """When the first and the last micro-batch of a hidden state are where all ranks find them."""

    first_s: float
    last_s: float

    def part(self, index: int, num_parts: int) -> float:
        """When one of equal parts is there."""
        return self.first_s + (self.last_s - self.first_s) * (index + 1) / num_parts


class _RankQueues:
    """The queues of one of the ranks that layers go round, in one step. `updated` is when each unit was."""

    def __init__(self, start: float, visits: Sequence[Visit], updated: Mapping[int, float]) -> None:
        self.h2d = self.compute = self.d2h = self.hops_up = self.hops_down = start
        self.computed_s = 0.0
        self._slots: dict[Ring, deque[float]] = {"layer": deque([start] * NUM_SLOTS), "edge": deque([start])}
        self._gradients: dict[Ring, deque[float]] = {"layer": deque([start] * NUM_SLOTS), "edge": deque([start])}
        self._coming, self._updated = deque(visits), updated
        self._ready = deque[float]()
        self._fetch()

    def visit(self, visit: Visit, landed: _Landed, num_micro_batches: int) -> tuple[float, _Landed]:
        """Compute the next unit on micro-batches that land meanwhile. Returns when it begins, and when its results
        land."""
        up, each, down = (
            seconds / num_micro_batches for seconds in (visit.hop_up_s, visit.compute_s, visit.hop_down_s)
        )
        first_up, last_up = landed.first_s, landed.last_s
        if visit.hop_up_s:
            first_up = max(self.hops_up, landed.first_s) + up
            last_up = self.hops_up = max(first_up + visit.hop_up_s - up, landed.last_s + up)
        self._fetch(visit.hop_up_s, first_up)
        begin = max(self.compute, self._ready.popleft(), first_up)
        if visit.gradient:
            begin = max(begin, self._gradients[visit.ring].popleft())
        self.compute = max(begin + visit.compute_s, last_up + each)
        self.computed_s += visit.compute_s
        self._slots[visit.ring].append(self.compute)
        first = max(self.hops_down, begin + each) + down
        last = max(first + visit.hop_down_s - down, self.compute + down)
        if visit.hop_down_s:
            self.hops_down = last
        if visit.download_s:
            self.d2h = max(self.d2h + visit.hop_down_s, self.compute) + visit.download_s
        if visit.gradient:
            self._gradients[visit.ring].append(self.d2h)
        return begin, _Landed(first, last)

    def _fetch(self, hop_up_s: float = 0.0, first_up: float = 0.0) -> None:
        """Bring the weights of the unit that comes next, as soon as there is a slot. Hops have a queue of their own
        over the same link: weights that are not there when the first has come up come later by all of them."""
        if self._coming:
            visit = self._coming.popleft()
            slot_s = self._slots[visit.ring].popleft()
            self.h2d = max(self.h2d, slot_s, self._updated.get(visit.unit, 0.0)) + visit.upload_s
            if visit.upload_s and self.h2d > first_up:
                self.h2d += hop_up_s
            self._ready.append(self.h2d)


def play_by_layers(
    visits: Sequence[Visit], updates: Sequence[tuple[int, float]], *, num_ranks: int, num_micro_batches: int
) -> Timeline:
    """As `play`, of a step whose layers go round the ranks; every rank visits embedding and head, for its part of the
    tokens. The timeline's compute is the first rank's, which has the most layers. Updates come after the step, of one
    layer of each rank at a time."""
    timeline, now, optimizer, updated = Timeline(), 0.0, 0.0, dict[int, float]()
    layers = {visit.unit for visit in visits if visit.ring == "layer"}
    of_rank = max(1, -(-num_micro_batches // num_ranks))
    own = [
        [visit for visit in visits if visit.ring == "edge" or (visit.unit - 1) % num_ranks == index]
        for index in range(num_ranks)
    ]
    for _ in range(_NUM_PLAYED):
        ranks = [_RankQueues(now, of_one, updated) for of_one in own]
        timeline, start, landed, has_ramp = Timeline(), now, _Landed(now, now), False
        for visit in visits:
            if visit.ring == "layer":
                rank = ranks[(visit.unit - 1) % num_ranks]
                begin, landed = rank.visit(visit, landed, num_micro_batches)
                if not has_ramp:
                    timeline.ramp_s, has_ramp = begin - start - ranks[0].computed_s + visit.compute_s, True
            else:
                parts = [landed.part(index, num_ranks) for index in range(num_ranks)]
                found = [rank.visit(visit, _Landed(at, at), of_rank)[1] for rank, at in zip(ranks, parts, strict=True)]
                landed = _Landed(found[0].first_s, max(part.last_s for part in found))
        now = max(max(rank.compute, rank.d2h, rank.hops_down) for rank in ranks)
        timeline.step_s, timeline.compute_s = now - start, ranks[0].computed_s
        timeline.tail_s = now - max(rank.compute for rank in ranks)
        updated, optimizer = _updated_together(updates, max(optimizer, now), layers, num_ranks)
    return timeline


def _updated_together(
    updates: Sequence[tuple[int, float]], start: float, layers: set[int], num_ranks: int
) -> tuple[dict[int, float], float]:
    """When each unit is updated by ranks that share the host's memory and have a layer each at a time; and when all
    are."""
    updated, optimizer, waiting = dict[int, float](), start, list[int]()
    for unit, seconds in updates:
        optimizer += seconds
        waiting.append(unit)
        is_whole_round = unit % num_ranks == 0 or unit + 1 not in layers
        if unit not in layers or is_whole_round:
            for done in waiting:
                updated.setdefault(done, optimizer)
            waiting.clear()
    return updated, optimizer


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
    """Of one rank; where the layers go round, of all."""
    updates: tuple[tuple[int, float], ...]
    layer_ranks: int = 1
    num_micro_batches: int = 1
    longest_share: float = 1.0
    shares_processors: bool = False

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
            layer_ranks=work.layer_ranks,
            num_micro_batches=work.num_micro_batches,
            longest_share=work.longest_share,
            shares_processors=work.peers_are_processes,
        )

    @property
    def counted(self) -> tuple[Visit, ...]:
        """The visits of one rank, the first; of ranks that share the processors, those of all."""
        if self.layer_ranks == 1 or self.shares_processors:
            return self.visits
        return tuple(visit for visit in self.visits if visit.ring == "edge" or (visit.unit - 1) % self.layer_ranks == 0)

    def played(self, *, updates_in_backward: bool) -> Timeline:
        """The step, of devices of their own."""
        if self.layer_ranks == 1:
            return play(self.visits, self.updates, updates_in_backward=updates_in_backward)
        return play_by_layers(
            self.visits, self.updates, num_ranks=self.layer_ranks, num_micro_batches=self.num_micro_batches
        )

    def waiting_s(self) -> float:
        """Where ranks share the processors: what a step is longer because some wait for others meanwhile, for a layer
        that goes round or for a document that is not divided."""
        if self.layer_ranks == 1:
            return (self.longest_share - 1) * sum(visit.compute_s for visit in self.visits)
        total_s = 0.0
        for gradient in (False, True):
            layers = [visit for visit in self.visits if visit.ring == "layer" and visit.gradient == gradient]
            if layers:
                length = pass_length(len(layers), self.num_micro_batches, self.layer_ranks)
                busy_s = sum(visit.hop_up_s + visit.compute_s + visit.hop_down_s for visit in layers)
                total_s += busy_s * (length * self.layer_ranks / (len(layers) * self.num_micro_batches) - 1)
        return total_s

    def compute(self) -> dict[str, float]:
        """Seconds of compute by kind of work, over the whole step."""
        total, visits = dict[str, float](), self.counted
        forward = sum(visit.ring == "layer" and not visit.gradient for visit in visits)
        backward = sum(visit.ring == "layer" and visit.gradient for visit in visits)
        kept = min(self.product_layers, backward)
        for parts, times in (
            (self.layer_forward, forward),
            (self.layer_backward, backward - kept),
            (self.layer_kept, kept),
            (self.head, 1),
            (self.embedding, sum(visit.unit == 0 and visit.gradient for visit in visits)),
        ):
            for name, seconds in parts.items():
                total[name] = total.get(name, 0.0) + times * seconds
        return total

    def busy(self) -> dict[Bound, float]:
        """Seconds by queue, over the whole step."""
        return {
            "compute": sum(visit.compute_s for visit in self.counted),
            "h2d": sum(visit.upload_s + visit.hop_up_s for visit in self.counted),
            "d2h": sum(visit.download_s + visit.hop_down_s for visit in self.counted),
            "host memory": sum(seconds for _, seconds in self.updates),
        }


def _visits(work: StepWork, rates: DeviceRates, computed: Sequence[float]) -> tuple[Visit, ...]:
    """The program of a step: embedding, layers, head, layers again, embedding again."""
    forward_s, backward_s, kept_s, head_s, embedding_s = computed
    rows, (up, down), (gather, exchange) = work.embedding, _links(work, rates), _between_devices(work, rates)
    head = len(work.layers) + 1
    rows_up_s = rows.rows_up_bytes / rates.gather_bytes_per_s
    hop_up_s, hop_down_s = work.hop_bytes / up, work.hop_bytes / down
    rows_down_s = rows.rows_down_bytes / rates.scatter_bytes_per_s + rows.table_down_bytes / down
    numbered = list(enumerate(work.layers, 1))
    # Backward finds the last layers of forward in their slots, and those that have one of their own.
    reused = [index for index, unit in numbered if not unit.resident][-NUM_SLOTS * work.layer_ranks :]
    first_kept = head - work.product_layers
    return (
        Visit(unit=0, ring="edge", upload_s=rows_up_s + rows.peer_rows_bytes / exchange, compute_s=0.0),
        *(
            Visit(
                unit=index,
                ring="layer",
                upload_s=unit.upload_bytes / up + unit.peer_up_bytes / gather,
                compute_s=forward_s,
                download_s=unit.offload_bytes / down,
                resident=unit.resident,
                hop_up_s=hop_up_s,
                hop_down_s=hop_down_s,
            )
            for index, unit in numbered
        ),
        Visit(
            unit=head,
            ring="edge",
            upload_s=work.head_traffic.upload_bytes / up + work.head_traffic.peer_up_bytes / gather,
            compute_s=head_s,
            download_s=work.head_traffic.download_bytes / down + work.head_traffic.peer_down_bytes / exchange,
            gradient=True,
            hop_up_s=work.head_hop_bytes / up,
            hop_down_s=work.head_hop_bytes / down,
        ),
        *(
            Visit(
                unit=index,
                ring="layer",
                upload_s=((0 if unit.resident or index in reused else unit.upload_bytes) + unit.offload_bytes) / up
                + (0 if unit.resident or index in reused else unit.peer_up_bytes) / gather,
                compute_s=kept_s if index >= first_kept else backward_s,
                download_s=unit.download_bytes / down + unit.peer_down_bytes / exchange,
                gradient=True,
                resident=unit.resident,
                # Its input, and the gradient of its output.
                hop_up_s=2 * hop_up_s,
                hop_down_s=hop_down_s,
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
                hop_up_s=work.head_hop_bytes / up,
            )
            for _ in range(work.first_trained == 0)
        ),
    )


def _links(work: StepWork, rates: DeviceRates) -> tuple[float, float]:
    """What one link brings up and down while the others do: together no more than they did when it was measured, or
    than the host's memory gives."""
    if work.num_links == 1:
        return rates.h2d_bytes_per_s, rates.d2h_bytes_per_s
    peers, together = rates.peers, rates.adamw_bytes_per_s
    if peers is not None:
        together = min(together, peers.num_devices * peers.together_bytes_per_s)
    each = together / work.num_links
    return min(rates.h2d_bytes_per_s, each), min(rates.d2h_bytes_per_s, each)


def _between_devices(work: StepWork, rates: DeviceRates) -> tuple[float, float]:
    """What a device gets of the others' weights, and of their gradients and rows."""
    if work.peers_are_processes:
        return LOOPBACK_BYTES_PER_S, LOOPBACK_BYTES_PER_S
    if rates.peers is None:
        # Not measured: as if it came over the device's link, which is little where there are ways between devices.
        return rates.h2d_bytes_per_s, rates.h2d_bytes_per_s
    return rates.peers.gather_bytes_per_s, rates.peers.exchange_bytes_per_s


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
    own, hops = _own_layers(work, shares_processors=shares_processors), 5 if work.layer_ranks > 1 else 0
    submit_s = rates.submit_s * (20 * own + (2 * (own + 1) + hops * own) * work.num_micro_batches)
    if shares_processors:
        step_s, bound = sum(queues.values()) + seconds.waiting_s() + submit_s, max(queues, key=queues.__getitem__)
        parts |= {"ramp": 0.0, "tail": 0.0, "exposed": step_s - queues["compute"] - submit_s}
    else:
        played = seconds.played(updates_in_backward=work.updates_in_backward)
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
    seconds, width, (up, _) = Seconds.of(work, rates), rates.at(work.hidden_size), _links(work, rates)
    gemm = rate_at(width.gemm_flops_per_s, work.micro_batch_tokens)
    head_s = work.head.forward_flops / gemm + work.head.forward_bytes / width.head_bytes_per_s
    layers = (visit for visit in seconds.visits if not visit.gradient)
    visits = [
        *(replace(visit, upload_s=0.0 if visit.resident else visit.upload_s, download_s=0.0) for visit in layers),
        Visit(
            unit=len(work.layers) + 1,
            ring="edge",
            upload_s=work.head_traffic.upload_bytes / up,
            compute_s=head_s,
            hop_up_s=work.head_hop_bytes / up,
        ),
    ]
    forward = replace(seconds, visits=tuple(visits), updates=())
    own, hops = _own_layers(work, shares_processors=shares_processors), 2 if work.layer_ranks > 1 else 0
    submit_s = rates.submit_s * (10 * own + (own + 1 + hops * own) * work.num_micro_batches)
    if shares_processors:
        return sum(forward.busy().values()) + forward.waiting_s() + submit_s
    return forward.played(updates_in_backward=False).step_s + submit_s


def _own_layers(work: StepWork, *, shares_processors: bool) -> int:
    """How many layers one rank submits work of, or on shared processors all ranks do."""
    return len(work.layers) if shares_processors else -(-len(work.layers) // work.layer_ranks)


def _bound(seconds: Seconds, *, updates_in_backward: bool) -> Bound:
    """The queue without which the step would be the shortest."""

    def without(queue: Bound) -> float:
        visits = [
            replace(
                visit,
                upload_s=0.0 if queue == "h2d" else visit.upload_s,
                compute_s=0.0 if queue == "compute" else visit.compute_s,
                download_s=0.0 if queue == "d2h" else visit.download_s,
                hop_up_s=0.0 if queue == "h2d" else visit.hop_up_s,
                hop_down_s=0.0 if queue == "d2h" else visit.hop_down_s,
            )
            for visit in seconds.visits
        ]
        updates = [(unit, 0.0 if queue == "host memory" else update_s) for unit, update_s in seconds.updates]
        changed = replace(seconds, visits=tuple(visits), updates=tuple(updates))
        return changed.played(updates_in_backward=updates_in_backward).step_s

    queues: tuple[Bound, ...] = ("compute", "h2d", "d2h", "host memory")
    return min(queues, key=without)
