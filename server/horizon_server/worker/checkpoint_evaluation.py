"""The child that evaluates a checkpoint: `python -m horizon_server.worker.checkpoint_evaluation`.

It restores the weights bit by bit as a job that is resumed does, without moments and gradients, and measures them with
the code of the job's own evaluations. It computes on the host, at a lower priority than training.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from contextlib import ExitStack
from typing import Any

from horizon_server.children.entry import EventWriter, serve
from horizon_server.codec import from_plain
from horizon_server.errors import naming
from horizon_server.events import EvalDone, EvaluationProgress
from horizon_server.imports import seldom_collecting
from horizon_server.planning.sampling import evaluated_folder
from horizon_server.records.checkpoint_evaluation import EvaluationRequest
from horizon_server.store.base_digest import DigestBook
from horizon_server.store.checkpoint import load_checkpoint
from horizon_server.store.generation_config import listed_ends
from horizon_server.store.host_store import HostStore
from horizon_server.worker import let_launchers_run
from horizon_server.worker_link.orders import Orders

# The modules that load torch and transformers.
with seldom_collecting():
    from horizon_server.engine.device import device_for
    from horizon_server.engine.template import Template
    from horizon_server.engine.trainer import Trainer
    from horizon_server.worker.device_turn import DeviceTurn
    from horizon_server.worker.evaluation import Evaluation
    from horizon_server.worker.set_up import make_step_plan

# Training on the same node has the processors first.
_NICENESS = 10
_REPORT_EVERY_S = 0.25


def work(plain: Any, events: EventWriter) -> list[str]:
    """Send the figures of the checkpoint of a request; returns in what they differ from those of the job."""
    let_launchers_run()
    request = from_plain(EvaluationRequest, plain)
    with naming({request.checkpoint: "the checkpoint", request.model: "the model"}):
        done, differences = evaluate(request, events)
    events.send(done)
    return differences


def evaluate(request: EvaluationRequest, events: EventWriter) -> tuple[EvalDone, list[str]]:
    """Return the figures of a checkpoint, and in what they were computed otherwise than in the job.

    Raises:
        InvalidModel: a file of the checkpoint is missing or damaged, or the base of its adapter is another model now.
        InvalidSpec: no row of the set whose prompts are answered has one that fits.
    """
    execution, folder = request.execution, evaluated_folder(request.model, request.spec.train)
    # Clipping needs the gradients of a step, for which there is no memory here.
    recipe = dataclasses.replace(request.spec.train.recipe, max_grad_norm=None)
    template = Template.from_folder(folder.path, layout=folder.layout, recipe=recipe)
    with ExitStack() as parts:
        store = HostStore.allocate(folder.layout, grad_dtype=None, num_threads=execution.num_threads)
        parts.callback(store.close)
        kept = load_checkpoint(
            store,
            request.checkpoint,
            base=request.model,
            base_sha256=lambda: DigestBook(request.digests).digest(request.model),
            # Of weights that are only read, all bits that the job had.
            on_conversion=lambda _: None,
        )
        device = device_for(
            execution.device_kind,
            compute_dtype=execution.compute_dtype,
            limit_bytes=execution.device_limit_bytes,
            num_threads=execution.num_threads,
        )
        parts.callback(device.close)
        trainer = Trainer(template, store, device, recipe, execution, num_steps=request.step)
        parts.callback(trainer.close)
        orders = Orders()
        evaluation = Evaluation(
            request.spec,
            request.prepared,
            folder,
            store=store,
            device=device,
            orders=orders,
            turn=DeviceTurn(
                orders=orders, events=events, shared=False, deadline_s=None, release=trainer.release_device
            ),
            make_plan=lambda dataset, packing: make_step_plan(
                dataset, request.spec.train, template, packing=packing, epochs=1, shuffle=False
            ),
            # The job that wrote the checkpoint has found where its answers end.
            answer_ends=listed_ends(request.checkpoint),
            on_step=_Progress(events),
        )
        parts.callback(evaluation.close)
        done = evaluation.run(trainer, request.step)
        assert done is not None, "nobody gives orders"
        return done, _differences(request, kept)


class _Progress:
    """Reports how far the evaluation of a set is."""

    def __init__(self, events: EventWriter) -> None:
        self._events = events
        self._reported_s = float("-inf")

    def __call__(self, name: str, done: int, total: int) -> None:
        if (now_s := time.monotonic()) - self._reported_s >= _REPORT_EVERY_S or done == total:
            self._reported_s = now_s
            self._events.send(EvaluationProgress(phase="evaluate", set=name, done=done, total=total))


def _differences(request: EvaluationRequest, kept: dict[str, Any]) -> list[str]:
    execution = request.execution
    found = []
    if request.trained_on != execution.device_kind:
        found.append("the job was computed on a GPU, and this evaluation on the node's processors")
    if (before := kept["compute_dtype"]) != execution.compute_dtype:
        found.append(f"the job computed in {before}, and this evaluation in {execution.compute_dtype}")
    if (threads := kept["num_threads"]) != execution.num_threads:
        found.append(f"the job had {threads} CPU threads, and this evaluation {execution.num_threads}")
    if kept["compiled"]:
        found.append("the job had compiled layers, and this evaluation has none")
    return found


if __name__ == "__main__":
    sys.exit(serve(work, who="the child that evaluates a checkpoint", niceness=_NICENESS))
