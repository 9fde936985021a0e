"""A session: a job whose steps come as calls, one after the other, instead of from a data file. What may be called,
and what each call answers.

The daemon numbers the calls of a session from 1 and keeps each in a file until a checkpoint has what it did, so that
whatever is killed, the session continues to the bit. Free of torch, as the daemon imports it.

Units: a loss is a sum over tokens, never a mean: a step over several calls is their sum, and a caller who wants a mean
divides the weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from horizon_server.errors import FieldViolation
from horizon_server.records.sample import SampleOptions, SamplePrompt

Loss = Literal["cross_entropy", "importance_sampling", "ppo", "cispo", "dro"]


@dataclass(frozen=True, kw_only=True)
class Datum:
    """A document and what is to be learned from it, position by position: all lists have one length.

    `targets[t]` is the token that should follow `tokens[t]`, or -100 where nothing is predicted (`UNTRAINED`); it need
    not be `tokens[t + 1]`. `weights` are for cross_entropy, which without them weighs every target 1; `logprobs`, those
    that the targets were sampled with, and `advantages` for the others. What is not given is empty.
    """

    tokens: tuple[int, ...]
    targets: tuple[int, ...]
    weights: tuple[float, ...] = ()
    logprobs: tuple[float, ...] = ()
    advantages: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Forward:
    """Compute the log-probabilities of all targets, and the loss; nothing changes."""

    data: tuple[Datum, ...]
    loss: Loss = "cross_entropy"
    options: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ForwardBackward:
    """As `Forward`, and add the loss's gradient to those of the calls since the last `OptimStep`."""

    data: tuple[Datum, ...]
    loss: Loss = "cross_entropy"
    options: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class OptimStep:
    """One step of AdamW with the gradients that were added up, which are zero again after it. The gradients' norm is
    clipped to `max_grad_norm` where that is above 0."""

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SaveState:
    """Write a checkpoint, which stays until it is deleted, and give it a name. `taken` says what is done where another
    checkpoint has the name: both have it then, the call is refused, or the other one loses it."""

    name: str
    taken: Literal["shared", "refused", "moved"] = "shared"


@dataclass(frozen=True, kw_only=True)
class LoadState:
    """Take the weights of a checkpoint, of this session or of another job of the same model and adapters, and with
    `optimizer` the moments and their step. `checkpoint` is JOB@STEP, with the job's id. Gradients are zero after it."""

    checkpoint: str
    optimizer: bool


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Answer prompts with the weights as they are; with `at_step` only while they are those after that many changes,
    else the call fails as one for something that is not there."""

    prompts: tuple[SamplePrompt, ...]
    options: SampleOptions = SampleOptions()
    at_step: int | None = None


@dataclass(frozen=True, kw_only=True)
class Close:
    """End the session: write its last checkpoint."""


Call = Forward | ForwardBackward | OptimStep | SaveState | LoadState | Sample | Close

CALLS: dict[str, type[Call]] = {
    "forward": Forward,
    "forward_backward": ForwardBackward,
    "optim_step": OptimStep,
    "save_state": SaveState,
    "load_state": LoadState,
    "sample": Sample,
    "close": Close,
}
"""By their names on the wire and in files."""


@dataclass(frozen=True, kw_only=True)
class Computed:
    """What a forward pass found: the loss, the log-probability of each target (0 where nothing is predicted), and what
    the loss reports besides."""

    loss: float
    logprobs: tuple[tuple[float, ...], ...]
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Stepped:
    """A step of the optimizer. `skipped` says why the weights are as they were: a gradient was not finite."""

    step: int
    grad_norm: float
    skipped: str = ""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """The checkpoint that has the state: JOB@STEP."""

    checkpoint: str


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """The session has the weights of the checkpoint; `step` counts every change of its weights, this one included."""

    step: int


@dataclass(frozen=True, kw_only=True)
class SampledAnswer:
    """One answer: its tokens with their log-probabilities, where they were asked for, and why it is complete."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    ended: Literal["stop", "length"]
    text: str = ""
    """Without the token or text that ended it."""


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """The answers to each prompt, `SampleOptions.num_samples` of them, with its tokens, and the log-probabilities of
    these where they were asked for; the first one has none."""

    answers: tuple[tuple[SampledAnswer, ...], ...]
    prompt_tokens: tuple[tuple[int, ...], ...]
    prompt_logprobs: tuple[tuple[float | None, ...], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Closed:
    """The session has ended."""


@dataclass(frozen=True, kw_only=True)
class CallFailed:
    """The call was refused, and has changed nothing. `reason` is a name of the table of errors."""

    reason: str
    message: str
    violations: tuple[FieldViolation, ...] = ()


Result = Computed | Stepped | Saved | Loaded | Sampled | Closed | CallFailed

RESULTS: dict[str, type[Result]] = {
    "computed": Computed,
    "stepped": Stepped,
    "saved": Saved,
    "loaded": Loaded,
    "sampled": Sampled,
    "closed": Closed,
    "failed": CallFailed,
}
"""By their names on the wire and in files."""

_NAMES = {kind: name for name, kind in (*CALLS.items(), *RESULTS.items())}


def name_of(record: Call | Result) -> str:
    """Return the name of what a record is."""
    return _NAMES[type(record)]
