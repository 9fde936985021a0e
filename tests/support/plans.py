"""Recipes and executions from one list of settings, for tests that name a few of them."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from horizon_server.planning.ledger import LayerMemory, plan_memory
from horizon_server.planning.model_folder import ModelFolder, ModelShape
from horizon_server.planning.step_parts import TODAY, EngineFacts, StepWork
from horizon_server.planning.step_work import work_of_step
from horizon_server.recipe import Recipe
from horizon_server.records.execution import DEFAULT_COMPUTE_DTYPE, Execution, Residency
from horizon_server.records.plan import Ledger
from horizon_server.store.layout import StoreLayout

_OF_RECIPE = {field.name for field in fields(Recipe)}
_OF_RESIDENCY = {field.name for field in fields(Residency)}


def settings(**given: Any) -> tuple[Recipe, Execution]:
    """A recipe and an execution with these fields, each in the one that has it; layers that keep products have no
    limit."""
    recipe = {"learning_rate": 1e-3, **{name: value for name, value in given.items() if name in _OF_RECIPE}}
    residency = {"product_bytes": 1 << 60, **{name: value for name, value in given.items() if name in _OF_RESIDENCY}}
    other = {name: value for name, value in given.items() if name not in _OF_RECIPE | _OF_RESIDENCY}
    if "residency" in other:
        residency = vars(other.pop("residency"))
    dtype = DEFAULT_COMPUTE_DTYPE[other.get("device_kind", "host")]
    execution: dict[str, Any] = {"compute_dtype": dtype, "residency": Residency(**residency), **other}
    return Recipe(**recipe), Execution(**execution)


def folder_of(layout: StoreLayout, shape: ModelShape) -> ModelFolder:
    """A model as the planner sees it, without files."""
    return ModelFolder(path=Path(), config={}, shape=shape, headers={}, layout=layout)


def ledger_of(
    layout: StoreLayout,
    shape: ModelShape,
    *,
    layer: LayerMemory | None = None,
    longest_document: int | None = None,
    **given: Any,
) -> Ledger:
    """The memory of a job with these settings."""
    recipe, execution = settings(**given)
    return plan_memory(folder_of(layout, shape), recipe, execution, layer=layer, longest_document=longest_document)


def step_work(folder: ModelFolder, *, facts: EngineFacts = TODAY, **given: Any) -> StepWork:
    """A step of a job with these settings."""
    return work_of_step(folder, *settings(**given), facts=facts)
