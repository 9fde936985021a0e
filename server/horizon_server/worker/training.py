"""One attempt from the loaded model to the last checkpoint: steps, evaluations, checkpoints and the daemon's orders.

Every number it reports comes from the engine.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from horizon_server.children.entry import EventWriter, Order, Orders
from horizon_server.durable import remove_unfinished
from horizon_server.engine.compiled.layers import CompiledLayers
from horizon_server.engine.data import PreparedDataset, StepPlan
from horizon_server.engine.device import device_for
from horizon_server.engine.device.timeline import Trace
from horizon_server.engine.template import Template
from horizon_server.engine.trainer import TrainConfig, Trainer
from horizon_server.errors import FieldViolation, InvalidSpec
from horizon_server.events import AttemptReady, CheckpointWritten, EvalDone, Message, StepDone
from horizon_server.figures import StepFigures, total_evaluation
from horizon_server.jobs.folders import CheckpointFolder
from horizon_server.planning.flops import FlopsCount
from horizon_server.planning.ledger import DEFAULT_COMPUTE_DTYPE, ActivationPlacement, ComputeDtype, DeviceKind
from horizon_server.planning.model_folder import open_model_folder
from horizon_server.spec import JobSpec, parse_job_spec
from horizon_server.store import numa
from horizon_server.store.checkpoint import load_checkpoint, save_checkpoint
from horizon_server.store.cpus import update_threads
from horizon_server.store.host_store import HostStore
from horizon_server.store.layout import with_decay
from horizon_server.store.model_load import load_model
from horizon_server.worker.compilation import Compilation, CompileRequest

_ETA_STEPS = 20
"""The time to the end is estimated from the pace of this many last steps."""

_STATUS = Path("/proc/self/status")


@dataclass(frozen=True, kw_only=True)
class WorkerRequest:
    """One attempt: a JSON file next to its log, so that people can look at it, and run it again by hand."""

    job_id: str
    attempt: int
    spec: JobSpec
    model: Path
    prepared: Path
    evaluation: Path | None
    checkpoints: Path
    resume_from: Path | None
    planes: dict[str, int]
    """Descriptors that the daemon created and lends; the worker only maps them."""
    grad_dtype_bytes: int
    num_threads: int
    device: DeviceKind
    compute_dtype: ComputeDtype
    device_limit_bytes: int
    activation_placement: ActivationPlacement
    gpu: str = ""
    """UUID of the GPU that `device: cuda` means; empty where it is the first that torch finds."""
    numa_interleave: bool = True
    micro_batch_tokens: int = 0
    """Rows are laid end to end up to this; 0 computes each by itself."""
    compiled: Path | None = None
    """The library of compiled layers."""
    trace: Path | None = None
    """Where to write what ran when on the device's queues."""

    @classmethod
    def from_mapping(cls, plain: Mapping[str, Any]) -> WorkerRequest:
        """Return the request that the daemon wrote; both are of one version, so a malformed one is a defect."""
        paths = ("model", "prepared", "evaluation", "checkpoints", "resume_from", "compiled", "trace")
        return cls(
            **{
                **plain,
                **{name: Path(plain[name]) if plain[name] else None for name in paths},
                "spec": parse_job_spec(plain["spec"]),
                "planes": {str(name): int(fd) for name, fd in plain["planes"].items()},
            }
        )


class Training:
    """One attempt's training. Thread: everything runs on the caller's; the engine has its own."""

    def __init__(self, request: WorkerRequest, *, events: EventWriter, orders: Orders) -> None:
        self._request = request
        self._spec, self._events, self._orders = request.spec, events, orders
        self._num_input_tokens_seen = 0
        self._checkpoints = CheckpointFolder(request.checkpoints, request.job_id)
        # An attempt that was killed may have left a partial checkpoint.
        if self._checkpoints.path.is_dir():
            remove_unfinished(self._checkpoints.path)
        self._last_eval: tuple[int, float] | None = None
        # Only the last steps: the first ones of an attempt are slower, and so may be a busy machine's.
        self._pace: deque[float] = deque(maxlen=_ETA_STEPS)
        # The layout of the folder, which the daemon sized the planes by: where the model class differs, the tensor is named.
        layout = with_decay(open_model_folder(request.model).layout, self._spec.train.decay)
        template = Template.from_folder(request.model, layout=layout)
        # The daemon checks what config.json says; the model's class may bring a limit that config.json leaves out.
        length, longest = self._spec.train.sequence_length, template.max_document_tokens
        if longest is not None and length > longest:
            field, what = "train.sequence_length", f"is {length}; the model allows at most {longest} positions"
            raise InvalidSpec(f"{field} {what}", violations=[FieldViolation(field=field, description=what)])
        self._packing_limit = template.packing_limit
        # Before the planes are touched: pages are taken where the policy of the touching thread says.
        refusal = numa.interleave() if request.numa_interleave else ""
        if refusal:
            self._events.send(Message(level="warning", text=refusal))
        grad_dtype = {0: None, 2: torch.bfloat16, 4: torch.float32}[request.grad_dtype_bytes]
        self._store = HostStore.attach(template.layout, request.planes, grad_dtype=grad_dtype)
        self._resumed = load_checkpoint(self._store, request.resume_from) if request.resume_from else None
        if self._resumed is None:
            load_model(self._store, request.model)
        self._trace = Trace() if request.trace else None
        limit_bytes, num_threads = request.device_limit_bytes, request.num_threads
        self._device = device_for(
            request.device,
            compute_dtype=request.compute_dtype,
            limit_bytes=limit_bytes,
            num_threads=num_threads,
            trace=self._trace,
            gpu=request.gpu,
        )
        dataset, train = PreparedDataset.open(request.prepared), self._spec.train
        # Before the trainer, whose schedule needs the number of steps; rows that turn out not to pack are split by the trainer.
        self._plan = self._step_plan(
            dataset, packing=train.packing != "false", seed=train.seed, epochs=train.epochs, max_steps=train.max_steps
        )
        self._compiled = self._compiled_layers(template)
        config = _train_config(request, self._plan.num_steps)
        self._trainer = Trainer(template, self._store, self._device, config, self._compiled)
        for refusal in self._device.refusals:
            self._events.send(Message(level="warning", text=refusal))
        self._report_data(dataset)
        self._evaluation = PreparedDataset.open(request.evaluation) if request.evaluation else None

    def run(self) -> bool:
        """Train to the end. Returns False when an order stopped it before."""
        step = self._restore()
        num_steps, num_rows = self._plan.num_steps, self._plan.num_rows
        self._events.send(AttemptReady(step=step, num_steps=num_steps, device=self._device.name, packed_rows=num_rows))
        if step == 0 and self._evaluation is not None:
            self._evaluate(0)
        saved = step
        save_every, evaluate_every = self._spec.checkpoint.every_steps, self._spec.eval_every_steps
        while step < num_steps:
            if self._orders.current is not Order.CONTINUE:
                # A cancelled job is not resumed, so nothing is written for it.
                if self._orders.current is Order.STOP and step > saved:
                    self._save(step)
                return False
            figures = self._trainer.train_step(self._plan.step(step))
            step = figures.step
            self._num_input_tokens_seen += figures.num_tokens
            self._events.send(self._step_done(figures))
            # First, so that a checkpoint of the same step carries its loss and can be kept as the best.
            if self._evaluation is not None and evaluate_every and step % evaluate_every == 0:
                self._evaluate(step)
            # The last step's checkpoint comes after the last evaluation, so that it carries its loss.
            if save_every and step % save_every == 0 and step < num_steps:
                self._save(step)
                saved = step
        if self._evaluation is not None and (self._last_eval is None or self._last_eval[0] != step):
            self._evaluate(step)
        if step > saved or not self._checkpoints.of_step(step).is_dir():
            self._save(step)
        return True

    def close(self) -> None:
        """Free everything; the planes' memory stays with the daemon. Writes the trace, where one was asked for."""
        # Each even where one before it fails, and from the top down: the trainer's last work uses the device, whose copies use the store.
        with ExitStack() as parts:
            if self._trace is not None and self._request.trace is not None:
                parts.callback(self._trace.write, self._request.trace)
            parts.callback(self._store.close)
            parts.callback(self._device.close)
            parts.callback(self._trainer.close)

    def _compiled_layers(self, template: Template) -> CompiledLayers:
        train, request = self._spec.train, self._request
        if request.compiled is None:
            return CompiledLayers(template)
        wanted = CompileRequest(
            model=str(request.model),
            library=str(request.compiled),
            dtype=request.compute_dtype,
            device="cpu" if self._device.name == "host" else "cuda",
            num_threads=request.num_threads,
            num_tokens=min(max(train.sequence_length, request.micro_batch_tokens), train.tokens_per_step),
        )
        # Products in FP8 are made of casts that no compiled layer has yet.
        choice = "off" if train.matmul == "fp8" else train.compile
        compilation = Compilation(template, wanted, choice=choice, events=self._events, orders=self._orders)
        # A checkpoint of a version that compiled nothing was made with eager layers.
        before = None if self._resumed is None else list(self._resumed.get("compiled", ()))
        flops = FlopsCount.of_folder(open_model_folder(request.model)).of([train.sequence_length])
        total = flops * self._plan.num_steps * train.tokens_per_step / train.sequence_length
        return compilation.layers(model_flops=total, before=before)

    def _restore(self) -> int:
        """Continue where the checkpoint ended; returns the last finished step."""
        kept = self._resumed
        if kept is None:
            return 0
        # Other data would train too, without an error, but to another result than a run that was never stopped. A checkpoint of a
        # version that had no packing limit was made without one.
        if {"packing_limit": None, **kept["data"]} != self._data_identity():
            raise InvalidSpec(
                "the checkpoint was made from other data or another batch plan, so it cannot be continued exactly; submit a new job"
            )
        # The step is not the same function in another dtype. A checkpoint of a version that had no choice was made in the device's default.
        made_in = kept.get("compute_dtype", DEFAULT_COMPUTE_DTYPE[self._request.device])
        if made_in != self._request.compute_dtype:
            raise InvalidSpec(
                f"the checkpoint was made in {made_in} and this attempt computes in {self._request.compute_dtype}, so it cannot be "
                f"continued exactly; submit a new job, or one with train.compute_dtype: {made_in} from the start"
            )
        self._trainer.restore(kept["trainer"])
        self._num_input_tokens_seen = int(kept["num_input_tokens_seen"])
        self._last_eval = tuple(kept["last_eval"]) if kept["last_eval"] else None
        step = int(kept["trainer"]["step"])
        self._events.send(Message(level="info", text=f"continues after step {step}"))
        # The number of threads decides the order in which products are added, and so the last bits (ADR 0008).
        before, now = kept.get("num_threads"), self._request.num_threads
        if before not in (None, now):
            text = (
                f"the checkpoint was made with {before} CPU threads and this attempt has {now}: its steps may differ in the last bits "
                "from those of a job that was not stopped"
            )
            self._events.send(Message(level="warning", text=text))
        return step

    def _save(self, step: int) -> None:
        started_s = time.monotonic()
        target = self._checkpoints.of_step(step)
        state = {
            "trainer": self._trainer.state(),
            "num_input_tokens_seen": self._num_input_tokens_seen,
            "last_eval": self._last_eval,
            "data": self._data_identity(),
            "num_threads": self._request.num_threads,
            "compute_dtype": self._request.compute_dtype,
            "compiled": self._compiled.keys,
            "spec": self._spec.to_mapping(),
        }
        eval_loss = self._last_eval[1] if self._last_eval is not None and self._last_eval[0] == step else None
        self._checkpoints.path.mkdir(parents=True, exist_ok=True)
        manifest = save_checkpoint(
            self._store, target, source=self._request.model, trainer_state=state, dtype=self._spec.checkpoint.dtype
        )
        duration_s = time.monotonic() - started_s
        written = CheckpointWritten(
            step=step, duration_s=duration_s, size_bytes=manifest.size_bytes, eval_loss=eval_loss
        )
        self._events.send(written)
        # After the new one is complete, so that there is always one to resume from.
        keep = self._spec.checkpoint
        self._checkpoints.apply_retention(keep_last=keep.keep_last, keep_best=keep.keep_best)

    def _evaluate(self, step: int) -> None:
        assert self._evaluation is not None
        packing = self._spec.train.packing != "false" and self._trainer.supports_packing
        # In the data's order: every evaluation of a job sees the same rows.
        plan = self._step_plan(self._evaluation, packing=packing, epochs=1, shuffle=False)
        parts = []
        for i in range(plan.num_steps):
            # A stop lets an evaluation end, because its result belongs to the checkpoint that follows.
            if self._orders.current is Order.CANCEL:
                return
            parts.append(self._trainer.evaluate(plan.step(i)))
        done = EvalDone(**vars(total_evaluation(parts)), step=step)
        self._last_eval = (step, done.eval_loss)
        self._events.send(done)

    def _report_data(self, dataset: PreparedDataset) -> None:
        """Report the data, and where the trainer splits rows that the architecture would mix up."""
        packing, limit = self._spec.train.packing, self._packing_limit
        # Not asked for where nothing is packed: the answer costs a forward on the real weights.
        if packing != "false" and not self._trainer.supports_packing:
            if packing == "true":
                raise InvalidSpec(
                    "train.packing is true, but this architecture does not keep packed documents apart (probed on its own "
                    "weights); use train.packing: auto or false"
                )
            text = "packing is off: this architecture does not keep packed documents apart (probed on its own weights)"
            self._events.send(Message(level="warning", text=text))
        elif packing != "false" and limit is not None and limit < self._spec.train.sequence_length:
            text = (
                f"packed rows hold at most {limit} tokens: in longer ones this architecture counts positions otherwise than "
                "in a single document"
            )
            self._events.send(Message(level="info", text=text))
        rows = f"{self._plan.num_rows} rows, which are {100 * self._plan.packing_efficiency:.1f} % full"
        text = f"data: {dataset.num_documents} documents, {dataset.num_tokens} tokens in {rows}; {self._plan.num_steps} steps"
        self._events.send(Message(level="info", text=text))
        train = self._spec.train
        # With max_steps the planner has warned already; how many steps an epoch has is not known before here.
        if train.max_steps is None and train.warmup_steps >= self._plan.num_steps:
            text = (
                f"train.warmup_steps is {train.warmup_steps} and the job has {self._plan.num_steps} steps, so the learning rate "
                "never reaches train.learning_rate; lower train.warmup_steps or train.tokens_per_step"
            )
            self._events.send(Message(level="warning", text=text))

    def _step_plan(self, dataset: PreparedDataset, **how: Any) -> StepPlan:
        train, limit = self._spec.train, self._packing_limit
        length, tokens = train.sequence_length, train.tokens_per_step
        return StepPlan(dataset, sequence_length=length, tokens_per_step=tokens, packing_limit=limit, **how)

    def _data_identity(self) -> dict[str, Any]:
        """What must be the same for a resumed run to see the same batches."""
        limit = self._packing_limit if self._spec.train.packing != "false" else None
        return {
            "prepared": self._request.prepared.name,
            "num_steps": self._plan.num_steps,
            "seed": self._spec.train.seed,
            "order": StepPlan.ORDER,
            # None where no row is long enough to reach it.
            "packing_limit": limit if limit is not None and limit < self._spec.train.sequence_length else None,
        }

    def _step_done(self, figures: StepFigures) -> StepDone:
        self._pace.append(figures.duration_s)
        remaining = self._plan.num_steps - figures.step
        used = host_components(figures, device=self._device.name, process_bytes=process_bytes())
        return StepDone(
            **{**vars(figures), "host_memory_bytes": used},
            num_steps=self._plan.num_steps,
            epoch=self._plan.epoch_of(figures.step - 1),
            num_input_tokens_seen=self._num_input_tokens_seen,
            tokens_per_second=figures.num_tokens / figures.duration_s if figures.duration_s > 0 else 0.0,
            eta_s=remaining * sum(self._pace) / len(self._pace),
        )


def _train_config(request: WorkerRequest, num_steps: int) -> TrainConfig:
    train = request.spec.train
    return TrainConfig(
        num_steps=num_steps,
        learning_rate=train.learning_rate,
        lr_schedule=train.lr_schedule,
        warmup_steps=train.warmup_steps,
        weight_decay=train.weight_decay,
        betas=train.betas,
        eps=train.eps,
        max_grad_norm=train.max_grad_norm,
        max_skipped_steps=train.max_skipped_steps,
        seed=train.seed,
        optimizer_threads=update_threads(request.num_threads, device_kind=request.device),
        tokens_per_step=train.tokens_per_step,
        activation_placement=request.activation_placement,
        matmul=train.matmul,
        micro_batch_tokens=request.micro_batch_tokens,
    )


def host_components(figures: StepFigures, *, device: str, process_bytes: int) -> dict[str, int]:
    """Return what the engine reports, plus `other`: the rest of the process.

    On the `host` device the device is host memory too; the plan counts its slots as staging and its activations as activations.
    """
    on_host: Mapping[str, int] = figures.device_memory_bytes if device == "host" else {}
    used = {"activations": 0, "staging": 0, **figures.host_memory_bytes}
    used["activations"] += on_host.get("activations", 0)
    used["staging"] += on_host.get("weights", 0) + on_host.get("gradients", 0)
    # Not below 0: reserved pages that were never written are in the engine's figures but not in the process's.
    used["other"] = max(0, process_bytes - used["activations"] - used["staging"])
    return used


def process_bytes() -> int:
    """Return the resident heap, stacks and libraries of this process. The planes are shared memory and not among them."""
    fields = dict(line.split(":", 1) for line in _STATUS.read_text("utf-8").splitlines() if ":" in line)
    return sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssFile")) * 1024
