"""Whole runs with compressed optimizer states against plain PyTorch that compresses them in its own way."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.support.tiny_models import compressed
from torch import Tensor

from horizon_server.engine.micro_batch import MicroBatch
from horizon_server.store.layout import PLANE_BYTES
from horizon_server.store.reference import dither_of

if TYPE_CHECKING:
    from tests.support.tiny_models import Engine, TinyModel

NUM_STEPS = 12


@pytest.fixture
def step_rows(engine: Engine) -> Callable[[int], list[MicroBatch]]:
    """Step -> its micro-batches, the same tokens again every five steps."""

    def rows(step: int) -> list[MicroBatch]:
        four = engine.documents(11, 20, 16, 9, seed=step % 5)
        return [engine.pack(four[:2]), engine.pack(four[2:])]

    return rows


class CompressedAdamW:
    """AdamW as torch.optim.AdamW has it, with states of some parameters that are rounded after each step: to a number
    of codes for each group of 32 elements, with a scale in bfloat16, and to weights of 24 bits."""

    def __init__(self, groups: list[dict[str, Any]], compressed: set[Tensor], *, lr: float, betas: tuple[float, float]):
        self._groups, self._compressed, self._lr, self._betas = groups, compressed, lr, betas
        self._moments: dict[Tensor, tuple[Tensor, Tensor]] = {}
        self._step = 0

    @torch.no_grad()
    def step(self) -> None:
        self._step += 1
        (beta1, beta2), step = self._betas, self._step
        dither = torch.from_numpy(dither_of(step))
        most = (1 - beta1) * math.sqrt(math.fsum((beta1**2 / beta2) ** i for i in range(step)) / (1 - beta2))
        for group in self._groups:
            for weight in group["params"]:
                assert weight.grad is not None
                first, second = self._moments.get(weight, (torch.zeros_like(weight), torch.zeros_like(weight)))
                first = beta1 * first + (1 - beta1) * weight.grad
                second = beta2 * second + (1 - beta2) * weight.grad**2
                if weight in self._compressed:
                    first = torch.clamp(first, -most * second.sqrt(), most * second.sqrt())
                denominator = (second / (1 - beta2**step)).sqrt() + 1e-8
                weight *= 1 - self._lr * group["weight_decay"]
                weight -= self._lr * first / (1 - beta1**step) / denominator
                if weight in self._compressed:
                    bits = weight.view(torch.int32)
                    weight.copy_(((bits + 128) & ~255).view(torch.float32))
                    first, second = rounded_first(first, dither[:32]), rounded_root(second.sqrt(), dither[32:]) ** 2
                self._moments[weight] = first, second


def in_groups(values: Tensor) -> Tensor:
    return torch.nn.functional.pad(values.flatten(), (0, -values.numel() % 32)).view(-1, 32)


def scales_of(groups: Tensor) -> Tensor:
    """The largest magnitude of each group, as the bfloat16 number that is not below it."""
    largest = groups.abs().amax(1, keepdim=True)
    near = largest.bfloat16().float()
    return torch.where(near < largest, (near.view(torch.int32) + 65536).view(torch.float32), near)


def rounded_first(first: Tensor, dither: Tensor) -> Tensor:
    groups = in_groups(first)
    scale = scales_of(groups)
    share = groups / scale
    code = torch.floor(127 * 2 * share / (1 + share.abs()) + dither).nan_to_num().clamp(-127, 127) / 127
    return (code / (2 - code.abs()) * scale).flatten()[: first.numel()].view_as(first)


def rounded_root(root: Tensor, dither: Tensor) -> Tensor:
    groups = in_groups(root)
    scale = scales_of(groups)
    steps = torch.floor(255 * groups / scale + dither).nan_to_num().clamp(max=255)
    return (torch.where(groups > 0, steps.clamp(min=1), 0) / 255 * scale).flatten()[: root.numel()].view_as(root)


def plain_losses(
    model: TinyModel,
    step_rows: Callable[[int], list[MicroBatch]],
    plain_loss: Callable[..., Tensor],
    *,
    is_compressed: bool,
) -> tuple[list[float], dict[str, Tensor]]:
    reference = model.reference()
    places = {tensor.name: tensor for _, tensor in model.template.layout.tensors()}
    named = dict(reference.named_parameters())
    groups = [
        {"params": [p for n, p in named.items() if places[n].decay == decays], "weight_decay": 0.1 * decays}
        for decays in (True, False)
    ]
    chosen: set[Tensor] = {p for n, p in named.items() if places[n].compressed and is_compressed}
    optimizer = CompressedAdamW(groups, chosen, lr=1e-3, betas=(0.9, 0.99))
    losses = []
    for step in range(NUM_STEPS):
        rows = step_rows(step)
        loss = sum((plain_loss(reference, row) for row in rows), torch.zeros(())) / sum(r.num_targets for r in rows)
        reference.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: parameter.detach() for name, parameter in named.items()}


@pytest.mark.parametrize("updates_in_backward", [False, True])
@pytest.mark.parametrize("architecture", ["qwen3", "llama", "mixtral"])
def test_twelve_steps_follow_a_plain_loop(
    architecture: str,
    updates_in_backward: bool,
    engine: Engine,
    step_rows: Callable[[int], list[MicroBatch]],
) -> None:
    model = compressed(engine.tiny_model(architecture))
    wanted, weights = plain_losses(model, step_rows, engine.plain_loss, is_compressed=True)
    exact, _ = plain_losses(model, step_rows, engine.plain_loss, is_compressed=False)
    run = engine.start(
        model,
        store=model.store(grad_dtype=None if updates_in_backward else torch.float32),
        learning_rate=1e-3,
        lr_schedule="constant",
        betas=(0.9, 0.99),
        weight_decay=0.1,
        max_grad_norm=None,
    )

    losses = [run.trainer.train_step(step_rows(step)).loss for step in range(NUM_STEPS)]
    run.trainer.flush()

    # A gradient's last bits decide here and there which of two codes a moment gets.
    distances = [abs(ours - theirs) for ours, theirs in zip(losses, wanted, strict=True)]
    assert max(distances) < 3e-5
    of_exact = [abs(ours - theirs) for ours, theirs in zip(losses, exact, strict=True)]
    assert sum(distances) < 0.3 * sum(of_exact)
    assert losses[-1] < losses[0]
    for name, weight in weights.items():
        unit, place = model.template.layout.find(name)
        master = torch.empty(unit.num_elements)
        run.store.merge_master(unit.index, master)
        ours = master[place.offset : place.offset + place.num_elements].view(place.shape)
        # All weights together have moved by up to 12 * 1e-3.
        assert (ours - weight).abs().mean() < 1e-5, name


@pytest.mark.parametrize("architecture", ["llama", "mixtral"])
def test_what_is_compressed_and_what_is_not(architecture: str, engine: Engine) -> None:
    model = compressed(engine.tiny_model(architecture), smallest=600)
    for unit, place in model.template.layout.tensors():
        is_matrix = len(place.shape) > 1 and unit.kind != "embedding"
        assert place.compressed == (is_matrix and place.num_elements >= 600), place.name
    store = model.store()
    # Everything is in one plane of each kind, and nothing in two.
    for planes in (("lo", "lo8"), ("exp_avg", "exp_avg8"), ("exp_avg_sq", "root8")):
        held = [
            (unit.held_in(plane).start, unit.held_in(plane).stop) for unit in store.layout.units for plane in planes
        ]
        assert sum(stop - start for start, stop in held) == store.layout.num_elements
    assert set(store.fds) == {*PLANE_BYTES, "grad"}
