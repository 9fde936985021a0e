"""Jobs, nodes and shares in one line each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from horizon_server.records.sharing import Allowance
from horizon_server.scheduling.shares import Shares
from horizon_server.scheduling.state import Job, Node, Resident, Rules, kind_of

GIB = 2**30
HOUR = 3600.0
NOW = 1_760_000_000.0  # Thursday 2025-10-09 08:53:20 UTC
RULES = Rules()
NODE = Node(host_bytes=100 * GIB, devices={"host": 0})


def job(job_id: str, user: str = "ann", **values: Any) -> Job:
    return Job(**_values(job_id, user, values))


def resident(job_id: str, user: str = "ann", *, since_s: float = NOW, **values: Any) -> Resident:
    # A device's name says its kind.
    devices = values.pop("devices", None) or (values.get("device", "host"),)
    values["device"] = kind_of(devices[0])
    values.setdefault("num_devices", len(devices))
    extra: dict[str, Any] = {
        name: values.pop(name)
        for name in (
            "is_stopping",
            "resident_since_s",
            "is_loading",
            "waits_to_prepare",
            "on_since_s",
            "can_change",
            "more_nodes",
        )
        if name in values
    }
    known = {"devices": devices, "resident_since_s": since_s, **extra}
    return Resident(**_values(job_id, user, {"since_s": since_s, **values}), **known)


def _values(job_id: str, user: str, values: dict[str, Any]) -> dict[str, Any]:
    host_gib = values.pop("host_gib", 10)
    defaults = {"project": user, "priority": 0, "order": 0, "since_s": NOW, "device": "host", "device_bytes": 0}
    return {"job_id": job_id, "user": user, "host_bytes": int(host_gib * GIB), **defaults, **values}


def shares(
    used_h: dict[str, float] | None = None, weights: dict[str, float] | None = None, *, used_s: float = NOW
) -> Shares:
    """Users in their own projects, who have used hours of a device at `used_s`; a weight belongs to the project."""
    result = Shares(24 * HOUR)
    result.set_allowances(Allowance(holder="project", name=name, weight=one) for name, one in (weights or {}).items())
    for user, hours in (used_h or {}).items():
        result.charge(user, user, hours * HOUR, used_s)
    return result


def no_quota(job: Job, residents: Sequence[Resident]) -> str:
    return ""
