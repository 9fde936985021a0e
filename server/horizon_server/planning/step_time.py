"""How long a step takes at given rates, by part: the schedule of `planning.step_work` played through on the
device's queues and the optimizer's (`planning.play`). Torch-free.

The host device's queues share the same processors and memory, so there all that they do adds up.

Units: seconds.
Source: docs/architecture.md, "How fast a job will be"; Williams et al., Roofline (CACM 52:4).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from horizon_server.planning.lane_tree import dealt
from horizon_server.planning.play import (
    NO_DRIVES,
    DriveWork,
    Timeline,
    Visit,
    pass_length,
    play,
    play_by_layers,
    visits_of,
)
from horizon_server.planning.rates import LOOPBACK_BYTES_PER_S, DeviceRates, rate_at
from horizon_server.planning.step_parts import StepWork, UnitTraffic
from horizon_server.records.execution import NUM_SLOTS
from horizon_server.records.plan import Bound, StepPrediction

BACKWARD_OF_ATTENTION = 2.5
"""Operations of attention's backward, scores computed again, in units of its forward."""

Parts = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """What each queue has to do in a step, had it the machine to itself. `layer_forward` and `layer_backward` are one
    layer's compute by part, `head` and `embedding` likewise; the rest is by unit. The last `kept_layers`, whose
    products or outputs of attention are kept, take `layer_kept` in backward."""

    layer_forward: Parts
    layer_backward: Parts
    layer_kept: Parts
    kept_layers: int
    head: Parts
    embedding: Parts
    visits: tuple[Visit, ...]
    """Of one rank, the slowest where they are uneven; where the ranks divide the layers, of all, each at speed 1."""
    updates: tuple[tuple[int, float], ...]
    drives: DriveWork = NO_DRIVES
    layer_ranks: tuple[int, ...] = ()
    speeds: tuple[float, ...] = (1.0,)
    """Of the ranks that divide the layers."""
    num_micro_batches: int = 1
    longest_share: float = 1.0
    shares_processors: bool = False

    @classmethod
    def of(cls, work: StepWork, rates: DeviceRates, speeds: Sequence[float] = ()) -> Seconds:
        """Divide the work by the rates. `speeds` are those of the ranks' devices, in units of the rates; without, all
        are alike."""
        layer, width, clear = work.layer, rates.at(work.hidden_size), rates.accumulate_bytes_per_s
        gemm = rate_at(width.gemm_flops_per_s, work.micro_batch_tokens)
        attend_s = (
            layer.attention_times
            * layer.attention_flops
            / rate_at(rates.attention_forward_flops_per_s, work.document_tokens)
        )
        back = rate_at(rates.attention_backward_flops_per_s, work.document_tokens) / layer.attention_backward_times
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
        assert not (work.product_layers and work.attention_layers), "chunks are not compiled, and keep no products"
        kept = {**backward, "attention": backward["attention"] - attend_s}
        if work.product_layers:
            kept["gemm"] = layer.backward_flops / gemm
        head = {
            "gemm": work.head.flops / gemm,
            "head": work.head.elementwise_bytes / width.head_bytes_per_s
            + work.head.accumulate_bytes / rates.accumulate_bytes_per_s,
            "clearing": work.head_traffic.clear_bytes / clear,
        }
        embedding = {"embedding": work.embedding.gradient_bytes / width.elementwise_bytes_per_s}
        slowest = _slowest(work, speeds)
        for parts in (forward, backward, kept, head, embedding):
            parts |= {name: slowest * seconds for name, seconds in parts.items()}
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
            kept_layers=work.kept_layers,
            head=head,
            embedding=embedding,
            visits=visits,
            updates=updates,
            drives=_drive_work(work, rates),
            layer_ranks=work.layer_ranks,
            speeds=tuple(speeds) if speeds and work.layer_ranks else (1.0,) * (max(work.layer_ranks, default=0) + 1),
            num_micro_batches=work.num_micro_batches,
            longest_share=work.longest_share,
            shares_processors=work.peers_are_processes,
        )

    @property
    def counted(self) -> tuple[Sequence[Visit], float]:
        """The visits of one rank and its speed, of the one that computes the longest; of ranks that share the
        processors, the visits of all."""
        if not self.layer_ranks or self.shares_processors:
            return self.visits, 1.0
        each = [(visits_of(self.visits, self.layer_ranks, rank), speed) for rank, speed in enumerate(self.speeds)]
        return max(each, key=lambda of_rank: sum(visit.compute_s for visit in of_rank[0]) / of_rank[1])

    def played(self, *, updates_in_backward: bool) -> Timeline:
        """The step, of devices of their own."""
        if not self.layer_ranks:
            return play(self.visits, self.updates, updates_in_backward=updates_in_backward, drives=self.drives)
        return play_by_layers(
            self.visits,
            self.updates,
            layer_ranks=self.layer_ranks,
            speeds=self.speeds,
            num_micro_batches=self.num_micro_batches,
        )

    def drive_wait_s(self, *, updates_in_backward: bool) -> float:
        """Where all queues run on the processors that compute: what a step is longer because drives, which run beside
        them, are slower than what hides them."""
        # The step begins with the table's rows, so nothing hides the table's states.
        table_s = self.drives.seconds.get(0, 0.0)
        drive_s, whole_s = sum(self.drives.seconds.values()) - table_s, sum(self.busy().values())
        hidden_s, ahead_s = whole_s, 0.0
        if not updates_in_backward and drive_s:
            # What fits into memory is read ahead in backward; all else is between the first update and the head.
            ahead_s = drive_s * min(1.0, self.drives.num_slots / sum(map(self.drives.spans_of, self.drives.seconds)))
            forward_s = sum(
                visit.upload_s + visit.compute_s + visit.download_s for visit in self.visits if not visit.gradient
            )
            hidden_s = forward_s + sum(seconds for _, seconds in self.updates)
        return table_s + max(0.0, drive_s - ahead_s - hidden_s, drive_s - whole_s)

    def waiting_s(self) -> float:
        """Where ranks share the processors: what a step is longer because some wait for others meanwhile, for a layer
        of another or for a document that is not divided."""
        if not self.layer_ranks:
            return (self.longest_share - 1) * sum(visit.compute_s for visit in self.visits)
        total_s = 0.0
        for gradient in (False, True):
            layers = [visit for visit in self.visits if visit.ring == "layer" and visit.gradient == gradient]
            if layers:
                length = pass_length([self.layer_ranks[visit.unit - 1] for visit in layers], self.num_micro_batches)
                busy_s = sum(visit.hop_up_s + visit.compute_s + visit.hop_down_s for visit in layers)
                total_s += busy_s * (length * len(self.speeds) / (len(layers) * self.num_micro_batches) - 1)
        return total_s

    def compute(self) -> dict[str, float]:
        """Seconds of compute by kind of work, over the whole step."""
        total, (visits, speed) = dict[str, float](), self.counted
        forward = sum(visit.ring == "layer" and not visit.gradient for visit in visits)
        backward = sum(visit.ring == "layer" and visit.gradient for visit in visits)
        kept = min(self.kept_layers, backward)
        for parts, times in (
            (self.layer_forward, forward),
            (self.layer_backward, backward - kept),
            (self.layer_kept, kept),
            (self.head, 1),
            (self.embedding, sum(visit.unit == 0 and visit.gradient for visit in visits)),
        ):
            for name, seconds in parts.items():
                total[name] = total.get(name, 0.0) + times * seconds / speed
        return total

    def busy(self) -> dict[Bound, float]:
        """Seconds by queue, over the whole step."""
        visits, speed = self.counted
        return {
            "compute": sum(visit.compute_s for visit in visits) / speed,
            "h2d": sum(visit.upload_s + visit.hop_up_s for visit in visits),
            "d2h": sum(visit.download_s + visit.hop_down_s for visit in visits),
            "host memory": sum(seconds for _, seconds in self.updates),
        }


def _visits(work: StepWork, rates: DeviceRates, computed: Sequence[float]) -> tuple[Visit, ...]:
    """The program of a step: embedding, layers, head, layers again, embedding again."""
    forward_s, backward_s, kept_s, head_s, embedding_s = computed
    rows, (up, down), (gather, exchange) = work.embedding, _links(work, rates), _between_devices(work, rates)
    head = len(work.layers) + 1
    rows_up_s, rows_up_again_s = (
        num_bytes / rates.gather_bytes_per_s for num_bytes in (rows.rows_up_bytes, rows.rows_up_again_bytes)
    )
    # On h2d, beside what compute does.
    unpacking = rates.at(work.hidden_size).elementwise_bytes_per_s
    hop_up_s, hop_down_s = work.hop_bytes / up, work.hop_bytes / down
    rows_down_s = rows.rows_down_bytes / rates.scatter_bytes_per_s + rows.table_down_bytes / down
    numbered = list(enumerate(work.layers, 1))
    # Backward finds the last layers of forward in their slots, and those that have one of their own.
    passing: dict[int, list[int]] = defaultdict(list)
    for (index, unit), rank in zip(numbered, work.layer_ranks or [0] * len(numbered), strict=True):
        passing[rank] += [index] * (not unit.resident)
    reused = {index for of_rank in passing.values() for index in of_rank[-NUM_SLOTS:]}
    first_kept = head - work.kept_layers
    return (
        Visit(unit=0, ring="edge", upload_s=rows_up_s + rows.peer_rows_bytes / exchange, compute_s=0.0),
        *(
            Visit(
                unit=index,
                ring="layer",
                upload_s=unit.upload_bytes / up + unit.peer_up_bytes / gather + unit.unpack_bytes / unpacking,
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
            resident=work.head_traffic.resident,
            hop_up_s=work.head_hop_bytes / up,
            hop_down_s=work.head_hop_bytes / down,
        ),
        *(
            Visit(
                unit=index,
                ring="layer",
                upload_s=(
                    (unit.page_bytes if unit.resident or index in reused else unit.upload_bytes) + unit.offload_bytes
                )
                / up
                + (0 if unit.resident or index in reused else unit.peer_up_bytes) / gather
                + (unit.page_unpack_bytes if index in reused else unit.unpack_bytes) / unpacking,
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
                upload_s=rows_up_again_s,
                compute_s=embedding_s,
                download_s=rows_down_s + rows.clear_host_bytes / rates.zero_bytes_per_s,
                gradient=True,
                hop_up_s=work.head_hop_bytes / up,
            )
            for _ in range(work.first_trained == 0)
        ),
    )


def _slowest(work: StepWork, speeds: Sequence[float]) -> float:
    """What a part of a step takes on ranks of these speeds that divide it by rows, in units of an equal share: they get
    lanes by speed, and wait for the last of them. 1 where all are alike, or divide the layers."""
    if not speeds or work.layer_ranks:
        return 1.0
    sizes = dealt(work.lanes, speeds)
    return max(size / speed for size, speed in zip(sizes, speeds, strict=True)) * len(sizes) / work.lanes


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
    """Unit and seconds of each update on the host, in the optimizer's order; what remains of the embedding comes
    last."""
    units = (*work.layers, work.head_traffic)
    rest_s = work.embedding.last_update_bytes / rates.adamw_bytes_per_s
    return (
        (0, work.embedding.first_update_bytes / rates.adamw_bytes_per_s),
        # A unit that is frozen, or that the device updates, waits for no update before it.
        *((index, _update_s(unit, rates)) for index, unit in enumerate(units, 1) if unit.update_bytes),
        *([(0, rest_s)] if rest_s else []),
    )


def _update_s(unit: UnitTraffic, rates: DeviceRates) -> float:
    """Exact states wait for memory; compressed ones for it or for the processors, whichever takes longer."""
    exact_s = (unit.update_bytes - unit.compressed_bytes) / rates.adamw_bytes_per_s
    memory_s = unit.compressed_bytes / rates.adamw_bytes_per_s
    return exact_s + max(memory_s, unit.compressed_parameters / rates.compressed_parameters_per_s)


def _drive_work(work: StepWork, rates: DeviceRates) -> DriveWork:
    """What the drives do, where their speed is known. A drive that reads and writes at a time does each slower."""
    if rates.drives is None:
        return NO_DRIVES
    each_s = 1 / rates.drives.read_bytes_per_s + 1 / rates.drives.write_bytes_per_s
    return DriveWork(
        seconds={unit: num_bytes * each_s for unit, num_bytes in work.drive_bytes},
        spans=dict(work.drive_spans),
        num_slots=work.ring_slots,
    )


def predict_step(
    work: StepWork,
    rates: DeviceRates,
    *,
    shares_processors: bool,
    speeds: Sequence[float] = (),
    max_steps: int | None = None,
) -> StepPrediction:
    """Return how long a step takes at these rates, by part, and `max_steps` of them; `speeds` as in `Seconds.of`.

    `shares_processors`: all queues run on the processors that compute, as on the host device without an emulated link.
    """
    seconds = Seconds.of(work, rates, speeds)
    queues = seconds.busy()
    parts = seconds.compute() | {
        "upload": queues["h2d"],
        "download": queues["d2h"],
        "adamw": queues["host memory"],
    }
    if drive_s := sum(seconds.drives.seconds.values()):
        parts["drive"] = drive_s
    # Python starts all work of a step before it waits, and holds up the thread that launches kernels meanwhile.
    own, hops = _own_layers(work, shares_processors=shares_processors), 5 if work.layer_ranks else 0
    submit_s = rates.submit_s * (20 * own + (2 * (own + 1) + hops * own) * work.num_micro_batches)
    if shares_processors:
        step_s, bound = sum(queues.values()) + seconds.waiting_s() + submit_s, max(queues, key=queues.__getitem__)
        if waits_s := seconds.drive_wait_s(updates_in_backward=work.updates_in_backward):
            step_s, bound = step_s + waits_s, "drive"
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


def predict_forward(
    work: StepWork, rates: DeviceRates, *, shares_processors: bool, speeds: Sequence[float] = ()
) -> float:
    """Return the seconds of a pass forward over the tokens of a step, for their log-probabilities: nothing is kept for
    a backward, nothing comes down, and no weight has changed since it was last on the device. `shares_processors` and
    `speeds` as in `predict_step`."""
    seconds, width, (up, _) = Seconds.of(work, rates, speeds), rates.at(work.hidden_size), _links(work, rates)
    gemm = rate_at(width.gemm_flops_per_s, work.micro_batch_tokens)
    head_s = work.head.forward_flops / gemm + work.head.forward_bytes / width.head_bytes_per_s
    head_s *= _slowest(work, speeds)
    layers = (visit for visit in seconds.visits if not visit.gradient)
    visits = [
        *(replace(visit, upload_s=0.0 if visit.resident else visit.upload_s, download_s=0.0) for visit in layers),
        Visit(
            unit=len(work.layers) + 1,
            ring="edge",
            upload_s=0.0 if work.head_traffic.resident else work.head_traffic.upload_bytes / up,
            compute_s=head_s,
            resident=work.head_traffic.resident,
            hop_up_s=work.head_hop_bytes / up,
        ),
    ]
    forward = replace(seconds, visits=tuple(visits), updates=())
    own, hops = _own_layers(work, shares_processors=shares_processors), 2 if work.layer_ranks else 0
    submit_s = rates.submit_s * (10 * own + (own + 1 + hops * own) * work.num_micro_batches)
    if shares_processors:
        return sum(forward.busy().values()) + forward.waiting_s() + submit_s
    return forward.played(updates_in_backward=False).step_s + submit_s


def _own_layers(work: StepWork, *, shares_processors: bool) -> int:
    """How many layers one rank submits work of at most, or on shared processors all ranks do."""
    if shares_processors or not work.layer_ranks:
        return len(work.layers)
    return max(Counter(work.layer_ranks).values())


def layer_seconds(work: StepWork, rates: DeviceRates) -> float:
    """What one layer's compute takes at these rates, forward and backward."""
    seconds = Seconds.of(work, rates)
    return sum(seconds.layer_forward.values()) + sum(seconds.layer_backward.values())


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
        drives = NO_DRIVES if queue == "drive" else seconds.drives
        changed = replace(seconds, visits=tuple(visits), updates=tuple(updates), drives=drives)
        return changed.played(updates_in_backward=updates_in_backward).step_s

    queues: tuple[Bound, ...] = ("compute", "h2d", "d2h", "host memory", "drive")
    return min(queues, key=without)
