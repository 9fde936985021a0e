"""Rates of a device that nobody has measured, in round numbers."""

from __future__ import annotations

from pathlib import Path

from horizon_server.planning.machine import Machine, RateBook
from horizon_server.planning.rates import DeviceRates, WidthRates
from horizon_server.store.cpus import available_cpus

RATES = DeviceRates(
    name="host",
    num_threads=2,
    peak_flops_per_s=4e9,
    attention_forward_flops_per_s=((1, 5e8),),
    attention_backward_flops_per_s=((1, 2.5e8),),
    accumulate_bytes_per_s=4e8,
    widths=(
        WidthRates(hidden_size=32, gemm_flops_per_s=((1, 1e9),), elementwise_bytes_per_s=2e8, head_bytes_per_s=3e8),
    ),
    h2d_bytes_per_s=1e8,
    d2h_bytes_per_s=5e7,
    gather_bytes_per_s=6e7,
    scatter_bytes_per_s=7e7,
    zero_bytes_per_s=8e7,
    adamw_bytes_per_s=1e9,
    # As the bytes are: memory is what it waits for.
    compressed_parameters_per_s=1e9,
)


def write_rates(state_dir: Path, *, num_threads: int) -> None:
    """Have a daemon know its machine: measuring takes seconds on every processor, beside other tests. With 0 threads it
    uses all."""
    state_dir.mkdir(parents=True, exist_ok=True)
    machine = Machine.of((), num_threads=num_threads or available_cpus())
    RateBook(state_dir, machine).write(dict.fromkeys(machine.measured, RATES))
