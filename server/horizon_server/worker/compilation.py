"""Compiled layers for a job, while it starts: decides whether to compile, and runs the child that does where the daemon
has not had it done before (`jobs.compiling`).

The compiler takes seconds to load, hundreds of megabytes, and has been seen to crash; so it runs in a process of its
own: `python -m horizon_server.worker.compilation REQUEST`.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from horizon_server import cpu_priority, progress
from horizon_server.children.entry import EventWriter, serve
from horizon_server.codec import from_plain, to_plain
from horizon_server.errors import HorizonError, InvalidSpec, Stalled, WorkerDied
from horizon_server.events import Message, WorkerLine
from horizon_server.imports import seldom_collecting
from horizon_server.jobs.compile_request import MAX_COMPILE_S, MAX_KILLS, CompileRequest, MadeBook
from horizon_server.planning.compiling import flops_of_job, is_worth_compiling
from horizon_server.planning.gpu_compiler import CPP_COMPILER
from horizon_server.planning.model_folder import ModelFolder
from horizon_server.planning.trainable import open_for_training
from horizon_server.records.job import StopRequest
from horizon_server.settings import child_environment
from horizon_server.spec import CompileChoice, LoraSpec, TrainSpec
from horizon_server.worker_link.orders import Orders
from horizon_server.worker_link.request import WorkerRequest

# The modules that load torch and transformers.
with seldom_collecting():
    import torch

    from horizon_server.engine.compiled.layers import CompiledLayers, is_complete, known_keys
    from horizon_server.engine.compiled.library import CodeLibrary, Target
    from horizon_server.engine.template import Template

# How soon an order to end is seen.
_POLL_S = 0.5
_OWN_LOG = Path("/proc/self/fd/2")


def target_of(request: CompileRequest) -> Target:
    """What to compile for."""
    return Target(
        dtype=getattr(torch, request.dtype),
        device=torch.device(request.device),
        num_threads=request.num_threads,
        num_tokens=request.num_tokens,
        matmul=request.matmul,
    )


def compile_request(request: WorkerRequest) -> CompileRequest:
    """What an attempt's layers are compiled for."""
    return CompileRequest.of(
        request.spec.train, request.plan.execution, model=request.model, library=request.compiled or Path()
    )


class Compilation:
    """The compiled layers of one attempt. `before` are the keys that the checkpoint to resume from was made with, None
    for a new job."""

    def __init__(
        self, template: Template, request: CompileRequest, *, choice: CompileChoice, events: EventWriter, orders: Orders
    ) -> None:
        self._template, self._request, self._choice = template, request, choice
        self._events, self._orders = events, orders
        self._library = CodeLibrary(Path(request.library))

    def layers(
        self, *, model_flops: float, before: list[str] | None, take_device: Callable[[], bool] = lambda: True
    ) -> CompiledLayers:
        """The layers to train with. They are compiled first, then tried on the device; `take_device` False: the attempt
        ends before that.

        Raises:
            InvalidSpec: `train.compile` is `on` and some layer cannot be compiled.
        """
        eager = CompiledLayers(self._template)
        kind = self._request.device_kind
        is_wanted = bool(before) if before is not None else is_worth_compiling(self._choice, kind, model_flops)
        if not is_wanted:
            return eager
        failures = self._compile()
        if self._orders.current is not StopRequest.NOTHING or not take_device():
            return eager  # the attempt ends before its first step
        # A resumed job takes what it had, whatever a trial on a busy machine says now.
        only_faster = self._choice == "auto" and before is None
        layers = CompiledLayers.load(
            self._template,
            self._library,
            target_of(self._request),
            only_faster=only_faster,
            keys=before,
            product_layers=self._request.product_layers,
        )
        refusals = failures or layers.refusals
        if before is not None and layers.keys != before:
            self._warn(
                "the compiled layers that the checkpoint was made with cannot be made again here: its steps may differ "
                "in the last bits from those of a job that was not stopped"
            )
        elif refusals and self._choice == "on":
            raise InvalidSpec(
                f"train.compile is on, but not all of this model's layers can be compiled: {refusals[0]}; use "
                "train.compile: auto or off"
            )
        reason = f"; the others run eagerly: {refusals[0]}" if refusals else ""
        self._tell(f"compiled layers: {layers.num_layers} of {self._template.num_layers}{reason}")
        return layers

    def _compile(self) -> list[str]:
        """Have the child make what the library lacks; returns why it could not."""
        request = self._request
        if is_complete(self._template, self._library, target_of(request), product_layers=request.product_layers):
            return []
        if shutil.which(CPP_COMPILER) is None:
            return [f"there is no C++ compiler ({CPP_COMPILER}) on this node"]
        for _ in range(MAX_KILLS):
            failures = asyncio.run(self._run_child())
            if failures is not None:
                return failures
        return ["the compiling process was killed every time"]

    async def _run_child(self) -> list[str] | None:
        """Run the child once; returns why it could not make what the library lacks, None where it was killed."""
        task = self._request.task(child_environment())

        async def on_event(line: WorkerLine) -> None:
            if isinstance(line, Message):
                self._events.send(line)

        # What the compiler prints goes to the attempt's log.
        answering = asyncio.create_task(task.run(to_plain(self._request), on_event, log_file=_OWN_LOG))
        try:
            while not answering.done():
                if self._orders.current is not StopRequest.NOTHING:
                    return []
                progress.advance()  # it has a limit of its own
                await asyncio.wait({answering}, timeout=_POLL_S)
            return [str(refusal) for refusal in await answering]
        except Stalled:
            return [f"compiling took more than {MAX_COMPILE_S:.0f} s"]
        except HorizonError as error:
            # A kill says nothing about the model, while a job with other layers than the last time would get other
            # bits.
            if isinstance(error, WorkerDied) and error.retry_after_s is not None:
                self._warn(error.message)
                return None
            return [error.message]
        finally:
            answering.cancel()
            with contextlib.suppress(asyncio.CancelledError, HorizonError):
                await answering

    def _tell(self, text: str) -> None:
        self._events.send(Message(level="info", text=text))

    def _warn(self, text: str) -> None:
        self._events.send(Message(level="warning", text=text))


def compiled_layers(
    request: WorkerRequest,
    folder: ModelFolder,
    template: Template,
    *,
    kept: Mapping[str, Any] | None,
    num_steps: int,
    take_device: Callable[[], bool],
    events: EventWriter,
    orders: Orders,
) -> CompiledLayers:
    """The layers of an attempt, as its spec asks for them. `kept` is the state that it continues from, `num_steps` are
    those of the whole job; otherwise as `Compilation.layers`."""
    train, planned = request.spec.train, request.plan.execution.residency.product_layers
    layers = CompiledLayers(template)
    if request.compiled is not None:
        compilation = Compilation(
            template, compile_request(request), choice=train.compile, events=events, orders=orders
        )
        before = None if kept is None else list(kept["compiled"])
        # Whether compiled layers are faster is tried with the device, where no other job's work is timed.
        layers = compilation.layers(
            model_flops=flops_of_job(folder, train, num_steps), before=before, take_device=take_device
        )
    if layers.num_keeping < planned and orders.current is StopRequest.NOTHING:
        reason = f": {layers.refusals_to_keep[0]}" if layers.refusals_to_keep else ", as layers that run eagerly do"
        text = (
            f"the activations of {layers.num_keeping} of the last {planned} layers are kept; the others compute them "
            f"again{reason}, and the memory that is planned for them stays unused"
        )
        events.send(Message(level="info", text=text))
    return layers


def work(request: Any, events: EventWriter) -> list[str]:
    """Make what the library lacks; returns why some of it could not be made."""
    wanted = from_plain(CompileRequest, request)
    if wanted.urgency == "idle":
        cpu_priority.use_idle_processors()
    elif wanted.urgency == "low":
        cpu_priority.lower_for_good()
    from horizon_server.engine.compiled.build import build_missing

    torch.set_num_threads(wanted.num_threads)
    train = TrainSpec(trainable=wanted.trainable, lora=LoraSpec(**wanted.lora))
    found = open_for_training(Path(wanted.model), train)
    template = Template.from_folder(found.path, layout=found.layout, recipe=train.recipe)
    target = target_of(wanted)
    template.place_buffers(lambda tensor: tensor.to(target.device))
    library = CodeLibrary(Path(wanted.library))
    had_all = is_complete(template, library, target, product_layers=wanted.product_layers)
    began_s = time.monotonic()
    try:
        refusals = build_missing(
            template,
            library,
            target,
            lambda text: events.send(Message(level="info", text=text)),
            product_layers=wanted.product_layers,
        )
        if (keys := known_keys(template, library, target, product_layers=wanted.product_layers)) is not None:
            seconds = 0.0 if had_all else time.monotonic() - began_s
            MadeBook(Path(wanted.library)).add(wanted.identity(), keys, device=wanted.device, seconds=seconds)
        return refusals
    except HorizonError:
        raise
    except OSError as error:
        # A full disk is no reason not to train.
        return [f"the compiled layers could not be saved: {error.strerror or error}"]


if __name__ == "__main__":
    sys.exit(serve(work, who="the compilation"))
