"""Compiles the C++ kernels in place: as a hatch build hook, or by `python tools/build_kernels.py`.

Owns how the library is compiled and how a wheel that carries it is tagged. A machine without a compiler gets a pure
wheel, the NumPy reference and torch's attention; `kernel_info()` and `horizond doctor` then say so.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STORE_FOLDER = Path("server/horizon_server/store")
WHEEL_FOLDER = "horizon_server/store/kernels"


class KernelBuildError(RuntimeError):
    """A kernel cannot be compiled here; the message says why."""


def build_kernels(root: Path = ROOT) -> list[Path]:
    """Compile each source next to itself unless its library is already that of this source; returns the libraries.

    Raises:
        KernelBuildError: not Linux, no compiler, or the compiler refused.
    """
    if sys.platform != "linux":
        raise KernelBuildError(f"the kernels are built for Linux only, this is {sys.platform}")
    native = _load_native(root / STORE_FOLDER / "native.py")
    folder = root / STORE_FOLDER / "kernels"
    libraries = []
    for name in native.SOURCE_FILES:
        source = folder / name
        library = folder / str(native.library_name(native.source_bytes(source), name))
        if not library.exists():
            _compile(source, library)
        for stale in folder.glob(f"{source.stem}-*.so"):
            if stale != library:
                stale.unlink(missing_ok=True)
        libraries.append(library)
    return libraries


def _load_native(file: Path) -> ModuleType:
    # The loader's own naming decides what it will find; the file needs the standard library only.
    spec = importlib.util.spec_from_file_location("_horizon_native", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _compile(source: Path, library: Path) -> None:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise KernelBuildError("no C++ compiler found; install g++ or name one in CXX")
    flags = re.search(r"^// build-flags: (.+)$", source.read_text(encoding="ascii"), re.MULTILINE)
    assert flags is not None, f"{source} states no build-flags"
    with tempfile.TemporaryDirectory(dir=source.parent, prefix=".build-") as scratch:
        unfinished = Path(scratch) / library.name
        command = [compiler, *flags[1].split(), str(source), "-o", str(unfinished)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise KernelBuildError(f"{' '.join(command)} failed:\n{result.stderr}")
        # Renamed into place, so that a process that loads it meanwhile sees a whole file or none.
        unfinished.replace(library)


if importlib.util.find_spec("hatchling") is not None:
    from hatchling.builders.config import BuilderConfig
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface

    class KernelBuildHook(BuildHookInterface[BuilderConfig]):
        """Puts the compiled libraries into the wheel and tags the wheel for its platform; a pure wheel where it
        cannot."""

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            """Called by hatch before a wheel is built; `version` is `editable` or `standard`."""
            try:
                libraries = build_kernels(Path(self.root))
            except KernelBuildError as error:
                self.app.display_warning(f"The kernels are left out, NumPy will run instead: {error}")
                return
            if version == "editable":
                return
            platform = re.sub(r"[-.]", "_", sysconfig.get_platform())
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform}"
            for library in libraries:
                build_data["force_include"][str(library)] = f"{WHEEL_FOLDER}/{library.name}"


if __name__ == "__main__":
    try:
        print(*build_kernels(), sep="\n")
    except KernelBuildError as error:
        sys.exit(f"The kernels were not built: {error}")
