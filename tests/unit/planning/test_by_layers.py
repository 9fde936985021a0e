"""A step whose layers go round the devices: its memory to the byte, its time against a small simulation, and when it is
chosen."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.support.plans import ledger_of, step_work
from tests.support.rates import RATES

from horizon_proto.v1 import job_pb2
from horizon_server.api.grpc.convert import to_message
from horizon_server.codec import from_plain, to_plain
from horizon_server.errors import InvalidSpec
from horizon_server.planning.lane_memory import lane_number_bytes
from horizon_server.planning.lane_tree import lanes_of_rank, num_buffers, roots_of
from horizon_server.planning.layer_deal import deal_layers
from horizon_server.planning.ledger import counter_bytes, plane_elements_of
from horizon_server.planning.machine import Accelerator, Gpu, HostMemory
from horizon_server.planning.model_folder import ModelFolder, open_model_folder
from horizon_server.planning.planner import Planner
from horizon_server.planning.play import Timeline, Visit, pass_length, play_by_layers
from horizon_server.planning.rates import PeerRates
from horizon_server.planning.step_time import Seconds, predict_forward, predict_step
from horizon_server.planning.trainable import open_for_training
from horizon_server.records.execution import NOTHING_STAYS, Execution, Parallel
from horizon_server.records.plan import Ledger, Plan, PlannedMachine
from horizon_server.settings import load_settings
from horizon_server.spec import JobSpec, TrainSpec, parse_job_spec
from horizon_server.store.ownership import Ownership, length

TOKENS, ROW, HIDDEN, VOCAB, LAYERS, LANES = 192, 64, 32, 128, 3, 8
GIB = 1 << 30


@pytest.fixture
def tied(make_model: Callable[..., Path]) -> ModelFolder:
    return open_model_folder(make_model(tied=True))


@pytest.fixture
def untied(make_model: Callable[..., Path]) -> ModelFolder:
    return open_model_folder(make_model(tied=False))


def memory_of(folder: ModelFolder, parallel: Parallel, num_ranks: int = 2, **more: Any) -> Ledger:
    settings = {"tokens_per_step": TOKENS, "sequence_length": ROW, "lanes": LANES, "grad_bytes": 4, **more}
    return ledger_of(folder.layout, folder.shape, parallel=parallel, num_ranks=num_ranks, **settings)


# --- Memory


@pytest.mark.parametrize("device_kind", ["host", "cuda"])
def test_hidden_states_are_two_planes_on_the_device_and_once_on_the_host(tied: ModelFolder, device_kind: str) -> None:
    element = 4 if device_kind == "host" else 2
    found = memory_of(tied, "layers", device_kind=device_kind, grad_bytes=element)
    assert found.device_bytes["activations"] == 2 * TOKENS * HIDDEN * element
    # The inputs of three layers and the last output, 3 pages of elements each; then 2 * 3 + 2 numbers on a page.
    shared = 4 * 3 * 2048 * element + 4096
    on_devices = 2 * found.device_bytes["activations"] if device_kind == "host" else 0
    assert found.host_bytes["activations"] == shared + on_devices


def test_the_planes_that_ranks_share_are_on_pages_of_their_own() -> None:
    assert [plane_elements_of(tokens, 32) for tokens in (1, 64, 65)] == [2048, 2048, 4096]
    # 2 * 255 + 2 numbers fill a page to the last byte; one rank more begins another.
    assert [counter_bytes(num_layers=255, num_ranks=num_ranks) for num_ranks in (2, 3)] == [4096, 8192]


def test_inputs_that_no_backward_wants_have_no_plane(make_model: Callable[..., Path]) -> None:
    folder = open_for_training(make_model(tied=True), TrainSpec(trainable=(r"layers\.2\.",)))
    assert folder.layout.num_skipped_layers == 2
    activations = [
        memory_of(one, "layers").host_bytes["activations"] for one in (folder, open_model_folder(folder.path))
    ]
    assert activations[1] - activations[0] == 2 * 3 * 2048 * 4


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
@pytest.mark.parametrize("is_tied", [True, False])
def test_lanes_of_layers_add_up_on_one_rank_and_only_the_edges_are_exchanged(
    tied: ModelFolder, untied: ModelFolder, num_ranks: int, is_tied: bool
) -> None:
    layout = (folder := tied if is_tied else untied).layout
    embedding, *layers, head = layout.units
    lanes = [lanes_of_rank(rank, num_ranks, LANES) for rank in range(num_ranks)]
    edge = max(embedding.trained_elements, head.trained_elements, layout.head_gradient_elements)
    layer = max(unit.trained_elements for unit in layers)
    for_edges, for_layers = max(map(num_buffers, lanes)) - 1, num_buffers(range(LANES)) - 1
    assert for_layers == 3 and for_edges == {2: 2, 3: 2, 8: 0}[num_ranks]
    extra = sum(
        max(edge if i < for_edges else 0, layer if i < for_layers else 0) for i in range(max(for_edges, for_layers))
    )
    ownership = Ownership(layout=layout, num_ranks=num_ranks, parallel="layers")
    roots = [len(roots_of(of_rank)) for of_rank in lanes]
    received = sum(roots) * max(length(part) for unit in (embedding, head) for part in ownership.trained(unit.index))
    by_rows, by_layers = (memory_of(folder, way, num_ranks).device_bytes["gradients"] for way in ("rows", "layers"))
    # What else there is, both have: slots, the shared table and sums of rows.
    rows = Ownership(layout=layout, num_ranks=num_ranks)
    of_rows = sum(roots) * max(length(part) for unit in layout.units for part in rows.trained(unit.index))
    slot = max(*(unit.trained_elements for unit in layout.units), layout.head_gradient_elements)
    assert by_layers - by_rows == 4 * (extra - for_edges * slot + received - of_rows)


def test_rows_in_use_go_to_every_rank(untied: ModelFolder, tied: ModelFolder) -> None:
    for folder in (untied, tied):
        owned = [len(rows) for rows in Ownership(layout=folder.layout, num_ranks=2).rows()]
        sent = [memory_of(folder, way).device_bytes["weights"] for way in ("rows", "layers")]
        assert sent[1] - sent[0] == 4 * HIDDEN * (2 * min(TOKENS, max(owned)) - min(TOKENS, 2 * max(owned)))
        few = [memory_of(folder, way, tokens_per_step=64).device_bytes["weights"] for way in ("rows", "layers")]
        assert few[1] - few[0] == 4 * HIDDEN * (2 * min(64, max(owned)) - 64)


def test_the_numbers_of_gradients_are_those_of_the_owners(tied: ModelFolder) -> None:
    execution = Execution(num_ranks=2, lanes=LANES, parallel="layers")
    num_numbers = Ownership(layout=tied.layout, num_ranks=2, parallel="layers").num_numbers
    assert lane_number_bytes(tied.layout, execution) == 2 * num_numbers * 8
    assert num_numbers != Ownership(layout=tied.layout, num_ranks=2).num_numbers


# --- Time


def simulated(layer_ranks: Sequence[int], num_micro_batches: int, *, hop: int = 0, ticks: Sequence[int] = ()) -> int:
    """Ticks of a pass: each rank computes its layers in order, of each its micro-batches in order, as soon as the layer
    before has handed one on. `ticks` are what one takes each rank."""
    done: dict[tuple[int, int], int] = {(-1, m): -hop for m in range(num_micro_batches)}
    free = [0] * (max(layer_ranks) + 1)
    for layer, rank in enumerate(layer_ranks):
        for m in range(num_micro_batches):
            free[rank] = max(free[rank], done[layer - 1, m] + hop) + (ticks[rank] if ticks else 1)
            done[layer, m] = free[rank]
    return max(free)


def in_turn(num_layers: int, num_ranks: int) -> tuple[int, ...]:
    return tuple(layer % num_ranks for layer in range(num_layers))


UNEVEN = [deal_layers(num_layers, speeds) for num_layers in (8, 13) for speeds in ((1, 0.5), (2, 1, 1), (0.2, 1))]
DEALS = [in_turn(*way) for way in product((1, 2, 3, 5, 8, 13), (2, 3, 4))] + UNEVEN + [(0, 0, 1, 1), (1, 0, 0, 0, 1)]
GRID = list(product(DEALS, (1, 2, 3, 4, 7, 12)))


def test_a_pass_is_as_long_as_a_simulation_says() -> None:
    for layer_ranks, num_micro_batches in GRID:
        found = pass_length(layer_ranks, num_micro_batches)
        assert found == simulated(layer_ranks, num_micro_batches)
        most = max(Counter(layer_ranks).values())
        assert found >= max(most * num_micro_batches, len(layer_ranks) + num_micro_batches - 1)


def played(
    visits: Sequence[Visit],
    layer_ranks: Sequence[int],
    num_micro_batches: int,
    *,
    updates: Sequence[tuple[int, float]] = (),
    speeds: Sequence[float] = (),
) -> Timeline:
    """Of as many ranks as there are."""
    speeds = speeds or [1.0] * (max(layer_ranks) + 1)
    return play_by_layers(visits, updates, layer_ranks=layer_ranks, speeds=speeds, num_micro_batches=num_micro_batches)


def visits_of(num_layers: int, seconds: float, **more: Any) -> list[Visit]:
    return [
        Visit(unit=0, ring="edge", upload_s=0, compute_s=0),
        *(Visit(unit=i + 1, ring="layer", upload_s=0, compute_s=seconds, **more) for i in range(num_layers)),
    ]


@pytest.mark.parametrize("hop", [0, 1])
def test_a_pass_is_played_as_simulated(hop: int) -> None:
    for layer_ranks, num_micro_batches in GRID:
        # A hidden state's way down takes `hop` ticks, the last one's too.
        visits = visits_of(len(layer_ranks), float(num_micro_batches), hop_down_s=float(hop * num_micro_batches))
        found = played(visits, layer_ranks, num_micro_batches)
        assert found.step_s == simulated(layer_ranks, num_micro_batches, hop=hop) + hop


def test_a_pass_of_uneven_ranks_is_played_about_as_simulated() -> None:
    """Between the first and the last micro-batch of a layer, the play takes them as evenly spread."""
    for num_layers, num_micro_batches, ticks in product((8, 13, 32), (8, 32), ((1, 2), (1, 3), (2, 1, 3))):
        for deal in (in_turn(num_layers, len(ticks)), deal_layers(num_layers, [1 / each for each in ticks])):
            visits = visits_of(num_layers, float(num_micro_batches))
            found = played(visits, deal, num_micro_batches, speeds=[1 / each for each in ticks]).step_s
            assert found == pytest.approx(simulated(deal, num_micro_batches, ticks=ticks), rel=0.05)


@pytest.mark.parametrize("num_layers", [8, 12, 13, 16, 32])
def test_dealt_by_speed_uneven_ranks_come_near_the_sum_of_their_speeds(num_layers: int) -> None:
    """Where compute decides: one of half the speed next to one of full speed."""
    num_micro_batches, speeds = 32, (1.0, 0.5)

    def step_s(layer_ranks: tuple[int, ...]) -> float:
        forward = visits_of(num_layers, float(num_micro_batches))[1:]
        backward = [
            dataclasses.replace(visit, compute_s=3.0 * num_micro_batches, gradient=True) for visit in reversed(forward)
        ]
        return played([*forward, *backward], layer_ranks, num_micro_batches, speeds=speeds).step_s

    alone_s = 4.0 * num_micro_batches * num_layers
    assert alone_s / step_s(deal_layers(num_layers, speeds)) >= 0.85 * sum(speeds)
    # In turn, the slow one has half of them.
    assert alone_s / step_s(in_turn(num_layers, 2)) <= num_layers / (num_layers // 2) * min(speeds)


def queued(num_layers: int, num_micro_batches: int, num_ranks: int, *, upload: float, hop: float) -> float:
    """Seconds of both passes over layers, piece by piece in the order of each rank's queues: a layer takes a second
    forward and two and a half in backward for each micro-batch, `upload` its weights up and its gradient down, and
    `hop` a hidden state, on a queue of its own; weights that are not there by then come later by as much."""
    units = [(layer, False) for layer in range(num_layers)] + [(layer, True) for layer in reversed(range(num_layers))]
    ranks = range(num_ranks)
    own = [[unit for unit in units if unit[0] % num_ranks == rank] for rank in ranks]
    h2d, compute, d2h, up, down = ([0.0] * num_ranks for _ in range(5))
    slots, gradients = ([[0.0, 0.0] for _ in ranks] for _ in range(2))
    there: dict[tuple[int, bool], float] = {}

    def fetch(rank: int, hops: float = 0.0, first_up: float = 0.0) -> None:
        if own[rank]:
            layer, backward = own[rank].pop(0)
            in_slot = backward and layer >= num_layers - 2 * num_ranks
            h2d[rank] = max(h2d[rank], slots[rank].pop(0)) + (0.0 if in_slot else upload)
            if upload and not in_slot and h2d[rank] > first_up:
                h2d[rank] += hops
            there[layer, backward] = h2d[rank]

    for rank in ranks:
        fetch(rank)
    landed = [0.0] * num_micro_batches
    for layer, backward in units:
        rank, num_up = layer % num_ranks, 2 if backward else 1
        fetch(rank, num_micro_batches * num_up * hop, max(up[rank], landed[0]) + num_up * hop)
        free = gradients[rank].pop(0) if backward else 0.0
        for m in range(num_micro_batches):
            up[rank] = max(up[rank], landed[m]) + num_up * hop
            compute[rank] = max(compute[rank], up[rank], there[layer, backward], free) + (2.5 if backward else 1.0)
            landed[m] = down[rank] = max(down[rank], compute[rank]) + hop
        slots[rank].append(compute[rank])
        if backward:
            if upload:
                d2h[rank] = max(d2h[rank] + num_micro_batches * hop, compute[rank]) + upload
            gradients[rank].append(d2h[rank])
    return max(*compute, *d2h, *down)


@pytest.mark.parametrize(
    ("upload", "hop"), [(0.0, 0.05), (1.0, 0.05), (4.0, 0.05), (8.0, 0.1), (64.0, 0.1), (0.5, 0.9)]
)
def test_a_step_with_its_copies_is_played_as_queue_by_queue(upload: float, hop: float) -> None:
    for num_layers, num_micro_batches, num_ranks in product((8, 13), (2, 4, 8, 32), (2, 4, 8)):
        wanted = queued(num_layers, num_micro_batches, num_ranks, upload=upload, hop=hop)
        hops = num_micro_batches * hop
        forward = [
            Visit(
                unit=layer + 1,
                ring="layer",
                upload_s=upload,
                compute_s=float(num_micro_batches),
                hop_up_s=hops,
                hop_down_s=hops,
            )
            for layer in range(num_layers)
        ]
        backward = [
            dataclasses.replace(
                visit,
                upload_s=0.0 if visit.unit > num_layers - 2 * num_ranks else upload,
                compute_s=2.5 * num_micro_batches,
                download_s=upload,
                gradient=True,
                hop_up_s=2 * hops,
            )
            for visit in reversed(forward)
        ]
        found = played(forward + backward, in_turn(num_layers, num_ranks), num_micro_batches).step_s
        assert found == pytest.approx(wanted, rel=1e-9), (num_layers, num_micro_batches, num_ranks)


def test_hidden_states_and_weights_share_the_link() -> None:
    def step_s(upload: float, hop: float) -> float:
        visits = visits_of(8, 4.0, hop_up_s=hop)
        visits[1:] = [dataclasses.replace(visit, upload_s=upload) for visit in visits[1:]]
        return played(visits, in_turn(8, 2), 4).step_s

    # Weights are the bottleneck: those of a rank's last layer come later by the hops of its three others. The other
    # rank's last layer begins one more micro-batch's hop later.
    assert step_s(64.0, 1.0) - step_s(64.0, 0.0) == pytest.approx(3 * 1.0 + 0.25)
    # Compute is the bottleneck: of weights only the first layer's show, which come 0.25 s after its first hop.
    assert step_s(0.5, 1.0) - step_s(0.0, 1.0) == pytest.approx(0.25)


def test_updates_of_a_round_end_together_and_the_next_step_waits_for_them() -> None:
    visits, updates = visits_of(4, 1.0), [(0, 0.0), *((unit, 1.0) for unit in range(1, 5))]
    # Two of four layers are updated after 2 s, whichever rank's; four ranks' after 4 s.
    for num_ranks, wanted in ((2, 2 + pass_length(in_turn(4, 2), 1)), (4, 4 + 4)):
        assert played(visits, in_turn(4, num_ranks), 1, updates=updates).step_s == wanted
    # The first of each rank end together, at 2 s; then the others of the rank that has more.
    assert played(visits, (0, 1, 0, 0), 1, updates=updates).step_s == 2 + 4
    assert played(visits, (0, 0, 0, 1), 1, updates=updates).step_s == 2 + 4


def step_of(folder: ModelFolder, parallel: Parallel, num_ranks: int, kind: str = "cuda", **more: Any) -> Any:
    settings = {"tokens_per_step": TOKENS, "sequence_length": ROW, "lanes": LANES, "grad_bytes": 2, **more}
    return step_work(folder, parallel=parallel, num_ranks=num_ranks, device_kind=kind, **settings)


def test_layers_are_whole_and_edges_divided(untied: ModelFolder) -> None:
    alone, rows, layers = (step_of(untied, *way) for way in (("rows", 1), ("rows", 3), ("layers", 3)))
    assert layers.layer == alone.layer and layers.num_micro_batches == alone.num_micro_batches
    assert [unit.upload_bytes for unit in layers.layers] == [unit.upload_bytes for unit in alone.layers]
    assert [unit.download_bytes for unit in layers.layers] == [unit.download_bytes for unit in alone.layers]
    assert {unit.peer_up_bytes + unit.peer_down_bytes for unit in layers.layers} == {0}
    assert layers.head == rows.head
    assert layers.head_traffic.upload_bytes == alone.head_traffic.upload_bytes
    assert (layers.head_traffic.peer_up_bytes, rows.head_traffic.peer_up_bytes > 0) == (0, True)
    assert layers.head_traffic.peer_down_bytes == rows.head_traffic.peer_down_bytes > 0
    assert (layers.hop_bytes, rows.hop_bytes) == (2 * TOKENS * HIDDEN, 0)
    assert (layers.layer_ranks, rows.layer_ranks) == ((0, 1, 2), ())
    # All rows in use, of which a rank has a third itself.
    assert layers.embedding.peer_rows_bytes == pytest.approx(2 * VOCAB * HIDDEN * 2 / 3)


WAYS: tuple[tuple[Parallel, int], ...] = (("rows", 1), ("layers", 3))


def test_on_the_host_the_ranks_do_as_much_as_one_and_wait_for_each_other(untied: ModelFolder) -> None:
    how: dict[str, Any] = {"kind": "host", "grad_bytes": 4, "tokens_per_step": 9 * ROW}
    alone, layers = (step_of(untied, way, num_ranks, **how) for way, num_ranks in WAYS)
    one, three = (predict_step(work, RATES, shares_processors=True) for work in (alone, layers))
    for part in ("gemm", "attention", "elementwise", "accumulation", "adamw"):
        assert three.parts_s[part] == pytest.approx(one.parts_s[part])
    # Three layers of nine micro-batches on three ranks take 11 ticks where 9 would do.
    seconds = Seconds.of(layers, RATES)
    visits = (visit for visit in seconds.visits if visit.ring == "layer")
    waiting_s = sum(visit.hop_up_s + visit.compute_s + visit.hop_down_s for visit in visits) * (11 / 9 - 1)
    assert layers.num_micro_batches == 9 and seconds.waiting_s() == pytest.approx(waiting_s)
    assert three.step_s == pytest.approx(sum(seconds.busy().values()) + waiting_s)


@pytest.mark.parametrize("parallel", ["rows", "layers"])
def test_the_links_together_bring_no_more_than_the_hosts_memory_gives(untied: ModelFolder, parallel: Parallel) -> None:
    fast, slow = (dataclasses.replace(RATES, adamw_bytes_per_s=rate) for rate in (4e8, 2e8))
    for num_ranks, times in ((1, 1), (2, 1), (4, 2)):
        work = step_of(untied, parallel if num_ranks > 1 else "rows", num_ranks)
        links = [[visit.upload_s for visit in Seconds.of(work, rates).visits[1:3]] for rates in (fast, slow)]
        peers_s = work.layers[0].peer_up_bytes / RATES.h2d_bytes_per_s
        assert [found - peers_s for found in links[1]] == pytest.approx([times * (s - peers_s) for s in links[0]])


def test_what_devices_do_at_once_is_as_it_was_measured(untied: ModelFolder) -> None:
    peers = PeerRates(num_devices=4, together_bytes_per_s=4e7, gather_bytes_per_s=3e6, exchange_bytes_per_s=2e6)
    known = dataclasses.replace(RATES, peers=peers)
    for num_ranks, link in ((2, 8e7), (4, 4e7)):
        work = step_of(untied, "rows", num_ranks)
        layer, *_, gradient, _ = Seconds.of(work, known).visits[1:]
        traffic = work.layers[0]
        assert layer.upload_s == pytest.approx(traffic.upload_bytes / link + traffic.peer_up_bytes / 3e6)
        down_s = traffic.download_bytes / min(link, RATES.d2h_bytes_per_s)
        assert gradient.download_s == pytest.approx(down_s + traffic.peer_down_bytes / 2e6)
    # Where there is next to no way between devices, layers that go round are the faster way.
    slow = dataclasses.replace(peers, gather_bytes_per_s=1e5, exchange_bytes_per_s=1e5)
    times = [
        predict_step(step_of(untied, way, 2), dataclasses.replace(known, peers=slow), shares_processors=False).step_s
        for way in ("rows", "layers")
    ]
    assert times[1] < times[0]


def test_by_rows_ranks_wait_for_the_one_with_a_document_that_is_not_divided(untied: ModelFolder) -> None:
    alone, many = (step_of(untied, "rows", num_ranks, tokens_per_step=ROW) for num_ranks in (1, 4))
    assert many.layer == alone.layer and many.longest_share == 4
    assert step_of(untied, "rows", 4, tokens_per_step=8 * ROW).longest_share == 1
    how: dict[str, Any] = {"kind": "host", "grad_bytes": 4}
    work = step_of(untied, "rows", 4, tokens_per_step=2 * ROW, **how)
    seconds = Seconds.of(work, RATES)
    assert work.longest_share == 2 and seconds.waiting_s() == pytest.approx(seconds.busy()["compute"])


@pytest.mark.parametrize("shares_processors", [True, False])
def test_a_pass_forward_by_layers_takes_less_than_a_step(untied: ModelFolder, shares_processors: bool) -> None:
    work = step_of(untied, "layers", 2, "host" if shares_processors else "cuda")
    forward = predict_forward(work, RATES, shares_processors=shares_processors)
    assert 0 < forward < predict_step(work, RATES, shares_processors=shares_processors).step_s


def test_the_parts_of_a_step_by_layers_add_up(untied: ModelFolder) -> None:
    found = predict_step(step_of(untied, "layers", 2), RATES, shares_processors=False)
    computed = ("gemm", "attention", "elementwise", "accumulation", "head", "clearing", "embedding", "launches")
    assert found.step_s == pytest.approx(sum(found.parts_s[name] for name in computed) + found.parts_s["exposed"])


@pytest.mark.parametrize(
    ("change", "bound"),
    [
        ({"h2d_bytes_per_s": 1e3}, "h2d"),
        ({"d2h_bytes_per_s": 1e3}, "d2h"),
        ({"adamw_bytes_per_s": 1e3}, "host memory"),
        ({"attention_forward_flops_per_s": ((1, 1e3),)}, "compute"),
    ],
)
def test_the_bound_by_layers_is_the_queue_that_decides(untied: ModelFolder, change: dict[str, Any], bound: str) -> None:
    work = step_of(untied, "layers", 2)
    assert predict_step(work, dataclasses.replace(RATES, **change), shares_processors=False).bound == bound


# --- The planner's choice


CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "vocab_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}


def written(folder: Path) -> Path:
    """A folder with a model of six layers."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    shapes = {"model.embed_tokens.weight": (64, 64), "model.norm.weight": (64,), "lm_head.weight": (64, 64)}
    shapes |= {f"model.layers.{index}.mlp.up_proj.weight": (128, 64) for index in range(6)}
    tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return written(tmp_path)


def spec_of(*, gpus: int = 2, device: str = "auto", **train: Any) -> JobSpec:
    train = {"max_steps": 1, "tokens_per_step": 1024, "sequence_length": 64, **train}
    return parse_job_spec({"name": "j", "model": "m", "dataset": "d", "gpus": gpus, "device": device, "train": train})


def planner_of(*, rates: Any = None, arena_bytes: int = GIB, host_bytes: int = 64 * GIB, **more: Any) -> Planner:
    settings = load_settings(
        host_memory_reserve_bytes=0, device_arena_bytes=arena_bytes, numa_interleave=False, host_devices=8
    )
    return Planner(
        settings,
        memory=lambda: HostMemory(limit_bytes=host_bytes, available_bytes=host_bytes),
        num_threads=1,
        rates=lambda: rates or {},
        **more,
    )


def test_what_the_spec_says_is_taken(folder: Path) -> None:
    planner = planner_of(rates={"host": RATES})
    found: dict[str, Plan] = {way: planner.plan(spec_of(parallel=way), folder) for way in ("rows", "layers", "auto")}
    assert [found[way].parallel for way in ("rows", "layers")] == ["rows", "layers"]
    ways = found["rows"].ways
    assert ways is not None and found["layers"].ways == found["auto"].ways == ways
    for way, step_s in (("rows", ways.rows_s), ("layers", ways.layers_s)):
        prediction = found[way].prediction
        assert prediction is not None and prediction.step_s == step_s
    assert ways.rows_s is not None and ways.layers_s is not None
    assert found["auto"].parallel == ("layers" if ways.layers_s < ways.rows_s else "rows")
    execution = found["layers"].execution
    assert (execution.residency, execution.deals_lanes, execution.lanes) == (NOTHING_STAYS, False, 8)
    assert found["layers"].plane_bytes == found["rows"].plane_bytes, "the store is the same"


def test_a_plan_is_kept_and_told_with_its_way_and_older_ones_have_one(folder: Path) -> None:
    plan = planner_of(rates={"host": RATES}).plan(spec_of(parallel="layers"), folder)
    assert from_plain(Plan, to_plain(plan)) == plan
    assert " by 2 devices in 8 lanes, by layers, predicted " in plan.summary
    told = to_message(plan, job_pb2.MemoryPlan)
    assert plan.ways is not None and (told.parallel, told.ways.layers_s) == ("layers", plan.ways.layers_s)
    older = {name: value for name, value in to_plain(plan).items() if name != "ways"}
    older["execution"] = {name: value for name, value in older["execution"].items() if name != "parallel"}
    found = from_plain(Plan, older)
    assert (found.parallel, found.ways) == ("rows", None)
    assert not to_message(found, job_pb2.MemoryPlan).HasField("ways")


def test_without_rates_a_step_is_divided_by_rows_and_with_one_device_by_nothing(folder: Path) -> None:
    plan = planner_of().plan(spec_of(), folder)
    assert (plan.parallel, plan.ways) == ("rows", None)
    for way in ("auto", "rows", "layers"):
        plan = planner_of(rates={"host": RATES}).plan(spec_of(gpus=1, parallel=way), folder)
        assert (plan.parallel, plan.ways, plan.lanes) == ("rows", None, 1)


@pytest.mark.parametrize(
    ("gpus", "train", "message"),
    [
        (2, {"max_grad_norm": None}, r"with train\.max_grad_norm: null none is stored; set train\.max_grad_norm"),
        (8, {}, r"gpus is 8 and the model has 6 layers; use gpus: 6 or train\.parallel: rows"),
    ],
)
def test_layers_that_cannot_go_round_are_refused_and_auto_takes_rows(
    folder: Path, gpus: int, train: dict[str, Any], message: str
) -> None:
    planner = planner_of(rates={"host": RATES})
    with pytest.raises(InvalidSpec, match=message) as caught:
        planner.plan(spec_of(gpus=gpus, parallel="layers", **train), folder)
    assert [violation.field for violation in caught.value.violations] == ["train.parallel"]
    plan = planner.plan(spec_of(gpus=gpus, **train), folder)
    assert plan.parallel == "rows" and plan.ways is not None
    assert plan.ways.layers_s is None and plan.ways.rows_s is not None


def test_where_one_way_alone_fits_it_is_taken_and_else_named(folder: Path) -> None:
    many: dict[str, Any] = {"tokens_per_step": 65536, "sequence_length": 64}
    rows, layers = (planner_of().plan(spec_of(parallel=way, **many), folder) for way in ("rows", "layers"))
    assert rows.host_total_bytes < layers.host_total_bytes
    tight = planner_of(rates={"host": RATES}, host_bytes=rows.host_total_bytes)
    auto, asked = (tight.plan(spec_of(parallel=way, **many), folder) for way in ("auto", "layers"))
    assert auto.fits and auto.parallel == "rows"
    assert auto.ways is not None and auto.ways.rows_s is not None and auto.ways.layers_s is None
    assert not asked.fits and asked.message.endswith("are available; it would fit with train.parallel: rows")
    # By more than compressed states would save.
    both = planner_of(host_bytes=rows.host_total_bytes - (1 << 20))
    assert "train.tokens_per_step: 32768" in both.plan(spec_of(parallel="layers", **many), folder).message
    assert "train.tokens_per_step: 32768" in both.plan(spec_of(**many), folder).message


def test_gpus_without_names_are_refused_to_several_ranks(folder: Path) -> None:
    named = tuple(Gpu(index=i, name="g", memory_bytes=80 * GIB, uuid=f"GPU-{i}") for i in range(2))
    unnamed = tuple(Accelerator(index=i, name="g", memory_bytes=80 * GIB) for i in range(2))
    half = (named[0], dataclasses.replace(named[1], uuid=""))
    assert planner_of(accelerators=named).plan(spec_of(device="cuda"), folder).num_devices == 2
    for gpus in (unnamed, half):
        planner = planner_of(accelerators=gpus)
        with pytest.raises(InvalidSpec, match=r"does not name a UUID of each of these GPUs.*use gpus: 1") as caught:
            planner.plan(spec_of(device="cuda"), folder)
        assert [violation.field for violation in caught.value.violations] == ["gpus"]
        assert planner.plan(spec_of(device="cuda", gpus=1), folder).num_devices == 1


MACHINE = PlannedMachine(gpu="rtx-4090", host_gbps=200)


@pytest.fixture(scope="module")
def seven_billion(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Folders of models as wide as one of 7 B parameters, of headers alone."""

    def made(num_layers: int) -> Path:
        folder = tmp_path_factory.mktemp("wide")
        config = {**CONFIG, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": num_layers}
        config |= {"vocab_size": 32000, "num_attention_heads": 32, "num_key_value_heads": 32}
        (folder / "config.json").write_text(json.dumps(config))
        shapes = {"model.embed_tokens.weight": (32000, 4096), "model.norm.weight": (4096,)}
        shapes |= {"lm_head.weight": (32000, 4096)}
        for index in range(num_layers):
            layer = f"model.layers.{index}"
            shapes |= {f"{layer}.self_attn.{name}_proj.weight": (4096, 4096) for name in "qkvo"}
            shapes |= {f"{layer}.mlp.{name}_proj.weight": (11008, 4096) for name in ("gate", "up")}
            shapes[f"{layer}.mlp.down_proj.weight"] = (4096, 11008)
        header, end = dict[str, Any](), 0
        for name, shape in shapes.items():
            start, end = end, end + 2 * math.prod(shape)
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        with (folder / "model.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
        return folder

    return made


def test_auto_takes_the_faster_way_over_a_grid(seven_billion: Callable[[int], Path]) -> None:
    planner, taken = planner_of(), dict[tuple[int, int, int], str]()
    for num_layers in (8, 32):
        model = seven_billion(num_layers)
        for gpus, tokens in product((2, 4, 8), (2048, 65536, 1 << 18)):
            spec = spec_of(gpus=gpus, device="cuda", tokens_per_step=tokens, sequence_length=512)
            plan = planner.plan_elsewhere(spec, model, MACHINE)
            assert plan.fits and plan.ways is not None and plan.prediction is not None
            known = {way: step_s for way, step_s in vars(plan.ways).items() if step_s is not None}
            assert plan.prediction.step_s == min(known.values()) == known[f"{plan.parallel}_s"]
            taken[num_layers, gpus, tokens] = plan.parallel
    # Few tokens: weights and gradients that cross once decide. Many: nobody waits for others by rows.
    assert {taken[32, gpus, 2048] for gpus in (4, 8)} == {"layers"}
    assert {taken[num_layers, gpus, 1 << 18] for num_layers in (8, 32) for gpus in (2, 4, 8)} == {"rows"}
