"""Names and values of other tools in a job file are answered with what to write here, by the client and by the server
alike."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from horizon_client.conversion import spec_to_proto
from horizon_client.errors import HorizonClientError as ClientError
from horizon_client.job_spec import parse_spec, with_overrides
from horizon_formats import other_names
from horizon_formats.formats import detect_format
from horizon_formats.problems import InvalidFile
from horizon_server.errors import InvalidSpec
from horizon_server.spec import job_schema, parse_job_spec
from horizon_server.spec.words import field_at

MINE = {"name": "j", "model": "m", "dataset": "d"}
CASES: list[tuple[dict[str, Any], str]] = [
    ({"train": {"num_train_epochs": 3}}, "that is Hugging Face's name; here: train.epochs"),
    ({"train": {"per_device_train_batch_size": 8}}, "here: train.tokens_per_step, in tokens"),
    ({"train": {"gradient_accumulation_steps": 4}}, "here: train.tokens_per_step, the tokens of a whole step"),
    ({"load_in_4bit": True}, "here: train.trainable: lora and train.lora.base: nf4"),
    ({"train": {"optimizer": "adamw"}}, "leave it out: the optimizer is AdamW"),
    ({"dataloader_num_workers": 4}, "leave it out: data is prepared once"),
    ({"base_model": "x"}, "that is Axolotl's name; here: model"),
    ({"train": {"lora_r": 8}}, "that is PEFT's name; here: train.lora.rank"),
    ({"train": {"lora": True}}, "train.lora is True; write train.trainable: lora"),
    ({"method": "lora"}, "method is 'lora'; LoRA is train.trainable: lora"),
    ({"method": "grpo"}, "method is 'grpo'; here: method: policy, on recorded samples"),
]


@pytest.mark.parametrize(("given", "words"), CASES, ids=[str(given) for given, _ in CASES])
def test_client_and_server_answer_with_our_name(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidSpec) as of_server:
        parse_job_spec(MINE | given)
    with pytest.raises(ClientError) as of_client:
        spec_to_proto(MINE | given)
    assert words in of_server.value.message
    assert words in of_client.value.message


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"train": {"trainable": "LoRA"}}, "train.trainable is 'LoRA'; did you mean lora?"),
        ({"train": {"trainable": ["ALL"]}}, "train.trainable is 'ALL'; did you mean all?"),
    ],
)
def test_values_that_the_server_judges(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidSpec, match=re.escape(words)):
        parse_job_spec(MINE | given)


def test_every_field_that_a_hint_names_exists() -> None:
    schema = job_schema()
    hints = [here for _, here in (*other_names._NAMES.values(), *other_names._BEGINNINGS.values())]
    paths = {
        path
        for hint in hints
        for path in re.findall(r"\b(?:train|eval|checkpoint|policy|dpo|simpo)(?:\.[a-z_]+)+", hint)
    }
    assert len(paths) > 20
    for path in sorted(paths):
        field_at(schema, path.split("."))
    own = set(schema["properties"]) | set(field_at(schema, ["train"])["properties"])
    assert not own & set(other_names._NAMES), "such a field is ours, and the hint would never be seen"


def test_an_expression_in_double_quotes_is_explained(tmp_path: Path) -> None:
    words = re.escape(r"in YAML a backslash, as in \., needs single quotes: ['layers\.[4-5]']")
    with pytest.raises(ClientError, match=words):
        with_overrides(MINE, [r'train.trainable=["layers\.[4-5]"]'])
    with pytest.raises(ClientError, match="line 2: .*" + words):
        parse_spec('name: j\ntrain: {trainable: ["layers\\.[4-5]"]}', name="job.yaml")


def test_pairs_without_one_half_say_which_is_missing() -> None:
    row = json.loads('{"prompt": "p", "chosen": "c"}')
    with pytest.raises(
        InvalidFile,
        match=r"the row has chosen, prompt: for preference, rejected is missing; .*--map rejected=COLUMN",
    ):
        detect_format(row, {}, "data.jsonl:1")
