"""A worker that trains nothing: it follows a script, and speaks the protocol of the real one over the real link.

`python -m tests.scripted_worker REQUEST`, as the daemon starts its workers. The script is `scripts/<name of the
job>.json` or `scripts/any.json` in the state folder; `Script` in tests/daemon_parts.py says what it may contain. The
rest is as the job's spec says.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from tests.support import learning
from tests.support.resting import Resting, rest

from horizon_server import progress
from horizon_server.errors import Diverged, WorkerFailed
from horizon_server.events import (
    AttemptReady,
    CheckpointWritten,
    EvalDone,
    Message,
    ReferencesDone,
    StepDone,
    TurnWanted,
)
from horizon_server.records.job import StopRequest
from horizon_server.store.manifest import TRAINER_FOLDER, Manifest, record_file, write_manifest
from horizon_server.worker.device_turn import DeviceTurn
from horizon_server.worker_link.worker_end import WorkerEnd, serve_worker

_LOOK_EVERY_S = 0.005
# Longer than any test waits.
_HOLD_AT_MOST_S = 600.0


class ScriptedWorker:
    """One attempt, as its script wants it."""

    def __init__(self, request: dict[str, Any], link: WorkerEnd) -> None:
        self.request = request
        scripts = Path(request["checkpoints"]).parents[2] / "scripts"
        found = [path for path in (scripts / f"{request['spec']['name']}.json", scripts / "any.json") if path.exists()]
        self.script: dict[str, Any] = json.loads(found[0].read_text()) if found else {}
        # What ends a worker happens in the job's first attempt only, so that a resumed job gets to its end.
        self.first = self.request["attempt"] == 1 or self.script.get("every_attempt", False)
        self.resting = Resting(scripts.parent).folder
        # In place of the planes, which it does not use.
        self.memory = scripts / f"{self.request['job_id']}.memory"
        self.released = scripts / f"{self.request['spec']['name']}.released"
        self.events, self.orders = link, link.orders
        self.num_steps = self.script.get("num_steps") or self.request["spec"]["train"]["max_steps"] or 3
        limits = request.get("limits") or {}
        self.max_steps, self.deadline_s = limits.get("max_steps"), limits.get("deadline_s")
        self.turn = DeviceTurn(
            orders=self.orders,
            events=link,
            shared=request.get("turns", False),
            deadline_s=self.deadline_s,
            release=lambda: None,
            locks=[Path(file) for file in request.get("device_locks", ())],
        )

    def run(self) -> dict[str, str]:
        """Do the steps that are left; return how that ended, as the real worker does."""
        self._at("start")
        resumed = self.request["resume_from"]
        done = int(Path(resumed).name.removeprefix("step-")) if resumed else 0
        saved = done
        if self.request.get("resume_from_memory") and self.memory.exists():
            done = int(self.memory.read_text())
        # As the real one, which needs the device before it is ready.
        if not self._take_turn():
            if done > saved and self.orders.current.checkpoints:
                self._checkpoint(done)
            return _answer("stopped")
        if references := self.script.get("references"):
            self.events.send(ReferencesDone(done_tokens=references[0], total_tokens=references[1]))
            self.events.send(Message(level="info", text="in the pass"))
            self._at("references")
        self.events.send(AttemptReady(step=done, num_steps=self.num_steps, device="host", packed_rows=4))
        if resumed:
            self.events.send(Message(level="info", text=f"continues after step {done}"))
        every = (
            self.script.get("checkpoint_every") or self.request["spec"]["checkpoint"]["every_steps"] or self.num_steps
        )
        for step in range(done + 1, self.num_steps + 1):
            self._at(step)
            reason = self._limit_at(step - 1)
            has_turn = not reason and self._take_turn()
            if self.orders.current is StopRequest.CANCEL:
                return self._end("stopped")
            if self.orders.current is StopRequest.MOVE:
                self.memory.write_text(str(step - 1))
                return self._end("moved")
            if not has_turn:
                # A deadline that came while it waited.
                reason = reason or self._limit_at(step - 1)
                if step - 1 > saved or reason:
                    self._checkpoint(step - 1)
                return self._end("succeeded", reason) if reason else self._end("stopped")
            if self.orders.current.checkpoints:
                if not self._has_no_space():
                    self._checkpoint(step - 1)
                return self._end("stopped")
            self._step(step)
            if step % every == 0 or step == self.num_steps:
                self._checkpoint(step)
                saved = step
        self._at("end")
        return self._end("succeeded")

    def _limit_at(self, step: int) -> str:
        if self.script.get("early_stop_at") == step:
            return "EARLY_STOPPED"
        if self.max_steps is not None and step >= self.max_steps:
            return "STEP_LIMIT"
        return "WALL_CLOCK_LIMIT" if self.deadline_s is not None and time.time() >= self.deadline_s else ""

    def _end(self, outcome: str, reason: str = "") -> dict[str, str]:
        self.turn.give_back(release=True)
        return _answer(outcome, reason)

    def _take_turn(self) -> bool:
        if self._dies("die_waiting") and not self.orders.has_turn:
            self.events.send(TurnWanted())
            os.kill(os.getpid(), signal.SIGKILL)
        return self.turn.take()

    def _dies(self, how: str) -> bool:
        return self.first and self.script.get(how, False) and self.released.exists()

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
        if moment == self.script.get("break_at"):
            self.memory.write_text(str(self.script["break_at"] - 1))
            raise WorkerFailed("RuntimeError: CUDA error: the device has fallen off the bus")

    def _hold(self) -> None:
        """Wait for an order, or until the test says so. With `deaf`, orders are not heard."""
        deadline = time.monotonic() + _HOLD_AT_MOST_S
        deaf = self.script.get("deaf", False)
        while time.monotonic() < deadline:
            # A deaf one has been given an order before it is released, but may not have read it yet.
            ordered, released = self.orders.current is not StopRequest.NOTHING, self.released.exists()
            if (ordered and released) if deaf else (ordered or released):
                return
            if not self.script.get("keep_turn"):
                self.turn.boundary()
            time.sleep(_LOOK_EVERY_S)

    def _has_no_space(self) -> bool:
        """Wait for disk space that never comes, as the real worker does, where the script wants that of the first
        attempt."""
        if not self.first or not self.script.get("no_space"):
            return False
        self.orders.gives_up_waiting = False
        self.events.send(Message(level="warning", text="no space"))
        while not self.orders.gives_up_waiting and self.orders.current is not StopRequest.CANCEL:
            time.sleep(_LOOK_EVERY_S)
        return True

    def _be_slow(self, step: int) -> None:
        """Take long for a step: at work, or, in the first attempt, hanging."""
        slow_s = self.script.get("slow_s", 0.0)
        if self.first and self.script.get("hang_at") == step:
            threading.Event().wait(_HOLD_AT_MOST_S)
        end_s = time.monotonic() + (slow_s if self.script.get("slow_at") == step else 0.0)
        while time.monotonic() < end_s:
            progress.advance()
            time.sleep(_LOOK_EVERY_S)

    def _step(self, step: int) -> None:
        self._be_slow(step)
        duration_s = self.script.get("step_s", 0.0)
        time.sleep(duration_s)
        if self._dies("die_on_device"):
            os.kill(os.getpid(), signal.SIGKILL)
        if not self.script.get("keep_turn"):
            self.turn.boundary()
        duration_s = duration_s or 0.1
        figures: dict[str, Any] = {
            "loss": 1.0 / step,
            "grad_norm": 1.0,
            "learning_rate": 0.1,
            "num_input_tokens_seen": 8 * step,
            "num_tokens": 8,
            "tokens_per_second": 80.0,
        }
        spec = self.request["spec"]
        if self.script.get("learns"):
            figures = learning.step_figures(spec["name"], step, self.num_steps, spec, duration_s)
        done = StepDone(
            step=step,
            num_steps=self.num_steps,
            epoch=step / self.num_steps,
            duration_s=duration_s,
            compute_s=duration_s * self.script.get("compute_share", 1.0),
            eta_s=duration_s * (self.num_steps - step),
            **figures,
        )
        self.events.send(done)
        between = (lambda: None) if self.script.get("keep_turn") else self.turn.boundary
        rest(self.resting, "after", step, self.events, between)
        if step in self.script.get("eval_at", ()):
            learned = self.script.get("learns") and learning.evaluation(spec["name"], step, self.num_steps, done)
            self.events.send(learned or EvalDone(step=step, eval_loss=2.0 / step, num_targets=4))

    def _checkpoint(self, step: int) -> None:
        """Write a folder that the daemon takes for a whole checkpoint."""
        self.turn.give_back(release=True)
        folder = Path(self.request["checkpoints"]) / f"step-{step:08d}"
        (folder / TRAINER_FOLDER).mkdir(parents=True, exist_ok=True)
        (folder / "model.safetensors").write_bytes(f"weights after step {step}".encode())
        (folder / TRAINER_FOLDER / "trainer_state.json").write_text(json.dumps({"step": step, "last_eval": None}))
        names = ["model.safetensors", f"{TRAINER_FOLDER}/trainer_state.json"]
        write_manifest(folder, Manifest(files={name: record_file(folder / name) for name in names}, versions={}))
        size_bytes = self.script.get("checkpoint_bytes", 24)
        self.events.send(CheckpointWritten(step=step, duration_s=0.1, size_bytes=size_bytes))


def _answer(outcome: str, reason: str = "") -> dict[str, str]:
    return {"outcome": outcome, "reason": reason, "message": f"the script says {reason}" if reason else ""}


def work(request: Any, link: WorkerEnd) -> dict[str, str]:
    """Run one attempt."""
    logging.basicConfig(level=logging.INFO)
    return ScriptedWorker(request, link).run()


if __name__ == "__main__":
    serve_worker(work, who="the worker", progress_every_s=0.1)
