"""Which machine a job is sent to, and what is said of the others."""

from __future__ import annotations

import re
from typing import Any

import pytest
from tests.component.fleet.conftest import Fleet
from tests.daemon_parts import Script

from horizon_server.errors import DoesNotFit, HorizonError, InvalidSpec
from horizon_server.records.boxes import Place
from horizon_server.records.job import JobState


async def places(fleet: Fleet, **changes: Any) -> dict[str, Place]:
    spec = fleet.head.spec(model="tiny", **changes)
    return {place.box: place for place in (await fleet.head.services.jobs.plan(fleet.ada, spec))[2]}


async def test_a_job_goes_where_it_ends_first(fleet: Fleet) -> None:
    found = await places(fleet)
    assert list(found) == ["box1", "box2"]
    # Both are as fast: what has to be copied decides.
    assert found["box1"].chosen and not found["box2"].chosen
    assert found["box1"].copied_bytes == 0 < found["box2"].copied_bytes
    here, there = found["box1"].estimated_end_s, found["box2"].estimated_end_s
    assert here is not None and there is not None and here < there
    first = await fleet.head.submit(fleet.ada, script=Script(hold_at=1), train={"max_steps": 100_000}, model="tiny")
    assert first.box == ""
    await fleet.head.until(first.job_id, JobState.RUNNING)
    # A long job is on the head by now.
    busy = await places(fleet, train={"max_steps": 10_000})
    assert busy["box2"].chosen
    second = await fleet.head.submit(fleet.ada, "second", model="tiny", train={"max_steps": 10_000})
    assert second.box == "box2"
    outlook, _, asked = await fleet.head.services.sharing.simulate(
        fleet.ada, fleet.head.spec("third", model="tiny", node="box1")
    )
    assert asked == () and outlook.why
    await fleet.head.services.jobs.cancel(fleet.ada, first.job_id)


async def test_a_named_machine_gets_the_job(fleet: Fleet) -> None:
    assert (await fleet.head.submit(fleet.ada, "here", model="tiny", node="box1")).box == ""
    assert (await fleet.head.submit(fleet.ada, "there", model="tiny", node="box2")).box == "box2"
    with pytest.raises(InvalidSpec, match=r"node is box3; the machines of this fleet are: box1, box2"):
        await fleet.head.submit(fleet.ada, model="tiny", node="box3")


async def test_a_machine_that_cannot_have_the_job_says_why(fleet: Fleet) -> None:
    room = fleet.box.services.jobs.planner
    limit, room._settings = room._settings, room._settings.model_copy(update={"host_memory_limit_bytes": 2**30})
    found = await places(fleet)
    room._settings = limit
    assert re.search(r"needs .* of host memory", found["box2"].why_not), found["box2"].why_not
    await fleet.cut()
    found = await places(fleet, train={"max_steps": 10_000})
    assert re.search(r"box box2 \(127.0.0.1:\d+\) cannot be reached", found["box2"].why_not)
    with pytest.raises(HorizonError, match=r"box box2 .* cannot be reached"):
        await fleet.head.submit(fleet.ada, model="tiny", node="box2")


async def test_where_no_machine_can_have_it_the_first_one_says_so(fleet: Fleet) -> None:
    with pytest.raises(InvalidSpec, match="device: cuda needs a CUDA device"):
        await fleet.head.submit(fleet.ada, model="tiny", device="cuda")
    for daemon in (fleet.head, fleet.box):
        planner = daemon.services.jobs.planner
        planner._settings = planner._settings.model_copy(update={"host_memory_limit_bytes": 2**30})
    with pytest.raises(DoesNotFit):
        await fleet.head.submit(fleet.ada, model="tiny")


async def test_a_closed_box_is_shown_as_closed(fleet: Fleet) -> None:
    await fleet.box.set_node("cordoned")

    async def is_shown() -> bool:
        (box,) = (await fleet.head.services.node.describe(fleet.ada)).boxes
        return (box.name, box.state) == ("box2", "closed")

    await fleet.until(is_shown)
    assert not (await places(fleet))["box2"].chosen
    await fleet.cut()

    async def is_lost() -> bool:
        (box,) = (await fleet.head.services.node.describe(fleet.ada)).boxes
        return box.state == "lost" and "cannot be reached" in box.message

    await fleet.until(is_lost)


async def test_a_model_in_a_folder_has_to_be_there_too(fleet: Fleet) -> None:
    # Both daemons of the test see the same folder, of which each may use what its settings name.
    job = await fleet.head.submit(fleet.ada, node="box2")
    assert (await fleet.head.until(job.job_id, JobState.SUCCEEDED)).box == "box2"
    fleet.box.services.jobs.resources._model_roots.clear()
    with pytest.raises(HorizonError, match="not below an allowed root"):
        await fleet.head.submit(fleet.ada, "second", node="box2")
