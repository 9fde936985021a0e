"""Experts in pages: how a unit is divided, what the plan says of them, and when it proposes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horizon_server.errors import InvalidSpec
from horizon_server.planning.asked import page_elements_of, with_spec
from horizon_server.planning.machine import HostMemory
from horizon_server.planning.planner import Planner
from horizon_server.records.execution import Execution
from horizon_server.records.plan import Plan, PlannedMachine
from horizon_server.settings import load_settings
from horizon_server.spec import parse_job_spec
from horizon_server.store.layout import StoreLayout, build_layout, with_trained
from horizon_server.store.pages import MOST_PAGE_ELEMENTS, UnitPart, paged_unit
from horizon_server.store.safetensors_files import write_outline

GIB = 1 << 30
WIDTH, INNER, NUM_EXPERTS, LAYERS = 2880, 2880, 128, 36


def layout_of(num_experts: int, inner: int, *, stacked: bool, frozen: str = "") -> StoreLayout:
    """One layer of experts, of odd sizes, next to other tensors."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (8, 7),
        "model.layers.0.self_attn.q_proj.weight": (7, 7),
        "model.layers.0.mlp.gate.weight": (num_experts, 7),
        "model.layers.0.mlp.shared_experts.up_proj.weight": (3, 7),
        "model.layers.0.post_norm.weight": (7,),
        "lm_head.weight": (8, 7),
    }
    prefix = "model.layers.0.mlp.experts"
    if stacked:
        shapes |= {f"{prefix}.up_proj": (num_experts, inner, 7), f"{prefix}.up_proj_bias": (num_experts, inner)}
    else:
        shapes |= {f"{prefix}.{e}.up_proj.weight": (inner, 7) for e in range(num_experts)}
        shapes |= {f"{prefix}.{e}.down_proj.weight": (7, inner) for e in range(num_experts)}
    layout = build_layout(shapes, num_layers=1, tied=False)
    return with_trained(layout, lambda name: not frozen or frozen not in name, is_bfloat16=lambda name: "q_" in name)


@given(
    num_experts=st.integers(1, 40),
    inner=st.integers(1, 33),
    most=st.integers(1, 4000),
    stacked=st.booleans(),
    frozen=st.sampled_from(["", ".experts.", "self_attn", "up_proj", "norm", "gate"]),
)
def test_every_element_is_in_one_part_and_what_is_trained_comes_first(
    num_experts: int, inner: int, most: int, stacked: bool, frozen: str
) -> None:
    unit = layout_of(num_experts, inner, stacked=stacked, frozen=frozen).units[1]
    paged = paged_unit(unit, most)
    assert paged is not None and paged.num_experts == num_experts
    assert [expert for page in paged.pages for expert in page.experts] == list(range(num_experts))
    spans = sorted((s.start, s.stop) for part in (paged.rest, *paged.pages) for s in part.spans)
    assert [start for start, _ in spans] == [0, *(stop for _, stop in spans[:-1])] and spans[-1][1] == unit.num_elements
    for part in (paged.rest, *paged.pages):
        check_part(part, unit.trained_elements)
    per_expert = max(sum(s.stop - s.start for s in p.spans) / len(p.experts) for p in paged.pages)
    assert all(len(page.experts) == 1 or len(page.experts) * per_expert <= 2 * most for page in paged.pages)


def check_part(part: UnitPart, trained: int) -> None:
    ends = 0
    for span in part.spans:
        assert span.local >= ends
        ends = span.local + span.stop - span.start
        assert part.local(span.start) == span.local and part.local(span.stop - 1) == ends - 1
        assert (span.stop <= trained) == (ends <= part.trained_elements)
    assert ends <= part.num_elements
    runs = list(part.runs())
    assert sum(run.stop - run.start for run in runs) == sum(s.stop - s.start for s in part.spans)
    if part.experts:
        some = {part.experts[0]}
        of_some = sum(s.stop - s.start for s in part.spans if s.expert in some)
        assert sum(run.stop - run.start for run in part.runs(some)) == of_some


def test_the_experts_of_a_list_are_one_span_each_page() -> None:
    paged = paged_unit(layout_of(16, 32, stacked=False).units[1], 2000)
    assert paged is not None
    assert {len(list(page.runs())) for page in paged.pages} == {1}


@pytest.fixture(scope="module")
def giant(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the shape of gpt-oss-120b, whose weights take no space."""
    path = tmp_path_factory.mktemp("giant")
    config = {
        "model_type": "gpt_oss",
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_local_experts": NUM_EXPERTS,
        "num_experts_per_tok": 4,
        "vocab_size": 201088,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "sliding_window": 128,
        "tie_word_embeddings": False,
    }
    (path / "config.json").write_text(json.dumps(config))
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (201088, WIDTH),
        "model.norm.weight": (WIDTH,),
        "lm_head.weight": (201088, WIDTH),
    }
    for index in range(LAYERS):
        layer = f"model.layers.{index}"
        shapes |= {
            f"{layer}.self_attn.q_proj.weight": (4096, WIDTH),
            f"{layer}.self_attn.k_proj.weight": (512, WIDTH),
            f"{layer}.self_attn.v_proj.weight": (512, WIDTH),
            f"{layer}.self_attn.o_proj.weight": (WIDTH, 4096),
            f"{layer}.mlp.router.weight": (NUM_EXPERTS, WIDTH),
            f"{layer}.mlp.experts.gate_up_proj": (NUM_EXPERTS, WIDTH, 2 * INNER),
            f"{layer}.mlp.experts.gate_up_proj_bias": (NUM_EXPERTS, 2 * INNER),
            f"{layer}.mlp.experts.down_proj": (NUM_EXPERTS, INNER, WIDTH),
            f"{layer}.mlp.experts.down_proj_bias": (NUM_EXPERTS, WIDTH),
        }
    write_outline(path / "model.safetensors", [(name, "BF16", shape) for name, shape in shapes.items()])
    return path


def planned(folder: Path, *, gpu: str = "h200", experts: str = "whole", **train: Any) -> Plan:
    planner = Planner(
        load_settings(host_memory_reserve_bytes=0, device_arena_bytes=1, numa_interleave=False),
        memory=lambda: HostMemory(limit_bytes=1, available_bytes=1),
        num_threads=1,
    )
    given = {"tokens_per_step": 16384, "sequence_length": 4096, "max_steps": 1, **train}
    spec = {"name": "j", "model": "m", "dataset": "d", "memory": {"experts": experts}, "train": given}
    return planner.plan_elsewhere(parse_job_spec(spec), folder, PlannedMachine(gpu=gpu, host_gbps=400))


def test_pages_take_a_few_gigabytes_where_whole_layers_take_ten_times_as_much(giant: Path) -> None:
    whole, paged = planned(giant), planned(giant, experts="paged")
    assert whole.execution.expert_page_elements == 0
    assert paged.execution.expert_page_elements == MOST_PAGE_ELEMENTS
    head_bytes = 2 * 201088 * WIDTH
    layers = [plan.device_bytes["weights"] + plan.device_bytes["gradients"] - 3 * head_bytes for plan in (whole, paged)]
    assert layers[0] > 36e9
    assert layers[1] < 5e9
    # All else is where it was, but for three hidden states of a layer.
    assert paged.device_bytes["activations"] - whole.device_bytes["activations"] == 3 * 16384 * WIDTH * 2
    assert paged.plane_bytes == whole.plane_bytes
    assert paged.prediction is not None and whole.prediction is not None
    assert paged.prediction.step_s >= whole.prediction.step_s


def test_a_plan_that_does_not_fit_names_pages_and_following_it_fits(giant: Path) -> None:
    refused = planned(giant, gpu="rtx-4090", tokens_per_step=2048, sequence_length=1024)
    assert "it would fit with memory.experts: paged (" in refused.message and "s a step)" in refused.message
    assert planned(giant, gpu="rtx-4090", experts="paged", tokens_per_step=2048, sequence_length=1024).fits


def test_nothing_of_a_paged_layer_stays_on_the_device(giant: Path) -> None:
    residency = planned(giant, experts="paged").execution.residency
    assert (residency.resident_layers, residency.packed_layers) == (0, 0)


@pytest.mark.parametrize(("base", "most"), [("int8", 0.5), ("nf4", 0.5)])
def test_packed_weights_arrive_page_by_page(giant: Path, base: str, most: float) -> None:
    lora: dict[str, Any] = {"trainable": ["lora"], "lora": {"targets": ["q_proj"], "base": base}}
    whole, paged = planned(giant, **lora), planned(giant, experts="paged", **lora)
    assert paged.device_bytes["weights"] < most * whole.device_bytes["weights"]
    assert paged.plane_bytes == whole.plane_bytes


def test_experts_that_end_within_a_block_of_nf4_are_refused(giant: Path, tmp_path: Path) -> None:
    shapes = {"model.embed_tokens.weight": (8, 32), "model.norm.weight": (32,), "lm_head.weight": (8, 32)}
    shapes |= {"model.layers.0.self_attn.q_proj.weight": (32, 32)}
    # Biases of 3 * 16 numbers for each expert.
    shapes |= {"model.layers.0.mlp.experts.gate_up_proj_bias": (4, 48)}
    config = json.loads((giant / "config.json").read_text())
    changed = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 8, "num_local_experts": 4}
    (tmp_path / "config.json").write_text(json.dumps({**config, **changed}))
    write_outline(tmp_path / "model.safetensors", [(name, "BF16", shape) for name, shape in shapes.items()])
    lora = {"targets": ["q_proj"], "base": "nf4"}
    with pytest.raises(InvalidSpec, match=r"gpt_oss models end within a block of 64 .*base: int8") as refused:
        planned(tmp_path, experts="paged", trainable=["lora"], lora=lora)
    assert [violation.field for violation in refused.value.violations] == ["memory.experts"]


def test_classes_that_cannot_be_paged_are_refused_and_never_advised(giant: Path, tmp_path: Path) -> None:
    config = json.loads((giant / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "flex_olmo"}))
    (tmp_path / "model.safetensors").symlink_to(giant / "model.safetensors")
    with pytest.raises(InvalidSpec, match=r"memory.experts is paged, and the class of flex_olmo models computes"):
        planned(tmp_path, experts="paged")
    refused = planned(tmp_path, gpu="rtx-4090", tokens_per_step=2048, sequence_length=1024)
    assert refused.message and "paged" not in refused.message


def test_a_dense_model_has_no_experts(tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 8}
    config |= {"num_attention_heads": 2, "intermediate_size": 8, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8192}))
    shapes = {"model.embed_tokens.weight": (8, 8), "model.layers.0.mlp.up_proj.weight": (8, 8)}
    write_outline(tmp_path / "model.safetensors", [(name, "BF16", shape) for name, shape in shapes.items()])
    with pytest.raises(InvalidSpec, match=r"memory.experts is paged, and the model has no layers of experts"):
        planned(tmp_path, experts="paged")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"gpus": 2}, "gpus"),
        ({"nodes": 2}, "nodes"),
        ({"train": {"lanes": 2}}, "train.lanes"),
    ],
)
def test_specs_of_what_needs_whole_layers_are_refused_by_field(changes: dict[str, Any], field: str) -> None:
    spec = {"name": "j", "model": "m", "dataset": "d", "memory": {"experts": "paged"}, **changes}
    with pytest.raises(InvalidSpec, match=r"paged") as refused:
        parse_job_spec(spec)
    assert [violation.field for violation in refused.value.violations] == [field]


@pytest.mark.parametrize(
    "changes",
    [{"eval": {"generate": {}}, "eval_fraction": 0.5}, {"method": "session", "dataset": ""}],
    ids=["answers", "session"],
)
def test_answers_and_sessions_come_in_pages(changes: dict[str, Any]) -> None:
    spec = parse_job_spec({"name": "j", "model": "m", "dataset": "d", "memory": {"experts": "paged"}, **changes})
    assert page_elements_of(spec) == MOST_PAGE_ELEMENTS
    assert with_spec(Execution(), spec).expert_page_elements == MOST_PAGE_ELEMENTS
