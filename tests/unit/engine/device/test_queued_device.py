from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.device.queued_device import HostEvent, HostQueue, QueueGroup


@pytest.fixture
def group() -> QueueGroup:
    return QueueGroup()


@pytest.fixture
def queues(group: QueueGroup) -> Iterator[tuple[HostQueue, HostQueue]]:
    pair = (HostQueue("first", group, num_threads=1), HostQueue("second", group, num_threads=1))
    yield pair
    for queue in pair:
        queue.close()


def test_submitting_does_not_block_and_order_is_kept(queues: tuple[HostQueue, HostQueue]) -> None:
    gate, seen = threading.Event(), list[int]()
    queues[0].submit(lambda: _wait(gate))
    for number in range(5):
        queues[0].submit(lambda n=number: seen.append(n))  # type: ignore[misc]
    done = queues[0].record()
    assert not done.happened
    assert not seen

    gate.set()
    done.wait()

    assert seen == [0, 1, 2, 3, 4]


def test_a_queue_waits_for_the_other_and_logs_who_for(
    queues: tuple[HostQueue, HostQueue], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = queues
    gate, seen = threading.Event(), list[str]()
    first.submit(lambda: _wait(gate))
    first.submit(lambda: seen.append("first"), num_bytes=12)
    done = first.record()
    assert isinstance(done, HostEvent)
    wait_for_done = done.wait

    def wait() -> None:
        # The first queue continues only now: the second one does not wait for what has happened.
        gate.set()
        wait_for_done()

    monkeypatch.setattr(done, "wait", wait)
    second.wait(done)
    second.submit(lambda: seen.append("second"))
    second.record().wait()

    assert seen == ["first", "second"]
    busy, _ = first.timeline.take()
    assert sum(entry.num_bytes for entry in busy) == 12
    _, waits = second.timeline.take()
    assert [span.waits_for for span in waits] == ["first"]


def test_an_error_stops_all_queues_but_no_event(queues: tuple[HostQueue, HostQueue], group: QueueGroup) -> None:
    first, second = queues
    seen = list[str]()
    first.submit(lambda: _fail("the true reason"))
    first.submit(lambda: seen.append("after the failure"))
    second.wait(first.record())
    second.submit(lambda: seen.append("on the other queue"))
    second.record().wait()

    assert not seen
    with pytest.raises(ZeroDivisionError, match="the true reason"):
        group.raise_first()


def test_each_queue_has_its_own_number_of_threads(group: QueueGroup) -> None:
    numbers = dict[int, int]()
    queues = {threads: HostQueue(f"q{threads}", group, num_threads=threads) for threads in (2, 1)}
    for threads, queue in queues.items():
        queue.submit(lambda n=threads: numbers.update({n: torch.get_num_threads()}))  # type: ignore[misc]
    for queue in queues.values():
        queue.close()

    assert numbers == {1: 1, 2: 2}


def test_an_exchange_waits_until_the_others_know_of_hidden_states_for_them() -> None:
    device = HostDevice(num_threads=1)
    gate, seen = threading.Event(), list[str]()
    *_, signals = hops = device.hops()
    assert device.hops() is hops
    signals.submit(lambda: gate.wait(240))
    signals.submit(lambda: seen.append("signal"))

    device.d2h.submit(lambda: seen.append("copy"))
    device.d2h.record().wait()
    device.d2h.submit(lambda: seen.append("exchange"), collective="numbers")
    assert seen == ["copy"]
    gate.set()
    device.drain()

    assert seen == ["copy", "signal", "exchange"]
    device.close()


def test_where_hidden_states_for_the_others_failed_no_exchange_begins() -> None:
    device = HostDevice(num_threads=1)
    gate, seen = threading.Event(), list[str]()
    _, down, signals = device.hops()

    def fail() -> None:
        gate.wait(240)
        raise ValueError("this copy failed")

    down.submit(fail)
    signals.wait(down.record())
    for queue in (device.h2d, device.compute, device.d2h):
        queue.submit(lambda: seen.append("exchange"), collective="numbers")
    gate.set()
    device.drain()

    assert not seen
    with pytest.raises(ValueError, match="this copy failed"):
        device.raise_failure()
    device.close()


def _wait(gate: threading.Event) -> None:
    assert gate.wait(240)


def _fail(message: str) -> None:
    raise ZeroDivisionError(message)
