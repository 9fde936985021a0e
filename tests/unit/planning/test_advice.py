"""What a plan that does not fit advises: taking it fits."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as runs
from hypothesis import strategies as st
from tests.support.rates import RATES

from horizon_server.planning.drives import NodeDrives
from horizon_server.planning.machine import HostMemory
from horizon_server.planning.planner import Planner
from horizon_server.planning.rates import DriveRates
from horizon_server.records.plan import Plan
from horizon_server.settings import load_settings
from horizon_server.spec import JobSpec, parse_job_spec
from horizon_server.store.safetensors_files import write_outline

HIDDEN, INNER, NUM_EXPERTS, VOCABULARY = 512, 1024, 8, 1024
NUM_LAYERS = {"llama": 24, "mixtral": 6}
DRIVES = NodeDrives(
    folders=("/drives/a",), rates=DriveRates(read_bytes_per_s=2e9, write_bytes_per_s=1e9), endurance_bytes=10**11
)
_ADVICE = re.compile(r"; it would fit with (.+?) \(")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A dense model and a mixture, of headers alone."""
    made = {}
    for kind, num_layers in NUM_LAYERS.items():
        path = made[kind] = tmp_path_factory.mktemp(kind)
        config = {
            "model_type": kind,
            "hidden_size": HIDDEN,
            "intermediate_size": INNER,
            "num_hidden_layers": num_layers,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 1 << 17,
            "tie_word_embeddings": False,
        }
        layer: dict[str, tuple[int, ...]] = {"self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.o_proj": (HIDDEN, HIDDEN)}
        layer |= {f"self_attn.{name}_proj": (HIDDEN // 4, HIDDEN) for name in "kv"}
        layer["input_layernorm"] = layer["post_attention_layernorm"] = (HIDDEN,)
        if kind == "mixtral":
            config |= {"num_local_experts": NUM_EXPERTS, "num_experts_per_tok": 2}
            layer["block_sparse_moe.gate"] = (NUM_EXPERTS, HIDDEN)
            for expert in range(NUM_EXPERTS):
                sizes = {"w1": (INNER, HIDDEN), "w2": (HIDDEN, INNER), "w3": (INNER, HIDDEN)}
                layer |= {f"block_sparse_moe.experts.{expert}.{name}": size for name, size in sizes.items()}
        else:
            layer |= {f"mlp.{name}_proj": (INNER, HIDDEN) for name in ("gate", "up")}
            layer["mlp.down_proj"] = (HIDDEN, INNER)
        table = (VOCABULARY, HIDDEN)
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": table, "lm_head": table, "model.norm": (HIDDEN,)}
        shapes |= {f"model.layers.{i}.{name}": shape for i in range(num_layers) for name, shape in layer.items()}
        (path / "config.json").write_text(json.dumps(config))
        tensors = [(f"{name}.weight", "BF16", shape) for name, shape in shapes.items()]
        write_outline(path / "model.safetensors", tensors)
    return made


def spec_of(row_tokens: int, **train: Any) -> dict[str, Any]:
    sizes = {"max_steps": 1000, "tokens_per_step": row_tokens, "sequence_length": row_tokens}
    return {"name": "j", "model": "m", "dataset": "d", "device": "host", "train": {**sizes, **train}, "memory": {}}


def plan_of(folder: Path, spec: JobSpec, *, host_bytes: int, arena_bytes: int, has_drives: bool) -> Plan:
    planner = Planner(
        load_settings(host_memory_reserve_bytes=0, device_arena_bytes=arena_bytes, numa_interleave=False),
        memory=lambda: HostMemory(limit_bytes=host_bytes, available_bytes=host_bytes),
        num_threads=1,
        rates=lambda: {"host": RATES, "host_bfloat16": RATES},
        drives=DRIVES if has_drives else None,
    )
    return planner.plan_to_start(spec, folder)


def taken(plain: dict[str, Any], advice: str) -> JobSpec:
    """The spec with the fields that advice names."""
    changed = {**plain, "train": dict(plain["train"]), "memory": dict(plain["memory"])}
    for field in advice.split(" and "):
        name, value = field.split(": ")
        section, key = name.split(".")
        changed[section][key] = json.loads(value) if re.fullmatch(r"\d+|true", value) else value
    return parse_job_spec(changed)


@given(
    kind=st.sampled_from(list(NUM_LAYERS)),
    host_share=st.floats(0.2, 1.1),
    arena_share=st.floats(0.02, 1.1),
    row_tokens=st.sampled_from([256, 2048, 16384, 65536]),
    train=st.fixed_dictionaries(
        {},
        optional={
            "max_grad_norm": st.none(),
            "compute_dtype": st.sampled_from(["float32", "bfloat16"]),
            "optimizer_states": st.sampled_from(["exact", "compressed"]),
            "trainable": st.just("lora"),
        },
    ),
    has_drives=st.booleans(),
)
@runs(max_examples=500, deadline=None)
def test_taking_the_advice_fits(
    folders: dict[str, Path],
    kind: str,
    host_share: float,
    arena_share: float,
    row_tokens: int,
    train: dict[str, Any],
    has_drives: bool,
) -> None:
    plain, folder, enough = spec_of(row_tokens, **train), folders[kind], 1 << 50
    whole = plan_of(folder, parse_job_spec(plain), host_bytes=enough, arena_bytes=enough, has_drives=has_drives)
    limits: dict[str, Any] = {
        "host_bytes": int(host_share * whole.host_total_bytes),
        "arena_bytes": int(arena_share * whole.device_total_bytes),
        "has_drives": has_drives,
    }
    plan = plan_of(folder, parse_job_spec(plain), **limits)
    assert plan.fits == (not plan.message)
    if found := _ADVICE.search(plan.message):
        followed = plan_of(folder, taken(plain, found[1]), **limits)
        assert followed.fits, (plan.message, followed.message)


def test_the_cheapest_change_is_named_with_its_seconds_and_its_wear(folders: dict[str, Path]) -> None:
    limits: dict[str, Any] = {"arena_bytes": 1 << 50, "has_drives": True}

    def message(share: float, **train: Any) -> str:
        spec = parse_job_spec(spec_of(256, **train))
        whole = plan_of(folders["llama"], spec, host_bytes=1 << 50, **limits)
        return plan_of(folders["llama"], spec, host_bytes=int(share * whole.host_total_bytes), **limits).message

    compressed = r"with train\.optimizer_states: compressed \(.* of host memory, .* s a step\)"
    assert re.search(compressed, message(0.9))
    on_drive = message(0.95, optimizer_states="compressed")
    # 1,000 steps are more than a twentieth of what the drive is rated for.
    assert "with memory.tier: drive and memory.accept_wear: true (states of " in on_drive
    assert re.search(r" of what the drives are rated for, .* of host memory, .* s a step\)", on_drive)
