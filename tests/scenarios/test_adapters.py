"""The life of an adapter, against the real daemon: trained, pulled, sampled, merged by command, pushed, and started
from."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from tests.support.both_daemons import demo_spec
from tests.support.daemon_process import DaemonProcess, wait_for_state
from tests.support.pushed_state import PushedState
from transformers import AutoModelForCausalLM, AutoTokenizer

from horizon_client import Client
from horizon_client.errors import InvalidSpec
from horizon_client.job_spec_types import JobSpec
from horizon_client.resources import Job, SampledText
from horizon_server.demo.recipe import write_demo_dataset, write_demo_model

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")

NUM_TOKENS = 12
LORA: dict[str, Any] = {
    "trainable": ["lora"],
    "lora": {"rank": 4, "alpha": 8},
    "learning_rate": 0.01,
    "warmup_steps": 0,
}


@pytest.fixture
def daemon(tmp_path: Path, pushed: PushedState) -> Iterator[DaemonProcess]:
    running = pushed.daemon(tmp_path / "state")
    running.start()
    try:
        yield running
    finally:
        running.close()


def succeeded(client: Client, spec: JobSpec) -> Job:
    done = wait_for_state(client, client.jobs.submit(spec).job_id, "SUCCEEDED", "FAILED")
    assert done.state == "SUCCEEDED", done.message
    return done


def answer_of(client: Client, job: str) -> str:
    pieces = client.checkpoints.sample(job, ["The lab box"], max_tokens=NUM_TOKENS)
    return "".join(piece.text for piece in pieces if isinstance(piece, SampledText))


def test_an_adapter_is_trained_sampled_merged_and_started_from(daemon: DaemonProcess, tmp_path: Path) -> None:
    token, base = daemon.user("ada"), write_demo_model(tmp_path / "model")
    with daemon.client(token) as client:
        client.models.push(base, name="demo-model")
        client.datasets.push([write_demo_dataset(tmp_path)], name="demo-chats")
        first = succeeded(client, demo_spec("first", **LORA))
        (checkpoint,) = client.checkpoints.list(first.job_id)
        assert checkpoint.size_bytes < (base / "model.safetensors").stat().st_size

        pulled = client.checkpoints.pull(first.job_id, tmp_path / "adapter")
        plain: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        model: Any = PeftModel.from_pretrained(plain, pulled.folder)
        tokenizer: Any = AutoTokenizer.from_pretrained(base)
        ids = tokenizer("The lab box", return_tensors="pt")["input_ids"]
        output = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False
        )
        wanted = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
        assert answer_of(client, first.job_id) == wanted

        command = [
            *(sys.executable, "-m", "horizon_client", "checkpoint", "merge", f"{first.job_id}@last"),
            *("--out", str(tmp_path / "merged"), "--dtype", "fp32", "--server", daemon.endpoints["grpc"]),
        ]
        environment = {"HORIZON_TOKEN": token, "PYTHONPATH": ":".join(sys.path)}
        for received in ("MiB received", "0 B received"):
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=240)
            assert f"merged, is in {tmp_path / 'merged'}" in done.stdout and received in done.stdout
        merged: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        with torch.no_grad():
            assert (merged(ids).logits - model(input_ids=ids).logits).abs().max() <= 1e-5
        assert answer_of(client, first.job_id) == wanted, "now of the merged model"
        # The base lists <|endoftext|> alone; the job has trained on answers that end with <|im_end|>.
        listed = [
            json.loads((tmp_path / name / "generation_config.json").read_text()) for name in ("adapter", "merged")
        ]
        assert [config["eos_token_id"] for config in listed] == [[0, 2]] * 2
        again = client.checkpoints.pull(first.job_id, tmp_path / "again")
        assert set(again.files) == set(pulled.files)
        removed = client.checkpoints.merge(first.job_id, remove=True)
        assert removed.checkpoint.size_bytes == checkpoint.size_bytes

        pushed = client.models.push(pulled.folder, name="first-adapter")
        assert pushed.model.architecture == "peft-lora"
        for start in ("first-adapter", f"{first.job_id}@last"):
            job = succeeded(client, {**demo_spec("second", **{**LORA, "learning_rate": 0.0}), "init_from": start})
            found = client.checkpoints.pull(job.job_id, tmp_path / job.job_id)
            name = "adapter_model.safetensors"
            assert (Path(found.folder) / name).read_bytes() == (Path(pulled.folder) / name).read_bytes()


def test_after_training_on_fewer_bits_the_command_says_and_chooses_the_base(
    daemon: DaemonProcess, tmp_path: Path
) -> None:
    token, base = daemon.user("ada"), write_demo_model(tmp_path / "model")
    with daemon.client(token) as client:
        client.models.push(base, name="demo-model")
        client.datasets.push([write_demo_dataset(tmp_path)], name="demo-chats")
        job = succeeded(client, demo_spec("first", **{**LORA, "lora": {**LORA["lora"], "base": "nf4"}}))
        environment = {"HORIZON_TOKEN": token, "PYTHONPATH": ":".join(sys.path)}

        def horizon(*arguments: str) -> subprocess.CompletedProcess[str]:
            command = [
                sys.executable,
                "-m",
                "horizon_client",
                "checkpoint",
                *arguments,
                "--server",
                daemon.endpoints["grpc"],
            ]
            return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=240)

        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text('{"prompt": "The lab box"}\n', "utf-8")
        sampled = horizon("sample", job.job_id, "--prompts", str(prompts), "--max-tokens", "2")
        assert sampled.returncode == 0
        assert "answered with demo-model in nf4, as the adapter was trained on it, with the adapter" in sampled.stderr

        for asked, wanted in ((), ("trained", "nf4")), (("--base", "source"), ("source", "source")):
            out = tmp_path / wanted[0]
            # The second takes the place of the first
            done = horizon("merge", job.job_id, "--out", str(out), *asked)
            assert done.returncode == 0, done.stderr
            origin = json.loads((out / "horizon_merge.json").read_bytes())
            assert (origin["base_model"], origin["base"], origin["base_format"]) == ("demo-model", *wanted)

        pulled = client.checkpoints.pull(job.job_id, tmp_path / "adapter")
        client.models.push(pulled.folder, name="nf4-adapter")
        other = base / "config.json"
        other.write_text(json.dumps(json.loads(other.read_text()) | {"rms_norm_eps": 1e-4}))
        client.models.push(base, name="other-model")
        spec: JobSpec = {**demo_spec("second", **LORA), "init_from": "nf4-adapter", "model": "other-model"}
        # Said before anything waits in the queue.
        with pytest.raises(InvalidSpec, match="is not the one that the adapter of init_from was trained on"):
            client.jobs.submit(spec)
