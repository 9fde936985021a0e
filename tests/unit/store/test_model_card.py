"""What a checkpoint says of itself: a card whose head the hub can read whatever users call their things, and a job file
that can be submitted again."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

from horizon_server.errors import InvalidModel
from horizon_server.store.model_card import (
    ANSWERS_FILE,
    CARD_FILE,
    EVALUATION_FILE,
    FACTS_FILE,
    JOB_FILE,
    BaseFacts,
    DataFacts,
    ResultFacts,
    base_facts,
    model_card,
    read_facts,
    write_card,
    write_facts,
)

DATA = DataFacts(name="gsm8k", use="training", digest="ab" * 32, rows=9, documents=8, tokens=7000, trained_tokens=600)
SET = {
    "name": "eval",
    "loss": 0.5,
    "perplexity": 1.6487,
    "accuracy": 0.75,
    "exact_match": 0.4,
    "num_targets": 100,
    "num_correct": 75,
    "num_answers": 10,
    "num_matches": 4,
}
FACTS = ResultFacts(
    job_id="job_1",
    job_name="gsm8k-sft",
    step=20,
    num_steps=80,
    num_parameters=2000,
    num_trained_parameters=100,
    spec={"name": "gsm8k-sft", "model": "Qwen/Qwen3-8B", "dataset": "gsm8k", "train": {"learning_rate": 1e-05}},
    method="sft",
    base=BaseFacts(name="Qwen/Qwen3-8B", repo="Qwen/Qwen3-8B", commit="c" * 40, licence={"license": "apache-2.0"}),
    data=[DATA, replace(DATA, use="evaluation (eval)")],
    train_loss=0.25,
    num_trained_tokens=1234,
    evaluation={"step": 20, "eval_loss": 0.5, "judged": 0.5, "sets": [SET]},
    answers=[{"prompt": "2 + 2?", "answer": "4", "matches": True}],
    versions={"horizon": "0.2.0", "torch": "2.11"},
)


def head(text: str) -> dict[str, Any]:
    """The head as the hub's own library reads it."""
    found: dict[str, Any] = ModelCard(text).data.to_dict()  # type: ignore[no-untyped-call]
    return found


def test_the_head_names_base_data_licence_and_library_as_the_hub_wants_them() -> None:
    assert head(model_card(FACTS, "adapter")) == {
        "base_model": "Qwen/Qwen3-8B",
        "base_model_relation": "adapter",
        "datasets": ["gsm8k"],
        "license": "apache-2.0",
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["horizon", "sft", "lora"],
    }
    merged = head(model_card(FACTS, "merged"))
    assert (merged["library_name"], merged["base_model_relation"]) == ("transformers", "finetune")
    # A pushed model is none that the hub could link to.
    assert "base_model" not in head(model_card(replace(FACTS, base=BaseFacts(name="tiny")), "model"))


def test_the_text_has_use_figures_data_spec_and_versions() -> None:
    text = model_card(FACTS, "adapter")
    for shown in (
        "step 20 of 80, 100 of 2,000 parameters trained",
        'AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-8B")',
        "PeftModel.from_pretrained(base, folder)",
        "Loss of the last step: 0.2500, after 1,234 tokens.",
        "| eval | 0.5000 | 1.649 | 75.0% | 40.0% |",
        f"| gsm8k | training | 9 | 8 | 7,000 | 600 | `{'ab' * 8}` |",
        "horizon 0.2.0, torch 2.11",
    ):
        assert shown in text
    assert "PeftModel" not in model_card(FACTS, "model")
    assert "This step was not evaluated" in model_card(replace(FACTS, evaluation=None), "model")


@pytest.mark.parametrize("name", ["a: b\n---\nlicense: mit", "`|<script>|` # x", "---", "yes", "1e3", '"\\', "\u2028"])
def test_no_name_breaks_the_head_or_the_text(name: str) -> None:
    facts = replace(
        FACTS,
        job_name=name,
        base=BaseFacts(name=name, licence={"license": name}),
        data=[replace(DATA, name=name)],
        spec={"name": name},
    )
    text = model_card(facts, "model")
    found = head(text)
    assert (found["datasets"], found["license"], found["library_name"]) == ([name], name, "transformers")
    body = text.partition("\n---\n")[2]
    # What is code is shown as it is.
    assert "<script>" not in re.sub(r"`[^`\n]*`", "", body.partition("```yaml")[0])
    assert yaml.safe_load(body.partition("```yaml\n")[2].partition("```\n")[0]) == {"name": name}


def test_all_texts_are_files_and_the_facts_are_kept_for_a_later_merge(tmp_path: Path) -> None:
    (tmp_path / "trainer").mkdir()
    files = write_facts(tmp_path, FACTS, "adapter")
    assert set(files) == {CARD_FILE, JOB_FILE, EVALUATION_FILE, ANSWERS_FILE, FACTS_FILE}
    assert all((tmp_path / name).stat().st_size == record.size_bytes for name, record in files.items())
    assert yaml.safe_load((tmp_path / JOB_FILE).read_bytes()) == FACTS.spec
    assert json.loads((tmp_path / EVALUATION_FILE).read_bytes()) == FACTS.evaluation
    assert [json.loads(line) for line in (tmp_path / ANSWERS_FILE).read_bytes().splitlines()] == list(FACTS.answers)
    kept = read_facts(tmp_path)
    assert kept is not None and asdict(kept) == asdict(replace(FACTS, answers=[]))
    merged = tmp_path / "merged"
    merged.mkdir()
    assert set(write_card(merged, kept, "merged")) == {CARD_FILE, JOB_FILE}
    (tmp_path / FACTS_FILE).write_text("{}")
    with pytest.raises(InvalidModel, match="is damaged"):
        read_facts(tmp_path)
    (tmp_path / FACTS_FILE).unlink()
    assert read_facts(tmp_path) is None


def test_base_and_licence_come_from_what_the_model_folder_says_of_itself(tmp_path: Path) -> None:
    assert base_facts(tmp_path, "tiny") == BaseFacts(name="tiny")
    card = tmp_path / CARD_FILE
    card.write_text("---\nlicense: other\nlicense_name: tiny-1\nbase_model: Lab/Other\ntags: [chat]\n---\n# Tiny\n")
    licence = {"license": "other", "license_name": "tiny-1"}
    assert base_facts(tmp_path, "tiny") == BaseFacts(name="tiny", licence=licence)
    # The start of a job may be the result of another.
    card.write_text(model_card(FACTS, "model"))
    assert base_facts(tmp_path, "tiny") == replace(FACTS.base, name="tiny", commit="")
    for broken in ("---\n: [\n---\n", "---\nlicense: mit\n", "no head", "---\n- list\n---\n"):
        card.write_text(broken)
        assert base_facts(tmp_path, "tiny") == BaseFacts(name="tiny")
    card.write_bytes(b"\xff\xfe")
    assert base_facts(tmp_path, "tiny") == BaseFacts(name="tiny")
