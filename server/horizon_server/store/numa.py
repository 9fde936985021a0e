"""The NUMA nodes of this machine, a worker's memory spread over all of them, and a rank's next to its GPU.

Without a policy, a page of the planes is on the node of whichever thread touched it first. The optimizer's threads on
other sockets and the GPU's copies then cross the interconnect as chance has it, and one node's memory bounds the speed.
Spread evenly, every thread and every GPU sees the same mixture. Ranks whose GPUs are next to all nodes do better: each
finds the part of the store that it owns on its GPU's node, and runs there.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_NODES = Path("/sys/devices/system/node")
_PCI_DEVICES = Path("/sys/bus/pci/devices")
# Numbers of mbind, set_mempolicy and get_mempolicy; the C library has no names for them.
_SYSTEM_CALLS = {"x86_64": (237, 238, 239), "aarch64": (235, 237, 236)}
_DEFAULT, _PREFERRED, _INTERLEAVE = 0, 1, 3  # MPOL_* of linux/mempolicy.h
_MASK_BITS = 1024
_WHAT_HELPS = "steps may be slower; a container needs the capability SYS_NICE for that"


@dataclass(frozen=True, kw_only=True)
class NumaNode:
    """A node that has memory. `cpus` is a list as the kernel writes it: 0-15,32-47."""

    index: int
    memory_bytes: int
    cpus: str


def nodes(folder: Path | None = None) -> list[NumaNode]:
    """Return the nodes with memory; none where the kernel does not say."""
    found = []
    for path in (folder or _NODES).glob("node[0-9]*"):
        try:
            lines = (path / "meminfo").read_text("ascii").splitlines()
            (total,) = [line.split()[-2] for line in lines if "MemTotal" in line]
            cpus = (path / "cpulist").read_text("ascii").strip()
        except (OSError, ValueError, IndexError):
            continue
        found.append(NumaNode(index=int(path.name.removeprefix("node")), memory_bytes=int(total) << 10, cpus=cpus))
    return sorted((node for node in found if node.memory_bytes), key=lambda node: node.index)


def node_of_pci_device(bus_id: str, folder: Path = _PCI_DEVICES) -> int | None:
    """Return the node that a device is next to, by its address as drivers write it (00000000:3B:00.0); None where that
    is unknown."""
    domain, _, rest = bus_id.partition(":")
    try:
        # The kernel's names have four digits and are in lower case; -1 means that it does not know.
        node = int((folder / f"{domain[-4:]}:{rest}".lower() / "numa_node").read_text("ascii"))
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def interleave(indices: Sequence[int] | None = None) -> str:
    """Spread what this thread, and threads that it starts later, touch first over all nodes, or those given; returns
    why not, if so.

    Nothing changes where there is one node, or where a policy was set before (by numactl, or by systemd's NUMAPolicy).
    """
    chosen = [node.index for node in nodes()] if indices is None else list(indices)
    numbers = _SYSTEM_CALLS.get(platform.machine())
    if numbers is None or (indices is None and len(chosen) < 2) or has_policy():
        return ""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(numbers[1], _INTERLEAVE, _mask_of(chosen), ctypes.c_ulong(_MASK_BITS)) == 0:
        return ""
    return (
        f"this worker's memory is not spread over the machine's {len(chosen)} NUMA nodes "
        f"({os.strerror(ctypes.get_errno())}); {_WHAT_HELPS}, or start the daemon under numactl --interleave=all"
    )


def has_policy() -> bool:
    """Whether this thread, or who started it, has said where its memory is to be."""
    numbers, mode = _SYSTEM_CALLS.get(platform.machine()), ctypes.c_int(_DEFAULT)
    if numbers is None:
        return False
    failed = ctypes.CDLL(None).syscall(numbers[2], ctypes.byref(mode), None, 0, None, 0)
    return not failed and mode.value != _DEFAULT


def prefer(address: int, num_bytes: int, node: int) -> str:
    """Have pages that nothing has touched yet taken from a node while it has some, also for other processes where they
    are of a shared file; returns why not, if so. An edge within a page takes the whole page."""
    numbers = _SYSTEM_CALLS.get(platform.machine())
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    length = -(-(address + num_bytes - start) // mmap.PAGESIZE) * mmap.PAGESIZE
    if numbers is None or not num_bytes:
        return ""
    libc = ctypes.CDLL(None, use_errno=True)
    where = ctypes.c_void_p(start), ctypes.c_ulong(length)
    if libc.syscall(numbers[0], *where, _PREFERRED, _mask_of([node]), ctypes.c_ulong(_MASK_BITS), 0) == 0:
        return ""
    why = os.strerror(ctypes.get_errno())
    return f"the ranks' parts of the store are not next to their GPUs ({why}); {_WHAT_HELPS}"


def run_on(node: int) -> None:
    """Keep this thread, and threads that it starts later, on a node's CPUs, as far as it may use them."""
    cpus = {cpu for found in nodes() if found.index == node for cpu in _numbers_in(found.cpus)}
    if allowed := cpus & os.sched_getaffinity(0):
        os.sched_setaffinity(0, allowed)


def _numbers_in(text: str) -> list[int]:
    ranges = [part.partition("-") for part in text.split(",") if part]
    return [cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1)]


def _mask_of(indices: Sequence[int]) -> ctypes.Array[ctypes.c_ulong]:
    word_bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (_MASK_BITS // word_bits))()
    for index in indices:
        mask[index // word_bits] |= 1 << index % word_bits
    return mask
