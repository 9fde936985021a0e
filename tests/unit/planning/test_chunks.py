"""Rows in chunks in a plan: whom they are for, what they take, when they are advised."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from horizon_server.errors import InvalidSpec
from horizon_server.planning.machine import HostMemory
from horizon_server.planning.planner import Planner
from horizon_server.planning.residency import SPARE_USABLE
from horizon_server.records.plan import Plan, PlannedMachine
from horizon_server.settings import load_settings
from horizon_server.spec import JobSpec, parse_job_spec

GIB = 1 << 30
CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "vocab_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1 << 20,
    "tie_word_embeddings": False,
}
ROW = 1 << 17


def folder_with(path: Path, *names: str, **config: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({**CONFIG, **config}))
    shapes = {"model.embed_tokens.weight": (64, 32), "model.norm.weight": (32,), "lm_head.weight": (64, 32)}
    for index in range(4):
        shapes |= {f"model.layers.{index}.{name}.weight": (48, 32) for name in ("mlp.up_proj", *names)}
    save_file({n: torch.zeros(s, dtype=torch.bfloat16) for n, s in shapes.items()}, path / "model.safetensors")
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return folder_with(tmp_path / "model")


def spec_of(*, gpus: int = 1, **train: Any) -> JobSpec:
    sizes = {"max_steps": 1, "tokens_per_step": ROW, "sequence_length": ROW}
    given = {"name": "j", "model": "m", "dataset": "d", "gpus": gpus, "train": {**sizes, **train}}
    return parse_job_spec(given)


def plan_of(folder: Path, spec: JobSpec, *, arena_bytes: int = 64 * GIB) -> Plan:
    settings = load_settings(host_memory_reserve_bytes=0, device_arena_bytes=arena_bytes, host_devices=8)
    memory = HostMemory(limit_bytes=64 * GIB, available_bytes=64 * GIB)
    return Planner(settings, memory=lambda: memory, num_threads=1).plan(spec, folder)


def test_a_chunk_is_64_tokens_at_least() -> None:
    with pytest.raises(InvalidSpec, match=r"train.chunk_tokens"):
        spec_of(chunk_tokens=63)


@pytest.mark.parametrize(
    ("names", "config", "why"),
    [
        (("mixer.A_log",), {}, "type llama, of which some layers keep a state from token to token"),
        (("conv.conv",), {"model_type": "lfm2"}, "type lfm2, of which some layers keep a state from token to token"),
        ((), {"model_type": "llama4_text"}, "type llama4_text, whose attention takes masks and has no chunks"),
        ((), {"attention_dropout": 0.1}, "type llama, whose attention takes masks and has no chunks"),
    ],
)
def test_models_are_refused_by_name(names: tuple[str, ...], config: dict[str, Any], why: str, tmp_path: Path) -> None:
    path = folder_with(tmp_path / "model", *names, **config)
    wanted = rf"train.chunk_tokens is 4096 and the model is of {why}; leave train.chunk_tokens out"
    with pytest.raises(InvalidSpec, match=wanted):
        plan_of(path, spec_of(chunk_tokens=4096))


def test_several_devices_are_refused(folder: Path) -> None:
    with pytest.raises(InvalidSpec, match=r"train.chunk_tokens is 4096 and gpus is 2, nodes is 1, and chunks are for"):
        plan_of(folder, spec_of(chunk_tokens=4096, gpus=2))


def test_a_row_that_is_not_longer_takes_what_it_takes(folder: Path) -> None:
    sizes = {"sequence_length": 4096, "tokens_per_step": 4096}
    whole, chunked = (plan_of(folder, spec_of(chunk_tokens=n, **sizes)) for n in (None, 4096))
    assert chunked.execution.chunk_tokens == 4096
    assert (chunked.device_bytes, chunked.host_bytes) == (whole.device_bytes, whole.host_bytes)


def test_only_keys_and_values_grow_with_a_row(folder: Path) -> None:
    plans = [
        plan_of(folder, spec_of(chunk_tokens=4096, sequence_length=row, tokens_per_step=row), arena_bytes=32 << 20)
        for row in (ROW // 4, ROW // 2)
    ]
    assert [plan.execution.activation_placement for plan in plans] == ["host", "host"]
    one, other = (plan.device_bytes for plan in plans)
    heads, head_dim, fp32_bytes = 2, 8, 4
    grown = ROW // 4 * 2 * heads * head_dim * 2 * fp32_bytes
    assert {name: other[name] - one[name] for name in one} == {
        "weights": 0,
        "gradients": 0,
        "activations": grown,
        "workspace": 0,
    }
    # On the host keys and values of each layer, and hidden states: four inputs and the last output.
    on_host = [plan.host_bytes["activations"] - plan.device_bytes["activations"] for plan in plans]
    assert on_host[1] - on_host[0] == ROW // 4 * (4 * 2 * heads * head_dim + 5 * 32) * fp32_bytes


def test_a_plan_that_a_long_row_breaks_names_chunks_that_fit(folder: Path) -> None:
    refused = plan_of(folder, spec_of(), arena_bytes=64 << 20)
    assert not refused.fits
    found = re.search(
        r"it would fit with train.chunk_tokens: (\d+) \((\S+ MiB) on the device instead of (\S+ \S+), ", refused.message
    )
    assert found, refused.message
    advised = plan_of(folder, spec_of(chunk_tokens=int(found[1])), arena_bytes=64 << 20)
    assert advised.fits
    assert not plan_of(folder, spec_of(chunk_tokens=2 * int(found[1])), arena_bytes=64 << 20).fits


def test_nobody_is_sent_to_chunks_that_the_model_has_not(tmp_path: Path) -> None:
    path = folder_with(tmp_path / "model", model_type="llama4_text")
    refused = plan_of(path, spec_of(), arena_bytes=64 << 20)
    assert not refused.fits
    assert "chunk_tokens" not in refused.message


def plan_on_h100(folder: Path, spec: JobSpec, host_bytes: int = 64 * GIB) -> Plan:
    machine = PlannedMachine(gpu="H100", host_gbps=200.0, host_memory_bytes=host_bytes)
    planner = Planner(
        load_settings(host_memory_reserve_bytes=0),
        memory=lambda: HostMemory(limit_bytes=host_bytes, available_bytes=host_bytes),
        num_threads=1,
    )
    return planner.plan_elsewhere(spec, folder, machine)


A_LAYER = ROW * 32 * 2 + ROW * 4 * 4
"""Bytes of attention's outputs of all tokens, in bf16, and of their sums in fp32."""


def test_outputs_of_attention_wait_where_host_memory_is_left(folder: Path) -> None:
    spec = spec_of(chunk_tokens=16384)
    roomy = plan_on_h100(folder, spec)
    kept = roomy.kept
    assert kept is not None
    assert (kept.attention_layers, kept.attention_bytes) == (4, 4 * A_LAYER)
    assert "attention outputs in host memory of 4 layers (40.0 MiB)" in kept.text
    needed = roomy.host_total_bytes - 4 * A_LAYER
    tight = plan_on_h100(folder, spec, int((needed + 2.5 * A_LAYER) / SPARE_USABLE))
    none = plan_on_h100(folder, spec, int((needed + 0.5 * A_LAYER) / SPARE_USABLE))
    for plan, layers in ((tight, 2), (none, 0)):
        assert plan.fits
        assert plan.execution.residency.attention_layers == layers
        assert plan.host_total_bytes == needed + layers * A_LAYER
    slots = 2 * 16384 * (32 * 2 + 4 * 4)
    assert tight.device_bytes["activations"] - none.device_bytes["activations"] == slots
    times = [plan.prediction.step_s for plan in (roomy, tight, none) if plan.prediction is not None]
    assert times == sorted(times) and len(set(times)) == 3
    assert kept.saved_share == pytest.approx(1 - times[0] / times[2], abs=0.02)


def test_a_job_leaves_memory_to_others_where_it_says_so(folder: Path) -> None:
    spec = spec_of(chunk_tokens=16384)
    memory = spec.memory.model_copy(update={"keep_attention_outputs": False})
    found = plan_on_h100(folder, spec.model_copy(update={"memory": memory}))
    assert found.kept is None or not found.kept.attention_layers
    assert plan_on_h100(folder, spec).host_total_bytes == found.host_total_bytes + 4 * A_LAYER


def test_rows_that_are_not_longer_keep_no_outputs_of_attention(folder: Path) -> None:
    plans = [plan_on_h100(folder, spec_of(chunk_tokens=n)) for n in (None, ROW)]
    assert not any(plan.execution.residency.attention_layers for plan in plans)


def test_what_crosses_the_link_is_predicted(folder: Path) -> None:
    # Without memory to keep anything.
    host_bytes = plan_on_h100(folder, spec_of()).host_total_bytes + A_LAYER
    plans = [plan_on_h100(folder, spec_of(chunk_tokens=n), host_bytes) for n in (None, 16384)]
    whole, chunked = (plan.prediction for plan in plans)
    assert whole is not None and chunked is not None
    assert chunked.step_s > whole.step_s
