"""From the settings of another tool to the fields of a job: what needs more than another name, and the table for all
the rest."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from horizon_client.errors import InvalidRequest
from horizon_client.importing.data import read_data
from horizon_client.importing.imported import Imported, Outcome
from horizon_client.importing.tools import Tool
from horizon_formats.other_names import known_name

# Settings that change the result and have no counterpart, though there is nothing to write for them.
_MATTER = frozenset(
    {
        "modules_to_save",
        "lora_modules_to_save",
        "additional_target",
        "bias",
        "lora_bias",
        "loraplus_lr_ratio",
        "loraplus_lr_embedding",
        "num_generations",
        "reward_funcs",
        "special_tokens",
    }
)
_SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "cosine_with_min_lr": "cosine_with_min_lr",
    "warmup_stable_decay": "wsd",
}
_METHODS = {"pt": "pretrain", "sft": "sft", "dpo": "dpo", "ipo": "ipo", "kto": "kto", "orpo": "orpo", "simpo": "simpo"}
_LOSSES = {
    "nll": ("sft", None),
    "sigmoid": ("dpo", None),
    "hinge": ("dpo", "hinge"),
    "ipo": ("ipo", None),
    "orpo": ("orpo", None),
    "simpo": ("simpo", None),
    "kto": ("kto", None),
}
_NAME = re.compile(r"[^A-Za-z0-9._-]+")


class Settings:
    """The config's settings, each taken once; what stays is looked up in the table."""

    def __init__(self, config: Mapping[str, Any], tool: Tool) -> None:
        self.given = {str(name): value for name, value in config.items()}
        self.tool = tool
        self.unset = [name for name, value in self.given.items() if _is_unset(value)]
        self._left = {name: value for name, value in self.given.items() if name not in self.unset}

    def take(self, *names: str) -> tuple[str, Any]:
        """Return the first of these that is set, with its name, and drop it; an empty name where none is."""
        found = next((name for name in names if name in self._left), "")
        return (found, self._left.pop(found)) if found else ("", None)

    def has(self, *names: str) -> bool:
        """Return whether one of them is set."""
        return any(name in self._left for name in names)

    def rest(self) -> dict[str, Any]:
        """Return what nobody has taken."""
        return dict(self._left)


def convert(config: Mapping[str, Any], tool: Tool, *, file: str, method: str = "", num_gpus: int = 1) -> Imported:
    """Return the job file for a config, and what became of each of its settings.

    `method` is that of the trainer where the config does not say it; `num_gpus` how many GPUs the config was for.

    Raises:
        InvalidRequest: for a method that there is none of.
    """
    settings, imported = Settings(config, tool), Imported(tool=tool.name, file=Path(file).name)
    _name(settings, imported, file)
    read_data(settings, imported)
    chosen = _method(settings, imported, method)
    length = _length(settings, imported)
    _tokens(settings, imported, length, chosen, num_gpus)
    _duration(settings, imported)
    _rate(settings, imported)
    _adapters(settings, imported)
    _method_options(settings, imported, chosen)
    _trained_tokens(settings, imported, chosen)
    _checkpoints(settings, imported)
    _rest(settings, imported)
    return imported


def _is_unset(value: Any) -> bool:
    # Not 0: that is a choice.
    return (
        value is None
        or value is False
        or (isinstance(value, str | list | dict) and value in ("", "none", "no", [], {}))
    )


def _shown(name: str, value: Any) -> str:
    text = repr(value) if isinstance(value, list | dict) else str(value)
    return f"{name}: {text if len(text) <= 60 else text[:57] + '...'}"


def _number(value: Any) -> float | None:
    # YAML 1.1 reads 1e-5, which has no dot, as text.
    try:
        number = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _whole(value: Any) -> int | None:
    number = _number(value)
    return int(number) if number is not None and number.is_integer() else None


def _name(settings: Settings, imported: Imported, file: str) -> None:
    source, value = settings.take("run_name", "wandb_name", "output_dir")
    for other in ("run_name", "wandb_name", "output_dir"):
        settings.take(other)
    text = Path(str(value)).name if value else Path(file).stem
    name = _NAME.sub("-", text).strip("-._")[:63] or "imported"
    imported.put("name", name, _shown(source, value) if source else "the file's name")


def _method(settings: Settings, imported: Imported, asked: str) -> str:
    if asked and asked not in (*_METHODS.values(), "policy"):
        raise InvalidRequest.of(
            "method", f"method is {asked!r}; it must be one of {', '.join(_METHODS.values())}, policy"
        )
    source, value = settings.take("stage", "rl")
    loss_source, loss = settings.take("pref_loss", "loss_type")
    if isinstance(loss, list) and len(loss) == 1:
        loss = loss[0]
    of_loss = _LOSSES.get(str(loss)) if loss_source else None
    if asked:
        imported.put("method", asked, "--method")
        if source:
            imported.say(Outcome.NEEDLESS, _shown(source, value), "--method says it")
    elif source and str(value) in _METHODS:
        named = _METHODS[str(value)]
        # LLaMA-Factory's stage dpo is all methods on pairs.
        named = of_loss[0] if named == "dpo" and of_loss else named
        imported.put("method", named, ", ".join(_shown(*s) for s in ((source, value), (loss_source, loss)) if s[0]))
    elif source:
        hint = "method: policy learns from recorded samples" if str(value) in ("grpo", "ppo", "gdpo") else "none"
        imported.say(Outcome.MISSING, _shown(source, value), f"there is no such method here; the nearest: {hint}")
    elif of_loss:
        imported.put("method", of_loss[0], _shown(loss_source, loss))
    elif settings.has("desirable_weight", "undesirable_weight"):
        imported.put("method", "kto", "desirable_weight", "a config of KTO has it", Outcome.CHECK)
    elif imported.fields.get("method") is None:
        text = "the config does not name the trainer; with DPOTrainer or another one, import with --method"
        known = settings.tool.name == "axolotl"
        imported.put(
            "method",
            "sft",
            "rl is not set" if known else "no trainer",
            "" if known else text,
            Outcome.CARRIED if known else Outcome.CHECK,
        )
    if loss_source and of_loss is None:
        imported.say(Outcome.MISSING, _shown(loss_source, loss), "there is no such loss here")
    elif of_loss and of_loss[1] and imported.fields.get("method") == "dpo":
        imported.put("dpo.loss", of_loss[1], _shown(loss_source, loss))
    return str(imported.fields.get("method", "sft"))


def _length(settings: Settings, imported: Imported) -> int:
    source, value = settings.take("sequence_len", "cutoff_len", "max_length", "max_seq_length")
    length = _whole(value)
    if source and length:
        imported.put("train.sequence_length", length, _shown(source, value))
        return length
    if source:
        imported.say(Outcome.MISSING, _shown(source, value), "is not a number of tokens; set train.sequence_length")
    default = settings.tool.defaults.get("sequence_len") or settings.tool.defaults.get("cutoff_len")
    default = default or settings.tool.defaults.get("max_length")
    if default is None:
        text = "TrainingArguments say nothing of the rows' length; this is what a job file does by default"
        imported.put("train.sequence_length", 1024, "no length", text, Outcome.CHECK)
        return 1024
    imported.put("train.sequence_length", default, f"{settings.tool.name}'s default", "", Outcome.DEFAULT)
    return int(default)


def _tokens(settings: Settings, imported: Imported, length: int, method: str, num_gpus: int) -> None:
    names = ("micro_batch_size",) if settings.tool.name == "axolotl" else ("per_device_train_batch_size",)
    source, rows = settings.take(*names)
    default = settings.tool.defaults.get(names[0], 8)
    at_a_time = _whole(rows) if source else int(default)
    accumulated_source, accumulated = settings.take("gradient_accumulation_steps")
    times = _whole(accumulated) if accumulated_source else 1
    packing_source, packing = settings.take("sample_packing", "packing", "neat_packing", "packing_samples")
    if not at_a_time or not times:
        given = ", ".join(_shown(*pair) for pair in ((source, rows), (accumulated_source, accumulated)) if pair[0])
        imported.say(Outcome.MISSING, given, "are no numbers of rows; set train.tokens_per_step, in tokens")
        return
    answers = 2 if method in ("dpo", "ipo", "orpo", "simpo") else 1
    tokens = at_a_time * times * num_gpus * length * answers
    by = (
        f"{at_a_time} rows{'' if source else ' (the default)'} x {times} accumulated x {num_gpus} GPU x {length} tokens"
    )
    by += " x 2 answers" if answers == 2 else ""
    named = ", ".join(name for name in (source, accumulated_source) if name) or names[0]
    if packing_source:
        imported.put("train.tokens_per_step", tokens, named, f"{by}, in packed rows, = {tokens:,}", Outcome.CHANGED)
        imported.say(Outcome.NEEDLESS, _shown(packing_source, packing), "rows are packed by default (train.packing)")
        return
    text = (
        f"{by} = {tokens:,} at most: its rows are not packed, so a step had fewer real tokens. Set it to "
        f"{at_a_time * times * num_gpus * answers} x the tokens of your average row (horizon job plan counts them)"
    )
    imported.put("train.tokens_per_step", tokens, named, text, Outcome.CHECK)


def _duration(settings: Settings, imported: Imported) -> None:
    source, value = settings.take("max_steps")
    steps = _whole(value)
    epochs_source, epochs = settings.take("num_epochs", "num_train_epochs")
    if source and steps and steps > 0:
        imported.put("train.max_steps", steps, _shown(source, value))
        if epochs_source:
            imported.say(Outcome.NEEDLESS, _shown(epochs_source, epochs), f"{source} comes first, there as here")
        return
    number = _number(epochs) if epochs_source else None
    if number:
        imported.put("train.epochs", number, _shown(epochs_source, epochs))
    elif epochs_source:
        imported.say(Outcome.MISSING, _shown(epochs_source, epochs), "is not a number; set train.epochs")
    else:
        default = settings.tool.defaults.get("num_epochs") or settings.tool.defaults["num_train_epochs"]
        imported.put("train.epochs", default, f"{settings.tool.name}'s default", "", Outcome.DEFAULT)


def _rate(settings: Settings, imported: Imported) -> None:
    source, value = settings.take("learning_rate")
    if (rate := _number(value)) is not None:
        imported.put("train.learning_rate", rate, _shown(source, value))
    elif source:
        imported.say(Outcome.MISSING, _shown(source, value), "is not a number; set train.learning_rate")
    elif "learning_rate" in settings.tool.defaults:
        default = settings.tool.defaults["learning_rate"]
        if settings.tool.name == "trl" and imported.fields.get("method") not in ("sft", "pretrain"):
            default = 1e-6
        imported.put("train.learning_rate", default, f"{settings.tool.name}'s default", "", Outcome.DEFAULT)
    _schedule(settings, imported)
    _warmup(settings, imported)
    _optimizer(settings, imported)
    source, value = settings.take("max_grad_norm", "gradient_clipping")
    if (norm := _number(value)) is not None:
        # 0 turns clipping off there.
        imported.put("train.max_grad_norm", norm or None, _shown(source, value))
    beta1, beta2 = settings.take("adam_beta1"), settings.take("adam_beta2")
    if beta1[0] or beta2[0]:
        betas = [_number(beta1[1]) or 0.9, _number(beta2[1]) or 0.999]
        imported.put("train.betas", betas, ", ".join(_shown(*pair) for pair in (beta1, beta2) if pair[0]))


def _optimizer(settings: Settings, imported: Imported) -> None:
    source, value = settings.take("optim", "optimizer")
    name = str(value)
    if not source:
        return
    shown = _shown(source, value)
    if "adamw" not in name:
        imported.say(Outcome.MISSING, shown, "the optimizer here is AdamW")
    elif "8bit" in name:
        text = "moments in 8 bits in host memory, in a form of their own that is not that of bitsandbytes or torchao"
        imported.put("train.optimizer_states", "compressed", shown, text, Outcome.CHANGED)
    elif "4bit" in name:
        text = "AdamW, with exact moments; train.optimizer_states: compressed keeps 8 bits of each, none has 4"
        imported.say(Outcome.CHANGED, shown, text)
    elif "paged" in name:
        imported.say(Outcome.CHANGED, shown, "AdamW, with its moments in fp32 in host memory")
    else:
        imported.say(Outcome.NEEDLESS, shown, "AdamW")


def _schedule(settings: Settings, imported: Imported) -> None:
    source, value = settings.take("lr_scheduler_type", "lr_scheduler")
    ratio_source, ratio = settings.take("cosine_min_lr_ratio")
    kwargs_source, kwargs = settings.take("lr_scheduler_kwargs")
    if isinstance(kwargs, Mapping) and set(kwargs) == {"min_lr_rate"}:
        ratio_source, ratio = f"{kwargs_source}.min_lr_rate", kwargs["min_lr_rate"]
    elif kwargs_source:
        imported.say(Outcome.MISSING, _shown(kwargs_source, kwargs), "see train.min_lr_ratio and train.lr_decay_ratio")
    schedule = _SCHEDULES.get(str(value)) if source else None
    if source and schedule is None:
        imported.say(
            Outcome.MISSING,
            _shown(source, value),
            f"train.lr_schedule is one of {', '.join(sorted(set(_SCHEDULES.values())))}",
        )
    if not source:
        default = settings.tool.defaults.get("lr_scheduler") or settings.tool.defaults["lr_scheduler_type"]
        source, value, schedule = "", default, str(default)
    if schedule == "cosine" and ratio_source:
        schedule = "cosine_with_min_lr"
    if schedule is not None:
        outcome = Outcome.CARRIED if source else Outcome.DEFAULT
        imported.put(
            "train.lr_schedule",
            schedule,
            _shown(source, value) if source else f"{settings.tool.name}'s default",
            "",
            outcome,
        )
    if ratio_source and schedule in ("cosine_with_min_lr", "wsd"):
        imported.put("train.min_lr_ratio", _number(ratio), _shown(ratio_source, ratio))


def _warmup(settings: Settings, imported: Imported) -> None:
    source, value = settings.take("warmup_steps")
    number = _number(value)
    ratio_source, ratio = settings.take("warmup_ratio")
    # transformers 5 takes a share of all steps as warmup_steps too.
    if source and number is not None and 0 < number < 1:
        ratio_source, ratio, source = source, value, ""
    if source and number is not None:
        imported.put("train.warmup_steps", int(number), _shown(source, value))
        return
    share, steps = _number(ratio), imported.fields.get("train.max_steps")
    if ratio_source and share is not None and steps:
        warmup = math.ceil(share * steps)
        imported.put(
            "train.warmup_steps", warmup, _shown(ratio_source, ratio), f"x {steps} steps = {warmup}", Outcome.CHANGED
        )
    elif ratio_source:
        text = (
            "is a share of all steps, whose number depends on the data: horizon job plan shows the steps; set "
            "train.warmup_steps to that share of them (10 where it is left out)"
        )
        imported.say(Outcome.MISSING, _shown(ratio_source, ratio), text)
    elif "warmup_steps" in settings.tool.defaults:
        imported.put("train.warmup_steps", 0, f"{settings.tool.name}'s default", "", Outcome.DEFAULT)
    else:
        text = "Axolotl then warms up for 3 % of all steps, at most 100; a job file for 10 steps"
        imported.say(Outcome.CHECK, "no warmup_steps", text)


def _adapters(settings: Settings, imported: Imported) -> None:
    source, value = settings.take("adapter", "finetuning_type", "use_peft")
    is_default = not source and settings.tool.defaults.get("finetuning_type") == "lora"
    wants = is_default or str(value) in ("lora", "qlora", "True", "dora")
    bits_source, bits = settings.take("quantization_bit")
    four, eight = settings.take("load_in_4bit"), settings.take("load_in_8bit")
    base = "nf4" if bits in (4, "4") or four[0] or value == "qlora" else "int8" if bits in (8, "8") or eight[0] else ""
    if value == "freeze":
        imported.say(Outcome.MISSING, _shown(source, value), "name the trained tensors in train.trainable")
    if not wants:
        if base:
            given = ", ".join(_shown(*pair) for pair in ((bits_source, bits), four, eight) if pair[0])
            imported.say(Outcome.MISSING, given, "only the frozen base of adapters is rounded: train.trainable: lora")
        if source and str(value) == "full":
            imported.put("train.trainable", "all", _shown(source, value))
        return
    imported.put(
        "train.trainable",
        "lora",
        _shown(source, value) if source else f"{settings.tool.name}'s default",
        "",
        Outcome.CARRIED if source else Outcome.DEFAULT,
    )
    if base:
        given = next(_shown(*pair) for pair in (four, eight, (bits_source, bits), (source, value)) if pair[0])
        imported.put("train.lora.base", base, given)
    _ranks(settings, imported)
    _targets(settings, imported)
    for name, field in (
        ("peft_use_dora", "dora"),
        ("use_dora", "dora"),
        ("use_rslora", "rslora"),
        ("peft_use_rslora", "rslora"),
    ):
        found, switch = settings.take(name)
        if found:
            imported.put(f"train.lora.{field}", bool(switch), _shown(found, switch))


def _ranks(settings: Settings, imported: Imported) -> None:
    is_factory = settings.tool.name == "llama-factory"
    source, value = settings.take("lora_r", "lora_rank")
    rank = _whole(value) or (8 if is_factory else 16 if settings.tool.name == "trl" else None)
    if rank is None:
        imported.say(Outcome.MISSING, _shown(source, value) if source else "no lora_r", "set train.lora.rank")
    else:
        imported.put(
            "train.lora.rank",
            rank,
            _shown(source, value) if source else f"{settings.tool.name}'s default",
            "",
            Outcome.CARRIED if source else Outcome.DEFAULT,
        )
    source, value = settings.take("lora_alpha")
    if (alpha := _number(value)) is not None:
        imported.put("train.lora.alpha", alpha, _shown(source, value))
    elif is_factory and rank:
        imported.put("train.lora.alpha", 2.0 * rank, "llama-factory's default", "twice the rank", Outcome.DEFAULT)
    source, value = settings.take("lora_dropout")
    if (dropout := _number(value)) is not None:
        imported.put("train.lora.dropout", dropout, _shown(source, value))
    elif settings.tool.name == "trl":
        imported.put("train.lora.dropout", 0.05, "trl's default", "", Outcome.DEFAULT)


def _targets(settings: Settings, imported: Imported) -> None:
    linear = settings.take("lora_target_linear")
    source, value = settings.take("lora_target_modules", "lora_target", "target_modules")
    if linear[0] and not source:
        imported.put("train.lora.targets", "all-linear", _shown(*linear))
        return
    if linear[0]:
        imported.put("train.lora.targets", "all-linear", _shown(*linear), f"and so all of {source} too")
        return
    names = value.split(",") if isinstance(value, str) else list(value or [])
    names = [str(name).strip() for name in names]
    if names in (["all"], ["all-linear"]) or (not names and settings.tool.name == "llama-factory"):
        imported.put(
            "train.lora.targets",
            "all-linear",
            _shown(source, value) if source else "llama-factory's default",
            "",
            Outcome.CARRIED if source else Outcome.DEFAULT,
        )
    elif names:
        imported.put("train.lora.targets", names, _shown(source, value))
    else:
        text = "PEFT then adapts some matrices by the model's type, often q_proj and v_proj; here it is all-linear"
        imported.say(Outcome.CHECK, "no lora_target_modules", text)


def _method_options(settings: Settings, imported: Imported, method: str) -> None:
    source, value = settings.take("pref_beta", "beta", "rl_beta", "dpo_beta", "kto_beta", "orpo_alpha")
    field = {"orpo": "orpo.penalty", "policy": "policy.kl_coefficient"}.get(method, f"{method}.beta")
    if source and method not in ("sft", "pretrain"):
        imported.put(field, _number(value), _shown(source, value))
    elif source:
        imported.say(
            Outcome.MISSING, _shown(source, value), f"method {method} has no such option; is it another method?"
        )
    source, value = settings.take("simpo_gamma", "rl_gamma")
    if source and method == "simpo":
        imported.put("simpo.gamma", _number(value), _shown(source, value))
    elif source:
        imported.say(Outcome.NEEDLESS, _shown(source, value), "is for method simpo")
    source, value = settings.take("label_smoothing", "dpo_label_smoothing")
    if source and method in ("dpo", "simpo"):
        imported.put(f"{method}.label_smoothing", _number(value), _shown(source, value))
    elif source:
        imported.say(Outcome.MISSING, _shown(source, value), f"method {method} has no such option")


def _trained_tokens(settings: Settings, imported: Imported, method: str) -> None:
    source, value = settings.take("train_on_inputs", "train_on_prompt")
    history = settings.take("mask_history")
    assistant, completion = settings.take("assistant_only_loss"), settings.take("completion_only_loss")
    if method != "sft":
        for name, given in ((source, value), history, assistant, completion):
            if name:
                imported.say(Outcome.NEEDLESS, _shown(name, given), f"method {method} decides which tokens are trained")
        return
    if source:
        imported.put("train.train_on", "all", _shown(source, value))
    elif history[0]:
        imported.put("train.train_on", "last-assistant", _shown(*history))
    elif assistant[0] or completion[0]:
        imported.put("train.train_on", "assistant", _shown(*(assistant if assistant[0] else completion)))
    elif settings.tool.name in ("trl", "transformers"):
        text = (
            "without assistant_only_loss the SFTTrainer trains every token of a chat, and of a prompt with a "
            "completion only the latter; a job trains answers only: set train.train_on: all to train prompts too"
        )
        imported.say(Outcome.CHECK, "no assistant_only_loss", text)


def _checkpoints(settings: Settings, imported: Imported) -> None:
    source, value = settings.take("eval_strategy", "evaluation_strategy")
    steps = settings.take("eval_steps")
    if steps[0] and str(value) != "epoch" and (number := _whole(steps[1])):
        imported.put("eval_every_steps", number, _shown(*steps))
    elif steps[0] or str(value) == "epoch" or settings.has("evals_per_epoch"):
        taken = [pair for pair in ((source, value), steps, settings.take("evals_per_epoch")) if pair[0]]
        text = (
            "depends on the number of steps, which the data decides: set eval_every_steps (horizon job plan shows them)"
        )
        imported.say(Outcome.MISSING, ", ".join(_shown(*pair) for pair in taken), text)
    source, value = settings.take("val_set_size", "val_size")
    share = _number(value)
    if source and share is not None and share < 1:
        imported.put("eval_fraction", share, _shown(source, value))
    elif source:
        imported.say(Outcome.MISSING, _shown(source, value), "is a number of rows; eval_fraction is a share of them")
    source, value = settings.take("save_strategy")
    steps = settings.take("save_steps")
    if steps[0] and str(value) not in ("epoch", "no") and (number := _whole(steps[1])):
        imported.put("checkpoint.every_steps", number, _shown(*steps))
    elif steps[0] or str(value) == "epoch" or settings.has("saves_per_epoch"):
        taken = [pair for pair in ((source, value), steps, settings.take("saves_per_epoch")) if pair[0]]
        text = "depends on the number of steps; a job writes one every hour and at its end (checkpoint.every_steps)"
        imported.say(Outcome.CHECK, ", ".join(_shown(*pair) for pair in taken), text)
    source, value = settings.take("save_total_limit")
    if (limit := _whole(value)) is not None:
        imported.put("checkpoint.keep_last", max(1, limit), _shown(source, value))
    source, value = settings.take("load_best_model_at_end")
    if source:
        imported.say(Outcome.NEEDLESS, _shown(source, value), "the best checkpoint is kept anyway: JOB@best")
    source, value = settings.take("metric_for_best_model")
    if source and str(value) in ("loss", "eval_loss"):
        imported.put("eval.best_by", "loss", _shown(source, value))
    elif source:
        text = "eval.best_by takes loss, SET.loss, SET.accuracy or SET.exact_match"
        imported.say(Outcome.MISSING, _shown(source, value), text)
    source, value = settings.take("report_to")
    if source:
        names = [str(name) for name in (value if isinstance(value, list) else [value])]
        text = f"horizon job watch JOB --to {' --to '.join(names)}; or report_to here, where an admin allows it"
        imported.say(Outcome.CHANGED, _shown(source, value), text)


def _rest(settings: Settings, imported: Imported) -> None:
    """Carry over what only has another name, and say of everything else what the table says."""
    for name, value in settings.rest().items():
        known, shown = known_name(name), _shown(name, value)
        own = name if name in ("weight_decay", "seed", "neftune_noise_alpha") else ""
        field = f"train.{own}" if own else known.field if known else ""
        if field and field in imported.fields:
            imported.say(Outcome.NEEDLESS, shown, f"{field} is set already")
        elif field and isinstance(value, int | float | str) and not isinstance(value, bool):
            number = _whole(value)
            plain = number if number is not None else _number(value)
            imported.put(field, value if plain is None else plain, shown)
        elif known is None:
            imported.say(Outcome.MISSING, shown, "this version does not know the setting")
        elif known.is_needless and known.name not in _MATTER:
            imported.say(Outcome.NEEDLESS, shown, known.here.partition(": ")[2])
        elif known.here.startswith("train.compute_dtype"):
            imported.say(
                Outcome.NEEDLESS, shown, "a GPU computes in bfloat16, the host in float32 (train.compute_dtype)"
            )
        else:
            imported.say(Outcome.MISSING, shown, known.here.removeprefix("leave it out: "))
    if settings.unset:
        imported.say(Outcome.NEEDLESS, ", ".join(settings.unset), "not set or off there")
    said = " ".join(line.source for line in imported.lines)
    for name, value in settings.given.items():
        if name not in said:
            imported.say(Outcome.NEEDLESS, _shown(name, value), "says nothing besides the settings above")
