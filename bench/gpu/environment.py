"""Stage: what the machine is and which software it has."""

from __future__ import annotations

import importlib.metadata
import platform
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import torch

from bench.gpu.machine import first_line, free_host_bytes, processor_line
from bench.gpu.report import Report
from bench.gpu.task import Task
from horizon_server.store.cpus import available_cpus
from horizon_server.store.native import kernel_info

_PACKAGES = ("torch", "transformers", "triton", "numpy", "safetensors", "psutil", "pytest", "liger-kernel")
_GPU_FIELDS = (
    "name,driver_version,memory.total,pcie.link.gen.max,pcie.link.width.max,clocks.max.sm,clocks.sm,clocks.mem,power.limit,power.draw,"
    "temperature.gpu,compute_mode,mig.mode.current"
)


def run(task: Task, report: Report) -> None:
    """One row per fact."""
    report.table("The machine", {"what": "", "value": ""})
    for what, value in (*_host(), *_software(), *_gpu(task)):
        report.row(what=what, value=value)


def _host() -> Iterator[tuple[str, str]]:
    yield "processor", processor_line()
    nodes = sorted(Path("/sys/devices/system/node").glob("node[0-9]*"))
    for node in nodes:
        size = first_line(f"{node}/meminfo").partition("MemTotal:")[2].strip()
        yield f"NUMA {node.name}", f"CPUs {first_line(f'{node}/cpulist')}, {size}"
    yield "usable CPUs", str(available_cpus())
    yield "free host memory", f"{free_host_bytes() / 2**30:.1f} GiB"
    for name in ("enabled", "shmem_enabled"):
        yield f"huge pages {name}", first_line(f"/sys/kernel/mm/transparent_hugepage/{name}")
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    yield "memory lock limit", "none" if locked == resource.RLIM_INFINITY else f"{locked / 2**20:.0f} MiB"


def _software() -> Iterator[tuple[str, str]]:
    yield "kernel", f"{platform.system()} {platform.release()}"
    yield "Python", platform.python_version()
    for name in _PACKAGES:
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield name, "not installed"
    yield "optimizer kernel", f"{kernel_info().isa} {kernel_info().reason}".strip()


def _gpu(task: Task) -> Iterator[tuple[str, str]]:
    if task.device != "cuda":
        yield "GPU", "none: a dry run on the processor"
        return
    properties = torch.cuda.get_device_properties(0)
    yield "GPU", f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB, {properties.multi_processor_count} SMs"
    yield "compute capability", ".".join(map(str, torch.cuda.get_device_capability(0)))
    yield "CUDA of torch", str(torch.version.cuda)
    yield "cuDNN", str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
    yield "GPUs", str(torch.cuda.device_count())
    program = shutil.which("nvidia-smi")
    if program is None:
        yield "nvidia-smi", "not installed"
        return
    # One by one: a field that this driver does not know fails the whole query.
    for field in _GPU_FIELDS.split(","):
        command = [program, f"--query-gpu={field}", "--format=csv,noheader", "--id=0"]
        asked = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
        yield f"GPU {field}", asked.stdout.strip() if asked.returncode == 0 else "unknown to this driver"
