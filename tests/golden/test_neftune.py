"""NEFTune: gradients against plain autograd with the same noise, and which noise that is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.cpu_runtime import CpuRuntime
from tests.support.double import check_gradients, check_numbers, gradients_of, plain_and_exact
from torch import Tensor

from horizon_server.engine.device.cuda import CudaDevice
from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.embedding_noise import NOISE
from horizon_server.engine.micro_batch import MicroBatch
from horizon_server.engine.step_pass import StepKey

if TYPE_CHECKING:
    from tests.support.tiny_models import Engine, Run

Pack = Callable[[list[Tensor]], MicroBatch]
ALPHA, SEED = 5.0, 11
PLANES = ("hi", "lo", "exp_avg", "exp_avg_sq")


def noise_of(key: StepKey, index: int, lengths: Sequence[int], width: int) -> list[Tensor]:
    """The noise of each document of a micro-batch."""
    torch.manual_seed(key.seed_of(NOISE, index))
    drawn = torch.empty(sum(lengths), width).uniform_(-1.0, 1.0)
    return [ALPHA / math.sqrt(len(part) * width) * part for part in torch.split(drawn, list(lengths))]


# What follows the table: nothing; a factor in the model, or in the table's module; learned positions; a norm, whose
# gradient depends on the noise. The tables of gemma and qwen3 are the projection too.
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2", "gemma3_text", "gpt2", "bloom"])
def test_gradients_are_those_of_plain_autograd_with_the_same_noise(
    architecture: str,
    engine: Engine,
) -> None:
    model = engine.tiny_model(architecture)
    batches = [engine.documents(14, 22), engine.documents(25, seed=3)]
    rows = [engine.pack(batch) for batch in batches]
    run = engine.start(model, seed=SEED, neftune_noise_alpha=ALPHA)

    report = run.trainer.train_step(rows)

    if not run.trainer.supports_packing:
        batches = [[document] for batch in batches for document in batch]
    num_targets = sum(row.num_targets for row in rows)
    width = model.config.hidden_size
    # Drawn here, because a generator gives other numbers in float64.
    noises = [
        noise_of(StepKey(seed=SEED, step=0), index, [document.numel() for document in batch], width)
        for index, batch in enumerate(batches)
    ]

    def autograd(reference: Any) -> tuple[float, dict[str, Tensor]]:
        added: list[Tensor] = []
        reference.get_input_embeddings().register_forward_hook(lambda module, inputs, output: output + added[0])
        loss = 0.0
        for batch, noise in zip(batches, noises, strict=True):
            for document, own in zip(batch, noise, strict=True):
                added[:] = [own]
                part = engine.plain_loss(reference, engine.pack([document])) / num_targets
                torch.autograd.backward(part)
                loss += part.item()
        return loss, gradients_of(reference)

    plain, exact = plain_and_exact(model.reference, autograd)
    check_numbers(report.loss, plain[0], exact[0])
    assert report.loss != pytest.approx(engine.start(model).trainer.train_step(rows).loss, rel=1e-5)
    check_gradients({name: run.gradient(name) for name in exact[1]}, plain[1], exact[1])


def test_the_noise_is_as_strong_as_that_of_transformers() -> None:
    """Its hook draws from -mag to mag, mag = alpha / sqrt(L * D), for a row of one document."""
    (noise,) = noise_of(StepKey(seed=1, step=0), 0, [400], 64)

    highest = ALPHA / math.sqrt(400 * 64)
    assert 0.999 * highest < float(noise.abs().max()) <= highest
    assert float(noise.std()) == pytest.approx(highest / math.sqrt(3), rel=0.02)
    assert abs(float(noise.mean())) < 0.01 * highest


def test_an_evaluation_has_no_noise(engine: Engine) -> None:
    rows = [engine.pack(engine.documents(14, 22))]
    noisy, plain = (
        engine.start(engine.tiny_model("llama"), neftune_noise_alpha=ALPHA).trainer,
        engine.start(engine.tiny_model("llama")).trainer,
    )

    assert noisy.evaluate(rows).eval_loss == plain.evaluate(rows).eval_loss
    assert noisy.train_step(rows).loss != plain.train_step(rows).loss


@pytest.mark.parametrize("device", ["host", "cuda"])
def test_a_resumed_run_draws_the_same_noise(
    device: str,
    engine: Engine,
) -> None:
    model, rows = (
        engine.tiny_model("llama"),
        [engine.pack(engine.documents(14, 22)), engine.pack(engine.documents(25, seed=3))],
    )

    def begin(**options: Any) -> Run:
        made = HostDevice(num_threads=1) if device == "host" else CudaDevice(runtime=CpuRuntime())
        return engine.start(model, device=made, seed=SEED, neftune_noise_alpha=ALPHA, **options)

    straight, first = begin(), begin(activation_placement="host")
    losses = [straight.trainer.train_step(rows).loss for _ in range(4)]
    assert [first.trainer.train_step(rows).loss for _ in range(2)] == losses[:2]
    state, store = first.trainer.state(), model.store()
    for plane in PLANES:
        store.plane(plane).copy_(first.store.plane(plane))
    resumed = begin(store=store)
    resumed.trainer.restore(state)
    assert [resumed.trainer.train_step(rows).loss for _ in range(2)] == losses[2:]
    for run in (straight, resumed):
        run.trainer.flush()
        for plane in PLANES:
            assert torch.equal(run.store.plane(plane), straight.store.plane(plane)), f"plane {plane} differs"


def test_every_step_and_seed_draws_other_noise(engine: Engine) -> None:
    rows = [engine.pack(engine.documents(14, 22))]
    one, other = (
        engine.start(engine.tiny_model("llama"), seed=seed, learning_rate=0.0, neftune_noise_alpha=ALPHA)
        for seed in (1, 2)
    )
    losses = [one.trainer.train_step(rows).loss for _ in range(3)]
    assert len({*losses, other.trainer.train_step(rows).loss}) == 4
