"""Seconds that a job waits for its compiled layers: the first time, and when they are in the library.

A worker starts a child for the first; nothing is timed but what the worker waits for.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from transformers import AutoModelForCausalLM

from bench.models import SHAPES, qwen3_config
from horizon_server.children.entry import EventWriter
from horizon_server.engine.template import Template
from horizon_server.jobs.compile_request import CompileRequest
from horizon_server.planning.ledger import micro_batch_tokens
from horizon_server.records.job import StopRequest
from horizon_server.store.cpus import available_cpus
from horizon_server.worker.compilation import Compilation


class _NoOrders:
    """A job that nobody stops."""

    current = StopRequest.NOTHING


class _Silent(EventWriter):
    """Drops what a worker would report."""

    def send(self, line: object) -> None:
        """Drop a line."""


def measure(shape: str, dtype: str, *, num_threads: int, folder: Path) -> tuple[float, float, int]:
    """Seconds cold and cached, and how many layers run compiled."""
    config = qwen3_config(shape)
    model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model.save_pretrained(folder / "model")
    template = Template.from_folder(folder / "model")
    request = CompileRequest(
        model=str(folder / "model"),
        library=str(folder / "compiled"),
        dtype=dtype,
        device="cpu",
        num_threads=num_threads,
        num_tokens=micro_batch_tokens(config.hidden_size, "host"),
    )
    seconds, num_layers = [], 0
    for _ in range(2):
        compilation = Compilation(template, request, choice="on", events=_Silent(), orders=_NoOrders())  # type: ignore[arg-type]
        started_s = time.perf_counter()
        num_layers = compilation.layers(model_flops=0.0, before=None).num_layers
        seconds.append(time.perf_counter() - started_s)
    return seconds[0], seconds[1], num_layers


def main() -> None:
    """Print one line per shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), nargs="*", default=["6m"])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=available_cpus())
    arguments = parser.parse_args()
    print("| shape | dtype | threads | first job waits | later jobs wait | compiled layers |")
    print("| --- | --- | --- | --- | --- | --- |")
    for shape in arguments.shape:
        with tempfile.TemporaryDirectory() as folder:
            cold_s, cached_s, num_layers = measure(
                shape, arguments.dtype, num_threads=arguments.threads, folder=Path(folder)
            )
        print(
            f"| {shape} | {arguments.dtype} | {arguments.threads} | {cold_s:.1f} s | {cached_s:.2f} s | {num_layers} |"
        )


if __name__ == "__main__":
    main()
