"""Compiled layers for a job, while it starts: decides whether to compile, and runs the child that does.

The compiler takes seconds to load, hundreds of megabytes, and has been seen to crash; so it runs in a process of its own:
`python -m horizon_server.worker.compilation REQUEST`.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from horizon_server import progress
from horizon_server.children.entry import Answer, EventWriter, Failure, decode_line, serve
from horizon_server.codec import from_plain, to_json
from horizon_server.engine.compiled.layers import CompiledLayers, is_complete
from horizon_server.engine.compiled.library import CodeLibrary, Target
from horizon_server.engine.template import Template
from horizon_server.errors import HorizonError, InvalidSpec
from horizon_server.events import Message
from horizon_server.planning.gpu_compiler import CPP_COMPILER, compiler_environment
from horizon_server.planning.trainable import open_for_training
from horizon_server.records.execution import DeviceKind
from horizon_server.settings import child_environment
from horizon_server.spec import EVERYTHING, LoraSpec, TrainSpec
from horizon_server.worker_link.orders import Order, Orders

Choice = Literal["auto", "on", "off"]

# Below this, compiling takes longer than it saves: about five minutes of training on the machines that we know.
WORTH_COMPILING_FLOPS: dict[DeviceKind, float] = {"host": 1e14, "cuda": 5e16}
# It gets little of the processors beside jobs that train.
_MAX_COMPILE_S = 3600.0
_POLL_S = 0.5
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

    @property
    def target(self) -> Target:
        """What to compile for."""
        return Target(
            dtype=getattr(torch, self.dtype),
            device=torch.device(self.device),
            num_threads=self.num_threads,
            num_tokens=self.num_tokens,
        )


class Compilation:
    """The compiled layers of one attempt. `before` are the keys that the checkpoint to resume from was made with, None for a new job."""

    def __init__(
        self, template: Template, request: CompileRequest, *, choice: Choice, events: EventWriter, orders: Orders
    ) -> None:
        self._template, self._request, self._choice = template, request, choice
        self._events, self._orders = events, orders
        self._library = CodeLibrary(Path(request.library))

    def layers(
        self, *, model_flops: float, before: list[str] | None, take_device: Callable[[], bool] = lambda: True
    ) -> CompiledLayers:
        """The layers to train with. They are compiled first, then tried on the device; `take_device` False: the attempt ends before that.

        Raises:
            InvalidSpec: `train.compile` is `on` and some layer cannot be compiled.
        """
        eager = CompiledLayers(self._template)
        is_wanted = bool(before) if before is not None else self._is_worth_it(model_flops)
        if not is_wanted:
            return eager
        failures = self._compile()
        if self._orders.current is not Order.CONTINUE or not take_device():
            return eager  # the attempt ends before its first step
        # A resumed job takes what it had, whatever a trial on a busy machine says now.
        only_faster = self._choice == "auto" and before is None
        layers = CompiledLayers.load(
            self._template, self._library, self._request.target, only_faster=only_faster, keys=before
        )
        refusals = failures or layers.refusals
        if before is not None and layers.keys != before:
            self._warn(
                "the compiled layers that the checkpoint was made with cannot be made again here: its steps may differ in the last "
                "bits from those of a job that was not stopped"
            )
        elif refusals and self._choice == "on":
            raise InvalidSpec(
                f"train.compile is on, but not all of this model's layers can be compiled: {refusals[0]}; use train.compile: auto or off"
            )
        reason = f"; the others run eagerly: {refusals[0]}" if refusals else ""
        self._tell(f"compiled layers: {layers.num_layers} of {self._template.num_layers}{reason}")
        return layers

    def _is_worth_it(self, model_flops: float) -> bool:
        if self._choice == "auto":
            kind: DeviceKind = "cuda" if self._request.device.startswith("cuda") else "host"
            # By the work and not by what the library has, so that a job's numbers do not depend on earlier jobs.
            return model_flops >= WORTH_COMPILING_FLOPS[kind]
        return self._choice == "on"

    def _compile(self) -> list[str]:
        """Have the child make what the library lacks; returns why it could not."""
        if is_complete(self._template, self._library, self._request.target):
            return []
        if shutil.which(CPP_COMPILER) is None:
            return [f"there is no C++ compiler ({CPP_COMPILER}) on this node"]
        for _ in range(_MOST_KILLS):
            failures = self._run_child()
            if failures is not None:
                return failures
            self._warn("the compiling process was killed by SIGKILL: by hand, or by the kernel for lack of memory")
        return ["the compiling process was killed every time"]

    def _run_child(self) -> list[str] | None:
        """Run the child once; returns why it could not make what the library lacks, None where it was killed."""
        scratch = self._library.make_scratch()
        # TORCHINDUCTOR_CACHE_DIR is read by the compiler: its own default is a folder in /tmp that anybody could have made before.
        environment = {**child_environment(), "TORCHINDUCTOR_CACHE_DIR": str(scratch), "TMPDIR": str(scratch)}
        if self._request.device.startswith("cuda"):
            environment = compiler_environment(environment, scratch)
        with tempfile.TemporaryDirectory(prefix="horizon-compile-") as folder, contextlib.ExitStack() as stack:
            file = Path(folder) / "request.json"
            file.write_text(to_json(self._request), "ascii")
            child = subprocess.Popen(
                [sys.executable, "-m", "horizon_server.worker.compilation", str(file)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, env=environment,
            )  # fmt: skip
            stack.callback(_end, child)
            return self._answer_of(child)

    def _answer_of(self, child: subprocess.Popen[bytes]) -> list[str] | None:
        assert child.stdout is not None
        deadline_s = time.monotonic() + _MAX_COMPILE_S
        pending = b""
        # Not select(), which refuses descriptors above 1023.
        poll = select.poll()
        poll.register(child.stdout, select.POLLIN | select.POLLHUP)
        while self._orders.current is Order.CONTINUE:
            if time.monotonic() > deadline_s:
                return [f"compiling took more than {_MAX_COMPILE_S:.0f} s"]
            progress.advance()  # it has a limit of its own
            if not poll.poll(1000 * _POLL_S):
                continue
            data = os.read(child.stdout.fileno(), 1 << 16)
            if not data:
                status = child.wait()
                # A kill says nothing about the model, while a job with other layers than the last time would get other bits.
                if status == -signal.SIGKILL:
                    return None
                return [f"the compiling process ended with status {status}; the log of the attempt has its last lines"]
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                match decode_line(line):
                    case Answer(value):
                        return [str(refusal) for refusal in value]
                    case Failure(error):
                        return [error.message]
                    case Message() as message:
                        self._events.send(message)
                    case _:
                        pass
        return []

    def _tell(self, text: str) -> None:
        self._events.send(Message(level="info", text=text))

    def _warn(self, text: str) -> None:
        self._events.send(Message(level="warning", text=text))


def _end(child: subprocess.Popen[bytes]) -> None:
    # The compiler's own children too, which are in the session that the child began.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.communicate()


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
        return build_missing(template, library, target, lambda text: events.send(Message(level="info", text=text)))
    except HorizonError:
        raise
    except OSError as error:
        # A full disk is no reason not to train.
        return [f"the compiled layers could not be saved: {error.strerror or error}"]


if __name__ == "__main__":
    sys.exit(serve(work, who="the compilation", is_loading=True))
