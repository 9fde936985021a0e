"""A daemon with users, data and jobs in many states, as the web page shows them: for its tests and its pictures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.daemon_parts import Script
from tests.support.served_daemon import ServedDaemon

from horizon_server.records.job import JobRecord, JobState
from horizon_server.records.task_result import TaskResult

MODEL, CHATS, PAIRS = "qwen3-tiny", "gsm8k", "support-pairs"
STEP_S = 0.02


def _pairs(num_rows: int = 8) -> bytes:
    rows = [{"prompt": f"Why {i}?", "chosen": f"Because of {i}.", "rejected": "No idea."} for i in range(num_rows)]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


class PageWorld:
    """The daemon and who uses it: ann and bob train, root administers."""

    def __init__(self, daemon: ServedDaemon) -> None:
        self.daemon = daemon
        self.tokens: dict[str, str] = {}
        self.users: dict[str, Any] = {}

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://{self.daemon.endpoints['http']}"

    def add_user(self, name: str, role: str = "user") -> None:
        """Make a user with a token, and a model and datasets for those who train."""
        parts, call = self.daemon.parts, self.daemon.call
        self.users[name] = call(parts.user(name, role=role))
        self.tokens[name] = call(parts.token(name))
        if role == "user":
            call(parts.model(self.users[name], MODEL))
            call(parts.dataset(self.users[name], CHATS))

    def submit(self, owner: str, name: str, script: Script | None = None, **changes: Any) -> JobRecord:
        """Submit a job of that user; its worker follows the script."""
        spec = {"model": MODEL, "dataset": CHATS, "checkpoint": {"every_steps": 100, "keep_last": 5}} | changes
        return self.daemon.call(self.daemon.parts.submit(self.users[owner], name, script, **spec))

    def until(self, job: JobRecord, *states: JobState, step: int = 0) -> JobRecord:
        """Wait until the job is in one of the states, and has done that many steps."""
        return self.daemon.call(self.daemon.parts.until(job.job_id, *states, step=step))


def learning_script(num_steps: int, **changes: Any) -> Script:
    """A worker whose figures look like those of training, with evaluations."""
    every = max(1, num_steps // 8)
    given: dict[str, Any] = {"num_steps": num_steps, "step_s": STEP_S, "learns": True}
    return Script(**given | {"eval_at": tuple(range(every, num_steps + 1, every))} | changes)


@contextmanager
def page_world(state_dir: Path, model_folder: Path, **settings: Any) -> Iterator[PageWorld]:
    """Run a daemon with users and no jobs."""
    daemon = ServedDaemon(state_dir, model_folder=model_folder, **{"max_restarts": 2, "time_slice_s": 0.5} | settings)
    try:
        world = PageWorld(daemon.start())
        for name in ("ann", "bob"):
            world.add_user(name)
        world.add_user("root", role="admin")
        yield world
    finally:
        daemon.close()


def train(num_steps: int, rate: float = 2e-5, **changes: Any) -> dict[str, Any]:
    """The section `train` of a job of that many steps."""
    return {"max_steps": num_steps, "sequence_length": 64, "tokens_per_step": 512, "learning_rate": rate, **changes}


def ended_jobs(world: PageWorld) -> tuple[JobRecord, JobRecord]:
    """Run two jobs of ann, which differ in their learning rate and of which one was restarted, to their end. The second
    one has a result of an evaluation program."""
    first, second = (
        world.submit(
            "ann",
            name,
            learning_script(80, step_s=0.004, **more),
            train=train(80, rate),
            eval_every_steps=10,
            checkpoint={"every_steps": 20, "keep_last": 5},
        )
        for name, rate, more in (("slow", 1e-5, {}), ("fast", 3e-5, {"die_at": 45}))
    )
    world.until(second, JobState.SUCCEEDED)
    result = TaskResult(step=80, task="gsm8k", metric="exact_match", value=0.5, program="lm_eval 0.4.13")
    recorded = world.daemon.parts.services.task_results.record(world.users["ann"], second.job_id, 80, [result])
    return world.until(first, JobState.SUCCEEDED), world.daemon.call(recorded)


def fill(world: PageWorld) -> dict[str, JobRecord]:
    """Submit jobs until the node looks like that of a lab: some have ended, some run, some wait, where a user may have
    one on the machine. Returns them by name."""
    jobs = {}
    failing = world.submit("ann", "gsm8k-too-fast", learning_script(160, fail_at=37), train=train(160, 4e-4))
    jobs["gsm8k-too-fast"] = world.until(failing, JobState.FAILED)
    for name, rate, more in (
        ("gsm8k-lr2e5", 2e-5, {}),
        ("gsm8k-lr1e5", 1e-5, {"die_at": 131}),
    ):
        job = world.submit("ann", name, learning_script(240, **more), train=train(240, rate), eval_every_steps=30)
        jobs[name] = world.until(job, JobState.SUCCEEDED)
    jobs["gsm8k-long"] = world.submit(
        "ann",
        "gsm8k-long",
        learning_script(800, hold_at=521),
        train=train(800, 3e-5, warmup_steps=60),
        eval_every_steps=100,
    )
    world.until(jobs["gsm8k-long"], step=300)
    world.daemon.call(world.daemon.parts.dataset(world.users["bob"], PAIRS, _pairs()))
    jobs["support-dpo"] = world.submit(
        "bob", "support-dpo", learning_script(600, hold_at=211), dataset=PAIRS, method="dpo", train=train(600, 5e-6)
    )
    world.until(jobs["support-dpo"], step=210)
    world.until(jobs["gsm8k-long"], step=520)
    for owner, name in (("ann", "gsm8k-lora-r16"), ("bob", "support-sft"), ("ann", "gsm8k-lora-r64")):
        jobs[name] = world.submit(owner, name, learning_script(400), train=train(400))
    return jobs
