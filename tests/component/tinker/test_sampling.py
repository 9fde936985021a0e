"""Answers by Tinker's SDK: of a base, of saved weights, and of a model that is being trained."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest
from tests.component.tinker.conftest import PATIENCE_S, data, datum, logprobs_of
from tests.support.pushed_state import MODEL
from tinker import BadRequestError, RequestFailedError, RestClient, SamplingClient, ServiceClient, TrainingClient, types

PROMPT = types.ModelInput.from_ints([5, 17, 42, 7])


@pytest.fixture(scope="module")
def base(kept: ServiceClient) -> SamplingClient:
    return kept.create_sampling_client(base_model=MODEL).result(PATIENCE_S)


def sampled(
    client: SamplingClient, prompt: types.ModelInput = PROMPT, num_samples: int = 1, **params: Any
) -> types.SampleResponse:
    given = types.SamplingParams(**{"max_tokens": 6, "seed": 1, **params})
    return client.sample(prompt, num_samples, given).result(PATIENCE_S)


def tokens_of(found: types.SampleResponse) -> list[list[int]]:
    return [one.tokens for one in found.sequences]


def test_a_base_answers_the_same_way_with_the_same_seed(base: SamplingClient) -> None:
    first, again = sampled(base, num_samples=3), sampled(base, num_samples=3)
    assert tokens_of(first) == tokens_of(again)
    assert len({tuple(tokens) for tokens in tokens_of(first)}) == 3
    assert tokens_of(sampled(base, num_samples=3, seed=2)) != tokens_of(first)
    for one in first.sequences:
        assert one.logprobs is not None
        assert len(one.logprobs) == len(one.tokens) <= 6
        assert one.stop_reason in ("stop", "length")
    assert len({one.sequence_id for one in (*first.sequences, *again.sequences)}) == 6
    assert base.get_base_model() == MODEL


def test_temperature_0_takes_the_likeliest_token(base: SamplingClient) -> None:
    greedy = tokens_of(sampled(base, temperature=0.0))
    assert greedy == tokens_of(sampled(base, temperature=0.0, seed=2))
    assert greedy == tokens_of(sampled(base, top_k=1, seed=3))
    assert greedy == tokens_of(sampled(base, top_p=1e-6, seed=4))


def test_an_answer_ends_where_it_is_told_to(base: SamplingClient) -> None:
    (greedy,) = tokens_of(sampled(base, temperature=0.0))
    stop = greedy[2]
    (found,) = sampled(base, temperature=0.0, stop=[stop]).sequences
    assert found.tokens == greedy[: greedy.index(stop) + 1]
    assert found.stop_reason == "stop"
    with pytest.raises(BadRequestError, match="always end"):
        sampled(base, stop=[])


def test_a_prompt_is_scored(base: SamplingClient) -> None:
    scores = base.compute_logprobs(PROMPT).result(PATIENCE_S)
    assert scores[0] is None
    assert all(score is not None and score < 0 for score in scores[1:])
    params = types.SamplingParams(max_tokens=1, temperature=0.0)
    found = base.sample(PROMPT, 1, params, include_prompt_logprobs=True, topk_prompt_logprobs=2).result(PATIENCE_S)
    assert found.prompt_logprobs == scores
    assert found.topk_prompt_logprobs is not None
    assert len(found.topk_prompt_logprobs) == PROMPT.length
    best = found.topk_prompt_logprobs[-1]
    assert best is not None
    assert len(best) == 2
    assert best[0][1] >= best[1][1]
    assert best[0][1] >= (scores[-1] or 0.0)


def test_the_alternatives_of_an_answer_are_scored(base: SamplingClient) -> None:
    params = types.SamplingParams(max_tokens=3, temperature=0.0)
    (found,) = base.sample(PROMPT, 1, params, topk_sample_logprobs=2).result(PATIENCE_S).sequences
    assert found.topk_logprobs is not None and found.logprobs is not None
    for token, logprob, best in zip(found.tokens, found.logprobs, found.topk_logprobs, strict=True):
        assert best is not None and len(best) == 2
        assert best[0][0] == token
        assert best[0][1] == pytest.approx(logprob, abs=1e-6)


def test_answers_have_the_log_probabilities_of_training(adapter: TrainingClient) -> None:
    adapter.forward_backward(data(), "cross_entropy")
    adapter.optim_step(types.AdamParams(learning_rate=1e-2))
    prompt = PROMPT.to_ints()
    for kind in ("snapshot", "inflight"):
        client = adapter.save_weights_and_get_sampling_client(kind=kind).result(PATIENCE_S)
        for one in sampled(client, num_samples=2).sequences:
            tokens = [*prompt, *one.tokens]
            (trained,) = logprobs_of(adapter.forward([datum(tokens)], "cross_entropy").result(PATIENCE_S))
            assert one.logprobs == pytest.approx(trained[len(prompt) - 1 :], abs=1e-5)


def scores_of(client: SamplingClient) -> list[float]:
    """Log-probabilities of the prompt's tokens but the first."""
    first, *scores = client.compute_logprobs(PROMPT).result(PATIENCE_S)
    assert first is None
    return [score for score in scores if score is not None]


def test_saved_weights_answer_and_stay_as_they_were(
    adapter: TrainingClient, service: ServiceClient, rest: RestClient
) -> None:
    unnamed = adapter.save_weights_and_get_sampling_client().result(PATIENCE_S)
    path = adapter.save_weights_for_sampler("before").result(PATIENCE_S).path
    assert path == f"tinker://{adapter.model_id}/sampler_weights/before"
    named = adapter.create_sampling_client(path).result(PATIENCE_S)
    before = scores_of(named)
    assert scores_of(unnamed) == pytest.approx(before, abs=1e-5)
    adapter.forward_backward(data(), "cross_entropy")
    adapter.optim_step(types.AdamParams(learning_rate=1e-2)).result(PATIENCE_S)
    newer = adapter.save_weights_and_get_sampling_client().result(PATIENCE_S)
    assert scores_of(newer) != pytest.approx(before, abs=1e-3)
    other = service.create_sampling_client(model_path=path).result(PATIENCE_S)
    for older in (named, unnamed, other):
        assert scores_of(older) == pytest.approx(before, abs=1e-5)
    assert (other.get_base_model(), newer.get_base_model()) == (MODEL, MODEL)
    found = rest.get_sampler(other._sampling_session_id).result(60)
    assert found.base_model == MODEL


def test_many_requests_are_answered_at_once(base: SamplingClient) -> None:
    prompts = [types.ModelInput.from_ints([5 + number, 17, 42]) for number in range(24)]
    params = types.SamplingParams(max_tokens=3, temperature=0.0)
    futures = [base.sample(prompt, 1, params) for prompt in prompts]
    found = [tokens_of(future.result(PATIENCE_S)) for future in futures]
    assert found[3] == tokens_of(base.sample(prompts[3], 1, params).result(PATIENCE_S))


async def test_the_clients_are_awaited_too(base: SamplingClient) -> None:
    params = types.SamplingParams(max_tokens=3, temperature=0.0)
    first, second = await asyncio.gather(base.sample(PROMPT, 1, params), base.sample(PROMPT, 1, params))
    assert tokens_of(first) == tokens_of(second)


def test_a_client_is_handed_to_another_process(base: SamplingClient, adapter: TrainingClient) -> None:
    """Which numbers its requests by itself."""
    copy = pickle.loads(pickle.dumps(base))  # noqa: S301  # the SDK's own way
    assert tokens_of(sampled(copy, temperature=0.0)) == tokens_of(sampled(base, temperature=0.0))
    handle = SamplingClient.from_sampler_handle(base.get_sampler_handle(), api_key=base.holder._api_key)
    assert tokens_of(sampled(handle, temperature=0.0)) == tokens_of(sampled(base, temperature=0.0))


def test_what_cannot_be_sampled_says_why(base: SamplingClient) -> None:
    with pytest.raises((BadRequestError, RequestFailedError), match="at most 1024"):
        base.sample(types.ModelInput.from_ints([5] * 1024), 1, types.SamplingParams(max_tokens=6)).result(PATIENCE_S)
