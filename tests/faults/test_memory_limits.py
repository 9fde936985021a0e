"""Every child of the daemon at its memory limit: a clear error, nothing partial is left, and the same succeeds once the
cause is gone."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import shutil
import signal
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from structlog.testing import capture_logs
from tests.conftest import MakeDaemon
from tests.daemon_parts import DaemonParts, Script, blob_file, chat_rows
from tests.support.limited_python import limited
from tests.support.processes import children_of, command_of

from horizon_server import control_groups
from horizon_server.control_groups import WorkerGroup
from horizon_server.datasets import checking
from horizon_server.datasets.preview import PreviewOptions
from horizon_server.engine.compiled.library import CodeLibrary
from horizon_server.errors import InvalidData, InvalidModel, OutOfMemory
from horizon_server.events import StateChanged, StepDone
from horizon_server.jobs import recovery, requests
from horizon_server.jobs.compile_request import CompileRequest
from horizon_server.planning import machine
from horizon_server.planning.machine import Gpu, IdleMeasurement, Machine, RateBook, measure_rates
from horizon_server.records.account import Principal
from horizon_server.records.job import JobRecord, JobState
from horizon_server.services import model_child, pushed
from horizon_server.settings import child_environment
from horizon_server.worker import compilation
from horizon_server.worker_link.orders import Orders

MIB = 2**20
ADA = Principal(name="ada", role="user", project="ada")
ENDS = (JobState.SUCCEEDED, JobState.FAILED)
TRAIN: dict[str, Any] = {
    "max_steps": 8,
    "sequence_length": 128,
    "tokens_per_step": 256,
    "compile": "off",
    "warmup_steps": 2,
}
GREEDY = b"{{ 'x' * 2**32 }}"
ADVICE = "lower train.tokens_per_step or train.sequence_length, or free memory on the node; then run horizon job resume"


def children(module: str) -> list[int]:
    """The children of this process, which is the daemon, that run `module`."""
    return [pid for pid in children_of(os.getpid()) if module in command_of(pid)]


@pytest.fixture
async def daemon(make_daemon: MakeDaemon, tmp_path: Path) -> AsyncIterator[DaemonParts]:
    """A daemon of one user, with a dataset of chats."""
    async with make_daemon(tmp_path / "state", prepared=None) as made:
        await made.services.accounts.add_user(ADA.name)
        await made.dataset(ADA)
        yield made


# --- Checks and previews
# ------------------------------------------------------------------------------


async def test_a_row_check_at_its_limit(daemon: DaemonParts, monkeypatch: pytest.MonkeyPatch) -> None:
    row, service = b'{"text": "a", "x": [' + b",".join([b'{"":0}'] * MIB) + b"]}\n", daemon.services.datasets
    files = [blob_file("wide.jsonl", row)]
    announced = await service.create(
        ADA, request_id=str(uuid.uuid4()), name="wide", format="auto", field_map={}, files=files
    )
    await daemon.upload(ADA.name, row)
    with monkeypatch.context() as tight:
        tight.setattr(checking, "_LIMITS", dataclasses.replace(checking._LIMITS, memory_bytes=160 * MIB))
        with pytest.raises(
            InvalidData, match=r"^wide holds rows that need more than 1 GiB of memory to read; write smaller"
        ):
            await service.finalize(ADA, announced.dataset_id)
    assert children("datasets.checking") == []
    ready = await service.finalize(ADA, announced.dataset_id)
    assert (ready.ready, ready.num_rows) == (True, 1), "nothing had to be sent again"


async def test_a_model_check_at_its_limit(daemon: DaemonParts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shutil.copytree(daemon.model_folder, tmp_path / "wide")
    weights = tmp_path / "wide" / "model.safetensors"
    content = weights.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    header |= {f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [len(data), len(data)]} for i in range(100_000)}
    text = json.dumps(header).encode()
    weights.write_bytes(len(text).to_bytes(8, "little") + text + data)
    service, contents = daemon.services.models, {path.name: path.read_bytes() for path in (tmp_path / "wide").iterdir()}
    files = [blob_file(name, content) for name, content in contents.items()]
    announced = await service.create(ADA, request_id=str(uuid.uuid4()), name="wide", files=files)
    for content in contents.values():
        await daemon.upload(ADA.name, content)
    with monkeypatch.context() as tight:
        limits = dataclasses.replace(model_child.LIMITS, memory_bytes=64 * MIB)
        tight.setattr(pushed, "check_model", partial(model_child.check_model, limits=limits))
        todo = "take more memory to read than those of any model; push a folder written by save_pretrained"
        with pytest.raises(InvalidModel, match=rf"^config\.json and the headers of its weights {todo}$"):
            await service.finalize(ADA, announced.model_id)
    assert children("services.model_check") == []
    assert not list((daemon.state_dir / "models").glob("*")), "the folder that was checked is gone"
    assert (await service.finalize(ADA, announced.model_id)).ready, "nothing had to be sent again"


async def test_a_preview_at_its_limit(daemon: DaemonParts) -> None:
    await daemon.model(ADA, "greedy", extra={"chat_template.jinja": GREEDY})
    await daemon.model(ADA, "fine")
    previews = daemon.services.previews
    with pytest.raises(
        InvalidModel, match="rendering these rows takes more than 4 GiB of memory; ask for fewer rows, or correct the"
    ):
        await previews.preview(ADA, "chats", "greedy", PreviewOptions())
    assert children("datasets.preview_child") == []
    assert (await previews.preview(ADA, "chats", "fine", PreviewOptions())).rows


# --- Preparation
# --------------------------------------------------


@pytest.mark.parametrize("num_rows", [8, 8000], ids=["alone", "in several processes"])
async def test_a_preparation_at_its_limit(daemon: DaemonParts, tmp_path: Path, num_rows: int) -> None:
    chats = chat_rows() * (num_rows // 8)
    assert (len(chats) > MIB) == (num_rows > 8), "larger files are prepared by several processes"
    await daemon.dataset(ADA, "many", chats)
    await daemon.model(ADA, "greedy", extra={"chat_template.jinja": GREEDY})
    await daemon.model(ADA, "fine")
    job = await daemon.submit(ADA, model="greedy", dataset="many")
    ended = await daemon.until(job.job_id, *ENDS)
    assert (ended.job_state, ended.reason) == (JobState.FAILED, "INVALID_DATA")
    assert ended.message.endswith("takes more than 4 GiB of memory to render; shorten it or correct the chat template")
    assert children("datasets.preparing") == []
    assert [path.name for path in (daemon.state_dir / "prepared").glob("*/*")] == [], "no partial folder"
    job = await daemon.submit(ADA, "again", model="fine", dataset="many")
    assert (await daemon.until(job.job_id, *ENDS)).job_state is JobState.SUCCEEDED


# --- What the daemon measures, and what a worker compiles
# --------------------------------------------------------------------------------


async def test_a_measurement_at_its_limit(tmp_path: Path) -> None:
    tight = limited(tmp_path / "limited", child_environment(), memory_bytes=200 * MIB)
    book = RateBook(tmp_path, Machine.of((), num_threads=1))
    with pytest.raises(OutOfMemory, match=r"^the measurement( of host)? ran out of memory$"):
        await measure_rates(book.machine, environment=tight)
    with capture_logs() as logged:
        await IdleMeasurement(book, environment=tight, idle_s=0)()
    assert book.read() == {}
    assert [line["event"] for line in logged] == [
        "the machine's speed could not be measured; plans carry no prediction"
    ]
    assert children("worker.measure") == []


@pytest.mark.parametrize("memory_mib", [48, 100, 200])
async def test_native_code_that_gives_up_for_lack_of_memory_is_no_crash(tmp_path: Path, memory_mib: int) -> None:
    # The C++ library, OpenBLAS and Python each end in their own way.
    tight = limited(tmp_path / "limited", child_environment(), memory_bytes=memory_mib * MIB)
    with pytest.raises(OutOfMemory, match=r"^the measurement( of host)? ran out of memory$"):
        await measure_rates(Machine.of((), num_threads=1), environment=tight)


async def test_the_search_for_gpus_at_its_limit(tmp_path: Path) -> None:
    tight = limited(tmp_path / "limited", child_environment(), memory_bytes=48 * MIB)
    gpus = (Gpu(index=0, name="a", memory_bytes=1, uuid="GPU-00-aa"),)
    assert await machine.usable_accelerators(gpus, tight) == (), "jobs run on the host"


def test_a_compilation_at_its_limit_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tight = limited(tmp_path / "limited", child_environment(), memory_bytes=200 * MIB)
    monkeypatch.setattr(compilation, "child_environment", lambda: tight)
    request = CompileRequest(
        model=str(tmp_path), library=str(tmp_path), dtype="float32", device="cpu", num_threads=1, num_tokens=64
    )
    waiting = cast(Any, SimpleNamespace(_request=request, _library=CodeLibrary(tmp_path), _orders=Orders()))
    refusals = asyncio.run(compilation.Compilation._run_child(waiting))
    # The job then trains with eager layers, and reports this.
    assert refusals is not None
    assert re.fullmatch("the compilation (ran out of memory|ended with exit code .*|was ended by .*)", refusals[0])


# --- Workers
# --------------------------------------------------


@asynccontextmanager
async def training(make_daemon: MakeDaemon, folder: Path) -> AsyncIterator[DaemonParts]:
    """A daemon whose workers train, limited as the names of their jobs say, and are restarted at once."""
    settings = {"worker_module": "tests.support.limited_worker", "max_restarts": 5, "num_threads": 1}
    async with make_daemon(folder / "state", **settings) as made:
        await made.services.accounts.add_user(ADA.name)
        await made.dataset(ADA)
        yield made


@pytest.fixture
async def trainer(
    make_daemon: MakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[DaemonParts]:
    monkeypatch.setattr(recovery, "PAUSES_S", (0.1,))
    async with training(make_daemon, tmp_path) as made:
        yield made


async def losses(daemon: DaemonParts, job: JobRecord) -> dict[int, float]:
    """The loss of every step as it was last reported."""
    reported = [event.payload for event in await daemon.events(job.job_id)]
    return {step.step: step.loss for step in reported if isinstance(step, StepDone)}


async def reasons(daemon: DaemonParts, job: JobRecord) -> list[str]:
    """The messages of all states that a job was in."""
    payloads = [event.payload for event in await daemon.events(job.job_id)]
    return [payload.message for payload in payloads if isinstance(payload, StateChanged) and payload.message]


def nothing_is_left(daemon: DaemonParts, job: JobRecord) -> bool:
    folder = daemon.state_dir / "jobs" / job.job_id / "checkpoints"
    partial = [path.name for path in folder.glob("*") if not path.name.startswith("step-") or "." in path.name]
    return partial == [] and children(daemon.worker_module) == []


@pytest.fixture(scope="module")
def undisturbed(make_daemon: MakeDaemon, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of a run that nothing disturbs."""

    async def run() -> dict[int, float]:
        async with training(make_daemon, tmp_path_factory.mktemp("undisturbed")) as daemon:
            job = await daemon.submit(ADA, train=TRAIN)
            await daemon.until(job.job_id, JobState.SUCCEEDED)
            return await losses(daemon, job)

    return asyncio.run(run())


async def test_a_worker_at_its_limit_is_restarted_and_loses_nothing(
    trainer: DaemonParts, undisturbed: dict[int, float]
) -> None:
    job = await trainer.submit(ADA, "limited-1-4", train=TRAIN)
    await trainer.until(job.job_id, attempt=2)
    ended = await trainer.until(job.job_id, *ENDS)
    assert (ended.job_state, ended.attempt) == (JobState.SUCCEEDED, 2), ended.message
    expected = (
        "the worker ran out of memory (after step 3); it is restarted in 0.1 s (restart 1 of at most 5 without "
        "progress)"
    )
    assert expected in await reasons(trainer, job)
    assert await losses(trainer, job) == undisturbed
    assert nothing_is_left(trainer, job)


async def test_a_worker_that_does_not_fit_fails_and_trains_when_it_is_resumed_with_memory(trainer: DaemonParts) -> None:
    job = await trainer.submit(ADA, "limited-2-3", train=TRAIN)
    await trainer.until(job.job_id, attempt=2)
    ended = await trainer.until(job.job_id, *ENDS)
    assert (ended.job_state, ended.reason, ended.attempt) == (JobState.FAILED, "OUT_OF_MEMORY", 2)
    expected = f"it failed twice in the same way after step 2: the worker ran out of memory; {ADVICE} {job.job_id}"
    assert ended.message == expected
    assert nothing_is_left(trainer, job)
    await trainer.services.jobs.resume(ADA, job.job_id)
    ended = await trainer.until(job.job_id, JobState.SUCCEEDED, attempt=3)
    assert sorted(await losses(trainer, job)) == list(range(1, TRAIN["max_steps"] + 1))


# --- Kills by the kernel
# ------------------------------------------------------------------------------


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[JobRecord], None]:
    """A hierarchy of control groups in plain files; what it returns does to a job's worker what the out-of-memory
    killer does."""
    root, own = tmp_path / "cgroup", tmp_path / "own"
    service = root / "horizond.service"
    (service / "daemon").mkdir(parents=True)
    own.write_text("0::/horizond.service/daemon\n")
    for folder in (root, service):
        (folder / "cgroup.controllers").write_text("memory\n")
        (folder / "cgroup.subtree_control").write_text("memory\n")

    def made(name: str, memory_bytes: int) -> tuple[WorkerGroup | None, str]:
        folder = service / f"worker-{name}"
        if not folder.exists():
            folder.mkdir()
            for file in ("cgroup.procs", "memory.max", "memory.oom.group", "memory.events"):
                (folder / file).write_text("")
        return control_groups.worker_group(name, memory_bytes, root=root, own_cgroup=own)

    def kill(job: JobRecord) -> None:
        folder = service / f"worker-{job.job_id}-{job.attempt}"
        (folder / "memory.events").write_text("oom 1\noom_kill 1\noom_group_kill 1\n")
        os.kill(int((folder / "cgroup.procs").read_text()), signal.SIGKILL)

    monkeypatch.setattr(requests, "worker_group", made)
    return kill


async def test_a_worker_that_the_kernel_killed_is_restarted_and_loses_nothing(
    kernel: Callable[[JobRecord], None], trainer: DaemonParts, undisturbed: dict[int, float]
) -> None:
    job = await trainer.submit(ADA, "held-1-4", train=TRAIN)
    kernel(await trainer.until(job.job_id, step=3))
    await trainer.until(job.job_id, attempt=2)
    ended = await trainer.until(job.job_id, *ENDS)
    assert (ended.job_state, ended.attempt) == (JobState.SUCCEEDED, 2), ended.message
    cause = (
        "the worker was killed at the memory limit by the kernel's out-of-memory killer (after step 3); it is restarted"
    )
    assert any(text.startswith(cause) for text in await reasons(trainer, job))
    assert await losses(trainer, job) == undisturbed
    assert nothing_is_left(trainer, job)


async def test_a_worker_that_the_kernel_kills_twice_fails_and_says_what_to_lower(
    kernel: Callable[[JobRecord], None], make_daemon: MakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "PAUSES_S", (0.1,))
    async with make_daemon(tmp_path / "state", max_restarts=5) as daemon:
        await daemon.services.accounts.add_user(ADA.name)
        await daemon.dataset(ADA)
        job = await daemon.submit(ADA, script=Script(hold_at=3))
        for number in (1, 2):
            kernel(await daemon.until(job.job_id, JobState.RUNNING, step=2, attempt=number))
        ended = await daemon.until(job.job_id, *ENDS)
        assert (ended.job_state, ended.reason, ended.attempt) == (JobState.FAILED, "OUT_OF_MEMORY", 2)
        cause = "the worker was killed at the memory limit by the kernel's out-of-memory killer"
        assert ended.message == f"it failed twice in the same way after step 2: {cause}; {ADVICE} {job.job_id}"
        daemon.release("job")
        await daemon.services.jobs.resume(ADA, job.job_id)
        assert (await daemon.until(job.job_id, JobState.SUCCEEDED, attempt=3)).step == 3
