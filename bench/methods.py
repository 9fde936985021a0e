"""What a method costs against full fine-tuning of the same model, over an emulated link.

LoRA: the rate of the link is chosen from a run of full fine-tuning without one, so that copying the weights up takes
`--share` times as long as its compute (above 1: the link is what a step waits for). Both then take the same steps with
the same tokens over that link. In one setting the device memory that full fine-tuning has for gradients is used for
layers that stay there, in two the frozen matrices are kept in fewer bits; a host unpacks them with the one thread of
its h2d queue.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass

import torch

from bench.models import qwen3_config, random_rows
from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.micro_batch import MicroBatch
from horizon_server.engine.template import Template
from horizon_server.engine.trainer import Trainer
from horizon_server.figures import StepFigures
from horizon_server.planning.lora import linear_maps
from horizon_server.recipe import Recipe
from horizon_server.records.execution import Execution, Residency
from horizon_server.spec import LoraSpec
from horizon_server.store.adapters import with_adapters
from horizon_server.store.host_store import HostStore
from horizon_server.store.layout import Packing


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The median step of a run, its last report, and what its device held."""

    wall_s: float
    report: StepFigures


def random_store(template: Template) -> HostStore:
    """Return a store with N(0, 0.02) weights and ones for norms; adapters begin random too, so that nothing is
    skipped."""
    store = HostStore.allocate(template.layout)
    generator = torch.Generator().manual_seed(0)
    for _, tensor in template.layout.tensors():
        # Norms, and magnitudes of adapters.
        is_norm = len(tensor.shape) == 1
        store.write_master(
            tensor.name,
            torch.ones(tensor.shape) if is_norm else (0.02 * torch.randn(tensor.shape, generator=generator)).bfloat16(),
        )
    return store


def run(
    rows: list[MicroBatch],
    template: Template,
    *,
    link_bytes_per_s: float | None,
    num_steps: int,
    resident_layers: int = 0,
) -> Measured:
    """Return the median of the steps after the first."""
    store = random_store(template)
    # One compute thread leaves a processor to the queues: the link is what is measured, not a scramble for cores.
    device = HostDevice(num_threads=1, link_bytes_per_s=link_bytes_per_s)
    recipe = Recipe(learning_rate=1e-5, adapter_scale=2.0)
    execution = Execution(optimizer_threads=1, residency=Residency(resident_layers=resident_layers))
    trainer = Trainer(template, store, device, recipe, execution, num_steps=1000)
    walls = []
    for _ in range(num_steps + 1):
        started_s = time.perf_counter()
        report = trainer.train_step(rows)
        walls.append(time.perf_counter() - started_s)
    trainer.close()
    device.close()
    store.close()
    return Measured(wall_s=statistics.median(walls[1:]), report=report)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=["6m", "36m", "40m", "deep"], default="deep")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--row-tokens", type=int, default=256)
    parser.add_argument("--share", type=float, default=3.0)
    parser.add_argument("--steps", type=int, default=4)
    arguments = parser.parse_args()
    config = qwen3_config(arguments.shape)
    full = Template.from_config(config)
    maps = linear_maps(full.layout, LoraSpec())

    def adapted(base: Packing, *, dora: bool = False) -> Template:
        layout = with_adapters(
            full.layout,
            maps,
            rank=arguments.rank,
            decay="trainer",
            is_bfloat16=lambda _: True,
            packing_of=lambda name: base if name in maps else "none",
            dora=dora,
        )
        return Template.from_config(config, layout=layout)

    lora = adapted("none")
    rows = random_rows(config.vocab_size, num_rows=arguments.rows, row_tokens=arguments.row_tokens)
    num_tokens = arguments.rows * arguments.row_tokens
    free = run(rows, full, link_bytes_per_s=None, num_steps=1)
    rate = free.report.h2d.bytes / (arguments.share * free.report.compute_s)
    plain = run(rows, full, link_bytes_per_s=rate, num_steps=arguments.steps)
    adapters = run(rows, lora, link_bytes_per_s=rate, num_steps=arguments.steps)
    freed = plain.report.device_memory_bytes["gradients"] - adapters.report.device_memory_bytes["gradients"]
    layer_bytes = 4 * lora.layout.units[1].num_elements
    num_resident = min(freed // layer_bytes, full.num_layers)
    kept = run(rows, lora, link_bytes_per_s=rate, num_steps=arguments.steps, resident_layers=num_resident)
    dora = run(rows, adapted("none", dora=True), link_bytes_per_s=rate, num_steps=arguments.steps)
    packings: tuple[Packing, ...] = ("int8", "nf4")
    packed = [run(rows, adapted(base), link_bytes_per_s=rate, num_steps=arguments.steps) for base in packings]
    print(
        "| method | device MB, weights + gradients | up MB | down MB | compute s | up busy s | down busy s | step s | "
        "tokens/s | of full |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, found in (
        ("full", plain),
        (f"LoRA, rank {arguments.rank}", adapters),
        (f"DoRA, rank {arguments.rank}", dora),
        (f"LoRA, {num_resident} of {full.num_layers} layers stay", kept),
        *((f"LoRA, base in {base}", found) for base, found in zip(packings, packed, strict=True)),
    ):
        report, memory = found.report, found.report.device_memory_bytes
        print(
            f"| {name} | {(memory['weights'] + memory['gradients']) / 1e6:.1f} | {report.h2d.bytes / 1e6:.1f} "
            f"| {report.d2h.bytes / 1e6:.1f} | {report.compute_s:.2f} | {report.h2d.busy_s:.2f} | "
            f"{report.d2h.busy_s:.2f} | {found.wall_s:.2f} | {num_tokens / found.wall_s:.0f} | "
            f"{plain.wall_s / found.wall_s:.2f} |",
            flush=True,
        )
    print(f"link: {rate / 1e6:.1f} MB/s in each direction")


if __name__ == "__main__":
    main()
