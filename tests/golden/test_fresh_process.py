"""A step taken first thing in a new process has the bits of the same step taken later in a process, at a real model's
sizes.

`test_resume` kills and resumes a model too small for products that are shared among threads; here attention and the
projections are large enough for that, and every resume is a new program in the environment that the daemon gives its
workers.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.golden import fresh_process
from tests.golden.fresh_process import MAX_DOCUMENT_TOKENS, StepBits
from tests.support.further import further
from transformers import AutoConfig, AutoModelForCausalLM

from horizon_server.settings import child_environment

WAIT_S = 280.0
VOCAB = 512
# Rows of one document and of several, an even length and odd ones.
DOCUMENT_LENGTHS = (236, 199, 231, 150, 97, 243, 183, 64, 221, 133, 111, 205)


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A folder with two layers of a real model's width, and its data."""
    folder = tmp_path
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        tie_word_embeddings=True,
        max_position_embeddings=MAX_DOCUMENT_TOKENS,
    )
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model.save_pretrained(folder / "model")
    lengths = torch.tensor(DOCUMENT_LENGTHS)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = torch.randint(VOCAB, (int(starts[-1]),), dtype=torch.int32)
    trained = torch.ones(len(ids), dtype=torch.uint8)
    trained[starts[:-1]] = 0
    (folder / "data").mkdir()
    tensors = {"input_ids": ids, "trained": trained, "document_starts": starts}
    save_file(tensors, folder / "data" / "tokens.safetensors")
    (folder / "data" / "report.json").write_text('{"kind": "text"}')
    (folder / "checkpoints").mkdir()
    return folder


def steps_in_a_new_process(
    work: Path, *, first: int, count: int, num_threads: int, save: bool = False
) -> list[StepBits]:
    arguments = [f"--first={first}", f"--count={count}", f"--num-threads={num_threads}", *(["--save"] if save else [])]
    done = subprocess.run(
        [sys.executable, fresh_process.__file__, work, *arguments],
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [StepBits(**json.loads(line)) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(("num_threads", "resumed_after"), [(4, (1,)), *further((2, (1, 2)))])
def test_the_first_step_of_a_process_has_the_bits_of_the_same_step_taken_later(
    work: Path, num_threads: int, resumed_after: tuple[int, ...]
) -> None:
    count = max(resumed_after) + 1
    undisturbed = steps_in_a_new_process(work, first=0, count=count, num_threads=num_threads, save=True)
    for step in resumed_after:
        (resumed,) = steps_in_a_new_process(work, first=step, count=1, num_threads=num_threads)

        wanted = undisturbed[step]
        assert [name for name in wanted.tensors if wanted.tensors[name] != resumed.tensors[name]] == []
        assert resumed == wanted
