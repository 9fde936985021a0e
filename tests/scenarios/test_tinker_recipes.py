"""Recipes of tinker-cookbook, as they are installed, against a real daemon: supervised, reinforcement learning on
arithmetic, and DPO. Nothing is asked of a hub.

tinker-cookbook needs other versions of transformers and of the hub's package than the server has, so it lives in an
environment of its own, whose Python `HORIZON_COOKBOOK_PYTHON` names:

    python -m venv .venv-cookbook && .venv-cookbook/bin/pip install 'tinker-cookbook[math-rl]==0.5.8' torch
    HORIZON_COOKBOOK_PYTHON=$PWD/.venv-cookbook/bin/python make test ARGS=tests/scenarios/test_tinker_recipes.py
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.daemon_process import DaemonProcess
from tests.support.pushed_state import MODEL, PushedState

PYTHON = os.environ.get("HORIZON_COOKBOOK_PYTHON", "")
pytestmark = pytest.mark.skipif(
    not PYTHON, reason="HORIZON_COOKBOOK_PYTHON names no Python that has tinker-cookbook installed"
)

# The recipe's own program knows data of the hub only, and says to call its training function for other data.
DPO = """
import sys
from tinker_cookbook.preference import train_dpo
from tinker_cookbook.preference.dpo_datasets import DPODatasetBuilderFromComparisons
from tinker_cookbook.preference.preference_datasets import ComparisonBuilderFromJsonl
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

url, model, data, log_path = sys.argv[1:]
common = ChatDatasetBuilderCommonConfig(
    model_name_for_tokenizer=model, renderer_name="qwen3", max_length=256, batch_size=4
)
train_dpo.main(
    train_dpo.Config(
        log_path=log_path,
        model_name=model,
        recipe_name="recipe_preference_dpo",
        renderer_name="qwen3",
        dataset_builder=DPODatasetBuilderFromComparisons(
            common_config=common, comparison_builder=ComparisonBuilderFromJsonl(train_path=data)
        ),
        learning_rate=1e-3,
        lora_rank=4,
        base_url=url,
        eval_every=0,
        infrequent_eval_every=0,
        save_every=2,
        max_steps=3,
    )
)
"""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, pushed: PushedState) -> Iterator[DaemonProcess]:
    running = pushed.daemon(tmp_path_factory.mktemp("recipes") / "state")
    running.start()
    try:
        yield running
    finally:
        running.close()


@pytest.fixture
def folder(tmp_path: Path, pushed: PushedState) -> Path:
    """Where a recipe runs: the tokenizer of a model is looked up by the model's name, and is here."""
    (tmp_path / MODEL).mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(pushed.model / name, tmp_path / MODEL / name)
    return tmp_path


def run(daemon: DaemonProcess, folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """Run a recipe to its end, and return the figures of its steps."""
    environment = os.environ | {
        "TINKER_API_KEY": f"tml-{daemon.user('ada')}",
        "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "default",
    }
    done = subprocess.run(
        [PYTHON, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=500
    )
    assert done.returncode == 0, done.stderr[-8000:]
    lines = (folder / "log" / "metrics.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines]


def chz(daemon: DaemonProcess, **options: object) -> list[str]:
    """The arguments of a recipe's program."""
    given = {"base_url": f"http://{daemon.endpoints['http']}", "model_name": MODEL, "log_path": "log", **options}
    return [f"{name}={value}" for name, value in given.items()]


def test_supervised(daemon: DaemonProcess, folder: Path) -> None:
    chats = [
        {"messages": [{"role": "user", "content": f"Say {n}."}, {"role": "assistant", "content": f"{n}, as you say."}]}
        for n in range(32)
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    options = chz(
        daemon,
        dataset="chats.jsonl",
        renderer_name="qwen3",
        lora_rank=4,
        learning_rate=5e-3,
        batch_size=8,
        max_length=128,
        num_epochs=2,
        save_every=3,
    )
    steps = run(daemon, folder, "-m", "tinker_cookbook.recipes.chat_sl.train", *options)
    losses = [step["train_mean_nll"] for step in steps if "train_mean_nll" in step]
    assert len(losses) == 8
    assert losses[-1] < losses[0] - 0.5
    saved = [json.loads(line) for line in (folder / "log" / "checkpoints.jsonl").read_text("utf-8").splitlines()]
    assert [one["name"] for one in saved] == ["000003", "000006", "final"]
    assert all(one["state_path"].startswith("tinker://") for one in saved)
    # Started again, it continues from its newest checkpoint, and finds that everything is done.
    again = run(
        daemon, folder, "-m", "tinker_cookbook.recipes.chat_sl.train", *options, "behavior_if_log_dir_exists=resume"
    )
    assert len([step for step in again if "train_mean_nll" in step]) == 8


def test_reinforcement_learning_on_arithmetic(daemon: DaemonProcess, folder: Path) -> None:
    options = chz(
        daemon,
        env="arithmetic",
        renderer_name="qwen3",
        lora_rank=4,
        learning_rate=1e-3,
        group_size=4,
        groups_per_batch=4,
        max_tokens=5,
        save_every=2,
        max_steps=3,
        kl_penalty_coef=0.0,
    )
    steps = run(daemon, folder, "-m", "tinker_cookbook.recipes.math_rl.train", *options)
    rewards = [step["env/all/reward/total"] for step in steps if "env/all/reward/total" in step]
    assert len(rewards) == 3


def test_preferences(daemon: DaemonProcess, folder: Path) -> None:
    def said(role: str, text: str) -> dict[str, str]:
        return {"role": role, "content": text}

    pairs = [
        {
            "comparison": {
                "prompt_conversation": [said("user", f"What follows {n}?")],
                "completion_A": [said("assistant", f"{n + 1} follows.")],
                "completion_B": [said("assistant", "Nothing.")],
            },
            "label": "A",
        }
        for n in range(12)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    url = f"http://{daemon.endpoints['http']}"
    steps = run(daemon, folder, "-c", DPO, url, MODEL, "pairs.jsonl", "log")
    losses = [step["dpo_loss"] for step in steps if "dpo_loss" in step]
    assert losses[0] == pytest.approx(0.6931, abs=1e-3), "at first the model is its own reference"
    assert losses[-1] < losses[0]
