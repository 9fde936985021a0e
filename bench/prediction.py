"""Predicted against measured step time: the roofline over this machine's measured speeds, against the engine taking steps.

The speeds are measured before each shape, as `horizond doctor` does; then it takes steps of several sizes, rows of one document each.
Where the measured peak differs between shapes, the machine was not quiet. Both the quickest and the median step are shown, because the
prediction is for a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from bench.models import SHAPES, qwen3_config, random_rows
from horizon_server.engine.device.factory import device_for
from horizon_server.engine.rate_probe import measure_rates
from horizon_server.engine.template import Template
from horizon_server.engine.trainer import TrainConfig, Trainer
from horizon_server.planning.ledger import DeviceKind
from horizon_server.planning.model_folder import ModelFolder, open_model_folder
from horizon_server.planning.roofline import DeviceRates, predict_step, work_of_step
from horizon_server.records.plan import StepPrediction
from horizon_server.store.cpus import available_cpus
from horizon_server.store.host_store import HostStore
from horizon_server.store.model_load import load_model


@dataclass(frozen=True, kw_only=True)
class Case:
    """One size of step of one shape."""

    shape: str
    num_rows: int
    row_tokens: int


def predicted(folder: ModelFolder, rates: DeviceRates, case: Case, device: DeviceKind) -> StepPrediction:
    """What the plan says of a case."""
    work = work_of_step(
        folder,
        tokens_per_step=case.num_rows * case.row_tokens,
        sequence_length=case.row_tokens,
        device_kind=device,
        grad_bytes=4 if device == "host" else 2,
        activation_placement="device",
    )
    return predict_step(work, rates, device_kind=device)


def measured(folder: ModelFolder, case: Case, *, device: DeviceKind, num_threads: int, num_steps: int) -> list[float]:
    """Seconds of each step after the first, in a run that keeps going: an update is hidden where the engine hides it."""
    template = Template.from_folder(folder.path, layout=folder.layout)
    compute = device_for(device, num_threads=num_threads)
    store = HostStore.allocate(template.layout, grad_dtype=compute.gradient_dtype)
    load_model(store, folder.path)
    settings = TrainConfig(num_steps=1000, learning_rate=1e-5, optimizer_threads=num_threads)
    trainer = Trainer(template, store, compute, settings)
    try:
        rows = [
            random_rows(template.vocab_size, num_rows=case.num_rows, row_tokens=case.row_tokens, seed=i)
            for i in range(num_steps + 1)
        ]
        return [trainer.train_step(step).duration_s for step in rows][1:]
    finally:
        trainer.close()
        compute.close()
        store.close()


def write_folder(shape: str, path: Path) -> ModelFolder:
    """A model folder of a named shape with random weights."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(qwen3_config(shape), dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model.save_pretrained(path)
    return open_model_folder(path)


def main() -> None:
    """Print one line per case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), nargs="*", default=["6m", "40m"])
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 4], help="rows of a step")
    parser.add_argument("--row-tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=available_cpus())
    parser.add_argument("--device", choices=["host", "cuda"], default="host")
    arguments = parser.parse_args()
    print(
        "| shape | peak GFLOP/s | tokens/step | bound | predicted s | measured s: best | median | predicted/best | predicted/median |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for shape in arguments.shape:
        # Anew for each: on a machine that others share, processors change their speed within minutes.
        rates = measure_rates(arguments.device, num_threads=arguments.threads)
        with tempfile.TemporaryDirectory() as scratch:
            folder = write_folder(shape, Path(scratch))
            for num_rows in arguments.rows:
                case = Case(shape=shape, num_rows=num_rows, row_tokens=arguments.row_tokens)
                said = predicted(folder, rates, case, arguments.device)
                took = measured(
                    folder, case, device=arguments.device, num_threads=arguments.threads, num_steps=arguments.steps
                )
                best, median = min(took), statistics.median(took)
                print(
                    f"| {shape} | {rates.peak_flops_per_s / 1e9:,.0f} | {num_rows * case.row_tokens} | {said.bound} "
                    f"| {said.step_s:.3f} | {best:.3f} | {median:.3f} | {said.step_s / best:.2f} | {said.step_s / median:.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
