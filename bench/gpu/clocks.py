"""The GPU's clock and power while something runs, as nvidia-smi samples them."""

from __future__ import annotations

import shutil
import statistics
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_COMMAND = ("--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", "--id=0", "--loop-ms=500")


@dataclass
class Clocks:
    """Medians over the time of the block; 0 where nothing was sampled."""

    sm_mhz: float = 0.0
    power_w: float = 0.0


@contextmanager
def sampled(*, on: bool) -> Iterator[Clocks]:
    """Sample during the block; the values are there after it."""
    clocks, program = Clocks(), shutil.which("nvidia-smi")
    if not on or program is None:
        yield clocks
        return
    process = subprocess.Popen(
        [program, *_COMMAND], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        yield clocks
    finally:
        process.terminate()
        text, _ = process.communicate()
        samples = [tuple(map(float, fields)) for line in text.splitlines() if (fields := _numbers(line))]
        if samples:
            clocks.sm_mhz, clocks.power_w = (statistics.median(sample[way] for sample in samples) for way in range(2))


def _numbers(line: str) -> list[str]:
    """Both fields of a line, or none where one is not a number."""
    fields = [field.strip() for field in line.split(",")]
    return fields if len(fields) == 2 and all(field.replace(".", "", 1).isdigit() for field in fields) else []
