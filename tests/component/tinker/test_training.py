"""Training by Tinker's SDK: every method of its TrainingClient, and what its losses are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.component.tinker.conftest import PATIENCE_S, TEXTS, as_at_first, data, datum, logprobs_of
from tests.support.pushed_state import MODEL
from tinker import BadRequestError, RequestFailedError, RestClient, ServiceClient, TrainingClient, types

ADAM = types.AdamParams(learning_rate=1e-2)


def loss_of(client: TrainingClient) -> float:
    return client.forward(data(), "cross_entropy").result(PATIENCE_S).metrics["loss:sum"]


def stepped(client: TrainingClient, batch: list[types.Datum]) -> float:
    """The loss after a step with a batch."""
    client.forward_backward(batch, "cross_entropy")
    client.optim_step(ADAM)
    return loss_of(client)


def test_a_model_says_what_it_is(adapter: TrainingClient, kept: ServiceClient) -> None:
    info = adapter.get_info()
    assert (info.model_id, info.is_lora, info.lora_rank) == (adapter.model_id, True, 4)
    assert info.model_data.model_name == MODEL
    assert adapter.model_id == f"{kept.holder.get_session_id()}:train:0"


def test_a_forward_pass_has_the_log_probability_of_each_target_and_changes_nothing(adapter: TrainingClient) -> None:
    found = adapter.forward(data(), "cross_entropy").result(PATIENCE_S)
    again = adapter.forward(data(), "cross_entropy").result(PATIENCE_S)
    assert [len(of_text) for of_text in logprobs_of(found)] == [len(tokens) - 1 for tokens in TEXTS]
    assert logprobs_of(found) == logprobs_of(again)
    assert found.metrics["loss:sum"] == pytest.approx(-sum(map(sum, logprobs_of(found))), rel=1e-6)
    with pytest.raises(RequestFailedError, match="gradient"):
        adapter.optim_step(ADAM).result(PATIENCE_S)


# What docs/sessions.md says of each, with r = exp(log p - logprobs).
LOSSES: dict[str, Any] = {
    "importance_sampling": lambda p, q, a: -torch.exp(p - q) * a,
    "ppo": lambda p, q, a: -torch.minimum(torch.exp(p - q) * a, torch.exp(p - q).clamp(0.8, 1.2) * a),
    "cispo": lambda p, q, a: -torch.exp(p - q).clamp(0.8, 1.2) * a * p,
    "dro": lambda p, q, a: -(a * p - 0.05 / 2 * (p - q) ** 2),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_is_a_sum_over_targets(adapter: TrainingClient, loss: Any) -> None:
    now = logprobs_of(adapter.forward(data(), "cross_entropy").result(PATIENCE_S))
    generator = torch.Generator().manual_seed(3)
    wanted, batch = 0.0, []
    for tokens, of_text in zip(TEXTS, now, strict=True):
        p = torch.tensor(of_text, dtype=torch.float64)
        q = p + torch.randn(len(of_text), generator=generator) * 0.3
        a = torch.randn(len(of_text), generator=generator)
        batch.append(datum(tokens, logprobs=q.tolist(), advantages=a.tolist()))
        wanted += float(LOSSES[loss](p, q, a).sum())
    found = adapter.forward(batch, loss).result(PATIENCE_S)
    assert found.metrics["loss:sum"] == pytest.approx(wanted, rel=1e-5, abs=1e-5)
    assert logprobs_of(found) == now


def test_the_options_of_a_loss_are_taken(adapter: TrainingClient) -> None:
    (now,) = logprobs_of(adapter.forward([datum(TEXTS[0])], "cross_entropy").result(PATIENCE_S))
    before = [value - 1.0 for value in now]  # r is e, above what is clipped
    batch = [datum(TEXTS[0], logprobs=before, advantages=[1.0] * len(now))]
    for high in (1.2, 2.0):
        found = adapter.forward(batch, "ppo", {"clip_high_threshold": high}).result(PATIENCE_S)
        assert found.metrics["loss:sum"] == pytest.approx(-high * len(now), rel=1e-6)


def test_gradients_add_up_until_the_step(adapter: TrainingClient) -> None:
    whole = stepped(adapter, data())
    as_at_first(adapter).forward_backward(data(), "cross_entropy")
    as_at_first(adapter)  # and the gradients are forgotten
    for one in data()[1:]:
        adapter.forward_backward([one], "cross_entropy")
    assert stepped(adapter, data()[:1]) == pytest.approx(whole, rel=1e-6)
    before = loss_of(adapter)
    adapter.forward_backward(data(), "cross_entropy")
    clipped = adapter.optim_step(types.AdamParams(learning_rate=0.0, grad_clip_norm=1e-3)).result(PATIENCE_S)
    assert clipped.metrics is not None
    assert clipped.metrics["grad_norm"] > 1e-3
    assert loss_of(adapter) == before


def test_a_loss_of_ones_own_has_its_own_gradient(adapter: TrainingClient) -> None:
    """The sum of the losses of texts, each a mean, is cross entropy with weights of one over their lengths."""

    def mean(_: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        losses = torch.stack([-one.mean() for one in logprobs])
        return losses.sum(), {"worst": float(losses.detach().max())}

    found = adapter.forward_backward_custom(data(), mean)
    adapter.optim_step(ADAM).result(PATIENCE_S)
    own, metrics = loss_of(adapter), found.result(PATIENCE_S).metrics
    as_at_first(adapter)
    weights = [datum(tokens, weights=[1 / (len(tokens) - 1)] * (len(tokens) - 1)) for tokens in TEXTS]
    plain = adapter.forward(weights, "cross_entropy").result(PATIENCE_S)
    assert metrics["loss:sum"] == pytest.approx(plain.metrics["loss:sum"], rel=1e-5)
    assert metrics["worst"] > 0
    assert stepped(adapter, weights) == pytest.approx(own, rel=1e-5)


def test_a_loss_that_the_sdk_traces_runs_on_the_laptop(adapter: TrainingClient, kept: ServiceClient) -> None:
    def likelihood(logprobs: Any, weights: Any) -> Any:
        loss = -(logprobs * weights).sum()
        return loss, {"custom/likelihood:sum": loss}

    handle = kept.create_custom_loss(likelihood, {"logprobs": 1, "weights": 1}).result(60)
    wanted = loss_of(adapter)
    found = adapter.forward_backward_custom(data(), handle).result(PATIENCE_S)
    assert found.metrics["loss:sum"] == pytest.approx(wanted, rel=1e-6)


def test_a_large_batch_is_divided_by_the_sdk(adapter: TrainingClient) -> None:
    """It sends 1,024 texts at a time."""
    texts = [[5 + number % 60, 9, 11 + number % 7] for number in range(1100)]
    found = adapter.forward_backward([datum(tokens) for tokens in texts], "cross_entropy").result(PATIENCE_S)
    assert len(found.loss_fn_outputs) == len(texts)
    first, again = found.loss_fn_outputs[20], found.loss_fn_outputs[20 + 60 * 7 * 2]  # the same text
    assert first["logprobs"].tolist() == pytest.approx(again["logprobs"].tolist(), rel=1e-5)
    assert found.metrics["loss:sum"] == pytest.approx(-sum(map(sum, logprobs_of(found))), rel=1e-6)


def test_the_seed_decides_how_adapters_begin_and_only_what_is_asked_for_has_some(
    adapter: TrainingClient, service: ServiceClient, rest: RestClient
) -> None:
    other = service.create_lora_training_client(MODEL, rank=4, seed=2, train_attn=False).result(PATIENCE_S)
    assert loss_of(other) == loss_of(adapter), "adapters say nothing at first"
    assert stepped(other, data()) != stepped(adapter, data())
    path = other.save_weights_for_sampler("without").result(PATIENCE_S).path
    info = rest.get_weights_info_by_tinker_path(path).result(60)
    assert (info.train_mlp, info.train_attn) == (True, False)
    with pytest.raises(BadRequestError, match="train_unembed alone"):
        service.create_lora_training_client(MODEL, train_mlp=False, train_attn=False).result(60)


def test_rank_0_trains_all_parameters(service: ServiceClient) -> None:
    client = service.create_lora_training_client(MODEL, rank=0).result(PATIENCE_S)
    info = client.get_info()
    assert (info.is_lora, info.lora_rank) == (False, None)
    before = loss_of(client)
    assert stepped(client, data()) != before


def test_a_state_is_saved_and_loaded(adapter: TrainingClient, service: ServiceClient) -> None:
    before = stepped(adapter, data())
    saved = adapter.save_state("first").result(PATIENCE_S)
    assert saved.path == f"tinker://{adapter.model_id}/weights/first"
    after = stepped(adapter, data())

    with_moments = service.create_training_client_from_state_with_optimizer(saved.path).result(PATIENCE_S)
    assert loss_of(with_moments) == before
    assert stepped(with_moments, data()) == after

    without = service.create_training_client_from_state(saved.path, user_metadata={"from": "first"}).result(PATIENCE_S)
    assert without.get_info().lora_rank == 4
    assert loss_of(without) == before
    assert stepped(without, data()) != after

    with pytest.warns(FutureWarning, match="load_state"):
        adapter.load_state(saved.path).result(PATIENCE_S)
    assert loss_of(adapter) == before
    with pytest.raises(RequestFailedError, match="first"):
        adapter.save_state("first").result(PATIENCE_S)
    adapter.save_state("first", overwrite=True).result(PATIENCE_S)
