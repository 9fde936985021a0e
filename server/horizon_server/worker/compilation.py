"""Compiled layers for a job, while it starts: decides whether to compile, and runs the child that does.

The compiler takes seconds to load, hundreds of megabytes, and has been seen to crash; so it runs in a process of its
own: `python -m horizon_server.worker.compilation REQUEST`.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from horizon_server import progress
from horizon_server.children.child import ChildTask, Limits
from horizon_server.children.entry import EventWriter, serve
from horizon_server.codec import from_plain, to_plain
from horizon_server.engine.compiled.layers import CompiledLayers, is_complete
from horizon_server.engine.compiled.library import CodeLibrary, Target
from horizon_server.engine.template import Template
from horizon_server.errors import HorizonError, InvalidSpec, Stalled, WorkerDied
from horizon_server.events import Message, WorkerLine
from horizon_server.planning.compiling import flops_of_job, is_worth_compiling
from horizon_server.planning.gpu_compiler import CPP_COMPILER, compiler_environment
from horizon_server.planning.model_folder import ModelFolder
from horizon_server.planning.trainable import open_for_training
from horizon_server.recipe import Matmul
from horizon_server.records.execution import DeviceKind
from horizon_server.records.job import StopRequest
from horizon_server.settings import child_environment
from horizon_server.spec import EVERYTHING, CompileChoice, LoraSpec, TrainSpec
from horizon_server.worker_link.orders import Orders
from horizon_server.worker_link.request import WorkerRequest

# It gets little of the processors beside jobs that train.
_MAX_COMPILE_S = 3600.0
# How soon an order to end is seen.
_POLL_S = 0.5
_OWN_LOG = Path("/proc/self/fd/2")
# A job is not to wait forever on a node that has no memory for the compiler.
_MOST_KILLS = 3


@dataclass(frozen=True, kw_only=True)
class CompileRequest:
    """What the child is asked for."""

    model: str
    library: str
    dtype: str
    device: str
    num_threads: int
    num_tokens: int
    trainable: tuple[str, ...] = EVERYTHING
    """As in the job: what is frozen has no gradient to compute."""
    lora: Mapping[str, Any] = field(default_factory=dict)
    """The adapters of the job, as its spec has them."""
    matmul: Matmul = "bf16"
    product_layers: int = 0
    """The last layers that are to keep their products, as the job's plan says."""

    @property
    def target(self) -> Target:
        """What to compile for."""
        return Target(
            dtype=getattr(torch, self.dtype),
            device=torch.device(self.device),
            num_threads=self.num_threads,
            num_tokens=self.num_tokens,
            matmul=self.matmul,
        )


def compile_request(request: WorkerRequest) -> CompileRequest:
    """What an attempt's layers are compiled for."""
    train, execution = request.spec.train, request.plan.execution
    return CompileRequest(
        model=str(request.model),
        library=str(request.compiled),
        dtype=execution.compute_dtype,
        device="cpu" if execution.device_kind == "host" else "cuda",
        num_threads=execution.num_threads,
        num_tokens=min(max(train.sequence_length, execution.micro_batch_tokens), train.tokens_per_step),
        trainable=train.trainable,
        lora=train.lora.model_dump(mode="json"),
        product_layers=execution.residency.product_layers,
        matmul=train.matmul,
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
        is_wanted = bool(before) if before is not None else self._is_worth_it(model_flops)
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
            self._request.target,
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

    def _is_worth_it(self, model_flops: float) -> bool:
        kind: DeviceKind = "cuda" if self._request.device.startswith("cuda") else "host"
        return is_worth_compiling(self._choice, kind, model_flops)

    def _compile(self) -> list[str]:
        """Have the child make what the library lacks; returns why it could not."""
        request = self._request
        if is_complete(self._template, self._library, request.target, product_layers=request.product_layers):
            return []
        if shutil.which(CPP_COMPILER) is None:
            return [f"there is no C++ compiler ({CPP_COMPILER}) on this node"]
        for _ in range(_MOST_KILLS):
            failures = asyncio.run(self._run_child())
            if failures is not None:
                return failures
        return ["the compiling process was killed every time"]

    async def _run_child(self) -> list[str] | None:
        """Run the child once; returns why it could not make what the library lacks, None where it was killed."""
        scratch = self._library.make_scratch()
        # TORCHINDUCTOR_CACHE_DIR is read by the compiler: its own default is a folder in /tmp that anybody could have
        # made before.
        environment = {**child_environment(), "TORCHINDUCTOR_CACHE_DIR": str(scratch), "TMPDIR": str(scratch)}
        if self._request.device.startswith("cuda"):
            environment = compiler_environment(environment, scratch)
        task = ChildTask(
            module="horizon_server.worker.compilation",
            who="the compilation",
            environment=environment,
            limits=Limits(wall_s=_MAX_COMPILE_S),
        )

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
            return [f"compiling took more than {_MAX_COMPILE_S:.0f} s"]
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
    from horizon_server.engine.compiled.build import build_missing

    wanted = from_plain(CompileRequest, request)
    torch.set_num_threads(wanted.num_threads)
    train = TrainSpec(trainable=wanted.trainable, lora=LoraSpec(**wanted.lora))
    found = open_for_training(Path(wanted.model), train)
    template = Template.from_folder(found.path, layout=found.layout, recipe=train.recipe)
    target = wanted.target
    template.place_buffers(lambda tensor: tensor.to(target.device))
    library = CodeLibrary(Path(wanted.library))
    try:
        return build_missing(
            template,
            library,
            target,
            lambda text: events.send(Message(level="info", text=text)),
            product_layers=wanted.product_layers,
        )
    except HorizonError:
        raise
    except OSError as error:
        # A full disk is no reason not to train.
        return [f"the compiled layers could not be saved: {error.strerror or error}"]


if __name__ == "__main__":
    sys.exit(serve(work, who="the compilation", is_loading=True))
