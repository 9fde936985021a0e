"""What double buffering hides: step time over an emulated link against the larger of compute and transfer.

The link's rate is chosen from a run without one, so that copying takes half of the compute time (compute-bound) or twice of it
(transfer-bound). Then the same with one slot, where nothing can overlap.
"""

from __future__ import annotations

import argparse
import statistics
import time

from bench.models import qwen3_config, random_rows, random_store
from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.micro_batch import MicroBatch
from horizon_server.engine.report import StepReport
from horizon_server.engine.template import Template
from horizon_server.engine.trainer import TrainConfig, Trainer


def run(
    rows: list[MicroBatch], template: Template, *, link_bytes_per_s: float | None, num_slots: int, num_steps: int
) -> list[tuple[float, StepReport]]:
    """Return wall seconds and report of each step after the first."""
    store = random_store(template)
    # One compute thread leaves a processor to the queues: the link is what is measured, not a scramble for cores.
    device = HostDevice(num_threads=1, link_bytes_per_s=link_bytes_per_s)
    config = TrainConfig(
        num_steps=1000,
        learning_rate=1e-5,
        num_weight_slots=num_slots,
        num_gradient_slots=num_slots,
        optimizer_threads=1,
    )
    trainer = Trainer(template, store, device, config)
    steps = []
    for _ in range(num_steps + 1):
        started_s = time.perf_counter()
        report = trainer.train_step(rows)
        steps.append((time.perf_counter() - started_s, report))
    trainer.close()
    device.close()
    store.close()
    return steps[1:]


def main() -> None:
    """Print a line per setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=["6m", "36m", "40m"], default="36m")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--row-tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=4)
    arguments = parser.parse_args()
    config = qwen3_config(arguments.shape)
    template = Template.from_config(config)
    rows = random_rows(config.vocab_size, num_rows=arguments.rows, row_tokens=arguments.row_tokens)
    free = run(rows, template, link_bytes_per_s=None, num_slots=2, num_steps=arguments.steps)
    compute_s = statistics.median(report.compute_s for _, report in free)
    h2d_bytes = free[0][1].transfer["h2d"].bytes
    print("| setting | slots | compute s | h2d busy s | step s | step / max(compute, transfer) | h2d overlap |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for setting, share in (("compute-bound", 0.5), ("transfer-bound", 2.0)):
        for num_slots in (2, 1):
            rate = h2d_bytes / (share * compute_s)
            steps = run(rows, template, link_bytes_per_s=rate, num_slots=num_slots, num_steps=arguments.steps)
            wall_s = statistics.median(wall for wall, _ in steps)
            busy_s = statistics.median(report.transfer["h2d"].busy_s for _, report in steps)
            computed_s = statistics.median(report.compute_s for _, report in steps)
            overlap = statistics.median(report.transfer["h2d"].overlap_ratio for _, report in steps)
            print(
                f"| {setting} | {num_slots} | {computed_s:.2f} | {busy_s:.2f} | {wall_s:.2f} "
                f"| {wall_s / max(computed_s, busy_s):.2f} | {overlap:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
