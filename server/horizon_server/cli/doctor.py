"""`horizond doctor`: is this machine fit, and how fast is it. Measures, never guesses."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from horizon_server.cli.options import print_mapping, with_settings_options
from horizon_server.errors import WorkerFailed
from horizon_server.planning.bandwidth import measure_bandwidth
from horizon_server.planning.machine import Accelerator, find_accelerators, host_memory, usable_accelerators
from horizon_server.planning.rates import Machine, RateBook, measure_rates
from horizon_server.settings import child_environment, load_settings
from horizon_server.store.cpus import available_cpus
from horizon_server.store.native import kernel_info
from horizon_server.version import VERSION

_DISK_PROBE_BYTES = 256 * 2**20
_SHMEM_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


@click.command()
@click.option("-o", "--output", type=click.Choice(["table", "json", "yaml"]), default="table", show_default=True)
@with_settings_options
def doctor(output: str, config: Path | None, state_dir: Path | None) -> int:
    """Check the machine: GPU, host memory and its limit, pinning, the AdamW kernel against STREAM, compute, link, disk.

    The speeds are kept in the state folder, where a running daemon finds them too: plans predict a job's speed from them. Measure while
    nothing else runs.
    """
    settings = load_settings(config, state_dir=state_dir)
    click.echo("measuring memory, compute and disk, about 20 seconds ...", err=True)
    usable = asyncio.run(usable_accelerators(child_environment()))
    facts: dict[str, Any] = {"version": VERSION, **_accelerator_facts(usable)}
    facts |= _memory_facts() | _kernel_facts()
    facts |= _rate_facts(settings.state_dir, Machine.of(usable, num_threads=settings.num_threads or available_cpus()))
    facts |= _disk_facts(settings.state_dir)
    if output == "table":
        facts = {name: _readable(name, value) for name, value in facts.items()}
    print_mapping(facts, output)
    return 0


def _accelerator_facts(usable: tuple[Accelerator, ...]) -> dict[str, Any]:
    found = asyncio.run(find_accelerators())
    gpus = [f"{a.index}: {a.name}, {a.memory_bytes / 2**30:.0f} GiB" for a in found]
    return {"gpus": gpus, "device": "cuda" if usable else "host"}


def _memory_facts() -> dict[str, Any]:
    memory = host_memory()
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    huge = _SHMEM_HUGE_PAGES.read_text("ascii").strip() if _SHMEM_HUGE_PAGES.is_file() else "unknown"
    return {
        "host_memory_limit_bytes": memory.limit_bytes,
        "host_memory_available_bytes": memory.available_bytes,
        "pinning_limit_bytes": None if locked == resource.RLIM_INFINITY else locked,
        "shared_memory_huge_pages": huge,
        "num_cpus": available_cpus(),
    }


def _kernel_facts() -> dict[str, Any]:
    info = kernel_info()
    facts: dict[str, Any] = {"adamw_kernel": info.isa if info.available else f"missing, NumPy instead: {info.reason}"}
    measured = measure_bandwidth(num_threads=available_cpus()) if info.available else None
    if measured is not None:
        facts["stream_triad_bytes_per_s"] = round(measured.triad_bytes_per_s)
        facts["adamw_bytes_per_s"] = round(measured.adamw_bytes_per_s)
        facts["adamw_of_triad_ratio"] = round(measured.ratio, 3)
    return facts


def _rate_facts(state_dir: Path, machine: Machine) -> dict[str, Any]:
    """Measure what predictions are made from, keep it, and tell; a state folder that is missing is made as the daemon makes it."""
    try:
        measured = asyncio.run(measure_rates(machine, environment=child_environment()))
    except (WorkerFailed, OSError) as error:
        return {"rates": f"not measured: {error}"}
    book = RateBook(state_dir, machine)
    try:
        state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        book.write(measured)
        facts: dict[str, Any] = {"rates": f"kept in {book.path}"}
    except OSError as error:
        facts = {"rates": f"not kept: {error}"}
    for kind, rates in measured.items():
        facts |= {f"{kind}_{name}": value for name, value in vars(rates).items() if name.endswith("_per_s")}
        facts |= {f"{kind}_layer_of_{w.hidden_size}_flops_per_s": w.layer_flops_per_s for w in rates.widths}
        facts |= {f"{kind}_head_of_{w.hidden_size}_flops_per_s": w.head_flops_per_s for w in rates.widths}
    return {name: round(value) if isinstance(value, float) else value for name, value in facts.items()}


def _disk_facts(state_dir: Path) -> dict[str, Any]:
    folder = state_dir if state_dir.is_dir() else Path(tempfile.gettempdir())
    free = shutil.disk_usage(folder).free
    if free < 4 * _DISK_PROBE_BYTES:
        return {"disk_folder": str(folder), "disk_free_bytes": free, "disk_write_bytes_per_s": None}
    block = os.urandom(2**20)
    with tempfile.TemporaryFile(dir=folder) as file:
        started_s = time.perf_counter()
        for _ in range(_DISK_PROBE_BYTES // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        elapsed_s = time.perf_counter() - started_s
    rate = round(_DISK_PROBE_BYTES / elapsed_s)
    return {"disk_folder": str(folder), "disk_free_bytes": free, "disk_write_bytes_per_s": rate}


def _readable(name: str, value: Any) -> str:
    if value is None:
        return "unlimited" if name.startswith("pinning") else "not measured"
    if isinstance(value, list):
        return "; ".join(map(str, value)) or "none"
    if name.endswith("_flops_per_s"):
        return f"{value / 1e9:,.1f} GFLOP/s"
    if name.endswith("_bytes_per_s"):
        return f"{value / 1e9:.2f} GB/s"
    if name.endswith("_bytes"):
        return f"{value / 2**30:.2f} GiB"
    return str(value)
