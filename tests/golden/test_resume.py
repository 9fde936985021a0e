"""kill -9 at twenty random moments: what is learned in the end is what an undisturbed run learns, to the bit."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import random
import signal
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.golden.training_life import CHECKPOINTS, SAVE_EVERY, Life, live
from transformers import AutoConfig, AutoModelForCausalLM

from horizon_server.store.manifest import is_complete

NUM_KILLS = 20
WAIT_S = 240.0


@pytest.fixture(scope="module")
def processes() -> ForkServerContext:
    """Processes that start in no time: everything is imported once, before they fork."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.golden.training_life"])
    return context


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
        attention_dropout=0.1,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    reference: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    reference.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(10, 48, (50,), generator=generator)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    num_tokens = int(starts[-1])
    ids = torch.randint(64, (num_tokens,), generator=generator, dtype=torch.int32)
    trained = torch.ones(num_tokens, dtype=torch.uint8)
    trained[starts[:-1]] = 0
    save_file({"input_ids": ids, "trained": trained, "document_starts": starts}, folder / "tokens.safetensors")
    (folder / "report.json").write_text(json.dumps({"kind": "text"}))
    return folder


def life_in(work: Path, model: Path, data: Path, **how: bool) -> Life:
    (work / CHECKPOINTS).mkdir(parents=True)
    return Life(model=model, data=data, work=work, **how)


def live_until(processes: ForkServerContext, life: Life, moment: str, count: int, delay_s: float) -> bool:
    """Let a process live until it has sent `moment` `count` times and a little longer, then kill it; True if it was
    done before."""
    ours, theirs = multiprocessing.Pipe()
    process = processes.Process(target=live, args=(life, theirs, moment, count))
    process.start()
    theirs.close()
    sent = 0
    try:
        while sent < count:
            assert ours.poll(WAIT_S), "the process neither went on nor ended"
            message = ours.recv()
            if message == "done":
                return True
            sent += message == moment
        if delay_s:
            process.join(delay_s)
    finally:
        process.kill()
        process.join()
        ours.close()
    assert process.exitcode == -signal.SIGKILL
    return False


def planes(life: Life) -> dict[str, torch.Tensor]:
    files = sorted(life.checkpoints()[-1].rglob("*.safetensors"))
    return {f"{file.name}:{name}": tensor for file in files for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("how", [{}, {"lora": True}, {"compressed": True}])
def test_a_run_killed_twenty_times_learns_what_an_undisturbed_run_learns(
    how: dict[str, bool], processes: ForkServerContext, model: Path, data: Path, tmp_path: Path
) -> None:
    undisturbed, killed = (life_in(tmp_path / name, model, data, **how) for name in ("whole", "killed"))
    assert live_until(processes, undisturbed, "never", 1, 0.0)
    wanted = dict(undisturbed.losses())
    chance = random.Random(7)
    moments = itertools.cycle(["stepped", "saving", "stepped", "born"])

    for kill in range(NUM_KILLS):
        moment = next(moments)
        # A save comes after four steps, so that most lives get a little further than the last one.
        count = {"stepped": chance.randint(2, SAVE_EVERY + 2), "saving": chance.randint(1, 2), "born": 1}[moment]
        done = live_until(processes, killed, moment, count, chance.uniform(0.0, 0.03))
        assert not done, f"the run ended before kill {kill}: give it more steps"
        assert all(is_complete(folder) for folder in killed.checkpoints()), "a torn checkpoint is listed"
    assert live_until(processes, killed, "never", 1, 0.0)

    taken = killed.losses()
    repeated = len(taken) - len(wanted)
    assert repeated > 0, "no kill cost a step, so nothing was resumed"
    assert [(step, loss) for step, loss in taken if wanted[step] != loss] == []
    assert {step for step, _ in taken} == set(wanted)
    one, other = planes(undisturbed), planes(killed)
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), f"{name} differs"
