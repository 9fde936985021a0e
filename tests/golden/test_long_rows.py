"""Rows beyond the lengths at which some architectures change how they count positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from torch import Tensor, nn

from horizon_server.engine.micro_batch import MicroBatch

from .test_gradients import check, of_autograd

if TYPE_CHECKING:
    from tests.support.tiny_models import Engine

Pack = Callable[[list[Tensor]], MicroBatch]

THRESHOLD = 40
_LONG_ROPE: dict[str, Any] = {
    "max_position_embeddings": 256,
    "original_max_position_embeddings": THRESHOLD,
    "head_dim": 8,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [2.0, 3.0, 5.0, 9.0],
        "original_max_position_embeddings": THRESHOLD,
    },
}
COUNTS_ROW_POSITIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": ("phi3", _LONG_ROPE),
    "phimoe": (
        "phimoe",
        {
            **_LONG_ROPE,
            "rope_parameters": {**_LONG_ROPE["rope_parameters"], "short_mscale": 1.1, "long_mscale": 1.3},
        },
    ),
    "minicpm3": ("minicpm3", _LONG_ROPE),
    "llama4": (
        "llama4_text",
        {"floor_scale": THRESHOLD, "attn_scale": 0.5, "no_rope_layers": [1, 0, 1], "max_position_embeddings": 256},
    ),
    "llama4_chunks": (
        "llama4_text",
        {"attention_chunk_size": THRESHOLD, "no_rope_layers": [1, 1, 0], "max_position_embeddings": 256},
    ),
}
DYNAMIC_ROPE: dict[str, Any] = {
    "max_position_embeddings": 32,
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
}


@pytest.mark.parametrize("name", COUNTS_ROW_POSITIONS)
def test_documents_on_both_sides_of_a_threshold_train_as_if_alone(
    name: str,
    engine: Engine,
) -> None:
    model_type, changes = COUNTS_ROW_POSITIONS[name]
    model = engine.tiny_model(model_type, **changes)
    rows = [engine.documents(60, 30), engine.documents(12, 20, 25, seed=1), engine.documents(9, 14, seed=2)]
    run = engine.start(model)

    report = run.trainer.train_step([engine.pack(row) for row in rows])

    check(
        report,
        run,
        of_autograd(model, engine.plain_loss, [engine.pack([document]) for row in rows for document in row]),
    )


def test_a_rotary_table_that_grows_with_the_row_is_the_same_in_every_step(
    engine: Engine,
) -> None:
    model = engine.tiny_model("llama", **DYNAMIC_ROPE)
    rows = [engine.pack([document]) for document in engine.documents(32, 32, 32)]
    run = engine.start(model, head_chunk_tokens=100, learning_rate=0.0)

    reports = [run.trainer.train_step(rows) for _ in range(2)]

    check(reports[1], run, of_autograd(model, engine.plain_loss, rows))


@pytest.mark.parametrize("name", ["phi3", "dynamic"])
def test_a_step_leaves_the_modules_as_they_were(
    name: str,
    engine: Engine,
) -> None:
    model_type, changes = COUNTS_ROW_POSITIONS.get(name, ("llama", DYNAMIC_ROPE))
    model = engine.tiny_model(model_type, **changes)
    run = engine.start(model, head_chunk_tokens=100)
    rows = [engine.pack([document]) for document in engine.documents(*([32] * 3 if name == "dynamic" else [60, 30]))]
    modules = list(model.template._model.modules())
    before = [_state_of(module) for module in modules]

    run.trainer.train_step(rows)
    run.trainer.evaluate(rows)

    assert [_state_of(module) for module in modules] == before


def test_a_layer_that_changes_itself_is_put_back_after_each_call(engine: Engine) -> None:
    model = engine.tiny_model("llama")
    layers = model.template._layers
    found: list[bool] = []

    def remember(layer: nn.Module, _: object) -> None:
        found.append(hasattr(layer, "longest_row"))
        vars(layer)["longest_row"] = 32

    hooks = [layer.register_forward_pre_hook(remember) for layer in set(layers)]
    run = engine.start(model)
    rows = [engine.pack([document]) for document in engine.documents(32, 32)]

    run.trainer.train_step(rows)
    run.trainer.evaluate(rows)

    for hook in hooks:
        hook.remove()
    assert len(found) > 2 * len(layers), "forward, recompute and evaluation call every layer"
    assert not any(found)
    assert not any(hasattr(layer, "longest_row") for layer in layers)


def _state_of(module: nn.Module) -> dict[str, object]:
    buffers = {name: buffer.tolist() for name, buffer in module.named_buffers(recurse=False) if not buffer.is_meta}
    plain = {name: value for name, value in vars(module).items() if isinstance(value, (bool, int, float, str))}
    return {**plain, **buffers, "names": sorted(name for name in vars(module) if name != "training")}
