"""A real daemon for the tests of both faces. Its queue does not run, so jobs stay where a test puts them."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.access_scene import Scene
from tests.daemon_parts import DaemonParts, chat_rows, daemon_parts

from horizon_server.events import Payload, StepDone
from horizon_server.figures import TransferFigures
from horizon_server.records.account import Principal
from horizon_server.records.job import JobRecord, JobState

USERS = {"ann": "user", "bob": "user", "root": "admin", "eve": "viewer"}
NUM_ROWS = 8


class World:
    """The daemon, its users' tokens, and short ways to make jobs and what jobs leave behind."""

    def __init__(self, daemon: DaemonParts, tokens: dict[str, str]) -> None:
        self.daemon = daemon
        self.tokens = tokens
        self.services = daemon.services
        self.journal = daemon.parts.journal
        self.metrics = daemon.parts.metrics
        self.root = daemon.state_dir

    def principal(self, name: str) -> Principal:
        return Principal(name=name, role=USERS[name], project=name)

    async def caller(self, name: str) -> Principal:
        """Who calls with the user's token."""
        return await self.services.accounts.authenticate(self.tokens[name])

    async def job(self, *payloads: Payload, name: str = "job", state: JobState = JobState.QUEUED) -> JobRecord:
        """Submit a job of ann's, and move it on to `state` by way of the others; `payloads` happen before the last
        move."""
        return await self.daemon.job_in(state, self.principal("ann"), *payloads, name=name)

    async def append(self, job: JobRecord, *payloads: Payload) -> JobRecord:
        return await self.daemon.append(job, *payloads)

    def num_watching(self, job: JobRecord) -> int:
        watched = self.journal._watched.get(job.job_id)
        return len(watched.news) if watched else 0

    async def until_unwatched(self, job: JobRecord) -> None:
        async with asyncio.timeout(240):
            while self.num_watching(job):  # noqa: ASYNC110  # nothing announces it
                await asyncio.sleep(0.005)

    def write_log(self, job: JobRecord, content: bytes) -> None:
        self.daemon.write_log(job, content)

    def write_checkpoint(self, job: JobRecord, step: int, files: dict[str, bytes]) -> Path:
        return self.daemon.write_checkpoint(job, step, files)


async def _make_state(folder: Path, model_folder: Path, *, with_chats: bool) -> dict[str, str]:
    async with daemon_parts(folder, model_folder=model_folder, queue=False) as daemon:
        principals = {name: await daemon.user(name, role=role) for name, role in USERS.items()}
        if with_chats:
            await daemon.dataset(principals["ann"], "chats", chat_rows(NUM_ROWS))
        return {name: await daemon.token(name) for name in USERS}


@pytest.fixture(scope="session")
def state_of_users(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> tuple[Path, dict[str, str]]:
    """A state folder with users and nothing else, and their tokens."""
    folder = tmp_path_factory.mktemp("users") / "state"
    return folder, asyncio.run(_make_state(folder, model_folder, with_chats=False))


@pytest.fixture(scope="session")
def state_with_chats(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> tuple[Path, dict[str, str]]:
    """A state folder with users and ann's dataset `chats`, and the tokens."""
    folder = tmp_path_factory.mktemp("chats") / "state"
    return folder, asyncio.run(_make_state(folder, model_folder, with_chats=True))


@pytest.fixture
def state(state_of_users: tuple[Path, dict[str, str]]) -> tuple[Path, dict[str, str]]:
    """What the daemon of a test starts with; tests of jobs override it with `state_with_chats`."""
    return state_of_users


@pytest_asyncio.fixture
async def base_world(state: tuple[Path, dict[str, str]], tmp_path: Path, model_folder: Path) -> AsyncIterator[World]:
    shutil.copytree(state[0], tmp_path / "state")
    networks = ("127.0.0.0/8",)  # for webhooks
    async with daemon_parts(
        tmp_path / "state", model_folder=model_folder, queue=False, webhook_networks=networks
    ) as daemon:
        yield World(daemon, state[1])


@pytest.fixture
def make_step() -> Any:
    """Make a finished step."""

    def make(step: int, loss: float = 1.0, **figures: Any) -> StepDone:
        return StepDone(
            step=step,
            num_steps=10,
            loss=loss,
            grad_norm=0.5,
            learning_rate=1e-4,
            epoch=0.5,
            eta_s=2.5,
            num_input_tokens_seen=step,
            num_tokens=1,
            tokens_per_second=3.0,
            duration_s=0.5,
            h2d=TransferFigures(bytes=7, busy_s=0.5, exposed_s=0.125),
            **figures,
        )

    return make


@pytest_asyncio.fixture
async def scene(base_world: Any) -> AsyncIterator[Scene]:
    scene = Scene(base_world)
    await scene.prepare()
    yield scene
