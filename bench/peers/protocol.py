"""What the bench and a peer say to each other: one JSON object a line, orders on stdin and answers on stdout.

The bench sends `{"do": "steps", "number": 3}` (a turn), `{"do": "held_out"}` and `{"do": "end"}`. A peer answers
`{"ready_s": ...}` once it has loaded and prepared, then each order. This module needs the standard library and NumPy.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

EOS = 1
"""The id that ends each answer of a pair; 0 pads."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What every peer of a run is given. `rows_at_once` are computed together, where a peer lets its user choose."""

    model: str
    data: str
    device: str
    dtype: str
    num_threads: int
    num_steps: int
    rows_per_step: int
    rows_at_once: int
    learning_rate: float
    lora_rank: int
    lora_alpha: float
    beta: float
    library: str
    """Where the engine's compiled layers are kept."""
    scratch: str

    @classmethod
    def read(cls, path: Path) -> Task:
        """From the file that `write` has written."""
        return cls(**json.loads(path.read_text("utf-8")))

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(asdict(self)), "utf-8")


class Rows:
    """The tokens of a run. Shapes: [rows, T], int64."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self.training: NDArray[np.int64] = np.load(Path(task.data) / "rows.npy")
        self.held_out: NDArray[np.int64] = np.load(Path(task.data) / "held_out.npy")

    def of_step(self, step: int) -> NDArray[np.int64]:
        """Those of a step, counted from 0."""
        number = self._task.rows_per_step
        return self.training[step * number : (step + 1) * number]

    @property
    def num_prompt_tokens(self) -> int:
        """Of each row, where rows are answers to compare."""
        return int(self.training.shape[1]) // 4

    def answers(self) -> NDArray[np.int64]:
        """The rows as pairs: an even row is chosen, the next one, with the prompt of the even row, rejected; both end
        with `EOS`."""
        answers = self.training.copy()
        answers[1::2, : self.num_prompt_tokens] = answers[::2, : self.num_prompt_tokens]
        answers[:, -1] = EOS
        return answers


class Line:
    """A peer's side of the conversation. What libraries print goes to stderr."""

    def __init__(self) -> None:
        self._started_s = time.perf_counter()
        self._began_s = self._began_processor_s = 0.0
        self._answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def ready(self) -> None:
        """Say that steps may begin, and how long that took."""
        self.answer(ready_s=time.perf_counter() - self._started_s)

    def answer(self, **facts: Any) -> None:
        """One line."""
        self._answers.write(json.dumps(facts) + "\n")
        self._answers.flush()

    def turn_ended(self) -> None:
        """Say what it took since the order: seconds, processor seconds, and the most that torch has taken on a GPU."""
        torch = sys.modules.get("torch")
        device_bytes = 0
        if torch is not None and torch.cuda.is_available():
            device_bytes = torch.cuda.max_memory_reserved()
        self.answer(
            seconds=time.perf_counter() - self._began_s,
            processor_s=time.process_time() - self._began_processor_s,
            device_bytes=device_bytes,
        )

    def next_turn(self, held_out: Callable[[], float]) -> int:
        """Wait for a turn and return its number of steps, 0 where the bench has ended; other orders are answered
        meanwhile."""
        for line in sys.stdin:
            order = json.loads(line)
            if order["do"] == "steps":
                self._began_s, self._began_processor_s = time.perf_counter(), time.process_time()
                return int(order["number"])
            if order["do"] == "end":
                break
            self.answer(loss=held_out())
        return 0

    def serve(self, step: Callable[[int], object], finish: Callable[[], object], held_out: Callable[[], float]) -> None:
        """Take the turns of a loop of one's own. `step` is given its number, from 0; `finish` waits for the last
        one."""
        taken = 0
        self.ready()
        while steps := self.next_turn(held_out):
            for number in range(taken, taken + steps):
                step(number)
            taken += steps
            finish()
            self.turn_ended()
