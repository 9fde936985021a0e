"""`job plan`, `queue simulate` and `job submit` say the same of a job: refusals, warnings, steps and time."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.component.jobs.conftest import ADA
from tests.conftest import MakeDaemon
from tests.daemon_parts import DaemonParts, Script, chat_rows

from horizon_server.errors import HorizonError, QuotaExceeded
from horizon_server.jobs.preparation import known_size
from horizon_server.records.job import JobState
from horizon_server.records.plan import Plan, PlannedMachine
from horizon_server.spec import JobSpec

PAIRS = "".join(json.dumps({"prompt": f"p{i}", "chosen": "yes", "rejected": "no"}) + "\n" for i in range(4)).encode()

REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "no such model": ({"model": "nosuch"}, "", "model 'nosuch' does not exist"),
    "no such dataset": ({"dataset": "nosuch"}, "", "dataset 'nosuch' does not exist"),
    "no such eval dataset": ({"eval_dataset": "nosuch"}, "", "dataset 'nosuch' does not exist"),
    "no such eval set": ({"eval": {"sets": {"a": "nosuch"}}}, "", "dataset 'nosuch' does not exist"),
    "no such job to start from": ({"init_from": "nosuch@last"}, "", "job 'nosuch' does not exist"),
    "an adapter for a job without": ({"init_from": "mine"}, "init_from", "names a pushed adapter"),
    "dpo on text": ({"method": "dpo"}, "method", "learns from data of kind preference"),
    "sft on pairs": ({"dataset": "pairs"}, "method", "set method to dpo"),
    "kto on pairs": ({"dataset": "pairs", "method": "kto"}, "method", "learns from data of kind kto"),
    "pairs as an eval set": ({"eval": {"sets": {"a": "pairs"}}}, "method", "dataset pairs is of kind preference"),
    "answers to pairs": (
        {"dataset": "pairs", "method": "dpo", "eval": {"sets": {"a": "pairs"}, "generate": {"set": "a"}}},
        "eval.generate.set",
        "use one of kind text",
    ),
    "an accuracy of pairs": (
        {"dataset": "pairs", "method": "dpo", "eval": {"sets": {"a": "pairs"}, "best_by": "a.accuracy"}},
        "eval.best_by",
        "has no accuracy",
    ),
    "more positions than the model has": (
        {"train": {"sequence_length": 4096, "tokens_per_step": 4096}},
        "train.sequence_length",
        "the model allows at most",
    ),
    "nothing trainable": ({"train": {"trainable": ["nosuch"]}}, "train.trainable", "fits none of the model's"),
    "no such target": (
        {"train": {"trainable": "lora", "lora": {"targets": ["nosuch"]}}},
        "train.lora.targets",
        "nosuch",
    ),
    "a GPU that is not there": ({"device": "cuda"}, "", "device: cuda needs a CUDA device"),
    "somebody else's project": ({"project": "physics"}, "", "project physics is not yours"),
}

WARNED: dict[str, tuple[dict[str, Any], str]] = {
    "evaluations of nothing": ({"eval_every_steps": 10}, "eval_every_steps is 10, and the job has no eval set"),
    "answers longer than the model": (
        {"eval_dataset": "chats", "eval": {"generate": {"max_new_tokens": 2000}}},
        "eval.generate.max_new_tokens is 2000, and the model has 1024 positions: no prompt leaves room",
    ),
    "answers that leave little": (
        {"eval_dataset": "chats", "eval": {"generate": {"max_new_tokens": 1000}}},
        "prompts of more than 24 tokens are left out",
    ),
    "a rate of 10": ({"train": {"learning_rate": 10.0}}, "train.learning_rate is 10, far above"),
    "a rank above the matrices": (
        {"train": {"trainable": "lora", "lora": {"rank": 4096}}},
        "train.lora.rank is 4096, and 21 of 21 adapted matrices are smaller",
    ),
    "a warm-up of all steps": ({"train": {"warmup_steps": 500}}, "train.warmup_steps is 500 and train.max_steps is 3"),
    "a warm-up of all epochs": (
        {"dataset": "fresh", "train": {"max_steps": None, "epochs": 1, "warmup_steps": 500}},
        "and the job has about ",
    ),
}


@pytest.fixture
async def quiet(make_daemon: MakeDaemon, state_dir: Path) -> AsyncIterator[DaemonParts]:
    """A daemon whose queue does not move, with chats and pairs."""
    async with make_daemon(state_dir, queue=False) as made:
        await made.dataset(ADA, "pairs", PAIRS)
        await made.dataset(ADA, "fresh", fresh_rows())
        yield made


def fresh_rows() -> bytes:
    """Rows that no daemon of the session has prepared."""
    return (
        chat_rows()
        + json.dumps(
            {"messages": [{"role": "user", "content": str(uuid.uuid4())}, {"role": "assistant", "content": "yes"}]}
        ).encode()
    )


async def refusal(call: Any) -> tuple[str, str, list[str]]:
    with pytest.raises(HorizonError) as caught:
        await call
    return caught.value.reason, caught.value.message, [one.field for one in caught.value.violations]


async def submitted(daemon: DaemonParts, spec: JobSpec) -> Plan:
    job = await daemon.services.jobs.submit(ADA, request_id=str(uuid.uuid4()), spec=spec)
    assert job.plan is not None
    return job.plan


async def test_what_submit_refuses_plan_and_simulate_refuse_with_the_same_words(quiet: DaemonParts) -> None:
    for case, (changes, field, words) in REFUSED.items():
        services, spec = quiet.services, quiet.spec(**changes)
        found = await refusal(submitted(quiet, spec))
        assert words in found[1], case
        assert found[2] == ([field] if field else []), case
        assert await refusal(services.jobs.plan(ADA, spec)) == found, case
        assert await refusal(services.sharing.simulate(ADA, spec)) == found, case


async def test_a_quota_of_memory_refuses_all_three(quiet: DaemonParts) -> None:
    await quiet.allow("user", "ada", max_host_bytes=2**20)
    try:
        spec = quiet.spec()
        found = await refusal(submitted(quiet, spec))
        assert "of host memory and user ada may have 1.0 MiB" in found[1]
        assert await refusal(quiet.services.jobs.plan(ADA, spec)) == found
        assert await refusal(quiet.services.sharing.simulate(ADA, spec)) == found
    finally:
        await quiet.allow("user", "ada")


async def test_a_full_queue_refuses_a_simulation_and_a_plan_warns_of_it(quiet: DaemonParts) -> None:
    await quiet.allow("user", "ada", max_queued_jobs=0)
    try:
        with pytest.raises(QuotaExceeded, match="queued jobs of user ada") as caught:
            await quiet.services.sharing.simulate(ADA, quiet.spec())
        _, plan, _ = await quiet.services.jobs.plan(ADA, quiet.spec(train={"warmup_steps": 0}))
        assert plan.warnings == (f"it would not be queued now: {caught.value.message}",)
        machine = PlannedMachine(gpu="h100", host_gbps=200)
        _, elsewhere, _ = await quiet.services.jobs.plan(ADA, quiet.spec(train={"warmup_steps": 0}), machine)
        assert elsewhere.warnings == (), "the queue here says nothing of another machine"
    finally:
        await quiet.allow("user", "ada")


async def test_what_cannot_do_what_it_was_asked_warns_everywhere(quiet: DaemonParts) -> None:
    for case, (changes, words) in WARNED.items():
        spec = quiet.spec(**changes | {"train": {"warmup_steps": 0} | changes.get("train", {})})
        _, plan, _ = await quiet.services.jobs.plan(ADA, spec)
        assert [words in warning for warning in plan.warnings] == [True], (case, plan.warnings)
        assert plan.message == ""
        assert (await quiet.services.sharing.simulate(ADA, spec))[1].warnings == plan.warnings, case
        assert (await submitted(quiet, spec)).warnings == plan.warnings, case


async def test_a_usual_job_has_no_warning(quiet: DaemonParts) -> None:
    _, plan, _ = await quiet.services.jobs.plan(ADA, quiet.spec(train={"warmup_steps": 1}))
    assert (plan.warnings, plan.num_steps, plan.steps_estimated) == ((), 3, False)


async def test_epochs_are_counted_once_the_data_is_prepared_and_estimated_before(
    make_daemon: MakeDaemon, state_dir: Path
) -> None:
    epochs = {"max_steps": None, "epochs": 2, "warmup_steps": 0}
    async with make_daemon(state_dir) as daemon:
        await daemon.dataset(ADA, "fresh", fresh_rows())
        spec = daemon.spec("counted", dataset="fresh", train=epochs)
        _, before, _ = await daemon.services.jobs.plan(ADA, spec)
        assert before.steps_estimated
        assert before.num_steps is not None and before.num_steps >= 2
        job = await daemon.submit(ADA, "counted", Script(num_steps=4, hold_at="start"), dataset="fresh", train=epochs)
        started = await daemon.until(job.job_id, JobState.STARTING)
        assert started.plan is not None and not started.plan.steps_estimated
        _, after, _ = await daemon.services.jobs.plan(ADA, spec)
        assert (after.num_steps, after.steps_estimated) == (started.plan.num_steps, False)
        # In another length the rows are other tokens.
        _, other, _ = await daemon.services.jobs.plan(
            ADA, daemon.spec(dataset="fresh", train=epochs | {"sequence_length": 32})
        )
        assert other.steps_estimated
        dataset = await daemon.services.datasets.get_ready(ADA, "fresh")
        known = known_size(daemon.state_dir / "prepared", spec, daemon.model_folder, dataset, [])
        assert (known.num_steps, known.may_have_weights) == (after.num_steps, False)
        await daemon.services.jobs.cancel(ADA, job.job_id)
        daemon.release("counted")
