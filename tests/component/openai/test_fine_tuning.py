"""Fine-tuning jobs by OpenAI's SDK: created, watched, paused, resumed, cancelled, and what they leave."""

from __future__ import annotations

import csv
from typing import Any

import pytest
from openai import (
    BadRequestError,
    ConflictError,
    NotFoundError,
    OpenAI,
    PermissionDeniedError,
)
from openai.types.fine_tuning import FineTuningJob
from tests.component.openai.conftest import CHATS, Connect, lines
from tests.component.openai.test_files import PAIRS, PREFERENCES
from tests.support.daemon_process import DaemonProcess, wait_for

MODEL = "demo-model"
QUICK = {"train": {"sequence_length": 128, "compile": "off"}}
"""Not compiled: some jobs have very many steps, and a test waits for the first ones."""
ENDED = ("succeeded", "failed", "cancelled")


@pytest.fixture(scope="module")
def chats(client: OpenAI) -> str:
    return client.files.create(file=("chats.jsonl", lines(CHATS)), purpose="fine-tune").id


@pytest.fixture(scope="module")
def preferences(client: OpenAI) -> str:
    return client.files.create(file=("preferences.jsonl", lines(PREFERENCES * 4)), purpose="fine-tune").id


def ended(client: OpenAI, job: FineTuningJob) -> FineTuningJob:
    seen = [job]

    def has_ended() -> bool:
        seen[:] = [client.fine_tuning.jobs.retrieve(job.id)]
        return seen[0].status in ENDED

    wait_for(has_ended, 240.0)
    return seen[0]


@pytest.fixture(scope="module")
def done(client: OpenAI, chats: str) -> FineTuningJob:
    """A job that has succeeded."""
    job = client.fine_tuning.jobs.create(
        model=MODEL,
        training_file=chats,
        validation_file=chats,
        method={
            "type": "supervised",
            "supervised": {
                "hyperparameters": {"n_epochs": 3, "batch_size": 4, "learning_rate_multiplier": 2.5},
            },
        },
        suffix="numbers",
        seed=7,
        metadata={"team": "blue"},
        integrations=[{"type": "wandb", "wandb": {"project": "mine"}}],
        extra_body={"horizon": {"train": {"sequence_length": 128, "compile": "off"}, "checkpoint": {"every_steps": 2}}},
    )
    assert job.status in ("queued", "validating_files", "running")
    job = ended(client, job)
    assert job.status == "succeeded", job.error
    return job


def test_a_job_is_shown_as_it_was_asked_for(done: FineTuningJob, chats: str) -> None:
    assert done.model == MODEL
    assert done.training_file == done.validation_file == chats
    assert done.seed == 7
    assert done.metadata == {"team": "blue"}
    assert done.fine_tuned_model == f"ft:{MODEL}:ada:numbers:{done.id}"
    assert done.finished_at is not None
    assert done.finished_at >= done.created_at
    assert done.trained_tokens
    assert done.error is None
    assert done.organization_id == "ada"
    assert done.method is not None
    assert done.method.type == "supervised"
    assert done.method.supervised is not None
    asked = done.method.supervised.hyperparameters
    assert asked is not None
    assert (asked.n_epochs, asked.batch_size, asked.learning_rate_multiplier) == (3, 4, 2.5)
    assert done.hyperparameters.model_dump() == asked.model_dump()


def test_it_is_an_ordinary_job(daemon: DaemonProcess, done: FineTuningJob) -> None:
    with daemon.client(daemon.user("ada")) as ours:
        job = ours.jobs.get(done.id)
        assert (job.spec["name"], job.spec["method"], job.state) == ("numbers", "sft", "SUCCEEDED")
        assert job.spec["metadata"] == {"team": "blue"}
        assert job.spec["train"]["learning_rate"] == 2.5e-5
        assert job.spec["train"]["seed"] == 7


def test_its_events_are_the_newest_first_in_pages(client: OpenAI, done: FineTuningJob) -> None:
    events = list(client.fine_tuning.jobs.list_events(done.id, limit=3))
    numbers = [int(event.id.rpartition("-")[2]) for event in events]
    assert numbers == list(range(len(numbers), 0, -1))
    said = [event.message for event in events]
    assert said[0].startswith("The job is SUCCEEDED")
    assert any("integrations are ignored" in message for message in said)
    assert any("Checkpoint created at step" in message for message in said)
    assert any(event.type == "metrics" and "training loss" in event.message for event in events)
    assert len(client.fine_tuning.jobs.list_events(done.id).data) <= 20
    with pytest.raises(BadRequestError) as caught:
        client.fine_tuning.jobs.list_events(done.id, after="ftevent-7")
    assert caught.value.param == "after"


def test_the_losses_of_its_steps_are_a_file(client: OpenAI, connect: Connect, done: FineTuningJob) -> None:
    (file_id,) = done.result_files
    content = client.files.content(file_id).read()
    about = client.files.retrieve(file_id)
    assert (about.purpose, about.bytes, about.filename) == ("fine-tune-results", len(content), "step_metrics.csv")
    rows = list(csv.DictReader(content.decode().splitlines()))
    events = client.fine_tuning.jobs.list_events(done.id, limit=100).data
    told: list[Any] = [event.data for event in events]
    losses = {data["step"]: data["train_loss"] for data in told if data and "train_loss" in data}
    assert {int(row["step"]): float(row["train_loss"]) for row in rows if row["train_loss"]} == losses
    # The first row is of the evaluation before the first step.
    assert [int(row["step"]) for row in rows] == [0, *sorted(losses)]
    assert rows[0]["valid_loss"] and rows[-1]["valid_loss"]
    with pytest.raises(BadRequestError, match="goes with the job"):
        client.files.delete(file_id)
    with pytest.raises(NotFoundError, match="No such File object"):
        connect("bob").files.content(file_id)
    with pytest.raises(NotFoundError, match="No such File object"):
        client.files.retrieve("file-job_000000000000")


def test_its_checkpoints_are_the_newest_first(client: OpenAI, done: FineTuningJob) -> None:
    found = list(client.fine_tuning.jobs.checkpoints.list(done.id, limit=1))
    steps = [checkpoint.step_number for checkpoint in found]
    assert len(steps) > 1
    assert steps == sorted(steps, reverse=True)
    last = found[0]
    assert last.fine_tuning_job_id == done.id
    assert last.fine_tuned_model_checkpoint == f"{done.fine_tuned_model}:ckpt-step-{last.step_number}"
    assert last.metrics.step == last.step_number
    assert last.metrics.train_loss is not None
    assert last.metrics.full_valid_loss is not None
    assert last.metrics.full_valid_mean_token_accuracy is not None
    with pytest.raises(BadRequestError):
        client.fine_tuning.jobs.checkpoints.list(done.id, after="ftckpt-1")


def test_a_job_learns_from_preferences(client: OpenAI, preferences: str, daemon: DaemonProcess) -> None:
    job = client.fine_tuning.jobs.create(
        model=MODEL,
        training_file=preferences,
        method={"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.25, "n_epochs": 1, "batch_size": "auto"}}},
        extra_body={"horizon": QUICK},
    )
    job = ended(client, job)
    assert job.status == "succeeded", job.error
    assert job.fine_tuned_model == f"ft:{MODEL}:ada::{job.id}", "without a suffix its place is empty"
    assert job.method is not None
    assert job.method.type == "dpo"
    assert job.method.dpo is not None
    assert job.method.dpo.hyperparameters is not None
    assert job.method.dpo.hyperparameters.beta == 0.25
    with daemon.client(daemon.user("ada")) as ours:
        spec = ours.jobs.get(job.id).spec
        assert (spec["method"], spec["dpo"]["beta"]) == ("dpo", 0.25)


def test_a_job_continues_from_a_fine_tuned_model(client: OpenAI, done: FineTuningJob, chats: str) -> None:
    checkpoint = client.fine_tuning.jobs.checkpoints.list(done.id).data[-1]
    for name in (str(done.fine_tuned_model), checkpoint.fine_tuned_model_checkpoint, f"{done.id}@best"):
        job = client.fine_tuning.jobs.create(
            model=name, training_file=chats, hyperparameters={"n_epochs": 1}, extra_body={"horizon": QUICK}
        )
        job = ended(client, job)
        assert job.status == "succeeded", job.error
        assert job.model == MODEL
        said = [event.message for event in client.fine_tuning.jobs.list_events(job.id)]
        assert any("starts with the weights of the checkpoint" in message for message in said)


def test_an_adapter_is_continued_as_one(client: OpenAI, chats: str, daemon: DaemonProcess) -> None:
    lora = {"train": {**QUICK["train"], "trainable": "lora", "lora": {"rank": 4}}}
    first = client.fine_tuning.jobs.create(
        model=MODEL,
        training_file=chats,
        hyperparameters={"n_epochs": 1, "learning_rate_multiplier": 3.0},
        extra_body={"horizon": lora},
    )
    first = ended(client, first)
    assert first.status == "succeeded", first.error
    assert first.hyperparameters.learning_rate_multiplier == 3.0
    second = client.fine_tuning.jobs.create(
        model=str(first.fine_tuned_model),
        training_file=chats,
        hyperparameters={"n_epochs": 1},
        extra_body={"horizon": QUICK},
    )
    second = ended(client, second)
    assert second.status == "succeeded", second.error
    with daemon.client(daemon.user("ada")) as ours:
        train = ours.jobs.get(second.id).spec["train"]
        assert train["trainable"] == ["lora"]
        assert train["lora"]["rank"] == 4
        assert train["learning_rate"] == 1e-4
        assert ours.jobs.get(first.id).spec["train"]["learning_rate"] == 3e-4


def test_a_job_is_paused_resumed_and_cancelled(client: OpenAI, chats: str) -> None:
    jobs = client.fine_tuning.jobs
    job = jobs.create(
        model=MODEL, training_file=chats, hyperparameters={"n_epochs": 9000}, extra_body={"horizon": QUICK}
    )

    def has_said(words: str) -> bool:
        return any(words in event.message for event in jobs.list_events(job.id, limit=100))

    wait_for(lambda: has_said("training loss"), 240.0)
    assert jobs.retrieve(job.id).status == "running"
    with pytest.raises(ConflictError) as caught:
        client.models.delete(f"{job.id}@last") if jobs.checkpoints.list(job.id).data else jobs.resume(job.id)
    assert caught.value.code == "wrong_job_state"
    jobs.pause(job.id)
    wait_for(lambda: has_said("The job is PAUSED"), 240.0)
    assert jobs.retrieve(job.id).status == "queued"
    assert jobs.resume(job.id).status in ("queued", "validating_files", "running")
    wait_for(lambda: jobs.retrieve(job.id).status == "running", 240.0)
    jobs.cancel(job.id)
    wait_for(lambda: jobs.retrieve(job.id).status == "cancelled", 240.0)
    assert jobs.cancel(job.id).status == "cancelled"
    assert jobs.retrieve(job.id).fine_tuned_model is None


def test_jobs_are_listed_in_pages_and_by_their_metadata(client: OpenAI, done: FineTuningJob, chats: str) -> None:
    made = []
    for number in range(3):
        job = client.fine_tuning.jobs.create(
            model=MODEL, training_file=chats, metadata={"number": str(number)}, extra_body={"horizon": QUICK}
        )
        client.fine_tuning.jobs.cancel(job.id)
        made.append(job.id)
    page = client.fine_tuning.jobs.list(limit=2)
    assert [job.id for job in page.data] == [made[2], made[1]]
    assert page.has_more
    everything = [job.id for job in client.fine_tuning.jobs.list(limit=2)]
    assert everything[:3] == made[::-1]
    assert done.id in everything
    assert len(set(everything)) == len(everything)
    assert [job.id for job in client.fine_tuning.jobs.list(metadata={"number": "1"}).data] == [made[1]]
    assert [job.id for job in client.fine_tuning.jobs.list(metadata={"team": "blue"}).data] == [done.id]
    nothing = client.fine_tuning.jobs.list(extra_query={"metadata": "null"})
    assert not {job.id for job in nothing} & {done.id, *made}


def test_a_repeated_call_of_the_sdk_makes_one_job(client: OpenAI, chats: str) -> None:
    def create(number_of_retries: int) -> str:
        headers = {"x-stainless-retry-count": str(number_of_retries)}
        return client.fine_tuning.jobs.create(
            model=MODEL,
            training_file=chats,
            suffix="once",
            extra_body={"horizon": {"limits": {"max_steps": 1}}},
            extra_headers=headers,
        ).id

    first = create(0)
    assert create(1) == first
    second = create(0)
    assert second != first
    assert create(2) == second
    for job in (first, second):
        client.fine_tuning.jobs.cancel(job)


@pytest.mark.parametrize(
    ("changes", "param", "code", "words"),
    [
        ({"colour": "red"}, "colour", "unknown_parameter", "Unknown parameter: 'colour'"),
        ({"model": None}, "model", "invalid_value", "model"),
        ({"suffix": "no spaces please"}, "suffix", "invalid_value", "1 to 63 letters"),
        ({"seed": -1}, "seed", "invalid_value", "seed"),
        ({"metadata": {"x": "y" * 513}}, "metadata", "invalid_spec", "513 characters"),
        ({"metadata": {"x": 1}}, "metadata.x", "invalid_value", "string"),
        ({"hyperparameters": {"n_epochs": "many"}}, "hyperparameters.n_epochs", "invalid_value", "integer"),
        ({"hyperparameters": {"n_epochs": 0}}, "hyperparameters.n_epochs", "invalid_value", "greater than"),
        ({"hyperparameters": {"batch": 1}}, "hyperparameters.batch", "unknown_parameter", "batch"),
        ({"method": {"type": "reinforcement"}}, "method.type", "unsupported_parameter", "reinforcement"),
        ({"method": {"type": "dpo", "supervised": {}}}, "method.supervised", "invalid_value", "leave"),
        ({"method": {"type": "dpo"}}, "method", "invalid_spec", "learns from data of kind preference"),
        ({"method": {"type": "dpo"}, "hyperparameters": {}}, "hyperparameters", "invalid_value", "into the method"),
        ({"horizon": {"model": "x"}}, "horizon.model", "invalid_value", "has its own"),
        ({"horizon": {"train": {"learning": 1}}}, "train.learning", "invalid_spec", "learning_rate"),
        ({"horizon": {"train": {"sequence_length": 4096}}}, "train.sequence_length", "invalid_spec", "1024 positions"),
    ],
)
def test_what_cannot_be_asked_names_the_parameter(
    client: OpenAI, chats: str, changes: dict[str, Any], param: str, code: str, words: str
) -> None:
    with pytest.raises(BadRequestError, match=words) as caught:
        client.fine_tuning.jobs.create(model=MODEL, training_file=chats, extra_body=changes)
    assert (caught.value.param, caught.value.code) == (param, code)


def test_what_does_not_exist_is_not_found(client: OpenAI, chats: str) -> None:
    for given, param in (
        ({"training_file": "file-000000000000"}, "training_file"),
        ({"validation_file": "file-000000000000"}, "validation_file"),
        ({"model": "gpt-4o-mini"}, "model"),
        ({"model": "ft:demo-model:ada:x:job_000000000000"}, "model"),
    ):
        asked: dict[str, Any] = {"model": MODEL, "training_file": chats, **given}
        with pytest.raises(NotFoundError) as caught:
            client.fine_tuning.jobs.create(**asked)
        assert caught.value.param == param
    for call in (
        client.fine_tuning.jobs.retrieve,
        client.fine_tuning.jobs.cancel,
        client.fine_tuning.jobs.list_events,
        client.fine_tuning.jobs.checkpoints.list,
    ):
        with pytest.raises(NotFoundError, match="Could not find fine tune"):
            call("ftjob-abc")


def test_anothers_job_file_and_model_are_not_found(
    client: OpenAI, connect: Connect, done: FineTuningJob, chats: str
) -> None:
    bob = connect("bob")
    jobs = bob.fine_tuning.jobs
    for call in (jobs.retrieve, jobs.cancel, jobs.pause, jobs.resume, jobs.list_events, jobs.checkpoints.list):
        with pytest.raises(NotFoundError):
            call(done.id)
    assert list(jobs.list()) == []
    with pytest.raises(NotFoundError):
        jobs.create(model=str(done.fine_tuned_model), training_file=chats)
    with pytest.raises(NotFoundError):
        bob.models.retrieve(str(done.fine_tuned_model))


def test_viewers_see_jobs_and_create_none(connect: Connect, done: FineTuningJob, chats: str) -> None:
    eve = connect("eve", role="viewer")
    assert eve.fine_tuning.jobs.retrieve(done.id) == done
    with pytest.raises(PermissionDeniedError):
        eve.fine_tuning.jobs.create(model=MODEL, training_file=chats)
    with pytest.raises(PermissionDeniedError):
        eve.fine_tuning.jobs.cancel(done.id)


def test_models_are_bases_and_what_jobs_have_made(client: OpenAI, connect: Connect, done: FineTuningJob) -> None:
    names = [model.id for model in client.models.list()]
    assert MODEL in names
    assert done.fine_tuned_model in names
    base = client.models.retrieve(MODEL)
    assert (base.id, base.owned_by) == (MODEL, "ada")
    step = client.fine_tuning.jobs.checkpoints.list(done.id).data[0].step_number
    for name in (
        str(done.fine_tuned_model),
        f"{done.fine_tuned_model}:ckpt-step-{step}",
        f"{done.id}@last",
        f"numbers@{step}",
        f"{done.id}@best",
    ):
        model = client.models.retrieve(name)
        assert (model.id, model.owned_by) == (name, "ada")
    for name in (
        "gpt-4o",
        "some-lab/some-model",
        f"ft:other:ada:numbers:{done.id}",
        f"{done.id}@999",
        f"{done.fine_tuned_model}:ckpt-step-999",
        "ft:",
        "nobody@last",
    ):
        with pytest.raises(NotFoundError, match="does not exist or you do not have access") as caught:
            client.models.retrieve(name)
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    assert [model.id for model in connect("bob").models.list()] == []


def test_a_fine_tuned_model_is_deleted_and_its_job_stays(client: OpenAI, connect: Connect, chats: str) -> None:
    made = client.fine_tuning.jobs.create(
        model=MODEL,
        training_file=chats,
        hyperparameters={"n_epochs": 4, "batch_size": 4},
        extra_body={"horizon": {**QUICK, "checkpoint": {"every_steps": 2}}},
    )
    made = ended(client, made)
    name = str(made.fine_tuned_model)
    first, last = client.fine_tuning.jobs.checkpoints.list(made.id).data
    with pytest.raises(NotFoundError):
        connect("bob").models.delete(name)
    with pytest.raises(PermissionDeniedError):
        connect("eve", role="viewer").models.delete(name)
    assert client.models.delete(last.fine_tuned_model_checkpoint).deleted
    assert [one.id for one in client.fine_tuning.jobs.checkpoints.list(made.id)] == [first.id]
    deleted = client.models.delete(name)
    assert (deleted.id, deleted.deleted) == (name, True)
    assert client.fine_tuning.jobs.checkpoints.list(made.id).data == []
    with pytest.raises(NotFoundError):
        client.models.retrieve(name)
    with pytest.raises(NotFoundError):
        client.models.delete(name)
    assert name not in [model.id for model in client.models.list()]
    assert client.fine_tuning.jobs.retrieve(made.id).status == "succeeded"
    with pytest.raises(PermissionDeniedError, match="horizon model delete"):
        client.models.delete(MODEL)


def test_a_file_that_a_job_needs_is_not_deleted(client: OpenAI) -> None:
    needed = client.files.create(file=("needed.jsonl", lines(PAIRS)), purpose="fine-tune")
    job = client.fine_tuning.jobs.create(
        model=MODEL, training_file=needed.id, hyperparameters={"n_epochs": 9000}, extra_body={"horizon": QUICK}
    )
    with pytest.raises(ConflictError, match=job.id) as caught:
        client.files.delete(needed.id)
    assert caught.value.code == "in_use"
    client.fine_tuning.jobs.cancel(job.id)
    assert ended(client, job).status == "cancelled"
    assert client.files.delete(needed.id).deleted
    shown = client.fine_tuning.jobs.retrieve(job.id)
    assert (shown.training_file, shown.hyperparameters.batch_size) == (needed.id, "auto")
