"""A daemon with two users for the fuzz tests: everything of the second one is marked, so that a leak to the first one
shows."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.daemon_parts import DaemonParts, chat_rows
from tests.support.served_daemon import ServedDaemon

from horizon_server.errors import NotFound
from horizon_server.events import Message
from horizon_server.records.account import Principal
from horizon_server.records.job import JobState
from horizon_server.services.pushed import DatasetService, ModelService

NUM_CASES = int(os.environ.get("HORIZON_FUZZ_CASES", "500"))
CALLER, OTHER, ADMIN = "caller", "other", "root"
MARK = b"quokka"
"""Part of everything of the other user that no request names: rows, file names, weights, logs, messages, some of the
names."""


@dataclass(frozen=True)
class FuzzWorld:
    """A served daemon whose queue does not run, and what its users have."""

    daemon: ServedDaemon
    tokens: dict[str, str]
    own: dict[str, list[str]]
    """What the caller may name in a request, by kind: job_id, dataset, model, sha256, path."""
    others: dict[str, list[str]]
    """What of the other user's the caller has heard of."""
    unknown: tuple[str, ...]
    """Ids of the other user's that no request names."""

    @property
    def known(self) -> dict[str, list[str]]:
        """What requests name, of both users: more often the caller's own."""
        return {kind: [*self.own[kind] * 2, *self.others[kind]] for kind in self.own}

    def replace_deleted(self) -> None:
        """Make again what the caller has deleted, so that later requests find something."""
        fresh = self.daemon.call(_replaced(self.daemon.parts, self.own))
        self.own.update(fresh)

    def leaks(self, answer: bytes) -> list[str]:
        """Return what an answer to the caller shows of the other user: nothing, unless there is a defect."""
        return [name.decode() for name in (MARK, *map(str.encode, self.unknown)) if name in answer]

    def state_of_other(self) -> str:
        """Everything that the other user has, as text: the same before and after, unless somebody else changed it."""
        return self.daemon.call(_state_of(self.daemon.parts, OTHER))


@contextmanager
def fuzz_world(state_dir: Path, model_folder: Path) -> Iterator[FuzzWorld]:
    """Serve a daemon with both users and an admin."""
    daemon = ServedDaemon(state_dir, model_folder=model_folder, queue=False).start()
    try:
        yield daemon.call(_filled(daemon))
    finally:
        daemon.close()


async def _filled(daemon: ServedDaemon) -> FuzzWorld:
    parts = daemon.parts
    users = {name: await parts.user(name) for name in (CALLER, OTHER)}
    users[ADMIN] = await parts.user(ADMIN, role="admin")
    tokens = {name: await parts.token(name) for name in users}
    own = await _possessions(parts, users[CALLER], "mine", "plain", num_jobs=6)
    others = await _possessions(parts, users[OTHER], "theirs", MARK.decode(), num_jobs=3)
    hidden = await _possessions(parts, users[OTHER], MARK.decode(), MARK.decode(), num_jobs=2)
    return FuzzWorld(
        daemon=daemon,
        tokens=tokens,
        own=own,
        others=others,
        unknown=tuple(name for name in (*hidden["job_id"], *hidden["dataset"], *hidden["model"]) if "_" in name),
    )


async def _possessions(
    parts: DaemonParts, owner: Principal, prefix: str, word: str, *, num_jobs: int
) -> dict[str, list[str]]:
    """Make a dataset, a model, ended jobs and, where they may be known, a waiting one; all that they contain has `word`
    in it."""
    chat = [{"role": "user", "content": f"{word} asks"}, {"role": "assistant", "content": f"{word} answers"}]
    content = chat_rows() + json.dumps({"messages": chat}).encode() + b"\n"
    dataset = await parts.dataset(owner, f"{prefix}-data", content, path=f"{word}.jsonl")
    model = await parts.model(owner, f"{prefix}-model", extra={f"{word}.md": word.encode()})
    jobs = []
    for i in range(num_jobs):
        state = (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)[i % 3]
        payloads = Message(level="warning", text=f"{word} wrote this")
        name = f"{word}-job-{i}"
        job = await parts.job_in(state, owner, payloads, name=name, message=f"{word} ended", dataset=dataset.name)
        parts.write_log(job, f"{word} log\n".encode() * 40)
        parts.write_checkpoint(job, 3, {"model.safetensors": word.encode(), f"{word}.safetensors": word.encode()})
        jobs.append(job)
    if prefix != word:
        # Its id and owner are in the queue, which all users see.
        jobs.append(await parts.submit(owner, f"{word}-waiting", dataset=dataset.name))
    return {
        "job_id": [job.job_id for job in jobs],
        "dataset": [dataset.dataset_id, dataset.name],
        "model": [model.model_id, model.name],
        "sha256": [dataset.files[0].sha256],
        "path": ["model.safetensors", "trainer/trainer_state.json"],
    }


async def _replaced(parts: DaemonParts, own: dict[str, list[str]]) -> dict[str, list[str]]:
    owner = Principal(name=CALLER, role="user", project=CALLER)
    found = dict(own)
    for kind, service in (("dataset", parts.services.datasets), ("model", parts.services.models)):
        try:
            await service.get(owner, own[kind][1])
        except NotFound:
            make = parts.dataset if kind == "dataset" else parts.model
            made = await make(owner, own[kind][1])
            found[kind] = [made.id, made.name]
    return found


async def _state_of(parts: DaemonParts, owner: str) -> str:
    services = parts.services
    principal = Principal(name=owner, role="user", project=owner)
    jobs, _ = await services.jobs.list(principal, page_size=100, page_token="", states=set())
    checkpoints = [await services.jobs.checkpoints(principal, job.job_id) for job in jobs]
    pushed: list[DatasetService | ModelService] = [services.datasets, services.models]
    lists = [await service.list(principal, page_size=100, page_token="") for service in pushed]
    # The place in the queue and its forecast change with the jobs of others.
    told = [(job.job_id, job.job_state, job.attempt, job.priority, job.spec, job.ended_s) for job in jobs]
    return repr((told, checkpoints, lists))
