"""One attempt from the loaded model to the last checkpoint: steps, evaluations, checkpoints and the daemon's orders.

Every number it reports comes from the engine.
"""

from __future__ import annotations

import dataclasses
import json
from collections import deque
from contextlib import ExitStack
from typing import Any

from horizon_server.children.entry import EventWriter
from horizon_server.durable import remove_unfinished
from horizon_server.engine.data import PreparedDataset
from horizon_server.engine.device.protocol import Device
from horizon_server.engine.divided_store import DividedStore
from horizon_server.engine.ranks import ALONE, Call
from horizon_server.engine.trainer import Trainer
from horizon_server.errors import InvalidSpec
from horizon_server.events import AttemptReady, Message, StepDone
from horizon_server.figures import StepFigures
from horizon_server.jobs.folders import CheckpointFolder
from horizon_server.planning.residency import state_units
from horizon_server.records.job import StopRequest
from horizon_server.store.generation_config import listed_ends
from horizon_server.store.host_store import HostStore
from horizon_server.store.layout import is_input_table, is_output_projection
from horizon_server.store.model_card import ResultFacts
from horizon_server.worker.compilation import compiled_layers
from horizon_server.worker.device_turn import DeviceTurn
from horizon_server.worker.ending import Ending, Outcome
from horizon_server.worker.evaluation import Evaluation
from horizon_server.worker.host_use import host_components, process_bytes
from horizon_server.worker.rank_processes import OtherRanks
from horizon_server.worker.reference_pass import ReferencePass, StartingWeights
from horizon_server.worker.result_facts import ResultRecorder
from horizon_server.worker.saving import CheckpointWriter
from horizon_server.worker.set_up import SetUp, TrainingData, make_step_plan
from horizon_server.worker_link.orders import Orders
from horizon_server.worker_link.request import WorkerRequest

_ETA_STEPS = 20
"""The time to the end is estimated from the pace of this many last steps."""

# The end of a job that has done its last step: a cancelled one needs no evaluation.
_NO_REASON_TO_STOP = (StopRequest.NOTHING, StopRequest.CANCEL)

KEPT_FIGURES = (
    "step",
    "loss",
    "grad_norm",
    "learning_rate",
    "num_tokens",
    "duration_s",
    "skipped",
    "model_flops",
)
"""Figures of a step that a later worker can report where this one is killed before it does."""


class Training:
    """One attempt's training. Thread: everything runs on the caller's; the engine has its own."""

    def __init__(
        self, request: WorkerRequest, *, events: EventWriter, orders: Orders, others: OtherRanks | None = None
    ) -> None:
        """`others` are the further ranks of an attempt that has several devices."""
        self._request, self._others, self._ranks = request, others, ALONE
        self._spec, self._events, self._orders = request.spec, events, orders
        self._execution = request.plan.execution
        self._num_input_tokens_seen = 0
        self._turn = DeviceTurn(
            orders=orders,
            events=events,
            shared=request.turns,
            deadline_s=request.limits.deadline_s,
            release=self._release_device,
            locks=request.device_locks,
            is_host=self._execution.device_kind == "host",
        )
        self._made_trainer: Trainer | None = None
        self._checkpoints = CheckpointFolder(request.checkpoints, request.job_id)
        # An attempt that was killed may have left a partial checkpoint.
        if self._checkpoints.path.is_dir():
            remove_unfinished(self._checkpoints.path)
        # Step and loss of the newest evaluation; by another figure than the loss, also that figure and whether it is
        # the better when high.
        self._last_eval: tuple[int, float, float | None, bool] | None = None
        # Only the last steps: the first ones of an attempt are slower, and so may be a busy machine's.
        self._pace: deque[float] = deque(maxlen=_ETA_STEPS)
        self._set_up = SetUp.open(request, events)
        self._data = TrainingData(request)
        self._plan = self._data.plan(self._set_up.template)
        answer_ends = tuple(self._data.dataset.answer_ends.values())
        self._writer = CheckpointWriter(
            self._checkpoints,
            self._spec.checkpoint,
            source=request.model,
            events=events,
            orders=orders,
            min_free_bytes=request.min_free_bytes,
            adapter=self._set_up.adapter,
            answer_ends=answer_ends,
            facts_of=self._facts_of,
        )
        if isinstance(self._store, DividedStore):
            # Before anything is loaded, most of which goes to the other nodes.
            assert others is not None, "a job on several nodes has several ranks"
            self._ranks = others.join(self._execution)
            self._store.connect(self._ranks)
        self._continued = self._set_up.load(resume_from=request.resume_from, from_memory=request.resume_from_memory)
        if self._continued.refusal:
            text = f"the weights in memory cannot be continued, so they are loaded again: {self._continued.refusal}"
            self._events.send(Message(level="warning", text=text))
        if self._continued.state is not None and request.resume_from is not None:
            self._writer.saved = CheckpointFolder.step_of(request.resume_from)
        self._ending = Ending(num_steps=self._plan.num_steps, limits=request.limits, evaluation=self._spec.eval)
        # Before the first turn: a prompt that cannot be answered is found before anything is trained.
        self._evaluation = Evaluation(
            self._spec,
            request.evaluations,
            self._set_up.folder,
            store=self._store,
            device=self._device,
            orders=orders,
            turn=self._turn,
            make_plan=lambda dataset, packing: make_step_plan(
                dataset, self._spec.train, self._set_up.template, packing=packing, epochs=1, shuffle=False
            ),
            answer_ends=answer_ends,
        )

        evaluated = {name: data.dataset for name, data in self._evaluation.sets.items()}
        self._results = ResultRecorder(request, self._data.dataset, evaluated)

    @property
    def _store(self) -> HostStore:
        return self._set_up.store

    @property
    def _device(self) -> Device:
        return self._set_up.device

    def run(self) -> Outcome:
        """Train until the job is at its end, or an order stops it before."""
        if not self._prepare_device() or not self._have_references():
            return self._stop_before_the_first_turn()
        step = self._restore()
        last_step, num_rows = self._ending.last_step, self._plan.num_rows
        self._events.send(AttemptReady(step=step, num_steps=last_step, device=self._device.name, packed_rows=num_rows))
        if (unreported := self._continued.unreported) is not None:
            self._report(StepFigures(**unreported))
        evaluate_every = self._spec.eval_every_steps
        while True:
            # First, so that a checkpoint of the same step carries its loss and can be kept as the best. A step that the
            # attempt before this one was stopped in the evaluation of is evaluated here.
            if step == 0 or (evaluate_every and step % evaluate_every == 0):
                self._evaluate(step)
            if outcome := self._ending.at(step):
                break
            if self._orders.current is not StopRequest.NOTHING:
                outcome = Outcome(outcome="stopped")
                break
            # The last step's checkpoint comes after the last evaluation, so that it carries its loss.
            if self._writer.is_due(step):
                self._give_back_device()
                self._writer.try_to_write(step, self._store, self._state(), self._eval_loss_of(step))
            # Before the turn: the device waits for none of it.
            rows, objective = self._data.of_method.step(self._plan, step)
            # At once where it has kept its turn.
            if not self._turn.take():
                continue
            figures = self._trainer.train_step(rows, objective)
            # Before anything is reported: the next job's first kernel must not wait for a pipe.
            self._turn.boundary()
            step = figures.step
            self._num_input_tokens_seen += figures.num_tokens
            self._report(figures)
        return self._finish(step, outcome)

    def _finish(self, step: int, outcome: Outcome) -> Outcome:
        """Do the last evaluation and the last checkpoint, as far as this outcome has them."""
        # Not where the time is over: an evaluation may take long, and would wait for the device.
        wants_evaluation = outcome.outcome == "succeeded" and outcome.reason != "WALL_CLOCK_LIMIT"
        if wants_evaluation and not self._evaluate(step) and self._orders.current not in _NO_REASON_TO_STOP:
            # The next attempt evaluates this step, and is at the end then.
            outcome = Outcome(outcome="stopped")
        is_stopped = outcome.outcome == "stopped"
        # What was heard first holds: nothing is written for a worker that continues in this memory.
        if is_stopped and self._orders.current is StopRequest.MOVE:
            self._turn.give_back(release=True)
            return Outcome(outcome="moved")
        is_saved = step <= self._writer.saved and (is_stopped or self._checkpoints.of_step(step).is_dir())
        # A cancelled job is not resumed, so nothing is written for it.
        if not is_saved and not (is_stopped and self._orders.current is StopRequest.CANCEL):
            self._give_back_device()
            if not self._writer.write(step, self._store, self._state(), self._eval_loss_of(step)):
                outcome = Outcome(outcome="stopped")
        self._turn.give_back(release=True)
        return outcome

    def _stop_before_the_first_turn(self) -> Outcome:
        step, continued = self._continued.step, self._continued
        if self._orders.current is StopRequest.MOVE:
            return Outcome(outcome="moved")
        # Else nothing has changed since the checkpoint that it would have continued from.
        if continued.from_memory and step > self._writer.saved and self._orders.current is not StopRequest.CANCEL:
            assert continued.state is not None, "what is in memory has a state"
            last_eval = continued.state["last_eval"]
            eval_loss = last_eval[1] if last_eval and last_eval[0] == step else None
            self._writer.write(step, self._store, {**continued.state, "spec": self._spec.to_mapping()}, eval_loss)
        return self._ending.at(step) or Outcome(outcome="stopped")

    def close(self) -> None:
        """Free everything; the planes' memory stays with the daemon. Writes the trace, where one was asked for."""
        # Each even where one before it fails, and from the top down: the trainer's last work uses the device, whose
        # copies use the store.
        with ExitStack() as parts:
            parts.callback(self._set_up.close)
            if self._others is not None:
                parts.callback(self._others.close)
            if self._made_trainer is not None:
                parts.callback(self._made_trainer.close)
            parts.callback(self._evaluation.close)

    @property
    def _trainer(self) -> Trainer:
        assert self._made_trainer is not None, "set up comes first"
        return self._made_trainer

    def _prepare_device(self) -> bool:
        """Have the device for the first time, and make the trainer on it. False: an order or the deadline came
        first."""
        request, store, device = self._request, self._store, self._device
        # All that takes long comes before the first turn: the model is loaded, its layers are compiled in a process of
        # their own, and what the device copies from is registered with it.
        states = [unit.index for unit in state_units(store.layout, self._execution.residency)]
        device.adopt(store, states, page_elements=self._execution.expert_page_elements)
        device.release_memory()
        self._starting_weights = StartingWeights.of(request) if self._spec.needs_references else None
        self._data_identity = self._data.identity(self._plan, self._set_up.template.packing_limit)
        self._compiled = compiled_layers(
            request,
            self._set_up.folder,
            self._set_up.template,
            kept=self._continued.state,
            num_steps=self._plan.num_steps,
            take_device=self._turn.take,
            events=self._events,
            orders=self._orders,
        )
        if self._others is not None and self._ranks.is_alone:
            self._ranks = self._others.join(self._execution)
        if not self._turn.take():
            return False
        if not self._ranks.is_alone:
            # Only now may the other ranks take memory on their devices.
            begin = {"num_steps": self._plan.num_steps, "compiled": self._compiled.keys}
            self._ranks.send(Call(name="begin", values=begin))
        self._made_trainer = Trainer(
            self._set_up.template,
            store,
            device,
            self._spec.train.recipe,
            self._execution,
            num_steps=self._plan.num_steps,
            compiled=self._compiled,
            ranks=self._ranks,
        )
        for refusal in device.refusals:
            self._events.send(Message(level="warning", text=refusal))
        if attention := self._made_trainer.attention_text:
            self._events.send(Message(level="info", text=attention))
        self._report_data(self._data.dataset)
        self._report_ends(self._data.dataset)
        return True

    def _have_references(self) -> bool:
        """Have what the method compares with, before anything is trained. False: an order or the deadline came
        first."""
        request, before = self._request, self._continued
        if self._starting_weights is None:
            return True
        data = [(self._data.of_method, self._plan), *self._evaluation.plans(self._trainer)]
        references = ReferencePass(
            request,
            data,
            weights=self._starting_weights,
            compiled=self._compiled.keys,
            events=self._events,
            orders=self._orders,
            turn=self._turn,
        )
        if references.find():
            return True
        if before.state is not None:
            # They were deleted meanwhile. The weights in the store are trained ones: those that the job began with take
            # their place.
            text = (
                "the reference log-probabilities are gone, so they are computed again from the weights that the job "
                "started with"
            )
            self._events.send(Message(level="warning", text=text))
            self._set_up.load(resume_from=None, from_memory=False)
            self._trainer.forget_weights()
            self._continued = dataclasses.replace(before, from_memory=False, unreported=None)
        if not references.compute(self._trainer):
            return False
        if before.state is not None:
            self._continued = self._set_up.load(resume_from=request.resume_from, from_memory=False)
            self._trainer.forget_weights()
        return True

    def _release_device(self) -> None:
        if self._made_trainer is not None:
            self._made_trainer.release_device()
            self._evaluation.release_device()

    def _restore(self) -> int:
        """Continue where the last attempt ended; returns the last finished step."""
        kept, request = self._continued.state, self._request
        if kept is not None:
            self._continued.check(
                data=self._data_identity, compute_dtype=self._execution.compute_dtype, job_id=request.job_id
            )
            self._trainer.restore(kept["trainer"])
            self._num_input_tokens_seen = int(kept["num_input_tokens_seen"])
            self._last_eval = tuple(kept["last_eval"]) if kept["last_eval"] else None
            self._ending.restore(kept["ending"])
            where = ", with the weights that are in memory" if self._continued.from_memory else ""
            self._events.send(Message(level="info", text=f"continues after step {self._continued.step}{where}"))
            # The number of threads decides the order in which products are added, and so the last bits (ADR 0008).
            before, now = kept["num_threads"], self._execution.num_threads
            if before != now:
                text = (
                    f"the checkpoint was made with {before} CPU threads and this attempt has {now}: its steps may "
                    "differ in the last "
                    "bits from those of a job that was not stopped"
                )
                self._events.send(Message(level="warning", text=text))
        self._keep()
        self._trainer.on_update = self._text_to_keep
        return self._continued.step

    def _give_back_device(self) -> None:
        # Of a step's update, only what runs on the CPU is left, and a checkpoint is made of host memory: the device is
        # not needed, nor its memory, for what may be minutes.
        self._turn.give_back(release=True)

    def _state(self) -> dict[str, Any]:
        """What a checkpoint holds besides the store."""
        return {**self._moving_state(self._trainer.state()), **self._fixed_state(), "spec": self._spec.to_mapping()}

    def _moving_state(self, trainer: dict[str, Any], *, num_more_tokens: int = 0) -> dict[str, Any]:
        return {
            "trainer": trainer,
            "num_input_tokens_seen": self._num_input_tokens_seen + num_more_tokens,
            "last_eval": self._last_eval,
            "ending": self._ending.state(),
        }

    def _fixed_state(self) -> dict[str, Any]:
        return {
            "data": self._data_identity,
            "num_threads": self._execution.num_threads,
            "compute_dtype": self._execution.compute_dtype,
            "compiled": self._compiled.keys,
        }

    def _keep(self) -> None:
        """Keep the state next to the weights in memory, for a worker that continues if this one is killed."""
        state = {**self._moving_state(self._trainer.state()), **self._fixed_state(), "figures": None}
        self._trainer.keep(json.dumps(state))
        self._store.generations.mark_reported()

    def _text_to_keep(self, figures: StepFigures, trainer: dict[str, Any]) -> str:
        moving = self._moving_state(trainer, num_more_tokens=figures.num_tokens)
        # Figures of the device are not known yet, and not worth keeping.
        known = {name: getattr(figures, name) for name in KEPT_FIGURES}
        return json.dumps({**moving, **self._fixed_state(), "figures": known})

    def _eval_loss_of(self, step: int) -> float | None:
        return self._last_eval[1] if self._last_eval is not None and self._last_eval[0] == step else None

    def _facts_of(self, step: int) -> ResultFacts:
        return self._results.facts(step, num_steps=self._ending.last_step, num_tokens=self._num_input_tokens_seen)

    def _evaluate(self, step: int) -> bool:
        """Evaluate the weights of a step, where there is data for it. False: an order or the deadline came before that
        was complete."""
        if not self._evaluation.is_possible or (self._last_eval is not None and self._last_eval[0] == step):
            return True
        done = self._evaluation.run(self._trainer, step)
        if done is None:
            return False
        self._last_eval = (step, done.eval_loss, done.judged, self._spec.eval.prefers_high)
        if done.judged is not None:
            self._ending.observe(done.judged)
        self._results.evaluated(done, self._evaluation.answers)
        self._events.send(done)
        self._keep()
        return True

    def _report_data(self, dataset: PreparedDataset) -> None:
        """Report the data, and where the trainer splits rows that the architecture would mix up."""
        packing, limit = self._spec.train.packing, self._set_up.template.packing_limit
        # Not asked for where nothing is packed: the answer costs a forward on the real weights.
        if packing != "false" and not self._trainer.supports_packing:
            if packing == "true":
                raise InvalidSpec(
                    "train.packing is true, but this architecture does not keep packed documents apart (probed on its "
                    "own weights); use train.packing: auto or false"
                )
            text = "packing is off: this architecture does not keep packed documents apart (probed on its own weights)"
            self._events.send(Message(level="warning", text=text))
        elif packing != "false" and limit is not None and limit < self._spec.train.sequence_length:
            text = (
                f"packed rows hold at most {limit} tokens: in longer ones this architecture counts positions otherwise "
                "than "
                "in a single document"
            )
            self._events.send(Message(level="info", text=text))
        if self._set_up.template.keeps_masks:
            text = (
                "keeps masks: attention has one over all pairs of a row's tokens, because "
                f"{self._set_up.template.keeps_masks}"
            )
            self._events.send(Message(level="info", text=text))
        rows = f"{self._plan.num_rows:,} rows, which are {100 * self._plan.packing_efficiency:.1f} % full"
        text = (
            f"data: {dataset.num_documents:,} documents, {dataset.num_tokens:,} tokens in {rows}; "
            f"{self._plan.num_steps:,} steps"
        )
        if dataset.is_weighted:
            text += "; some answers have a weight, so the loss of a step is the weighted mean over its tokens"
        self._events.send(Message(level="info", text=text))
        train = self._spec.train
        # With max_steps the planner has warned already; how many steps an epoch has is not known before here.
        if train.max_steps is None and train.warmup_steps >= self._plan.num_steps:
            text = (
                f"train.warmup_steps is {train.warmup_steps} and the job has {self._plan.num_steps} steps, so the "
                "learning rate "
                "never reaches train.learning_rate; lower train.warmup_steps or train.tokens_per_step"
            )
            self._events.send(Message(level="warning", text=text))

    def _report_ends(self, dataset: PreparedDataset) -> None:
        """Report tokens that end trained answers and are none by the model's own files."""
        listed, layout = listed_ends(self._request.model), self._set_up.template.layout
        missing = [name for name, token in dataset.answer_ends.items() if token not in listed]
        if not missing:
            return
        text = (
            f"trained answers end with {' or '.join(missing)}, which generation_config.json does not list; answers end "
            "there too, and the "
            "checkpoint's generation_config.json says so"
        )
        self._events.send(Message(level="info", text=text))
        is_row = is_input_table if layout.tied else is_output_projection
        if not any(place.trained and is_row(place.adapts or place.name) for _, place in layout.tensors()):
            text = (
                f"the embedding of {' and '.join(missing)} is frozen: if the model was never trained to end its turns "
                "so, its answers may "
                "not end; train the embedding as well (train.trainable), or start from a model that ends its turns "
                "with this token"
            )
            self._events.send(Message(level="warning", text=text))

    def _report(self, figures: StepFigures) -> None:
        self._results.stepped(figures)
        self._pace.append(figures.duration_s)
        remaining = self._ending.last_step - figures.step
        pids = [] if self._others is None else self._others.pids
        used = host_components(figures, device=self._device.name, process_bytes=process_bytes(pids))
        done = StepDone(
            **{**vars(figures), "host_memory_bytes": used},
            num_steps=self._ending.last_step,
            epoch=self._plan.epoch_of(figures.step - 1),
            num_input_tokens_seen=self._num_input_tokens_seen,
            tokens_per_second=figures.num_tokens / figures.duration_s if figures.duration_s > 0 else 0.0,
            eta_s=remaining * sum(self._pace) / len(self._pace),
        )
        self._events.send(done)
        self._store.generations.mark_reported()
