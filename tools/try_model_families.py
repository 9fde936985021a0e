"""Try every causal language model that transformers knows at a tiny size, for docs/supported-models.md.

Each family goes the way of a job: a folder with random weights is opened and planned, loaded, trained for one step, and
loss and gradient are compared with plain PyTorch in fp64. All take about a quarter of an hour. What came out is kept in
docs/supported-models.json, so that single families can be tried again.

    python -m tools.try_model_families [FAMILY ...]    # all, or those alone; then `make reference`
"""

from __future__ import annotations

import json
import multiprocessing
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

KEPT = Path(__file__).resolve().parent.parent / "docs" / "supported-models.json"
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


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a family."""

    family: str
    result: str
    """`trains`, `differs`, `refused`, or `untried` where no tiny model of it could be made."""
    packs: bool = False
    """Whether several documents may be in one row."""
    masks: bool = False
    """Whether its attention is that of transformers with masks, not the engine's own."""
    note: str = ""


def tiny_config(family: str, changes: Mapping[str, Any]) -> PretrainedConfig:
    """Return the tests' own tiny config of a family where they have one, else one of the sizes that it knows."""
    if family in CHANGES:
        return config_of(family, **changes)
    sizes = {**SIZES, **changes, **OWN.get(family, {})}
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


def main() -> int:
    """Try what the command line names, or everything, and keep what came out."""
    named = sys.argv[1:]
    kept = json.loads(KEPT.read_bytes()) if KEPT.exists() else {}
    versions = {"transformers": transformers.__version__, "torch": torch.__version__.partition("+")[0]}
    if named and any(kept.get(name) != version for name, version in versions.items()):
        sys.exit("the others were tried with other versions of transformers and torch; try all")
    found = {one["family"]: one for one in kept.get("outcomes", [])} if named else {}
    for outcome in outcomes(named or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)):
        print(json.dumps(vars(outcome)), flush=True)
        found[outcome.family] = vars(outcome)
    in_order = [found[name] for name in sorted(found)]
    kept = {**versions, "date": f"{datetime.now(UTC):%Y-%m-%d}", "outcomes": in_order}
    KEPT.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
