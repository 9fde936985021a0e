"""Answers with experts in pages: those of whole layers whose classes compute their experts one by one, in less memory
of the device, and from token to token with less over the link."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest
from tests.golden.test_generation import NUM_NEW, options
from tests.golden.test_paged_experts import ONE_EXPERT, eager_model, rest_of

from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.device.protocol import Component
from horizon_server.engine.generation.generator import TokenGenerator, generation_template
from horizon_server.engine.generation.sequences import GeneratedAnswer
from horizon_server.engine.template import Template
from horizon_server.errors import DoesNotFit
from horizon_server.planning.sampling import sample_memory
from horizon_server.store.layout import weights_only

if TYPE_CHECKING:
    from tests.support.tiny_models import Engine, TinyModel

# Those that compute their sequences as one row, and some with a state from token to token.
FAMILIES = ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "ernie4_5_moe", "phimoe", "qwen3_next"]
PROMPTS = [[5, 9, 33, 2, 71, 8, 4], [17, 3], [60, 41, 12, 9, 9]]
Begin = Callable[..., TokenGenerator]


@pytest.fixture
def begin() -> Iterator[Begin]:
    """Starts a generator on a new store of a model, in pages of `elements`."""
    started: list[TokenGenerator] = []

    def start(model: TinyModel, elements: int, *, in_rows: bool = True, device: HostDevice | None = None) -> Any:
        def make(own: bool) -> Template:
            config = copy.deepcopy(model.config)
            return Template.from_config(config, layout=model.template.layout, own_attention=own and in_rows)

        device = device or HostDevice(num_threads=1, poison_on_free=True)
        store = model.store(grad_dtype=None)
        generator = TokenGenerator(generation_template(make), store, device, expert_page_elements=elements)
        started.append(generator)
        return generator

    yield start
    for generator in started:
        generator._device.close()


def device_of(generator: TokenGenerator) -> HostDevice:
    device = generator._device
    assert isinstance(device, HostDevice)
    return device


def answers(generator: TokenGenerator, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[GeneratedAnswer]:
    return generator.generate(prompts, options(logprobs=0, num_samples=2, temperature=0.7, seed=3))


@pytest.mark.parametrize("in_rows", [True, False], ids=["row", "apart"])
@pytest.mark.parametrize("most_elements", [ONE_EXPERT, 1 << 28])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_answers_are_those_of_whole_layers(
    architecture: str, most_elements: int, in_rows: bool, engine: Engine, begin: Begin
) -> None:
    model = eager_model(engine, architecture)
    whole, paged = (answers(begin(model, elements, in_rows=in_rows)) for elements in (0, most_elements))
    assert whole == paged
    assert all(answer.logprobs for answer in paged)


def test_what_is_kept_may_be_in_host_memory_and_the_device_given_back_between_tokens(
    engine: Engine, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = eager_model(engine, "qwen3_next")
    expected = answers(begin(model, 0))
    whole = begin(model, ONE_EXPERT)
    # Without room for what is kept of all sequences, which is then on the device for its layer alone.
    charge = whole._device.charge
    refused: list[int] = []

    def full(component: Component, num_bytes: int) -> None:
        if component == "activations" and not refused and num_bytes > 0:
            refused.append(num_bytes)
            raise DoesNotFit("full")
        charge(component, num_bytes)

    monkeypatch.setattr(whole._device, "charge", full)
    found = []
    for new in whole.stream(PROMPTS, options(logprobs=0, num_samples=2, temperature=0.7, seed=3)):
        found.append(new)
        whole.release_device()
        assert not any(device_of(whole).arena.held_bytes().values())
    assert refused and not whole.cache_on_device
    for new in found:
        assert new.token in expected[2 * new.prompt + new.sample].tokens
    assert len(found) == sum(len(answer.tokens) for answer in expected)


def uploaded(generator: TokenGenerator, num_prompts: int) -> list[int]:
    """Bytes of the pass over prompts of a token, and of each pass after it."""
    ticket = generator.add([[5 + index] for index in range(num_prompts)], options(stop_tokens=frozenset()))
    found = []
    generator._device.take_use()
    while generator.is_busy(ticket):
        generator.step()
        found.append(generator._device.take_use().h2d.bytes)
    return found


@pytest.mark.parametrize(("num_tokens", "most"), [(1, 0.1), (16, 0.5)])
def test_tokens_bring_up_the_experts_that_they_visit(
    num_tokens: int, most: float, engine: Engine, begin: Begin
) -> None:
    model = eager_model(engine, "qwen3_moe", num_experts=128, num_experts_per_tok=4)
    whole, paged = (uploaded(begin(model, elements), num_tokens) for elements in (0, ONE_EXPERT * 4))
    assert len(whole) == len(paged) == NUM_NEW
    assert max(paged) <= most * min(whole)


def test_the_device_holds_as_much_for_sixteen_experts_as_for_256(engine: Engine, begin: Begin) -> None:
    peaks = {}
    for num_experts in (16, 256):
        model = eager_model(engine, "qwen3_moe", num_experts=num_experts)
        generator = begin(model, ONE_EXPERT * 4, device=HostDevice(num_threads=1))
        generator._device.peak_bytes()
        answers(generator)
        peaks[num_experts] = dict(generator._device.peak_bytes())
        # A router has a row for each expert, and is of the rest of the layer.
        peaks[num_experts]["weights"] -= 2 * 4 * rest_of(model) // model.template.num_layers
    assert peaks[16] == peaks[256]


def test_a_sample_s_memory_is_that_of_a_few_pages(engine: Engine, begin: Begin) -> None:
    model = eager_model(engine, "qwen3_moe", num_experts=64)
    layout = weights_only(model.template.layout, is_bfloat16=lambda _: False)
    whole, paged = (sample_memory(layout, expert_page_elements=elements) for elements in (0, ONE_EXPERT * 4))
    generator = begin(model, ONE_EXPERT * 4, device=HostDevice(num_threads=1))
    saved = whole.private - paged.private
    of_whole = device_of(begin(model, 0, device=HostDevice(num_threads=1))).arena.held_bytes()["weights"]
    assert saved == of_whole - device_of(generator).arena.held_bytes()["weights"]


def test_evaluations_of_a_paged_job_answer_in_pages(engine: Engine, begin: Begin) -> None:
    # With the trainer's own device and store, as a job and a session do.
    model = eager_model(engine, "qwen3_moe")
    found = []
    for elements in (0, ONE_EXPERT):
        run = engine.start(model, expert_page_elements=elements)
        run.trainer.train_step([engine.pack(engine.documents(20, 31))])
        run.trainer.flush()
        run.trainer.release_device()
        template = Template.from_config(copy.deepcopy(model.config), layout=run.store.layout)
        generator = TokenGenerator(template, run.store, run.device, expert_page_elements=elements)
        found.append(answers(generator))
        generator.release_device()
        assert not any(run.device.arena.held_bytes().values())
    assert found[0] == found[1]
