"""What a checkpoint says of itself to whoever finds it: README.md (a model card of the Hugging Face hub), job.yaml, and
the evaluation of its step. Torch-free.

A worker writes the texts with the weights; a model that is merged on the node later has a card of its own, from the
facts that are kept under trainer/.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from horizon_formats.model_files import is_hub_id
from horizon_server.errors import InvalidModel
from horizon_server.store.manifest import TRAINER_FOLDER, FileRecord
from horizon_server.store.safetensors_files import write_text

CARD_FILE = "README.md"
JOB_FILE = "job.yaml"
EVALUATION_FILE = "evaluation.json"
ANSWERS_FILE = "answers.jsonl"
FACTS_FILE = f"{TRAINER_FOLDER}/facts.json"
SOURCE_FILE = "hub.json"
"""In the folder of a model that came from a hub: which repository and commit it is, and its licence."""

Holds = Literal["model", "adapter", "merged"]
"""What a folder holds: a whole model, an adapter, or a model with the adapter merged into it."""

_MAX_CARD_BYTES = 1 << 20
_LICENCE_KEYS = ("license", "license_name", "license_link")


@dataclass(frozen=True, kw_only=True)
class BaseFacts:
    """The model that a job started from. `repo` and `commit` are of a hub, and empty where it was pushed; `licence` has
    the keys of a card's head."""

    name: str
    repo: str = ""
    commit: str = ""
    licence: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """One dataset: how the spec names it, what it was for (training, or the name of an eval set), and what came out of
    its preparation."""

    name: str
    use: str
    digest: str
    rows: int
    documents: int
    tokens: int
    trained_tokens: int


@dataclass(frozen=True, kw_only=True)
class ResultFacts:
    """Everything that the texts say. `spec` has the fields that are not defaults; `evaluation` and `answers` are of
    this step, where it was evaluated."""

    job_id: str
    job_name: str
    step: int
    num_steps: int
    num_parameters: int
    num_trained_parameters: int
    spec: Mapping[str, Any]
    method: str
    base: BaseFacts
    data: Sequence[DataFacts]
    train_loss: float | None = None
    num_trained_tokens: int = 0
    evaluation: Mapping[str, Any] | None = None
    answers: Sequence[Mapping[str, Any]] = ()
    versions: Mapping[str, str] = field(default_factory=dict)


def base_facts(folder: Path, name: str) -> BaseFacts:
    """Return what a model folder says of where it comes from, in its card and what `horizond model add` has left."""
    source = _read_object(folder / SOURCE_FILE)
    head = _card_head(folder / CARD_FILE)
    licence = {key: str(head[key]) for key in _LICENCE_KEYS if isinstance(head.get(key), str)}
    if not licence and isinstance(source.get("license"), str) and source["license"]:
        licence = {"license": source["license"]}
    tags, started_from = head.get("tags"), head.get("base_model")
    is_own_card = isinstance(tags, list) and "horizon" in tags and isinstance(started_from, str)
    repo = str(source.get("repo", "")) or (name if is_hub_id(name) else str(started_from) if is_own_card else "")
    return BaseFacts(name=name, repo=repo, commit=str(source.get("commit", "")), licence=licence)


def write_facts(folder: Path, facts: ResultFacts, holds: Holds) -> dict[str, FileRecord]:
    """Write all texts into a checkpoint, and the facts under trainer/, which is there; returns the files."""
    kept = {**asdict(facts), "answers": []}
    files = {
        **write_card(folder, facts, holds),
        FACTS_FILE: write_text(folder / FACTS_FILE, json.dumps(kept, indent=2) + "\n"),
    }
    if facts.evaluation is not None:
        files[EVALUATION_FILE] = write_text(
            folder / EVALUATION_FILE, json.dumps(dict(facts.evaluation), indent=2) + "\n"
        )
    if facts.answers:
        text = "".join(json.dumps(dict(answer), ensure_ascii=False) + "\n" for answer in facts.answers)
        files[ANSWERS_FILE] = write_text(folder / ANSWERS_FILE, text)
    return files


def write_card(folder: Path, facts: ResultFacts, holds: Holds) -> dict[str, FileRecord]:
    """Write README.md and job.yaml; returns the files."""
    job = f"# Job {facts.job_id}, as it was submitted: horizon job submit job.yaml\n{_yaml(facts.spec)}"
    return {
        CARD_FILE: write_text(folder / CARD_FILE, model_card(facts, holds)),
        JOB_FILE: write_text(folder / JOB_FILE, job),
    }


def read_facts(checkpoint: Path) -> ResultFacts | None:
    """Return the facts of a checkpoint without its answers; None of one that an earlier version wrote. Raises
    InvalidModel where they are damaged."""
    file = checkpoint / FACTS_FILE
    if not file.is_file():
        return None
    try:
        plain = json.loads(file.read_bytes())
        base, data = BaseFacts(**plain.pop("base")), [DataFacts(**one) for one in plain.pop("data")]
        return ResultFacts(**plain, base=base, data=data)
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidModel(f"is damaged ({error}); use another checkpoint", file=file) from error


def model_card(facts: ResultFacts, holds: Holds) -> str:
    """Return the card: its head, which the hub reads, and the text, which people read."""
    head: dict[str, Any] = {}
    # The hub takes names of repositories there, and refuses a card with others.
    if facts.base.repo:
        head["base_model"] = facts.base.repo
        head["base_model_relation"] = "adapter" if holds == "adapter" else "finetune"
    head["datasets"] = sorted({data.name for data in facts.data})
    head |= facts.base.licence
    head["library_name"] = "peft" if holds == "adapter" else "transformers"
    head["pipeline_tag"] = "text-generation"
    head["tags"] = list(dict.fromkeys(["horizon", facts.method, *(["lora"] if holds != "model" else [])]))
    parts = [_opening(facts, holds), _use(facts, holds), _figures(facts), _data(facts), _reproduction(facts)]
    return f"---\n{_yaml(head)}---\n\n" + "\n".join(parts)


def _opening(facts: ResultFacts, holds: Holds) -> str:
    what = {
        "model": "A model, fine-tuned from",
        "adapter": "An adapter for",
        "merged": "A model: an adapter, merged into",
    }[holds]
    base = _code(facts.base.repo or facts.base.name)
    commit = f" at commit {_code(facts.base.commit)}" if facts.base.commit else ""
    share = "" if facts.num_trained_parameters == facts.num_parameters else f" of {facts.num_parameters:,}"
    return (
        f"# {_plain(facts.job_name)}\n\n{what} {base}{commit}, by method {_code(facts.method)}: step {facts.step:,} of "
        f"{facts.num_steps:,}, {facts.num_trained_parameters:,}{share} parameters trained.\n"
    )


def _use(facts: ResultFacts, holds: Holds) -> str:
    base = facts.base.repo or f"the folder of {facts.base.name}"
    if holds == "adapter":
        lines = [
            "from peft import PeftModel",
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            'folder = "."  # this folder, or its id on the hub',
            f"base = AutoModelForCausalLM.from_pretrained({json.dumps(base)})",
            "model = PeftModel.from_pretrained(base, folder)",
        ]
    else:
        lines = [
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            'folder = "."  # this folder, or its id on the hub',
            "model = AutoModelForCausalLM.from_pretrained(folder)",
        ]
    lines.append("tokenizer = AutoTokenizer.from_pretrained(folder)")
    return "\n".join(["## How to use it", "", "```python", *lines, "```", ""])


def _figures(facts: ResultFacts) -> str:
    lines = ["## Figures", ""]
    if facts.train_loss is not None:
        lines += [f"Loss of the last step: {facts.train_loss:.4f}, after {facts.num_trained_tokens:,} tokens.", ""]
    if facts.evaluation is None:
        lines += ["This step was not evaluated.", ""]
        return "\n".join(lines)
    lines += ["| eval set | loss | perplexity | accuracy | exact match |", "| --- | --- | --- | --- | --- |"]
    for figures in facts.evaluation["sets"]:
        cells = [_plain(figures["name"]), _shown(figures, "loss", ".4f"), _shown(figures, "perplexity", ".3f")]
        cells += [_shown(figures, "accuracy", ".1%"), _shown(figures, "exact_match", ".1%")]
        lines.append(f"| {' | '.join(cells)} |")
    more = f" The answers are in `{ANSWERS_FILE}`." if facts.answers else ""
    lines += ["", f"Perplexity and accuracy are over the trained tokens of the data.{more}", ""]
    return "\n".join(lines)


def _data(facts: ResultFacts) -> str:
    lines = [
        "## Data",
        "",
        "| dataset | for | rows | documents | tokens | trained tokens | digest |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for data in facts.data:
        counts = " | ".join(f"{n:,}" for n in (data.rows, data.documents, data.tokens, data.trained_tokens))
        lines.append(f"| {_plain(data.name)} | {_plain(data.use)} | {counts} | `{data.digest[:16]}` |")
    return "\n".join([*lines, ""])


def _reproduction(facts: ResultFacts) -> str:
    versions = ", ".join(f"{_plain(name)} {_plain(version)}" for name, version in facts.versions.items())
    return (
        f"## How it was made\n\nBy horizon (the package horizon-train), job {_code(facts.job_id)}. `{JOB_FILE}`"
        f" is its spec:\n\n```yaml\n{_yaml(facts.spec)}```\n\nVersions: {versions}.\n"
    )


def _shown(figures: Mapping[str, Any], name: str, form: str) -> str:
    """A figure as text: of a loss without perplexity, or one that is not finite, there is none."""
    value = figures.get(name)
    return format(value, form) if isinstance(value, float) else "-"


def _yaml(plain: Mapping[str, Any]) -> str:
    # In ASCII and quoted where needed: a name cannot end the head of a card, nor a block of the text.
    return yaml.safe_dump(dict(plain), sort_keys=False, allow_unicode=False, width=120)


def _plain(text: object) -> str:
    """A text in a line or a table of Markdown, as it is read."""
    return "".join(f"\\{letter}" if letter in "\\`*_[]<>|#" else letter for letter in " ".join(str(text).split()))


def _code(text: str) -> str:
    """A name as code: what could end it is left out."""
    return f"`{' '.join(text.replace('`', '').split())}`"


def _read_object(file: Path) -> Mapping[str, Any]:
    try:
        if file.stat().st_size > _MAX_CARD_BYTES:
            return {}
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _card_head(file: Path) -> Mapping[str, Any]:
    """The head of a card that a user has pushed, empty where there is none that can be read."""
    try:
        if file.stat().st_size > _MAX_CARD_BYTES:
            return {}
        text = file.read_text("utf-8")
        _, _, rest = text.partition("---\n")
        head, end, _ = rest.partition("\n---")
        found = yaml.safe_load(head) if text.startswith("---\n") and end else None
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
