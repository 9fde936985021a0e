"""The bench's side of a peer: its process, its turns and its memory."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.peers.memory import MemoryWatch, processes
from horizon_server.settings import child_environment

READY_S, TURN_S = 1800.0, 1200.0
_END_S = 60.0


class PeerFailed(Exception):
    """A peer ended, or did not answer; the message is its last line."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What a turn took. `device_bytes` are the most that the peer has taken on a GPU since its start."""

    seconds: float
    processor_s: float
    device_bytes: int


class PeerProcess:
    """A peer that waits for its turns. Its stderr goes to `log`."""

    def __init__(self, command: Sequence[str], log: Path, variables: dict[str, str] | None = None) -> None:
        self._log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment(Path(command[0]).parent) | (variables or {}),
            )
        self.memory = MemoryWatch(self._process.pid)
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def wait_until_ready(self) -> float:
        """Seconds that it took to load and prepare. Raises PeerFailed."""
        return float(self._answer(READY_S)["ready_s"])

    def steps(self, number: int) -> Turn:
        """Have it take that many steps. Raises PeerFailed."""
        return Turn(**self._ask(TURN_S, do="steps", number=number))

    def held_out_loss(self) -> float:
        """With the weights that it has now. Raises PeerFailed."""
        return float(self._ask(TURN_S, do="held_out")["loss"])

    def end(self) -> None:
        """End it, its children and its memory's watch."""
        self.memory.stop()
        children = processes(self._process.pid)[1:]
        if self._process.poll() is None:
            try:
                self._send(do="end")
                self._process.wait(_END_S)
            except (PeerFailed, subprocess.TimeoutExpired):
                self._process.kill()
                self._process.wait()
        # They may have its pipes too, and compilers keep helpers.
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        self._reader.join()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()

    def _ask(self, limit_s: float, **order: Any) -> dict[str, Any]:
        self._send(**order)
        return self._answer(limit_s)

    def _send(self, **order: Any) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise PeerFailed(self._last_line()) from error

    def _answer(self, limit_s: float) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=limit_s)
        except queue.Empty:
            raise PeerFailed(f"no answer after {limit_s:.0f} s") from None
        if not line:
            raise PeerFailed(self._last_line())
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_line(self) -> str:
        lines = [line.strip() for line in self._log.read_text("utf-8", "replace").splitlines() if line.strip()]
        code = self._process.wait()
        return f"ended with {code}: {lines[-1][:200] if lines else 'it printed nothing'}"


def environment(programs: Path | None = None) -> dict[str, str]:
    """Of a peer: without what makes it use another environment's packages, and with the folder of its own programs."""
    kept = {
        name: value for name, value in child_environment().items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))
    }
    kept |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TOKENIZERS_PARALLELISM": "false"}
    if programs is None:
        return kept
    # What DeepSpeed compiles stays with the packages that it was compiled for.
    extensions = {"TORCH_EXTENSIONS_DIR": str(programs.parent / "extensions")}
    return kept | extensions | {"PATH": f"{programs}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}
