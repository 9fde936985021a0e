from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch
from tests.cpu_runtime import CpuRuntime

from horizon_server.engine.device.cuda import CudaDevice
from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.device.protocol import Event
from horizon_server.engine.device.timeline import RANKS, Span, Timeline, Trace, overlap_s, summarise
from horizon_server.figures import CollectiveFigures


def busy(start_s: float, end_s: float, num_bytes: int) -> Span:
    return Span("any", start_s, end_s, num_bytes)


def wait(start_s: float, end_s: float, waits_for: str) -> Span:
    return Span("any", start_s, end_s, waits_for=waits_for)


def timeline(*spans: Span) -> Timeline:
    log = Timeline()
    for span in spans:
        log.add(span)
    return log


def test_overlap_counts_common_time_only() -> None:
    assert overlap_s([(0, 2), (5, 9)], [(1, 6), (8, 20)]) == pytest.approx(1 + 1 + 1)
    assert overlap_s([(0, 1)], [(1, 2)]) == 0
    assert overlap_s([], [(0, 1)]) == 0


def test_compute_waiting_for_a_copy_exposes_the_copy() -> None:
    use = summarise(
        h2d=timeline(busy(0, 3, 100), busy(4, 5, 10)),
        compute=timeline(wait(0, 3.5, "h2d"), busy(3.5, 10, 0), wait(10, 10.25, "d2h")),
        d2h=timeline(wait(0, 9, "compute"), busy(9, 10.25, 7)),
        host_queues=[],
    )

    assert (use.h2d.bytes, use.h2d.busy_s, use.h2d.exposed_s) == (110, 4, 3.5)
    assert (use.d2h.bytes, use.d2h.busy_s, use.d2h.exposed_s) == (7, 1.25, 0.25)
    assert use.compute_s == 6.5
    assert use.optimizer_exposed_s == 0


def test_exchanges_with_other_ranks_and_waits_for_them_are_told_from_copies() -> None:
    use = summarise(
        h2d=timeline(
            busy(0, 1, 100),
            Span("h2d", 1, 3, 40, collective="weights"),
            wait(3, 5, RANKS),
            busy(5, 6, 10),
            Span("h2d", 6, 7, 8, collective="weights"),
        ),
        compute=timeline(wait(0, 6, "h2d")),
        d2h=timeline(Span("d2h", 2, 4, 16, collective="gradients")),
        host_queues=[],
    )
    assert use.collectives == (
        CollectiveFigures(kind="weights", bytes=48, busy_s=3, exposed_s=2),
        CollectiveFigures(kind="gradients", bytes=16, busy_s=2, exposed_s=0),
    )
    # The link was busy with them too; what the others took is exposed nowhere here.
    assert (use.h2d.bytes, use.h2d.busy_s, use.h2d.exposed_s) == (110, 5, 4)
    # Two seconds of exchanges that nothing hid, and two for what other ranks had to do first.
    assert use.ranks_wait_s == 4
    assert use.optimizer_exposed_s == 0


def test_a_link_that_two_queues_copy_over_is_busy_once() -> None:
    up = timeline(busy(1, 4, 10), wait(4, 6, RANKS), busy(6, 7, 10))
    down = timeline(busy(6, 9, 20))
    use = summarise(
        h2d=timeline(busy(0, 3, 100), busy(5, 6, 100)),
        compute=timeline(wait(0, 3, "h2d"), wait(3, 7, "hops up"), wait(8, 9, "hops down"), wait(9, 9.5, "signals")),
        d2h=timeline(busy(5, 8, 50)),
        host_queues=[],
        hops=(up, down, timeline(wait(6, 9, "hops down"))),
    )
    assert (use.h2d.bytes, use.h2d.busy_s) == (220, 6)
    assert (use.d2h.bytes, use.d2h.busy_s) == (70, 4)
    # Of the four seconds for hidden states from other ranks, these had not written them for two.
    assert (use.h2d.exposed_s, use.d2h.exposed_s, use.ranks_wait_s, use.optimizer_exposed_s) == (5, 1.5, 2, 0)
    with pytest.raises(ValueError, match="zip"):
        summarise(h2d=timeline(), compute=timeline(), d2h=timeline(), host_queues=[], hops=(up, down))


def test_compute_while_its_launches_are_made_is_told_from_compute_that_was_queued() -> None:
    use = summarise(
        h2d=timeline(),
        compute=timeline(
            Span("compute", 0, 4, launched_s=1),  # queued for its last three seconds
            Span("compute", 4, 6, launched_s=2),  # launched before it began
            Span("compute", 6, 9, launched_s=8.9),  # the host never got ahead
            Span("compute", 9, 10, launched_s=11),  # two clocks differ a little
        ),
        d2h=timeline(Span("d2h", 0, 5, launched_s=5)),
        host_queues=[],
    )
    assert use.compute_s == 10
    assert use.launching_s == pytest.approx(1 + 0 + 2.9 + 1)


def test_a_cuda_device_knows_when_its_work_was_launched() -> None:
    """The stand-in driver computes while it launches, so all of its compute is launching; the host device launches
    nothing."""
    device = CudaDevice(runtime=CpuRuntime())
    device.compute.submit(lambda: torch.ones(300, 300).mm(torch.ones(300, 300)))
    device.compute.record().wait()
    use = device.take_use()
    assert 0 < use.launching_s <= use.compute_s
    device.close()
    host = HostDevice(num_threads=1)
    host.compute.submit(lambda: torch.ones(300, 300).mm(torch.ones(300, 300)))
    host.compute.record().wait()
    use = host.take_use()
    assert use.compute_s > 0 and use.launching_s == 0
    host.close()


def test_a_copy_that_waits_for_the_optimizer_exposes_the_optimizer() -> None:
    use = summarise(
        h2d=timeline(wait(0, 2, "optimizer"), busy(2, 3, 1), wait(3, 4, "compute")),
        compute=timeline(wait(0.5, 3, "h2d"), busy(3, 4, 0)),
        d2h=timeline(),
        host_queues=[timeline(busy(0, 2, 0), busy(2, 2.5, 0))],
    )

    assert use.optimizer_s == 2.5
    assert use.optimizer_exposed_s == 1.5
    assert use.h2d.exposed_s == 1.0


def test_a_gradient_that_waits_for_the_optimizer_exposes_the_optimizer_too() -> None:
    # In backward: compute wants a gradient slot, d2h wants the host slot that the update still reads.
    use = summarise(
        h2d=timeline(),
        compute=timeline(busy(0, 1, 0), wait(1, 5, "d2h"), busy(5, 6, 0)),
        d2h=timeline(wait(0, 1, "compute"), wait(2, 4, "optimizer"), busy(4, 5, 8)),
        host_queues=[timeline(busy(0, 4, 0))],
    )

    assert use.optimizer_exposed_s == 2
    assert use.d2h.exposed_s == 2


def test_taking_empties_the_log() -> None:
    log = timeline(busy(0, 1, 5))
    log.take()

    assert log.take() == ([], [])


class WatchedEvent:
    """An event that tells when a queue has begun to wait for it: no wait is logged for what has happened already."""

    def __init__(self, event: Event) -> None:
        self._event = event
        self.origin, self.happened = event.origin, False
        self.awaited = threading.Event()

    def wait(self) -> None:
        self.awaited.set()
        self._event.wait()


def test_a_trace_shows_work_and_waits_of_every_queue_in_order() -> None:
    trace, gate = Trace(), threading.Event()
    device = HostDevice(num_threads=1, trace=trace)
    source, out = torch.ones(8), torch.zeros(8)
    device.h2d.submit(gate.wait, label="held")
    device.upload(source, out)
    uploaded = WatchedEvent(device.h2d.record())
    device.compute.wait(uploaded)
    device.compute.submit(lambda: None, label="late")
    uploaded.awaited.wait()
    device.host_queue("optimizer").submit(gate.set, label="update 3")
    device.compute.record().wait()
    device.close()

    by_queue: dict[str, list[Span]] = {}
    for span in trace.spans():
        by_queue.setdefault(span.queue, []).append(span)
    assert [(span.label, span.num_bytes) for span in by_queue["h2d"]] == [("held", 0), ("layer input", 32)]
    assert by_queue["optimizer"][0].label == "update 3"
    early_wait, late = by_queue["compute"]
    assert (early_wait.waits_for, late.waits_for, late.label) == ("h2d", None, "late")
    assert by_queue["h2d"][1].end_s <= early_wait.end_s <= late.start_s


def test_a_device_on_streams_traces_too() -> None:
    trace = Trace()
    device = CudaDevice(runtime=CpuRuntime(), staging_bytes=1 << 16, trace=trace)
    device.compute.submit(lambda: None, label="forward 1")
    device.compute.record().wait()
    assert trace.spans() == []

    device.take_use()

    assert [(span.queue, span.label) for span in trace.spans()] == [("compute", "forward 1")]
    device.close()


def test_a_trace_keeps_the_last_spans_only() -> None:
    trace = Trace(max_spans=3)
    for i in range(5):
        trace.add(Span("compute", i, i + 0.5, 0, f"forward {i}"))

    assert [span.label for span in trace.spans()] == ["forward 2", "forward 3", "forward 4"]
    trace.clear()
    assert trace.spans() == []


def test_a_timeline_keeps_its_own_log_and_gives_a_trace_the_same() -> None:
    trace = Trace()
    own, traced = Timeline(), Timeline(trace)
    for log in (own, traced):
        log.add(busy(0, 1, 0))
        log.add(wait(1, 2, "h2d"))

    assert trace.spans() == [busy(0, 1, 0), wait(1, 2, "h2d")]
    assert own.take() == traced.take() == ([busy(0, 1, 0)], [wait(1, 2, "h2d")])


def test_the_file_opens_as_chrome_trace_events(tmp_path: Path) -> None:
    trace = Trace()
    trace.add(Span("h2d", 10.0, 10.5, 64, "unit 1"))
    trace.add(Span("compute", 10.0, 10.5, waits_for="h2d"))
    trace.add(Span("compute", 10.5, 12.0))

    trace.write(tmp_path / "trace.json")

    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert sorted(names.values()) == ["compute", "h2d"]
    drawn = [(names[e["tid"]], e["name"], e["cat"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert drawn == [
        ("h2d", "unit 1", "work", 0, pytest.approx(5e5)),
        ("compute", "wait for h2d", "wait", 0, pytest.approx(5e5)),
        ("compute", "work", "work", pytest.approx(5e5), pytest.approx(1.5e6)),
    ]
    assert next(e for e in events if e["name"] == "unit 1")["args"] == {"bytes": 64}
