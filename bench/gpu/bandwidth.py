"""Stage: host memory by number of threads, and the link from the pages that a store lives in, registered as the engine
does."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from contextlib import closing
from functools import partial

import torch

from bench.gpu.report import Report
from bench.gpu.shapes import SIZES
from bench.gpu.task import Task
from horizon_server.engine.device import device_for
from horizon_server.engine.device.protocol import Device
from horizon_server.planning.bandwidth import measure_bandwidth
from horizon_server.store.cpus import available_cpus
from horizon_server.store.host_store import HostStore
from horizon_server.store.layout import StoreLayout, build_layout

_NUM_RUNS = 4


def run(task: Task, report: Report) -> None:
    """Two tables."""
    _host_memory(task, report)
    _link(task, report)


def _host_memory(task: Task, report: Report) -> None:
    sizes, clock = SIZES[task.device], task.clock()
    report.table(
        "Host memory by threads",
        {"threads": "d", "AdamW GB/s": ".1f", "triad GB/s": ".1f", "ratio": ".2f", "M parameters/s": ",.0f"},
    )
    cpus = available_cpus()
    counts = sorted({cpus, *(1 << power for power in range(cpus.bit_length()) if 1 << power <= cpus)})
    last_s = 0.0
    for num_threads in counts:
        start_s = time.perf_counter()
        # More threads are quicker, so what the last count took is enough.
        if not clock.allows(2 * last_s):
            report.say(f"No time was left for {num_threads} threads and more.")
            return
        measured = measure_bandwidth(
            num_threads=num_threads, num_parameters=sizes.adamw_parameters, num_pairs=sizes.adamw_pairs
        )
        assert measured is not None, "the kernel was built before the stages began"
        adamw_gb, triad_gb = measured.adamw_bytes_per_s / 1e9, measured.triad_bytes_per_s / 1e9
        report.row(
            threads=num_threads,
            ratio=measured.ratio,
            **{"AdamW_GB/s": adamw_gb, "triad_GB/s": triad_gb, "M_parameters/s": adamw_gb * 1e3 / 26},
        )
        last_s = time.perf_counter() - start_s


def _link(task: Task, report: Report) -> None:
    report.table(
        "The link, from and to registered memory files", {"what": "", "GB/s up": ".1f", "GB/s down": ".1f", "s": ".3f"}
    )
    layout = _two_units(SIZES[task.device].link_elements)
    device = device_for("cuda" if task.device == "cuda" else "host", num_threads=available_cpus())
    start_s = time.perf_counter()
    # A device unpins what it has pinned when it is closed, so it goes before the memory does.
    with closing(HostStore.allocate(layout, grad_dtype=device.gradient_dtype)) as store, closing(device):
        num_gb = sum(store.host_bytes().values()) / 1e9
        report.row(what=f"{num_gb:.1f} GB of planes made", s=time.perf_counter() - start_s)
        start_s = time.perf_counter()
        device.adopt(store)
        report.row(what="what crosses the link registered", s=time.perf_counter() - start_s)
        _copies(device, store, report)
        for refusal in device.refusals:
            report.say(refusal)


def _copies(device: Device, store: HostStore, report: Report) -> None:
    unit = next(unit for unit in store.layout.units if unit.kind == "layer")
    weights = device.allocate("weights", unit.num_elements, device.compute_dtype)
    gradient = device.allocate("gradients", unit.num_elements, torch.float32)
    # Uninitialised memory may hold subnormal numbers, which processors compute far more slowly.
    gradient.zero_()
    # Of the stored dtype, so that nothing is converted: the plain copy that the link can do.
    values = device.allocate("gradients", unit.num_elements, device.gradient_dtype)
    numbers, target = device.allocate_host("staging", 1, torch.float64), store.unit(unit.index, "grad")
    up = partial(device.upload_unit, store, unit.index, weights)
    down = partial(device.download, values, target)
    down_as_in_a_step = partial(device.download_unit, gradient, target, numbers[0])
    for what, copies in (
        ("up alone", [up]),
        ("down alone", [down]),
        ("both at once", [up, down]),
        ("both, gradients rounded and their squares summed", [up, down_as_in_a_step]),
    ):
        rates = []
        for _ in range(_NUM_RUNS):
            for copy in copies:
                copy()
            for queue in (device.h2d, device.d2h):
                queue.record().wait()
            device.raise_failure()
            use = device.take_use()
            rates.append([way.bytes / way.busy_s / 1e9 if way.bytes else None for way in (use.h2d, use.d2h)])
        # The first run touches the device's memory.
        up_gb, down_gb = (_median(rate[way] for rate in rates[1:]) for way in range(2))
        report.row(**{"what": what, "GB/s_up": up_gb, "GB/s_down": down_gb})
    device.free_host(numbers)


def _median(rates: Iterable[float | None]) -> float | str:
    known = [rate for rate in rates if rate is not None]
    return statistics.median(known) if known else ""


def _two_units(num_elements: int) -> StoreLayout:
    """Two layers of one tensor each, with `num_elements` elements."""
    shapes = {f"model.layers.{index}.w.weight": (num_elements,) for index in range(2)}
    return build_layout({"model.embed_tokens.weight": (1, 1), **shapes}, num_layers=2, tied=True)
