"""The C++ compiler of layers, made to link the C++ runtime that torch has loaded.

Some installed compilers have no shared runtime and link a copy into whatever they make. Two copies in one process share
some of their tables: the first regular expression in a package with its own copy ends the process.
"""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path

_RUNTIME, _LINK_NAME = "libstdc++.so.6", "libstdc++.so"


def with_torchs_runtime(name: str, folder: Path) -> str:
    """A program in `folder` that calls the compiler of that name so that the linker finds torch's C++ runtime before
    any other. The name itself where there is no such compiler or no such runtime."""
    compiler, runtime = shutil.which(name), _loaded(_RUNTIME)
    if compiler is None or runtime is None:
        return name
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{os.getpid()}.partial"
    # Into place whole, because another process may be compiling another kind of layer.
    partial.unlink(missing_ok=True)
    partial.symlink_to(runtime)
    partial.replace(folder / _LINK_NAME)
    # TorchInductor tells compilers apart by their name.
    program = folder / Path(compiler).name
    partial.write_text(f'#!/bin/sh\nexec {shlex.quote(compiler)} -L{shlex.quote(str(folder))} "$@"\n', "utf-8")
    partial.chmod(0o700)
    partial.replace(program)
    return str(program)


def _loaded(name: str) -> Path | None:
    """The file of a library that this process has loaded."""
    with Path("/proc/self/maps").open(encoding="utf-8", errors="replace") as maps:
        for line in maps:
            path = Path(line.rstrip("\n").partition("/")[2])
            if path.name.startswith(name):
                return Path("/") / path
    return None
