"""The ends of a step: what the first layer and the table wait for, what crosses the link there, and that no bit depends
on it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.cpu_runtime import CpuRuntime
from torch import Tensor

from horizon_server.engine import forward_backward, optimizer
from horizon_server.engine.device.cuda import CudaDevice
from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.device.timeline import Trace
from horizon_server.engine.micro_batch import MicroBatch
from horizon_server.engine.optimizer import clip_coefficient
from horizon_server.store.adamw import AdamWStep, RowGradient, update_rows, update_unit
from horizon_server.store.host_store import HostStore

if TYPE_CHECKING:
    from tests.support.tiny_models import Engine, Run

Pack = Callable[[list[Tensor]], MicroBatch]
PLANES = ("hi", "lo", "exp_avg", "exp_avg_sq")
WAIT_S = 240


class NotingDevice(HostDevice):
    """Says when a unit, or the rows of the embedding, have been copied to the device."""

    def __init__(self, **options: Any) -> None:
        super().__init__(num_threads=1, **options)
        self.copied: dict[str, threading.Event] = {}

    def upload_unit(self, store: HostStore, index: int, out: Tensor, **how: Any) -> None:
        super().upload_unit(store, index, out, **how)
        self.h2d.submit(self.copied.setdefault(f"unit {index}", threading.Event()).set)

    def upload_rows(self, store: HostStore, name: str, rows_R: Tensor, out_RD: Tensor) -> None:
        super().upload_rows(store, name, rows_R, out_RD)
        self.h2d.submit(self.copied.setdefault("rows", threading.Event()).set)

    def start_noting(self, *names: str) -> None:
        self.copied = {name: threading.Event() for name in names}


class SlowUpdates:
    """Stands before the store's own updates and lets some of them begin only when the test says so."""

    def __init__(self) -> None:
        self.may_begin = threading.Event()
        self.may_begin.set()
        self.holds_unit: Callable[[int], bool] = lambda unit_index: False
        self.holds_rows: Callable[[Tensor], bool] = lambda rows: False
        self.rows: list[Tensor] = []

    def unit(self, store: HostStore, unit_index: int, *args: Any, **options: Any) -> None:
        assert not self.holds_unit(unit_index) or self.may_begin.wait(WAIT_S)
        update_unit(store, unit_index, *args, **options)

    def table(
        self, store: HostStore, name: str, hyper: AdamWStep, gradient: RowGradient, rows: Tensor, **_: Any
    ) -> None:
        assert not self.holds_rows(rows) or self.may_begin.wait(WAIT_S)
        self.rows.append(rows)
        update_rows(store, name, hyper, gradient, rows, num_threads=1)


@pytest.fixture
def updates(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowUpdates]:
    updates = SlowUpdates()
    monkeypatch.setattr(optimizer, "update_unit", updates.unit)
    monkeypatch.setattr(optimizer, "update_rows", updates.table)
    yield updates
    updates.may_begin.set()


def rows_of(step: int, documents: Callable[..., list[Tensor]], pack: Pack) -> list[MicroBatch]:
    return [pack(documents(12, 7, seed=step)), pack(documents(9 + 20 * step, seed=step + 50))]


def planes_of(run: Run) -> dict[str, Tensor]:
    run.trainer.flush()
    return {plane: run.store.plane(plane).clone() for plane in PLANES}


def assert_same_planes(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    for plane in PLANES:
        assert torch.equal(one[plane].view(torch.uint8), other[plane].view(torch.uint8)), f"plane {plane} differs"


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_the_first_layer_comes_up_while_the_rows_of_the_table_are_still_updated(
    engine: Engine,
    updates: SlowUpdates,
) -> None:
    model, device = engine.tiny_model("llama"), NotingDevice()
    run, undisturbed = engine.start(model, device=device, tokens_per_step=200), engine.start(model)
    for one in (run, undisturbed):
        one.trainer.train_step(rows_of(0, engine.documents, engine.pack))
    updates.may_begin.clear()
    updates.holds_rows = lambda rows: True
    device.start_noting("unit 1", "rows")

    second = in_thread(lambda: run.trainer.train_step(rows_of(1, engine.documents, engine.pack)))

    assert device.copied["unit 1"].wait(WAIT_S)
    assert not device.copied["rows"].is_set()
    updates.may_begin.set()
    second.join(WAIT_S)
    undisturbed.trainer.train_step(rows_of(1, engine.documents, engine.pack))
    assert_same_planes(planes_of(run), planes_of(undisturbed))


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_rows_in_use_wait_for_no_other_update(
    architecture: str,
    engine: Engine,
    updates: SlowUpdates,
) -> None:
    model, device = engine.tiny_model(architecture), NotingDevice()
    run, undisturbed = engine.start(model, device=device, tokens_per_step=200), engine.start(model)
    in_use = torch.unique(torch.cat([row.input_ids_T for row in rows_of(1, engine.documents, engine.pack)]))
    updates.may_begin.clear()
    updates.holds_unit = lambda unit_index: unit_index > 1
    updates.holds_rows = lambda rows: not torch.equal(rows, in_use)
    run.trainer.train_step(rows_of(0, engine.documents, engine.pack))
    device.start_noting("unit 1", "rows", "unit 2")

    second = in_thread(lambda: run.trainer.train_step(rows_of(1, engine.documents, engine.pack)))

    assert device.copied["unit 1"].wait(WAIT_S) and device.copied["rows"].wait(WAIT_S)
    assert not device.copied["unit 2"].is_set()
    updates.may_begin.set()
    second.join(WAIT_S)
    run.trainer.flush()
    first_update = torch.cat(updates.rows[:2])
    assert torch.equal(updates.rows[0], in_use) and torch.equal(first_update.sort()[0], torch.arange(96))
    for step in range(2):
        undisturbed.trainer.train_step(rows_of(step, engine.documents, engine.pack))
    assert_same_planes(planes_of(run), planes_of(undisturbed))


DELAYS: dict[str, Any] = {"poison_on_free": True, "max_delay_s": 0.002}
DEVICES: dict[str, Callable[[Trace | None], HostDevice | CudaDevice]] = {
    "host": lambda trace: HostDevice(num_threads=1, trace=trace, **DELAYS),
    "cuda": lambda trace: CudaDevice(runtime=CpuRuntime(), trace=trace, **DELAYS),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_every_row_gets_the_bits_of_one_dense_update_a_step(
    architecture: str,
    device: str,
    engine: Engine,
) -> None:
    model = engine.tiny_model(architecture, tie_word_embeddings=False)
    run = engine.start(
        model, device=DEVICES[device](None), learning_rate=1e-2, lr_schedule="constant", weight_decay=0.1
    )
    dense = model.store(grad_dtype=None)
    for step in range(4):
        # Steps that grow: the buffer of the rows' gradients does so too, while the last update may still read it.
        report = run.trainer.train_step(rows_of(step, engine.documents, engine.pack))
        hyper = AdamWStep(
            step=step + 1,
            learning_rate=1e-2,
            beta1=0.9,
            beta2=0.999,
            eps=1e-8,
            weight_decay=0.1,
            grad_scale=clip_coefficient(report.grad_norm, 1.0),
        )
        for unit in dense.layout.units:
            grad = torch.zeros(unit.num_elements)
            for tensor in unit.tensors:
                grad[tensor.offset :][: tensor.num_elements] = run.gradient(tensor.name).reshape(-1)
            update_unit(dense, unit.index, hyper, num_threads=1, grad=grad)
        # Evaluation reads other rows than the next step.
        run.trainer.evaluate(
            [engine.pack(engine.documents(30, seed=step + 80)), engine.pack(engine.documents(30, seed=step + 90))]
        )

    assert_same_planes(planes_of(run), {plane: dense.plane(plane) for plane in PLANES})


@pytest.mark.parametrize("updates_in_backward", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_an_evaluation_between_steps_reads_the_updated_rows_and_changes_nothing(
    architecture: str,
    updates_in_backward: bool,
    engine: Engine,
) -> None:
    model = engine.tiny_model(architecture)
    other_rows = [engine.pack(engine.documents(40, seed=77)), engine.pack(engine.documents(31, seed=78))]

    def train(*, flushes: bool, evaluates: bool) -> tuple[list[float], dict[str, Tensor]]:
        store = model.store(grad_dtype=None if updates_in_backward else torch.float32)
        device = DEVICES["host"](None)
        run = engine.start(model, store=store, device=device, max_grad_norm=None, learning_rate=1e-2)
        losses = []
        for step in range(3):
            run.trainer.train_step(rows_of(step, engine.documents, engine.pack))
            if flushes:
                run.trainer.flush()
            if evaluates:
                losses.append(run.trainer.evaluate(other_rows).eval_loss)
        return losses, planes_of(run)

    losses, planes = train(flushes=False, evaluates=True)
    flushed_losses, flushed_planes = train(flushes=True, evaluates=True)

    assert losses == flushed_losses
    assert_same_planes(planes, flushed_planes)
    assert_same_planes(planes, train(flushes=False, evaluates=False)[1])


@pytest.mark.parametrize("kind", DEVICES)
def test_no_more_of_a_large_table_is_kept_or_sent_than_its_rows_in_use(kind: str, engine: Engine) -> None:
    trace, model = Trace(), engine.tiny_model("llama", vocab_size=5000)
    run = engine.start(model, device=DEVICES[kind](trace), tokens_per_step=8)
    table, *_, head = model.template.layout.units
    item_bytes = 4

    run.trainer.train_step([engine.pack([torch.tensor([5, 4000, 5, 17])])])
    report = run.trainer.train_step([engine.pack([torch.tensor([3, 4000, 5, 3])])])

    # Layers and head are stored as before; of the table, 3 rows of 32 came down into a buffer for 8.
    stored = model.template.layout.num_elements - table.num_elements
    assert run.store.plane("grad").numel() == stored
    assert report.host_memory_bytes["staging"] == 8 * 32 * item_bytes + 2 * 6 * 8
    assert report.d2h.bytes == (stored + 3 * 32) * item_bytes
    down = {span.label: span.num_bytes for span in trace.spans() if span.queue == "d2h" and span.num_bytes}
    assert (
        down["gradient 0"] == 3 * 32 * item_bytes and down[f"gradient {head.index}"] == head.num_elements * item_bytes
    )
    # On the device too, only these rows are made zero for the next gradient.
    gradients = run.trainer._sink.open(0, torch.arange(3))
    assert gradients is not None and gradients.lanes[0].flat.numel() == 3 * 32


@pytest.mark.parametrize("num_slots", [1, 2, 3, 7])
@pytest.mark.parametrize("kind", DEVICES)
def test_layers_that_are_in_their_slots_when_backward_begins_are_not_copied_again(
    kind: str,
    num_slots: int,
    engine: Engine,
) -> None:
    trace, num_layers = Trace(), 5
    model = engine.tiny_model("llama", num_hidden_layers=num_layers)
    run = engine.start(model, device=DEVICES[kind](trace), num_weight_slots=num_slots)
    undisturbed = engine.start(model, device=DEVICES[kind](None), num_weight_slots=num_slots % 2 + 1)

    for step in range(2):
        trace.clear()
        report = run.trainer.train_step(rows_of(step, engine.documents, engine.pack))
        assert report.loss == undisturbed.trainer.train_step(rows_of(step, engine.documents, engine.pack)).loss

    copied = [span.label for span in trace.spans() if span.queue == "h2d" and span.label.startswith("unit")]
    once = [f"unit {layer + 1}" for layer in range(num_layers)]
    again = list(reversed(once))[num_slots:]
    assert copied == [*once, f"unit {num_layers + 1}", *again]
    assert_same_planes(planes_of(run), planes_of(undisturbed))


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2", "gpt2"])
def test_the_embedding_adds_up_in_groups_that_do_not_follow_the_micro_batches(
    architecture: str,
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, rows = (
        engine.tiny_model(architecture),
        [engine.pack(engine.documents(length)) for length in (9, 12, 5, 17, 8)],
    )
    at_once, in_groups = engine.start(model), engine.start(model)
    at_once.trainer.train_step(rows)

    monkeypatch.setattr(forward_backward, "EMBEDDING_GRADIENT_TOKENS", 16)
    in_groups.trainer.train_step(rows)

    one, other = at_once.gradients(), in_groups.gradients()
    assert float((one - other).norm() / one.norm()) <= 1e-6
    unit = model.template.layout.units[0]
    for tensor in unit.tensors:
        assert bool(at_once.gradient(tensor.name).any())
