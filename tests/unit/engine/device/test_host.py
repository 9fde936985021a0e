from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from horizon_server.engine.device.host import HostDevice
from horizon_server.store.host_store import HostStore
from horizon_server.store.layout import build_layout

SHAPES = {
    "model.embed_tokens.weight": (50, 8),
    "model.layers.0.mlp.weight": (8, 8),
    "model.layers.0.norm.weight": (8,),
    "model.norm.weight": (8,),
    "lm_head.weight": (50, 8),
}
TABLE = "model.embed_tokens.weight"


@pytest.fixture
def store() -> Iterator[HostStore]:
    store = HostStore.allocate(build_layout(SHAPES, num_layers=1, tied=False), num_threads=1)
    generator = torch.Generator().manual_seed(0)
    for name, shape in SHAPES.items():
        store.write_master(name, torch.randn(shape, generator=generator))
    yield store
    store.close()


@pytest.fixture
def device() -> Iterator[HostDevice]:
    device = HostDevice(num_threads=1)
    yield device
    device.close()


def test_only_the_compute_thread_computes_with_several_threads() -> None:
    device = HostDevice(num_threads=2)
    numbers = dict[str, int]()
    device.compute.submit(lambda: numbers.update(compute=torch.get_num_threads()))
    device.close()
    later = threading.Thread(target=lambda: numbers.update(later=torch.get_num_threads()))
    later.start()
    later.join()

    assert numbers == {"compute": 2, "later": 1}


def test_a_unit_arrives_as_its_exact_fp32_master(store: HostStore, device: HostDevice) -> None:
    unit = store.layout.units[1]
    out, wanted = torch.empty(unit.num_elements), torch.empty(unit.num_elements)

    device.upload_unit(store, 1, out)
    device.h2d.record().wait()

    store.merge_master(1, wanted)
    assert torch.equal(out, wanted)
    assert not torch.equal(out, out.bfloat16().float())
    assert device.take_use().h2d.bytes == unit.num_elements * 4


def test_rows_arrive_as_their_exact_fp32_master(store: HostStore, device: HostDevice) -> None:
    rows, out = torch.tensor([3, 49, 0, 17]), torch.empty(4, 8)

    device.upload_rows(store, TABLE, rows, out)
    device.h2d.record().wait()

    whole = torch.empty(store.layout.units[0].num_elements)
    store.merge_master(0, whole)
    assert torch.equal(out, whole[:400].view(50, 8)[rows])


def test_a_gradient_lands_with_its_square_sum(store: HostStore, device: HostDevice) -> None:
    gradient = torch.randn(store.layout.units[1].num_elements)
    square_sum = torch.tensor(torch.nan, dtype=torch.float64)

    device.download_unit(gradient, store.unit(1, "grad"), square_sum)
    device.d2h.record().wait()

    assert torch.equal(store.unit(1, "grad"), gradient)
    assert float(square_sum) == pytest.approx(float((gradient.double() ** 2).sum()), rel=1e-12)


def test_gradients_of_rows_land_one_after_the_other(device: HostDevice) -> None:
    gradient, landed = torch.randn(3, 8), torch.full((32,), 2.0)
    square_sum = torch.tensor(torch.nan, dtype=torch.float64)

    device.download_unit(gradient, landed[:24], square_sum)
    device.d2h.record().wait()

    assert torch.equal(landed[:24].view(3, 8), gradient)
    assert bool((landed[24:] == 2).all())
    assert float(square_sum) == pytest.approx(float((gradient.double() ** 2).sum()), rel=1e-12)
    assert device.take_use().d2h.bytes == 24 * 4


def test_the_square_sum_is_taken_before_rounding(device: HostDevice) -> None:
    gradient, square_sum = torch.full((2048,), 1 + 2**-12), torch.tensor(torch.nan, dtype=torch.float64)
    landed, row_landed = torch.empty(2048, dtype=torch.bfloat16), torch.empty(16, dtype=torch.bfloat16)
    row_sum = square_sum.clone()

    device.download_unit(gradient, landed, square_sum)
    device.download_unit(gradient[:16].view(2, 8), row_landed, row_sum)
    device.d2h.record().wait()

    assert landed.float().sum() == 2048
    assert float(square_sum) == 2048 * (1 + 2**-12) ** 2
    assert float(row_sum) == 16 * (1 + 2**-12) ** 2


def test_host_memory_is_counted_and_given_back(device: HostDevice) -> None:
    buffer = device.allocate_host("staging", 1000, torch.float32)
    assert buffer.data_ptr() % 4096 == 0
    device.free_host(buffer)
    device.free_host(device.allocate_host("staging", 10, torch.float32))

    assert device.host_peak_bytes() == {"staging": 4000}


def test_host_memory_goes_up_and_down(device: HostDevice) -> None:
    kept = device.allocate_host("activations", 64, torch.float32)
    source, back = torch.arange(64.0), torch.empty(64)

    device.download(source, kept)
    device.h2d.wait(device.d2h.record())
    device.upload(kept, back)
    device.h2d.record().wait()

    assert torch.equal(back, source)
    use = device.take_use()
    assert use.d2h.bytes == use.h2d.bytes == 256


def test_an_infinite_gradient_shows_in_its_square_sum(store: HostStore, device: HostDevice) -> None:
    gradient = torch.zeros(store.layout.units[1].num_elements)
    gradient[11] = torch.inf
    square_sum = torch.tensor(0.0, dtype=torch.float64)

    device.download_unit(gradient, store.unit(1, "grad"), square_sum)
    device.d2h.record().wait()

    assert not torch.isfinite(square_sum)


def test_a_link_is_as_slow_as_it_is_told(store: HostStore) -> None:
    device = HostDevice(num_threads=1, link_bytes_per_s=1e6)
    unit = store.layout.units[1]

    device.upload_unit(store, 1, torch.empty(unit.num_elements))
    device.download_unit(torch.zeros(unit.num_elements), store.unit(1, "grad"), torch.zeros((), dtype=torch.float64))
    device.close()

    use = device.take_use()
    assert use.h2d.busy_s >= unit.num_elements * 4 / 1e6
    assert use.d2h.busy_s >= unit.num_elements * 4 / 1e6


def test_freed_memory_is_poisoned_when_asked_for() -> None:
    device = HostDevice(num_threads=1, poison_on_free=True)
    tensor = device.allocate("weights", 16, torch.float32)
    assert tensor.isnan().all()

    tensor.fill_(1.0)
    device.poison(device.compute, tensor)
    device.close()

    assert tensor.isnan().all()


def test_packed_bytes_are_poisoned_too() -> None:
    device = HostDevice(num_threads=1, poison_on_free=True)
    tensor = device.allocate("weights", 16, torch.uint8)
    assert tensor.eq(255).all()

    tensor.zero_()
    device.poison(device.compute, tensor)
    device.close()

    assert tensor.eq(255).all()


def test_workspace_is_measured_once_and_charged_ever_after(device: HostDevice) -> None:
    weight = device.allocate("weights", 100, torch.float32).fill_(1.0)

    def keep() -> None:
        leaf = weight.detach().requires_grad_()
        with device.workspace("square"):
            # Saves its own input (400 bytes); what the arena owns is not counted again.
            torch.autograd.backward(((leaf * 2.0) ** 2).sum())

    keep()
    assert device.peak_bytes()["workspace"] == 400
    with device.workspace("square"):
        assert device.arena.held_bytes()["workspace"] == 400
    assert device.arena.held_bytes()["workspace"] == 0


def test_copies_of_one_direction_share_the_emulated_link() -> None:
    device = HostDevice(num_threads=1, link_bytes_per_s=4e6)
    up, down, _ = device.hops()
    on_host, on_device = torch.ones(4, 50_000), torch.zeros(4, 50_000)
    start_s = time.monotonic()

    device.upload(on_host[0], on_device[0])
    device.upload(on_host[1], on_device[1], queue=up)
    device.download(on_device[2], on_host[2])
    device.download(on_device[3], on_host[3], queue=down)
    device.drain()

    # Each takes 0.05 s.
    assert time.monotonic() - start_s >= 0.1
    use = device.take_use()
    assert use.h2d.bytes == use.d2h.bytes == 400_000
    assert use.h2d.busy_s >= 0.1 and use.d2h.busy_s >= 0.1
    device.close()
