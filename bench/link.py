"""What double buffering hides: step time over an emulated link against the larger of compute and transfer.

The link's rate is chosen from a run without one, so that copying takes 0.4 of the compute time (compute-bound: forward
too, which has half of the copies but little more than a quarter of the work) or twice of it (transfer-bound). Then the
same with one slot, where nothing can overlap. Overlap is shown as the engine reports it and as it follows from a trace
of the queues, without the engine's own account (`bench.trace_overlap`).
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from bench.models import qwen3_config, random_rows, random_store
from bench.trace_overlap import DirectionOverlap, overlap_of_step
from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.device.timeline import Trace
from horizon_server.engine.micro_batch import MicroBatch
from horizon_server.engine.template import Template
from horizon_server.engine.trainer import Trainer
from horizon_server.figures import StepFigures
from horizon_server.recipe import Recipe
from horizon_server.records.execution import Execution


@dataclass(frozen=True, kw_only=True)
class LinkStep:
    """One step: its wall seconds, its report, and its overlap as the trace shows it."""

    wall_s: float
    report: StepFigures
    traced: dict[str, DirectionOverlap]


def run(
    rows: list[MicroBatch],
    template: Template,
    *,
    link_bytes_per_s: float | None,
    num_slots: int,
    num_steps: int,
    trace_file: Path | None = None,
) -> list[LinkStep]:
    """Return each step after the first; `trace_file` gets the last one's trace."""
    store = random_store(template)
    # One compute thread leaves a processor to the queues: the link is what is measured, not a scramble for cores.
    trace = Trace()
    device = HostDevice(num_threads=1, link_bytes_per_s=link_bytes_per_s, trace=trace)
    execution = Execution(optimizer_threads=1, num_weight_slots=num_slots, num_gradient_slots=num_slots)
    trainer = Trainer(template, store, device, Recipe(learning_rate=1e-5), execution, num_steps=1000)
    steps = []
    for _ in range(num_steps + 1):
        trace.clear()
        started_s = time.perf_counter()
        report = trainer.train_step(rows)
        wall_s = time.perf_counter() - started_s
        traced = overlap_of_step(trace.spans(), num_gradient_slots=num_slots)
        steps.append(LinkStep(wall_s=wall_s, report=report, traced=traced))
    trainer.close()
    if trace_file is not None:
        trace.write(trace_file)
    device.close()
    store.close()
    return steps[1:]


def main() -> None:
    """Print a line per setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=["6m", "36m", "40m", "deep"], default="deep")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--row-tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--trace", type=Path, help="file for the last step's trace, to be opened in Perfetto")
    arguments = parser.parse_args()
    config = qwen3_config(arguments.shape)
    template = Template.from_config(config)
    rows = random_rows(config.vocab_size, num_rows=arguments.rows, row_tokens=arguments.row_tokens)
    free = run(rows, template, link_bytes_per_s=None, num_slots=2, num_steps=arguments.steps)
    compute_s = statistics.median(step.report.compute_s for step in free)
    h2d_bytes = free[0].report.h2d.bytes
    print(
        "| setting | slots | compute s | h2d busy s | step s | step / max(compute, transfer) "
        "| h2d overlap, reported | from the trace | d2h overlap, reported | from the trace |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for setting, share in (("compute-bound", 0.4), ("transfer-bound", 2.0)):
        for num_slots in (2, 1):
            rate = h2d_bytes / (share * compute_s)
            steps = run(
                rows,
                template,
                link_bytes_per_s=rate,
                num_slots=num_slots,
                num_steps=arguments.steps,
                trace_file=arguments.trace,
            )
            wall_s = statistics.median(step.wall_s for step in steps)
            busy_s = statistics.median(step.report.h2d.busy_s for step in steps)
            computed_s = statistics.median(step.report.compute_s for step in steps)
            overlaps = " | ".join(
                f"{statistics.median(getattr(step.report, way).overlap_ratio for step in steps):.2f} "
                f"| {statistics.median(step.traced[way].ratio for step in steps):.2f}"
                for way in ("h2d", "d2h")
            )
            print(
                f"| {setting} | {num_slots} | {computed_s:.2f} | {busy_s:.2f} | {wall_s:.2f} "
                f"| {wall_s / max(computed_s, busy_s):.2f} | {overlaps} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
