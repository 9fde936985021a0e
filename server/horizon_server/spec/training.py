"""The section `train`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from horizon_formats.other_names import meant_trainable
from horizon_server.expressions import NOT, problem_of
from horizon_server.recipe import LrSchedule, Matmul, Recipe
from horizon_server.spec.fields import (
    MAX_EXPRESSION_CHARS,
    MAX_EXPRESSIONS,
    MAX_LANES,
    MAX_LR_SCALE,
    MAX_ROW_TOKENS,
    MAX_STEPS,
    Section,
    WrongField,
    absent_as_empty,
    boolean_as_text,
    list_as_tuple,
    switch_as_text,
    text_as_list,
)
from horizon_server.spec.lora import LoraSpec
from horizon_server.spec.words import RULE

Beta = Annotated[float, Field(ge=0, lt=1)]
_LANES_RULE = f"a power of two from 1 to {MAX_LANES}"
Lanes = Annotated[int, Field(ge=1, le=MAX_LANES, json_schema_extra={RULE: _LANES_RULE})]
EVERYTHING = ("all",)
"""`train.trainable` of a job that trains every parameter."""
LORA = ("lora",)
"""`train.trainable` of a job that trains adapters next to the frozen model."""
# Named, because a preview takes the same choice without being a job.
TrainOn = Literal["assistant", "last-assistant", "all"]
ComputeDtypeChoice = Literal["auto", "float32", "bfloat16"]
CompileChoice = Literal["auto", "on", "off"]
OptimizerStates = Literal["exact", "compressed"]


class LrGroup(Section):
    """Tensors whose learning rate is the schedule's times `scale`: those whose name the regular expression `match` is
    found in."""

    match: str = Field(min_length=1, max_length=MAX_EXPRESSION_CHARS)
    scale: float = Field(gt=0, le=MAX_LR_SCALE)


class TrainSpec(Section):
    """How the model is trained. Set `epochs` or `max_steps`, not both."""

    epochs: float | None = Field(
        default=None, gt=0, le=10_000, description="Passes over the dataset. Default 1 unless max_steps is set."
    )
    max_steps: int | None = Field(
        default=None, ge=1, le=MAX_STEPS, description="Number of optimizer steps, instead of epochs."
    )
    sequence_length: int = Field(
        default=1024,
        ge=8,
        le=MAX_ROW_TOKENS,
        description="Longest row in tokens. Longer chats are truncated, longer texts are split.",
    )
    tokens_per_step: int = Field(
        default=16384, ge=8, le=67_108_864, description="Real tokens (no padding) per optimizer step."
    )
    packing: Annotated[Literal["auto", "true", "false"], boolean_as_text] = Field(
        default="auto",
        description="Put several documents in one row. auto: where a trial shows that the model keeps them apart; "
        "true: refuse the job otherwise; false: one document per row.",
        json_schema_extra={"enum": ["auto", True, False, "true", "false"]},  # YAML's booleans are accepted as well
    )
    learning_rate: float = Field(default=1e-5, ge=0, le=10, description="Peak learning rate.")
    lr_schedule: LrSchedule = Field(
        default="cosine",
        description="Shape of the learning rate after the warmup. constant: stays; linear, cosine: falls to 0; "
        "cosine_with_min_lr: falls to min_lr_ratio; wsd (warmup, stable, decay): stays, and falls to min_lr_ratio at "
        "the end. All as in transformers.",
    )
    warmup_steps: int = Field(
        default=10, ge=0, le=MAX_STEPS, description="Steps of linear warmup from 0 (wsd: from min_lr_ratio)."
    )
    min_lr_ratio: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Share of learning_rate that is left at the end. For lr_schedule cosine_with_min_lr and wsd only.",
    )
    lr_decay_ratio: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="Share of all steps, the last ones, in which the learning rate falls along half a cosine. For "
        "lr_schedule wsd only.",
    )
    weight_decay: float = Field(default=0.0, ge=0, le=10, description="Decoupled weight decay (AdamW).")
    decay: Literal["trainer", "matrices", "all"] = Field(
        default="trainer",
        description="What weight_decay applies to. trainer: all but biases and norms, as the Hugging Face Trainer; "
        "matrices: weight matrices but no embedding; all: every parameter.",
    )
    betas: Annotated[tuple[Beta, Beta], list_as_tuple] = Field(
        default=(0.9, 0.999), description="Adam's decay rates of the first and second moment."
    )
    eps: float = Field(default=1e-8, gt=0, le=1, description="Adam's epsilon.")
    max_grad_norm: float | None = Field(
        default=1.0,
        gt=0,
        le=1e9,
        description="Clip gradients to this global norm; null turns clipping off and saves the memory of the gradient "
        "planes.",
    )
    seed: int = Field(default=0, ge=0, le=2**63 - 1, description="Seed of the data order, dropout and noise.")
    train_on: Literal["assistant", "last-assistant", "all"] = Field(
        default="assistant", description="Which tokens of a chat carry loss."
    )
    compute_dtype: ComputeDtypeChoice = Field(
        default="auto",
        description="What layers are computed in; master weights, moments and sums of gradients are fp32 in any case. "
        "auto: float32 on the host, which is exact and gives the same result on every CPU of a kind, bfloat16 on cuda. "
        "bfloat16 on the host is about twice as fast on CPUs with AMX and slower on CPUs without bf16 instructions. "
        "float32 is for the host only.",
    )
    compile: Annotated[CompileChoice, switch_as_text] = Field(
        default="auto",
        description="Run layers as machine code compiled for this model and machine. auto: in jobs long enough to gain "
        "from it, for layers that a trial finds equal within rounding and faster; on: in any job, which is refused "
        "where a layer cannot be compiled; off: never.",
        json_schema_extra={"enum": ["auto", "on", "off", True, False]},  # YAML reads on and off as booleans
    )
    max_skipped_steps: int = Field(
        default=10,
        ge=1,
        le=MAX_STEPS,
        description="The job fails with reason DIVERGED after this number of skipped steps in a row.",
    )

    label_smoothing: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Share of each target that is spread evenly over the vocabulary, in training; as torch's "
        "cross_entropy. Steps report the smoothed loss, evaluations the loss without smoothing.",
    )
    lr_groups: Annotated[tuple[LrGroup, ...], list_as_tuple] = Field(
        default=(),
        max_length=MAX_EXPRESSIONS,
        description="Learning rates of single tensors: [{match: embed_tokens, scale: 0.1}] gives the tensors in whose "
        "name the regular expression is found a tenth of learning_rate, in weight decay too. The first group that fits "
        "counts; other tensors have scale 1.",
        json_schema_extra={
            RULE: f"a list of up to {MAX_EXPRESSIONS} groups, each with match (a regular expression of 1 to "
            f"{MAX_EXPRESSION_CHARS} characters) and scale (a number above 0 up to {MAX_LR_SCALE}; what is not to be "
            "trained is left out of train.trainable)"
        },
    )
    neftune_noise_alpha: float = Field(
        default=0.0,
        ge=0,
        le=1000,
        description="NEFTune: noise on the embeddings in training, uniform and at most alpha / sqrt(L * D) for a "
        "document of L tokens and embeddings of D numbers. 5 to 15 are usual; 0 is none.",
    )
    matmul: Matmul = Field(
        default="bf16",
        description="What the layers' matrix products are computed in. bf16: the compute dtype's own; fp8: 8 bits with "
        "a scale per row, but for weight gradients, which stay in the compute dtype; fp8_full: these too, with scales "
        "for all tokens of a micro-batch. FP8 takes a GPU of compute capability 8.9 or higher, and rounds more "
        "coarsely; a host emulates it, slowly.",
    )
    deterministic: bool = Field(
        default=False,
        description="On a GPU, use kernels that add in a fixed order, so that two runs of a job have the same bits; "
        "attention's backward takes about a tenth longer then, and FlashAttention-4 is not used. On the host two runs "
        "have the same bits in any case.",
    )

    chunk_tokens: int | None = Field(
        default=None,
        ge=64,
        le=MAX_ROW_TOKENS,
        description="Layers compute a row of more tokens in chunks of this many, so that only its keys and values grow "
        "with it on the device, and their gradients; they wait in host memory between a layer's forward and its "
        "backward. The result is that of whole rows but for rounding, shorter rows are computed as without it, and "
        "layers run eagerly on chunks. For one device, and for models whose tokens meet in attention alone. Null "
        "computes every row at once.",
    )
    lanes: Lanes | None = Field(
        default=None,
        description="Parts that each step is divided into, whose gradients are summed by themselves and then in a "
        "balanced tree: the result depends on lanes, not on gpus or nodes. A power of two, at least gpus times nodes, "
        "of a range its upper end. Null means 8 with several devices (16, 32 or 64 with more than 8, 16 or 32), "
        "else 1.",
    )
    parallel: Literal["auto", "rows", "layers"] = Field(
        default="auto",
        description="How several gpus divide a step; the result is the same. rows: each computes its lanes of every "
        "layer; layers: the layers go round the gpus, and each computes its own for all tokens, so that weights and "
        "gradients cross the links to one of them only. layers needs max_grad_norm and a layer for each of the gpus. "
        "auto: what is predicted to be faster. With one device it has no effect.",
    )
    wire: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="What gradients are rounded to on their way from one of several nodes to another: bfloat16 halves "
        "their bytes, and the result then depends on the number of nodes. With one node it has no effect.",
    )

    optimizer_states: OptimizerStates = Field(
        default="exact",
        description="How AdamW's moments and the second half of the master weights are kept. exact: in fp32, 12 bytes "
        "of host memory a parameter; compressed: the matrices' moments in 8 bits with a scale for each 32 elements, "
        "and masters of 24 bits, 5.125 bytes. Both without the 2 to 4 bytes of a gradient that max_grad_norm asks for. "
        "Embeddings, norms, biases and tensors below 4,096 elements stay exact. The result differs, by less than "
        "another order of the data does.",
    )

    trainable: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=MAX_EXPRESSION_CHARS)], ...], list_as_tuple, text_as_list
    ] = Field(
        default=EVERYTHING,
        min_length=1,
        max_length=MAX_EXPRESSIONS,
        description="What is trained: all; lora, adapters of low rank next to a frozen model, as train.lora says; or "
        "regular expressions that are found in tensors' names, each adding tensors or, after a !, taking some away: "
        "[layers\\.1[0-9]\\., norm] trains layers 10 to 19 and all norms, [!embed_tokens] all but the embedding. What "
        "is frozen takes 2 bytes of host memory a parameter where the model has it in bfloat16, else 4, instead of 12 "
        "to 16, and no gradient of it is computed. What comes before the first trained tensor has no backward.",
        json_schema_extra={
            RULE: f"all, lora, or a list of 1 to {MAX_EXPRESSIONS} regular expressions of up to {MAX_EXPRESSION_CHARS} "
            "characters"
        },
    )
    lora: Annotated[LoraSpec, absent_as_empty] = LoraSpec()

    @property
    def recipe(self) -> Recipe:
        """What of this section the engine trains by; the fields have the same names."""
        own = {
            field.name: getattr(self, field.name) for field in fields(Recipe) if field.name in type(self).model_fields
        }
        return Recipe(**own, adapter_scale=self.lora.scale, adapter_dropout=self.lora.dropout)

    @field_validator("trainable")
    @classmethod
    def _expressions_that_can_be_used(cls, trainable: tuple[str, ...]) -> tuple[str, ...]:
        if len(trainable) == 1 and (meant := meant_trainable(trainable[0])):
            raise ValueError(f"is {trainable[0]!r}; did you mean {meant}?")
        for expression in trainable:
            if problem := problem_of(expression.removeprefix(NOT)):
                raise ValueError(problem)
        if len(trainable) > 1 and LORA[0] in trainable:
            raise ValueError("holds lora and expressions; keep either lora or the expressions")
        return trainable

    @field_validator("lora")
    @classmethod
    def _adapters_only_where_they_are_trained(cls, lora: LoraSpec, info: ValidationInfo) -> LoraSpec:
        trainable = info.data.get("trainable")
        changed = next((name for name in LoraSpec.model_fields if getattr(lora, name) != getattr(LoraSpec(), name)), "")
        # Absent where it was refused itself.
        if changed and trainable not in (None, LORA):
            raise WrongField(
                changed,
                "is for adapters, which this job does not train; set train.trainable: lora or leave train.lora out",
            )
        return lora

    @model_validator(mode="before")
    @classmethod
    def _one_epoch_by_default(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and given.get("epochs") is None and given.get("max_steps") is None:
            return {**given, "epochs": 1.0}
        return given

    @field_validator("min_lr_ratio", "lr_decay_ratio")
    @classmethod
    def _of_its_schedule(cls, share: float, info: ValidationInfo) -> float:
        assert info.field_name is not None
        users = {"min_lr_ratio": ("cosine_with_min_lr", "wsd"), "lr_decay_ratio": ("wsd",)}[info.field_name]
        schedule = info.data.get("lr_schedule")
        # Absent where it was refused itself.
        if schedule is not None and schedule not in users and share != cls.model_fields[info.field_name].default:
            raise ValueError(
                f"is {share:g}, and lr_schedule {schedule} does not use it; leave it out or set train.lr_schedule to "
                f"{' or '.join(users)}"
            )
        return share

    @field_validator("lanes")
    @classmethod
    def _in_a_balanced_tree(cls, lanes: int | None) -> int | None:
        if lanes is not None and lanes.bit_count() != 1:
            raise ValueError(f"is {lanes}; it must be {_LANES_RULE}, or null")
        return lanes

    @field_validator("lr_groups")
    @classmethod
    def _regular_expressions(cls, groups: tuple[LrGroup, ...]) -> tuple[LrGroup, ...]:
        for group in groups:
            if problem := problem_of(group.match):
                raise ValueError(problem)
        return groups

    @field_validator("max_steps")
    @classmethod
    def _either_steps_or_epochs(cls, max_steps: int | None, info: ValidationInfo) -> int | None:
        if max_steps is not None and info.data.get("epochs") is not None:
            raise ValueError("cannot be combined with train.epochs; keep one of the two")
        return max_steps
