"""Which tensors a learning-rate group is for, and the groups that are refused when a job is planned."""

from __future__ import annotations

import pytest

from horizon_server.errors import InvalidSpec
from horizon_server.planning.lr_groups import with_lr_groups
from horizon_server.spec import LrGroup
from horizon_server.store.layout import StoreLayout, build_layout, with_decay

SHAPES = {
    "model.embed_tokens.weight": (64, 8),
    "model.layers.0.mlp.weight": (8, 8),
    "model.layers.0.norm.weight": (8,),
    "model.layers.1.mlp.weight": (8, 8),
    "model.layers.1.norm.weight": (8,),
    "model.norm.weight": (8,),
    "lm_head.weight": (64, 8),
}


@pytest.fixture
def layout() -> StoreLayout:
    return build_layout(SHAPES, num_layers=2, tied=False)


def groups(*given: tuple[str, float]) -> list[LrGroup]:
    return [LrGroup(match=match, scale=scale) for match, scale in given]


def refusal(layout: StoreLayout, *given: tuple[str, float]) -> str:
    with pytest.raises(InvalidSpec) as caught:
        with_lr_groups(layout, groups(*given))
    (violation,) = caught.value.violations
    assert violation.field == "train.lr_groups"
    return violation.description


def test_the_first_group_that_fits_counts(layout: StoreLayout) -> None:
    found = with_lr_groups(layout, groups(("embed_tokens", 0.1), (r"layers\.1\.", 2.0), (r"norm\.weight$", 0.5)))

    scales = {tensor.name: tensor.lr_scale for _, tensor in found.tensors()}
    assert scales == {
        "model.embed_tokens.weight": 0.1,
        "model.layers.0.mlp.weight": 1.0,
        "model.layers.0.norm.weight": 0.5,
        "model.layers.1.mlp.weight": 2.0,
        "model.layers.1.norm.weight": 2.0,
        "model.norm.weight": 0.5,
        "lm_head.weight": 1.0,
    }
    assert with_decay(found, "trainer") == found, "decay and scales do not touch each other"
    assert with_lr_groups(layout, []) == layout


def test_a_group_without_effect_is_refused_by_name(layout: StoreLayout) -> None:
    assert refusal(layout, ("norm", 2.0), ("embedding", 0.5)) == (
        "train.lr_groups: 'embedding' fits none of the model's 7 tensors, whose names are such as "
        "model.embed_tokens.weight, model.layers.0.norm.weight, model.layers.1.norm.weight"
    )
    assert refusal(layout, ("layers", 2.0), (r"layers\.0\.norm", 0.5)).startswith(
        r"train.lr_groups: 'layers\\.0\\.norm' fits only tensors that groups before it fit too"
    )
