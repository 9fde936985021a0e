"""Try every causal language model that transformers knows at a tiny size, and write docs/supported-models.md.

Each family goes the way of a job: a folder with random weights is opened and planned, loaded, trained for one step, and
loss and gradient are compared with plain PyTorch in fp64. All take about a quarter of an hour. What came out is kept in
docs/supported-models.json, so that single families can be tried again.

    python -m tools.try_model_families [FAMILY ...]    # all, or those alone; then the page
    python -m tools.try_model_families --page          # the page alone
"""

from __future__ import annotations

import json
import multiprocessing
import re
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
from tests.support.plans import settings
from tests.support.tiny_models import CHANGES, config_of, micro_batch, summed_loss
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.template import Template
from horizon_server.engine.trainer import Trainer
from horizon_server.errors import HorizonError
from horizon_server.planning.model_folder import open_model_folder
from horizon_server.store.host_store import HostStore
from horizon_server.store.model_load import load_model

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE, KEPT = DOCS / "supported-models.md", DOCS / "supported-models.json"
LIMIT_S = 300
MOST_PARAMETERS = 120_000_000
"""Of a model that is tiny. A family whose config has other names for its sizes is larger."""
TOLERANCE = 1e-4
"""Of loss and gradient norm, relative to fp64. Plain fp32 is about as far away."""

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "head_dim": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "n_layer": 3,
    "n_head": 4,
    "n_embd": 32,
    "n_positions": 128,
    "n_inner": 48,
    "rotary_dim": 8,
    "d_model": 32,
    "n_heads": 4,
    "n_layers": 3,
    "num_layers": 3,
    "attention_heads": 4,
    "ffn_dim": 48,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "n_shared_experts": 1,
    "moe_top_k": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "sliding_window": 9,
    "index_topk": 4,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "intermediate_size_mlp": 48,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "hidden_dropout_prob": 0.0,
    "embd_pdrop": 0.0,
    "dropout": 0.0,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "activation_dropout": 0.0,
    "layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "summary_first_dropout": 0.0,
    "residual_dropout": 0.0,
    "pad_token_id": 7,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "is_decoder": True,
}
"""What configs call their sizes. A family gets those that it has."""
OWN: dict[str, dict[str, Any]] = {
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]], "window_size": 9},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention", "mamba"],
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_chunk_size": 8,
        "mamba_n_groups": 1,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
}
"""Sizes with names that no other family has."""
ATTEMPTS: tuple[dict[str, Any], ...] = (
    {},
    {"num_hidden_layers": 4, "num_key_value_heads": 4},
    {"num_hidden_layers": 6, "num_key_value_heads": 4, "head_dim": 16, "hidden_size": 64},
)
"""Changes for families whose sizes must divide each other otherwise."""


RESULTS = ("trains", "differs", "refused", "untried")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a family."""

    family: str
    result: str
    """Of RESULTS: `untried` is a family of which no tiny model could be made here."""
    packs: bool = False
    """Whether several documents may be in one row."""
    masks: bool = False
    """Whether its attention is that of transformers with masks, not the engine's own."""
    note: str = ""


def tiny_config(family: str, changes: Mapping[str, Any]) -> PretrainedConfig:
    """Return the tests' own tiny config of a family where they have one, else one of the sizes that it knows."""
    if family in CHANGES:
        return config_of(family, **changes)
    sizes = SIZES | changes | OWN.get(family, {})
    usual = AutoConfig.for_model(family)
    kept = {name: value for name, value in sizes.items() if hasattr(usual, name)}
    if hasattr(usual, "text_config"):
        text = usual.get_text_config()
        kept["text_config"] = {name: value for name, value in sizes.items() if hasattr(text, name)}
    config: PretrainedConfig = AutoConfig.for_model(family, **kept)
    return config


def tiny_model(family: str) -> Any:
    """Return the first model of a family that plain transformers builds and runs.

    Raises:
        Exception: of whatever kind transformers raises for the last attempt.
    """
    problem: Exception | None = None
    for changes in ATTEMPTS:
        try:
            config = tiny_config(family, changes)
            with torch.device("meta"):
                empty: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
                size = sum(p.numel() for p in empty.parameters())
            if size > MOST_PARAMETERS:
                raise ValueError(f"its config has other names for its sizes ({size:,} parameters)")
            torch.manual_seed(0)
            model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
            loss = summed_loss(model.train(False), micro_batch([torch.arange(1, 12)]))
            torch.autograd.backward(loss)
        except Exception as error:  # noqa: BLE001 - any refusal of transformers leads to the next attempt
            problem = error
        else:
            return model
    assert problem is not None
    raise problem


def try_family(family: str) -> Outcome:
    """Take one family the way of a job."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            tiny_model(family).save_pretrained(folder)
        except Exception as error:  # noqa: BLE001 - what transformers cannot build is not judged
            # Families without a tiny model may be refused by name all the same.
            return _refused_by_name(family, error)
        try:
            return _train(family, folder)
        except HorizonError as error:
            return Outcome(family=family, result="refused", note=error.message)


def _train(family: str, folder: Path) -> Outcome:
    planned = open_model_folder(folder).layout
    template = Template.from_folder(folder)
    assert planned.num_parameters == template.layout.num_parameters
    store = HostStore.allocate(template.layout, num_threads=1)
    load_model(store, folder)
    generator = torch.Generator().manual_seed(0)
    rows = [micro_batch([torch.randint(8, 90, (length,), generator=generator)]) for length in (14, 22)]
    recipe, execution = settings(optimizer_threads=1)
    device = HostDevice(num_threads=1)
    try:
        trainer = Trainer(template, store, device, recipe, execution, num_steps=4)
        packs = trainer.supports_packing
        report = trainer.train_step(rows)
    finally:
        device.close()
        store.close()
    loss, norm = _plain(folder, rows)
    apart = max(abs(report.loss - loss) / loss, abs(report.grad_norm - norm) / norm)
    return Outcome(
        family=family,
        result="trains" if apart <= TOLERANCE else "differs",
        packs=packs,
        masks=template.needs_masks,
        note="" if apart <= TOLERANCE else f"loss or gradient norm is {apart:.1e} away from fp64",
    )


def _plain(folder: Path, rows: Iterable[Any]) -> tuple[float, float]:
    """Return loss and gradient norm of plain PyTorch in fp64, in fp32 where the model has no other."""
    rows = list(rows)
    for dtype in (torch.float64, torch.float32):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).train(False)
        try:
            loss = sum(summed_loss(model, row) for row in rows) / sum(row.num_targets for row in rows)
            loss.backward()
        except RuntimeError:
            if dtype == torch.float32:
                raise
        else:
            squares = sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None)
            return float(loss), squares**0.5
    raise AssertionError("the loop returns or raises")


def _refused_by_name(family: str, problem: Exception) -> Outcome:
    said = f"{type(problem).__name__}: {' '.join(str(problem).split())}"[:160]
    try:
        Template.from_config(AutoConfig.for_model(family))
    except HorizonError as error:
        return Outcome(family=family, result="refused", note=error.message)
    except Exception:  # noqa: BLE001, S110 - it is untried then, for the first reason
        pass
    return Outcome(family=family, result="untried", note=said)


def outcomes(families: Iterable[str]) -> Iterator[Outcome]:
    """Try each family in a process of its own: one that crashes or stands still costs the others nothing."""
    context = multiprocessing.get_context("fork")
    for family in families:
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=_child, args=(family, sender))
        child.start()
        sender.close()
        if receiver.poll(LIMIT_S):
            try:
                yield receiver.recv()
            except EOFError:
                yield Outcome(family=family, result="untried", note="the trial's process ended without an answer")
        else:
            child.kill()
            yield Outcome(family=family, result="untried", note=f"no answer within {LIMIT_S} s")
        child.join()


def _child(family: str, sender: Any) -> None:
    try:
        sender.send(try_family(family))
    except Exception as error:  # noqa: BLE001 - the page says it
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
        sender.send(Outcome(family=family, result="differs", note=said))


HEAD = """# Supported models

<!-- Generated by tools/try_model_families.py from docs/supported-models.json. -->

Every decoder-only language model of transformers is meant to work: the engine finds the list of layers in the model's
own class and streams it, so a family needs no code here. To see for which ones that is so, each family that
transformers {transformers} knows was built with random weights at a tiny size and went the way of a job: opened,
planned, loaded and trained for a step. Loss and gradient norm were compared with plain PyTorch in fp64 (torch {torch},
{date}, on the CPU). {trains} of {tried} families train with the same numbers.

`model_type` is the line of a model's `config.json`. A fine-tuned model, or one that was renamed, has the type of what
it was made from: DeepSeek-R1-Distill-Qwen is `qwen2`. Models that bring their own code (`trust_remote_code`) are
refused. Whether a model fits a machine is in [sizing.md](sizing.md); whether a given folder does, `horizon job plan`
says before anything is loaded.

## Families that train

| `model_type` | documents in one row | attention |
| --- | --- | --- |
"""
MIDDLE = """
*Documents in one row*: where it says no, layers mix what stands in one row (linear attention, state spaces), which a
trial on the real weights finds; each document is then a row of its own, and short documents train slower. *Attention*:
the engine's own sees the boundaries of documents and needs no mask; with masks, attention over long rows takes memory
by the square of their length ([ADR 0011](adr/0011-attention-gets-boundaries-not-masks.md)).

## Families that are refused

When the job is planned or starts, with this message:

| `model_type` | message |
| --- | --- |
"""
UNTRIED = """
## Families that were not tried

No tiny model of these could be built here, so nothing is claimed. A folder of such a model may train; a trial at the
start of the job compares its layers with its class, and refuses it where they differ.

| `model_type` | why |
| --- | --- |
"""


def page(kept: Mapping[str, Any]) -> str:
    """Return the Markdown page of what came out."""
    found = [Outcome(**one) for one in kept["outcomes"]]
    by_result = {result: [one for one in found if one.result == result] for result in RESULTS}
    head = HEAD.format(
        **{name: kept[name] for name in ("transformers", "torch", "date")},
        trains=len(by_result["trains"]),
        tried=len(found) - len(by_result["untried"]),
    )
    trains = "".join(
        f"| `{one.family}` | {'yes' if one.packs else 'no'} | {'masks' if one.masks else 'own'} |\n"
        for one in by_result["trains"]
    )
    refused = "".join(f"| `{one.family}` | {_cell(one.note)} |\n" for one in by_result["refused"])
    untried = "".join(
        f"| `{one.family}` | {_cell(one.note)} |\n" for one in by_result["untried"] + by_result["differs"]
    )
    return head + trains + MIDDLE + refused + UNTRIED + untried


def _cell(text: str) -> str:
    # The name of the trial's own folder says nothing.
    return re.sub(r"^tmp\w+: ", "", text.replace("|", "\\|"))


def main() -> int:
    """Try what the command line names, or everything, and write the page."""
    named = sys.argv[1:]
    kept = json.loads(KEPT.read_bytes()) if KEPT.exists() else {}
    versions = {"transformers": transformers.__version__, "torch": torch.__version__.partition("+")[0]}
    before = {one["family"]: one for one in kept.get("outcomes", [])}
    if named != ["--page"]:
        if named and any(kept.get(name) != version for name, version in versions.items()):
            sys.exit("the others were tried with other versions of transformers and torch; try all")
        for outcome in outcomes(named or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)):
            print(json.dumps(vars(outcome)), flush=True)
            before[outcome.family] = vars(outcome)
        kept = {
            **versions,
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
            "outcomes": [before[name] for name in sorted(before)],
        }
        KEPT.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
    PAGE.write_text(page(kept), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
