"""The heart, for real: service, queue and attempts over the real database, with workers that follow a script."""

from __future__ import annotations

from tests.daemon_parts import DaemonParts, Script

from horizon_server.events import CheckpointWritten, StepDone
from horizon_server.records.job import JobState


async def test_a_job_runs_from_submit_to_its_last_event(daemon: DaemonParts) -> None:
    ada = await daemon.user("ada")
    await daemon.dataset(ada)
    job = await daemon.submit(ada, "first", Script(num_steps=3))
    assert (job.job_state, job.queue_position) == (JobState.QUEUED, 1)
    done = await daemon.until(job.job_id, JobState.SUCCEEDED)
    assert (done.step, done.num_steps, done.attempt) == (3, 3, 1)
    events = await daemon.events(job.job_id)
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    assert [event.payload.step for event in events if isinstance(event.payload, StepDone)] == [1, 2, 3]
    assert [event.payload.step for event in events if isinstance(event.payload, CheckpointWritten)] == [3]
    [checkpoint] = await daemon.services.jobs.checkpoints(ada, job.job_id)
    assert (checkpoint.step, checkpoint.last) == (3, True)
