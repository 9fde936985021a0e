"""`horizond doctor`: can this machine run jobs, how fast is it, and what to do where something is wrong. Measures,
never guesses."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import click

from horizon_server.cli.options import print_mapping, with_settings_options
from horizon_server.errors import BadSetting, HorizonError
from horizon_server.network import interface_of
from horizon_server.nodes.directory import NodeDirectory
from horizon_server.nodes.protocol import NodeReport
from horizon_server.planning.bandwidth import measure_bandwidth
from horizon_server.planning.drives import on_one_drive
from horizon_server.planning.gpu_compiler import CPP_COMPILER, what_is_missing
from horizon_server.planning.ledger import max_parameters
from horizon_server.planning.machine import (
    Gpu,
    Machine,
    RateBook,
    find_accelerators,
    host_memory,
    measure_rates,
    usable_accelerators,
)
from horizon_server.planning.nodes import link_speed
from horizon_server.records.execution import DEFAULT_COMPUTE_DTYPE, ELEMENT_BYTES
from horizon_server.settings import Settings, child_environment, load_settings
from horizon_server.store import numa
from horizon_server.store.cpus import available_cpus
from horizon_server.store.drive_files import DriveSpeed, measure
from horizon_server.store.native import kernel_info
from horizon_server.texts import size_text
from horizon_server.version import VERSION

_DISK_PROBE_BYTES = 256 * 2**20
_SHMEM_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_LEAST_MEMORY_BYTES = 2 << 30
# Two checkpoints, which a job keeps by default, of a model of 1 B parameters take 48 GB.
_LEAST_DISK_BYTES, _LITTLE_DISK_BYTES = 2 << 30, 50 << 30
_LEAST_KERNEL_RATIO = 0.7
_GOOD_PARAMETERS = 100_000_000


@dataclass(frozen=True)
class Part:
    """One line of the report, and what was measured for it."""

    name: str
    found: str
    facts: dict[str, Any]
    verdict: Literal["ok", "warn", "fail"] = "ok"
    advice: str = ""
    """What to do where the verdict is not ok."""

    def warn(self, advice: str) -> Part:
        """Return the same with advice that makes the machine better."""
        return replace(self, verdict="warn", advice=advice)

    def fail(self, advice: str) -> Part:
        """Return the same with advice without which jobs cannot run."""
        return replace(self, verdict="fail", advice=advice)


@click.command()
@click.option("-o", "--output", type=click.Choice(["table", "json", "yaml"]), default="table", show_default=True)
@with_settings_options
def doctor(output: str, config: Path | None, state_dir: Path | None) -> int:
    """Check whether this machine can run jobs, and how fast it is.

    Memory and its limits, GPU, pinning, the AdamW kernel against STREAM, compute, link, disk, drives of tier_dirs,
    further nodes.

    Each line is [ok], [warn] or [fail] with what to do. Exit code 1 when a line is [fail]. The speeds are kept in the
    state folder, where a running daemon finds them too: plans predict a job's speed from them. Measure while nothing
    else runs.
    """
    settings = load_settings(config, state_dir=state_dir)
    click.echo("measuring memory, compute and disk, about 20 seconds ...", err=True)
    listed = asyncio.run(find_accelerators())
    usable = asyncio.run(usable_accelerators(listed, child_environment(), wanted=settings.gpu))
    parts = [
        _memory(settings),
        _accelerators(listed, usable),
        _pinning(usable),
        _huge_pages(),
        _kernel(),
        _compiler(usable),
        _speed(settings, usable),
        _disk(settings.state_dir),
        *_drives(settings),
        _largest_model(settings, usable),
        *([_fleet(settings, usable)] if settings.nodes else []),
    ]
    if output == "table":
        for part in parts:
            click.echo(f"{f'[{part.verdict}]':<7} {part.name:<14} {part.found}")
            if part.advice:
                click.echo(f"{'':<22} {part.advice}")
    else:
        facts: dict[str, Any] = {"version": VERSION}
        for part in parts:
            facts |= part.facts
        checks = [{name: getattr(part, name) for name in ("name", "verdict", "found", "advice")} for part in parts]
        print_mapping(facts | {"checks": checks}, output)
    return 1 if any(part.verdict == "fail" for part in parts) else 0


def _memory(settings: Settings) -> Part:
    memory = host_memory()
    facts: dict[str, Any] = {
        "host_memory_limit_bytes": memory.limit_bytes,
        "host_memory_available_bytes": memory.available_bytes,
        "num_cpus": available_cpus(),
    }
    nodes = [{"node": n.index, "memory_bytes": n.memory_bytes, "cpus": n.cpus} for n in numa.nodes()]
    facts["numa_nodes"] = nodes
    found = f"{size_text(memory.available_bytes)} free of {size_text(memory.limit_bytes)}, {available_cpus()} CPUs"
    if len(nodes) > 1:
        found += f", {len(nodes)} NUMA nodes ({'; '.join(f'{n.index}: CPUs {n.cpus}' for n in numa.nodes())})"
    part = Part("host memory", found, facts)
    needed = _LEAST_MEMORY_BYTES + settings.host_memory_reserve_bytes
    if memory.limit_bytes < needed:
        return part.fail(
            f"even a small model takes {size_text(needed)}; give the daemon a higher limit or a larger machine"
        )
    if memory.available_bytes < memory.limit_bytes / 2:
        return part.warn("other programs hold more than half of it; jobs get only what is free")
    return part


def _fleet(settings: Settings, usable: tuple[Gpu, ...]) -> Part:
    assert settings.fleet_address is not None, "settings with nodes have an address"
    part = Part("further nodes", ", ".join(settings.nodes), {})
    try:
        speed = link_speed(interface_of(settings.fleet_address))
        directory = NodeDirectory(addresses=settings.nodes, key_file=settings.fleet_key_file)
        asyncio.run(directory.ask_all())
    except BadSetting as error:
        return part.fail(error.message)
    reports = [report for report in directory.known.values() if isinstance(report, NodeReport)]
    known = settings.fleet_network_gbps or (None if speed is None else 8e-9 * speed)
    network = "unknown" if known is None else f"{known:g} Gbit/s"
    found = f"{len(reports)} of {len(settings.nodes)} answer; network: {network}"
    part = Part("further nodes", found, {"further_nodes": len(reports), "network_gbps": known})
    if lost := [f"{name}: {why.message}" for name, why in directory.known.items() if isinstance(why, HorizonError)]:
        return part.warn("; ".join(lost))
    if differing := [report.hostname for report in reports if usable and usable[0].name not in report.gpus]:
        return part.warn(f"no {usable[0].name} there, as jobs with nodes on this one need: {', '.join(differing)}")
    if known is None:
        return part.warn("predictions leave the network out; set fleet_network_gbps to its speed")
    return part


def _accelerators(listed: tuple[Gpu, ...], usable: tuple[Gpu, ...]) -> Part:
    gpus = []
    for gpu in listed:
        at = "" if gpu.numa_node is None else f", NUMA node {gpu.numa_node}"
        used = ", jobs use it" if len(listed) > 1 and gpu in usable else ""
        gpus.append(f"{gpu.index}: {gpu.name}, {size_text(gpu.memory_bytes)}{at}{used}")
    facts = {"gpus": gpus, "device": "cuda" if usable else "host"}
    part = Part("GPU", "; ".join(gpus) or "none; jobs are computed on the host", facts)
    if gpus and not usable:
        return part.warn(
            "the installed torch cannot use it; install a torch with CUDA for this driver, or train on the host"
        )
    return part


def _pinning(usable: tuple[Gpu, ...]) -> Part:
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit_bytes = None if locked == resource.RLIM_INFINITY else locked
    found = "unlimited" if limit_bytes is None else f"limited to {size_text(limit_bytes)}"
    part = Part("pinned memory", found, {"pinning_limit_bytes": limit_bytes})
    if not usable:
        return replace(part, found=f"{found}; needed with a GPU only")
    if limit_bytes is not None and limit_bytes < host_memory().limit_bytes // 2:
        return part.fail(
            "copies to the GPU need pinned memory; set LimitMEMLOCK=infinity in the unit, or run: ulimit -l unlimited"
        )
    return part


def _huge_pages() -> Part:
    modes = _SHMEM_HUGE_PAGES.read_text("ascii").strip() if _SHMEM_HUGE_PAGES.is_file() else "unknown"
    facts = {"shared_memory_huge_pages": modes}
    if "[never]" in modes or "[deny]" in modes:
        advice = f"the optimizer is faster on huge pages; as root: echo advise > {_SHMEM_HUGE_PAGES}"
        return Part("huge pages", "off for shared memory", facts).warn(advice)
    return Part("huge pages", modes, facts)


def _kernel() -> Part:
    info = kernel_info()
    measured = measure_bandwidth(num_threads=available_cpus()) if info.available else None
    if measured is None:
        part = Part("AdamW kernel", "missing", {"adamw_kernel": f"missing, NumPy instead: {info.reason}"})
        return part.warn(f"updates run in NumPy, several times slower: {info.reason}")
    facts = {
        "adamw_kernel": info.isa,
        "stream_triad_bytes_per_s": round(measured.triad_bytes_per_s),
        "adamw_of_triad_ratio": round(measured.ratio, 3),
        "compressed_of_exact_adamw_ratio": round(measured.compressed_ratio, 3),
    }
    found = f"{info.isa}, {measured.ratio:.2f} times the STREAM triad of {measured.triad_bytes_per_s / 1e9:.1f} GB/s"
    found += f", {measured.compressed_ratio:.2f} times as many parameters with compressed states"
    part = Part("AdamW kernel", found, facts)
    if measured.ratio < _LEAST_KERNEL_RATIO:
        return part.warn("the kernel is slower than this memory allows; measure again while nothing else runs")
    return part


def _compiler(usable: tuple[Gpu, ...]) -> Part:
    on_host = shutil.which(CPP_COMPILER) is not None
    missing = what_is_missing(child_environment()) if usable else []
    kinds = [name for name, can in (("the host", on_host), ("the GPU", usable and not missing)) if can]
    found = f"can be compiled for {' and '.join(kinds)}" if kinds else "cannot be compiled"
    part = Part("layers", found, {"layers_compile_for": kinds})
    if missing:
        return part.warn(f"jobs on the GPU run their layers eagerly, which is slower; missing: {', '.join(missing)}")
    if not on_host:
        return part.warn(f"jobs run their layers eagerly, which is slower; missing: the C++ compiler {CPP_COMPILER}")
    return part


def _speed(settings: Settings, usable: tuple[Gpu, ...]) -> Part:
    """Measure what predictions are made from and keep it."""
    machine = Machine.of(usable, num_threads=settings.num_threads or available_cpus())
    try:
        measured = asyncio.run(measure_rates(machine, environment=child_environment(), gpus=usable))
    except (HorizonError, OSError) as error:
        return Part("speed", f"not measured: {error}", {"rates": "not measured"}).fail(
            "jobs would fail in the same way; is the installation complete (pip install '.[server]')?"
        )
    facts: dict[str, Any] = {}
    speeds = []
    for device, rates in measured.items():
        plain = {name: value for name, value in vars(rates).items() if isinstance(value, float)}
        facts |= {f"{device}_{name}": round(value) for name, value in plain.items() if name.endswith("_per_s")}
        for width in rates.widths:
            facts[f"{device}_products_of_{width.hidden_size}_flops_per_s"] = round(width.gemm_flops_per_s[-1][1])
            facts[f"{device}_elementwise_of_{width.hidden_size}_bytes_per_s"] = round(width.elementwise_bytes_per_s)
        # The slowest and the fastest width, once where they print alike.
        ends = (rates.widths[0], rates.widths[-1])
        layers = dict.fromkeys(f"{width.gemm_flops_per_s[-1][1] / 1e9:,.0f}" for width in ends)
        copies = f"{rates.h2d_bytes_per_s / 1e9:.1f} GB/s"
        if (peers := rates.peers) is not None:
            at_once = {name: value for name, value in vars(peers).items() if name.endswith("_per_s")}
            facts |= {f"{device}_peers_{name}": round(value) for name, value in at_once.items()}
            copies += (
                f" ({peers.together_bytes_per_s / 1e9:.1f} on each of {peers.num_devices} at once), between devices "
            )
            copies += f"{peers.gather_bytes_per_s / 1e9:.1f} GB/s"
        speeds.append(f"{device.replace('_', ' in ')} {' to '.join(layers)} GFLOP/s in products, copies {copies}")
    found = "; ".join(speeds)
    book = RateBook(settings.state_dir, machine)
    try:
        # Private as the daemon makes it: doctor may run first.
        settings.state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        book.write(measured)
    except OSError as error:
        part = Part("speed", found, facts | {"rates": f"not kept: {error}"})
        return part.warn(f"not kept, so plans will not predict a job's speed: {error}")
    return Part("speed", found, facts | {"rates": f"kept in {book.path}"})


def _disk(state_dir: Path) -> Part:
    folder = state_dir if state_dir.is_dir() else Path(tempfile.gettempdir())
    free_bytes = shutil.disk_usage(folder).free
    facts: dict[str, Any] = {"disk_folder": str(folder), "disk_free_bytes": free_bytes, "disk_write_bytes_per_s": None}
    found = f"{size_text(free_bytes)} free in {folder}"
    if free_bytes < _LEAST_DISK_BYTES:
        advice = "models, checkpoints and prepared data go there; free space, or use another --state-dir"
        return Part("disk", found, facts).fail(advice)
    # Random bytes: a file system that compresses would write zeros faster than it writes checkpoints.
    block = os.urandom(2**20)
    with tempfile.TemporaryFile(dir=folder) as file:
        started_s = time.perf_counter()
        for _ in range(_DISK_PROBE_BYTES // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        rate = _DISK_PROBE_BYTES / (time.perf_counter() - started_s)
    facts["disk_write_bytes_per_s"] = round(rate)
    part = Part("disk", f"{found}, writes {rate / 1e9:.2f} GB/s", facts)
    if free_bytes < _LITTLE_DISK_BYTES:
        return part.warn(
            "a checkpoint takes 12 bytes per parameter and two are kept by default: 24 GB for a model of 1 B parameters"
        )
    return part


def _drives(settings: Settings) -> list[Part]:
    """The drives for the states of jobs with memory.tier: drive, one after the other."""
    found = [measure(folder) for folder in settings.tier_dirs]
    shared = on_one_drive(found)
    return [_drive(speed, shared.get(speed.folder)) for speed in found]


def _drive(speed: DriveSpeed, former: str | None) -> Part:
    """A drive; `former` is an earlier folder that is on it too."""
    folder = speed.folder
    said = {name: value for name, value in vars(speed).items() if name not in ("folder", "device")}
    facts = {f"drive_{folder}": said}
    if speed.problem:
        part = Part("drive", f"{folder} cannot be used: {speed.problem}", facts)
        return part.warn("jobs with memory.tier: drive do without it; repair it, or take it out of tier_dirs")
    found = f"{folder} reads {speed.read_bytes_per_s / 1e9:.2f} GB/s, writes {speed.write_bytes_per_s / 1e9:.2f} GB/s"
    part = Part("drive", f"{found}, {size_text(speed.free_bytes)} free", facts)
    if former is not None:
        return part.warn(f"it is on the drive of {former}, and both share its speed and room; name one folder a drive")
    return part


def _largest_model(settings: Settings, usable: tuple[Gpu, ...]) -> Part:
    machine_bytes = host_memory().limit_bytes
    limit_bytes = (
        min(machine_bytes, settings.host_memory_limit_bytes or machine_bytes) - settings.host_memory_reserve_bytes
    )
    largest = max_parameters(limit_bytes, grad_bytes=ELEMENT_BYTES[DEFAULT_COMPUTE_DTYPE["cuda" if usable else "host"]])
    found = f"this machine can train models of up to about {largest / 1e9:.1f} B parameters"
    part = Part("largest model", found, {"max_parameters": largest})
    if largest < _GOOD_PARAMETERS:
        return part.warn("host memory decides: each parameter takes 14 to 16 bytes of it")
    return part
