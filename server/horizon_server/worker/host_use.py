"""What a worker uses of host memory, by the components of its plan."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from horizon_server.figures import StepFigures

_PROCESSES = Path("/proc")


def host_components(figures: StepFigures, *, device: str, process_bytes: int) -> dict[str, int]:
    """Return what the engine reports, plus `other`: the rest of the process.

    On the `host` device the device is host memory too; the plan counts its slots as staging and its activations as
    activations.
    """
    on_host: Mapping[str, int] = figures.device_memory_bytes if device == "host" else {}
    used = {"activations": 0, "staging": 0, **figures.host_memory_bytes}
    used["activations"] += on_host.get("activations", 0)
    used["staging"] += on_host.get("weights", 0) + on_host.get("gradients", 0)
    # Not below 0: reserved pages that were never written are in the engine's figures but not in the process's.
    used["other"] = max(0, process_bytes - used["activations"] - used["staging"])
    return used


def process_bytes(others: Collection[int] = ()) -> int:
    """Return the resident heap, stacks and libraries of this process, and of `others` by their ids. The planes are
    shared memory and not among them."""
    total = 0
    for name in ("self", *map(str, others)):
        try:
            status = (_PROCESSES / name / "status").read_text("utf-8")
        except OSError:
            continue  # it has just ended
        fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        total += sum(int(fields.get(field, "0 kB").split()[0]) for field in ("RssAnon", "RssFile")) * 1024
    return total
