"""The whole spec of a job, and how plain data becomes one."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator

from horizon_formats.model_files import HUB_ID
from horizon_formats.trackers.known import TRACKERS
from horizon_server.errors import FieldViolation, InvalidSpec
from horizon_server.spec.evaluation import ACCURACY, EVAL_SET, EvalSpec, problem_with_evaluation
from horizon_server.spec.fields import (
    MAX_METADATA,
    MAX_METADATA_NAME_CHARS,
    MAX_METADATA_TEXT_CHARS,
    MAX_STEPS,
    NAME,
    NAME_RULE,
    Name,
    Section,
    WrongField,
    absent_as_empty,
    list_as_tuple,
    text_as_list,
)
from horizon_server.spec.memory import MemorySpec
from horizon_server.spec.objective import (
    METHODS,
    DpoSpec,
    IpoSpec,
    KtoSpec,
    Method,
    OrpoSpec,
    PolicySpec,
    SessionSpec,
    SimpoSpec,
    check_kind,
)
from horizon_server.spec.span import Span, SpanField
from horizon_server.spec.training import LORA, TrainSpec
from horizon_server.spec.words import RULE, problem_with

# The names of `TRACKERS`.
Tracker = Literal["tensorboard", "mlflow", "wandb", "trackio"]


# Fields of `train` that the calls of a session take the place of.
_CALLED = (
    "epochs",
    "max_steps",
    "packing",
    "learning_rate",
    "lr_schedule",
    "warmup_steps",
    "min_lr_ratio",
    "lr_decay_ratio",
    "weight_decay",
    "betas",
    "eps",
    "max_grad_norm",
    "max_skipped_steps",
)


class CheckpointSpec(Section):
    """When checkpoints are written and which are kept."""

    every_steps: int = Field(
        default=500, ge=0, le=MAX_STEPS, description="Steps between checkpoints; 0 writes one at the end only."
    )
    every_minutes: float = Field(
        default=60.0,
        ge=0,
        le=525_600,
        description="Also write one when this time has passed since the last one, unless writing would then take more "
        "than 5 % of the time; 0 writes none by the clock.",
    )
    keep_last: int = Field(default=2, ge=1, le=1000, description="How many of the newest checkpoints are kept.")
    keep_best: bool = Field(
        default=True,
        description="Also keep the best checkpoint by the figure that eval.best_by names, the evaluation loss by "
        "default.",
    )
    dtype: Literal["source", "bf16", "fp16", "fp32"] = Field(
        default="source",
        description="Number format of the exported weights. source: each tensor's own in the model folder.",
    )
    export: Literal["adapter", "merged", "both"] = Field(
        default="adapter",
        description="What a checkpoint of a job with train.trainable: lora holds. adapter: the adapter, as a PEFT "
        "folder, and not the frozen model; merged: the model with the adapter merged into it, in dtype; both: the "
        "adapter, and the merged model in merged/.",
    )
    merge_base: Literal["trained", "source"] = Field(
        default="trained",
        description="What an adapter is merged into where train.lora.base is int8 or nf4. trained: the rounded base "
        "that it was trained on, so that the merged model is the one that was evaluated; source: the model folder's "
        "own weights, as PEFT merges.",
    )
    keep_days: float | None = Field(
        default=None,
        gt=0,
        le=36_500,
        description="Days after the job's end until its checkpoints are deleted; null keeps them. A warning comes "
        "before.",
    )
    keep_optimizer: Literal["last", "all"] = Field(
        default="last",
        description="Once the job has succeeded, last removes the optimizer's state (8 to 10 of 12 bytes per "
        "parameter) from all checkpoints but the newest and the best; all keeps it.",
    )


class LimitsSpec(Section):
    """When the job ends with success, checkpointed, before all its steps are done. The learning rate's schedule does
    not change."""

    max_hours: float | None = Field(
        default=None,
        gt=0,
        le=87_600,
        description="Hours since the job first left the queue, the time in which others had the device included.",
    )
    max_steps: int | None = Field(default=None, ge=1, le=MAX_STEPS, description="The last step to do.")


class JobSpec(Section):
    """One fine-tuning job as asked for, every default filled in."""

    name: Name = Field(description="A name for people.")
    model: str = Field(
        pattern=rf"^(/[^\x00]{{0,4095}}|{NAME}|{HUB_ID})$",
        description="A pushed model; a model of the Hugging Face hub that an admin has added (horizond model add), by "
        "its id, such as Qwen/Qwen3-8B; or an absolute folder on the node that an admin has allowed (model_roots).",
        json_schema_extra={
            RULE: f"the name of a pushed model ({NAME_RULE}), the id of a model of the hub (Qwen/Qwen3-8B) or an "
            "absolute folder on the node"
        },
    )
    init_from: str | None = Field(
        default=None,
        pattern=rf"^{NAME}(@(last|best|[0-9]{{1,9}}))?$",
        description="Start with the weights of a checkpoint of another job of the same model: JOB@last, JOB@best or "
        "JOB@STEP; or, in a job that trains adapters, with a pushed adapter, by its name. The optimizer, the schedule "
        "and the data are this job's own. Null starts with the weights of model.",
        json_schema_extra={
            RULE: "JOB@last, JOB@best or JOB@STEP, with a job's name or id, or the name of a pushed adapter"
        },
    )
    method: Method = Field(
        default="sft",
        description="sft: loss on the trained tokens only; pretrain: loss on every token; dpo, ipo, orpo, simpo: learn "
        "from pairs of a chosen and a rejected answer; kto: from answers that are labelled good or bad; policy: from "
        "recorded samples with advantages; session: the steps are called one by one over the network.",
    )
    dataset: str = Field(
        default="",
        pattern=f"^({NAME})?$",
        validate_default=True,
        description="A pushed dataset; required, but for method session, which has none. The client also takes local "
        "files here and pushes them first.",
        json_schema_extra={RULE: NAME_RULE},
    )
    project: str = Field(
        default="",
        pattern=f"^({NAME})?$",
        description="The project that the job is charged to; empty means the user's own.",
        json_schema_extra={RULE: f"empty or {NAME_RULE}"},
    )
    eval_dataset: Name | None = Field(
        default=None, description="A pushed dataset to evaluate on: the set named eval. eval.sets has more of them."
    )
    train: Annotated[TrainSpec, absent_as_empty] = TrainSpec()
    eval_every_steps: int = Field(
        default=0, ge=0, le=MAX_STEPS, description="Steps between evaluations; 0 evaluates at the start and end only."
    )
    checkpoint: Annotated[CheckpointSpec, absent_as_empty] = CheckpointSpec()
    priority: int = Field(
        default=0,
        ge=-100,
        le=100,
        description="Higher first, among the jobs of one user. How users share the node does not depend on it.",
    )
    device: Literal["auto", "cuda", "host"] = Field(
        default="auto",
        description="Where the layers are computed. auto means cuda on a node with a GPU, and host on the others and "
        "with train.compute_dtype: float32. It is decided when the job is submitted.",
    )
    gpus: SpanField = Field(
        default=Span(),
        description="Devices of the node that compute the job together: GPUs, or what host_devices divides the "
        "processors into. With a range such as 2-8 the job takes what is free when it starts, gives devices back that "
        "another job needs, takes more that are free, and continues on the others where one fails; the result is the "
        "same. A user is charged for each that is used.",
        json_schema_extra={"default": 1},
    )
    nodes: SpanField = Field(
        default=Span(),
        description="Nodes that compute the job together, each with as many gpus: this one and others of its fleet "
        "(docs/nodes.md). A node holds its part of weights, gradients and moments, so a model may be larger than the "
        "memory of one; the result is the same as on one node with as many lanes. With a range such as 1-3 the job "
        "takes as many as can be had each time it starts, and keeps that number while it runs.",
        json_schema_extra={"default": 1},
    )
    node: str = Field(
        default="",
        max_length=63,
        description="The machine of the fleet that the job runs on, by its name in horizon node list (docs/fleet.md). "
        "Default: the one where it is predicted to end first.",
    )
    eval_fraction: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Share of the dataset's rows held out for evaluation, chosen by each row's hash.",
    )

    report_to: Annotated[tuple[Tracker, ...], list_as_tuple, text_as_list] = Field(
        default=(),
        max_length=len(TRACKERS),
        description="Trackers that the node writes the job's figures to, of those that an admin has allowed. From your "
        "own machine: horizon job watch JOB --to TRACKER.",
        json_schema_extra={RULE: f"a list of trackers: {', '.join(TRACKERS)}"},
    )

    metadata: Annotated[dict[str, str], absent_as_empty] = Field(
        default={},
        max_length=MAX_METADATA,
        description="Notes of your own, texts by name. They are shown with the job, and nothing else reads them.",
        json_schema_extra={
            RULE: f"a mapping of up to {MAX_METADATA} names of 1 to {MAX_METADATA_NAME_CHARS} characters to texts of "
            f"up to {MAX_METADATA_TEXT_CHARS}"
        },
    )

    eval: Annotated[EvalSpec, absent_as_empty] = EvalSpec()
    limits: Annotated[LimitsSpec, absent_as_empty] = LimitsSpec()
    memory: Annotated[MemorySpec, absent_as_empty] = MemorySpec()

    dpo: Annotated[DpoSpec, absent_as_empty] = DpoSpec()
    ipo: Annotated[IpoSpec, absent_as_empty] = IpoSpec()
    orpo: Annotated[OrpoSpec, absent_as_empty] = OrpoSpec()
    simpo: Annotated[SimpoSpec, absent_as_empty] = SimpoSpec()
    kto: Annotated[KtoSpec, absent_as_empty] = KtoSpec()
    policy: Annotated[PolicySpec, absent_as_empty] = PolicySpec()
    session: Annotated[SessionSpec, absent_as_empty] = SessionSpec()

    @field_validator("dataset")
    @classmethod
    def _data_as_the_method_has_it(cls, dataset: str, info: ValidationInfo) -> str:
        is_session = info.data.get("method") == "session"
        if dataset and is_session:
            raise ValueError(
                "is for jobs with data, and method is session, whose data comes with each call; leave it out"
            )
        if not dataset and not is_session:
            raise ValueError("is required")
        return dataset

    @model_validator(mode="after")
    def _a_session_has_no_data(self) -> JobSpec:
        if not self.is_session:
            return self
        of_data = {
            "eval_dataset": self.eval_dataset is not None,
            "eval_fraction": self.eval_fraction > 0,
            "eval.sets": bool(self.eval.sets),
            "eval.generate": self.eval.generate is not None,
        }
        for field, is_given in of_data.items():
            if is_given:
                raise WrongField(field, "is for jobs with data, and method is session; leave it out")
        default = TrainSpec()
        for name in _CALLED:
            if getattr(self.train, name) != getattr(default, name):
                raise WrongField(
                    f"train.{name}",
                    "is for jobs with data; in a session the calls say it (docs/sessions.md); leave it out",
                )
        if self.limits.max_steps is not None:
            raise WrongField("limits.max_steps", "is for jobs with data; end the session instead; leave it out")
        for field, span in (("gpus", self.gpus), ("nodes", self.nodes)):
            if span.most > 1:
                raise WrongField(field, f"is {span.plain}, and a session is computed on one device; use {field}: 1")
        return self

    @model_validator(mode="after")
    def _pages_are_for_training_on_one_device(self) -> JobSpec:
        if self.memory.experts == "whole":
            return self
        for field, span in (("gpus", self.gpus), ("nodes", self.nodes)):
            if span.most > 1:
                raise WrongField(field, f"is {span.plain}, and memory.experts: paged is for one device; use {field}: 1")
        if (self.train.lanes or 1) > 1:
            raise WrongField(
                "train.lanes", f"is {self.train.lanes}, and memory.experts: paged is for one lane; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _drives_are_for_one_device(self) -> JobSpec:
        for field, span in (("gpus", self.gpus), ("nodes", self.nodes)):
            if self.memory.tier == "drive" and span.most > 1:
                raise WrongField(
                    "memory.tier",
                    f"is drive, {field} is {span.plain}, and states on drives are updated by one device; use {field}: "
                    "1 or memory.tier: ram",
                )
        return self

    @field_validator("metadata")
    @classmethod
    def _short_notes(cls, given: dict[str, str]) -> dict[str, str]:
        for name, text in given.items():
            if not 1 <= len(name) <= MAX_METADATA_NAME_CHARS:
                raise ValueError(
                    f"has the name {name!r:.80}; a name must have 1 to {MAX_METADATA_NAME_CHARS} characters"
                )
            if len(text) > MAX_METADATA_TEXT_CHARS:
                raise ValueError(
                    f"has {len(text)} characters under {name!r}; a text may have {MAX_METADATA_TEXT_CHARS}"
                )
        return given

    @field_validator(*(name for name, facts in METHODS.items() if facts.has_objective))
    @classmethod
    def _options_of_the_method(cls, options: Section, info: ValidationInfo) -> Section:
        assert info.field_name is not None
        # The method is absent where it was refused itself. Defaults are let through: a spec that comes back from a job
        # has them all.
        method, section = info.data.get("method", info.field_name), info.field_name
        if method != section and options != type(options)():
            raise ValueError(
                f"has options of method {section}, and the job's method is {method}; remove {section} or set method: "
                f"{section}"
            )
        if isinstance(options, DpoSpec) and options.label_smoothing and options.loss != "sigmoid":
            raise WrongField(
                "label_smoothing", f"is for dpo.loss sigmoid, and dpo.loss is {options.loss}; keep one of the two"
            )
        default = PolicySpec()
        if isinstance(options, PolicySpec) and not options.clip:
            for name in ("clip_low", "clip_high"):
                if getattr(options, name) != getattr(default, name):
                    raise WrongField(name, "has no meaning with policy.clip false; keep one of the two")
        return options

    @field_validator("train")
    @classmethod
    def _fields_that_the_method_uses(cls, train: TrainSpec, info: ValidationInfo) -> TrainSpec:
        method = info.data.get("method")
        options = METHODS[method].options if method else None
        if options is None:
            return train
        if train.label_smoothing:
            own = (
                f"; {method}.label_smoothing is another thing, and this method's"
                if "label_smoothing" in options.model_fields
                else ""
            )
            raise WrongField(
                "label_smoothing",
                f"is of the cross-entropy of sft and pretrain, which method {method} does not have; leave it out{own}",
            )
        if train.train_on != "assistant":
            raise WrongField(
                "train_on",
                f"is for method sft; with method {method} the answers are trained and their prompts are not; leave it "
                "out",
            )
        return train

    @field_validator("eval")
    @classmethod
    def _evaluations_are_possible(cls, given: EvalSpec, info: ValidationInfo) -> EvalSpec:
        wanted = info.data
        # A field that was refused is not there; its own message is enough.
        has_main_set = wanted.get("eval_dataset", "") is not None or bool(wanted.get("eval_fraction", 1))
        if given.patience and not wanted.get("eval_every_steps", 1):
            raise WrongField(
                "patience",
                f"is {given.patience} evaluations, but there are none between steps; set eval_every_steps above 0",
            )
        train = wanted.get("train")
        answers_all = wanted.get("method", "sft") == "pretrain" or (train is not None and train.train_on == "all")
        if problem := problem_with_evaluation(given, has_main_set=has_main_set, trains_on_prompts=answers_all):
            raise problem
        return given

    @field_validator("checkpoint")
    @classmethod
    def _only_adapters_are_merged(cls, checkpoint: CheckpointSpec, info: ValidationInfo) -> CheckpointSpec:
        # Absent where it was refused itself.
        train = info.data.get("train")
        if checkpoint.export != "adapter" and train is not None and train.trainable != LORA:
            raise WrongField(
                "export",
                f"is {checkpoint.export}, which is for adapters, and this job trains none; its checkpoints hold the "
                "whole model anyway: "
                "leave export out, or set train.trainable: lora",
            )
        return checkpoint

    @field_validator("eval_fraction")
    @classmethod
    def _either_fraction_or_dataset(cls, eval_fraction: float, info: ValidationInfo) -> float:
        if eval_fraction and info.data.get("eval_dataset") is not None:
            raise ValueError("cannot be combined with eval_dataset; keep one of the two")
        return eval_fraction

    @property
    def eval_sets(self) -> tuple[str, ...]:
        """The names of the sets that evaluations are on: the one named eval, where there is one, then the others by
        name."""
        has_main_set = self.eval_dataset is not None or self.eval_fraction > 0
        return (*((EVAL_SET,) if has_main_set else ()), *sorted(self.eval.sets))

    @property
    def most_steps(self) -> int | None:
        """The step that the job ends after at the latest; None where only its data decides."""
        return min(
            (steps for steps in (self.train.max_steps, self.limits.max_steps) if steps is not None), default=None
        )

    @property
    def options(self) -> Section | None:
        """The section of the job's method; None for plain cross-entropy."""
        return getattr(self, self.method) if METHODS[self.method].has_objective else None

    @property
    def is_session(self) -> bool:
        """Whether its steps are called over the network, and it has no data of its own."""
        return self.method == "session"

    @property
    def needs_references(self) -> bool:
        """Whether the job compares with the log-probabilities of the weights that it starts with."""
        return METHODS[self.method].needs_references(self.options)

    def to_mapping(self) -> dict[str, Any]:
        """Return plain data that `parse_job_spec` turns back into an equal spec."""
        return self.model_dump(mode="json")

    def given(self) -> dict[str, Any]:
        """Return the fields that were given, without defaults: the same for every version, whichever fields it has
        besides."""
        return self.model_dump(mode="json", exclude_unset=True)

    def in_project(self, project: str) -> JobSpec:
        """Return the spec with its project filled in, which does not count as given."""
        return self.model_construct(_fields_set=set(self.model_fields_set), **{**dict(self), "project": project})


def check_kinds(spec: JobSpec, kind: str, of_sets: Mapping[str, str]) -> None:
    """Check the kinds (text, preference, kto or samples) of a job's data and of its eval sets, by their names in the
    spec.

    Text can be evaluated in jobs of every method; only there tokens have an accuracy, and only there prompts are
    answered.

    Raises:
        InvalidSpec: the method does not learn from data of such a kind, or a figure is asked for that the set does not
            have.
    """
    check_kind(spec.method, kind, spec.dataset)
    kinds = {name: of_sets.get(name, kind) for name in spec.eval_sets}
    for name, of_set in kinds.items():
        if of_set != "text":
            check_kind(spec.method, of_set, spec.eval.sets.get(name, spec.eval_dataset or spec.dataset))
    generate, (judged, figure) = spec.eval.generate, spec.eval.judged
    if generate is not None and kinds[generate.set] != "text":
        problem = (
            f"eval.generate.set is {generate.set!r}, whose data is of kind {kinds[generate.set]}; use one of kind text"
        )
        raise InvalidSpec.of("eval.generate.set", problem)
    if figure == ACCURACY and kinds[judged] != "text":
        problem = (
            f"eval.best_by is {spec.eval.best_by!r}, and data of kind {kinds[judged]} has no accuracy; use "
            f"{judged}.loss"
        )
        raise InvalidSpec.of("eval.best_by", problem)


def job_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a job spec file."""
    schema = JobSpec.model_json_schema()
    # Of every method but session, which few write as a file.
    schema["required"] = [*schema["required"], "dataset"]
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
            if isinstance(cause := error.get("ctx", {}).get("error"), WrongField):
                keys.append(cause.key)
            path = ".".join(keys)
            violations.setdefault(
                path, FieldViolation(field=path, description=f"{path} {problem_with(error, keys, plain, schema)}")
            )
        found = list(violations.values())
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise InvalidSpec(f"{found[0].description}{more}", violations=found) from refused
