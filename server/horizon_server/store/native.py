"""Finds and loads the compiled kernels of kernels/*.cpp and says why where there is none; knows the C ABI of adamw.cpp.

Thread: every function may be called from any thread; ctypes releases the GIL for the time of a call.
"""

# Standard library only: the daemon's doctor uses it without torch, and tools/build_kernels.py loads the file by itself.

from __future__ import annotations

import ctypes
import functools
import hashlib
import platform
from dataclasses import dataclass
from pathlib import Path

KERNEL_FOLDER = Path(__file__).parent / "kernels"
SOURCE_FILE = "adamw.cpp"
ATTENTION_SOURCE_FILE = "attention.cpp"
"""Its C ABI is that of engine.attention.host_kernel."""
CHECKSUM_SOURCE_FILE = "checksum.cpp"
"""Its C ABI is that of store.checksum."""
SOURCE_FILES = (SOURCE_FILE, ATTENTION_SOURCE_FILE, CHECKSUM_SOURCE_FILE)

_HOW_TO_BUILD = "install g++ and reinstall horizon-train, or run `python tools/build_kernels.py` in a source tree"


class Segment(ctypes.Structure):
    """A stretch of a unit that decays by one factor and whose step size has one scale; offsets in elements from the
    pointers that go with it.
    """

    _fields_ = (
        ("offset", ctypes.c_int64),
        ("num_elements", ctypes.c_int64),
        ("decay_factor", ctypes.c_float),
        ("step_scale", ctypes.c_float),
    )


class Scalars(ctypes.Structure):
    """What of one AdamW step is the same for every element, rounded to fp32 once.

    `scaled_eps` and `scaled_step_size` carry the factor sqrt(1 - beta2**step): m / (sqrt(v) / f + eps) is f * m /
    (sqrt(v) + f * eps).
    """

    _fields_ = tuple(
        (name, ctypes.c_float)
        for name in (
            "grad_scale",
            "beta1",
            "one_minus_beta1",
            "beta2",
            "one_minus_beta2",
            "scaled_eps",
            "scaled_step_size",
            "most_ratio",
        )
    )


@dataclass(frozen=True, kw_only=True)
class KernelInfo:
    """Whether the compiled kernel runs, with which instruction set, and if not, why and what to do."""

    available: bool
    isa: str
    reason: str


def source_bytes(source: Path) -> bytes:
    """A source file with the headers beside it, which it may include: what a library is built from."""
    return source.read_bytes() + b"".join(header.read_bytes() for header in sorted(source.parent.glob("*.h")))


def library_name(source: bytes, source_file: str = SOURCE_FILE) -> str:
    """File name of the library that belongs to a version of a source file on this kind of machine."""
    # With the source's hash: a library that was built from another version is not found, so its old arithmetic never
    # runs.
    return f"{Path(source_file).stem}-{hashlib.sha256(source).hexdigest()[:16]}-{platform.machine()}.so"


def library(folder: Path = KERNEL_FOLDER) -> ctypes.CDLL | None:
    """The kernel, or None where it is missing, stale or does not load; `kernel_info` says which."""
    return _load(folder)[0]


def kernel_info(folder: Path = KERNEL_FOLDER) -> KernelInfo:
    """What runs the optimizer on this machine."""
    loaded, reason = _load(folder)
    if loaded is None:
        return KernelInfo(available=False, isa="numpy", reason=reason)
    return KernelInfo(available=True, isa=loaded.hz_isa().decode("ascii"), reason="")


def bind(lib: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the arguments and results of a library built from adamw.cpp; returns it."""
    pointer, size, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    segments, scalars = ctypes.POINTER(Segment), ctypes.POINTER(Scalars)
    lib.hz_adamw.argtypes = (*[pointer] * 5, number, segments, size, scalars, number)
    lib.hz_adamw_rows.argtypes = (
        *[pointer] * 5,
        number,
        *[pointer] * 2,
        *[size] * 2,
        *[ctypes.c_float] * 2,
        scalars,
        number,
    )
    lib.hz_adamw_compressed.argtypes = (*[pointer] * 6, number, segments, size, scalars, pointer, number)
    for function in (lib.hz_merge, lib.hz_split, lib.hz_merge_24, lib.hz_split_24):
        function.argtypes = (pointer, pointer, pointer, size, number)
        function.restype = None
    lib.hz_sum_squares.argtypes = (pointer, number, size, pointer, number)
    lib.hz_add.argtypes = (pointer, pointer, size, pointer, number)
    lib.hz_square_blocks.argtypes = (pointer, number, size, size, pointer, number)
    lib.hz_triad.argtypes = (pointer, pointer, pointer, ctypes.c_double, size, number)
    for function in (lib.hz_adamw, lib.hz_adamw_rows, lib.hz_adamw_compressed, lib.hz_square_blocks, lib.hz_triad):
        function.restype = None
    lib.hz_sum_squares.restype = lib.hz_add.restype = ctypes.c_double
    lib.hz_norm_block.restype = size
    lib.hz_isa.restype = ctypes.c_char_p
    return lib


@functools.cache
def _load(folder: Path) -> tuple[ctypes.CDLL | None, str]:
    found, reason = find(SOURCE_FILE, folder)
    try:
        return found and bind(found), reason
    except AttributeError as error:
        return None, f"{library_name(source_bytes(folder / SOURCE_FILE))} does not load ({error}); {_HOW_TO_BUILD}"


def find(source_file: str, folder: Path = KERNEL_FOLDER) -> tuple[ctypes.CDLL | None, str]:
    """The library of a source file, whose functions have no arguments declared yet; or None, and why there is none."""
    source = folder / source_file
    if not source.is_file():
        problem = f"{source} is missing from the installation, so no library can belong to it"
        return None, f"{problem}; reinstall horizon-train"
    file = folder / library_name(source_bytes(source), source_file)
    if not file.is_file():
        stale = ", ".join(sorted(path.name for path in folder.glob(f"{source.stem}-*.so")))
        problem = f"{stale} was built from another {source_file}" if stale else "it was never compiled"
        return None, f"{problem}; {_HOW_TO_BUILD}"
    try:
        return ctypes.CDLL(str(file)), ""
    except OSError as error:
        return None, f"{file.name} does not load ({error}); {_HOW_TO_BUILD}"
