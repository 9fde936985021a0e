"""Steps of every objective against plain autograd of its paper's formula on the same model, all documents apart and in
memory at once.

Shapes: K = documents of the step, S = supervised tokens, T = tokens of a document, V = vocabulary.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.cpu_runtime import CpuRuntime
from tests.support.double import (
    check_gradients,
    check_numbers,
    check_weights,
    gradients_of,
    plain_and_exact,
    values_of,
)
from tests.support.further import further
from tests.support.tiny_models import VOCAB
from tests.support.traced_layers import traced_layers
from torch import Tensor
from torch.nn.functional import logsigmoid

from horizon_server.engine.device.cuda import CudaDevice
from horizon_server.engine.micro_batch import IGNORED_LABEL, MicroBatch
from horizon_server.engine.objectives import (
    DESIRABLE,
    DPO,
    KTO,
    MISMATCHED,
    ORPO,
    UNDESIRABLE,
    Documents,
    Objective,
    PolicyGradient,
    SimPO,
    StepObjective,
    WeightedSFT,
)
from horizon_server.errors import InvalidData
from horizon_server.store.host_store import merge_master

if TYPE_CHECKING:
    from tests.support.tiny_models import Engine, TinyModel

Formula = Callable[[list[Tensor], list[Tensor]], Tensor]
"""The loss, from the log-probabilities of each document's supervised tokens under the model and the reference."""

ARCHITECTURES = ["qwen3", "gemma2", "qwen3_moe"]  # a tied one, a soft cap on the logits, experts
NUM_PROMPT = 5
NUM_STEPS = 5
ANSWERS = (7, 11, 3, 9, 6, 4, 12, 8)
NUM_TARGETS = sum(ANSWERS)
CHOSEN, REJECTED = [0, 3, 4, 6], [1, 2, 5, 7]
PAIRS = torch.tensor([CHOSEN, REJECTED]).T
LABELS = [DESIRABLE, UNDESIRABLE, MISMATCHED, DESIRABLE, DESIRABLE, UNDESIRABLE, MISMATCHED, UNDESIRABLE]
ADVANTAGES = [1.2, -0.7, 0.4, -1.9, 0.0, 2.2, -0.3, 0.8]


def spread(seed: int, scale: float) -> Tensor:
    return scale * torch.randn(NUM_TARGETS, generator=torch.Generator().manual_seed(seed))


WEIGHTS, NOISE = spread(1, 1.0).abs(), spread(2, 0.2)


def sums(values: Sequence[Tensor], documents: Sequence[int]) -> Tensor:
    return torch.stack([values[document].sum() for document in documents])


def means(values: Sequence[Tensor], documents: Sequence[int]) -> Tensor:
    return torch.stack([values[document].mean() for document in documents])


def margins(policy: list[Tensor], reference: list[Tensor]) -> Tensor:
    chosen, rejected = (sums(policy, numbers) - sums(reference, numbers) for numbers in (CHOSEN, REJECTED))
    return chosen - rejected


def plain_orpo(policy: list[Tensor], _: list[Tensor]) -> Tensor:
    chosen, rejected = means(policy, CHOSEN), means(policy, REJECTED)
    log_odds = (chosen - rejected) - (torch.log1p(-torch.exp(chosen)) - torch.log1p(-torch.exp(rejected)))
    return -torch.cat([policy[number] for number in CHOSEN]).mean() - 0.25 * logsigmoid(log_odds).mean()


def plain_kto(policy: list[Tensor], reference: list[Tensor]) -> Tensor:
    gains = sums(policy, range(8)) - sums(reference, range(8))
    labels = torch.tensor(LABELS)
    kl = gains[labels == MISMATCHED].mean().detach().clamp(min=0)
    good = 1.5 * (1 - torch.sigmoid(0.2 * (gains[labels == DESIRABLE] - kl)))
    bad = 1 - torch.sigmoid(0.2 * (kl - gains[labels == UNDESIRABLE]))
    return torch.cat([good, bad]).mean()


def plain_policy(policy: list[Tensor], reference: list[Tensor], *, grpo: bool) -> Tensor:
    losses = []
    for new, old, anchor, advantage in zip(policy, recorded(reference), reference, ADVANTAGES, strict=True):
        ratio = torch.exp(new - old)
        gain = ratio * advantage
        if grpo:
            gain = torch.minimum(gain, ratio.clamp(0.9, 1.2) * advantage)
            gain = gain - 0.04 * (torch.exp(anchor - new) - (anchor - new) - 1)
        losses.append(-gain)
    return torch.stack([own.mean() for own in losses]).mean() if grpo else torch.cat(losses).mean()


def recorded(reference: list[Tensor]) -> list[Tensor]:
    """What a sampler that differs a little from the starting weights noted."""
    return list(torch.split(torch.cat(reference) + NOISE, list(ANSWERS)))


@dataclass(frozen=True, kw_only=True)
class Case:
    objective: Objective
    formula: Formula
    known: dict[str, Any] = field(default_factory=dict)
    has_weights: bool = False
    is_recorded: bool = False


CASES = {
    "weighted sft": Case(
        objective=WeightedSFT(),
        formula=lambda policy, _: -(WEIGHTS * torch.cat(policy)).sum() / WEIGHTS.sum(),
        has_weights=True,
    ),
    "dpo": Case(
        objective=DPO(beta=0.3, label_smoothing=0.1),
        formula=lambda *both: (
            -0.9 * logsigmoid(0.3 * margins(*both)) - 0.1 * logsigmoid(-0.3 * margins(*both))
        ).mean(),
        known={"pairs_P2": PAIRS},
    ),
    "hinge": Case(
        objective=DPO(beta=0.3, loss="hinge"),
        formula=lambda *both: torch.relu(1 - 0.3 * margins(*both)).mean(),
        known={"pairs_P2": PAIRS},
    ),
    "ipo": Case(
        objective=DPO(beta=0.3, loss="ipo", length_normalised=True),
        formula=lambda policy, reference: (
            (
                means(policy, CHOSEN)
                - means(reference, CHOSEN)
                - (means(policy, REJECTED) - means(reference, REJECTED))
                - 1 / 0.6
            )
            ** 2
        ).mean(),
        known={"pairs_P2": PAIRS},
    ),
    "simpo": Case(
        objective=SimPO(beta=2.5, gamma=0.5),
        formula=lambda policy, _: -logsigmoid(2.5 * (means(policy, CHOSEN) - means(policy, REJECTED)) - 0.5).mean(),
        known={"pairs_P2": PAIRS},
    ),
    "orpo": Case(objective=ORPO(penalty=0.25), formula=plain_orpo, known={"pairs_P2": PAIRS}),
    "kto": Case(
        objective=KTO(beta=0.2, desirable_weight=1.5),
        formula=plain_kto,
        known={"labels_K": torch.tensor(LABELS)},
    ),
    "importance sampling": Case(
        objective=PolicyGradient(clip=False),
        formula=lambda *both: plain_policy(*both, grpo=False),
        known={"advantages_K": torch.tensor(ADVANTAGES)},
        is_recorded=True,
    ),
    "grpo": Case(
        objective=PolicyGradient(clip_low=0.1, clip_high=0.2, kl_coefficient=0.04, mean="documents"),
        formula=lambda *both: plain_policy(*both, grpo=True),
        known={"advantages_K": torch.tensor(ADVANTAGES)},
        is_recorded=True,
    ),
}


def texts(seed: int) -> list[Tensor]:
    """Eight documents, two for each of four prompts."""
    generator = torch.Generator().manual_seed(seed)

    def draw(length: int) -> Tensor:
        return torch.randint(VOCAB, (length,), generator=generator)

    prompts = [draw(NUM_PROMPT) for _ in range(4)]
    return [torch.cat([prompts[number // 2], draw(length)]) for number, length in enumerate(ANSWERS)]


def row_of(documents: Sequence[Tensor]) -> MicroBatch:
    """A row of documents whose answers are trained, and not their prompts."""
    labels = []
    for document in documents:
        own = torch.full_like(document, IGNORED_LABEL)
        own[NUM_PROMPT - 1 : -1] = document[NUM_PROMPT:]
        labels.append(own)
    return MicroBatch(
        input_ids_T=torch.cat(list(documents)),
        position_ids_T=torch.cat([torch.arange(document.numel()) for document in documents]),
        labels_T=torch.cat(labels),
        document_lengths=tuple(document.numel() for document in documents),
    )


def rows_of(documents: Sequence[Tensor], *, packed: bool) -> list[MicroBatch]:
    """The documents in three packed rows, which divide pairs, or in eight of their own."""
    sizes = [3, 1, 4] if packed else [1] * 8
    ends = itertools.accumulate(sizes)
    return [row_of(documents[end - size : end]) for end, size in zip(ends, sizes, strict=True)]


def plain_logprobs(model: torch.nn.Module, documents: Sequence[Tensor]) -> list[Tensor]:
    """The log-probabilities of each document's answer, from the model's own forward on that document alone."""
    found = []
    for document in documents:
        logits_TV = model(input_ids=document[None], use_cache=False).logits[0]
        logprobs_TV = torch.log_softmax(logits_TV[NUM_PROMPT - 1 : -1].float(), -1)
        found.append(logprobs_TV.gather(1, document[NUM_PROMPT:, None])[:, 0])
    return found


def step_objective(case: Case, rows: Sequence[MicroBatch], references_S: Tensor) -> StepObjective:
    known = dict(case.known)
    if case.is_recorded:
        known["recorded_S"] = references_S + NOISE
    return StepObjective(
        objective=case.objective,
        documents=Documents.of(rows, **known),
        references_S=references_S,
        weights_S=WEIGHTS if case.has_weights else None,
    )


@pytest.fixture
def moved(engine: Engine) -> Callable[[str], tuple[TinyModel, list[Tensor]]]:
    """A model, and the answers' log-probabilities under weights next to its own: a reference from which it has moved
    on."""

    def build(architecture: str) -> tuple[TinyModel, list[Tensor]]:
        model = engine.tiny_model(architecture)
        reference = model.reference()
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
            return model, plain_logprobs(reference, texts(0))

    return build


Outcome = tuple[float, dict[str, Tensor]]
"""Loss and gradients."""


@pytest.fixture(scope="module")
def computed() -> dict[tuple[str, str], tuple[Outcome, Outcome]]:
    """What plain autograd gives for an architecture and a case, in fp32 and in float64: each is computed once."""
    return {}


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_loss_and_gradients_are_those_of_plain_autograd(
    architecture: str,
    name: str,
    packed: bool,
    moved: Callable[[str], tuple[TinyModel, list[Tensor]]],
    engine: Engine,
    computed: dict[tuple[str, str], tuple[Outcome, Outcome]],
) -> None:
    case, (model, references) = CASES[name], moved(architecture)
    documents = texts(0)
    rows = rows_of(documents, packed=packed)
    # Several chunks, whose ends are not those of documents.
    run = engine.start(model, head_chunk_tokens=16)

    figures = run.trainer.train_step(rows, step_objective(case, rows, torch.cat(references)))

    def autograd(reference: torch.nn.Module) -> Outcome:
        loss = case.formula(plain_logprobs(reference, documents), references)
        torch.autograd.backward(loss)
        return loss.item(), gradients_of(reference)

    if (architecture, name) not in computed:
        computed[architecture, name] = plain_and_exact(model.reference, autograd)
    plain, exact = computed[architecture, name]
    # Losses are differences of log-probabilities.
    check_numbers(figures.loss, plain[0], exact[0], scale=1.0)
    assert not packed or run.trainer.supports_packing
    check_gradients({parameter: run.gradient(parameter) for parameter in exact[1]}, plain[1], exact[1])


@pytest.mark.parametrize(
    ("architecture", "name", "packed"),
    [
        *(("qwen3", name, True) for name in CASES),
        *further(("qwen3", "dpo", False), ("gemma2", "dpo", True), ("qwen3_moe", "dpo", True)),
    ],
)
def test_steps_from_references_of_the_starting_weights_follow_a_plain_loop(
    architecture: str, name: str, packed: bool, engine: Engine
) -> None:
    case, model = CASES[name], engine.tiny_model(architecture)
    # Two batches in turn, as epochs have them.
    batches = [texts(0), texts(1)]

    def trained_plainly(plain: torch.nn.Module) -> tuple[list[float], dict[str, Tensor]]:
        with torch.no_grad():
            plain_references = [plain_logprobs(plain, documents) for documents in batches]
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
        losses = []
        for step in range(NUM_STEPS):
            loss = case.formula(plain_logprobs(plain, batches[step % 2]), plain_references[step % 2])
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            losses.append(loss.item())
        return losses, values_of(plain)

    (losses, values), (exact_losses, exact_values) = plain_and_exact(model.reference, trained_plainly)

    run = engine.start(model, lr_schedule="constant", max_grad_norm=1e9, head_chunk_tokens=16)
    rows = [rows_of(documents, packed=packed) for documents in batches]
    references = [torch.cat(run.trainer.log_probabilities(batch)) for batch in rows]
    figures = [
        run.trainer.train_step(rows[step % 2], step_objective(case, rows[step % 2], references[step % 2]))
        for step in range(NUM_STEPS)
    ]
    run.trainer.flush()

    check_numbers([figure.loss for figure in figures], losses, exact_losses, "the losses", scale=1.0)
    assert exact_losses[-1] < exact_losses[0] - 0.05, "the test is about an objective that training moves"
    trained = {}
    for parameter_name, value in values.items():
        hi, lo = (run.store.tensor(parameter_name, plane).reshape(-1) for plane in ("hi", "lo"))
        trained[parameter_name] = torch.empty(value.shape)
        merge_master(hi, lo, trained[parameter_name].view(-1))
    check_weights(trained, values, exact_values)


def test_weights_of_one_give_the_bits_of_cross_entropy(engine: Engine) -> None:
    model, rows = engine.tiny_model("qwen3"), rows_of(texts(0), packed=True)
    plain, weighted = (engine.start(model, head_chunk_tokens=16) for _ in range(2))
    objective = StepObjective(objective=WeightedSFT(), documents=Documents.of(rows), weights_S=torch.ones(NUM_TARGETS))

    wanted, got = plain.trainer.train_step(rows), weighted.trainer.train_step(rows, objective)

    assert got.loss == pytest.approx(wanted.loss, rel=1e-15)
    assert got.grad_norm == wanted.grad_norm
    assert torch.equal(plain.gradients(), weighted.gradients())


@pytest.mark.parametrize(
    "options",
    [
        {"head_chunk_tokens": 3},
        {"micro_batch_tokens": 20},
        {"micro_batch_tokens": 1000},
        {"activation_placement": "host"},
        {"product_layers": 2, "resident_layers": 1},
    ],
    ids=str,
)
def test_how_a_step_is_cut_and_kept_changes_nothing(
    options: dict[str, Any],
    moved: Callable[[str], tuple[TinyModel, list[Tensor]]],
    engine: Engine,
) -> None:
    case, (model, references) = CASES["grpo"], moved("qwen3")
    rows = rows_of(texts(0), packed=True)
    # Only compiled layers keep products.
    compiled = traced_layers(model.template, product_layers=2) if "product_layers" in options else None
    plain, cut = engine.start(model, compiled=compiled), engine.start(model, compiled=compiled, **options)

    one_loss, other_loss = (
        run.trainer.train_step(rows, step_objective(case, rows, torch.cat(references))).loss for run in (plain, cut)
    )

    def autograd(reference: torch.nn.Module) -> Outcome:
        loss = case.formula(plain_logprobs(reference, texts(0)), references)
        torch.autograd.backward(loss)
        return loss.item(), gradients_of(reference)

    wanted, exact = plain_and_exact(model.reference, autograd)
    for run, loss in ((plain, one_loss), (cut, other_loss)):
        check_numbers(loss, wanted[0], exact[0], scale=1.0)
        check_gradients({name: run.gradient(name) for name in exact[1]}, wanted[1], exact[1])


def test_nothing_more_crosses_the_link_than_for_cross_entropy(
    moved: Callable[[str], tuple[TinyModel, list[Tensor]]], engine: Engine
) -> None:
    case, (model, references) = CASES["dpo"], moved("llama")
    rows = rows_of(texts(0), packed=False)
    plain, paired = (engine.start(model, head_chunk_tokens=16) for _ in range(2))

    wanted = plain.trainer.train_step(rows)
    got = paired.trainer.train_step(rows, step_objective(case, rows, torch.cat(references)))

    assert (got.h2d.bytes, got.d2h.bytes) == (wanted.h2d.bytes, wanted.d2h.bytes)
    assert got.device_memory_bytes == wanted.device_memory_bytes


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "mamba"])
@pytest.mark.parametrize("tokens_per_step", [0, 40])
def test_log_probabilities_are_those_of_the_plain_model_row_by_row(
    architecture: str, tokens_per_step: int, engine: Engine
) -> None:
    model, documents = engine.tiny_model(architecture), texts(0)
    rows = rows_of(documents, packed=True)
    untrained = dataclasses.replace(rows[1], labels_T=torch.full_like(rows[1].labels_T, IGNORED_LABEL))
    run = engine.start(model, head_chunk_tokens=16, tokens_per_step=tokens_per_step)

    first, second, third = run.trainer.log_probabilities([rows[0], untrained, *rows[1:]])[:3]

    def of_documents(reference: torch.nn.Module) -> list[float]:
        with torch.no_grad():
            found: list[float] = torch.cat(plain_logprobs(reference, documents[:4])).tolist()
            return found

    plain, exact = plain_and_exact(model.reference, of_documents)
    check_numbers(torch.cat([first, third]).tolist(), plain, exact, "the log-probabilities")
    assert second.numel() == 0
    assert (first.numel(), third.numel()) == (sum(ANSWERS[:3]), ANSWERS[3])


def test_without_a_gradient_plane_units_are_updated_as_their_gradients_land(
    moved: Callable[[str], tuple[TinyModel, list[Tensor]]], engine: Engine
) -> None:
    case, (model, references) = CASES["dpo"], moved("qwen3")
    rows = rows_of(texts(0), packed=True)
    runs = [
        engine.start(model, store=model.store(grad_dtype=dtype), max_grad_norm=None) for dtype in (torch.float32, None)
    ]

    for run in runs:
        run.trainer.train_step(rows, step_objective(case, rows, torch.cat(references)))
        run.trainer.flush()

    for plane in ("hi", "lo", "exp_avg", "exp_avg_sq"):
        assert torch.equal(runs[0].store.plane(plane), runs[1].store.plane(plane)), f"plane {plane} differs"


def test_the_schedule_of_cuda_takes_the_same_step_within_bf16(
    moved: Callable[[str], tuple[TinyModel, list[Tensor]]], engine: Engine
) -> None:
    case, (model, references) = CASES["simpo"], moved("qwen3")
    rows = rows_of(texts(0), packed=True)
    exact = engine.start(model)
    rounded = engine.start(model, device=CudaDevice(runtime=CpuRuntime()), head_chunk_tokens=16)

    wanted, got = (
        run.trainer.train_step(rows, step_objective(case, rows, torch.cat(references))) for run in (exact, rounded)
    )

    assert got.loss == pytest.approx(wanted.loss, rel=2e-2)
    one, other = exact.gradients(), rounded.gradients()
    assert float((one - other).norm() / one.norm()) <= 5e-2


def test_dropout_draws_the_masks_that_it_draws_for_cross_entropy(engine: Engine) -> None:
    model, rows = engine.tiny_model("llama", attention_dropout=0.3), rows_of(texts(0), packed=True)
    objective = StepObjective(objective=WeightedSFT(), documents=Documents.of(rows), weights_S=torch.ones(NUM_TARGETS))
    plain, weighted = (engine.start(model, seed=3) for _ in range(2))

    wanted, got = plain.trainer.train_step(rows), weighted.trainer.train_step(rows, objective)

    assert got.loss == pytest.approx(wanted.loss, rel=1e-15)
    assert torch.equal(plain.gradients(), weighted.gradients())


def test_an_objective_of_other_rows_is_refused_before_anything_is_touched(
    moved: Callable[[str], tuple[TinyModel, list[Tensor]]], engine: Engine
) -> None:
    case, (model, references) = CASES["dpo"], moved("qwen3")
    rows = rows_of(texts(0), packed=True)
    run = engine.start(model)

    with pytest.raises(InvalidData, match="documents are not those of the rows"):
        run.trainer.train_step(rows[:2], step_objective(case, rows, torch.cat(references)))

    assert run.trainer.step == 0


def test_a_loss_that_is_not_finite_changes_no_weight(
    moved: Callable[[str], tuple[TinyModel, list[Tensor]]], engine: Engine
) -> None:
    case, (model, references) = CASES["importance sampling"], moved("qwen3")
    rows = rows_of(texts(0), packed=True)
    run = engine.start(model)
    before = run.store.plane("hi").clone()

    # The ratio of such a sample overflows.
    figures = run.trainer.train_step(rows, step_objective(case, rows, torch.cat(references) - 1e4))
    run.trainer.flush()

    assert figures.skipped == "non_finite_gradient"
    assert torch.equal(run.store.plane("hi"), before)
