"""The job spec: what a user may ask for, with its defaults and its limits.

One parser, `parse_job_spec`, turns a plain mapping (YAML, JSON, or the wire converted in `api.grpc.wire_spec`) into a frozen `JobSpec` and
refuses unknown keys, wrong types and values out of range, naming every offending field at once. Knows no wire and no database.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, get_args

from horizon_server.errors import FieldViolation, InvalidSpec

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
NAME_RULE = "1 to 63 letters, digits, '.', '_' or '-', starting with a letter or digit"

Method = Literal["sft", "pretrain"]
Packing = Literal["auto", "true", "false"]
LrSchedule = Literal["constant", "linear", "cosine"]
TrainOn = Literal["assistant", "last-assistant", "all"]
DeviceChoice = Literal["auto", "cuda", "host"]
Decay = Literal["trainer", "matrices", "all"]
CheckpointDtype = Literal["source", "bf16", "fp16", "fp32"]


@dataclass(frozen=True, kw_only=True)
class TrainSpec:
    """The numbers of the training itself. Exactly one of `epochs` and `max_steps` is set."""

    epochs: float | None = None
    max_steps: int | None = None
    sequence_length: int = 1024
    tokens_per_step: int = 16384
    packing: Packing = "auto"
    learning_rate: float = 1e-5
    lr_schedule: LrSchedule = "cosine"
    warmup_steps: int = 10
    weight_decay: float = 0.0
    decay: Decay = "trainer"
    """What `weight_decay` applies to: all but biases and norms, as the Hugging Face Trainer; matrices but no embedding; or all."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    max_grad_norm: float | None = 1.0
    """None turns clipping off."""
    seed: int = 0
    train_on: TrainOn = "assistant"
    max_skipped_steps: int = 10
    """After so many skipped steps in a row the job fails with reason DIVERGED."""


@dataclass(frozen=True, kw_only=True)
class CheckpointSpec:
    """When checkpoints are written and which are kept. `every_steps` 0 writes one at the end only."""

    every_steps: int = 500
    keep_last: int = 2
    keep_best: bool = True
    dtype: CheckpointDtype = "source"
    """Number format of the exported weights: each tensor's own in the source, or one for all."""


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """One fine-tuning job as asked for, every default filled in."""

    name: str
    model: str
    dataset: str
    project: str = ""
    """Empty means the user's own project."""
    eval_dataset: str | None = None
    method: Method = "sft"
    train: TrainSpec = field(default_factory=TrainSpec)
    eval_every_steps: int = 0
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)
    priority: int = 0
    device: DeviceChoice = "auto"
    eval_fraction: float = 0.0
    """Share of the dataset's rows held out for evaluation, chosen by each row's hash. 0 is none; not together with `eval_dataset`."""

    def to_mapping(self) -> dict[str, Any]:
        """Return plain data that `parse_job_spec` turns back into an equal spec."""
        plain = dataclasses.asdict(self)
        plain["train"]["betas"] = list(self.train.betas)
        return plain


Check = Callable[[Any], "str | None"]


def _choice(*allowed: str) -> Check:
    def check(value: Any) -> str | None:
        return None if value in allowed and isinstance(value, str) else f"must be one of {', '.join(allowed)}"

    return check


def _whole(low: int, high: int) -> Check:
    def check(value: Any) -> str | None:
        fine = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
        return None if fine else f"must be a whole number from {low} to {high}"

    return check


def _number(low: float, high: float, *, open_low: bool = False) -> Check:
    def check(value: Any) -> str | None:
        fine = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if fine and (low < value if open_low else low <= value) and value <= high:
            return None
        return f"must be a number {'above' if open_low else 'from'} {low:g} {'and up' if open_low else ''} to {high:g}".replace(
            "  ", " "
        )

    return check


def _fraction(value: Any) -> str | None:
    fine = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1
    return None if fine else "must be a number from 0 to below 1"


def _optional(inner: Check) -> Check:
    def check(value: Any) -> str | None:
        problem = None if value is None else inner(value)
        return f"{problem}, or null" if problem else None

    return check


def _truth(value: Any) -> str | None:
    return None if isinstance(value, bool) else "must be true or false"


def _name(value: Any) -> str | None:
    return None if isinstance(value, str) and NAME_PATTERN.fullmatch(value) else f"must be {NAME_RULE}"


def _name_or_empty(value: Any) -> str | None:
    return None if value == "" else _name(value)


def _model(value: Any) -> str | None:
    if isinstance(value, str) and value.startswith("/") and len(value) <= 4096 and "\0" not in value:
        return None
    return _name(value) and f"must be the name of a pushed model ({NAME_RULE}) or an absolute folder on the node"


def _betas(value: Any) -> str | None:
    fine = isinstance(value, list | tuple) and len(value) == 2
    if fine and all(isinstance(b, int | float) and not isinstance(b, bool) and 0 <= b < 1 for b in value):
        return None
    return "must be two numbers, each from 0 to below 1"


_TRAIN: Mapping[str, Check] = MappingProxyType(
    {
        "epochs": _optional(_number(0, 10_000, open_low=True)),
        "max_steps": _optional(_whole(1, 100_000_000)),
        "sequence_length": _whole(8, 1_048_576),
        "tokens_per_step": _whole(8, 67_108_864),
        "packing": _choice(*get_args(Packing)),
        "learning_rate": _number(0, 10),
        "lr_schedule": _choice(*get_args(LrSchedule)),
        "warmup_steps": _whole(0, 100_000_000),
        "weight_decay": _number(0, 10),
        "decay": _choice(*get_args(Decay)),
        "betas": _betas,
        "eps": _number(0, 1, open_low=True),
        "max_grad_norm": _optional(_number(0, 1e9, open_low=True)),
        "seed": _whole(0, 2**63 - 1),
        "train_on": _choice(*get_args(TrainOn)),
        "max_skipped_steps": _whole(1, 100_000_000),
    }
)
_CHECKPOINT: Mapping[str, Check] = MappingProxyType(
    {
        "every_steps": _whole(0, 100_000_000),
        "keep_last": _whole(1, 1000),
        "keep_best": _truth,
        "dtype": _choice(*get_args(CheckpointDtype)),
    }
)
_JOB: Mapping[str, Check] = MappingProxyType(
    {
        "name": _name,
        "project": _name_or_empty,
        "model": _model,
        "dataset": _name,
        "eval_dataset": _optional(_name),
        "method": _choice(*get_args(Method)),
        "eval_every_steps": _whole(0, 100_000_000),
        "priority": _whole(-100, 100),
        "device": _choice(*get_args(DeviceChoice)),
        "eval_fraction": _fraction,
    }
)


def parse_job_spec(plain: object) -> JobSpec:
    """Return the spec that `plain` (a mapping of plain data) asks for, with every default filled in.

    Raises:
        InvalidSpec: with one violation per offending field, its path, its value and what is allowed.
    """
    violations: list[FieldViolation] = []
    if not isinstance(plain, Mapping):
        raise InvalidSpec(
            f"the job spec must be a mapping of fields such as name, model and dataset, not {type(plain).__name__}"
        )
    top = dict(plain)
    train = _section(_take_section(top, "train", violations), _TRAIN, "train.", violations)
    checkpoint = _section(_take_section(top, "checkpoint", violations), _CHECKPOINT, "checkpoint.", violations)
    job = _section(top, _JOB, "", violations, sections=("train", "checkpoint"))
    violations += [
        FieldViolation(field=name, description=f"{name} is required")
        for name in ("name", "model", "dataset")
        if name not in top
    ]
    violations += _contradictions(train, job)
    if violations:
        raise InvalidSpec(_sentence(violations), violations=violations)
    if train.get("epochs") is None and train.get("max_steps") is None:
        train["epochs"] = 1.0
    if "betas" in train:
        train["betas"] = tuple(float(b) for b in train["betas"])
    for name in ("epochs", "learning_rate", "weight_decay", "eps", "max_grad_norm"):
        if isinstance(train.get(name), int):
            train[name] = float(train[name])
    if "eval_fraction" in job:
        job["eval_fraction"] = float(job["eval_fraction"])
    return JobSpec(**job, train=TrainSpec(**train), checkpoint=CheckpointSpec(**checkpoint))


def _contradictions(train: Mapping[str, Any], job: Mapping[str, Any]) -> Iterator[FieldViolation]:
    if train.get("epochs") is not None and train.get("max_steps") is not None:
        text = "train.max_steps and train.epochs exclude each other; keep one"
        yield FieldViolation(field="train.max_steps", description=text)
    if job.get("eval_dataset") is not None and job.get("eval_fraction", 0) != 0:
        text = "eval_fraction and eval_dataset exclude each other; keep one"
        yield FieldViolation(field="eval_fraction", description=text)


def _take_section(top: dict[str, Any], name: str, violations: list[FieldViolation]) -> dict[str, Any]:
    section = top.pop(name, None)
    if section is None:
        return {}
    if isinstance(section, Mapping):
        return dict(section)
    violations.append(FieldViolation(field=name, description=f"{name} must be a mapping, not {section!r:.40}"))
    return {}


def _section(
    given: dict[str, Any],
    checks: Mapping[str, Check],
    prefix: str,
    violations: list[FieldViolation],
    sections: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Return the checked fields of one section; add a violation for each that is unknown or wrong."""
    if isinstance(given.get("packing"), bool) and "packing" in checks:
        given["packing"] = str(given["packing"]).lower()  # YAML reads true and false as booleans
    for name, value in given.items():
        path = f"{prefix}{name}"
        check = checks.get(str(name))
        if check is None:
            known = ", ".join((*checks, *sections))
            violations.append(
                FieldViolation(field=path, description=f"{path} is not a field of the job spec; known here: {known}")
            )
        elif problem := check(value):
            violations.append(FieldViolation(field=path, description=f"{path} is {value!r:.60}; it {problem}"))
    return {name: value for name, value in given.items() if name in checks}


def _sentence(violations: list[FieldViolation]) -> str:
    more = f" (and {len(violations) - 1} more)" if len(violations) > 1 else ""
    return f"{violations[0].description}{more}"
