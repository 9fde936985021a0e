"""A worker that trains nothing: it follows a script, and speaks the protocol of the real one over the real pipes.

`python -m tests.scripted_worker REQUEST --events-fd N`, as the daemon starts its workers. The script is `scripts/<name of the job>.json`
or `scripts/any.json` in the state folder; `Script` in tests/daemon_parts.py says what it may contain. The rest is as the job's spec says.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from horizon_server.children.entry import EventWriter, Order, Orders, serve
from horizon_server.errors import Diverged
from horizon_server.events import AttemptReady, CheckpointWritten, EvalDone, Message, StepDone
from horizon_server.store.manifest import TRAINER_FOLDER, Manifest, record_file, write_manifest

_LOOK_EVERY_S = 0.005
_HOLD_AT_MOST_S = 60.0


class ScriptedWorker:
    """One attempt, as its script wants it."""

    def __init__(self, request: dict[str, Any], events: EventWriter) -> None:
        self.request = request
        scripts = Path(request["checkpoints"]).parents[2] / "scripts"
        found = [path for path in (scripts / f"{request['spec']['name']}.json", scripts / "any.json") if path.exists()]
        self.script: dict[str, Any] = json.loads(found[0].read_text()) if found else {}
        # What ends a worker happens in the job's first attempt only, so that a resumed job gets to its end.
        self.first = self.request["attempt"] == 1 or self.script.get("every_attempt", False)
        self.released = scripts / f"{self.request['spec']['name']}.released"
        self.events = events
        self.orders = Orders()
        self.num_steps = self.script.get("num_steps") or self.request["spec"]["train"]["max_steps"] or 3

    def run(self) -> str:
        """Do the steps that are left; return how that ended, as the real worker does."""
        self._at("start")
        resumed = self.request["resume_from"]
        done = int(Path(resumed).name.removeprefix("step-")) if resumed else 0
        self.events.send(AttemptReady(step=done, num_steps=self.num_steps, device="host", packed_rows=4))
        if resumed:
            self.events.send(Message(level="info", text=f"continues after step {done}"))
        every = (
            self.script.get("checkpoint_every") or self.request["spec"]["checkpoint"]["every_steps"] or self.num_steps
        )
        for step in range(done + 1, self.num_steps + 1):
            self._at(step)
            if self.orders.current is Order.CANCEL:
                return "stopped"
            if self.orders.current is Order.STOP:
                self._checkpoint(step - 1)
                return "stopped"
            self._step(step)
            if step % every == 0 or step == self.num_steps:
                self._checkpoint(step)
        self._at("end")
        return "succeeded"

    def _at(self, moment: int | str) -> None:
        """Do what the script wants at this moment: `start`, before a step, or `end`."""
        if self.script.get("hold_at") == moment:
            self._hold()
        if not self.first:
            return
        if self.script.get("die_at") == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.script.get("exit_at") == moment:
            print("the last words of a worker", flush=True)
            os._exit(7)
        if self.script.get("fail_at") == moment:
            raise Diverged("the loss is not finite")

    def _hold(self) -> None:
        """Wait for an order, or until the test says so. With `deaf`, orders are not heard."""
        deadline = time.monotonic() + _HOLD_AT_MOST_S
        deaf = self.script.get("deaf", False)
        while time.monotonic() < deadline:
            # A deaf one has been given an order before it is released, but may not have read it yet.
            ordered, released = self.orders.current is not Order.CONTINUE, self.released.exists()
            if (ordered and released) if deaf else (ordered or released):
                return
            time.sleep(_LOOK_EVERY_S)

    def _step(self, step: int) -> None:
        time.sleep(self.script.get("step_s", 0.0))
        self.events.send(
            StepDone(
                step=step, num_steps=self.num_steps, loss=1.0 / step, grad_norm=1.0, learning_rate=0.1, epoch=step / self.num_steps,
                num_input_tokens_seen=8 * step, num_tokens=8, tokens_per_second=80.0, duration_s=0.1,
                eta_s=0.1 * (self.num_steps - step),
            )
        )  # fmt: skip
        if step in self.script.get("eval_at", ()):
            self.events.send(EvalDone(step=step, eval_loss=2.0 / step, num_targets=4))

    def _checkpoint(self, step: int) -> None:
        """Write a folder that the daemon takes for a whole checkpoint."""
        folder = Path(self.request["checkpoints"]) / f"step-{step:08d}"
        (folder / TRAINER_FOLDER).mkdir(parents=True, exist_ok=True)
        (folder / "model.safetensors").write_bytes(f"weights after step {step}".encode())
        (folder / TRAINER_FOLDER / "trainer_state.json").write_text(json.dumps({"step": step}))
        names = ["model.safetensors", f"{TRAINER_FOLDER}/trainer_state.json"]
        write_manifest(folder, Manifest(files={name: record_file(folder / name) for name in names}, versions={}))
        self.events.send(CheckpointWritten(step=step, duration_s=0.1, size_bytes=24))


def work(request: Any, events: EventWriter) -> str:
    """Run one attempt."""
    logging.basicConfig(level=logging.INFO)
    return ScriptedWorker(request, events).run()


if __name__ == "__main__":
    sys.exit(serve(work, who="the worker", outlives_daemon=True))
