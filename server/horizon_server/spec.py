"""The job spec: what a user may ask for. Type, range, default and description of each field are written here and nowhere else.

`parse_job_spec` turns plain data (YAML, JSON, or a request converted by `api.grpc`) into a frozen `JobSpec` and refuses unknown keys, wrong
types and values out of range, all of them at once. `job_schema` is the same knowledge as JSON Schema; the client ships it as data.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import takewhile
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from horizon_server.errors import FieldViolation, InvalidSpec
from horizon_server.expressions import problem_of
from horizon_server.spec_values import RULE, problem_with

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"
NAME_PATTERN = re.compile(_NAME)
NAME_RULE = "1 to 63 letters, digits, '.', '_' or '-', starting with a letter or digit"

MAX_STEPS = 100_000_000
MAX_EXPRESSIONS = 64
MAX_EXPRESSION_CHARS = 256
MAX_LR_SCALE = 1000

Name = Annotated[str, Field(pattern=f"^{_NAME}$", json_schema_extra={RULE: NAME_RULE})]
Beta = Annotated[float, Field(ge=0, lt=1)]
EVERYTHING = ("all",)
"""`train.trainable` of a job that trains every parameter."""
NOT = "!"
"""Before an expression of `train.trainable` that takes tensors away."""
# Named, because a preview takes the same two choices without being a job.
Method = Literal["sft", "pretrain"]
TrainOn = Literal["assistant", "last-assistant", "all"]
LrSchedule = Literal["constant", "linear", "cosine", "cosine_with_min_lr", "wsd"]
ComputeDtypeChoice = Literal["auto", "float32", "bfloat16"]
CompileChoice = Literal["auto", "on", "off"]

# YAML reads `packing: true` as a boolean; the field's values are words.
_switch_as_text = BeforeValidator(lambda value: {True: "on", False: "off"}[value] if isinstance(value, bool) else value)
_boolean_as_text = BeforeValidator(lambda value: str(value).lower() if isinstance(value, bool) else value)
# `train:` with nothing below it is null in YAML and means every default.
_absent_as_empty = BeforeValidator(lambda value: {} if value is None else value)
_text_as_list = BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
# YAML and JSON have lists only; strict mode would refuse one where a tuple is declared.
_list_as_tuple = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)


class _WrongField(ValueError):
    """What is wrong with a field of a section, where the validator is the whole section's."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(problem)
        self.key = key


class _Section(BaseModel):
    """A mapping of the spec: frozen, nothing unknown, no type guessed (strict), numbers finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _keys_as_text(cls, given: Any) -> Any:
        # YAML keys may be numbers; as text they are reported like any other unknown field.
        return {str(key): value for key, value in given.items()} if isinstance(given, Mapping) else given


class LrGroup(_Section):
    """Tensors whose learning rate is the schedule's times `scale`: those whose name the regular expression `match` is found in."""

    match: str = Field(min_length=1, max_length=MAX_EXPRESSION_CHARS)
    scale: float = Field(gt=0, le=MAX_LR_SCALE)


class TrainSpec(_Section):
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
        le=1_048_576,
        description="Longest row in tokens. Longer chats are truncated, longer texts are split.",
    )
    tokens_per_step: int = Field(
        default=16384, ge=8, le=67_108_864, description="Real tokens (no padding) per optimizer step."
    )
    packing: Annotated[Literal["auto", "true", "false"], _boolean_as_text] = Field(
        default="auto",
        description="Put several documents in one row. auto: where a trial shows that the model keeps them apart; true: refuse the job "
        "otherwise; false: one document per row.",
        json_schema_extra={"enum": ["auto", True, False, "true", "false"]},  # YAML's booleans are accepted as well
    )
    learning_rate: float = Field(default=1e-5, ge=0, le=10, description="Peak learning rate.")
    lr_schedule: LrSchedule = Field(
        default="cosine",
        description="Shape of the learning rate after the warmup. constant: stays; linear, cosine: falls to 0; cosine_with_min_lr: falls "
        "to min_lr_ratio; wsd (warmup, stable, decay): stays, and falls to min_lr_ratio at the end. All as in transformers.",
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
        description="Share of all steps, the last ones, in which the learning rate falls along half a cosine. For lr_schedule wsd only.",
    )
    weight_decay: float = Field(default=0.0, ge=0, le=10, description="Decoupled weight decay (AdamW).")
    decay: Literal["trainer", "matrices", "all"] = Field(
        default="trainer",
        description="What weight_decay applies to. trainer: all but biases and norms, as the Hugging Face Trainer; matrices: weight "
        "matrices but no embedding; all: every parameter.",
    )
    betas: Annotated[tuple[Beta, Beta], _list_as_tuple] = Field(
        default=(0.9, 0.999), description="Adam's decay rates of the first and second moment."
    )
    eps: float = Field(default=1e-8, gt=0, le=1, description="Adam's epsilon.")
    max_grad_norm: float | None = Field(
        default=1.0,
        gt=0,
        le=1e9,
        description="Clip gradients to this global norm; null turns clipping off and saves the memory of the gradient planes.",
    )
    seed: int = Field(default=0, ge=0, le=2**63 - 1, description="Seed of the data order, dropout and noise.")
    train_on: Literal["assistant", "last-assistant", "all"] = Field(
        default="assistant", description="Which tokens of a chat carry loss."
    )
    compute_dtype: ComputeDtypeChoice = Field(
        default="auto",
        description="What layers are computed in; master weights, moments and sums of gradients are fp32 in any case. auto: float32 on "
        "the host, which is exact and gives the same result on every CPU of a kind, bfloat16 on cuda. bfloat16 on the host is "
        "about twice as fast on CPUs with AMX and slower on CPUs without bf16 instructions. float32 is for the host only.",
    )
    compile: Annotated[CompileChoice, _switch_as_text] = Field(
        default="auto",
        description="Run layers as machine code compiled for this model and machine. auto: in jobs long enough to gain from it, for layers "
        "that a trial finds equal within rounding and faster; on: in any job, which is refused where a layer cannot be compiled; off: "
        "never. Jobs with matmul: fp8 are never compiled.",
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
        description="Share of each target that is spread evenly over the vocabulary, in training; as torch's cross_entropy. Steps report "
        "the smoothed loss, evaluations the loss without smoothing.",
    )
    lr_groups: Annotated[tuple[LrGroup, ...], _list_as_tuple] = Field(
        default=(),
        max_length=MAX_EXPRESSIONS,
        description="Learning rates of single tensors: [{match: embed_tokens, scale: 0.1}] gives the tensors in whose name the regular "
        "expression is found a tenth of learning_rate, in weight decay too. The first group that fits counts; other tensors have scale 1.",
        json_schema_extra={
            RULE: f"a list of up to {MAX_EXPRESSIONS} groups, each with match (a regular expression of 1 to {MAX_EXPRESSION_CHARS} "
            f"characters) and scale (a number above 0 up to {MAX_LR_SCALE}; what is not to be trained is left out of train.trainable)"
        },
    )
    neftune_noise_alpha: float = Field(
        default=0.0,
        ge=0,
        le=1000,
        description="NEFTune: noise on the embeddings in training, uniform and at most alpha / sqrt(L * D) for a document of L tokens and "
        "embeddings of D numbers. 5 to 15 are usual; 0 is none.",
    )
    matmul: Literal["bf16", "fp8"] = Field(
        default="bf16",
        description="What the layers' matrix products are computed in. bf16: the compute dtype's own; fp8: 8 bits with a scale per row, "
        "faster on GPUs of compute capability 8.9 or higher, with coarser rounding; a host emulates it.",
    )

    trainable: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=MAX_EXPRESSION_CHARS)], ...], _list_as_tuple, _text_as_list
    ] = Field(
        default=EVERYTHING,
        min_length=1,
        max_length=MAX_EXPRESSIONS,
        description="What is trained: all, or regular expressions that are found in tensors' names, each adding tensors or, after a !, "
        "taking some away: [layers\\.1[0-9]\\., norm] trains layers 10 to 19 and all norms, [!embed_tokens] all but the embedding. The "
        "others are frozen: they take 2 bytes of host memory a parameter where the model has them in bfloat16, else 4, instead of 12 to "
        "16, and no gradient of theirs is computed. What comes before the first trained tensor has no backward.",
        json_schema_extra={
            RULE: f"all, or a list of 1 to {MAX_EXPRESSIONS} regular expressions of up to {MAX_EXPRESSION_CHARS} characters"
        },
    )

    @field_validator("trainable")
    @classmethod
    def _expressions_that_can_be_used(cls, trainable: tuple[str, ...]) -> tuple[str, ...]:
        for expression in trainable:
            if problem := problem_of(expression.removeprefix(NOT)):
                raise ValueError(problem)
        return trainable

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
                f"is {share:g}, and lr_schedule {schedule} does not use it; leave it out or set train.lr_schedule to {' or '.join(users)}"
            )
        return share

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


class CheckpointSpec(_Section):
    """When checkpoints are written and which are kept."""

    every_steps: int = Field(
        default=500, ge=0, le=MAX_STEPS, description="Steps between checkpoints; 0 writes one at the end only."
    )
    every_minutes: float = Field(
        default=60.0,
        ge=0,
        le=525_600,
        description="Also write one when this time has passed since the last one, unless writing would then take more than 5 % of "
        "the time; 0 writes none by the clock.",
    )
    keep_last: int = Field(default=2, ge=1, le=1000, description="How many of the newest checkpoints are kept.")
    keep_best: bool = Field(default=True, description="Also keep the checkpoint with the lowest evaluation loss.")
    dtype: Literal["source", "bf16", "fp16", "fp32"] = Field(
        default="source",
        description="Number format of the exported weights. source: each tensor's own in the model folder.",
    )
    keep_days: float | None = Field(
        default=None,
        gt=0,
        le=36_500,
        description="Days after the job's end until its checkpoints are deleted; null keeps them. A warning comes before.",
    )
    keep_optimizer: Literal["last", "all"] = Field(
        default="last",
        description="Once the job has succeeded, last removes the optimizer's state (8 to 10 of 12 bytes per parameter) from all "
        "checkpoints but the newest and the best; all keeps it.",
    )


class EvalSpec(_Section):
    """When evaluations end the job early."""

    patience: int = Field(
        default=0,
        ge=0,
        le=MAX_STEPS,
        description="End the job with success after this number of evaluations in a row whose loss was not better than the best before; "
        "0 trains to the end.",
    )
    min_delta: float = Field(
        default=0.0, ge=0, le=1e9, description="How far below the best loss a loss must be to count as better."
    )


class LimitsSpec(_Section):
    """When the job ends with success, checkpointed, before all its steps are done. The learning rate's schedule does not change."""

    max_hours: float | None = Field(
        default=None,
        gt=0,
        le=87_600,
        description="Hours since the job first left the queue, the time in which others had the device included.",
    )
    max_steps: int | None = Field(default=None, ge=1, le=MAX_STEPS, description="The last step to do.")


class JobSpec(_Section):
    """One fine-tuning job as asked for, every default filled in."""

    name: Name = Field(description="A name for people.")
    model: str = Field(
        pattern=rf"^(/[^\x00]{{0,4095}}|{_NAME})$",
        description="A pushed model, or an absolute folder on the node that an admin has allowed (model_roots).",
        json_schema_extra={RULE: f"the name of a pushed model ({NAME_RULE}) or an absolute folder on the node"},
    )
    init_from: str | None = Field(
        default=None,
        pattern=rf"^{_NAME}@(last|best|[0-9]{{1,9}})$",
        description="Start with the weights of a checkpoint of another job of the same model: JOB@last, JOB@best or JOB@STEP. The "
        "optimizer, the schedule and the data are this job's own. Null starts with the weights of model.",
        json_schema_extra={RULE: "JOB@last, JOB@best or JOB@STEP, with a job's name or id"},
    )
    dataset: Name = Field(description="A pushed dataset. The client also takes local files here and pushes them first.")
    project: str = Field(
        default="",
        pattern=f"^({_NAME})?$",
        description="The project that the job is charged to; empty means the user's own.",
        json_schema_extra={RULE: f"empty or {NAME_RULE}"},
    )
    eval_dataset: Name | None = Field(default=None, description="A pushed dataset to evaluate on.")
    method: Literal["sft", "pretrain"] = Field(
        default="sft", description="sft: loss on the trained tokens only; pretrain: loss on every token."
    )
    train: Annotated[TrainSpec, _absent_as_empty] = TrainSpec()
    eval_every_steps: int = Field(
        default=0, ge=0, le=MAX_STEPS, description="Steps between evaluations; 0 evaluates at the start and end only."
    )
    checkpoint: Annotated[CheckpointSpec, _absent_as_empty] = CheckpointSpec()
    priority: int = Field(
        default=0,
        ge=-100,
        le=100,
        description="Higher first, among the jobs of one user. How users share the node does not depend on it.",
    )
    device: Literal["auto", "cuda", "host"] = Field(
        default="auto", description="Where the layers are computed. auto means host in this version."
    )
    eval_fraction: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Share of the dataset's rows held out for evaluation, chosen by each row's hash.",
    )

    eval: Annotated[EvalSpec, _absent_as_empty] = EvalSpec()
    limits: Annotated[LimitsSpec, _absent_as_empty] = LimitsSpec()

    @field_validator("eval")
    @classmethod
    def _patience_needs_evaluations(cls, given: EvalSpec, info: ValidationInfo) -> EvalSpec:
        wanted = info.data
        if given.patience and not wanted.get("eval_every_steps", 1):
            raise _WrongField(
                "patience",
                f"is {given.patience} evaluations, but there are none between steps; set eval_every_steps above 0",
            )
        if given.patience and wanted.get("eval_dataset", "") is None and not wanted.get("eval_fraction", 1):
            raise _WrongField(
                "patience",
                f"is {given.patience} evaluations, but there is no data for them; set eval_dataset or eval_fraction",
            )
        return given

    @field_validator("eval_fraction")
    @classmethod
    def _either_fraction_or_dataset(cls, eval_fraction: float, info: ValidationInfo) -> float:
        if eval_fraction and info.data.get("eval_dataset") is not None:
            raise ValueError("cannot be combined with eval_dataset; keep one of the two")
        return eval_fraction

    @property
    def most_steps(self) -> int | None:
        """The step that the job ends after at the latest; None where only its data decides."""
        return min(
            (steps for steps in (self.train.max_steps, self.limits.max_steps) if steps is not None), default=None
        )

    def to_mapping(self) -> dict[str, Any]:
        """Return plain data that `parse_job_spec` turns back into an equal spec."""
        return self.model_dump(mode="json")

    def given(self) -> dict[str, Any]:
        """Return the fields that were given, without defaults: the same for every version, whichever fields it has besides."""
        return self.model_dump(mode="json", exclude_unset=True)

    def in_project(self, project: str) -> JobSpec:
        """Return the spec with its project filled in, which does not count as given."""
        return self.model_construct(_fields_set=set(self.model_fields_set), **{**dict(self), "project": project})


def job_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a job spec file."""
    schema = JobSpec.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "horizon job spec"}


def parse_job_spec(plain: object) -> JobSpec:
    """Return the spec that `plain` (a mapping of plain data) asks for, with every default filled in.

    Raises:
        InvalidSpec: with one violation per offending field, its path, its value and what is allowed.
    """
    if not isinstance(plain, Mapping):
        raise InvalidSpec(
            f"the job spec must be a mapping of fields such as name, model and dataset, not {type(plain).__name__}"
        )
    try:
        return JobSpec.model_validate(plain)
    except ValidationError as refused:
        schema = job_schema()
        violations: dict[str, FieldViolation] = {}
        for error in refused.errors(include_url=False):
            # An element of a list is reported as the list: users write, and change, the whole of it.
            keys = [str(key) for key in takewhile(lambda key: not isinstance(key, int), error["loc"])]
            if isinstance(cause := error.get("ctx", {}).get("error"), _WrongField):
                keys.append(cause.key)
            path = ".".join(keys)
            violations.setdefault(
                path, FieldViolation(field=path, description=f"{path} {problem_with(error, keys, plain, schema)}")
            )
        found = list(violations.values())
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise InvalidSpec(f"{found[0].description}{more}", violations=found) from refused
