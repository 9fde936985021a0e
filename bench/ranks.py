"""What lanes cost, and what ranks bring: steps of one job on 1 to 8 ranks, each a process with a device of its own.

* `lanes`: 8 lanes on one rank against 1 lane, step by step in turns.
* `threads`: two ranks of one thread against one rank of two, the same step in 8 lanes.
* `uneven`: two such devices as below, one of half the speed, in 8 and in 16 lanes that are dealt by speed; possible
  is the sum of the two.
* `uneven-layers`: the same two devices, with layers that are dealt by speed or in turn.
* `compute`, `layers`, `link`, `few`: devices whose compute is a wait, so that a few cores stand for many devices. A
  micro-batch of a layer takes `--wait-ms` whatever the processors do, in a step that is divided by rows or by layers.
  In `link` and `few`, copies take as long as on a slow link, which each device has for itself: in `link` the devices
  complete layers among themselves, in `few` they have no other way than the host, so the step is divided by layers.
  The last column is the time that the plan's schedule predicts for such devices, in parts of the measured one.
* `auto`: both ways on devices of ten kinds, emulated in the same manner, and whether the plan's schedule finds the
  faster one.
* `memory`: what the processes of four ranks take together, pages that they share counted once (PSS), against the plan.

Ranks are joined by gloo over the loopback, which is the peers' way here.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist

from bench.models import qwen3_config, random_rows
from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.device.protocol import Event, Work
from horizon_server.engine.device.queued_device import HostQueue
from horizon_server.engine.ranks import ALONE, Call, Meeting, Ranks
from horizon_server.engine.template import Template
from horizon_server.engine.trainer import Trainer
from horizon_server.figures import CollectiveKind
from horizon_server.planning.layer_deal import deal_layers
from horizon_server.planning.ledger import plan_memory
from horizon_server.planning.model_folder import ModelFolder, ModelShape
from horizon_server.planning.play import Visit
from horizon_server.planning.rates import DeviceRates, PeerRates, WidthRates
from horizon_server.planning.step_time import Seconds
from horizon_server.planning.step_work import work_of_step
from horizon_server.recipe import Recipe
from horizon_server.records.execution import Execution
from horizon_server.settings import child_environment
from horizon_server.store.generations import lent_planes
from horizon_server.store.host_store import HostStore
from horizon_server.store.planes import create_memory_file, lent_memory

LANES, MOST_LANES = 8, 16
REAL: dict[str, Any] = {
    "shape": "36m",
    "rows": 16,
    "row_tokens": 256,
    "micro_batch_tokens": 1024,
    "threads": 1,
    "lanes": LANES,
    "num_ranks": 1,
    "gathers": False,
    "parallel": "rows",
    "layer_ranks": (),
    "speeds": (),
    "wait_s": 0.0,
    "link_bytes_per_s": None,
}
UNEVEN = (1.0, 0.5)
_WARM_STEPS = 6
"""Until lanes are dealt by speed."""


KINDS = [
    # Few tokens on slow links, with and without a way between the devices; then more tokens, faster links.
    (2, 8, 1, 10, False),
    (2, 8, 1, 10, True),
    (4, 8, 1, 10, False),
    (4, 8, 1, 10, True),
    (2, 16, 5, 10, False),
    (2, 16, 5, 40, True),
    (4, 16, 10, 20, False),
    (4, 16, 10, 40, True),
    (2, 16, 20, 40, False),
    (2, 32, 5, 40, True),
]
"""Of `auto`: ranks, rows, milliseconds of a micro-batch, megabytes a second of a link, and whether there are peers."""


class WaitingQueue:
    """A queue of compute whose work on a micro-batch takes a given time at least."""

    def __init__(self, queue: HostQueue, wait_s: float) -> None:
        self._queue, self._wait_s = queue, wait_s
        self.name, self.timeline = queue.name, queue.timeline

    def submit(
        self, work: Work, *, num_bytes: int = 0, label: str = "", collective: CollectiveKind | None = None
    ) -> None:
        """As a queue's; work of a layer waits."""

        def waited() -> None:
            end_s = time.perf_counter() + self._wait_s
            work()
            time.sleep(max(0.0, end_s - time.perf_counter()))

        is_layer = label.startswith(("forward", "backward", "head"))
        self._queue.submit(waited if is_layer else work, num_bytes=num_bytes, label=label, collective=collective)

    def wait(self, event: Event) -> None:
        """As a queue's."""
        self._queue.wait(event)

    def record(self) -> Event:
        """As a queue's."""
        return self._queue.record()

    def close(self) -> None:
        """As a queue's."""
        self._queue.close()


def deals_lanes(job: dict[str, Any]) -> bool:
    """Whether the ranks of a job get lanes by their speed."""
    return bool(job["speeds"]) and job["parallel"] == "rows"


@contextmanager
def trainer_of(job: dict[str, Any], planes: dict[str, int], ranks: Ranks) -> Iterator[Trainer]:
    """A trainer of one rank on the planes."""
    template = Template.from_config(qwen3_config(job["shape"]))
    store = HostStore.attach(template.layout, planes, rank=ranks.rank, max_ranks=MOST_LANES)
    device = HostDevice(num_threads=job["threads"], link_bytes_per_s=job["link_bytes_per_s"])
    if job["wait_s"]:
        wait_s = job["wait_s"] / (job["speeds"][ranks.rank] if job["speeds"] else 1)
        device.compute = WaitingQueue(device.compute, wait_s)  # type: ignore[assignment]
    tokens = job["rows"] * job["row_tokens"]
    recipe = Recipe(learning_rate=1e-5, tokens_per_step=tokens, sequence_length=job["row_tokens"])
    execution = Execution(
        num_ranks=ranks.num_ranks,
        lanes=job["lanes"],
        parallel=job["parallel"],
        layer_ranks=tuple(job["layer_ranks"]),
        deals_lanes=deals_lanes(job),
        num_threads=job["threads"],
        optimizer_threads=job["threads"],
        micro_batch_tokens=job["micro_batch_tokens"],
    )
    if ranks.leads and not ranks.is_alone:
        ranks.send(Call(name="begin"))
    elif not ranks.is_alone:
        ranks.receive()
    trainer = Trainer(template, store, device, recipe, execution, num_steps=1000, ranks=ranks)
    try:
        yield trainer
    finally:
        if ranks.leads:
            trainer.close()
        device.close()


def joined(job: dict[str, Any], rank: int) -> Ranks:
    """The ranks of a job, met."""
    if job["num_ranks"] == 1:
        return ALONE
    execution = Execution(
        num_ranks=job["num_ranks"],
        lanes=job["lanes"],
        parallel=job["parallel"],
        layer_ranks=tuple(job["layer_ranks"]),
    )
    ranks = Ranks.join(rank, Meeting(file=Path(job["meeting"])), execution, shared_fd=job["shared_fd"])
    ranks.gathers = job["gathers"]
    return ranks


def steps_of(jobs: list[dict[str, Any]], num_steps: int) -> list[list[float]]:
    """Seconds of each step of each job, in turns where none has several ranks; all at once others."""
    with ExitStack() as stack:
        trainers = [stack.enter_context(begun(job)) for job in jobs]
        vocab_size = qwen3_config(jobs[0]["shape"]).vocab_size
        rows = random_rows(vocab_size, num_rows=jobs[0]["rows"], row_tokens=jobs[0]["row_tokens"])
        seconds: list[list[float]] = [[] for _ in jobs]
        num_warm = _WARM_STEPS if deals_lanes(jobs[0]) else 1
        for number in range(num_steps + num_warm):
            for index, trainer in enumerate(trainers):
                started_s = time.perf_counter()
                trainer.train_step(rows)
                if number >= num_warm:
                    seconds[index].append(time.perf_counter() - started_s)
        return seconds


@contextmanager
def begun(job: dict[str, Any]) -> Iterator[Trainer]:
    """The first rank's trainer, on a new store of random weights, with the others running."""
    template = Template.from_config(qwen3_config(job["shape"]))
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        job = {**job, "meeting": f"{folder}/ranks"}
        planes = stack.enter_context(
            lent_memory(lent_planes(template.layout, grad_dtype_bytes=4, max_ranks=MOST_LANES))
        )
        store = HostStore.attach(template.layout, planes, max_ranks=MOST_LANES)
        store.plane("hi").normal_(std=0.02)
        store.generations.reset()
        store.generations.share(job["num_ranks"])
        job["shared_fd"] = create_memory_file("ranks", 0)
        stack.callback(os.close, job["shared_fd"])
        asked = json.dumps({**job, "planes": planes})
        for rank in range(1, job["num_ranks"]):
            command = [sys.executable, "-m", "bench.ranks", "--rank", str(rank), "--job", asked]
            process = subprocess.Popen(command, pass_fds=(*planes.values(), job["shared_fd"]), env=child_environment())
            stack.callback(process.wait)
        ranks = joined(job, 0)
        if not ranks.is_alone:
            # Or the next job's ranks could not meet.
            stack.callback(dist.destroy_process_group)
        yield stack.enter_context(trainer_of(job, planes, ranks))


def folder_of(job: dict[str, Any]) -> ModelFolder:
    """The model of a job as the planner sees it, without files."""
    config = qwen3_config(job["shape"])
    return ModelFolder(
        path=Path(),
        config=config.to_dict(),
        shape=ModelShape.from_config(config.to_dict()),
        headers={},
        layout=Template.from_config(config).layout,
    )


def memory_of(job: dict[str, Any]) -> tuple[int, int]:
    """Bytes of host memory that the processes of a job take together after two steps, and those that are planned."""
    with begun(job) as trainer:
        rows = random_rows(qwen3_config(job["shape"]).vocab_size, num_rows=job["rows"], row_tokens=job["row_tokens"])
        for _ in range(2):
            trainer.train_step(rows)
        own = psutil.Process()
        pids = [own.pid, *(child.pid for child in own.children())]
        taken = sum(pss_bytes(Path(f"/proc/{pid}/smaps_rollup").read_text("ascii")) for pid in pids)
    recipe = Recipe(
        learning_rate=1e-5, tokens_per_step=job["rows"] * job["row_tokens"], sequence_length=job["row_tokens"]
    )
    execution = Execution(
        num_ranks=job["num_ranks"],
        lanes=job["lanes"],
        parallel=job["parallel"],
        num_threads=job["threads"],
        micro_batch_tokens=job["micro_batch_tokens"],
    )
    return taken, plan_memory(folder_of(job), recipe, execution).host_total_bytes


def pss_bytes(smaps: str) -> int:
    """Bytes of a process in which a page that several map counts as a part for each."""
    (line,) = (line for line in smaps.splitlines() if line.startswith("Pss:"))
    return int(line.split()[1]) << 10


def predicted_s(job: dict[str, Any]) -> float:
    """How long the plan's schedule takes for a step on emulated devices: what they compute is the waits, what they copy
    goes at the speed of the link."""
    folder, num_ranks, lanes = folder_of(job), int(job["num_ranks"]), int(job["lanes"])
    num_tokens = int(job["rows"] * job["row_tokens"])
    recipe = Recipe(learning_rate=1e-5, tokens_per_step=num_tokens, sequence_length=job["row_tokens"])
    # Not the host device, whose ranks share one machine's processors.
    execution = Execution(
        device_kind="cuda",
        num_ranks=num_ranks,
        lanes=lanes,
        parallel=job["parallel"],
        layer_ranks=job["layer_ranks"],
        micro_batch_tokens=job["micro_batch_tokens"],
    )
    link = job["link_bytes_per_s"] or _FAST
    peers = _ENDLESS.peers if job["gathers"] or job["parallel"] == "layers" else None
    rates = replace(_ENDLESS, h2d_bytes_per_s=link, d2h_bytes_per_s=link, peers=peers)
    seconds = Seconds.of(work_of_step(folder, recipe, execution), rates, job["speeds"])
    num_all = max(lanes, -(-num_tokens // int(job["micro_batch_tokens"])))
    num_own, own_lanes = -(-num_all // num_ranks), -(-lanes // num_ranks)
    goes_round = job["parallel"] == "layers" and num_ranks > 1
    num_layer, layer_lanes = (num_all, lanes) if goes_round else (num_own, own_lanes)

    def num_waits(visit: Visit) -> int:
        # A micro-batch is one, and so is in backward the sum of a lane; a lane's tokens add up in the table.
        if visit.ring == "layer":
            return num_layer + layer_lanes * visit.gradient
        if visit.unit:
            return num_own + own_lanes
        return num_own + 2 * own_lanes if visit.gradient else num_layer

    visits = [replace(visit, compute_s=num_waits(visit) * job["wait_s"]) for visit in seconds.visits]
    return replace(seconds, visits=tuple(visits)).played(updates_in_backward=False).step_s


_FAST = 1e15
_ENDLESS = DeviceRates(
    name="emulated",
    num_threads=1,
    peak_flops_per_s=_FAST,
    attention_forward_flops_per_s=((1, _FAST),),
    attention_backward_flops_per_s=((1, _FAST),),
    accumulate_bytes_per_s=_FAST,
    widths=(
        WidthRates(
            hidden_size=128, gemm_flops_per_s=((1, _FAST),), elementwise_bytes_per_s=_FAST, head_bytes_per_s=_FAST
        ),
    ),
    h2d_bytes_per_s=_FAST,
    d2h_bytes_per_s=_FAST,
    gather_bytes_per_s=_FAST,
    scatter_bytes_per_s=_FAST,
    zero_bytes_per_s=_FAST,
    adamw_bytes_per_s=_FAST,
    compressed_parameters_per_s=_FAST,
    peers=PeerRates(num_devices=8, together_bytes_per_s=_FAST, gather_bytes_per_s=_FAST, exchange_bytes_per_s=_FAST),
)


def line(
    what: str, reference: list[float], other: list[float], *, times: float = 1.0, predicted_s: float | None = None
) -> None:
    """Print a row: typical seconds, and how fast the second is in parts of `times` the first."""
    first, second = statistics.median(reference), statistics.median(other)
    forecast = "" if predicted_s is None else f"{predicted_s / second:.2f}"
    ratios = f"{first / second:.2f} | {first / second / times:.2f}"
    print(f"| {what} | {first:.3f} | {second:.3f} | {ratios} | {forecast} |", flush=True)


def print_choices(waits: dict[str, Any], num_steps: int) -> None:
    """Print a row for each kind of device: both ways, measured and predicted."""
    print("\n| ranks | rows of 32 | wait ms | link MB/s | peers | rows s | layers s | measured | predicted |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for num_ranks, rows, wait_ms, megabytes, gathers in KINDS:
        found_s, forecast_s = dict[str, float](), dict[str, float]()
        for parallel in ("rows", "layers"):
            job = {
                **waits,
                "num_ranks": num_ranks,
                "rows": rows,
                "wait_s": wait_ms / 1000,
                "parallel": parallel,
                "link_bytes_per_s": megabytes * 1e6,
                "gathers": gathers and parallel == "rows",
            }
            (seconds,) = steps_of([job], num_steps)
            found_s[parallel], forecast_s[parallel] = statistics.median(seconds), predicted_s(job)
        what = f"{num_ranks} | {rows} | {wait_ms} | {megabytes} | {'yes' if gathers else 'no'}"
        verdicts = " | ".join(_faster(of_ways) for of_ways in (found_s, forecast_s))
        print(f"| {what} | {found_s['rows']:.3f} | {found_s['layers']:.3f} | {verdicts} |", flush=True)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--parts",
        nargs="+",
        default=["lanes", "threads", "uneven", "uneven-layers", "compute", "layers", "link", "few", "auto", "memory"],
    )
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--wait-ms", type=float, default=20.0)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--job", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        job = json.loads(arguments.job)
        with trainer_of(job, job["planes"], joined(job, arguments.rank)) as trainer:
            trainer.follow()
        sys.stdout.flush()
        os._exit(0)
    # Small layers, so that what is computed for real takes little of a wait.
    waits = {**REAL, "shape": "thin", "rows": 16, "row_tokens": 32, "micro_batch_tokens": 32}
    waits["wait_s"] = arguments.wait_ms / 1000
    print("| what | first s | second s | times as fast | of what is possible | predicted |")
    print("| --- | --- | --- | --- | --- | --- |")
    if "lanes" in arguments.parts:
        one, many = steps_of([{**REAL, "threads": 2, "lanes": 1}, {**REAL, "threads": 2}], arguments.steps)
        line("1 lane; 8 lanes, one rank", one, many)
    if "threads" in arguments.parts:
        alone, both = (steps_of([{**REAL, **how}], arguments.steps)[0] for how in ({"threads": 2}, {"num_ranks": 2}))
        line("1 rank of 2 threads; 2 ranks of 1 thread", alone, both)
    for lanes in (LANES, MOST_LANES) if "uneven" in arguments.parts else ():
        dealt = {**waits, "lanes": lanes}
        (alone,) = steps_of([dealt], arguments.steps)
        (found,) = steps_of([{**dealt, "num_ranks": 2, "speeds": UNEVEN}], arguments.steps)
        line(f"1 rank; 2 ranks of speeds 1 and 0.5, {lanes} lanes", alone, found, times=sum(UNEVEN))
    if "uneven-layers" in arguments.parts:
        (alone,) = steps_of([waits], arguments.steps)
        by_speed = deal_layers(folder_of(waits).shape.num_hidden_layers, UNEVEN)
        for how, layer_ranks in (("by speed", by_speed), ("in turn", ())):
            shared = {**waits, "num_ranks": 2, "parallel": "layers", "speeds": UNEVEN, "layer_ranks": layer_ranks}
            (found,) = steps_of([shared], arguments.steps)
            what = f"1 rank; 2 ranks of speeds 1 and 0.5, layers dealt {how}"
            line(what, alone, found, times=sum(UNEVEN), predicted_s=predicted_s(shared))
    # So slow that what processors and Python really do takes little of it.
    link = {"wait_s": 0.004, "link_bytes_per_s": 2.5e6, "rows": 8}
    cases = {
        "compute": waits,
        "layers": {**waits, "parallel": "layers"},
        "link": {**waits, **link, "gathers": True},
        "few": {**waits, **link, "parallel": "layers"},
    }
    for part, slow in cases.items():
        if part not in arguments.parts:
            continue
        (alone,) = steps_of([slow], arguments.steps)
        for num_ranks in arguments.ranks:
            (found,) = steps_of([{**slow, "num_ranks": num_ranks}], arguments.steps)
            what = f"{part}, emulated: 1 rank; {num_ranks} ranks"
            forecast = predicted_s({**slow, "num_ranks": num_ranks})
            line(what, alone, found, times=num_ranks, predicted_s=forecast)
    if "auto" in arguments.parts:
        print_choices(waits, arguments.steps)
    if "memory" in arguments.parts:
        print("\n| ranks | way | MiB taken | MiB planned | taken / planned |")
        print("| --- | --- | --- | --- | --- |")
        for num_ranks, parallel in ((1, "rows"), (2, "rows"), (4, "rows"), (2, "layers"), (4, "layers")):
            taken, planned = memory_of({**REAL, "num_ranks": num_ranks, "parallel": parallel})
            sizes = f"{taken / 2**20:,.0f} | {planned / 2**20:,.0f} | {taken / planned:.3f}"
            print(f"| {num_ranks} | {parallel} | {sizes} |", flush=True)


def _faster(of_ways: dict[str, float]) -> str:
    """Rows or layers, and by how much."""
    slow, fast = sorted(of_ways, key=lambda way: -of_ways[way])
    return f"{fast}, {of_ways[slow] / of_ways[fast]:.2f} times"


if __name__ == "__main__":
    main()
