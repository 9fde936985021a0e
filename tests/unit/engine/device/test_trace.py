from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch
from tests.cpu_runtime import CpuRuntime

from horizon_server.engine.device.cuda import CudaDevice
from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.device.timeline import Busy, Timeline, Wait
from horizon_server.engine.device.trace import Span, Trace


def test_a_trace_shows_work_and_waits_of_every_queue_in_order() -> None:
    trace, gate = Trace(), threading.Event()
    device = HostDevice(num_threads=1, trace=trace)
    source, out = torch.ones(8), torch.zeros(8)
    device.h2d.submit(lambda: _wait(gate), label="held")
    device.upload(source, out)
    device.compute.wait(device.h2d.record())
    device.compute.submit(lambda: gate.set(), label="late")
    early = device.host_queue("optimizer")
    early.submit(gate.set, label="update 3")
    device.compute.record().wait()
    device.close()

    by_queue: dict[str, list[Span]] = {}
    for span in trace.spans():
        by_queue.setdefault(span.queue, []).append(span)
    assert [(span.label, span.num_bytes) for span in by_queue["h2d"]] == [("held", 0), ("layer input", 32)]
    assert by_queue["optimizer"][0].label == "update 3"
    wait, late = by_queue["compute"]
    assert (wait.waits_for, late.waits_for, late.label) == ("h2d", None, "late")
    assert by_queue["h2d"][1].end_s <= wait.end_s <= late.start_s


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
    add = trace.observer("compute")
    for i in range(5):
        add(Busy(i, i + 0.5, 0, f"forward {i}"))

    assert [span.label for span in trace.spans()] == ["forward 2", "forward 3", "forward 4"]
    trace.clear()
    assert trace.spans() == []


def test_without_an_observer_a_timeline_keeps_its_own_log_only() -> None:
    timeline, trace = Timeline(), Trace()
    timeline.add(Busy(0, 1, 0))
    timeline.observer = trace.observer("compute")
    timeline.add(Wait(1, 2, "h2d"))

    assert len(trace.spans()) == 1
    assert [len(entries) for entries in timeline.take()] == [1, 1]


def test_the_file_opens_as_chrome_trace_events(tmp_path: Path) -> None:
    trace = Trace()
    trace.observer("h2d")(Busy(10.0, 10.5, 64, "unit 1"))
    trace.observer("compute")(Wait(10.0, 10.5, "h2d"))
    trace.observer("compute")(Busy(10.5, 12.0, 0))

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


def _wait(gate: threading.Event) -> None:
    gate.wait()
