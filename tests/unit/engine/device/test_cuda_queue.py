from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch
from tests.cpu_runtime import CpuMark, CpuRuntime

from horizon_server.engine.device.cuda import CudaDevice
from horizon_server.engine.device.cuda_queue import CudaEvent, CudaQueue, StreamClock
from horizon_server.engine.device.queued_device import HostQueue, QueueGroup
from horizon_server.errors import DoesNotFit


@pytest.fixture
def group() -> QueueGroup:
    return QueueGroup()


@pytest.fixture
def queues(group: QueueGroup) -> Iterator[tuple[CudaQueue, CudaQueue]]:
    runtime = CpuRuntime()
    clock = StreamClock(runtime, object())
    first, second = (
        CudaQueue(name, group, num_threads=1, runtime=runtime, stream=object(), clock=clock)
        for name in ("h2d", "compute")
    )
    yield first, second
    for queue in (first, second):
        queue.close()


def test_a_queue_waits_until_the_other_has_launched(queues: tuple[CudaQueue, CudaQueue]) -> None:
    gate, seen = threading.Event(), list[str]()
    queues[0].submit(lambda: _wait(gate))
    queues[0].submit(lambda: seen.append("copied"))
    queues[1].wait(queues[0].record())
    queues[1].submit(lambda: seen.append("computed"))
    done = queues[1].record()
    assert not done.happened

    gate.set()
    done.wait()

    assert seen == ["copied", "computed"]


def test_a_wait_is_logged_with_whom_it_was_for(queues: tuple[CudaQueue, CudaQueue], group: QueueGroup) -> None:
    class NotYet(CpuMark):
        def query(self) -> bool:
            return False

    event = CudaEvent("h2d", NotYet(), group)
    event.issue(object())
    queues[1].wait(event)
    queues[1].record().wait()

    (wait,) = queues[1].timeline.take()[1]
    assert wait.waits_for == "h2d" and wait.end_s >= wait.start_s


def test_a_stream_waits_for_the_host_and_the_host_for_a_stream(
    queues: tuple[CudaQueue, CudaQueue], group: QueueGroup
) -> None:
    host, seen = HostQueue("optimizer", group, num_threads=1), list[str]()
    queues[1].submit(lambda: seen.append("gradient"))
    host.wait(queues[1].record())
    host.submit(lambda: seen.append("update"))
    queues[0].wait(host.record())
    queues[0].submit(lambda: seen.append("weights"))
    queues[0].record().wait()
    host.close()

    assert seen == ["gradient", "update", "weights"]


def test_busy_time_and_bytes_are_on_the_hosts_clock(queues: tuple[CudaQueue, CudaQueue]) -> None:
    before_s = time.perf_counter()
    queues[0].submit(lambda: None, num_bytes=12)
    queues[0].record().wait()
    (busy,), _ = queues[0].timeline.take()

    assert before_s <= busy.start_s <= busy.end_s <= time.perf_counter() + 1e-6
    assert busy.num_bytes == 12
    assert queues[0].timeline.take() == ([], [])


def test_a_full_device_is_told_as_one_that_does_not_fit(queues: tuple[CudaQueue, CudaQueue], group: QueueGroup) -> None:
    def fill() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nMore.")

    queues[1].submit(fill)
    queues[1].record().wait()

    with pytest.raises(DoesNotFit, match=r"device memory: CUDA out of memory. Tried to allocate 9 GiB.; lower tokens"):
        group.raise_first()


def test_a_broken_device_fails_the_queues_instead_of_the_waiting_thread(group: QueueGroup) -> None:
    class Broken(CpuMark):
        def synchronize(self) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    event = CudaEvent("compute", Broken(), group)
    event.issue(object())
    event.wait()

    with pytest.raises(RuntimeError, match="illegal memory access"):
        group.raise_first()


def test_a_device_that_is_lost_is_closed_all_the_same_and_keeps_the_reason() -> None:
    class Lost(CpuRuntime):
        def synchronize(self) -> None:
            raise RuntimeError("CUDA error: device lost")

    device = CudaDevice(runtime=Lost(), staging_bytes=1 << 16)
    device.close()

    with pytest.raises(RuntimeError, match="device lost"):
        device.raise_failure()


def _wait(gate: threading.Event) -> None:
    gate.wait()
