"""Training by Tinker's SDK: every method of its TrainingClient, and what its losses are."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.component.tinker.conftest import TEXTS, data, datum, logprobs_of
from tests.support.pushed_state import MODEL
from tinker import RequestFailedError, ServiceClient, TrainingClient, types

ADAM = types.AdamParams(learning_rate=1e-2)


def trained(service: ServiceClient, *, rank: int = 4, seed: int = 1, **options: Any) -> TrainingClient:
    return service.create_lora_training_client(MODEL, rank=rank, seed=seed, **options).result(240)


def loss_of(client: TrainingClient) -> float:
    return client.forward(data(), "cross_entropy").result(240).metrics["loss:sum"]


def test_a_model_says_what_it_is(adapter: TrainingClient, service: ServiceClient) -> None:
    info = adapter.get_info()
    assert (info.model_id, info.is_lora, info.lora_rank) == (adapter.model_id, True, 4)
    assert info.model_data.model_name == MODEL
    assert adapter.model_id == f"{service.holder.get_session_id()}:train:0"


def test_a_forward_pass_has_the_log_probability_of_each_target_and_changes_nothing(adapter: TrainingClient) -> None:
    found = adapter.forward(data(), "cross_entropy").result(240)
    again = adapter.forward(data(), "cross_entropy").result(240)
    assert [len(of_text) for of_text in logprobs_of(found)] == [len(tokens) - 1 for tokens in TEXTS]
    assert logprobs_of(found) == logprobs_of(again)
    assert found.metrics["loss:sum"] == pytest.approx(-sum(map(sum, logprobs_of(found))), rel=1e-6)
    with pytest.raises(RequestFailedError, match="gradient"):
        adapter.optim_step(ADAM).result(240)


# What docs/sessions.md says of each, with r = exp(log p - logprobs).
LOSSES: dict[str, Any] = {
    "importance_sampling": lambda p, q, a: -torch.exp(p - q) * a,
    "ppo": lambda p, q, a: -torch.minimum(torch.exp(p - q) * a, torch.exp(p - q).clamp(0.8, 1.2) * a),
    "cispo": lambda p, q, a: -torch.exp(p - q).clamp(0.8, 1.2) * a * p,
    "dro": lambda p, q, a: -(a * p - 0.05 / 2 * (p - q) ** 2),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_is_a_sum_over_targets(adapter: TrainingClient, loss: Any) -> None:
    now = logprobs_of(adapter.forward(data(), "cross_entropy").result(240))
    generator = torch.Generator().manual_seed(3)
    wanted, batch = 0.0, []
    for tokens, of_text in zip(TEXTS, now, strict=True):
        p = torch.tensor(of_text, dtype=torch.float64)
        q = p + torch.randn(len(of_text), generator=generator) * 0.3
        a = torch.randn(len(of_text), generator=generator)
        batch.append(datum(tokens, logprobs=q.tolist(), advantages=a.tolist()))
        wanted += float(LOSSES[loss](p, q, a).sum())
    found = adapter.forward(batch, loss).result(240)
    assert found.metrics["loss:sum"] == pytest.approx(wanted, rel=1e-5, abs=1e-5)
    assert logprobs_of(found) == now


def test_the_options_of_a_loss_are_taken(adapter: TrainingClient) -> None:
    (now,) = logprobs_of(adapter.forward([datum(TEXTS[0])], "cross_entropy").result(240))
    before = [value - 1.0 for value in now]  # r is e, above what is clipped
    batch = [datum(TEXTS[0], logprobs=before, advantages=[1.0] * len(now))]
    for high in (1.2, 2.0):
        found = adapter.forward(batch, "ppo", {"clip_high_threshold": high}).result(240)
        assert found.metrics["loss:sum"] == pytest.approx(-high * len(now), rel=1e-6)
    with pytest.raises(Exception, match="clip_hihg"):
        adapter.forward(batch, "ppo", {"clip_hihg": 1.0}).result(240)


def test_gradients_add_up_until_the_step(service: ServiceClient) -> None:
    whole, parts = trained(service), trained(service)
    whole.forward_backward(data(), "cross_entropy")
    for one in data():
        parts.forward_backward([one], "cross_entropy")
    steps = [client.optim_step(ADAM).result(240) for client in (whole, parts)]
    assert loss_of(whole) == pytest.approx(loss_of(parts), rel=1e-6)
    assert steps[0].metrics is not None and steps[1].metrics is not None
    assert steps[0].metrics.keys() == steps[1].metrics.keys()
    # The norm is clipped where that is asked for.
    before = loss_of(whole)
    whole.forward_backward(data(), "cross_entropy")
    whole.optim_step(types.AdamParams(learning_rate=0.0, grad_clip_norm=1e-3)).result(240)
    assert loss_of(whole) == before


def test_a_loss_of_ones_own_has_its_own_gradient(service: ServiceClient) -> None:
    """The sum of the losses of texts, each a mean, is cross entropy with weights of one over their lengths."""

    def mean(_: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        losses = torch.stack([-one.mean() for one in logprobs])
        return losses.sum(), {"worst": float(losses.max())}

    own, weighted = trained(service), trained(service)
    found = own.forward_backward_custom(data(), mean)
    own.optim_step(ADAM).result(240)
    weights = [datum(tokens, weights=[1 / (len(tokens) - 1)] * (len(tokens) - 1)) for tokens in TEXTS]
    plain = weighted.forward_backward(weights, "cross_entropy").result(240)
    weighted.optim_step(ADAM).result(240)
    assert found.result(240).metrics["loss:sum"] == pytest.approx(plain.metrics["loss:sum"], rel=1e-5)
    assert found.result(240).metrics["worst"] > 0
    assert loss_of(own) == pytest.approx(loss_of(weighted), rel=1e-5)


def test_a_loss_that_the_sdk_traces_runs_on_the_laptop(adapter: TrainingClient, service: ServiceClient) -> None:
    def likelihood(logprobs: Any, weights: Any) -> Any:
        loss = -(logprobs * weights).sum()
        return loss, {"custom/likelihood:sum": loss}

    handle = service.create_custom_loss(likelihood, {"logprobs": 1, "weights": 1}).result(60)
    wanted = loss_of(adapter)
    found = adapter.forward_backward_custom(data(), handle).result(240)
    adapter.optim_step(types.AdamParams(learning_rate=0.0)).result(240)
    assert found.metrics["loss:sum"] == pytest.approx(wanted, rel=1e-6)


def test_parts_of_a_large_batch_are_put_in_order(service: ServiceClient) -> None:
    """The SDK sends a batch of more than 1,024 texts in parts, the first of them last."""
    client = trained(service, rank=1)
    texts = [[5 + number % 60, 9, 11 + number % 7] for number in range(1100)]
    found = client.forward_backward([datum(tokens) for tokens in texts], "cross_entropy").result(240)
    client.optim_step(ADAM).result(240)
    assert len(found.loss_fn_outputs) == len(texts)
    first, again = found.loss_fn_outputs[0], found.loss_fn_outputs[420]  # the same text
    assert first["logprobs"].tolist() == pytest.approx(again["logprobs"].tolist(), rel=1e-5)
    assert found.metrics["loss:sum"] == pytest.approx(-sum(map(sum, logprobs_of(found))), rel=1e-6)


def test_only_what_is_asked_for_is_trained_and_the_seed_decides_how_it_begins(service: ServiceClient) -> None:
    losses = []
    for options in ({"seed": 1}, {"seed": 1}, {"seed": 2}, {"train_mlp": False}, {"train_attn": False}):
        client = trained(service, **options)
        client.forward_backward(data(), "cross_entropy")
        client.optim_step(ADAM)
        losses.append(loss_of(client))
    assert losses[0] == losses[1]
    assert len(set(losses)) == 4
    assert all(math.isfinite(loss) for loss in losses)


def test_rank_0_trains_all_parameters(service: ServiceClient) -> None:
    client = trained(service, rank=0)
    info = client.get_info()
    assert (info.is_lora, info.lora_rank) in ((False, None), (False, 0))
    before = loss_of(client)
    for _ in range(3):
        client.forward_backward(data(), "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=1e-3))
    assert loss_of(client) < before


def test_a_state_is_saved_and_loaded(service: ServiceClient) -> None:
    client = trained(service)
    client.forward_backward(data(), "cross_entropy")
    client.optim_step(ADAM)
    saved = client.save_state("first").result(240)
    assert saved.path == f"tinker://{client.model_id}/weights/first"
    before = loss_of(client)
    client.forward_backward(data(), "cross_entropy")
    client.optim_step(ADAM)
    after = loss_of(client)

    with_moments = service.create_training_client_from_state_with_optimizer(saved.path).result(240)
    assert loss_of(with_moments) == before
    with_moments.forward_backward(data(), "cross_entropy")
    with_moments.optim_step(ADAM)
    assert loss_of(with_moments) == after

    without = service.create_training_client_from_state(saved.path, user_metadata={"from": "first"}).result(240)
    assert without.get_info().lora_rank == 4
    assert loss_of(without) == before
    without.forward_backward(data(), "cross_entropy")
    without.optim_step(ADAM)
    assert loss_of(without) != after

    with pytest.warns(FutureWarning, match="load_state"):
        client.load_state_with_optimizer(saved.path).result(240)
    assert loss_of(client) == before
    with pytest.warns(FutureWarning, match="load_state"):
        client.load_state(saved.path).result(240)
    assert loss_of(client) == before
