"""Several jobs on one device: a trainer whose memory on it is freed between steps, while another one steps, has the
bits of one alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.cpu_runtime import CpuRuntime
from tests.support.further import further
from torch import Tensor

from horizon_server.engine.device.cuda import CudaDevice
from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.micro_batch import MicroBatch
from horizon_server.errors import DoesNotFit

if TYPE_CHECKING:
    from tests.support.tiny_models import Engine, Run, TinyModel

Pack = Callable[[list[Tensor]], MicroBatch]
Trained = tuple[list[float], dict[str, Tensor]]
PLANES = ("hi", "lo", "exp_avg", "exp_avg_sq")
NUM_STEPS = 3
# What is kept on the device from step to step, and what leaves it in a step.
KEPT: dict[str, Any] = {"resident_layers": 1}
OFFLOADED: dict[str, Any] = {"activation_placement": "host", "tokens_per_step": 64}


class Taker:
    """One job: its trainer and the steps that it has taken."""

    def __init__(
        self, run: Run, documents: Callable[..., list[Tensor]], pack: Pack, *, seed: int, release: bool = False
    ) -> None:
        self.run, self._documents, self._pack, self._seed, self._release = run, documents, pack, seed, release
        self.numbers: list[float] = []

    def step(self, number: int) -> None:
        """A step and an evaluation, each of which is a boundary."""
        seed = self._seed + number
        rows = [self._pack(self._documents(12, 7, seed=seed)), self._pack(self._documents(21, seed=seed + 50))]
        figures = self.run.trainer.train_step(rows)
        assert figures.skipped == ""
        self._boundary()
        evaluated = self.run.trainer.evaluate(rows)
        self._boundary()
        self.numbers += [figures.loss, figures.grad_norm, evaluated.eval_loss]

    def trained(self) -> Trained:
        self.run.trainer.flush()
        return self.numbers, {plane: self.run.store.plane(plane).clone() for plane in PLANES}

    def _boundary(self) -> None:
        if self._release:
            self.run.trainer.release_device()
            assert not any(self.run.device.arena.held_bytes().values())


@pytest.fixture
def job(engine: Engine) -> Callable[..., Taker]:
    def make(
        model: TinyModel, kind: str, *, grad_bytes: int, seed: int = 0, release: bool = False, **options: Any
    ) -> Taker:
        switches: dict[str, Any] = {"poison_on_free": True, "max_delay_s": 0.001, "delay_seed": seed}
        device = (
            CudaDevice(runtime=CpuRuntime(), **switches) if kind == "cuda" else HostDevice(num_threads=1, **switches)
        )
        store = model.store(grad_dtype=device.gradient_dtype if grad_bytes else None)
        options.setdefault("max_grad_norm", 1.0 if grad_bytes else None)
        return Taker(
            engine.start(model, store=store, device=device, **options),
            engine.documents,
            engine.pack,
            seed=seed,
            release=release,
        )

    return make


def assert_same(one: Trained, other: Trained) -> None:
    assert one[0] == other[0]
    for plane in PLANES:
        assert torch.equal(one[1][plane].view(torch.uint8), other[1][plane].view(torch.uint8)), f"plane {plane} differs"


def alone(job: Taker) -> Trained:
    for number in range(NUM_STEPS):
        job.step(number)
    return job.trained()


@pytest.mark.parametrize("release", [False, True], ids=["kept", "released"])
@pytest.mark.parametrize("options", [{}, KEPT | OFFLOADED], ids=["plain", "resident-offloaded"])
@pytest.mark.parametrize("grad_bytes", [4, 0])
@pytest.mark.parametrize(
    ("architecture", "kind"), [("qwen3", "host"), ("qwen3", "cuda"), *further(("gpt2", "host"), ("mixtral", "host"))]
)
def test_two_jobs_in_turn_have_the_bits_of_each_alone(
    architecture: str,
    kind: str,
    grad_bytes: int,
    options: dict[str, Any],
    release: bool,
    engine: Engine,
    job: Callable[..., Taker],
) -> None:
    models = engine.tiny_model(architecture), engine.tiny_model("llama")
    undisturbed = [
        alone(job(model, kind, grad_bytes=grad_bytes, seed=100 * i, **options)) for i, model in enumerate(models)
    ]
    sharing = [
        job(model, kind, grad_bytes=grad_bytes, seed=100 * i, release=release, **options)
        for i, model in enumerate(models)
    ]

    for number in range(NUM_STEPS):
        for each in sharing:
            each.step(number)

    for each, before in zip(sharing, undisturbed, strict=True):
        assert_same(each.trained(), before)


def test_memory_is_freed_while_the_update_still_runs(engine: Engine, job: Callable[..., Taker]) -> None:
    model = engine.tiny_model("qwen3")
    before = alone(job(model, "host", grad_bytes=4))
    one = job(model, "host", grad_bytes=4)
    may_update, released = threading.Event(), one.run.trainer.release_device
    train_step = one.run.trainer.train_step

    def step_and_release(rows: list[MicroBatch]) -> Any:
        may_update.clear()
        # The step's update, which is submitted after this, waits with it.
        one.run.trainer._optimizer.queue.submit(lambda: may_update.wait(240))
        figures = train_step(rows)
        released()
        assert not any(one.run.device.arena.held_bytes().values())
        assert not may_update.is_set()
        may_update.set()
        return figures

    one.run.trainer.train_step = step_and_release  # type: ignore[method-assign, assignment]
    assert_same(alone(one), before)


def test_memory_is_taken_again_as_the_account_had_it(engine: Engine, job: Callable[..., Taker]) -> None:
    one = job(engine.tiny_model("llama"), "cuda", grad_bytes=2, **KEPT, tokens_per_step=64)
    one.step(0)
    before, peak = one.run.device.arena.held_bytes(), one.run.device.arena.peak_bytes()
    device = one.run.device
    assert isinstance(device, CudaDevice)
    runtime = device._runtime
    assert isinstance(runtime, CpuRuntime)
    assert before["gradients"] > 0

    one.run.trainer.release_device()
    one.run.trainer.release_device()
    assert not any(one.run.device.arena.held_bytes().values())
    assert runtime.num_releases == 1, "the driver gets back what the allocator has cached"
    registered = dict(runtime.registered)
    one.step(1)

    assert (one.run.device.arena.held_bytes(), one.run.device.arena.peak_bytes()) == (before, peak)
    assert runtime.registered == registered, "host memory stays pinned"
    one.run.trainer.release_device()
    one.run.trainer.close()
    assert not any(one.run.device.arena.held_bytes().values())


def test_after_a_step_that_does_not_fit_a_smaller_one_still_does(
    engine: Engine,
) -> None:
    roomy = engine.start(engine.tiny_model("llama"), tokens_per_step=40)
    roomy.trainer.train_step([engine.pack(engine.documents(40))])
    limit_bytes = roomy.device.arena.peak_total_bytes
    run = engine.start(
        engine.tiny_model("llama"), device=HostDevice(num_threads=1, limit_bytes=limit_bytes), tokens_per_step=40
    )
    with pytest.raises(DoesNotFit):
        run.trainer.train_step([engine.pack(engine.documents(40, seed=i)) for i in range(20)])
    run.trainer.release_device()
    assert run.trainer.train_step([engine.pack(engine.documents(40))]).skipped == ""


def test_an_evaluation_divides_its_rows_as_before(
    engine: Engine,
    job: Callable[..., Taker],
) -> None:
    """Groups are made by the size of a step, which a trainer without memory must not have forgotten."""
    rows = [engine.pack(engine.documents(20, seed=i)) for i in range(5)]
    losses = []
    for release in (False, True):
        one = job(engine.tiny_model("llama"), "host", grad_bytes=4, tokens_per_step=40)
        if release:
            one.run.trainer.release_device()
        losses.append(one.run.trainer.evaluate(rows).eval_loss)
        assert one.run.device.arena.held_bytes()["activations"] > 0
    assert losses[0] == losses[1]
