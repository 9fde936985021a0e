"""One attempt at a session: what the calls ask for, one after the other, instead of a data set's steps.

What a call changes is in the newest checkpoint, in memory with the weights (`store.generations`), or is done again from
the call's file: gradients that wait for their step are always computed again. So a session continues to the bit,
whatever was killed, and a result that was written is never another one.
"""

from __future__ import annotations

import json
import time
from contextlib import ExitStack, suppress
from typing import Any

from horizon_server.children.entry import EventWriter
from horizon_server.codec import from_plain, to_plain
from horizon_server.durable import remove_unfinished
from horizon_server.engine.called_trainer import CalledTrainer
from horizon_server.engine.called_trainer import Computed as Found
from horizon_server.errors import InvalidData, InvalidModel, InvalidSpec, NotFound
from horizon_server.events import AttemptReady, CallDone, Message, StepDone
from horizon_server.figures import StepFigures
from horizon_server.jobs.folders import CheckpointFolder
from horizon_server.records.job import StopRequest
from horizon_server.records.session import (
    RESULTS,
    Call,
    CallFailed,
    Close,
    Closed,
    Computed,
    Forward,
    ForwardBackward,
    Loaded,
    LoadState,
    OptimStep,
    Result,
    Sample,
    Saved,
    SaveState,
    Stepped,
    name_of,
)
from horizon_server.store.model_card import ResultFacts
from horizon_server.worker.compilation import compiled_layers
from horizon_server.worker.device_turn import DeviceTurn
from horizon_server.worker.ending import Outcome
from horizon_server.worker.host_use import host_components, process_bytes
from horizon_server.worker.result_facts import ResultRecorder
from horizon_server.worker.saving import CheckpointWriter
from horizon_server.worker.session_data import by_position, rows_of
from horizon_server.worker.session_samples import SessionSampler
from horizon_server.worker.session_states import checkpoint_folder, load_state
from horizon_server.worker.set_up import SetUp
from horizon_server.worker.training import KEPT_FIGURES
from horizon_server.worker_link.calls import CallFiles
from horizon_server.worker_link.orders import Orders
from horizon_server.worker_link.request import WorkerRequest

_GRACE_S = 0.02
"""How long the device is kept for the next call: a laptop's answer to a result often is one."""
_LOOK_S = 1.0
"""Between two looks for calls where none is told: a daemon may have ended before it told of one."""
_MOST_KEPT_CALLS = 512
"""Done again at most where a worker is killed: then there is a checkpoint."""
_MOST_KEPT_RESULTS = 1024
_REFUSALS = (InvalidData, InvalidSpec, InvalidModel, NotFound)
"""What is the caller's, and has changed nothing."""


class Session:
    """One attempt's calls. Thread: everything runs on the caller's; the engine has its own."""

    def __init__(self, request: WorkerRequest, *, events: EventWriter, orders: Orders) -> None:
        assert request.calls is not None, "a session has calls"
        self._request, self._spec = request, request.spec
        self._events, self._orders = events, orders
        self._execution = request.plan.execution
        self._files = CallFiles(request.calls)
        self._files.open()
        self._made_trainer: CalledTrainer | None = None
        self._sampler: SessionSampler | None = None
        self._turn = DeviceTurn(
            orders=orders,
            events=events,
            shared=request.turns,
            deadline_s=request.limits.deadline_s,
            release=self._release_device,
            locks=request.device_locks,
            is_host=self._execution.device_kind == "host",
        )
        self._checkpoints = CheckpointFolder(request.checkpoints, request.job_id)
        if self._checkpoints.path.is_dir():
            remove_unfinished(self._checkpoints.path)
        self._set_up = SetUp.open(request, events)
        self._results = ResultRecorder(request, None, {})
        self._writer = CheckpointWriter(
            self._checkpoints,
            self._spec.checkpoint,
            source=request.model,
            events=events,
            orders=orders,
            min_free_bytes=request.min_free_bytes,
            adapter=self._set_up.adapter,
            facts_of=self._facts_of,
        )
        self._continued = self._set_up.load(resume_from=request.resume_from, from_memory=request.resume_from_memory)
        if self._continued.refusal:
            text = f"the weights in memory cannot be continued, so they are loaded again: {self._continued.refusal}"
            events.send(Message(level="warning", text=text))
        if self._continued.state is not None and request.resume_from is not None:
            self._writer.saved = CheckpointFolder.step_of(request.resume_from)
        self._num_input_tokens_seen = 0
        self._changing = self._changed = 0
        """The newest call that has changed the weights, whose result is `_change`."""
        self._change: Result | None = None
        self._next = 1
        self._num_kept = 0
        """Calls that a worker after this one would do again."""

    def run(self) -> Outcome:
        """Do the calls that come, until the session is closed, or an order stops it."""
        if not self._prepare_device():
            return Outcome(outcome="moved" if self._orders.current is StopRequest.MOVE else "stopped")
        self._restore()
        self._events.send(AttemptReady(step=self._trainer.step, num_steps=0, device=self._set_up.device.name))
        if (unreported := self._continued.unreported) is not None:
            self._report(StepFigures(**unreported))
        while True:
            if (outcome := self._end()) is not None:
                return outcome
            call = self._files.call(self._next)
            if call is None:
                if self._files.has_result(self._next):
                    self._next += 1  # one that changed nothing, and is not kept
                else:
                    self._rest()
                continue
            if not self._turn.take():
                continue
            self._do(self._next, call)
            self._turn.boundary()
            if isinstance(call, Close):
                return Outcome(outcome="succeeded", message="closed by its user")
            self._next += 1
            self._num_kept += isinstance(call, ForwardBackward | OptimStep)
            if self._writer.is_due(self._trainer.step) or self._num_kept > _MOST_KEPT_CALLS:
                self._write(waits=False)

    def close(self) -> None:
        """Free everything; the planes' memory stays with the daemon."""
        with ExitStack() as parts:
            parts.callback(self._set_up.close)
            if self._made_trainer is not None:
                parts.callback(self._made_trainer.close)
            if self._sampler is not None:
                parts.callback(self._sampler.release_device)

    @property
    def _trainer(self) -> CalledTrainer:
        assert self._made_trainer is not None, "set up comes first"
        return self._made_trainer

    def _prepare_device(self) -> bool:
        """Have the device for the first time, and make the trainer on it. False: an order or the deadline came
        first."""
        set_up = self._set_up
        page_elements = self._request.plan.execution.expert_page_elements
        set_up.device.adopt(set_up.store, page_elements=page_elements)
        set_up.device.release_memory()
        compiled = compiled_layers(
            self._request,
            set_up.folder,
            set_up.template,
            kept=self._continued.state,
            num_steps=0,
            take_device=self._turn.take,
            events=self._events,
            orders=self._orders,
        )
        self._compiled_keys = compiled.keys
        if not self._turn.take():
            return False
        self._made_trainer = CalledTrainer(
            set_up.template,
            set_up.store,
            set_up.device,
            self._spec.train.recipe,
            self._execution,
            num_steps=1,
            compiled=compiled,
        )
        for refusal in set_up.device.refusals:
            self._events.send(Message(level="warning", text=refusal))
        if attention := self._made_trainer.attention_text:
            self._events.send(Message(level="info", text=attention))
        return True

    def _restore(self) -> None:
        kept = self._continued.state
        if kept is not None:
            before, now = kept["compute_dtype"], self._execution.compute_dtype
            if before != now:
                raise InvalidSpec(
                    f"the session was computed in {before}, and this attempt computes in {now} (train.compute_dtype), "
                    "so it cannot be continued exactly"
                )
            self._trainer.restore(kept["trainer"])
            self._num_input_tokens_seen = int(kept["num_input_tokens_seen"])
            self._changed, self._next = int(kept["call"]), int(kept["call"]) + 1
            where = ", with the weights that are in memory" if self._continued.from_memory else ""
            self._events.send(Message(level="info", text=f"continues after call {self._changed}{where}"))
            # The worker before this one may have been killed between the step and its result.
            if self._changed and not self._files.has_result(self._changed):
                self._tell(self._changed, from_plain(RESULTS[kept["change"]["kind"]], kept["change"]["result"]))
        self._keep()
        self._trainer.on_update = self._text_to_keep

    def _end(self) -> Outcome | None:
        """How the session ends now, with its last checkpoint written; None where it does not."""
        deadline_s = self._request.limits.deadline_s
        is_over = deadline_s is not None and time.time() >= deadline_s
        if self._orders.current is StopRequest.NOTHING and not is_over:
            return None
        if self._orders.current is StopRequest.MOVE:
            self._turn.give_back(release=True)
            return Outcome(outcome="moved")
        if self._orders.current is not StopRequest.CANCEL:
            self._write(waits=True)
        self._turn.give_back(release=True)
        if is_over:
            message = "ended, as limits.max_hours were over"
            return Outcome(outcome="succeeded", reason="WALL_CLOCK_LIMIT", message=message)
        return Outcome(outcome="stopped")

    def _rest(self) -> None:
        """Wait for a call, without the device after a moment."""
        self._orders.was_called = False
        if self._files.call(self._next) is not None:
            return  # it came while the flag was reset
        self._orders.wait_for_call(_GRACE_S)
        if not self._orders.was_called:
            self._turn.rest()
            self._orders.wait_for_call(_LOOK_S)

    def _do(self, number: int, call: Call) -> None:
        """Do a call, and have its result. One that was done by an earlier worker is done again as far as the weights
        and gradients depend on it, and its result stays."""
        known = self._files.result(number)
        if isinstance(known, CallFailed) or (known is not None and isinstance(call, Forward | Sample | SaveState)):
            return
        try:
            result = self._result_of(number, call)
        except _REFUSALS as error:
            result = CallFailed(reason=error.reason, message=error.message, violations=tuple(error.violations))
        if known is None:
            self._tell(number, result)
        if isinstance(call, Forward | Sample) or isinstance(result, CallFailed):
            self._files.forget_call(number)

    def _tell(self, number: int, result: Result) -> None:
        self._files.write_result(number, result)
        self._events.send(CallDone(number=number))

    def _result_of(self, number: int, call: Call) -> Result:
        match call:
            case Forward():
                rows, objective = rows_of(call)
                return _computed(call, self._trainer.forward(rows, objective))
            case ForwardBackward():
                rows, objective = rows_of(call)
                return _computed(call, self._trainer.accumulate(rows, objective, key=number))
            case OptimStep():
                return self._step(number, call)
            case Sample():
                if call.at_step not in (None, self._trainer.step):
                    raise NotFound(
                        f"the weights of step {call.at_step} are not in memory any more: there were changes since"
                    )
                # The weights of all steps, and room on the device, where nothing of training is under way.
                self._trainer.flush()
                self._trainer.release_device()
                if self._sampler is None:
                    self._sampler = SessionSampler(self._request, self._set_up)
                try:
                    return self._sampler.answer(call)
                finally:
                    self._sampler.release_device()
            case SaveState():
                return self._save(call)
            case LoadState():
                return self._load(number, call)
            case Close():
                self._write(waits=True)
                return Closed()

    def _step(self, number: int, call: OptimStep) -> Stepped:
        self._changing = number
        figures = self._trainer.apply(
            learning_rate=call.learning_rate,
            betas=(call.beta1, call.beta2),
            eps=call.eps,
            weight_decay=call.weight_decay,
            max_grad_norm=call.max_grad_norm or None,
        )
        stepped = _stepped(figures)
        self._changed, self._change = number, stepped
        self._num_input_tokens_seen += figures.num_tokens
        self._report(figures)
        return stepped

    def _save(self, call: SaveState) -> Saved:
        step, checkpoints = self._trainer.step, self._checkpoints
        # Of this step it is the same weights: the call is done again after a worker was killed.
        others = [other for other in checkpoints.with_name(call.name) if other != step]
        if others and call.taken == "refused":
            raise InvalidSpec.of(
                "name", f"name is {call.name!r}, which the checkpoint of step {others[0]} has; choose another one"
            )
        if not checkpoints.of_step(step).is_dir():
            self._write(waits=True, always=True)
        checkpoints.set_kept(step, kept=True, name=call.name)
        for other in others if call.taken == "moved" else ():
            with suppress(NotFound):  # deleted meanwhile
                checkpoints.take_name(other, call.name)
        return Saved(checkpoint=f"{self._request.job_id}@{step}")

    def _load(self, number: int, call: LoadState) -> Loaded:
        trainer, set_up = self._trainer, self._set_up
        folder = checkpoint_folder(self._request.checkpoints, call.checkpoint)

        def warn(text: str) -> None:
            self._events.send(Message(level="warning", text=text))

        trainer.reload(lambda: load_state(folder, call, request=self._request, set_up=set_up, warn=warn))
        self._changed, self._change = number, Loaded(step=trainer.step)
        self._keep()
        # Now: what it was loaded from may be deleted, and nothing could do this call again.
        self._write(waits=True)
        return self._change

    def _write(self, *, waits: bool, always: bool = False) -> None:
        """Write a checkpoint of what the calls have changed, where there is something new or `always`. Without
        `waits`, one that the disk has no room for is tried again later."""
        step, writer = self._trainer.step, self._writer
        if step <= writer.saved and not always:
            return
        state = {**self._state(self._trainer.state()), "last_eval": None, "spec": self._spec.to_mapping()}
        # Written from host memory, which may take minutes.
        self._turn.give_back(release=True)
        write = writer.write if waits else writer.try_to_write
        if write(step, self._set_up.store, state, None):
            self._files.prune(done=self._changed, kept_results=_MOST_KEPT_RESULTS)
            self._num_kept = 0

    def _state(self, trainer: dict[str, Any]) -> dict[str, Any]:
        """What belongs to the weights after the newest change."""
        return {
            "trainer": trainer,
            "num_input_tokens_seen": self._num_input_tokens_seen,
            "call": self._changed,
            "change": None if self._change is None else _named(self._change),
            "num_threads": self._execution.num_threads,
            "compute_dtype": self._execution.compute_dtype,
            "compiled": self._compiled_keys,
        }

    def _keep(self) -> None:
        """Keep the state next to the weights in memory, for a worker that continues if this one is killed."""
        self._trainer.keep(json.dumps({**self._state(self._trainer.state()), "figures": None}))
        self._set_up.store.generations.mark_reported()

    def _text_to_keep(self, figures: StepFigures, trainer: dict[str, Any]) -> str:
        state = self._state(trainer)
        state["call"], state["change"] = self._changing, _named(_stepped(figures))
        state["num_input_tokens_seen"] += figures.num_tokens
        return json.dumps({**state, "figures": {name: getattr(figures, name) for name in KEPT_FIGURES}})

    def _report(self, figures: StepFigures) -> None:
        self._results.stepped(figures)
        used = host_components(figures, device=self._set_up.device.name, process_bytes=process_bytes())
        done = StepDone(
            **{**vars(figures), "host_memory_bytes": used},
            num_steps=0,
            epoch=0.0,
            num_input_tokens_seen=self._num_input_tokens_seen,
            tokens_per_second=figures.num_tokens / figures.duration_s if figures.duration_s > 0 else 0.0,
        )
        self._events.send(done)
        self._set_up.store.generations.mark_reported()

    def _facts_of(self, step: int) -> ResultFacts:
        return self._results.facts(step, num_steps=step, num_tokens=self._num_input_tokens_seen)

    def _release_device(self) -> None:
        if self._made_trainer is not None:
            self._made_trainer.release_device()
        if self._sampler is not None:
            self._sampler.release_device()


def _computed(call: Forward | ForwardBackward, found: Found) -> Computed:
    return Computed(loss=found.loss, logprobs=by_position(call.data, found.logprobs), figures=found.figures)


def _named(result: Result) -> dict[str, Any]:
    return {"kind": name_of(result), "result": to_plain(result)}


def _stepped(figures: StepFigures) -> Stepped:
    return Stepped(step=figures.step, grad_norm=figures.grad_norm, skipped=figures.skipped)
