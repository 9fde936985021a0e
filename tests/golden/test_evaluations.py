"""Evaluations between the steps of a training: token accuracy and generated answers against transformers, and no bit of
it changed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.support.double import check_numbers, plain_and_exact
from torch import Tensor

from horizon_server.engine.generation.generator import TokenGenerator
from horizon_server.engine.generation.sequences import GenerationOptions
from horizon_server.engine.micro_batch import IGNORED_LABEL, MicroBatch
from horizon_server.engine.template import Template

if TYPE_CHECKING:
    from tests.support.tiny_models import Engine, Run, TinyModel

Pack = Callable[[list[Tensor]], MicroBatch]
PLANES = ("hi", "lo", "exp_avg", "exp_avg_sq")
ARCHITECTURES = ["llama", "qwen3", "gpt2", "gemma2", "mixtral"]
PROMPTS = ([5, 40, 17], list(range(30, 51)), [9])
NUM_NEW = 10


@pytest.fixture
def rows(engine: Engine) -> Callable[[int], list[MicroBatch]]:
    return lambda step: [
        engine.pack(engine.documents(12, 7, seed=step)),
        engine.pack(engine.documents(21, seed=step + 50)),
    ]


@pytest.fixture
def closed() -> Iterator[list[TokenGenerator]]:
    generators: list[TokenGenerator] = []
    yield generators
    for generator in generators:
        generator.release_device()


def reference_of(model: TinyModel, run: Run) -> Any:
    """Plain transformers with the weights that the store has now."""
    run.trainer.flush()
    reference: Any = model.reference()
    weights = {}
    for unit in run.store.layout.units:
        merged = torch.empty(unit.num_elements)
        run.store.merge_master(unit.index, merged)
        for place in unit.tensors:
            weights[place.name] = merged[place.offset : place.offset + place.num_elements].view(place.shape)
    with torch.no_grad():
        for name, tensor in reference.state_dict().items():
            if name in weights:
                tensor.copy_(weights[name])
    return reference


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_loss_and_accuracy_are_those_of_transformers(
    architecture: str,
    engine: Engine,
) -> None:
    model = engine.tiny_model(architecture)
    # Small chunks, so that counts are added up over many.
    run = engine.start(model, head_chunk_tokens=4, learning_rate=1e-2)
    ids = engine.documents(12, 7, 21, 30)
    batches = [engine.pack(ids[:2]), engine.pack(ids[2:3]), engine.pack(ids[3:])]
    for _ in range(6):
        run.trainer.train_step(batches)
    figures = run.trainer.evaluate(batches)

    def evaluated(reference: Any) -> tuple[float, int, int]:
        total, num_correct, num_targets = 0.0, 0, 0
        for document in ids:
            batch = engine.pack([document])
            with torch.no_grad():
                logits_TV = reference(input_ids=batch.input_ids_T[None]).logits[0]
            is_target = batch.labels_T != IGNORED_LABEL
            targets_S, logits_SV = batch.labels_T[is_target], logits_TV[is_target]
            total += float(torch.nn.functional.cross_entropy(logits_SV.double(), targets_S, reduction="sum"))
            num_correct += int((logits_SV.argmax(-1) == targets_S).sum())
            num_targets += len(targets_S)
        return total / num_targets, num_targets, num_correct

    plain, exact = plain_and_exact(lambda: reference_of(model, run), evaluated)
    assert (figures.num_targets, figures.num_correct) == exact[1:]
    assert figures.num_correct > 0
    check_numbers(figures.eval_loss, plain[0], exact[0])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_answers_between_steps_are_those_of_transformers_and_change_no_bit(
    architecture: str,
    engine: Engine,
    rows: Callable[[int], list[MicroBatch]],
    closed: list[TokenGenerator],
) -> None:
    model = engine.tiny_model(architecture)
    plain = engine.start(model, learning_rate=1e-2)
    losses = [plain.trainer.train_step(rows(step)).loss for step in range(4)]
    plain.trainer.flush()

    run = engine.start(model, learning_rate=1e-2)
    template = Template.from_config(copy.deepcopy(model.config), layout=run.store.layout, own_attention=False)
    generator, disturbed, answers = None, [], []
    for step in range(4):
        if step in (0, 3):
            run.trainer.evaluate(rows(99))
            run.trainer.flush()
            run.trainer.release_device()
            if generator is None:
                generator = TokenGenerator(template, run.store, run.device)
                closed.append(generator)
            found = []
            options = GenerationOptions(max_tokens=NUM_NEW)
            tokens: list[list[int]] = [[] for _ in PROMPTS]
            for new in generator.stream(PROMPTS, options):
                tokens[new.prompt].append(new.token)
                if step == 3:
                    # As another job's turn does, between any two tokens.
                    generator.release_device()
                    assert not any(run.device.arena.held_bytes().values())
            generator.release_device()
            assert not any(run.device.arena.held_bytes().values()), "nothing of the answers stays on the device"
            reference = reference_of(model, run)
            for prompt in PROMPTS:
                ids = torch.tensor([prompt])
                mask = torch.ones_like(ids)
                output = reference.generate(
                    ids, attention_mask=mask, do_sample=False, max_new_tokens=NUM_NEW, eos_token_id=[]
                )
                found.append(output[0, len(prompt) :].tolist())
            assert tokens == found
            answers.append(tokens)
        disturbed.append(run.trainer.train_step(rows(step)).loss)
    run.trainer.flush()
    assert disturbed == losses
    for plane in PLANES:
        assert torch.equal(run.store.plane(plane), plain.store.plane(plane)), plane
    assert answers[0] != answers[1], "the weights are those of the step"
