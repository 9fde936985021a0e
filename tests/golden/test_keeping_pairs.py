"""The pair of graphs that keeps products: which layers get one, what refuses it, and what the job says of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tests.support.tiny_models import config_of, template_of
from tests.support.traced_layers import layer_graphs
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from horizon_server.children.entry import EventWriter
from horizon_server.engine.compiled import build
from horizon_server.engine.compiled.call_pattern import NotCompilable
from horizon_server.engine.compiled.graphs import Graph, LayerGraphs
from horizon_server.engine.compiled.kept import keeping_products
from horizon_server.engine.compiled.layers import is_complete, keeping_kinds
from horizon_server.engine.compiled.library import CodeLibrary, Target, layer_key, products_key
from horizon_server.engine.compiled.trial import Trial
from horizon_server.engine.template import Template
from horizon_server.records.execution import Execution, Residency
from horizon_server.spec import parse_job_spec
from horizon_server.store.layout import with_trained
from horizon_server.worker.compilation import compiled_layers
from horizon_server.worker_link.orders import Orders

TARGET = Target(dtype=torch.float32, device=torch.device("cpu"), num_threads=1, num_tokens=48)
TEMPLATE = template_of(config_of("llama"))


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Has builds of this test compile nothing, and their trials find these errors, and in what; collects how many
    inputs each backward took."""

    def set_errors(*errors: tuple[Any, ...]) -> list[int]:
        left, taken = list(errors), list[int]()

        def noted(graphs: LayerGraphs, path: Path) -> None:
            taken.append(len(graphs.backward.inputs))
            path.touch()

        def tried(*_: Any, **__: Any) -> Trial:
            error, *names = left.pop(0) if left else (0.0,)
            return Trial(error=error, worst="output", speedup=2.0, differing=frozenset(names))

        monkeypatch.setattr(build, "build_package", noted)
        monkeypatch.setattr(build, "LayerCode", lambda path: None)
        monkeypatch.setattr(build, "try_layer", tried)
        return taken

    return set_errors


def test_only_the_kinds_of_the_last_layers_get_one(compiles: Callable[..., list[int]], tmp_path: Path) -> None:
    layout = with_trained(TEMPLATE.layout, lambda name: "layers.1.mlp" in name, is_bfloat16=lambda _: False)
    template, library, taken = (
        Template.from_config(config_of("llama"), layout=layout),
        CodeLibrary(tmp_path),
        compiles(),
    )
    assert template.layer_kinds == [0, 1, 0]
    assert [keeping_kinds(template, number) for number in range(4)] == [set(), {0}, {0, 1}, {0, 1}]

    assert build.build_missing(template, library, TARGET, lambda text: None, product_layers=1) == []

    assert len(taken) == 3 and taken[1] > taken[0]
    found = [library.find(products_key(layer_key(template, kind, TARGET))) for kind in (0, 1)]
    assert [entry is not None for entry in found] == [True, False]
    assert is_complete(template, library, TARGET, product_layers=1)
    assert not is_complete(template, library, TARGET, product_layers=2)
    # Later jobs compile what is left.
    assert build.build_missing(template, library, TARGET, lambda text: None, product_layers=2) == []
    assert len(taken) == 4


@pytest.mark.parametrize(
    ("errors", "refusal"),
    [
        # Of the layer against the eager one, of the pair against the layer, of the layer against itself.
        (((1e-7, "q"), (0.0,)), ""),
        (((1e-7, "q"), (1e-9, "q"), (0.0,)), "must have the same bits"),
        (((1e-7, "q"), (math.inf, "q"), (0.0,)), "must have the same bits"),
        (((1e-7, "q"), (1e-9, "q"), (1e-9, "k", "q")), ""),
        (((1e-7, "q"), (1e-9, "q", "output"), (1e-9, "k", "q")), "must have the same bits"),
        (((1e-7, "q"), (1e-2, "q"), (1e-9, "q")), "must have the same bits"),
        (((1e-7, "q"), (math.inf, "q"), (1e-9, "q")), "must have the same bits"),
    ],
)
def test_a_pair_that_changes_a_bit_is_refused_unless_the_layer_itself_does(
    errors: tuple[tuple[Any, ...], ...], refusal: str, compiles: Callable[..., list[int]], tmp_path: Path
) -> None:
    library, texts = CodeLibrary(tmp_path), list[str]()
    compiles(*errors)
    # The layer itself is compiled all the same.
    assert build.build_missing(TEMPLATE, library, TARGET, texts.append, product_layers=1) == []
    entry = library.find(products_key(layer_key(TEMPLATE, 0, TARGET)))
    assert entry is not None and bool(entry.refusal) == bool(refusal) and refusal in entry.refusal
    assert any("products are not kept" in text for text in texts) == bool(refusal)
    # A refusal is kept.
    assert is_complete(TEMPLATE, library, TARGET, product_layers=1)


def test_a_compiler_that_ended_the_process_costs_a_later_job_its_products_alone(
    compiles: Callable[..., list[int]], tmp_path: Path
) -> None:
    library, key = CodeLibrary(tmp_path), products_key(layer_key(TEMPLATE, 0, TARGET))
    compiles()
    (library.make_scratch() / f"{key}.tried").touch()
    assert build.build_missing(TEMPLATE, library, TARGET, lambda text: None, product_layers=1) == []
    entry = library.find(key)
    assert entry is not None and "the compiler ended" in entry.refusal


def test_a_product_that_is_changed_in_place_is_not_kept() -> None:
    def joint(weight_DD: Tensor, hidden_TD: Tensor, gradient_TD: Tensor) -> list[Tensor]:
        product_TD = hidden_TD @ weight_DD
        # As a model's code may scale it.
        scaled_TD = product_TD.mul_(2.0)
        return [gradient_TD * scaled_TD, scaled_TD + 1.0]

    inputs = [torch.ones(4, 4), torch.ones(3, 4), torch.ones(3, 4)]
    module = make_fx(joint)(*inputs)
    graphs = layer_graphs(TEMPLATE, 0)
    with pytest.raises(NotCompilable, match="in place"):
        keeping_products(
            dataclasses.replace(
                graphs,
                forward=dataclasses.replace(graphs.forward, inputs=inputs[:2]),
                joint=Graph(module=module, inputs=inputs, shape_env=graphs.joint.shape_env),
            )
        )


def test_the_job_says_that_memory_planned_for_products_stays_unused() -> None:
    class Heard(EventWriter):
        def __init__(self) -> None:
            self.texts: list[str] = []

        def send(self, line: Any) -> None:
            self.texts.append(line.text)

    heard, spec = Heard(), parse_job_spec({"name": "j", "model": "m", "dataset": "d", "train": {"max_steps": 1}})
    for product_layers in (0, 2):
        plan = SimpleNamespace(execution=Execution(residency=Residency(product_layers=product_layers)))
        request: Any = SimpleNamespace(spec=spec, plan=plan, compiled=None)
        # A node without a folder for compiled layers: all layers run eagerly.
        layers = compiled_layers(
            request,
            cast(Any, None),
            TEMPLATE,
            kept=None,
            num_steps=1,
            take_device=lambda: True,
            events=heard,
            orders=Orders(),
        )
        assert layers.num_keeping == 0
    (text,) = heard.texts
    assert text.startswith("the activations of 0 of the last 2 layers are kept") and text.endswith("stays unused")
