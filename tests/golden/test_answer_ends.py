"""A real model on real chats: its answers, and what is judged of them, do not depend on whether its folder lists the
end of a turn."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.support.worker_attempts import Daemon, always, attempt, spec_of

from horizon_formats.formats import DatasetFormat
from horizon_server.datasets.preparing import prepare
from horizon_server.datasets.reading import StoredFile
from horizon_server.datasets.recipe import PrepareOptions, PrepareRequest
from horizon_server.events import EvalDone

SHARED = Path(__file__).parents[3] / "shared"
MODEL, CHATS = SHARED / "models" / "tiny-base", SHARED / "data" / "gsm8k_train.jsonl"
# Few, whose answers are short.
MAX_CHARACTERS, NUM_PROMPTS, LENGTH = 260, 6, 160

pytestmark = pytest.mark.skipif(
    not (MODEL.is_dir() and CHATS.is_file()), reason=f"needs {MODEL.name} and {CHATS.name} in ../shared"
)


def evaluations(folder: Path, eos: int | list[int]) -> list[tuple[Any, ...]]:
    """What a short job says of its answers, with these ends in its model folder."""
    folder.mkdir()
    (folder / "model").mkdir()
    for file in MODEL.iterdir():
        shutil.copyfile(file, folder / "model" / file.name)
    listed = folder / "model" / "generation_config.json"
    listed.write_text(json.dumps(json.loads(listed.read_text()) | {"eos_token_id": eos}))
    with CHATS.open(encoding="utf-8") as lines:
        short = [line for line in lines if len(line) < MAX_CHARACTERS]
    (folder / "chats.jsonl").write_text("".join(short[:40]), "utf-8")
    request = PrepareRequest(
        dataset_files=(StoredFile.at(folder / "chats.jsonl"),),
        model_dir=folder / "model",
        output_dir=folder / "prepared",
        options=PrepareOptions(
            format=DatasetFormat.PROMPT_COMPLETION,
            field_map={"prompt": "question", "completion": "answer"},
            sequence_length=LENGTH,
        ),
    )
    prepare(request, on_progress=lambda rows: None)
    asked = {"set": "gsm8k", "prompts": NUM_PROMPTS, "max_new_tokens": 128, "answer": "#### (-?[0-9.,]+)"}
    spec = spec_of(
        2,
        train={"sequence_length": LENGTH, "tokens_per_step": 512, "compile": "off"},
        checkpoint={"every_steps": 0},
        eval={"sets": {"gsm8k": "d"}, "generate": asked},
    )
    daemon = Daemon(always)
    attempt(folder, spec, daemon, evaluations={"gsm8k": str(folder / "prepared")}, num_threads=2)
    written = json.loads((folder / "checkpoints/step-00000002/generation_config.json").read_text())
    assert written["eos_token_id"] == [0, 2]
    return [(done.sets, done.answers) for done in daemon.said(EvalDone)]


def test_exact_match_does_not_depend_on_what_the_base_lists(tmp_path: Path) -> None:
    pushed, listed = evaluations(tmp_path / "pushed", 0), evaluations(tmp_path / "listed", [0, 2])
    assert pushed == listed
    _, answers = pushed[-1]
    assert any(answer.ended == "stop" for answer in answers)
