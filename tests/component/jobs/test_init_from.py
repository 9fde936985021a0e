"""Jobs that start with the weights of another job's checkpoint: which one, who may, and that its files stay."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import MakeDaemon
from tests.daemon_parts import ROOT, DaemonParts

from horizon_server.errors import InvalidSpec, NotFound
from horizon_server.events import JobEvent, Message
from horizon_server.main import sweep
from horizon_server.records.account import Principal
from horizon_server.records.job import JobRecord, JobState


@pytest.fixture
async def daemon(make_daemon: MakeDaemon, state_dir: Path) -> AsyncIterator[DaemonParts]:
    """Without a queue: jobs stay as they are put."""
    async with make_daemon(state_dir, queue=False) as made:
        yield made


@pytest.fixture
async def source(daemon: DaemonParts, ada: Principal) -> JobRecord:
    """An ended job named `first` with checkpoints of steps 3, 5 and 7, of which 5 is the best."""
    job = await daemon.job_in(JobState.SUCCEEDED, ada, name="first")
    model = {path.name: path.read_bytes() for path in daemon.model_folder.iterdir()}
    for step, eval_loss in ((3, 0.9), (5, 0.2), (7, 0.4)):
        files = {**model, "made-at.json": str(step).encode(), "trainer/exp_avg.safetensors": b"moments"}
        daemon.write_checkpoint(job, step, files, eval_loss=eval_loss)
    return job


def jobs_with_files(daemon: DaemonParts) -> set[str]:
    return set(daemon.services.jobs.folders.ids())


async def second_event(daemon: DaemonParts, job: JobRecord) -> JobEvent:
    return await anext(daemon.parts.journal.follow(job.job_id, 1))


@pytest.mark.parametrize(("which", "step"), [("last", 7), ("best", 5), ("3", 3), ("0000003", 3)])
@pytest.mark.parametrize("by_id", [True, False])
async def test_a_job_has_the_files_of_the_checkpoint_that_it_names(
    daemon: DaemonParts, ada: Principal, source: JobRecord, which: str, step: int, by_id: bool
) -> None:
    named = f"{source.job_id if by_id else 'first'}@{which}"
    job = await daemon.submit(ada, "second", init_from=named)

    model, _, _ = await daemon.services.jobs.resources.of_job(job)
    assert job.spec.init_from == named
    assert (model / "made-at.json").read_text() == str(step)
    assert {path.name for path in model.iterdir()} == {
        "made-at.json",
        *(path.name for path in daemon.model_folder.iterdir()),
    }
    checkpoint = daemon.services.jobs.folders.checkpoints(source.job_id).of_step(step)
    assert (model / "made-at.json").samefile(checkpoint / "made-at.json"), "a link takes no space"
    text = f"starts with the weights of the checkpoint of step {step} of job {source.job_id} (first)"
    assert (await second_event(daemon, job)).payload == Message(level="info", text=text)
    assert (await daemon.services.jobs.plan(ada, job.spec))[1].num_parameters == (job.plan and job.plan.num_parameters)


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (
            "exact",
            "compressed",
            ", rounded to 24 bits: that job's optimizer states are exact, and this job's compressed",
        ),
        ("compressed", "exact", ", as they are: that job's optimizer states are compressed, and this job's exact"),
        ("compressed", "compressed", ""),
    ],
)
async def test_a_job_starts_from_states_of_the_other_form_and_says_so(
    daemon: DaemonParts, ada: Principal, before: str, now: str, said: str
) -> None:
    done = await daemon.job_in(JobState.SUCCEEDED, ada, name="before", train={"optimizer_states": before})
    daemon.write_checkpoint(done, 3, {path.name: path.read_bytes() for path in daemon.model_folder.iterdir()})
    job = await daemon.submit(ada, "now", init_from="before@last", train={"optimizer_states": now})
    payload = (await second_event(daemon, job)).payload
    assert isinstance(payload, Message) and payload.text.endswith(f"(before){said}")


async def test_its_files_stay_when_the_other_job_is_deleted_and_go_when_it_has_ended(
    daemon: DaemonParts, ada: Principal, source: JobRecord
) -> None:
    job = await daemon.submit(ada, "second", init_from="first@last")
    failed = await daemon.job_in(JobState.FAILED, ada, name="third", init_from="first@best")
    await daemon.services.jobs.delete(ada, source.job_id)
    await sweep(daemon.parts)

    resources, folders = daemon.services.jobs.resources, daemon.services.jobs.folders
    for one, step in ((job, "7"), (failed, "5")):
        model, _, _ = await resources.of_job(one)
        assert (model / "made-at.json").read_text() == step
    await daemon.services.jobs.cancel(ada, job.job_id)
    await sweep(daemon.parts)
    assert not folders.start(job.job_id).exists()
    assert folders.start(failed.job_id).exists(), "a failed job may be resumed"


async def test_weights_that_are_gone_are_named(daemon: DaemonParts, ada: Principal, source: JobRecord) -> None:
    job = await daemon.submit(ada, "second", init_from="first@7")
    folder = daemon.services.jobs.folders.start(job.job_id)
    folder.rename(folder.with_name("elsewhere"))
    with pytest.raises(NotFound, match=rf"job {job.job_id} started from \(first@7\) are gone; submit it again, or"):
        await daemon.services.jobs.resources.of_job(job)


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ("second@last", "job 'second' does not exist, or is not yours"),
        ("first@6", r"has no checkpoint of step 6; it has checkpoints of steps: 3, 5, 7"),
        ("empty@last", r"has no checkpoint; it has checkpoints of steps: none"),
        ("unjudged@best", r"has no evaluated checkpoint; it has checkpoints of steps: 2"),
    ],
)
async def test_a_checkpoint_that_is_not_there_is_refused(
    daemon: DaemonParts, ada: Principal, source: JobRecord, named: str, words: str
) -> None:
    await daemon.job_in(JobState.SUCCEEDED, ada, name="empty")
    unjudged = await daemon.job_in(JobState.SUCCEEDED, ada, name="unjudged")
    daemon.write_checkpoint(unjudged, 2, {"config.json": b"{}"})
    before = jobs_with_files(daemon)

    with pytest.raises(NotFound, match=words):
        await daemon.submit(ada, "third", init_from=named)
    with pytest.raises(NotFound, match=words):
        await daemon.services.jobs.plan(ada, daemon.spec("third", init_from=named))
    assert jobs_with_files(daemon) == before


async def test_only_those_who_see_a_job_start_from_it(daemon: DaemonParts, ada: Principal, source: JobRecord) -> None:
    bob = await daemon.user("bob")
    await daemon.dataset(bob)
    with pytest.raises(NotFound, match="does not exist, or is not yours"):
        await daemon.submit(bob, init_from=f"{source.job_id}@last")
    with pytest.raises(NotFound, match="does not exist, or is not yours"):
        await daemon.submit(bob, init_from="first@last")
    await daemon.dataset(ROOT)
    assert (await daemon.submit(ROOT, init_from=f"{source.job_id}@last")).owner == ROOT.name


async def test_a_checkpoint_of_another_model_is_refused(daemon: DaemonParts, ada: Principal, source: JobRecord) -> None:
    await daemon.model(ada, "tiny")
    before = jobs_with_files(daemon)
    with pytest.raises(
        InvalidSpec, match=r"has trained the model .*, which is not the model tiny of this job"
    ) as caught:
        await daemon.submit(ada, model="tiny", init_from="first@last")
    assert [violation.field for violation in caught.value.violations] == ["init_from"]
    assert jobs_with_files(daemon) == before


async def test_a_repeated_request_leaves_nothing(daemon: DaemonParts, ada: Principal, source: JobRecord) -> None:
    request: dict[str, Any] = {"request_id": str(uuid.uuid4()), "spec": daemon.spec("second", init_from="first@last")}
    first = await daemon.services.jobs.submit(ada, **request)
    before = jobs_with_files(daemon)

    assert (await daemon.services.jobs.submit(ada, **request)).job_id == first.job_id
    assert jobs_with_files(daemon) == before == {source.job_id, first.job_id}
