"""Which weights get adapters, where they are in the layout, what they take, and which targets are refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.support.plans import step_work
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from horizon_server.errors import InvalidSpec
from horizon_server.planning.lora import left_out, linear_maps
from horizon_server.planning.machine import HostMemory
from horizon_server.planning.model_folder import open_model_folder
from horizon_server.planning.planner import Planner
from horizon_server.planning.trainable import open_for_training
from horizon_server.records.execution import Residency
from horizon_server.settings import load_settings
from horizon_server.spec import LoraSpec, TrainSpec, parse_job_spec
from horizon_server.spec.lora import BaseFormat
from horizon_server.store.adapters import TRANSPOSED, with_adapters
from horizon_server.store.layout import StoreLayout, build_layout, plane_sizes


def folder_of(place: Path, model_type: str, **changes: Any) -> Path:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 512}
    config = AutoConfig.for_model(model_type, num_attention_heads=4, **{**sizes, **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    model.save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("llama"), "llama", num_key_value_heads=2)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("mixtral"), "mixtral", num_local_experts=2)


def layout_of(folder: Path, **lora: Any) -> StoreLayout:
    return open_for_training(folder, TrainSpec(trainable=("lora",), lora=LoraSpec(**lora))).layout


def adapted(layout: StoreLayout) -> set[str]:
    return {tensor.adapts for _, tensor in layout.tensors() if tensor.adapts}


def test_all_linear_adapts_every_projection_of_the_layers(llama: Path) -> None:
    layout = layout_of(llama, rank=4)
    projections = (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
    )
    wanted = {f"model.layers.{i}.{name}.weight" for i in range(2) for name in (*projections, "mlp.down_proj")}
    assert adapted(layout) == wanted
    unit, a = layout.find("model.layers.1.self_attn.k_proj.lora_A.weight")
    _, b = layout.find("model.layers.1.self_attn.k_proj.lora_B.weight")
    assert unit.name == "layers.1"
    assert (a.shape, b.shape, a.adapts) == ((4, 128), (64, 4), "model.layers.1.self_attn.k_proj.weight")


def test_adapters_are_trained_and_the_model_is_frozen(llama: Path) -> None:
    layout, plain = layout_of(llama, rank=4, targets=("q_proj",)), open_model_folder(llama).layout
    trained = [tensor for _, tensor in layout.tensors() if tensor.trained]
    assert [t.name for t in trained] == [
        f"model.layers.{i}.self_attn.q_proj.lora_{half}.weight" for i in range(2) for half in "AB"
    ]
    assert all(tensor.exact and tensor.decay for tensor in trained)
    frozen = {tensor.name: tensor.shape for _, tensor in layout.tensors() if not tensor.trained}
    assert frozen == {tensor.name: tensor.shape for _, tensor in plain.tensors()}
    assert layout.num_trained_parameters == 2 * 2 * 4 * 128
    # Backward ends at the first layer: the embedding is frozen.
    assert layout.first_trained_unit == 1


def test_a_weight_that_is_stored_transposed_has_adapters_in_the_same_orientation(tmp_path: Path) -> None:
    layout = layout_of(folder_of(tmp_path, "gpt2", n_embd=128, n_layer=2, n_head=4), rank=4)
    # [128, 384] on disk: 128 inputs, 384 outputs.
    assert layout.find("transformer.h.0.attn.c_attn.lora_A.weight")[1].shape == (4, 128)
    assert layout.find("transformer.h.0.attn.c_attn.lora_B.weight")[1].shape == (384, 4)
    assert len(adapted(layout)) == 8


def test_what_is_transposed_is_what_the_classes_of_transformers_have_so() -> None:
    found = set()
    for config_class in MODEL_FOR_CAUSAL_LM_MAPPING:
        try:
            model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
        except (AttributeError, ImportError, ValueError):
            continue  # a class that needs a package that is not here
        if getattr(sys.modules[model_class.__module__], "Conv1D", None) is Conv1D:
            found.add(config_class.model_type)
    assert found == TRANSPOSED


def test_expressions_add_and_take_away_in_turn(llama: Path) -> None:
    def names(*expressions: str) -> set[str]:
        return {
            name.rpartition("layers.")[2].removesuffix(".weight")
            for name in adapted(layout_of(llama, targets=expressions))
        }

    assert names(r"0\..*q_proj", r"1\.mlp", "!down") == {"0.self_attn.q_proj", "1.mlp.gate_proj", "1.mlp.up_proj"}
    assert names("!mlp", r"!1\.") == {f"0.self_attn.{name}_proj" for name in "qkvo"}


@pytest.mark.parametrize(
    ("targets", "problem"),
    [
        (
            ("lm_head",),
            "train.lora.targets: 'lm_head' fits none of the model's 14 tensors, whose names are such as model.layers.0",
        ),
        (("!.",), "train.lora.targets: nothing is left to adapt after '!.'; leave a tensor"),
    ],
)
def test_targets_that_cannot_be_meant_are_refused(targets: tuple[str, ...], problem: str, llama: Path) -> None:
    with pytest.raises(InvalidSpec) as refused:
        layout_of(llama, targets=targets)
    assert str(refused.value).startswith(problem)
    assert [violation.field for violation in refused.value.violations] == ["train.lora.targets"]


def test_all_linear_leaves_out_experts_and_routers_and_says_so(mixtral: Path) -> None:
    layout = layout_of(mixtral)
    assert {name.rpartition("layers.0.")[2] for name in adapted(layout) if "layers.0." in name} == {
        f"self_attn.{name}_proj.weight" for name in "qkvo"
    }
    said = left_out(layout, LoraSpec())
    assert said.startswith("train.lora.targets is all-linear, which leaves out the experts (model.layers.0.")
    assert left_out(layout, LoraSpec(targets=("q_proj",))) == ""


def test_a_frozen_parameter_takes_two_bytes(tmp_path: Path) -> None:
    shapes = {"model.embed_tokens.weight": (32000, 1024), "model.norm.weight": (1024,), "lm_head.weight": (32000, 1024)}
    for index in range(4):
        prefix = f"model.layers.{index}."
        shapes |= {f"{prefix}self_attn.q_proj.weight": (1024, 1024), f"{prefix}mlp.up_proj.weight": (4096, 1024)}
    save_file({n: torch.empty(s, dtype=torch.bfloat16) for n, s in shapes.items()}, tmp_path / "model.safetensors")
    AutoConfig.for_model(
        "llama", hidden_size=1024, intermediate_size=4096, num_hidden_layers=4, vocab_size=32000, num_attention_heads=8
    ).save_pretrained(tmp_path)
    layout = layout_of(tmp_path, rank=8)
    trained = layout.num_trained_parameters
    stored = sum(plane_sizes(layout, grad_dtype_bytes=4).values()) - 16 * trained
    assert 2.0 <= stored / (layout.num_parameters - trained) < 2.002


@pytest.mark.parametrize(
    ("hidden", "layers", "inner", "gigabytes"), [(8192, 80, 28672, 141.1), (16384, 126, 53248, 811.7)]
)
def test_a_large_llama_takes_two_bytes_a_parameter_and_a_little_for_adapters(
    hidden: int, layers: int, inner: int, gigabytes: float
) -> None:
    shapes = {
        "model.embed_tokens.weight": (128256, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (128256, hidden),
    }
    for index in range(layers):
        prefix = f"model.layers.{index}."
        shapes |= {f"{prefix}self_attn.{name}_proj.weight": (hidden, hidden) for name in "qo"}
        shapes |= {f"{prefix}self_attn.{name}_proj.weight": (1024, hidden) for name in "kv"}
        shapes |= {f"{prefix}mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
        shapes |= {f"{prefix}mlp.down_proj.weight": (hidden, inner)}
        shapes |= {f"{prefix}{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    plain = build_layout(shapes, num_layers=layers, tied=False)
    maps = linear_maps(plain, LoraSpec())
    layout = with_adapters(plain, maps, rank=16, decay="trainer", is_bfloat16=lambda _: True)
    stored = sum(plane_sizes(layout, grad_dtype_bytes=4).values())
    # 16 bytes for each parameter of an adapter; the rest is the model.
    model_bytes = stored - 16 * layout.num_trained_parameters
    assert 2.0 <= model_bytes / plain.num_parameters < 2.0 * 1.001
    assert model_bytes / 1e9 == pytest.approx(gigabytes, rel=1e-3)
    assert layout.num_trained_parameters < 0.004 * plain.num_parameters


def test_a_model_that_does_not_fit_is_told_what_adapters_would_take(llama: Path) -> None:
    planner = Planner(
        load_settings(
            host_memory_limit_bytes=5_000_000,
            host_memory_reserve_bytes=0,
            device_arena_bytes=1 << 30,
            numa_interleave=False,
        ),
        memory=lambda: HostMemory(limit_bytes=1 << 40, available_bytes=1 << 40),
        num_threads=1,
    )
    plain = {"name": "a", "model": "m", "dataset": "d"}
    message = planner.plan(parse_job_spec(plain), llama).message
    assert "only a smaller model fits; train.trainable: lora (adapters next to the frozen model) needs " in message


def test_the_plan_says_which_experts_have_no_adapters(mixtral: Path) -> None:
    planner = Planner(
        load_settings(host_memory_reserve_bytes=0, device_arena_bytes=1 << 35, numa_interleave=False),
        memory=lambda: HostMemory(limit_bytes=1 << 40, available_bytes=1 << 40),
        num_threads=1,
    )
    spec = parse_job_spec({"name": "a", "model": "m", "dataset": "d", "train": {"trainable": "lora"}})
    plan = planner.plan(spec, mixtral)
    assert plan.warnings[0].startswith("train.lora.targets is all-linear, which leaves out the experts")
    assert plan.fits
    assert plan.num_trained_parameters == layout_of(mixtral).num_trained_parameters


def test_a_resident_layer_sends_up_its_adapters_alone(llama: Path) -> None:
    found = open_for_training(llama, TrainSpec(trainable=("lora",), lora=LoraSpec(rank=4)))
    work = step_work(
        found,
        tokens_per_step=1024,
        sequence_length=64,
        device_kind="cuda",
        grad_bytes=2,
        activation_placement="device",
        residency=Residency(resident_layers=1),
    )
    first, second = work.layers
    assert (first.resident, second.resident) == (False, True)
    layout = found.layout.units[2]
    assert second.upload_bytes == second.download_bytes == 2 * layout.trained_elements
    assert first.upload_bytes == 2 * layout.num_elements


@pytest.mark.parametrize("base", ["int8", "nf4"])
def test_a_packed_base_is_what_all_linear_adapts_and_the_experts(mixtral: Path, base: BaseFormat) -> None:
    layout = layout_of(mixtral, base=base)
    packed = {tensor.name for _, tensor in layout.tensors() if tensor.packing == base}
    assert packed > adapted(layout)
    assert {name for name in packed - adapted(layout) if ".experts." not in name} == set()
    kept = {tensor.name for _, tensor in layout.tensors() if tensor.packing == "none" and not tensor.trained}
    assert all(
        len(layout.find(name)[1].shape) == 1 or not name.startswith("model.layers.") or ".gate." in name
        for name in kept
    )
    assert all(layout.find(name)[1].exact is False for name in packed)


def test_the_section_is_for_adapters_only() -> None:
    plain = {"name": "a", "model": "m", "dataset": "d"}
    with pytest.raises(InvalidSpec) as refused:
        parse_job_spec({**plain, "train": {"lora": {"rank": 8}}})
    assert str(refused.value) == (
        "train.lora.rank is for adapters, which this job does not train; set train.trainable: lora or leave train.lora "
        "out"
    )
    spec = parse_job_spec({**plain, "train": {"trainable": "lora", "lora": {"rank": 8, "targets": "q_proj"}}}).train
    assert (spec.lora.rank, spec.lora.targets, spec.lora.scale) == (8, ("q_proj",), 4.0)
    assert LoraSpec(rank=16, alpha=8, rslora=True).scale == 2.0


@pytest.mark.parametrize(
    ("train", "field"),
    [
        ({"trainable": ["lora", "norm"]}, "train.trainable"),
        ({"trainable": "lora", "lora": {"rank": 0}}, "train.lora.rank"),
        ({"trainable": "lora", "lora": {"rank": 4097}}, "train.lora.rank"),
        ({"trainable": "lora", "lora": {"dropout": 1.0}}, "train.lora.dropout"),
        ({"trainable": "lora", "lora": {"alpha": 0}}, "train.lora.alpha"),
        ({"trainable": "lora", "lora": {"base": "int4"}}, "train.lora.base"),
        ({"trainable": "lora", "lora": {"targets": ["all-linear", "q_proj"]}}, "train.lora.targets"),
        ({"trainable": "lora", "lora": {"targets": ["(q_proj"]}}, "train.lora.targets"),
    ],
)
def test_a_wrong_field_is_named(train: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidSpec) as refused:
        parse_job_spec({"name": "a", "model": "m", "dataset": "d", "train": train})
    assert [violation.field for violation in refused.value.violations] == [field]
