"""Stubs in small models of our own: what they record, and the models they refuse."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from horizon_server.engine.layer_stubs import ANSWERS, LayerCall, Stub, Tape, try_embedding
from horizon_server.errors import InvalidModel

Forward = Callable[[list[nn.Module], Tensor], Tensor]


def capture(forward: Forward) -> tuple[Tape, Tensor]:
    tape = Tape(num_layers=3)
    stubs: list[nn.Module] = [Stub(nn.Linear(2, 2), index, tape) for index in range(3)]
    forward(stubs, torch.ones(1, 4, 2))
    return tape, torch.ones(1, 4, 2)


def one_after_the_other(layers: list[nn.Module], hidden: Tensor) -> Tensor:
    for layer in layers:
        hidden = layer(hidden, "mask", scale=2)
    return hidden


def by_keyword(layers: list[nn.Module], hidden: Tensor) -> Tensor:
    for layer in layers:
        hidden = layer(hidden_states=hidden, scale=2)
    return hidden


def scaled_between(layers: list[nn.Module], hidden: Tensor) -> Tensor:
    for layer in layers:
        hidden = layer(hidden) * 0.5
    return hidden


def backwards(layers: list[nn.Module], hidden: Tensor) -> Tensor:
    for layer in reversed(layers):
        hidden = layer(hidden)
    return hidden


def twice(layers: list[nn.Module], hidden: Tensor) -> Tensor:
    return one_after_the_other(layers, one_after_the_other(layers[:1], hidden))


def not_all(layers: list[nn.Module], hidden: Tensor) -> Tensor:
    return one_after_the_other(layers[:2], hidden)


def without_hidden(layers: list[nn.Module], hidden: Tensor) -> Tensor:
    return torch.as_tensor(layers[0]("nothing"))


def test_calls_are_recorded_and_can_be_made_again() -> None:
    tape, hidden = capture(one_after_the_other)
    first, calls = tape.finish_capture()

    assert torch.equal(first, hidden)
    assert [call.with_hidden(hidden) for call in calls] == [((hidden, "mask"), {"scale": 2})] * 3
    tape, hidden = capture(by_keyword)
    assert tape.finish_capture()[1][2].with_hidden(hidden) == ((), {"scale": 2, "hidden_states": hidden})


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (scaled_between, "changes the hidden state between layers 0 and 1"),
        (backwards, "layer 2 is called out of order"),
        (twice, "layer 0 is called out of order or twice"),
        (without_hidden, "layer 0 is called without a hidden state"),
    ],
)
def test_a_forward_that_is_more_than_its_layers_in_order_is_refused(forward: Forward, message: str) -> None:
    with pytest.raises(InvalidModel, match=message):
        capture(forward)


def test_a_layer_that_is_left_out_is_noticed() -> None:
    tape, _ = capture(not_all)
    with pytest.raises(InvalidModel, match="calls 2 of its 3 layers"):
        tape.finish_capture()


@pytest.mark.parametrize("gives_embedding", [False, True])
def test_layers_that_get_more_of_the_embedding_than_the_hidden_state_are_refused(gives_embedding: bool) -> None:
    tape, model = Tape(num_layers=2), nn.Module()
    model.__dict__["config"] = SimpleNamespace(model_type="per-layer-inputs")
    layers = [nn.Linear(2, 2) for _ in range(2)]
    stubs = [Stub(layer, index, tape) for index, layer in enumerate(layers)]

    def embed(parameters: Mapping[str, Tensor], ids_T: Tensor, _: Tensor) -> tuple[Tensor, list[LayerCall]]:
        tape.start_capture()
        embedded = hidden = parameters["table"][ids_T][None]
        for stub in stubs:
            hidden = stub(hidden, embedded * 2 if gives_embedding else torch.ones(1))
        return tape.finish_capture()

    refused = pytest.raises(InvalidModel, match="layer 0 gets more from the embedding than the hidden state")
    with refused if gives_embedding else nullcontext():
        assert len(try_embedding(cast(PreTrainedModel, model), tape, embed, {"table": (8, 2)}, layers)) == 2


def test_injected_states_stand_for_the_layers() -> None:
    tape = Tape(num_layers=2)
    tape.answer = ANSWERS[1]
    stubs = [Stub(nn.Linear(2, 2), index, tape) for index in range(2)]
    given = torch.full((1, 4, 2), 7.0)
    with tape.injecting(given):
        (first,) = stubs[0](torch.zeros(1, 4, 2))
        (last,) = stubs[1](first)
    assert last is given


def test_a_stub_answers_for_its_layer() -> None:
    stub = Stub(nn.Linear(2, 5), 0, Tape(num_layers=1))
    assert stub.out_features == 5
    assert list(stub.parameters()) == []
