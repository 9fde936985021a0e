"""GB/s of the AdamW kernel against a STREAM triad on the same threads, and parameters per second with compressed states
against exact ones: `python -m bench.adamw [--threads N]`."""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch

from horizon_server.planning.bandwidth import (
    Bandwidth,
    adamw_bytes_per_parameter,
    measure_bandwidth,
    parameters_beyond_caches,
)
from horizon_server.store.adamw import AdamWStep, update_unit
from horizon_server.store.cpus import available_cpus
from horizon_server.store.host_store import HostStore
from horizon_server.store.layout import build_layout, with_compressed_states
from horizon_server.store.native import kernel_info


def main() -> None:
    """Print one line per gradient dtype and thread count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="*", default=sorted({1, available_cpus()}))
    parser.add_argument("--parameters", type=int, default=parameters_beyond_caches(), help="default: beyond all caches")
    parser.add_argument("--pairs", type=int, default=7)
    arguments = parser.parse_args()
    info = kernel_info()
    if not info.available:
        sys.exit(f"no compiled kernel: {info.reason}")
    print(f"isa {info.isa}, {arguments.parameters / 1e6:.1f} M parameters, median of {arguments.pairs} pairs")
    for num_threads in arguments.threads:
        for grad_bytes in (2, 4):
            measured = measure_bandwidth(
                num_threads=num_threads,
                num_parameters=arguments.parameters,
                grad_bytes=grad_bytes,
                num_pairs=arguments.pairs,
            )
            assert measured is not None
            print(_line(measured))
        print(_compressed_line(num_threads, arguments.parameters, arguments.pairs), flush=True)


def _compressed_line(num_threads: int, num_parameters: int, num_pairs: int) -> str:
    """Both forms in turns on one matrix, with bf16 gradients; by processor seconds too, which other processes change
    less."""
    shapes = {
        "embed_tokens.weight": (1, 1),
        "layers.0.weight": (num_parameters // 4096, 4096),
        "norm.weight": (1,),
        "lm_head.weight": (1, 1),
    }
    exact = build_layout(shapes, num_layers=1, tied=False)
    stores = [HostStore.allocate(each, grad_dtype=torch.bfloat16) for each in (exact, with_compressed_states(exact))]
    for store in stores:
        store.unit(1, "grad").normal_(std=1e-4)
        store.unit(1, "hi").normal_(std=0.02)

    def seconds_of(store: HostStore, step: int) -> tuple[float, float]:
        hyper = AdamWStep(step=step, learning_rate=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0)
        start_s, start_used_s = time.perf_counter(), time.process_time()
        update_unit(store, 1, hyper, num_threads=num_threads)
        return time.perf_counter() - start_s, time.process_time() - start_used_s

    # The first pair starts the threads and fills the translation tables.
    pairs = [[seconds_of(store, step) for store in stores] for step in range(1, num_pairs + 2)][1:]
    size = exact.units[1].tensors[0].num_elements
    exact_rate, compressed_rate = (
        size / statistics.median(taken_s for taken_s, _ in found) / 1e6 for found in zip(*pairs, strict=True)
    )
    ratio = statistics.median(one / other for (one, _), (other, _) in pairs)
    ratio_used = statistics.median(one / other for (_, one), (_, other) in pairs)
    for store in stores:
        store.close()
    return (
        f"{num_threads} threads, bf16 grad: exact states {exact_rate:.0f} M/s, compressed {compressed_rate:.0f} M/s, "
        f"ratio {ratio:.2f}, {ratio_used:.2f} by processor seconds"
    )


def _line(measured: Bandwidth) -> str:
    per_parameter = adamw_bytes_per_parameter(measured.grad_bytes)
    grad = "bf16" if measured.grad_bytes == 2 else "fp32"
    return (
        f"{measured.num_threads} threads, {grad} grad ({per_parameter} B/param): "
        f"adamw {measured.adamw_bytes_per_s / 1e9:.1f} GB/s, triad {measured.triad_bytes_per_s / 1e9:.1f} GB/s, "
        f"ratio {measured.ratio:.2f}, {measured.adamw_bytes_per_s / per_parameter / 1e6:.0f} M params/s"
    )


if __name__ == "__main__":
    main()
