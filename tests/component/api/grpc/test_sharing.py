"""How the node is shared, over the wire: queue, usage, quotas, simulation, and the node's condition."""

from __future__ import annotations

import time
from typing import Any

import grpc.aio
import pytest

from horizon_proto.v1 import job_pb2, node_pb2, sharing_pb2
from horizon_server.api.grpc.convert import to_message
from horizon_server.db.sharing import SharingStore
from horizon_server.records.job import JobState
from horizon_server.records.sharing import Allowance, Outlook, Quota


@pytest.fixture
def state(state_with_chats: Any) -> Any:
    return state_with_chats


@pytest.fixture
def sharing(world: Any) -> SharingStore:
    return SharingStore(world.daemon.database)


async def _refused(call: Any) -> tuple[str, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code().name, caught.value.details() or ""


async def test_the_queue_shows_outlooks_and_hides_what_others_do(world: Any) -> None:
    resident = await world.job(name="first", state=JobState.RUNNING)
    queued = await world.job(name="second")
    world.daemon.parts.scheduler.runtime.view.outlooks = {
        resident.job_id: Outlook(why="resident, 1 job has the device", share=1.0, estimated_end_s=2000.5),
        queued.job_id: Outlook(
            why="waiting for 3 GiB of host memory", estimated_start_s=2000.5, estimated_end_s=3000.0
        ),
    }
    mine = (await world.ann.call("sharing", "GetQueue", sharing_pb2.GetQueueRequest())).jobs
    assert [(e.name, e.position, e.state) for e in mine] == [
        ("first", 0, job_pb2.JOB_STATE_RUNNING),
        ("second", 1, job_pb2.JOB_STATE_QUEUED),
    ]
    assert mine[0].outlook.share == 1.0 and not mine[0].outlook.HasField("estimated_start_time")
    assert mine[1].outlook.why == "waiting for 3 GiB of host memory"
    theirs = (await world.bob.call("sharing", "GetQueue", sharing_pb2.GetQueueRequest())).jobs
    assert [(e.job_id, e.owner) for e in theirs] == [(resident.job_id, "ann"), (queued.job_id, "ann")]
    for entry in theirs:
        assert not any(entry.HasField(name) for name in ("name", "project", "priority", "step", "num_steps"))
        assert entry.outlook.why == ""
    assert theirs[1].outlook.estimated_start_time.ToMilliseconds() == 2_000_500
    seen = (await world.ann.call("jobs", "GetJob", job_pb2.GetJobRequest(job_id=queued.job_id))).job
    assert seen.outlook == mine[1].outlook
    listed = (await world.ann.call("jobs", "ListJobs", job_pb2.ListJobsRequest())).jobs
    assert [job.outlook.share for job in listed] == [0.0, 1.0]


async def test_a_job_that_has_ended_has_no_outlook(world: Any) -> None:
    job = await world.job(state=JobState.SUCCEEDED)
    world.daemon.parts.scheduler.runtime.view.outlooks = {job.job_id: Outlook(why="resident")}
    seen = (await world.ann.call("jobs", "GetJob", job_pb2.GetJobRequest(job_id=job.job_id))).job
    assert not seen.HasField("outlook")


async def test_usage_is_ones_own_and_everybodys_for_viewers(world: Any, sharing: SharingStore) -> None:
    job = await world.job(state=JobState.SUCCEEDED)
    now_s = time.time()
    for user, device_s in (("ann", 60.0), ("bob", 30.0)):
        await sharing.charge(user, user, job_id=job.job_id, device_s=device_s, num_tokens=7, now_s=now_s)
    mine = (await world.ann.call("sharing", "GetUsage", sharing_pb2.GetUsageRequest())).usages
    assert [(u.project, u.user, u.device_s, u.num_tokens, dict(u.jobs)) for u in mine] == [
        ("ann", "ann", 60.0, 7, {"SUCCEEDED": 1})
    ]
    assert mine[0].stored_bytes > 0, "her chats"
    everybody = (await world.eve.call("sharing", "GetUsage", sharing_pb2.GetUsageRequest())).usages
    assert {u.user: u.device_s for u in everybody} == {"ann": 60.0, "bob": 30.0}
    later = sharing_pb2.GetUsageRequest()
    later.since_time.FromSeconds(int(now_s) + 86400)
    assert (await _refused(world.ann.call("sharing", "GetUsage", later)))[0] == "INVALID_ARGUMENT"


async def test_quotas_come_with_what_is_used_and_what_frees_them(world: Any, sharing: SharingStore) -> None:
    await sharing.set_allowance(Allowance(holder="user", name="ann", weight=3.0, quota=Quota(max_queued_jobs=5)))
    await world.job()
    user, project = (await world.ann.call("sharing", "GetQuota", sharing_pb2.GetQuotaRequest())).allowances
    assert (user.holder, user.name, user.weight, project.holder) == ("user", "ann", 3.0, "project")
    quotas = {quota.quota: quota for quota in user.quotas}
    assert list(quotas) == [
        "queued_jobs",
        "resident_jobs",
        "host_bytes",
        "stored_bytes",
        "device_hours_per_week",
        "retained_bytes",
    ]
    queued = quotas["queued_jobs"]
    assert (queued.limit, queued.used, "horizon job cancel" in queued.frees) == (5.0, 1.0, True)
    assert not quotas["host_bytes"].HasField("limit")


async def test_a_simulated_job_gets_an_outlook_and_is_not_queued(world: Any) -> None:
    spec = to_message(world.daemon.spec(), job_pb2.JobSpec)
    answer = await world.ann.call("sharing", "SimulateJob", sharing_pb2.SimulateJobRequest(spec=spec))
    assert answer.outlook.why
    assert not (await world.ann.call("jobs", "ListJobs", job_pb2.ListJobsRequest())).jobs


async def test_an_admin_drains_the_node_and_everybody_sees_it(world: Any) -> None:
    now_s = int(time.time())
    condition = node_pb2.NodeCondition(mode=node_pb2.NODE_MODE_CORDONED, message="new driver")
    condition.window_start_time.FromSeconds(now_s - 60)
    condition.window_end_time.FromSeconds(now_s + 3600)
    request = node_pb2.SetNodeRequest(condition=condition)
    assert (await _refused(world.ann.call("node", "SetNode", request)))[0] == "PERMISSION_DENIED"
    node = (await world.root_user.call("node", "SetNode", request)).node
    assert (node.condition, node.mode) == (condition, node_pb2.NODE_MODE_DRAINED), "the window holds now"
    seen = (await world.ann.call("node", "GetNode", node_pb2.GetNodeRequest())).node
    assert (seen.condition, seen.mode) == (condition, node_pb2.NODE_MODE_DRAINED)
    settings = world.daemon.settings
    assert (seen.time_slice_s, seen.share_half_life_s) == (settings.time_slice_s, 86400.0)
    assert [(device.name, device.holder, device.num_residents) for device in seen.devices] == [("host", "", 0)]
    # An empty request would open the node.
    code, message = await _refused(world.root_user.call("node", "SetNode", node_pb2.SetNodeRequest()))
    assert (code, "condition is missing" in message) == ("INVALID_ARGUMENT", True)
    opened = node_pb2.SetNodeRequest(condition=node_pb2.NodeCondition(mode=node_pb2.NODE_MODE_OPEN))
    assert (await world.root_user.call("node", "SetNode", opened)).node.mode == node_pb2.NODE_MODE_OPEN
