"""Make the state folder that upgrades from this version are tested with, tests/data/state-VERSION.tar.xz, with a daemon
of this version.

It has users, one of them disabled, a project with members and a shared dataset, a tiny model, a job that is done, and
one of the same spec that was paused half way.

python -m tools.make_upgrade_fixture
"""

from __future__ import annotations

import json
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import torch
from tests.support.daemon_process import DaemonProcess, wait_for_state, wait_for_step
from tests.support.released_states import DATA, FACTS_FILE, SETTINGS, STATE, kind_of_machine
from transformers import AutoConfig, AutoModelForCausalLM

from horizon_client import Client
from horizon_client.job_spec_types import JobSpec
from horizon_server.demo.recipe import write_demo_dataset, write_demo_model
from horizon_server.version import VERSION

NUM_STEPS, PAUSE_AFTER = 60, 15
MAX_BYTES = 1 << 20
LIMIT_S = 600.0
# Every byte, and the tokens that the chat template needs.
_VOCABULARY = 260
_SIZES = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 3,
}
SPEC: JobSpec = {
    "name": "whole",
    "model": "tiny",
    "dataset": "chats",
    "train": {
        "max_steps": NUM_STEPS,
        "sequence_length": 256,
        "tokens_per_step": 2048,
        "learning_rate": 5e-3,
        "warmup_steps": 5,
        "compile": "off",
    },
    "checkpoint": {"every_steps": 0, "keep_last": 1},
}
# What a daemon makes again, or what says more of the machine than of the state.
_LEFT_OUT = ("reserve", "lock", "endpoints.json", "test.log", "test.toml", "compiled", "trash", "uploads")


def main() -> None:
    """Make the archive, in place of one of the same version."""
    with tempfile.TemporaryDirectory(prefix="horizon-state-") as name:
        folder = Path(name)
        write_model(folder / "model")
        daemon = DaemonProcess(folder / STATE, **SETTINGS)
        try:
            facts = live(daemon.start(), folder)
            daemon.terminate()
        finally:
            daemon.close()
        (folder / FACTS_FILE).write_text(json.dumps(facts, indent=2) + "\n", "ascii")
        target = DATA / f"state-{VERSION}.tar.xz"
        pack(folder, target)
    size = target.stat().st_size
    assert size < MAX_BYTES, f"{target} has {size:,} bytes"
    print(f"{target.name}: {size:,} bytes")


def write_model(folder: Path) -> None:
    """Write a model of some thousand parameters, whose tokenizer knows bytes alone."""
    write_demo_model(folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    vocabulary = {text: token for text, token in tokenizer["model"]["vocab"].items() if token < _VOCABULARY}
    tokenizer["model"] |= {"vocab": vocabulary, "merges": []}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **_SIZES))  # type: ignore[no-untyped-call]
    model.to(torch.bfloat16).save_pretrained(folder)


def live(daemon: DaemonProcess, folder: Path) -> dict[str, Any]:
    """Have users push data and run jobs; return what a test needs to know."""
    tokens = {name: daemon.user(name) for name in ("ada", "bob", "eve")} | {"root": daemon.user("root", role="admin")}
    daemon.admin("project", "add", "lab")
    daemon.admin("project", "member", "add", "lab", "ada", "--role", "admin")
    daemon.admin("project", "member", "add", "lab", "bob", "--role", "viewer")
    daemon.admin("user", "set", "ada", "--weight", "2")
    daemon.admin("user", "set", "eve", "--disable")
    with daemon.client(tokens["ada"]) as ada:
        ada.models.push(folder / "model", name="tiny")
        ada.datasets.push([write_demo_dataset(folder)], name="chats")
        ada.account.share("dataset", "chats", "lab")
        whole = ada.jobs.submit(SPEC)
        done = wait_for_state(ada, whole.job_id, "SUCCEEDED", "FAILED", timeout_s=LIMIT_S)
        assert done.state == "SUCCEEDED", done.message
        step = paused(ada)
    return {"tokens": tokens, "paused_at": step, "num_steps": NUM_STEPS, "machine": kind_of_machine()}


def paused(client: Client) -> int:
    """Submit the job again, pause it half way, and return after which step."""
    job = client.jobs.submit({**SPEC, "name": "half"})
    wait_for_step(client, job.job_id, PAUSE_AFTER, LIMIT_S)
    client.jobs.pause(job.job_id)
    step = wait_for_state(client, job.job_id, "PAUSED", "SUCCEEDED", "FAILED", timeout_s=LIMIT_S).step
    assert PAUSE_AFTER <= step < NUM_STEPS, (
        f"the job was at its end, step {step}, before it could be paused; run this again"
    )
    return step


def pack(folder: Path, target: Path) -> None:
    """Write the archive of the state folder and the facts."""

    def kept(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        inner = Path(member.name).parts[1:2]
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        return None if inner and inner[0] in _LEFT_OUT else member

    target.parent.mkdir(exist_ok=True)
    with tarfile.open(target, "w:xz", preset=9) as archive:
        for name in (STATE, FACTS_FILE):
            archive.add(folder / name, name, filter=kept)


if __name__ == "__main__":
    main()
