"""The built-in model and dataset: the same bytes every time, and good for plain transformers."""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.unit.datasets.written_files import checked
from transformers import AutoModelForCausalLM, AutoTokenizer

from horizon_formats.formats import DatasetFormat
from horizon_server.datasets.reading import StoredFile
from horizon_server.demo.recipe import DEMO_PROMPTS, DEMO_SPEC, demo_chats, write_demo_dataset, write_demo_model
from horizon_server.spec import parse_job_spec


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo_model(tmp_path_factory.mktemp("demo") / "model", seed=0)


def test_the_same_seed_writes_the_same_bytes_in_any_process_without_torch(folder: Path, tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from horizon_server.demo.recipe import write_demo_model, "
        "write_demo_dataset; write_demo_model(Path(sys.argv[1])); write_demo_dataset(Path(sys.argv[1])); "
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "again")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "7"}, timeout=240)
    assert done.stdout.strip() == "[]"
    again = digests(tmp_path / "again")
    assert digests(folder).items() <= again.items()
    assert digests(write_demo_dataset(tmp_path / "data").parent).items() <= again.items()


def test_another_seed_changes_the_weights_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    first, second = digests(folder), digests(write_demo_model(tmp_path / "other", seed=1))
    assert [name for name in first if first[name] != second[name]] == ["model.safetensors"]


def test_plain_transformers_loads_the_model_and_it_knows_nothing_yet(folder: Path) -> None:
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    model, info = loaded
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    assert 2_000_000 <= num_parameters <= 6_000_000
    assert model.dtype is torch.bfloat16
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == model.config.vocab_size
    ids = tokenizer.apply_chat_template(demo_chats()[20], return_dict=True, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        loss = float(model.float()(ids, labels=ids).loss)
    assert abs(loss - math.log(len(tokenizer))) < 1.5


def test_weights_are_rounded_to_the_nearest_bfloat16(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")["model.layers.0.mlp.up_proj.weight"].float()
    assert abs(float(weights.mean())) < 1e-3
    assert float(weights.std()) == pytest.approx(
        json.loads((folder / "config.json").read_text())["initializer_range"], rel=0.01
    )


def test_the_chats_are_many_distinct_and_valid(tmp_path: Path) -> None:
    file = write_demo_dataset(tmp_path)
    report = checked(StoredFile.at(file))
    assert (report.format, report.num_rows) == (DatasetFormat.MESSAGES, len(demo_chats()))
    assert 200 <= report.num_rows <= 400
    questions = Counter(chat[0]["content"] for chat in demo_chats())
    assert questions.most_common(1)[0][1] == 1
    assert all(prompt in questions for prompt in DEMO_PROMPTS)


def test_the_tokenizer_gives_back_what_it_was_given(folder: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    for text in (demo_chats()[0][0]["content"], "\u65e5\u672c \U0001f600\n\t 12,5%"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_demos_job_is_a_valid_spec() -> None:
    spec = parse_job_spec(DEMO_SPEC | {"model": "demo-model", "dataset": "demo-chats"})
    assert spec.train.sequence_length <= 512
    assert spec.train.warmup_steps < (spec.train.max_steps or 0)
