"""The cuda device on the stand-in driver where things go wrong: limits, lack of memory, and a device that fails for
good."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import pytest
import torch
from tests.cpu_runtime import CpuRuntime

from horizon_server.engine.device.cuda import CudaDevice
from horizon_server.engine.device.cuda_runtime import TorchCuda
from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.device.queued_device import HostQueue, QueueGroup
from horizon_server.errors import DoesNotFit


def small_device(runtime: CpuRuntime, *, limit_bytes: int | None = None) -> CudaDevice:
    return CudaDevice(runtime=runtime, limit_bytes=limit_bytes, staging_bytes=1 << 16)


@pytest.fixture
def attention_choice() -> Iterator[None]:
    before: bool = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.usefixtures("attention_choice")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device; tests/gpu has the real case")
def test_masked_attention_is_never_cudnns() -> None:
    # The choice comes before the driver is started, which fails here.
    with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|NVIDIA"):
        TorchCuda()
    assert not torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]


def test_the_limit_of_an_earlier_device_is_lifted() -> None:
    runtime = CpuRuntime()
    small_device(runtime, limit_bytes=1 << 20).close()
    assert runtime.memory_bytes == 1 << 20

    small_device(runtime).close()
    assert runtime.memory_bytes is None


def test_a_device_that_is_full_refuses_to_place_tensors_with_numbers() -> None:
    runtime = CpuRuntime()
    device = small_device(runtime)
    runtime.is_full = True

    with pytest.raises(
        DoesNotFit, match=r"device memory: CUDA out of memory. Tried to allocate 64.00 MiB.; lower tokens"
    ):
        device.place(torch.zeros(4))
    device.close()


@pytest.mark.parametrize("pinnable_bytes", [0, 1 << 40])
def test_hidden_states_go_through_staging_memory_only_where_theirs_is_not_pinned(
    pinnable_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = small_device(runtime := CpuRuntime(pinnable_bytes=pinnable_bytes))
    staging, pin = list[torch.Tensor](), runtime.pinned

    def pinned(num_bytes: int) -> torch.Tensor:
        staging.append(pin(num_bytes))
        return staging[-1]

    monkeypatch.setattr(runtime, "pinned", pinned)
    up, down, _ = device.hops()
    num_elements = 100_000  # more than both pieces of a ring
    source, back = (device.allocate("activations", num_elements, torch.bfloat16) for _ in range(2))
    source.copy_(torch.arange(num_elements) % 251)
    on_host = device.allocate_host("activations", num_elements, torch.bfloat16)

    device.download(source, on_host, queue=down)
    up.wait(down.record())
    device.upload(on_host, back, queue=up)
    device.drain()

    device.raise_failure()
    assert torch.equal(on_host, source) and torch.equal(back, source)
    assert len(staging) == (4 if pinnable_bytes == 0 else 0)
    use = device.take_use()
    assert use.h2d.bytes == use.d2h.bytes == 2 * num_elements
    device.close()


def test_hidden_states_keep_their_dtype() -> None:
    device = small_device(CpuRuntime())
    # What gradients are rounded in.
    device._cast = device.allocate("gradients", 64, torch.bfloat16)
    device.download(torch.ones(64), device.allocate_host("activations", 64, torch.bfloat16), queue=device.hops()[1])
    device.drain()
    with pytest.raises(AssertionError, match="hidden states keep their dtype"):
        device.raise_failure()
    device.close()


def test_what_is_freed_after_the_device_broke_does_not_hide_why_it_did() -> None:
    runtime = CpuRuntime()
    device = small_device(runtime)
    weights = device.allocate("weights", 64, torch.bfloat16)
    device.compute.submit(_fail)
    device.compute.record().wait()
    runtime.broken = "CUDA error: an illegal memory access was encountered"

    device.free(weights)
    device.close()

    with pytest.raises(ZeroDivisionError, match="the true reason"):
        device.raise_failure()


def test_gaps_between_tensors_are_in_the_account() -> None:
    runtime = CpuRuntime()
    device = small_device(runtime)
    device.allocate("weights", 500, torch.bfloat16)
    runtime.peak_bytes, runtime.reserved_bytes = 1200, 1500

    assert device.peak_bytes() == {"weights": 1000, "workspace": 200, "cached": 300}
    device.close()


@pytest.mark.parametrize("is_cause", [False, True])
def test_a_failure_does_not_keep_what_the_failed_work_held(*, is_cause: bool) -> None:
    group = QueueGroup()
    queue = HostQueue("compute", group, num_threads=1)
    held: list[weakref.ref[torch.Tensor]] = []

    def work() -> None:
        logits = torch.zeros(8)
        held.append(weakref.ref(logits))
        _fail()

    def wrapped() -> None:
        try:
            work()
        except ZeroDivisionError as error:
            raise DoesNotFit("device memory") from error

    queue.submit(wrapped if is_cause else work)
    queue.record().wait()

    assert held[0]() is None
    with pytest.raises(DoesNotFit if is_cause else ZeroDivisionError):
        group.raise_first()
    queue.close()


def test_finished_work_keeps_nothing_alive_while_its_queue_is_idle() -> None:
    device = HostDevice(num_threads=1)
    tensor = torch.zeros(8)
    seen = weakref.ref(tensor)
    device.compute.submit(tensor.zero_)
    del tensor
    device.compute.record().wait()

    assert seen() is None
    device.close()


def test_a_queue_that_is_dropped_without_closing_ends_its_thread() -> None:
    queue = HostQueue("dropped", QueueGroup(), num_threads=1)
    thread = queue._thread
    queue.record().wait()
    del queue
    thread.join(timeout=240)
    assert not thread.is_alive()


def _fail() -> None:
    raise ZeroDivisionError("the true reason")
