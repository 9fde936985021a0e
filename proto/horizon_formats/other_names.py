"""What other tools call the fields of a job, and values that mean something else here: hints for messages. Standard
library only.

The names are those of Hugging Face's TrainingArguments and TRL, of PEFT and bitsandbytes, of Axolotl and of
LLaMA-Factory.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_HF, _PEFT, _AXOLOTL, _FACTORY = "Hugging Face's", "PEFT's", "Axolotl's", "LLaMA-Factory's"

_TOKENS = "train.tokens_per_step, in tokens"
_WHOLE_STEP = "train.tokens_per_step, the tokens of a whole step; how a step is divided follows from the memory"
_LENGTH = "train.sequence_length"
_LORA = "train.trainable: lora, with its options in train.lora"
_ADAMW = (
    "leave it out: the optimizer is AdamW (train.betas, train.eps, train.weight_decay); for 8 bits, "
    "train.optimizer_states: compressed"
)
_RECOMPUTED = "leave it out: activations are always recomputed"
_REPORTED = "leave it out: every step is reported (horizon job watch, /metrics)"
_STREAMED = "leave it out: the model is in host memory and its layers visit the GPU one at a time"
_TEMPLATE = "leave it out: the chat template in the model folder is used (horizon dataset preview)"
_PULLED = "leave it out: get the result with horizon checkpoint pull JOB --to FOLDER"
_ATTENTION = "leave it out: attention is fused where it can be"
_BY_STEPS = "eval_every_steps, 0 for the start and the end only"
_NEEDLESS = "leave it out: nothing here needs it"
_PREPARED = "leave it out: data is prepared once, on all processors, and kept"
_SAMPLES = "leave it out: method: policy learns from recorded samples"
_COLUMNS = "horizon dataset push FILE --map FIELD=COLUMN"

# By name: whose it is and what to write here. Where that is a field alone, it has the same meaning and unit.
_NAMES: Mapping[str, tuple[str, str]] = {
    # How long, how much at a time
    **dict.fromkeys(("num_train_epochs", "train_epochs"), (_HF, "train.epochs")),
    **dict.fromkeys(("num_epochs", "n_epochs"), (_AXOLOTL, "train.epochs")),
    **dict.fromkeys(
        ("per_device_train_batch_size", "train_batch_size", "batch_size", "global_batch_size"), (_HF, _TOKENS)
    ),
    **dict.fromkeys(("micro_batch_size", "eval_batch_size"), (_AXOLOTL, _TOKENS)),
    "per_device_eval_batch_size": (_HF, "leave it out: evaluations take as much at a time as steps"),
    "gradient_accumulation_steps": (_HF, _WHOLE_STEP),
    "auto_find_batch_size": (_HF, _WHOLE_STEP),
    **dict.fromkeys(
        ("max_seq_length", "max_length", "model_max_length", "block_size", "max_prompt_length"), (_HF, _LENGTH)
    ),
    "max_completion_length": (_HF, _LENGTH),
    "sequence_len": (_AXOLOTL, _LENGTH),
    "cutoff_len": (_FACTORY, _LENGTH),
    "packing_strategy": (_HF, "leave it out: rows are filled as well as they can be (train.packing)"),
    "padding_free": (_HF, "leave it out: no row is padded to the length of another"),
    "pad_to_multiple_of": (_HF, "leave it out: no row is padded to the length of another"),
    **dict.fromkeys(("neat_packing", "packing_samples"), (_FACTORY, "train.packing")),
    "sample_packing": (_AXOLOTL, "train.packing"),
    "pad_to_sequence_len": (_AXOLOTL, "leave it out: no row is padded to the length of another"),
    "special_tokens": (_AXOLOTL, "leave it out: the tokenizer in the model folder is used as it is"),
    # The rate and the optimizer
    **dict.fromkeys(("lr", "peak_lr"), (_HF, "train.learning_rate")),
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler"), (_HF, "train.lr_schedule")),
    "cosine_min_lr_ratio": (_AXOLOTL, "train.min_lr_ratio"),
    "lr_scheduler_kwargs": (_HF, "train.min_lr_ratio and train.lr_decay_ratio"),
    "warmup_ratio": (_HF, "train.warmup_steps, in steps"),
    **dict.fromkeys(("adam_beta1", "adam_beta2"), (_HF, "train.betas: [0.9, 0.999]")),
    "adam_epsilon": (_HF, "train.eps"),
    **dict.fromkeys(("optim", "optimizer", "optim_args", "optimizer_type"), (_HF, _ADAMW)),
    **dict.fromkeys(("gradient_clipping", "grad_clip", "clip_grad_norm"), (_HF, "train.max_grad_norm")),
    "label_smoothing_factor": (_HF, "train.label_smoothing"),
    **dict.fromkeys(("embedding_lr", "embedding_lr_scale"), (_AXOLOTL, "train.lr_groups")),
    **dict.fromkeys(
        ("loraplus_lr_ratio", "loraplus_lr_embedding"), (_PEFT, "leave it out: both halves of an adapter have one rate")
    ),
    "noisy_embedding_alpha": (_AXOLOTL, "train.neftune_noise_alpha"),
    "data_seed": (_HF, "train.seed"),
    # Numbers and kernels
    **dict.fromkeys(
        (
            "bf16",
            "fp16",
            "tf32",
            "dtype",
            "torch_dtype",
            "bf16_full_eval",
            "fp16_full_eval",
            "float16",
            "bfloat16",
            "precision",
        ),
        (_HF, "train.compute_dtype: auto, bfloat16 or float32"),
    ),
    **dict.fromkeys(
        ("gradient_checkpointing", "gradient_checkpointing_kwargs", "activation_checkpointing"), (_HF, _RECOMPUTED)
    ),
    **dict.fromkeys(
        ("torch_compile", "torch_compile_backend", "torch_compile_mode"), (_HF, "train.compile: auto, on or off")
    ),
    **dict.fromkeys(("attn_implementation", "use_flash_attention_2", "use_liger_kernel"), (_HF, _ATTENTION)),
    **dict.fromkeys(("flash_attention", "flash_attn", "xformers_attention", "sdp_attention"), (_AXOLOTL, _ATTENTION)),
    **dict.fromkeys(("deepspeed", "fsdp", "fsdp_config", "accelerator_config", "device_map"), (_HF, _STREAMED)),
    **dict.fromkeys(("use_cpu", "no_cuda"), (_HF, "device: host")),
    **dict.fromkeys(
        ("activation_offloading", "layer_offloading", "offload_params", "low_cpu_mem_usage"), (_HF, _STREAMED)
    ),
    **dict.fromkeys(("enable_liger_kernel", "flash_attn_type", "unsloth", "use_unsloth"), (_FACTORY, _ATTENTION)),
    **dict.fromkeys(("use_cache", "disable_dropout"), (_HF, "leave it out: it is so here anyway")),
    "full_determinism": (_HF, "use train.deterministic: true, on a GPU; on the host it is so anyway"),
    "ddp_timeout": (_HF, _STREAMED),
    # Checkpoints and reports
    "save_steps": (_HF, "checkpoint.every_steps"),
    "save_strategy": (_HF, "checkpoint.every_steps, or checkpoint.every_minutes"),
    "saves_per_epoch": (_AXOLOTL, "checkpoint.every_steps"),
    "save_total_limit": (_HF, "checkpoint.keep_last"),
    "load_best_model_at_end": (_HF, "checkpoint.keep_best, and JOB@best where you pull"),
    **dict.fromkeys(
        ("save_safetensors", "save_only_model"),
        (_HF, "leave it out: checkpoints are safetensors; see checkpoint.keep_optimizer"),
    ),
    **dict.fromkeys(("output_dir", "overwrite_output_dir", "push_to_hub"), (_HF, _PULLED)),
    **dict.fromkeys(("do_train", "strict", "is_llama_derived_model", "model_type", "plot_loss"), (_AXOLOTL, _NEEDLESS)),
    **dict.fromkeys(("dataset_prepared_path", "overwrite_cache", "preprocessing_num_workers"), (_AXOLOTL, _PREPARED)),
    **dict.fromkeys(("dataset_num_proc", "dataset_processes", "max_concurrent_workers"), (_HF, _PREPARED)),
    "resume_from_checkpoint": (_HF, "init_from: JOB@last; an interrupted job continues by itself"),
    "run_name": (_HF, "name"),
    **dict.fromkeys(("disable_tqdm", "log_level"), (_HF, _REPORTED)),
    # Evaluations
    **dict.fromkeys(("eval_steps", "eval_strategy", "evaluation_strategy", "do_eval"), (_HF, _BY_STEPS)),
    "evals_per_epoch": (_AXOLOTL, _BY_STEPS),
    "metric_for_best_model": (_HF, "eval.best_by"),
    "greater_is_better": (_HF, "leave it out: it follows from eval.best_by"),
    "early_stopping_patience": (_HF, "eval.patience"),
    "early_stopping_threshold": (_HF, "eval.min_delta"),
    **dict.fromkeys(("val_set_size", "validation_split", "test_size"), (_AXOLOTL, "eval_fraction")),
    "val_size": (_FACTORY, "eval_fraction"),
    **dict.fromkeys(
        ("eval_dataset_name", "validation_file", "test_datasets", "eval_datasets"), (_HF, "eval_dataset, or eval.sets")
    ),
    # Model and data
    **dict.fromkeys(
        ("model_name_or_path", "pretrained_model_name_or_path", "model_name", "model_id", "model_path"), (_HF, "model")
    ),
    **dict.fromkeys(("base_model", "base_model_config"), (_AXOLOTL, "model")),
    **dict.fromkeys(("dataset_name", "train_file", "train_dataset", "data_files", "data_path"), (_HF, "dataset")),
    "datasets": (_AXOLOTL, "dataset, one of them; join the files of several in one push"),
    "dataset_dir": (_FACTORY, "dataset"),
    "max_samples": (_FACTORY, "dataset, a file with that many rows; or train.max_steps"),
    "dataset_config": (_HF, "dataset"),
    "mask_history": (_FACTORY, "train.train_on: last-assistant"),
    **dict.fromkeys(
        ("dataset_text_field", "prompt_column", "text_column", "field_instruction", "field_output"), (_HF, _COLUMNS)
    ),
    **dict.fromkeys(
        ("chat_template", "chat_template_path", "tokenizer_name", "tokenizer_type", "trust_remote_code"),
        (_HF, _TEMPLATE),
    ),
    "template": (_FACTORY, _TEMPLATE),
    **dict.fromkeys(
        ("completion_only_loss", "assistant_only_loss", "train_on_responses_only"),
        (_HF, "train.train_on: assistant, last-assistant or all"),
    ),
    **dict.fromkeys(
        ("train_on_inputs", "train_on_prompt", "roles_to_train"),
        (_AXOLOTL, "train.train_on: assistant, last-assistant or all"),
    ),
    "group_by_length": (_HF, "leave it out: rows are packed (train.packing)"),
    # Adapters
    **dict.fromkeys(("lora_r", "lora_rank", "r"), (_PEFT, "train.lora.rank")),
    "lora_alpha": (_PEFT, "train.lora.alpha"),
    "lora_dropout": (_PEFT, "train.lora.dropout"),
    **dict.fromkeys(
        (
            "target_modules",
            "lora_target_modules",
            "lora_target_linear",
            "lora_target",
        ),
        (_PEFT, "train.lora.targets"),
    ),
    **dict.fromkeys(
        ("layers_to_transform", "layers_pattern", "exclude_modules"),
        (_PEFT, "train.lora.targets, with regular expressions of tensors' names"),
    ),
    **dict.fromkeys(("use_dora", "peft_use_dora"), (_PEFT, "train.lora.dora")),
    "use_rslora": (_PEFT, "train.lora.rslora"),
    **dict.fromkeys(("peft_config", "use_peft", "lora_config", "peft_type", "use_lora"), (_PEFT, _LORA)),
    "adapter": (_AXOLOTL, _LORA),
    "lora_model_dir": (_AXOLOTL, "init_from: the name of a pushed adapter"),
    "finetuning_type": (_FACTORY, "train.trainable: all or lora"),
    **dict.fromkeys(
        (
            "modules_to_save",
            "lora_modules_to_save",
            "additional_target",
            "bias",
            "init_lora_weights",
            "task_type",
            "lora_bias",
        ),
        (_PEFT, "leave it out: adapters of train.lora are trained and nothing else"),
    ),
    **dict.fromkeys(
        (
            "load_in_4bit",
            "quantization_config",
            "bnb_4bit_quant_type",
            "bnb_4bit_compute_dtype",
            "bnb_4bit_use_double_quant",
        ),
        (_HF, "train.trainable: lora and train.lora.base: nf4"),
    ),
    "load_in_8bit": (_HF, "train.trainable: lora and train.lora.base: int8"),
    "quantization_bit": (_FACTORY, "train.trainable: lora and train.lora.base: nf4 or int8"),
    **dict.fromkeys(
        ("unfrozen_parameters", "freeze_layers"), (_AXOLOTL, "train.trainable, a list of regular expressions")
    ),
    # Methods
    "rl": (_AXOLOTL, "method"),
    "pref_loss": (_FACTORY, "method (dpo, ipo, orpo, simpo), and dpo.loss"),
    **dict.fromkeys(
        ("pref_beta", "dpo_beta", "rl_beta", "kto_beta", "orpo_alpha"),
        (_FACTORY, "beta in the section of the method: dpo.beta, ipo.beta, kto.beta, simpo.beta, orpo.penalty"),
    ),
    **dict.fromkeys(("kto_desirable_weight", "kto_chosen_weight"), (_AXOLOTL, "kto.desirable_weight")),
    **dict.fromkeys(("kto_undesirable_weight", "kto_rejected_weight"), (_AXOLOTL, "kto.undesirable_weight")),
    "desirable_weight": (_HF, "kto.desirable_weight"),
    "undesirable_weight": (_HF, "kto.undesirable_weight"),
    "stage": (_FACTORY, "method"),
    "loss_type": (_HF, "method (dpo, ipo, orpo, simpo, kto), and dpo.loss"),
    **dict.fromkeys(
        ("ref_model", "reference_free", "precompute_ref_log_probs", "model_init_kwargs", "ref_model_mixup_alpha"),
        (_HF, "leave it out: the starting weights are the reference, and no second model is kept"),
    ),
    **dict.fromkeys(("num_generations", "reward_funcs", "use_vllm", "vllm_mode"), (_HF, _SAMPLES)),
    "epsilon_high": (_HF, "policy.clip_high"),
    "epsilon": (_HF, "policy.clip_low"),
    "simpo_gamma": (_HF, "simpo.gamma"),
}
# By the beginning of a name.
_BEGINNINGS: Mapping[str, tuple[str, str]] = {
    "dataloader_": (_HF, "leave it out: data is prepared once, before the job starts"),
    "logging_": (_HF, _REPORTED),
    "hub_": (_HF, _PULLED),
    "wandb_": (_AXOLOTL, _REPORTED),
    "fsdp_": (_HF, _STREAMED),
    "ddp_": (_HF, _STREAMED),
    "bnb_": (_HF, "train.trainable: lora and train.lora.base: nf4"),
    "gptq": (_AXOLOTL, "train.trainable: lora and train.lora.base: nf4"),
}

# No tensor has such a name; adapter is a part of some.
_LORA_WORDS = ("lora", "qlora", "dora", "peft")
_METHODS: Mapping[str, str] = {
    **dict.fromkeys(
        ("lora", "peft", "adapter", "adapters"), "LoRA is train.trainable: lora, with method sft, dpo or any other"
    ),
    "dora": "DoRA is train.trainable: lora and train.lora.dora: true, with method sft, dpo or any other",
    "qlora": "QLoRA is train.trainable: lora and train.lora.base: nf4, with method sft, dpo or any other",
    **dict.fromkeys(
        ("grpo", "ppo", "rloo", "reinforce", "rlhf", "rl", "dapo", "gspo"),
        "here: method: policy, on recorded samples with advantages",
    ),
    **dict.fromkeys(
        ("full", "finetune", "fine-tune", "fine-tuning", "supervised", "instruct", "chat"), "did you mean sft?"
    ),
    **dict.fromkeys(
        ("pt", "cpt", "clm", "pre-train", "pretraining", "continued-pretraining"), "did you mean pretrain?"
    ),
    "cpo": "here: method: simpo or orpo, on pairs",
    "rm": "reward models are not trained here; methods on pairs: dpo, ipo, orpo, simpo",
}
_LEAVE = "leave it out"
_FIELD = re.compile(r"[a-z_]+(\.[a-z_]+)*")


@dataclass(frozen=True)
class OtherName:
    """A name that another tool has. `whose` is that tool's, as "Axolotl's"; `here` says what to write instead."""

    name: str
    whose: str
    here: str

    @property
    def is_needless(self) -> bool:
        """Whether nothing needs to be written here."""
        return self.here.startswith(_LEAVE)

    @property
    def field(self) -> str:
        """The field with the same meaning and unit; empty where it is not as simple as that."""
        return self.here if _FIELD.fullmatch(self.here) else ""

    @property
    def text(self) -> str:
        """What to write, as the end of a message."""
        return self.here if self.is_needless else f"here: {self.here}"


def known_names() -> list[OtherName]:
    """Return the whole table, those that only a beginning is known of as `fsdp_*`."""
    beginnings = {f"{start}*": pair for start, pair in _BEGINNINGS.items()}
    return [OtherName(name, *pair) for name, pair in {**_NAMES, **beginnings}.items()]


def known_name(key: str) -> OtherName | None:
    """Return what is known of a name of another tool."""
    lower = key.lower().replace("-", "_")
    found = _NAMES.get(lower) or next((pair for start, pair in _BEGINNINGS.items() if lower.startswith(start)), None)
    return None if found is None else OtherName(lower, *found)


def other_name(key: str) -> str:
    """Return what to write for a field that another tool has; empty where none is known."""
    found = known_name(key)
    return "" if found is None else f"that is {found.whose} name; {found.text}"


def other_value(path: str, value: object) -> str:
    """Return what to write for a value that means something in other tools; empty where none is known. `path` is the
    field's."""
    if path == "train.lora" and isinstance(value, bool):
        return "write train.trainable: lora, and the options below train.lora" if value else "leave it out"
    if path == "train.lora" and isinstance(value, str | int):
        return "write train.trainable: lora, and below train.lora for example rank: 16"
    if not isinstance(value, str):
        return ""
    if path == "method":
        return _METHODS.get(value.lower(), "")
    return ""


def meant_trainable(expression: str) -> str:
    """Return the word that an expression of `train.trainable` most likely means, lora or all; empty for any other
    expression."""
    if expression in ("lora", "all"):
        return ""
    lower = expression.lower()
    return "lora" if lower in _LORA_WORDS else "all" if lower in ("all", "full", "everything", "*") else ""
