"""A job whose experts come in pages, against the real daemon."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from tests.support.both_daemons import demo_spec
from tests.support.daemon_process import DaemonProcess, wait_for_state
from tests.support.pushed_state import PushedState
from transformers import AutoConfig, AutoModelForCausalLM

from horizon_client import Client
from horizon_client.job_spec_types import JobSpec
from horizon_client.resources import Job
from horizon_server.demo.recipe import write_demo_dataset, write_demo_model


@pytest.fixture
def daemon(tmp_path: Path, pushed: PushedState) -> Iterator[DaemonProcess]:
    running = pushed.daemon(tmp_path / "state")
    running.start()
    try:
        yield running
    finally:
        running.close()


def write_experts(base: Path, folder: Path, model_type: str, **changes: Any) -> Path:
    """A small model of experts with the tokenizer of the demo model."""
    shutil.copytree(base, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    vocab_size = json.loads((base / "config.json").read_text())["vocab_size"]
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": vocab_size}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512}
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**sizes, **heads, **changes})
    model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def ended(client: Client, spec: JobSpec, experts: Literal["whole", "paged"]) -> Job:
    spec = {**spec, "model": "of-experts", "memory": {"experts": experts}}
    return wait_for_state(client, client.jobs.submit(spec).job_id, "SUCCEEDED", "FAILED")


def test_a_job_with_experts_in_pages_learns_as_one_with_whole_layers(daemon: DaemonProcess, tmp_path: Path) -> None:
    base = write_demo_model(tmp_path / "base")
    experts = write_experts(
        base, tmp_path / "experts", "qwen3_moe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24
    )
    with daemon.client(daemon.user("ada")) as client:
        client.models.push(experts, name="of-experts")
        client.datasets.push([write_demo_dataset(tmp_path)], name="demo-chats")
        losses = {}
        ways: tuple[Literal["whole", "paged"], ...] = ("whole", "paged")
        for how in ways:
            done = ended(client, demo_spec(how, learning_rate=0.003), how)
            assert done.state == "SUCCEEDED", done.message
            losses[how] = [row.loss for row in client.jobs.metrics(done.job_id) if row.loss is not None]
        assert len(losses["paged"]) > 1
        assert losses["paged"] == pytest.approx(losses["whole"], rel=1e-4)
