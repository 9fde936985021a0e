"""Configs of other tools become job files: what is carried over, the arithmetic, and that no setting is passed over in
silence. The configs in `tests/data/configs` are written after the public documentation of each tool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from horizon_client.cli.root import horizon
from horizon_client.errors import BadFile, InvalidRequest
from horizon_client.importing import TOOLS, Imported, Outcome, convert, read_config, tool_of
from horizon_server.spec import parse_job_spec

CONFIGS = Path(__file__).parents[2] / "data" / "configs"
FILES = sorted(path.name for path in CONFIGS.iterdir())


def _imported(name: str, **options: Any) -> Imported:
    config = read_config(CONFIGS / name)
    return convert(config, tool_of(config), file=name, **options)


def _of(imported: Imported, outcome: Outcome) -> dict[str, str]:
    return {line.source.partition(":")[0]: line.text for line in imported.lines if line.outcome is outcome}


@pytest.mark.parametrize("name", FILES)
def test_the_job_file_is_one_that_the_server_takes(name: str) -> None:
    imported = _imported(name)
    written = yaml.safe_load(imported.job_file())
    assert written == imported.spec
    of_client = {field: written.pop(field) for field in ("map", "format") if field in written}
    assert all(of_client.values())
    # The client pushes these and sends names.
    parse_job_spec({**written, "model": "m", "dataset": "d"})


@pytest.mark.parametrize("name", FILES)
def test_every_setting_is_accounted_for(name: str) -> None:
    said = " ".join(line.source for line in _imported(name).lines)
    missing = [setting for setting in read_config(CONFIGS / name) if setting not in said]
    assert not missing


@pytest.mark.parametrize(
    ("name", "tool"),
    [
        ("axolotl_qlora.yaml", "axolotl"),
        ("axolotl_dpo.yaml", "axolotl"),
        ("llamafactory_lora_sft.yaml", "llama-factory"),
        ("llamafactory_simpo.yaml", "llama-factory"),
        ("trl_sft.yaml", "trl"),
        ("trl_dpo.yaml", "trl"),
        ("training_args.json", "transformers"),
    ],
)
def test_the_tool_is_told_by_its_names(name: str, tool: str) -> None:
    assert tool_of(read_config(CONFIGS / name)).name == tool


def test_an_axolotl_config() -> None:
    imported = _imported("axolotl_qlora.yaml")
    assert imported.spec["train"] == {
        "sequence_length": 4096,
        "tokens_per_step": 2 * 4 * 4096,
        "epochs": 4.0,
        "learning_rate": 2e-4,
        "lr_schedule": "cosine",
        "warmup_steps": 10,
        "weight_decay": 0,
        "trainable": "lora",
        "lora": {"base": "nf4", "rank": 32, "alpha": 16.0, "dropout": 0.05, "targets": "all-linear"},
    }
    assert (imported.spec["dataset"], imported.spec["format"]) == ("./alpaca_2k.jsonl", "alpaca")
    assert _of(imported, Outcome.CHANGED)["micro_batch_size, gradient_accumulation_steps"] == (
        "2 rows x 4 accumulated x 1 GPU x 4096 tokens, in packed rows, = 32,768"
    )
    assert set(_of(imported, Outcome.MISSING)) == {"evals_per_epoch", "special_tokens"}


def test_an_axolotl_config_of_pairs() -> None:
    imported = _imported("axolotl_dpo.yaml", num_gpus=8)
    train = imported.spec["train"]
    assert (imported.spec["method"], imported.spec["dpo"]) == ("dpo", {"beta": 0.2})
    assert imported.spec["dataset"] == ["./pairs_a.jsonl", "./pairs_b.jsonl"]
    assert train["warmup_steps"] == 40, "a tenth of 400 steps"
    assert (train["lr_schedule"], train["min_lr_ratio"]) == ("cosine_with_min_lr", 0.1)
    assert train["max_grad_norm"] is None, "0 turns clipping off there"
    assert train["tokens_per_step"] == 8 * 8 * 2048 * 2
    words = "1 rows x 8 accumulated x 8 GPU x 2048 tokens x 2 answers = 262,144 at most: its rows are not packed"
    assert words in _of(imported, Outcome.CHECK)["micro_batch_size, gradient_accumulation_steps"]
    assert imported.is_complete


def test_a_llama_factory_config_and_what_it_leaves_to_its_defaults() -> None:
    imported = _imported("llamafactory_lora_sft.yaml")
    assert imported.spec["train"]["lora"] == {"rank": 16, "alpha": 32.0, "targets": ["q_proj", "v_proj"]}
    assert _of(imported, Outcome.DEFAULT)["llama-factory's default"] == "twice the rank"
    assert set(_of(imported, Outcome.MISSING)) == {"dataset", "warmup_ratio", "max_samples"}
    assert imported.spec["eval_every_steps"] == 500


def test_a_stage_and_its_loss_are_one_method() -> None:
    imported = _imported("llamafactory_simpo.yaml")
    assert (imported.spec["method"], imported.spec["simpo"]) == ("simpo", {"beta": 2.5, "gamma": 1.4})
    assert set(_of(imported, Outcome.MISSING)) == {"additional_target"}, "it changes the result"


def test_a_trl_config_of_another_trainer_can_say_its_method() -> None:
    assert "method" in {line.field for line in _imported("trl_sft.yaml").lines if line.outcome is Outcome.CHECK}
    assert _imported("trl_sft.yaml", method="pretrain").spec["method"] == "pretrain"
    pairs = _imported("trl_dpo.yaml")
    assert pairs.spec["dpo"] == {"loss": "hinge", "beta": 0.05, "label_smoothing": 0.0}
    assert pairs.spec["train"]["learning_rate"] == 1e-6, "the default of DPOConfig"
    assert set(_of(pairs, Outcome.MISSING)) == {"rpo_alpha"}
    with pytest.raises(InvalidRequest, match="method is 'grpo'"):
        _imported("trl_dpo.yaml", method="grpo")


def test_zero_is_a_choice() -> None:
    imported = convert({"use_peft": True, "lora_dropout": 0, "warmup_steps": 0}, TOOLS["trl"], file="c.yaml")
    assert (imported.spec["train"]["lora"]["dropout"], imported.spec["train"]["warmup_steps"]) == (0.0, 0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "colour: red\n",
            'is not a config of axolotl, llama-factory, trl, transformers that this version knows: it has ["colour"]',
        ),
        (
            "base_model: m\ncutoff_len: 5\n",
            "has names of two tools: base_model of Axolotl and cutoff_len of LLaMA-Factory",
        ),
        ("- 1\n", "must contain a mapping"),
        ("base_model: !!python/object/apply:os.system [id]\n", "not YAML"),
        ("a" * (1 << 20) + ": 1\n", "is larger than 1 MiB"),
    ],
)
def test_a_file_that_is_none_is_refused(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(BadFile) as refused:
        tool_of(read_config(path), file=str(path))
    assert words in refused.value.message


def test_the_command_says_line_by_line_what_became_of_the_config(tmp_path: Path) -> None:
    target, runner = tmp_path / "job.yaml", CliRunner()
    result = runner.invoke(horizon, ["job", "import", str(CONFIGS / "axolotl_qlora.yaml"), "--to", str(target)])
    assert (result.exit_code, result.stdout) == (1, ""), "evals_per_epoch needs a decision"
    assert "is a config of axolotl\ncarried over:\n" in result.stderr
    assert "not carried over:\n  evals_per_epoch: 4: depends on the number of steps" in result.stderr
    assert "tokens_per_step: 32768  # micro_batch_size, gradient_accumulation_steps: 2 rows x 4" in target.read_text()
    again = runner.invoke(horizon, ["job", "import", str(CONFIGS / "axolotl_qlora.yaml"), "--to", str(target)])
    assert (again.exit_code, again.stderr) == (2, f"Error: {target} exists; choose another name\n")
    complete = runner.invoke(horizon, ["job", "import", str(CONFIGS / "axolotl_dpo.yaml")])
    assert complete.exit_code == 0
    assert complete.stdout.startswith("# Made by horizon job import from axolotl_dpo.yaml (axolotl).\nname: ")


@pytest.mark.parametrize(
    ("name", "states", "outcome"),
    [
        ("adamw_8bit", "compressed", Outcome.CHANGED),
        ("adamw_bnb_8bit", "compressed", Outcome.CHANGED),
        ("paged_adamw_8bit", "compressed", Outcome.CHANGED),
        ("adamw_torch_8bit", "compressed", Outcome.CHANGED),
        ("paged_adamw_32bit", None, Outcome.CHANGED),
        ("adamw_torch_4bit", None, Outcome.CHANGED),
        ("adamw_torch", None, Outcome.NEEDLESS),
        ("adafactor", None, Outcome.MISSING),
    ],
)
def test_an_optimizer_with_8_bits_has_compressed_states_here(name: str, states: str | None, outcome: Outcome) -> None:
    config = {**read_config(CONFIGS / "training_args.json"), "optim": name}
    imported = convert(config, tool_of(config), file="training_args.json")
    assert imported.spec["train"].get("optimizer_states") == states
    (said,) = [line for line in imported.lines if line.source.startswith("optim:")]
    assert said.outcome is outcome
    # The bits are as many, the arithmetic is another.
    assert ("not that of bitsandbytes" in said.text) == (states is not None)
    written = yaml.safe_load(imported.job_file())
    spec = parse_job_spec({**written, "model": "m", "dataset": "d", "method": "sft"})
    assert spec.train.optimizer_states == (states or "exact")
