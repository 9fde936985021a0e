"""What compiling layers for a GPU takes besides torch: a C++ compiler, CUDA's headers, Triton, and the driver's library
to link with.

A node with torch from pip and a driver has all of them, in places where the compiler does not look: headers come with
torch's own packages, and the driver installs libcuda.so.1 without the name that a linker asks for.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

# TorchInductor calls it, for every kind of device.
CPP_COMPILER = "g++"
_HEADERS = ("cuda.h", "cuda_runtime.h")
_DRIVER, _LINK_NAME = "libcuda.so.1", "libcuda.so"
_CUDA = Path("/usr/local/cuda")
_DRIVER_FOLDERS = ("/usr/local/nvidia/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib/wsl/lib")


def compiler_environment(
    environment: Mapping[str, str], scratch: Path, *, home: Path | None = None, driver: Path | None = None
) -> dict[str, str]:
    """An environment in which TorchInductor finds CUDA's headers and the driver's library. What is not there changes
    nothing.

    `home` and `driver` replace the search; the link to the driver's library is made in `scratch`.
    """
    found = dict(environment)
    home, driver = home or cuda_home(environment), driver or driver_library(environment)
    if home is not None:
        found["CUDA_HOME"] = str(home)
    if driver is not None:
        folder = scratch / "driver"
        folder.mkdir(parents=True, exist_ok=True)
        link = folder / _LINK_NAME
        link.unlink(missing_ok=True)
        link.symlink_to(driver)
        found["LIBRARY_PATH"] = os.pathsep.join(filter(None, [str(folder), environment.get("LIBRARY_PATH", "")]))
    return found


def cuda_home(
    environment: Mapping[str, str], *, default: Path = _CUDA, packages: Iterable[Path] | None = None
) -> Path | None:
    """The folder of CUDA whose `include` has the headers: one that is named, the one of nvcc, the usual one, or torch's
    own packages."""
    named = [Path(environment[name]) for name in ("CUDA_HOME", "CUDA_PATH") if environment.get(name)]
    nvcc = shutil.which("nvcc", path=environment.get("PATH"))
    at_nvcc = [Path(nvcc).resolve().parent.parent] if nvcc else []
    for folder in (*named, *at_nvcc, default, *(_packages() if packages is None else packages)):
        if all((folder / "include" / name).is_file() for name in _HEADERS):
            return folder
    return None


def driver_library(environment: Mapping[str, str], *, folders: Iterable[str] | None = None) -> Path | None:
    """The driver's library, libcuda.so.1."""
    given = environment.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    for folder in filter(None, (*given, *(_driver_folders() if folders is None else folders))):
        if (library := Path(folder) / _DRIVER).exists():
            return library.resolve()
    return None


def what_is_missing(
    environment: Mapping[str, str], *, home: Path | None = None, driver: Path | None = None
) -> list[str]:
    """What keeps layers from being compiled for the GPU, each with where it would come from; empty where nothing
    does."""
    missing = []
    if shutil.which(CPP_COMPILER, path=environment.get("PATH")) is None:
        missing.append(f"the C++ compiler {CPP_COMPILER}")
    if importlib.util.find_spec("triton") is None:
        missing.append("Triton (pip install triton)")
    if (home or cuda_home(environment)) is None:
        missing.append("CUDA's headers (pip install nvidia-cuda-runtime, or set CUDA_HOME)")
    if (driver or driver_library(environment)) is None:
        missing.append(f"the driver's library {_DRIVER} (name its folder in LD_LIBRARY_PATH)")
    return missing


def _packages() -> list[Path]:
    """The folders of NVIDIA's packages, the newest CUDA first."""
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    return sorted((folder for root in roots for folder in root.glob("cu*") if folder.is_dir()), reverse=True)


def _driver_folders() -> list[str]:
    """Where the loader of programs looks, then where containers and distributions put it."""
    program = shutil.which("ldconfig") or "/sbin/ldconfig"
    try:
        listed = subprocess.run([program, "-p"], capture_output=True, text=True, check=False, timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired):
        listed = ""
    paths = [line.rpartition("=> ")[2].strip() for line in listed.splitlines() if f"{_DRIVER} " in line]
    return [*(str(Path(path).parent) for path in paths), *_DRIVER_FOLDERS]
