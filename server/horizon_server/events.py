"""What happens to a job, as data: one vocabulary from the worker's pipe to the database, the watch stream and the
metrics.

A worker writes events as JSON lines; the daemon numbers and stores them. Payload names are those that notebooks know
(loss, grad_norm, learning_rate, num_input_tokens_seen). Knows neither the wire nor the database.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from horizon_server.codec import from_plain, to_plain
from horizon_server.errors import WorkerFailed
from horizon_server.figures import EvalFigures, EvalSetFigures, Metric, StepFigures

# Up to an hour: with 12 bytes per parameter, the checkpoint of a model of 70 B is 840 GB.
_WRITING_BUCKETS_S = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 3600.0)


@dataclass(frozen=True, kw_only=True)
class StateChanged:
    """The job's state changed. `reason` is stable, `message` is for people."""

    job_state: str
    reason: str = ""
    message: str = ""
    attempt: int = 0


@dataclass(frozen=True, kw_only=True)
class StepDone(StepFigures):
    """One optimizer step is done: the engine's figures and where the job is. `epoch` counts passes over the data."""

    num_steps: int
    epoch: float
    num_input_tokens_seen: int
    tokens_per_second: Annotated[
        float, Metric("horizon_tokens_per_second", "Real tokens per second in the last step.", ("job_id",))
    ]
    eta_s: Annotated[
        float,
        Metric(
            "horizon_job_remaining_seconds", "Device time that the job still needs, from its last steps.", ("job_id",)
        ),
    ] = 0.0


@dataclass(frozen=True, kw_only=True)
class PrepareProgress:
    """Rows prepared so far; `total_rows` is 0 while unknown. `report` is filled in the last one."""

    done_rows: int
    total_rows: int = 0
    report: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class EvalAnswer:
    """An answer that the model gave to the prompt of a document of the set. Texts are cut to what is worth showing.

    `found` is the final answer in it, `expected` that of `reference`, which is the data's; None where none is looked
    for or found.
    """

    document: int
    prompt: str
    answer: str
    reference: str
    found: str | None = None
    expected: str | None = None
    matches: bool = False
    ended: str = ""


@dataclass(frozen=True, kw_only=True)
class EvalDone(EvalFigures):
    """One evaluation is done; `step` 0 is before the first step.

    The figures of the loss are those of the first set, of the queues those of all `sets` together. `judged` is what
    `eval.best_by` names.
    """

    step: int
    sets: tuple[EvalSetFigures, ...] = ()
    answers: tuple[EvalAnswer, ...] = ()
    judged: float | None = None


@dataclass(frozen=True, kw_only=True)
class CheckpointWritten:
    """A checkpoint is complete on disk under `step`."""

    step: int
    duration_s: Annotated[
        float,
        Metric("horizon_checkpoint_duration_seconds", "Duration of writing a checkpoint.", buckets=_WRITING_BUCKETS_S),
    ]
    size_bytes: int
    eval_loss: float | None = None


@dataclass(frozen=True, kw_only=True)
class Message:
    """A message for people. `level` is info, warning or error."""

    level: str
    text: str


@dataclass(frozen=True, kw_only=True)
class AttemptReady:
    """The worker has loaded everything and starts (or continues after) `step` of `num_steps`. Only on the worker's
    pipe.

    `packed_rows` are the rows that an epoch's documents were packed into.
    """

    step: int
    num_steps: int
    device: str
    packed_rows: int = 0


@dataclass(frozen=True, kw_only=True)
class TurnWanted:
    """The worker has work for the device and waits for its turn. Only on the worker's pipe."""


@dataclass(frozen=True, kw_only=True)
class TurnEnded:
    """The worker leaves the device idle from here on, and takes back a TurnWanted that was not granted. Only on the
    worker's pipe.

    `released`: it has freed its memory on the device too. An optimizer update may still run on the CPU. `began_s` and
    `ended_s` are when the worker learned of its turn and when the device became idle, in seconds of the machine's
    monotonic clock; 0 where it had no turn.
    """

    released: bool = False
    began_s: float = field(default=0.0, compare=False)
    ended_s: float = field(default=0.0, compare=False)


@dataclass(frozen=True, kw_only=True)
class MemoryReleased:
    """The worker, which has no turn, has freed its memory on the device: it was asked to, or needs it no more. Only on
    its pipe."""


@dataclass(frozen=True, kw_only=True)
class CallDone:
    """The session's call of that number has a result. Only on the worker's pipe: the result's file is what counts."""

    number: int


@dataclass(frozen=True, kw_only=True)
class WorkerProgress:
    """The worker's work has advanced since its last line. Only on its pipe."""


@dataclass(frozen=True, kw_only=True)
class ReferencesDone:
    """How much of the pass over the data before the first step is done, in earlier attempts too. Only on the worker's
    pipe."""

    done_tokens: int
    total_tokens: int


@dataclass(frozen=True, kw_only=True)
class SampledText:
    """More text of an answer to a prompt, `num_tokens` in all so far. `ended` says why it is complete (stop or length).
    Only on the pipe of the child that answers prompts.

    `tokens` are those since the last piece, which may be more than the text shows. Where they were asked for,
    `logprobs` are theirs, and `top` the likeliest tokens in the place of each with their log-probabilities, whose texts
    `top_texts` has in the same order.
    """

    prompt: int
    text: str
    num_tokens: int
    ended: str = ""
    sample: int = 0
    tokens: tuple[int, ...] = ()
    texts: tuple[str, ...] = ()
    logprobs: tuple[float, ...] = ()
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    top_texts: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, kw_only=True)
class SampledPrompt:
    """The tokens of a prompt with their texts, and where they were asked for, the log-probabilities of all but the
    first, and the likeliest tokens in the place of each of these with their texts. Only on the pipe of the child that
    answers prompts.
    """

    prompt: int
    tokens: tuple[int, ...]
    texts: tuple[str, ...]
    logprobs: tuple[float, ...] = ()
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    top_texts: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, kw_only=True)
class MergeProgress:
    """How much of a base model's weights was read. Only on the pipe of the child that merges adapters."""

    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, kw_only=True)
class EvaluationProgress:
    """How far the evaluation of a checkpoint is: rows of a set that are prepared, or steps over it that are evaluated.

    Only on the pipe of the child that evaluates a checkpoint.
    """

    phase: Literal["prepare", "evaluate"]
    set: str
    done: int
    total: int


ChildLine = SampledText | SampledPrompt | MergeProgress | EvaluationProgress
"""What children say that are no workers."""
Payload = StateChanged | StepDone | PrepareProgress | EvalDone | CheckpointWritten | Message
TurnLine = TurnWanted | TurnEnded | MemoryReleased
WorkerLine = (
    StepDone
    | PrepareProgress
    | EvalDone
    | CheckpointWritten
    | Message
    | AttemptReady
    | ReferencesDone
    | TurnLine
    | WorkerProgress
    | CallDone
    | ChildLine
)

KINDS: dict[str, type[Any]] = {
    "state": StateChanged,
    "step": StepDone,
    "prepare": PrepareProgress,
    "eval": EvalDone,
    "checkpoint": CheckpointWritten,
    "message": Message,
    "ready": AttemptReady,
    "references": ReferencesDone,
    "turn_wanted": TurnWanted,
    "turn_ended": TurnEnded,
    "memory_released": MemoryReleased,
    "progress": WorkerProgress,
    "call_done": CallDone,
    "sampled": SampledText,
    "sampled_prompt": SampledPrompt,
    "merge": MergeProgress,
    "evaluation": EvaluationProgress,
}
# Kinds that end at the daemon: they are neither stored nor sent on.
PIPE_KINDS = frozenset(
    {
        "ready",
        "references",
        "turn_wanted",
        "turn_ended",
        "memory_released",
        "progress",
        "call_done",
        "sampled",
        "sampled_prompt",
        "merge",
        "evaluation",
    }
)
_NAMES = {kind: name for name, kind in KINDS.items()}


@dataclass(frozen=True, kw_only=True)
class JobEvent:
    """One stored event of a job: `sequence` from 1 without gaps, `time_s` in Unix seconds."""

    job_id: str
    sequence: int
    time_s: float
    payload: Payload


def kind_of(payload: Payload | WorkerLine) -> str:
    """Return the short stable name of a payload's kind, as stored and as used in SSE event names."""
    return _NAMES[type(payload)]


def encode(payload: Payload | WorkerLine) -> str:
    """Return the payload as one line of JSON without a newline."""
    # With NaN and infinity, which JSON does not have but Python reads back.
    return json.dumps({"kind": kind_of(payload), **to_plain(payload)}, separators=(",", ":"))


def decode(line: str | bytes) -> Any:
    """Return the payload of one line.

    Raises:
        WorkerFailed: when the line is not an event.
    """
    try:
        plain = json.loads(line)
        return from_plain(KINDS[plain.pop("kind")], plain)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WorkerFailed(f"a child process wrote a line that is not an event: {line[:120]!r}") from error
