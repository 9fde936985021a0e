"""Which devices are out of service."""

from __future__ import annotations

from typing import Any

import pytest

from horizon_server.children.child import ChildTask
from horizon_server.errors import OutOfMemory, WorkerDied, WorkerFailed
from horizon_server.jobs.health import DeviceHealth
from horizon_server.planning.machine import Gpu, why_broken
from horizon_server.records.sharing import NodeCondition

GPU = Gpu(index=1, name="H100", memory_bytes=80 << 30, uuid="GPU-1")


async def test_devices_are_out_that_an_admin_has_withdrawn_or_that_a_trial_failed_on() -> None:
    tried: list[str] = []

    async def why(name: str) -> str:
        tried.append(name)
        return "CUDA error: no" if name == "cuda:1" else ""

    health, withdrawn = DeviceHealth(why_broken=why), NodeCondition(withdrawn=("cuda:3",))
    assert health.out(NodeCondition()) == {}
    failed = {"cuda:1": "out of service, as a trial of it failed: CUDA error: no"}
    assert await health.try_devices(("cuda:0", "cuda:1")) == failed
    assert tried == ["cuda:0", "cuda:1"]
    assert await health.try_devices(("cuda:0", "cuda:2")) == {}
    assert health.out(withdrawn) == {**failed, "cuda:3": "withdrawn by an admin"}
    health.forget()
    assert health.out(withdrawn) == {"cuda:3": "withdrawn by an admin"}


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (True, ""),
        (False, "its matrix product was wrong"),
        (
            WorkerFailed("the trial failed: RuntimeError: CUDA error: unspecified\nmore"),
            "the trial failed: RuntimeError: ",
        ),
        (WorkerFailed("RuntimeError: No CUDA GPUs are available"), "RuntimeError: No CUDA GPUs are available"),
        (WorkerFailed("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 MiB"), ""),
        (OutOfMemory("the trial of a GPU ran out of memory"), ""),
        (WorkerDied("the trial of a GPU was killed by SIGKILL"), ""),
    ],
)
async def test_a_gpu_is_broken_where_a_child_of_its_own_cannot_compute_on_it(
    found: bool | Exception, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(self: ChildTask, request: Any) -> Any:
        assert (request, self.environment["CUDA_VISIBLE_DEVICES"]) == ({"computes": True}, "GPU-1")
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(ChildTask, "run", run)
    why = await why_broken(GPU, {})
    assert why.startswith(wanted) and bool(why) == bool(wanted) and "\n" not in why
