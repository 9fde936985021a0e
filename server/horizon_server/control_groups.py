"""The kernel's control groups: limits of this process (v1 and v2), out-of-memory kills, and a group of its own for each
worker (v2)."""

from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Iterator
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")

_NO_LIMIT = 2**60
"""Control group v1 writes a huge number where there is no limit."""

# The unit's DelegateSubgroup=: systemd starts the daemon in this group inside the unit's own, which then holds no
# process, and the kernel passes controllers on only from groups without processes. The daemon never moves itself:
# systemd could not start a daemon into the unit's group again while a worker of an earlier one still has a group there.
DAEMON_GROUP = "daemon"
_WORKER_PREFIX = "worker-"
# What a plan does not see: page cache is reclaimed first, but not the kernel's own memory for page tables, sockets and
# the driver.
_MIN_SLACK_BYTES = 2 * 2**30
_SLACK_SHARE = 0.05


def memory_limits(root: Path, own_cgroup: Path) -> Iterator[tuple[int, int]]:
    """Yield (limit, used without page cache) for every group with a limit, from this process's own up to the root."""
    for folder in _groups("memory", root, own_cgroup):
        limit = (_read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")).strip()
        if limit.isdigit() and int(limit) < _NO_LIMIT:
            used = (_read(folder / "memory.current") or _read(folder / "memory.usage_in_bytes")).strip()
            fields = dict(line.split() for line in _read(folder / "memory.stat").splitlines() if len(line.split()) == 2)
            # The kernel drops page cache before it refuses memory, so it counts as free.
            page_cache = int(fields.get("inactive_file", 0)) + int(fields.get("active_file", 0))
            yield int(limit), max(0, int(used or 0) - page_cache)


def cpu_quota(root: Path, own_cgroup: Path) -> float | None:
    """CPUs that the tightest group allows, None without a quota."""
    quotas = []
    for folder in (root, root / "cpu", *_groups("cpu", root, own_cgroup)):
        v1 = [_read(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        quota = _read(folder / "cpu.max").split() or v1
        if len(quota) == 2 and quota[0].isdigit() and quota[1].isdigit():
            quotas.append(int(quota[0]) / int(quota[1]))
    return min(quotas, default=None)


def oom_kills() -> int:
    """Return how often the out-of-memory killer struck: in this control group where it counts, else on the machine."""
    # Version 2 is the line without controllers; version 1 counts no kills.
    paths = [line.split(":", 2)[2] for line in _read(OWN_CGROUP).splitlines() if not line.split(":", 2)[1]]
    for file in (*(CGROUP_ROOT / path.lstrip("/") / "memory.events" for path in paths), Path("/proc/vmstat")):
        found = _counter(file, "oom_kill")
        if found is not None:
            return found
    return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerGroup:
    """The control group of one worker. The kernel ends all of its processes together when they need more than its
    memory limit."""

    path: Path
    memory_bytes: int

    def add(self, pid: int) -> str | None:
        """Move a process here, with what it starts from now on; return why it was not possible, or None.

        What the process has allocated before stays charged to the group that it comes from: move it as soon as it is
        started.
        """
        return _written(self.path / "cgroup.procs", str(pid))

    def set_cpu_weight(self, weight: int) -> str | None:
        """Set its part of the processors beside other groups, of which the usual is 100; return why it was not
        possible, or None."""
        return _written(self.path / "cpu.weight", str(weight))

    def oom_kills(self) -> int:
        """Return how many processes of this group the out-of-memory killer has ended."""
        return _counter(self.path / "memory.events", "oom_kill") or 0

    def kill(self) -> str | None:
        """Kill every process of the group at once; return why it was not possible (Linux before 5.14 cannot), or
        None."""
        return _written(self.path / "cgroup.kill", "1")

    def remove(self) -> bool:
        """Remove the group; return whether it is gone. It stays while it has a process."""
        try:
            self.path.rmdir()
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True


def worker_group(
    name: str, memory_bytes: int, *, root: Path = CGROUP_ROOT, own_cgroup: Path = OWN_CGROUP
) -> tuple[WorkerGroup | None, str]:
    """Return the group of the worker `name`, limited to its plan's `memory_bytes` plus slack, or None and why the node
    allows none.

    A group that an earlier daemon made for the same worker is used again. Every attempt needs a name of its own: a
    group counts its kills.
    """
    parent, why = _delegated_group(root, own_cgroup)
    if parent is None:
        return None, why
    limit = memory_bytes + max(_MIN_SLACK_BYTES, round(memory_bytes * _SLACK_SHARE))
    group = WorkerGroup(path=parent / f"{_WORKER_PREFIX}{name}", memory_bytes=limit)
    try:
        group.path.mkdir(exist_ok=True)
    except OSError as error:
        return None, f"control group {group.path} cannot be made: {error.strerror}"
    # A worker without its helpers (row readers, compilers) is of no use: they end together.
    for file, value in (("memory.max", str(limit)), ("memory.oom.group", "1")):
        if why := _written(group.path / file, value) or "":
            group.remove()
            return None, why
    return group, ""


def own_worker_group(*, root: Path = CGROUP_ROOT, own_cgroup: Path = OWN_CGROUP) -> WorkerGroup | None:
    """Return the group of the worker that this process is, or None where it has none of its own."""
    path = next((line[3:] for line in _read(own_cgroup).splitlines() if line.startswith("0::")), "")
    folder = root / path.lstrip("/")
    return WorkerGroup(path=folder, memory_bytes=0) if folder.name.startswith(_WORKER_PREFIX) else None


def remove_empty_worker_groups(*, root: Path = CGROUP_ROOT, own_cgroup: Path = OWN_CGROUP) -> int:
    """Remove the groups of workers that have ended, such as those of a daemon that was killed; return how many."""
    parent, _ = _delegated_group(root, own_cgroup)
    folders = parent.glob(f"{_WORKER_PREFIX}*") if parent else ()
    # The kernel refuses to remove a group with a process.
    return sum(WorkerGroup(path=folder, memory_bytes=0).remove() for folder in folders)


def _delegated_group(root: Path, own_cgroup: Path) -> tuple[Path | None, str]:
    """Return the group that this daemon may divide, with the memory controller passed on to its children, or None and
    why not."""
    path = next((line[3:] for line in _read(own_cgroup).splitlines() if line.startswith("0::")), None)
    if path is None or not (root / "cgroup.controllers").exists():
        return (
            None,
            "the node has control groups v1 only; groups of workers need v2 (systemd.unified_cgroup_hierarchy=1)",
        )
    own = root / path.lstrip("/")
    if own.name != DAEMON_GROUP:
        return None, (
            f"control group {path} is not delegated to the daemon: start it by a systemd unit with Delegate=yes and "
            f"DelegateSubgroup={DAEMON_GROUP} (systemd 254 or later)"
        )
    parent = own.parent
    if "memory" not in _read(parent / "cgroup.controllers").split():
        return None, f"control group {parent} has no memory controller: the unit needs Delegate=yes"
    passed_on = _read(parent / "cgroup.subtree_control").split()
    if "cpu" not in passed_on and "cpu" in _read(parent / "cgroup.controllers").split():
        # Without it a worker that is being loaded gets as much of the processors as one that trains (`cpu_priority`).
        _written(parent / "cgroup.subtree_control", "+cpu")
    if "memory" not in passed_on:
        why = _written(parent / "cgroup.subtree_control", "+memory")
        if why is not None:
            return None, why
    return parent, ""


def _written(file: Path, value: str) -> str | None:
    """Write `value` to a file of the kernel's; return why it was refused, or None."""
    try:
        # Not `write_text`: it would make the file where the kernel has none. And not "r+": some may only be written.
        descriptor = os.open(file, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
        try:
            os.write(descriptor, value.encode("ascii"))
        finally:
            os.close(descriptor)
    except OSError as error:
        hint = " (the unit must not set ProtectControlGroups)" if error.errno == errno.EROFS else ""
        return f"{file} cannot be written: {error.strerror}{hint}"
    return None


def _counter(file: Path, name: str) -> int | None:
    for entry in _read(file).splitlines():
        if entry.startswith(f"{name} "):
            return int(entry.split()[1])
    return None


def _groups(controller: str, root: Path, own_cgroup: Path) -> Iterator[Path]:
    """Yield the folders of the process's own group and of all above it: a limit on any of them holds."""
    for line in _read(own_cgroup).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / controller if controllers else root
        folder = top / path.lstrip("/")
        yield folder
        while folder != top:
            folder = folder.parent
            yield folder


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError:
        return ""
