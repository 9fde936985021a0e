"""Anonymous memory files and their mappings: the raw bytes under the host store, with huge pages and a parallel
pre-touch."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from horizon_server import progress
from horizon_server.errors import DoesNotFit

_MADV_REMOVE = 9  # linux/mman.h, as the next one; the mmap module's own madvise takes no address
_MADV_POPULATE_WRITE = 23
_MAP_FIXED = 0x10
_TOUCH_BYTES = 256 << 20


def create_memory_file(name: str, size_bytes: int) -> int:
    """A new anonymous memory file of `size_bytes` zero bytes; the caller owns and closes the descriptor."""
    # Closed on exec: a worker gets only the descriptors that are passed to it by name.
    fd = os.memfd_create(f"horizon-{name}", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size_bytes)
    except OSError:
        os.close(fd)
        raise
    return fd


@contextmanager
def lent_memory(plane_bytes: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Create planes of these sizes as anonymous memory files and give them back at the end: plane -> descriptor.

    They belong to the process that lends them: a worker that dies leaves them whole.
    """
    descriptors: dict[str, int] = {}
    try:
        for plane, size_bytes in plane_bytes.items():
            descriptors[plane] = create_memory_file(plane, size_bytes)
        yield descriptors
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)


def map_memory_file(fd: int, size_bytes: int, *, offset_bytes: int = 0) -> mmap.mmap:
    """Map a memory file, from a page on, for reading and writing, shared with every process that maps it."""
    mapping = mmap.mmap(fd, size_bytes, offset=offset_bytes)
    advise_huge_pages(mapping)
    return mapping


def map_anonymous(size_bytes: int) -> mmap.mmap:
    """Private memory of zero bytes, page-aligned, that the kernel has not provided yet; see `touch`."""
    mapping = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    advise_huge_pages(mapping)
    return mapping


def advise_huge_pages(mapping: mmap.mmap) -> None:
    """Ask for huge pages; memory files get them only where the kernel's shmem_enabled allows advice."""
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except (OSError, AttributeError):
        # An optimisation only: where the kernel lacks it, 4 KiB pages serve.
        return


def map_over(mapping: mmap.mmap, start: int, num_bytes: int, *, fd: int, offset_bytes: int) -> None:
    """Map a stretch of another memory file over a stretch of a mapping, in place of what is there; read-only, see
    `protect`. Both begin on a page."""
    flags, readable = mmap.MAP_SHARED | _MAP_FIXED, mmap.PROT_READ
    _call(_libc().mmap, _address(mapping) + start, num_bytes, readable, flags, fd, offset_bytes)


def protect(mapping: mmap.mmap, start: int, num_bytes: int, *, writable: bool) -> None:
    """Say whether this process may write to a stretch of a mapping, which begins on a page."""
    allowed = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    _call(_libc().mprotect, _address(mapping) + start, num_bytes, allowed)


def touch(mapping: mmap.mmap, *, num_threads: int, parts: Iterable[tuple[int, int]] | None = None) -> None:
    """Have the kernel provide every page now, on several threads, leaving the contents as they are; with `parts`, those
    of these stretches (first byte and the one after the last), with the page that each begins on.

    Raises:
        DoesNotFit: the kernel has no memory left for the pages.
    """
    pieces = [
        (start, min(_TOUCH_BYTES, stop - start))
        for first, stop in ([(0, len(mapping))] if parts is None else parts)
        for start in range(first // mmap.PAGESIZE * mmap.PAGESIZE, stop, _TOUCH_BYTES)
    ]
    anchor = ctypes.c_char.from_buffer(mapping)
    try:
        base = ctypes.addressof(anchor)
        with ThreadPoolExecutor(max_workers=max(1, min(num_threads, len(pieces)))) as pool:
            list(pool.map(lambda piece: _touch_piece(mapping, base, *piece), pieces))
    finally:
        # The mapping cannot be unmapped while a ctypes object points into it.
        del anchor


def give_back(memory: memoryview) -> None:
    """Give the whole pages of a stretch of a mapped memory file back to the kernel: they are zero from now on, for
    every process that maps the file, and take no memory until they are written again."""
    anchor = ctypes.c_char.from_buffer(memory)
    address = ctypes.addressof(anchor)
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = (address + memory.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    if stop > first and libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(stop - first), _MADV_REMOVE):
        raise OSError(ctypes.get_errno(), "the kernel did not take memory back")


def _address(mapping: mmap.mmap) -> int:
    anchor = ctypes.c_char.from_buffer(mapping)
    try:
        return ctypes.addressof(anchor)
    finally:
        # The mapping cannot be unmapped while a ctypes object points into it.
        del anchor


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    address, size, flags, offset = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int64
    libc.mmap.argtypes, libc.mmap.restype = [address, size, flags, flags, flags, offset], ctypes.c_ssize_t
    libc.mprotect.argtypes = [address, size, flags]
    return libc


def _call(function: Callable[..., int], *arguments: int) -> None:
    if function(*arguments) == -1:
        raise OSError(ctypes.get_errno(), f"the kernel did not map memory: {os.strerror(ctypes.get_errno())}")


def _touch_piece(mapping: mmap.mmap, base: int, start: int, size_bytes: int) -> None:
    progress.advance()
    libc = ctypes.CDLL(None, use_errno=True)
    # Called through ctypes because mmap.madvise holds the GIL, which would make the touch serial.
    if libc.madvise(ctypes.c_void_p(base + start), ctypes.c_size_t(size_bytes), _MADV_POPULATE_WRITE) == 0:
        return
    error = ctypes.get_errno()
    if error != errno.EINVAL:
        raise DoesNotFit(f"the kernel gave no memory for the host store: {os.strerror(error)}")
    # Kernels before 5.14: a read fault makes a memory file allocate the page as well.
    for offset in range(start, start + size_bytes, mmap.PAGESIZE):
        mapping[offset]
