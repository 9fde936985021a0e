"""Sessions: training loops on the laptop, the model on the node.

`AsyncClient.session` and `Client.session` open one. Every method returns a future as soon as the node has the call, so
that the next one can be sent while the node computes; the futures' results come in the order of the calls. A call that
the node has is not lost, whatever is killed, and the program may attach to the session again with its id.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar, cast

from horizon_client.connection import Connection
from horizon_client.conversion import from_message
from horizon_client.errors import InvalidRequest, ServerFailed
from horizon_client.event_loop import LoopThread
from horizon_client.job_spec_types import JobSpec
from horizon_client.jobs import AsyncJobs
from horizon_client.prompts import Prompt, wire_prompts
from horizon_client.reporter import Reporter
from horizon_client.resources import Job, SessionAnswers, SessionSampled, SessionStepped
from horizon_client.rpc_errors import BY_REASON
from horizon_proto.v1 import session_pb2

if TYPE_CHECKING:
    from typing_extensions import Self

ResultT = TypeVar("ResultT")

UNTRAINED = -100
"""A target that is not predicted."""
_WAIT_S = 30.0

Datum: TypeAlias = Mapping[str, Sequence[float]]
"""A document: its `tokens`, and position by position `targets` (without them the next token each, the last one none),
`weights`, `logprobs` and `advantages`, as far as the loss takes them."""


@dataclass(frozen=True, kw_only=True)
class Computed:
    """What a forward pass found.

    `loss` is a sum over all targets. `logprobs` has for each document one number for each of its tokens: the
    log-probability of the target there, 0 where nothing is predicted.
    """

    loss: float
    logprobs: tuple[tuple[float, ...], ...] = field(repr=False)
    figures: Mapping[str, float]


class SessionFuture(Generic[ResultT]):
    """A call that the node has. `await` it, or `await future.result()`, for what it answers; as often as you like.

    Raises:
        HorizonClientError: when the call was refused; it has changed nothing then.
    """

    def __init__(self, session: AsyncSession, number: int, convert: Callable[[Any], ResultT]) -> None:
        self.number = number
        """The call's number in the session, from 1."""
        self._session, self._convert = session, convert
        self._task: asyncio.Task[ResultT] | None = None

    async def result(self) -> ResultT:
        """Return what the call answers, once it is done."""
        if self._task is None:
            self._task = asyncio.ensure_future(self._session.wait(self.number, self._convert))
        # One caller that gives up does not take the answer from the others.
        return await asyncio.shield(self._task)

    def __await__(self) -> Any:
        return self.result().__await__()


class AsyncSession:
    """A session, as `async with client.session(...) as session`. Leaving the block closes it; leaving it by an error
    keeps it, and `client.session(attach=ID)` continues it.

    Thread: belongs to one event loop. Calls are sent one after the other, in the order in which they are made.
    """

    def __init__(
        self, connection: Connection, jobs: AsyncJobs, spec: JobSpec, *, attach: str, reporter: Reporter
    ) -> None:
        self._connection, self._jobs, self._spec = connection, jobs, spec
        self._attach, self._reporter = attach, reporter
        self._job: Job | None = None
        self._last = 0
        self._sending = asyncio.Lock()
        self._open: dict[int, SessionFuture[Any]] = {}

    @property
    def job(self) -> Job:
        """The session's job, as it was when it was opened."""
        if self._job is None:
            raise RuntimeError("the session is not open yet; use it as: async with client.session(...) as session")
        return self._job

    async def open(self) -> Self:
        """Submit the session, or attach to one that is there."""
        if self._attach:
            self._job = await self._jobs.get(self._attach)
        else:
            self._job = await self._jobs.submit(self._spec, reporter=self._reporter)
        answer = await self._ask(0, 0.0)
        self._last = answer.last_number
        return self

    async def forward(
        self, data: Sequence[Datum], *, loss: str = "cross_entropy", **options: float
    ) -> SessionFuture[Computed]:
        """Compute the log-probabilities of all targets, and the loss; nothing changes.

        `loss` is cross_entropy, importance_sampling, ppo, cispo or dro; `options` are the loss's (docs/sessions.md).
        """
        call = session_pb2.SessionForward(data=_data(data), loss=loss, options=options)
        return await self._call("forward", call, _computed)

    async def forward_backward(
        self, data: Sequence[Datum], *, loss: str = "cross_entropy", **options: float
    ) -> SessionFuture[Computed]:
        """As `forward`, and add the gradient to those since the last `optim_step`."""
        call = session_pb2.SessionForward(data=_data(data), loss=loss, options=options)
        return await self._call("forward_backward", call, _computed)

    async def optim_step(
        self,
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
    ) -> SessionFuture[SessionStepped]:
        """Make one step of AdamW with the gradients since the last one. Their norm is clipped to `max_grad_norm`, where
        that is above 0."""
        call = session_pb2.SessionOptimStep(
            learning_rate=lr,
            beta1=betas[0],
            beta2=betas[1],
            eps=eps,
            weight_decay=weight_decay,
            max_grad_norm=max_grad_norm,
        )
        return await self._call("optim_step", call, lambda found: from_message(SessionStepped, found))

    async def sample(
        self,
        prompts: Prompt | Sequence[Prompt | Sequence[int]],
        *,
        max_tokens: int = 256,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int = 0,
        num_samples: int = 1,
        stop: Sequence[str] = (),
        prompt_logprobs: bool = False,
    ) -> SessionFuture[tuple[SessionAnswers, ...]]:
        """Have the model answer prompts with the weights as they are; the answers' tokens have log-probabilities.

        A prompt is a text to continue, a chat, or tokens. `num_samples` are the answers to each.
        """
        call = session_pb2.SessionSample(
            prompts=wire_prompts(prompts),
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
            num_samples=num_samples,
            stop=stop,
            logprobs=0,
            prompt_logprobs=0 if prompt_logprobs else None,
        )
        return await self._call("sample", call, lambda found: from_message(SessionSampled, found).prompts)

    async def save_state(self, name: str) -> SessionFuture[str]:
        """Write a checkpoint, which stays until it is deleted; the result is JOB@STEP."""
        return await self._call("save_state", session_pb2.SessionSaveState(name=name), lambda found: found.checkpoint)

    async def load_state(self, checkpoint: str, *, optimizer: bool = True) -> SessionFuture[int]:
        """Take the weights of a checkpoint, JOB@STEP, and the optimizer's state with them; the result counts the
        changes of the session's weights."""
        call = session_pb2.SessionLoadState(checkpoint=checkpoint, optimizer=optimizer)
        return await self._call("load_state", call, lambda found: found.step)

    async def close(self) -> None:
        """End the session with a last checkpoint, once all calls are done. Raises what a call was refused for whose
        result nobody has asked for."""
        closed = await self._call("close", session_pb2.SessionClose(), lambda _: None)
        unasked = [future for future in self._open.values() if future is not closed]
        await closed.result()
        for future in unasked:
            await future.result()

    async def wait(self, number: int, convert: Callable[[Any], ResultT]) -> ResultT:
        """Return what a call has answered, once it is done. Raises what it was refused for."""
        waited_s = 0.0
        while True:
            answer = await self._ask(number, _WAIT_S)
            which = answer.WhichOneof("result")
            if which is None:
                waited_s += _WAIT_S
                job = await self._jobs.get(self.job.job_id)
                why = job.outlook.why if job.outlook is not None else job.message
                self._reporter.notice(f"call {number} waits for {waited_s:.0f} s: session {job.state}; {why}")
                continue
            self._open.pop(number, None)
            found = getattr(answer, which)
            if which == "failed":
                raise BY_REASON.get(found.reason, ServerFailed)(found.message, reason=found.reason)
            return convert(found)

    async def _call(self, name: str, call: Any, convert: Callable[[Any], ResultT]) -> SessionFuture[ResultT]:
        job_id = self.job.job_id
        async with self._sending:
            number = self._last + 1
            request = session_pb2.CallSessionRequest(job_id=job_id, number=number, **{name: call})
            await self._connection.unary(self._connection.calls.sessions.CallSession, request)
            self._last = number
        future = SessionFuture(self, number, convert)
        self._open[number] = future
        return future

    async def _ask(self, number: int, wait_s: float) -> session_pb2.GetSessionResultResponse:
        request = session_pb2.GetSessionResultRequest(job_id=self.job.job_id, number=number, wait_s=wait_s)
        call = self._connection.calls.sessions.GetSessionResult
        return await self._connection.unary(call, request, deadline_s=wait_s + 30.0)

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            await self.close()


class Future(Generic[ResultT]):
    """A call that the node has, of a blocking `Session`."""

    def __init__(self, inner: SessionFuture[ResultT], loop: LoopThread) -> None:
        self._inner, self._loop = inner, loop
        self.number = inner.number
        """The call's number in the session, from 1."""

    def result(self) -> ResultT:
        """Return what the call answers, once it is done; as often as you like.

        Raises:
            HorizonClientError: when the call was refused; it has changed nothing then.
        """
        return self._loop.run(self._inner.result)


class Session:
    """A session, as `with client.session(...) as session`. Leaving the block closes it; leaving it by an error keeps it
    there, and `client.session(attach=ID)` continues it.

    Its methods are those of `AsyncSession`, whose docstrings say what they do. Thread: may be shared by threads.
    """

    def __init__(self, inner: AsyncSession, loop: LoopThread) -> None:
        self._inner, self._loop = inner, loop

    @property
    def job(self) -> Job:
        """The session's job, as it was when it was opened."""
        return self._inner.job

    def forward(self, data: Sequence[Datum], *, loss: str = "cross_entropy", **options: float) -> Future[Computed]:
        """See `AsyncSession.forward`."""
        return self._future(lambda: self._inner.forward(data, loss=loss, **options))

    def forward_backward(
        self, data: Sequence[Datum], *, loss: str = "cross_entropy", **options: float
    ) -> Future[Computed]:
        """See `AsyncSession.forward_backward`."""
        return self._future(lambda: self._inner.forward_backward(data, loss=loss, **options))

    def optim_step(
        self,
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
    ) -> Future[SessionStepped]:
        """See `AsyncSession.optim_step`."""
        return self._future(
            lambda: self._inner.optim_step(
                lr, betas=betas, eps=eps, weight_decay=weight_decay, max_grad_norm=max_grad_norm
            )
        )

    def sample(
        self,
        prompts: Prompt | Sequence[Prompt | Sequence[int]],
        *,
        max_tokens: int = 256,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int = 0,
        num_samples: int = 1,
        stop: Sequence[str] = (),
        prompt_logprobs: bool = False,
    ) -> Future[tuple[SessionAnswers, ...]]:
        """See `AsyncSession.sample`."""
        return self._future(
            lambda: self._inner.sample(
                prompts,
                max_tokens=max_tokens,
                temperature=temperature,
                top_p=top_p,
                top_k=top_k,
                seed=seed,
                num_samples=num_samples,
                stop=stop,
                prompt_logprobs=prompt_logprobs,
            )
        )

    def save_state(self, name: str) -> Future[str]:
        """See `AsyncSession.save_state`."""
        return self._future(lambda: self._inner.save_state(name))

    def load_state(self, checkpoint: str, *, optimizer: bool = True) -> Future[int]:
        """See `AsyncSession.load_state`."""
        return self._future(lambda: self._inner.load_state(checkpoint, optimizer=optimizer))

    def close(self) -> None:
        """See `AsyncSession.close`."""
        self._loop.run(self._inner.close)

    def _future(self, send: Callable[[], Coroutine[Any, Any, SessionFuture[ResultT]]]) -> Future[ResultT]:
        return Future(self._loop.run(send), self._loop)

    def __enter__(self) -> Session:
        self._loop.run(self._inner.open)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()


def session_spec(
    model: str,
    *,
    name: str,
    lora: Mapping[str, Any] | None,
    max_tokens: int,
    max_tokens_per_call: int,
    idle_minutes: float,
    spec: Mapping[str, Any],
) -> JobSpec:
    """Return the job spec of a session; what `spec` gives is not overwritten."""
    made: dict[str, Any] = {"name": name, "model": model, **spec, "method": "session"}
    train = dict(made.get("train") or {})
    train.setdefault("sequence_length", max_tokens)
    train.setdefault("tokens_per_step", max_tokens_per_call)
    if lora is not None:
        train.setdefault("trainable", "lora")
        train.setdefault("lora", dict(lora))
    made["train"] = train
    made.setdefault("session", {"idle_minutes": idle_minutes})
    return cast("JobSpec", made)


def _data(data: Sequence[Datum]) -> list[session_pb2.SessionDatum]:
    return [_datum(index, datum) for index, datum in enumerate(data)]


def _datum(index: int, datum: Datum) -> session_pb2.SessionDatum:
    known = set(session_pb2.SessionDatum.DESCRIPTOR.fields_by_name)
    if unknown := sorted(set(datum) - known):
        field = f"data[{index}].{unknown[0]}"
        raise InvalidRequest.of(field, f"{field} is not known; a document has {', '.join(sorted(known))}")
    if "tokens" not in datum:
        raise InvalidRequest.of(f"data[{index}].tokens", f"data[{index}].tokens is missing; it is the document")
    given: dict[str, Any] = dict(datum)
    given.setdefault("targets", [*datum["tokens"][1:], UNTRAINED])
    try:
        return session_pb2.SessionDatum(**given)
    except (TypeError, ValueError) as error:
        field = f"data[{index}]"
        raise InvalidRequest.of(field, f"{field} has something that is no number of its kind: {error}") from error


def _computed(found: Any) -> Computed:
    logprobs = tuple(tuple(numbers.values) for numbers in found.logprobs)
    return Computed(loss=found.loss, logprobs=logprobs, figures=dict(found.figures))
