"""Steps that are called in parts: the bits of a whole step, and the sum of several calls against plain autograd and
PEFT."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
import torch
from tests.cpu_runtime import CpuRuntime
from tests.golden.test_lora import PeftModel, adapted
from tests.golden.test_trainable import frozen_but
from tests.support.double import check_gradients, check_numbers, check_weights, gradients_of, plain_and_exact, values_of
from tests.support.further import further
from tests.support.plans import settings
from tests.support.tiny_models import Run
from torch import Tensor

from horizon_server.engine.called_trainer import CalledTrainer
from horizon_server.engine.device.cuda import CudaDevice
from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.micro_batch import IGNORED_LABEL, MicroBatch
from horizon_server.engine.objectives import SESSION_LOSSES, Documents, StepObjective
from horizon_server.engine.trainer import Trainer
from horizon_server.errors import DoesNotFit, InvalidData

if TYPE_CHECKING:
    from tests.support.tiny_models import Engine, TinyModel

T = TypeVar("T", bound=Trainer)
Weights = dict[str, Tensor]

LENGTHS = (7, 5, 11, 4)
ADAM: dict[str, Any] = {"learning_rate": 0.01, "betas": (0.9, 0.95), "eps": 1e-7, "weight_decay": 0.1}
WHOLE: dict[str, Any] = {**ADAM, "lr_schedule": "constant"}
"""The recipe of whole steps that are as the calls say."""
OTHERWISE: dict[str, Any] = {"learning_rate": 7.0, "betas": (0.1, 0.2), "eps": 0.1, "lr_schedule": "linear"}
"""A recipe whose optimizer has no part in called steps."""
PLANES = ("hi", "lo", "exp_avg", "exp_avg_sq")
DEVICES: dict[str, Callable[[], HostDevice | CudaDevice]] = {
    "fp32": lambda: HostDevice(num_threads=1),
    "bf16": lambda: HostDevice(num_threads=1, compute_dtype=torch.bfloat16),
    "cuda": lambda: CudaDevice(runtime=CpuRuntime(), max_delay_s=0.0005, poison_on_free=True),
}
MODELS: dict[str, Callable[[Engine, Path], TinyModel]] = {
    "tied": lambda engine, _: engine.tiny_model("qwen3"),
    # The embedding's gradient is rows.
    "untied": lambda engine, _: engine.tiny_model("llama"),
    # Learned positions next to a tied table.
    "positions": lambda engine, _: engine.tiny_model("gpt2"),
    "adapters": lambda engine, folder: adapted(engine.tiny_model("llama"), folder),
    "adapters, tied": lambda engine, folder: adapted(engine.tiny_model("qwen3"), folder),
    "table alone": lambda engine, _: part_of(engine.tiny_model("llama"), r"embed_tokens"),
    "head alone": lambda engine, _: part_of(engine.tiny_model("qwen3"), r"^model\.norm|embed_tokens"),
}


def part_of(model: TinyModel, expression: str) -> TinyModel:
    found = frozen_but(model, expression)
    assert found is not None
    return found


@dataclass(frozen=True, kw_only=True)
class Life(Run):
    """A run, and what its calls have left behind."""

    def planes(self) -> list[Tensor]:
        self.trainer.flush()
        return [self.store.plane(name).clone() for name in PLANES]

    def added_up(self) -> dict[str, Tensor]:
        """The sum of the gradients, by parameter."""
        self.trainer.flush()
        names = [place.name for _, place in self.store.layout.tensors() if place.trained]
        return {name: self.gradient(name).clone() for name in names}


Begin = Callable[..., Life]


@pytest.fixture
def begin() -> Iterator[Begin]:
    """Starts a trainer of either kind on a new store; `device` and settings by name."""
    with ExitStack() as stack:

        def make(
            kind: type[T], model: TinyModel, *, device: HostDevice | CudaDevice | None = None, **given: Any
        ) -> Life:
            device = device or HostDevice(num_threads=1)
            store = model.store()
            options = {"optimizer_threads": 1, "adds_up": kind is CalledTrainer, **given}
            recipe, execution = settings(**{**({} if kind is Trainer else OTHERWISE), **options})
            trainer = kind(model.template, store, device, recipe, execution, num_steps=4)
            stack.callback(device.close)
            stack.callback(trainer.close)
            return Life(trainer=trainer, store=store, device=device)

        yield make


def called(life: Life) -> CalledTrainer:
    assert isinstance(life.trainer, CalledTrainer)
    return life.trainer


def rows_of(seed: int, lengths: Sequence[int] = LENGTHS) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for length in lengths:
        ids = torch.randint(3, 90, (length,), generator=generator)
        labels = torch.cat([ids[1:], torch.tensor([IGNORED_LABEL])])
        labels[:2] = IGNORED_LABEL
        rows.append(
            MicroBatch(
                input_ids_T=ids, position_ids_T=torch.arange(length), labels_T=labels, document_lengths=(length,)
            )
        )
    return rows


def objective_of(rows: list[MicroBatch], loss: str = "cross_entropy") -> StepObjective:
    """With weights and advantages of both signs."""
    num_targets = sum(row.num_targets for row in rows)
    generator = torch.Generator().manual_seed(num_targets)
    given = torch.randn(3, num_targets, generator=generator)
    known = {} if loss == "cross_entropy" else {"recorded_S": given[0] - 4.5, "advantages_S": given[1]}
    return StepObjective(
        objective=SESSION_LOSSES[loss](),
        documents=Documents.of(rows, **known),
        weights_S=given[2] if loss == "cross_entropy" else None,
    )


def call(life: Life, seed: int, *, key: int | None = None, loss: str = "cross_entropy") -> float:
    rows = rows_of(seed)
    return called(life).accumulate(rows, objective_of(rows, loss), key=seed if key is None else key).loss


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def plain_loss(model: Any, rows: list[MicroBatch]) -> Tensor:
    """The sum of - w log p, each document alone."""
    weights = objective_of(rows).weights_S
    assert weights is not None
    total = torch.zeros(())
    for row, own in zip(rows, torch.split(weights, [row.num_targets for row in rows]), strict=True):
        logits_TV = model(input_ids=row.input_ids_T[None], use_cache=False).logits[0]
        kept = row.labels_T != IGNORED_LABEL
        logprobs_TV = torch.log_softmax(logits_TV.float(), -1)[kept]
        total = total - (logprobs_TV.gather(1, row.labels_T[kept][:, None])[:, 0] * own).sum()
    return total


@pytest.mark.parametrize("max_grad_norm", [0.5, None])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_a_step_in_two_calls_has_the_bits_of_a_whole_one(
    name: str, device: str, max_grad_norm: float | None, engine: Engine, begin: Begin, tmp_path: Path
) -> None:
    model = MODELS[name](engine, tmp_path)
    whole = begin(Trainer, model, device=DEVICES[device](), max_grad_norm=max_grad_norm, **WHOLE)
    parts = begin(CalledTrainer, model, device=DEVICES[device]())
    for step in range(3):
        rows = rows_of(step)
        figures = whole.trainer.train_step(rows, objective_of(rows))
        loss = call(parts, step)
        applied = called(parts).apply(**ADAM, max_grad_norm=max_grad_norm)
        assert (loss, applied.loss, applied.grad_norm) == (figures.loss, figures.loss, figures.grad_norm)
        assert (applied.step, applied.num_tokens, applied.learning_rate) == (step + 1, sum(LENGTHS), 0.01)
    assert same(whole.planes(), parts.planes())


@pytest.mark.parametrize("loss", sorted(SESSION_LOSSES))
@pytest.mark.parametrize("name", ["untied", *further("tied")])
def test_so_has_one_of_every_loss(name: str, loss: str, engine: Engine, begin: Begin, tmp_path: Path) -> None:
    model = MODELS[name](engine, tmp_path)
    whole = begin(Trainer, model, max_grad_norm=0.5, head_chunk_tokens=5, **WHOLE)
    parts = begin(CalledTrainer, model, head_chunk_tokens=5)
    for step in range(3):
        rows = rows_of(step)
        figures = whole.trainer.train_step(rows, objective_of(rows, loss))
        computed = called(parts).accumulate(rows, objective_of(rows, loss), key=step)
        applied = called(parts).apply(**ADAM, max_grad_norm=0.5)
        assert (computed.loss, applied.grad_norm) == (figures.loss, figures.grad_norm)
        assert computed.figures == figures.method_figures
    assert same(whole.planes(), parts.planes())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_added_in_fp32_in_the_order_of_the_calls(
    name: str, device: str, engine: Engine, begin: Begin, tmp_path: Path
) -> None:
    model = MODELS[name](engine, tmp_path)
    expected: dict[str, Tensor] = {}
    for seed in range(3):
        alone = begin(CalledTrainer, model, device=DEVICES[device]())
        call(alone, seed)
        expected = {n: expected[n] + g if expected else g for n, g in alone.added_up().items()}
    parts = begin(CalledTrainer, model, device=DEVICES[device]())
    for seed in range(3):
        call(parts, seed)
    found = parts.added_up()
    assert all(torch.equal(found[parameter], expected[parameter]) for parameter in expected)
    # What is added to is of the calls since the last step alone.
    called(parts).apply(**{**ADAM, "learning_rate": 0.0}, max_grad_norm=None)
    call(parts, 0)
    first = parts.added_up()
    call(begun := begin(CalledTrainer, model, device=DEVICES[device]()), 0)
    assert all(torch.equal(first[parameter], gradient) for parameter, gradient in begun.added_up().items())


Steps = tuple[list[float], Weights, Weights]
"""The losses of all calls and the norms of all steps; the gradients of the first step; the trained weights."""
NUM_STEPS, NUM_CALLS = 2, 3


def plain_steps(model: Any, parameters: Mapping[str, Tensor], gradients: Callable[[], Weights]) -> Steps:
    """Calls and steps by plain autograd, which adds up gradients too."""
    groups = [
        {"params": [p for p in parameters.values() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=0.01, betas=(0.9, 0.95), eps=1e-7)
    numbers: list[float] = []
    first: Weights = {}
    for step in range(NUM_STEPS):
        for number in range(NUM_CALLS):
            loss = plain_loss(model, rows_of(NUM_CALLS * step + number))
            torch.autograd.backward(loss)
            numbers.append(loss.item())
        first = first or gradients()
        numbers.append(float(torch.nn.utils.clip_grad_norm_(parameters.values(), 0.7)))
        optimizer.step()
        optimizer.zero_grad()
    return numbers, first, {name: parameter.detach().clone() for name, parameter in parameters.items()}


def called_steps(life: Life, values: Callable[[], Weights]) -> Steps:
    numbers: list[float] = []
    first: Weights = {}
    for step in range(NUM_STEPS):
        numbers += [call(life, NUM_CALLS * step + number) for number in range(NUM_CALLS)]
        first = first or life.added_up()
        numbers.append(called(life).apply(**ADAM, max_grad_norm=0.7).grad_norm)
    life.trainer.flush()
    return numbers, first, values()


def check_steps(ours: Steps, plain: Steps, exact: Steps) -> None:
    check_numbers(ours[0], plain[0], exact[0], "losses and norms")
    check_gradients(ours[1], plain[1], exact[1])
    check_weights(ours[2], plain[2], exact[2])


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gpt2", *further("gemma2", "qwen3_moe", "opt")])
def test_several_calls_and_a_step_are_those_of_plain_autograd(architecture: str, engine: Engine, begin: Begin) -> None:
    model = engine.tiny_model(architecture)
    life = begin(CalledTrainer, model)

    def plainly(plain: torch.nn.Module) -> Steps:
        numbers, first, _ = plain_steps(
            plain, dict(plain.named_parameters()), lambda: {n: g.clone() for n, g in gradients_of(plain).items()}
        )
        return numbers, first, values_of(plain)

    def values() -> Weights:
        return {name: exact_of(life, name) for name in model.weights}

    check_steps(called_steps(life, values), *plain_and_exact(model.reference, plainly))


@pytest.mark.parametrize("architecture", ["llama", *further("gpt2", "qwen3_moe")])
def test_several_calls_and_a_step_of_adapters_are_those_of_peft(
    architecture: str, engine: Engine, begin: Begin, tmp_path: Path
) -> None:
    model = adapted(engine.tiny_model(architecture), tmp_path)
    layout = model.template.layout
    life = begin(CalledTrainer, model, adapter_scale=1.5)

    def plainly(peft: PeftModel) -> Steps:
        return plain_steps(
            peft.model, peft.parameters, lambda: {name: g.clone() for name, g in peft.gradients().items()}
        )

    def values() -> Weights:
        return {place.name: exact_of(life, place.name) for _, place in layout.tensors() if place.adapts}

    reference = partial(PeftModel, model, layout, model.weights)
    check_steps(called_steps(life, values), *plain_and_exact(reference, plainly))


def exact_of(life: Life, name: str) -> Tensor:
    unit, place = life.store.layout.find(name)
    part = slice(place.offset, place.offset + place.num_elements)
    return life.store.exact(unit.index, lambda flat: flat[part].view(place.shape))


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_nothing_that_changes_memory_or_time_changes_a_bit(
    name: str, engine: Engine, begin: Begin, tmp_path: Path
) -> None:
    model = MODELS[name](engine, tmp_path)
    found = []
    choices: list[dict[str, Any]] = [
        {},
        {"optimizer_threads": 3},
        {"activation_placement": "host", "num_gradient_slots": 1, "num_weight_slots": 1},
        {"resident_layers": 2, "num_gradient_slots": 4},
        {"released": True},
    ]
    for number, options in enumerate(choices):
        released = options.pop("released", False)
        device = HostDevice(num_threads=1, max_delay_s=0.001, delay_seed=number, poison_on_free=True)
        life = begin(CalledTrainer, model, device=device, **options)
        norms = []
        for step in range(3):
            for seed in range(step, 3 + step):
                call(life, seed)
                if released:
                    life.trainer.release_device()
            norms.append(called(life).apply(**ADAM, max_grad_norm=0.5).grad_norm)
        found.append((norms, life.planes()))
    for norms, planes in found[1:]:
        assert norms == found[0][0]
        assert same(planes, found[0][1])


def test_a_forward_pass_between_calls_changes_nothing(engine: Engine, begin: Begin) -> None:
    model = engine.tiny_model("llama")
    with_forward, without = (begin(CalledTrainer, model) for _ in range(2))
    for seed in range(2):
        rows = rows_of(seed)
        computed = called(with_forward).accumulate(rows, objective_of(rows), key=seed)
        forward = called(with_forward).forward(rows, objective_of(rows))
        assert forward.loss == pytest.approx(computed.loss, rel=1e-6)
        assert [own.shape for own in forward.logprobs] == [(row.num_targets,) for row in rows]
        for one, other in zip(forward.logprobs, computed.logprobs, strict=True):
            assert torch.allclose(one, other, rtol=0, atol=1e-5)
        call(without, seed)
    for life in (with_forward, without):
        called(life).apply(**ADAM, max_grad_norm=0.5)
    assert same(with_forward.planes(), without.planes())


@pytest.mark.parametrize("loss", ["cross_entropy", "ppo"])
def test_label_smoothing_is_not_of_a_sum(loss: str, engine: Engine, begin: Begin) -> None:
    model = engine.tiny_model("llama")
    losses = [call(begin(CalledTrainer, model, label_smoothing=share), 0, loss=loss) for share in (0.0, 0.3)]
    assert losses[0] == losses[1]


def test_the_key_of_a_call_decides_what_dropout_draws(engine: Engine, begin: Begin, tmp_path: Path) -> None:
    model = adapted(engine.tiny_model("llama"), tmp_path)
    # The same rows, twice under each name.
    losses = [call(begin(CalledTrainer, model, adapter_dropout=0.4), 0, key=key) for key in (3, 3, 4)]
    assert losses[0] == losses[1] != losses[2]
    life = begin(CalledTrainer, model, adapter_dropout=0.4)
    assert [call(life, 0, key=key) for key in (3, 4)] == losses[1:]


def test_a_step_without_gradients_is_refused(engine: Engine, begin: Begin) -> None:
    life = begin(CalledTrainer, engine.tiny_model("llama"))
    before = life.planes()
    for _ in range(2):
        with pytest.raises(InvalidData, match="has no gradients to make a step with; call forward_backward before it"):
            called(life).apply(**ADAM, max_grad_norm=None)
        assert same(before, life.planes())
        call(life, 0)
        called(life).apply(**{**ADAM, "learning_rate": 0.0}, max_grad_norm=None)
        before = life.planes()


def test_data_that_is_refused_leaves_the_gradients_as_they_are(engine: Engine, begin: Begin) -> None:
    model = engine.tiny_model("llama")
    plain, refused = (begin(CalledTrainer, model) for _ in range(2))
    for life in (plain, refused):
        call(life, 0)
    rows = rows_of(1)
    wrong = rows_of(2)[:2]
    with pytest.raises(InvalidData, match="are not those of the rows"):
        called(refused).accumulate(rows, objective_of(wrong), key=1)
    with pytest.raises(InvalidData, match="are not those of the rows"):
        called(refused).forward(rows, objective_of(wrong))
    for life in (plain, refused):
        call(life, 1)
        called(life).apply(**ADAM, max_grad_norm=None)
    assert same(plain.planes(), refused.planes())


@pytest.mark.parametrize("wild", [0, 1, 2])
@pytest.mark.parametrize("name", ["tied", "untied"])
def test_a_step_whose_gradient_is_not_finite_in_any_call_changes_nothing(
    name: str, wild: int, engine: Engine, begin: Begin, tmp_path: Path
) -> None:
    model = MODELS[name](engine, tmp_path)
    life, calm = begin(CalledTrainer, model), begin(CalledTrainer, model)
    before = life.planes()
    for number in range(3):
        rows = rows_of(number)
        num_targets = sum(row.num_targets for row in rows)
        recorded = torch.full((num_targets,), -1e4 if number == wild else 0.0)
        given = Documents.of(rows, recorded_S=recorded, advantages_S=torch.ones(num_targets))
        objective = StepObjective(objective=SESSION_LOSSES["importance_sampling"](), documents=given)
        called(life).accumulate(rows, objective, key=number)
    figures = called(life).apply(**ADAM, max_grad_norm=1.0)
    assert figures.skipped == "non_finite_gradient"
    assert same(before, life.planes())
    # The next step is as the first one: bias correction counts updates.
    for one in (life, calm):
        call(one, 7)
        assert not called(one).apply(**ADAM, max_grad_norm=1.0).skipped
    assert same(life.planes(), calm.planes())
    assert (life.trainer.step, calm.trainer.step) == (2, 1)


def test_after_a_call_that_does_not_fit_gradients_begin_anew(engine: Engine, begin: Begin) -> None:
    model = engine.tiny_model("llama")
    roomy = begin(CalledTrainer, model)
    call(roomy, 0)
    device = HostDevice(num_threads=1, limit_bytes=roomy.device.arena.peak_total_bytes)
    life = begin(CalledTrainer, model, device=device)
    call(life, 0)
    large = rows_of(1, [60] * 40)
    with pytest.raises(DoesNotFit, match="activations needs"):
        called(life).accumulate(large, objective_of(large), key=1)
    with pytest.raises(InvalidData, match="has no gradients"):
        called(life).apply(**ADAM, max_grad_norm=None)


def test_other_weights_come_without_gradients(engine: Engine, begin: Begin) -> None:
    model = engine.tiny_model("llama")
    life, fresh = begin(CalledTrainer, model), begin(CalledTrainer, model)
    call(life, 0)
    called(life).apply(**ADAM, max_grad_norm=None)
    call(life, 1)

    def write() -> None:
        for name, weight in model.weights.items():
            life.store.write_master(name, weight)
        for plane in ("exp_avg", "exp_avg_sq"):
            life.store.plane(plane).zero_()

    called(life).reload(write)
    assert life.trainer.step == 2
    for one in (life, fresh):
        call(one, 2)
        called(one).apply(**ADAM, max_grad_norm=None)
    assert same(life.planes(), fresh.planes())


def test_the_figures_of_a_step_are_of_all_its_calls(engine: Engine, begin: Begin) -> None:
    life = begin(CalledTrainer, engine.tiny_model("llama"))
    found, sizes = [], []
    for seed, lengths in enumerate([(9, 4), (30,), (5,)]):
        rows = rows_of(seed, lengths)
        found.append(called(life).accumulate(rows, objective_of(rows, "ppo"), key=seed))
        sizes.append(sum(row.num_targets for row in rows))
    rows = rows_of(3)
    plain = called(life).accumulate(rows, objective_of(rows), key=3)
    assert plain.figures == {}
    applied = called(life).apply(**ADAM, max_grad_norm=None)
    assert applied.num_tokens == 9 + 4 + 30 + 5 + sum(LENGTHS)
    assert applied.loss == pytest.approx(sum(one.loss for one in [*found, plain]), rel=1e-12)
    for name, value in applied.method_figures.items():
        mean = sum(one.figures[name] * size for one, size in zip(found, sizes, strict=True)) / sum(sizes)
        assert value == pytest.approx(mean, rel=1e-12)
    assert set(applied.method_figures) == set(found[0].figures) >= {"ratio", "kl_recorded", "clip_ratio/region_mean"}


def test_the_state_that_is_kept_with_the_weights_is_that_of_the_step(engine: Engine, begin: Begin) -> None:
    life = begin(CalledTrainer, engine.tiny_model("llama"))
    life.store.generations.reset()
    kept = itertools.count()
    life.trainer.on_update = lambda figures, state: f"{next(kept)} {figures.step} {state['num_updates']}"
    for step in range(2):
        call(life, step)
        call(life, step + 5)
        called(life).apply(**ADAM, max_grad_norm=None)
        life.trainer.flush()
        assert life.store.generations.generation == step + 1
    assert next(kept) == 2
