"""What may be called in a session, before the call is kept."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from horizon_formats.checks import UNTRAINED
from horizon_server.errors import FieldViolation, InvalidData, InvalidSpec
from horizon_server.records.sample import check_sample
from horizon_server.records.session import (
    Call,
    Datum,
    Forward,
    ForwardBackward,
    LoadState,
    OptimStep,
    Sample,
    SaveState,
)
from horizon_server.spec import NAME_PATTERN, NAME_RULE, JobSpec

MAX_DATA = 16_384
"""Documents of a call."""
_SHOWN = 20
"""Violations of one answer."""
_LARGEST_TOKEN = 2**31 - 1

_INPUTS: Mapping[str, Sequence[str]] = {
    "cross_entropy": ("weights",),
    "importance_sampling": ("logprobs", "advantages"),
    "ppo": ("logprobs", "advantages"),
    "cispo": ("logprobs", "advantages"),
    "dro": ("logprobs", "advantages"),
}
"""What each loss takes of a datum; all but weights must be given."""
LOSSES = tuple(_INPUTS)
_OPTIONS: Mapping[str, Sequence[str]] = {
    "ppo": ("clip_low_threshold", "clip_high_threshold"),
    "cispo": ("clip_low_threshold", "clip_high_threshold"),
    "dro": ("beta",),
}


def check_call(call: Call, spec: JobSpec) -> None:
    """Refuse what a session of this spec cannot do, as far as the model is not needed to know.

    Raises:
        InvalidData: for data, with one violation for each field.
        InvalidSpec: for other fields.
    """
    match call:
        case Forward() | ForwardBackward():
            found = [*_problems_of_loss(call), *_problems_of_data(call, spec)]
            if found:
                field, problem = found[0]
                more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
                violations = [FieldViolation(field=name, description=f"{name} {what}") for name, what in found[:_SHOWN]]
                raise InvalidData(f"{field} {problem}{more}", violations=violations)
        case OptimStep():
            _check_step(call)
        case SaveState():
            if NAME_PATTERN.fullmatch(call.name) is None:
                raise InvalidSpec.of("name", f"name is {call.name!r:.80}; it must be {NAME_RULE}")
        case LoadState():
            if "@" not in call.checkpoint:
                raise InvalidSpec.of("checkpoint", f"checkpoint is {call.checkpoint!r:.80}; it must be JOB@STEP")
        case Sample():
            check_sample(call.prompts, call.options)


def _problems_of_loss(call: Forward | ForwardBackward) -> Iterator[tuple[str, str]]:
    allowed = _OPTIONS.get(call.loss, ())
    for name, value in call.options.items():
        if name not in allowed:
            yield f"options.{name}", f"is no option of loss {call.loss}; it has: {', '.join(allowed) or 'none'}"
        elif not (math.isfinite(value) and value >= 0):
            yield f"options.{name}", f"is {value:g}; it must be 0 or more"


def _problems_of_data(call: Forward | ForwardBackward, spec: JobSpec) -> Iterator[tuple[str, str]]:
    if not 1 <= len(call.data) <= MAX_DATA:
        yield "data", f"has {len(call.data)} documents; it must have 1 to {MAX_DATA}"
        return
    num_tokens = sum(len(datum.tokens) for datum in call.data)
    if num_tokens > spec.train.tokens_per_step:
        yield (
            "data",
            f"has {num_tokens} tokens, and the session was planned for {spec.train.tokens_per_step} in a call "
            "(train.tokens_per_step); divide it into several calls, whose gradients add up",
        )
    if all(target == UNTRAINED for datum in call.data for target in datum.targets):
        yield "data", f"has no target; at least one of all targets must be a token, not {UNTRAINED}"
    for index, datum in enumerate(call.data):
        for name, problem in _problems_of_datum(datum, call.loss, spec):
            yield f"data[{index}].{name}", problem


def _problems_of_datum(datum: Datum, loss: str, spec: JobSpec) -> Iterator[tuple[str, str]]:
    length, longest = len(datum.tokens), spec.train.sequence_length
    if not 1 <= length <= longest:
        yield "tokens", f"has {length} tokens; it must have 1 to {longest} (train.sequence_length)"
    for name, numbers in (("tokens", datum.tokens), ("targets", datum.targets)):
        # A number such as 5.5 would be cut to another token.
        if any(type(number) is not int for number in numbers):
            yield name, "has a number that is not a whole one"
            return
    if any(not 0 <= token <= _LARGEST_TOKEN for token in datum.tokens):
        yield "tokens", "has a number below 0, or beyond every vocabulary"
    if any(target != UNTRAINED and not 0 <= target <= _LARGEST_TOKEN for target in datum.targets):
        yield "targets", f"has a number that is neither a token nor {UNTRAINED}"
    given = {"targets": datum.targets, "weights": datum.weights}
    given |= {"logprobs": datum.logprobs, "advantages": datum.advantages}
    for name, values in given.items():
        takes = name == "targets" or name in _INPUTS[loss]
        if values and not takes:
            yield name, f"is for other losses than {loss}; leave it out"
        elif len(values) != length and (values or name != "weights") and takes:
            yield name, f"has {len(values)} numbers for {length} tokens; it needs one for each"
        elif not all(map(math.isfinite, values)):
            yield name, "has a number that is not finite"


def _check_step(call: OptimStep) -> None:
    allowed = {
        "learning_rate": (0 <= call.learning_rate <= 10, "from 0 to 10"),
        "beta1": (0 <= call.beta1 < 1, "from 0 to below 1"),
        "beta2": (0 <= call.beta2 < 1, "from 0 to below 1"),
        "eps": (0 < call.eps <= 1, "above 0 and at most 1"),
        "weight_decay": (0 <= call.weight_decay <= 10, "from 0 to 10"),
        "max_grad_norm": (0 <= call.max_grad_norm < math.inf, "0 for no clipping, or above 0"),
    }
    wrong = {
        name: f"{name} is {getattr(call, name):g}; it must be {rule}"
        for name, (is_so, rule) in allowed.items()
        if not is_so
    }
    if wrong:
        violations = [FieldViolation(field=name, description=text) for name, text in wrong.items()]
        raise InvalidSpec(next(iter(wrong.values())), violations=violations)
