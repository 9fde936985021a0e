"""What a request for a fine-tuning job means as a job's spec, and the hyperparameters that a spec has.

OpenAI counts a batch in examples, a step here has tokens. The one follows from the other by the same estimate of an
example's tokens that plans are made with, so that nothing but the spec need be kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from horizon_server.api.openai.bodies import Body
from horizon_server.api.openai.errors import BadParameter, unsupported
from horizon_server.api.openai.model_names import UNNAMED
from horizon_server.planning.data_size import DataSize, expanded_bytes
from horizon_server.records.blob import DatasetRecord
from horizon_server.spec import LORA, NAME_PATTERN, NAME_RULE, JobSpec, TrainSpec, parse_job_spec

# Of an example that a request does not limit; longer ones are cut, which the job reports.
SEQUENCE_LENGTH = 4096
# What learning_rate_multiplier multiplies; adapters are usually trained with ten times as much.
LEARNING_RATE = 1e-5
LORA_LEARNING_RATE = 1e-4
# Where batch_size is auto, a job has at least about this many steps.
LEAST_STEPS = 50
_TOKENS_PER_STEP = TrainSpec.model_fields["tokens_per_step"].default
_WARMUP_STEPS = TrainSpec.model_fields["warmup_steps"].default
# Epochs of `auto`, as OpenAI's guide counts them: three, more of few examples and fewer of many.
_EPOCHS, _MOST_EPOCHS = 3, 25
_FEW_EXAMPLES, _MANY_EXAMPLES = 100, 25_000
_METHODS = {"supervised": "sft", "dpo": "dpo"}
METHOD_NAMES = {ours: theirs for theirs, ours in _METHODS.items()}
# What the request has fields of its own for.
_NOT_EXTRA = ("name", "model", "init_from", "method", "dataset", "eval_dataset", "metadata")

auto = BeforeValidator(lambda value: None if value == "auto" else value)
Count = Annotated[int | None, auto]


class Supervised(Body):
    """Hyperparameters of supervised fine-tuning; None is auto."""

    n_epochs: Count = Field(default=None, ge=1, le=10_000)
    batch_size: Count = Field(default=None, ge=1, le=1_000_000)
    learning_rate_multiplier: Annotated[float | None, auto] = Field(default=None, gt=0, le=1e5)


class Dpo(Supervised):
    """Hyperparameters of direct preference optimisation; None is auto."""

    beta: Annotated[float | None, auto] = Field(default=None, gt=0, le=1000)


class SupervisedMethod(Body):
    """Options of the method supervised."""

    hyperparameters: Supervised | None = None


class DpoMethod(Body):
    """Options of the method dpo."""

    hyperparameters: Dpo | None = None


class Method(Body):
    """How a model is tuned."""

    type: Literal["supervised", "dpo", "reinforcement"]
    supervised: SupervisedMethod | None = None
    dpo: DpoMethod | None = None
    reinforcement: dict[str, Any] | None = None


class JobBody(Body):
    """A fine-tuning job that is asked for."""

    model: str = Field(max_length=4200)
    training_file: str = Field(max_length=100)
    validation_file: str | None = Field(default=None, max_length=100)
    hyperparameters: Supervised | None = None
    method: Method | None = None
    suffix: str | None = None
    seed: int | None = Field(default=None, ge=0, le=2**63 - 1)
    metadata: dict[str, str] | None = None
    integrations: list[dict[str, Any]] | None = None
    horizon: dict[str, Any] = Field(default={}, description="Fields of a job spec that OpenAI's API has no names for.")


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What the names of a request mean: the spec's `model` and `init_from`, the datasets, the positions of the model,
    and fields of `train` that the start decides."""

    model: str
    init_from: str | None
    training: DatasetRecord
    validation: DatasetRecord | None
    positions: int
    train: Mapping[str, Any]


def spec_of(body: JobBody, inputs: Inputs) -> JobSpec:
    """Return the job that is asked for. Raises BadParameter, InvalidSpec."""
    method, asked = _method_of(body)
    extra = _extra_of(body)
    train = {**inputs.train, **_mapping(extra.pop("train", {}))}
    example = tokens_of_example(inputs.training)
    num_examples = max(1, inputs.training.num_rows)
    epochs = asked.n_epochs or _auto_epochs(num_examples)
    tokens = example * num_examples * epochs
    tokens_per_step = (
        asked.batch_size * example
        if asked.batch_size is not None
        else min(_TOKENS_PER_STEP, max(example, tokens // LEAST_STEPS))
    )
    tokens_per_step = min(max(tokens_per_step, 8), 67_108_864)
    rate = _rounded(_learning_rate(train) * (asked.learning_rate_multiplier or 1.0))
    # Of a short job the whole would be warmup.
    warmup = min(_WARMUP_STEPS, tokens // tokens_per_step // 10)
    computed = {
        "tokens_per_step": tokens_per_step,
        "sequence_length": min(SEQUENCE_LENGTH, inputs.positions),
        "learning_rate": rate,
        "warmup_steps": warmup,
        "seed": body.seed or 0,
        **({} if "max_steps" in train else {"epochs": float(epochs)}),
    }
    plain = {
        "name": _suffix(body.suffix),
        "model": inputs.model,
        "init_from": inputs.init_from,
        "method": method,
        "dataset": inputs.training.dataset_id,
        "eval_dataset": None if inputs.validation is None else inputs.validation.dataset_id,
        "metadata": body.metadata or {},
        **({"dpo": {"beta": asked.beta}} if isinstance(asked, Dpo) and asked.beta is not None else {}),
        **extra,
        "train": {**computed, **train},
    }
    return parse_job_spec(plain)


def notes_of(body: JobBody, spec: JobSpec) -> list[str]:
    """Return what the creator of a job should know of how the request was read."""
    train = spec.train
    notes = [
        f"learning rate {train.learning_rate:g}, {train.tokens_per_step} tokens a step, rows of up to "
        f"{train.sequence_length} tokens, as docs/openai.md says; the field horizon of a request sets others"
    ]
    if body.integrations:
        notes.append(
            "integrations are ignored: this daemon writes to the trackers that an admin has allowed (report_to, "
            "docs/trackers.md)"
        )
    return notes


def hyperparameters_of(spec: JobSpec, training: DatasetRecord | None) -> dict[str, Any]:
    """Return a job's hyperparameters as OpenAI writes them; auto where nothing is known of its data any more, or where
    it counts steps and not epochs."""
    train = spec.train
    epochs = train.epochs if train.epochs is not None or train.max_steps is not None else 1.0
    multiplier = train.learning_rate / _learning_rate({"trainable": train.trainable})
    found: dict[str, Any] = {
        "n_epochs": int(epochs) if epochs is not None and epochs.is_integer() else "auto",
        "batch_size": "auto"
        if training is None
        else max(1, round(train.tokens_per_step / tokens_of_example(training))),
        "learning_rate_multiplier": _rounded(multiplier),
    }
    return found | ({"beta": spec.dpo.beta} if spec.method == "dpo" else {})


def tokens_of_example(record: DatasetRecord) -> int:
    """Return about how many tokens an example has: the estimate of a plan, in which both answers of a preference have
    their prompt."""
    size = DataSize.estimated(
        num_bytes=expanded_bytes((file.path, file.size_bytes) for file in record.files),
        num_rows=0,
        documents_per_row=2 if record.data_kind == "preference" else 1,
        sequence_length=SEQUENCE_LENGTH,
    )
    return max(1, size.num_tokens // max(1, record.num_rows))


def _method_of(body: JobBody) -> tuple[str, Supervised]:
    if body.method is None:
        return "sft", body.hyperparameters or Supervised()
    if body.hyperparameters is not None:
        raise BadParameter(
            "hyperparameters", "hyperparameters and method are given; write the hyperparameters into the method"
        )
    method = body.method
    if method.type == "reinforcement":
        raise unsupported("method.type", "reinforcement is not carried out; use supervised or dpo")
    for other in {"supervised", "dpo", "reinforcement"} - {method.type}:
        if getattr(method, other) is not None:
            raise BadParameter(f"method.{other}", f"method.type is {method.type}; leave method.{other} out")
    options = method.dpo if method.type == "dpo" else method.supervised
    default = Dpo() if method.type == "dpo" else Supervised()
    return _METHODS[method.type], (options.hyperparameters if options is not None else None) or default


def _extra_of(body: JobBody) -> dict[str, Any]:
    for name in _NOT_EXTRA:
        if name in body.horizon:
            raise BadParameter(
                f"horizon.{name}", f"horizon.{name} is not for the field horizon; the request has its own"
            )
    return dict(body.horizon)


def _mapping(given: Any) -> Mapping[str, Any]:
    if not isinstance(given, dict):
        raise BadParameter("horizon.train", "horizon.train must be an object")
    return given


def _auto_epochs(num_examples: int) -> int:
    if num_examples * _EPOCHS < _FEW_EXAMPLES:
        return min(_MOST_EPOCHS, max(1, _FEW_EXAMPLES // num_examples))
    if num_examples * _EPOCHS > _MANY_EXAMPLES:
        return max(1, _MANY_EXAMPLES // num_examples)
    return _EPOCHS


def _learning_rate(train: Mapping[str, Any]) -> float:
    trainable = train.get("trainable")
    return LORA_LEARNING_RATE if trainable in (*LORA, LORA, list(LORA)) else LEARNING_RATE


def _rounded(product: float) -> float:
    """Return a product of what people write as they would write it."""
    return float(f"{product:.12g}")


def _suffix(suffix: str | None) -> str:
    if not suffix:
        return UNNAMED
    if not NAME_PATTERN.fullmatch(suffix):
        raise BadParameter("suffix", f"Invalid value for 'suffix': {suffix!r:.80}; it must be {NAME_RULE}")
    return suffix
