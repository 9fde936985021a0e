"""GB/s of the AdamW kernel against a STREAM triad on the same threads: `python -m bench.adamw [--threads N]`."""

from __future__ import annotations

import argparse
import sys

from horizon_server.planning.bandwidth import (
    Bandwidth,
    adamw_bytes_per_parameter,
    measure_bandwidth,
    parameters_beyond_caches,
)
from horizon_server.store.cpus import available_cpus
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
