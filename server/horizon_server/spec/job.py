"""The whole spec of a job, and how plain data becomes one."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, ValidationInfo, field_validator

from horizon_server.errors import FieldViolation, InvalidSpec
from horizon_server.spec.evaluation import EVAL_SET, EvalSpec, problem_with_evaluation
from horizon_server.spec.fields import MAX_STEPS, NAME, NAME_RULE, Name, Section, WrongField, absent_as_empty
from horizon_server.spec.training import TrainSpec
from horizon_server.spec.words import RULE, problem_with

# Named, because a preview takes the same choice without being a job.
Method = Literal["sft", "pretrain"]


class CheckpointSpec(Section):
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
    keep_best: bool = Field(
        default=True,
        description="Also keep the best checkpoint by the figure that eval.best_by names, the evaluation loss by default.",
    )
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


class LimitsSpec(Section):
    """When the job ends with success, checkpointed, before all its steps are done. The learning rate's schedule does not change."""

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
        pattern=rf"^(/[^\x00]{{0,4095}}|{NAME})$",
        description="A pushed model, or an absolute folder on the node that an admin has allowed (model_roots).",
        json_schema_extra={RULE: f"the name of a pushed model ({NAME_RULE}) or an absolute folder on the node"},
    )
    init_from: str | None = Field(
        default=None,
        pattern=rf"^{NAME}@(last|best|[0-9]{{1,9}})$",
        description="Start with the weights of a checkpoint of another job of the same model: JOB@last, JOB@best or JOB@STEP. The "
        "optimizer, the schedule and the data are this job's own. Null starts with the weights of model.",
        json_schema_extra={RULE: "JOB@last, JOB@best or JOB@STEP, with a job's name or id"},
    )
    dataset: Name = Field(description="A pushed dataset. The client also takes local files here and pushes them first.")
    project: str = Field(
        default="",
        pattern=f"^({NAME})?$",
        description="The project that the job is charged to; empty means the user's own.",
        json_schema_extra={RULE: f"empty or {NAME_RULE}"},
    )
    eval_dataset: Name | None = Field(
        default=None, description="A pushed dataset to evaluate on: the set named eval. eval.sets has more of them."
    )
    method: Method = Field(
        default="sft", description="sft: loss on the trained tokens only; pretrain: loss on every token."
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
        default="auto", description="Where the layers are computed. auto means host in this version."
    )
    eval_fraction: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Share of the dataset's rows held out for evaluation, chosen by each row's hash.",
    )

    eval: Annotated[EvalSpec, absent_as_empty] = EvalSpec()
    limits: Annotated[LimitsSpec, absent_as_empty] = LimitsSpec()

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

    @field_validator("eval_fraction")
    @classmethod
    def _either_fraction_or_dataset(cls, eval_fraction: float, info: ValidationInfo) -> float:
        if eval_fraction and info.data.get("eval_dataset") is not None:
            raise ValueError("cannot be combined with eval_dataset; keep one of the two")
        return eval_fraction

    @property
    def eval_sets(self) -> tuple[str, ...]:
        """The names of the sets that evaluations are on: the one named eval, where there is one, then the others by name."""
        has_main_set = self.eval_dataset is not None or self.eval_fraction > 0
        return (*((EVAL_SET,) if has_main_set else ()), *sorted(self.eval.sets))

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
            if isinstance(cause := error.get("ctx", {}).get("error"), WrongField):
                keys.append(cause.key)
            path = ".".join(keys)
            violations.setdefault(
                path, FieldViolation(field=path, description=f"{path} {problem_with(error, keys, plain, schema)}")
            )
        found = list(violations.values())
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise InvalidSpec(f"{found[0].description}{more}", violations=found) from refused
