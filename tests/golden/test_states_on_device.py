"""Optimizer states that stay on the device, which updates them: no bit depends on it, the store has them whenever it is
read, and the account is the plan's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.golden.test_kept_on_device import PLANES, assert_same, device_of, grad_dtype_of
from torch import Tensor

from horizon_server.engine.micro_batch import MicroBatch

if TYPE_CHECKING:
    from tests.support.tiny_models import Engine, Run, TinyModel

KINDS = ["host", "host in bf16", "cuda"]
ALL: dict[str, Any] = {"resident_layers": 3, "state_layers": 3}
SOME: dict[str, Any] = {"resident_layers": 2, "state_layers": 1}
CLIPPING = [{"max_grad_norm": 0.05}, {"max_grad_norm": None}]


def started(engine: Engine, model: TinyModel, kind: str, **options: Any) -> Run:
    """A run on a device that shows a use after free and pauses at random. Without clipping, the store keeps no
    gradients."""
    switches: dict[str, Any] = {"poison_on_free": True, "max_delay_s": 0.0005, "delay_seed": len(options)}
    if kind == "host in bf16":
        kind, switches["compute_dtype"] = "host", torch.bfloat16
    device = device_of(kind, **switches)
    grad_dtype = grad_dtype_of(device) if options.get("max_grad_norm", 1.0) is not None else None
    store = options.pop("store", None) or model.store(grad_dtype=grad_dtype)
    return engine.start(model, store=store, device=device, **options)


def rows_of(engine: Engine, step: int) -> list[MicroBatch]:
    return [engine.pack(engine.documents(12, 7, seed=step)), engine.pack(engine.documents(21, seed=step + 50))]


def planes_of(run: Run) -> dict[str, Tensor]:
    return {plane: run.store.plane(plane).clone() for plane in PLANES}


def trained(engine: Engine, run: Run, *, between: Callable[[Run], object] = lambda _: None) -> Any:
    """All figures of three steps with an evaluation after each, and every plane."""
    numbers = []
    for step in range(3):
        rows = rows_of(engine, step)
        report = run.trainer.train_step(rows)
        assert report.skipped == ""
        numbers += [report.loss, report.grad_norm, run.trainer.evaluate(rows).eval_loss]
        between(run)
    run.trainer.flush()
    planes = planes_of(run)
    run.trainer.close()
    held = run.device.arena.held_bytes()
    assert {name: size for name, size in held.items() if size} in ({}, {"gradients": held["gradients"]})
    return numbers, planes


@pytest.mark.parametrize("options", CLIPPING, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gpt2", "gpt_oss", "deepseek_v3"])
def test_no_bit_depends_on_where_the_states_are(
    architecture: str, kind: str, options: dict[str, Any], engine: Engine
) -> None:
    model = engine.tiny_model(architecture)
    wanted = trained(engine, started(engine, model, kind, **options))
    for kept in (SOME, ALL):
        assert_same(wanted, trained(engine, started(engine, model, kind, **kept, **options)))
