"""What a job is evaluated on, whether it answers prompts then, and which figure decides what is the best."""

from __future__ import annotations

from pydantic import Field, field_validator

from horizon_server.expressions import problem_of, problem_with_extraction
from horizon_server.spec.fields import (
    MAX_EXPRESSION_CHARS,
    MAX_STEPS,
    NAME_PATTERN,
    NAME_RULE,
    Name,
    Section,
    WrongField,
)
from horizon_server.spec.words import RULE

EVAL_SET = "eval"
"""The name of the set of `eval_dataset` or `eval_fraction`."""
MAX_EVAL_SETS = 8
MAX_EVAL_PROMPTS = 256
MAX_ANSWER_TOKENS = 4096

LOSS, ACCURACY, EXACT_MATCH = "loss", "accuracy", "exact_match"


class GenerateSpec(Section):
    """Answers that the model gives to prompts at each evaluation: greedy, with the weights of that step."""

    set: Name = Field(default=EVAL_SET, description="The eval set that the prompts are from.")
    prompts: int = Field(
        default=16,
        ge=1,
        le=MAX_EVAL_PROMPTS,
        description="How many of the set's rows, from its first on. A row's prompt is its chat up to the last trained "
        "answer.",
    )
    max_new_tokens: int = Field(
        default=256, ge=1, le=MAX_ANSWER_TOKENS, description="An answer ends after this number of tokens."
    )
    answer: str | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_EXPRESSION_CHARS,
        description="Regular expression that finds the final answer in a text: the first group of its last match, "
        "without white space around it and commas between digits. exact_match is the share of prompts for which that "
        "of the generated answer is that of the data's. Null compares nothing.",
    )

    @field_validator("answer")
    @classmethod
    def _answer_can_be_searched(cls, given: str | None) -> str | None:
        if given is not None and (problem := problem_of(given) or problem_with_extraction(given)):
            raise ValueError(problem)
        return given


class EvalSpec(Section):
    """What evaluations measure, and when they end the job early."""

    patience: int = Field(
        default=0,
        ge=0,
        le=MAX_STEPS,
        description="End the job with success after this number of evaluations in a row whose figure (best_by) was not "
        "better than the best before; 0 trains to the end.",
    )
    min_delta: float = Field(
        default=0.0, ge=0, le=1e9, description="By how much a figure must be better than the best to count as better."
    )
    sets: dict[str, Name] = Field(
        default={},
        max_length=MAX_EVAL_SETS,
        json_schema_extra={RULE: f"a mapping of up to {MAX_EVAL_SETS} names to datasets, each {NAME_RULE}"},
        description="More pushed datasets to evaluate on, by the names that their figures have. The client also takes "
        "local files here.",
    )
    generate: GenerateSpec | None = Field(
        default=None, description="Have the model answer prompts of a set at each evaluation; null does not."
    )
    best_by: str = Field(
        default=LOSS,
        max_length=80,
        description="The figure by which a checkpoint is the best and patience counts: loss (that of the set eval, or "
        "else of the first by name), SET.loss, SET.accuracy "
        "or SET.exact_match. For a loss, lower is better; for the others, higher.",
    )

    @field_validator("sets")
    @classmethod
    def _names_are_free(cls, given: dict[str, str]) -> dict[str, str]:
        wrong = next((name for name in given if NAME_PATTERN.fullmatch(name) is None), None)
        if wrong is not None:
            raise ValueError(f"has a set named {wrong!r:.80}; a name must be {NAME_RULE}")
        if EVAL_SET in given:
            raise ValueError(
                f"has a set named {EVAL_SET}, which is that of eval_dataset and eval_fraction; choose another name"
            )
        return given

    @property
    def prefers_high(self) -> bool:
        """Whether the figure that decides is the better the higher it is."""
        return self.judged[1] != LOSS

    def is_better(self, value: float, best: float, *, by: float = 0.0) -> bool:
        """Whether a figure is better than the best before by more than `by`; one that is not a number never is."""
        return value > best + by if self.prefers_high else value < best - by

    @property
    def judged(self) -> tuple[str, str]:
        """The set and the figure that decide; the set is empty where it is the first."""
        name, _, figure = self.best_by.rpartition(".")
        return name, figure


def problem_with_evaluation(given: EvalSpec, *, has_main_set: bool, trains_on_prompts: bool) -> WrongField | None:
    """Return what is wrong with the section in its job. `has_main_set`: whether there is the set named eval."""
    names = [*([EVAL_SET] if has_main_set else []), *given.sets]
    listed = (
        f"the sets are {', '.join(names)}" if names else "there is none; set eval_dataset, eval_fraction or eval.sets"
    )
    if given.patience and not names:
        return WrongField(
            "patience",
            f"is {given.patience} evaluations, but there is no data for them; set eval_dataset or eval_fraction",
        )
    generate = given.generate
    if generate is not None and generate.set not in names:
        return WrongField("generate.set", f"is {generate.set!r}, which is not an eval set; {listed}")
    if generate is not None and trains_on_prompts:
        return WrongField(
            "generate",
            "needs rows with a prompt and an answer, and this job trains on every token of a row; use method: sft and "
            "train.train_on: assistant or last-assistant",
        )
    if given.best_by == LOSS:
        return None
    name, figure = given.judged
    if figure not in (LOSS, ACCURACY, EXACT_MATCH) or not name:
        return WrongField(
            "best_by", f"is {given.best_by!r}; it must be loss, SET.loss, SET.accuracy or SET.exact_match"
        )
    if name not in names:
        return WrongField("best_by", f"is {given.best_by!r}, and {name!r} is not an eval set; {listed}")
    if figure == EXACT_MATCH and (generate is None or generate.answer is None or generate.set != name):
        return WrongField(
            "best_by",
            f"is {given.best_by!r}, but no exact match of that set is measured; set eval.generate with set: {name} and "
            "an answer",
        )
    return None
