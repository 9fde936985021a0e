"""Seeded trials: one user's program from its first upload to the end of its job, and on the way processes are killed or
the disk runs full.

A trial is a pure function of a seed and its number, so that it can be run again. What an undisturbed run gives is made
once for all processes of a test run.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import random
import shutil
import signal
import sqlite3
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.support.daemon_process import DaemonProcess, wait_for
from tests.support.processes import children_of, command_of, processes_of, processes_with
from tests.support.unattended import Inputs, UnattendedUser

from horizon_client.job_spec_types import JobSpec
from horizon_client.resources import StepEvent
from horizon_server.demo.recipe import write_demo_dataset, write_demo_model
from horizon_server.store.manifest import read_manifest, record_file

WORKER = "horizon_server.worker"
PREPARATION = "horizon_server.datasets.preparing"
CHECKS = ("horizon_server.services.model_check", "horizon_server.datasets.checking")

NUM_STEPS = 16
SAVE_EVERY = 5
SPEC: JobSpec = {
    "name": "trial",
    "model": "demo-model",
    "dataset": "demo-chats",
    "eval_fraction": 0.05,
    "eval_every_steps": 8,
    "train": {
        "max_steps": NUM_STEPS,
        "sequence_length": 128,
        "tokens_per_step": 256,
        "warmup_steps": 0,
        "compile": "off",
    },
    "checkpoint": {"every_steps": SAVE_EVERY, "keep_last": 2},
}
# One thread: the trials of a test run share the processors, and the number of threads decides the last bits.
SETTINGS = {"num_threads": 1}

# Limits for what hangs.
_END_S = 400.0
_GONE_S = 180.0

# What is killed, and when. `make test` has the first five, and each comes at least once in 25 trials; the first ones
# come more often.
_POINTS = (
    *(("train", "worker"), ("checkpoint", "daemon"), ("prepare", "child"), ("finish", "daemon"), ("upload", "daemon")),
    *(("train", "daemon"), ("checkpoint", "worker"), ("submit", "daemon"), ("prepare", "daemon"), ("start", "daemon")),
    *(("start", "worker"), ("finish", "worker"), ("train", "both"), ("checkpoint", "both"), ("recover", "daemon")),
    *(("register", "daemon"), ("check", "child"), ("train", "daemon"), ("train", "worker"), ("start", "both")),
    *(
        ("finish", "both"),
        ("recover", "both"),
        ("checkpoint", "worker"),
        ("evaluate", "worker"),
        ("evaluate", "daemon"),
    ),
)
_FULL_DISKS = (
    *(("checkpoint", "disk"), ("train", "disk"), ("upload", "disk"), ("prepare", "disk"), ("finish", "disk")),
    *(("submit", "disk"), ("start", "disk"), ("register", "disk"), ("recover", "disk"), ("evaluate", "disk")),
)
_LONGEST_DELAY_S = {
    "upload": 0.15,
    "register": 0.4,
    "check": 0.4,
    "submit": 0.3,
    "prepare": 1.0,
    "start": 6.0,
    "train": 0.4,
    "evaluate": 0.15,
    "checkpoint": 0.3,
    "finish": 1.2,
    "recover": 0.4,
}


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What is killed or filled, when, and for how long the daemon is away or the disk is full."""

    seed: int
    number: int
    phase: str
    target: str
    kind: str
    """Which of model and dataset, where the phase has both."""
    step: int
    """The step that the kill comes after, where the phase has steps."""
    delay_s: float
    again_s: float
    """In the phase `recover`: how long the second daemon lives."""
    downtime_s: float
    leave_bytes: int
    """Space on a disk that is called full."""

    @classmethod
    def of(cls, seed: int, number: int, *, full_disk: bool = False) -> Trial:
        """The trial of that number."""
        chance = random.Random(f"{seed}/{number}")
        points = _FULL_DISKS if full_disk else _POINTS
        phase, target = points[number % len(points)]
        return cls(
            seed=seed,
            number=number,
            phase=phase,
            target=target,
            kind=chance.choice(("model", "dataset")),
            step=chance.randrange(1, NUM_STEPS),
            delay_s=chance.uniform(0.0, _LONGEST_DELAY_S[phase]),
            again_s=chance.uniform(0.0, 4.0),
            downtime_s=chance.choice((0.0, chance.uniform(0.0, 1.0), chance.uniform(1.0, 5.0))),
            leave_bytes=chance.choice((0, chance.randrange(2**16), chance.randrange(2**24))),
        )

    @property
    def id(self) -> str:
        """The name of the test."""
        return f"{self.number}-{self.phase}-{self.target}"


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What the trials start from, and what an undisturbed run gives."""

    root: Path
    token: str
    final: dict[str, str]
    """sha256 of each file of the last checkpoint."""
    losses: list[float]

    @property
    def model(self) -> Path:
        """The local folder that is pushed."""
        return self.root / "files" / "model"

    @property
    def dataset(self) -> Path:
        """The local file that is pushed."""
        return next((self.root / "files").glob("*.jsonl"))

    @classmethod
    def shared(cls, root: Path) -> Reference:
        """Return the reference below `root`, which all processes of a test run share; the first one makes it."""
        root.mkdir(exist_ok=True)
        with (root / "lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            done = root / "reference.json"
            if not done.exists():
                done.write_text(json.dumps(_undisturbed(root)))
            return cls(root=root, **json.loads(done.read_text()))


def _undisturbed(root: Path) -> dict[str, Any]:
    """Make the states `empty`, `pushed` and `prepared`, and run the job."""
    state, files = root / "state", root / "files"
    model, dataset = write_demo_model(files / "model"), write_demo_dataset(files)
    daemon = DaemonProcess(state, **SETTINGS)
    try:
        daemon.start()
        token = daemon.user("ada")
        daemon.terminate()
        shutil.copytree(state, root / "empty")
        daemon.start()
        with daemon.client(token) as client:
            client.models.push(model, name="demo-model")
            client.datasets.push([dataset], name="demo-chats")
        daemon.terminate()
        shutil.copytree(state, root / "pushed")
        daemon.start()
        user = UnattendedUser(daemon.endpoints["grpc"], token, Inputs(spec=SPEC))
        user.start()
        user.join(_END_S)
        assert user.error is None, user.error
        assert user.job is not None, daemon.log()
        assert user.job.state == "SUCCEEDED", user.job.message
        daemon.terminate()
    finally:
        daemon.close()
    shutil.copytree(root / "pushed", root / "prepared")
    shutil.copytree(state / "prepared", root / "prepared" / "prepared", dirs_exist_ok=True)
    losses = [event.loss for event in user.events if isinstance(event, StepEvent)]
    return {"token": token, "final": _digests(_last_checkpoint(state, user.job.job_id)), "losses": losses}


@dataclass(eq=False)
class Scene(ABC):
    """One trial under way: `disturb` is what happens to it. The state is below `folder`."""

    trial: Trial
    reference: Reference
    folder: Path
    scratch: Path
    """The folder of temporary files of all its processes. It marks them, too."""
    daemon: DaemonProcess = field(init=False)
    user: UnattendedUser | None = field(init=False, default=None)

    @property
    @abstractmethod
    def may_start_again(self) -> bool:
        """Whether the job's first attempt may have been disturbed before it had a worker that the daemon knew of."""

    @abstractmethod
    def disturb(self) -> None:
        """Do what the trial is about. At the end the daemon runs."""

    def __post_init__(self) -> None:
        base = {"upload": "empty", "register": "empty", "check": "empty", "submit": "pushed", "prepare": "pushed"}
        shutil.copytree(self.reference.root / base.get(self.trial.phase, "prepared"), self.folder / "state")
        self.scratch.mkdir()
        self.daemon = DaemonProcess(self.folder / "state", **SETTINGS)
        self.daemon.environment = {"TMPDIR": str(self.scratch)}

    def play(self) -> None:
        """Run the program, disturb it at the moment that the trial says, and wait for its end."""
        self.daemon.start()
        from_nothing = self.trial.phase in ("upload", "register", "check")
        inputs = Inputs(
            spec=SPEC,
            model=self.reference.model if from_nothing else None,
            dataset=self.reference.dataset if from_nothing else None,
        )
        self.user = UnattendedUser(self.daemon.endpoints["grpc"], self.reference.token, inputs)
        self.user.start()
        self._await_moment(self.user)
        time.sleep(self.trial.delay_s)
        self.disturb()
        self.user.join(_END_S)

    def _close(self) -> None:
        if self.user is not None:
            self.user.leave()
        self.daemon.close()
        for pid in processes_with("TMPDIR", str(self.scratch)):
            os.kill(pid, signal.SIGKILL)

    def _await_moment(self, user: UnattendedUser) -> None:
        trial, state = self.trial, self.daemon.state_dir
        moments: dict[str, Callable[[], Any]] = {
            "upload": lambda: user.moment == f"{trial.kind} upload",
            "register": lambda: user.moment == f"{trial.kind} finalize",
            "check": lambda: self._check() is not None,
            "submit": lambda: user.moment == "submit",
            "prepare": lambda: processes_of(PREPARATION, state),
            "start": lambda: processes_of(WORKER, state),
            "train": lambda: user.step >= trial.step,
            "evaluate": lambda: user.step >= 8,
            "checkpoint": lambda: any(state.glob(f"jobs/*/checkpoints/.step-{self._saved_step:08d}*")),
            "finish": lambda: user.step >= NUM_STEPS,
            "recover": lambda: user.step >= trial.step,
        }
        reached = moments[trial.phase]
        # A moment that has passed unseen does not come again: the trial then has no kill, which `hit` says.
        wait_for(lambda: reached() or not user.is_alive(), _END_S, every_s=0.002)

    @property
    def _saved_step(self) -> int:
        return SAVE_EVERY * (1 + self.trial.step % (NUM_STEPS // SAVE_EVERY))

    def _check(self) -> int | None:
        module = CHECKS[self.trial.kind == "dataset"]
        return next((pid for pid in children_of(self.daemon.pid) if module in command_of(pid)), None)

    def require_all_is_well(self) -> None:
        """Nothing acknowledged is lost or doubled, nobody had to help, nothing is left over, and the result is that of
        a quiet run."""
        user = self.user
        assert user is not None
        assert not user.is_alive(), f"no end after {_END_S:g} s; it is at {user.moment!r}, step {user.step}"
        assert user.error is None, f"the program failed: {user.error!r}"
        assert user.job is not None
        assert user.job.state == "SUCCEEDED", f"{user.job.state} {user.job.reason}: {user.job.message}"
        self._require_what_was_acknowledged(user)
        self._require_events(user)
        self._require_steps(user)
        final = _last_checkpoint(self.daemon.state_dir, user.job.job_id)
        assert _digests(final) == self.reference.final, "the bytes of the last checkpoint differ"
        for folder in final.parent.iterdir():
            for name, record in read_manifest(folder).files.items():
                assert record_file(folder / name) == record, f"{folder.name}/{name} is not what the manifest says"
        self._require_nothing_is_left()

    def _require_what_was_acknowledged(self, user: UnattendedUser) -> None:
        with self.daemon.client(self.reference.token) as client:
            have = {
                "model": [model.model_id for model in client.models.list()],
                "dataset": [dataset.dataset_id for dataset in client.datasets.list()],
                "job": [job.job_id for job in client.jobs.list()],
            }
            for kind, acknowledged in user.acknowledged.items():
                assert have[kind] == [acknowledged], f"{kind}: {have[kind]}, acknowledged {acknowledged}"
            again = client.jobs.submit(SPEC, request_id=user.request_ids["job"], push=False)
            assert again.job_id == user.acknowledged["job"], "the same request made another job"
            if user.inputs.model is not None:
                ids = user.request_ids
                model = client.models.push(user.inputs.model, name="demo-model", request_id=ids["model"]).model
                assert model.model_id == user.acknowledged["model"]

    def _require_events(self, user: UnattendedUser) -> None:
        assert user.job is not None
        with self.daemon.client(self.reference.token) as client:
            stored = list(client.jobs.watch(user.job.job_id))
        assert [event.sequence for event in stored] == list(range(1, user.job.last_sequence + 1))
        assert user.events == stored, "the watch saw other events than are stored"

    def _require_steps(self, user: UnattendedUser) -> None:
        losses = self.reference.losses
        assert user.job is not None
        steps = [event for event in user.events if isinstance(event, StepEvent)]
        assert {event.step for event in steps} == set(range(1, NUM_STEPS + 1)), "a step has no event"
        assert all(event.loss == losses[event.step - 1] for event in steps), "the loss of a step differs"
        repeated = len(steps) - NUM_STEPS
        if self.trial.target in ("daemon", "disk"):
            assert repeated == 0, f"{repeated} steps were done twice"
            assert self.may_start_again or user.job.attempt == 1, "the worker was started again"
        assert repeated <= SAVE_EVERY, f"{repeated} steps were done twice; a checkpoint is written every {SAVE_EVERY}"

    def _require_nothing_is_left(self) -> None:
        state, scratch = self.daemon.state_dir, str(self.scratch)

        def others() -> list[str]:
            return [command_of(pid) for pid in processes_with("TMPDIR", scratch) if pid != self.daemon.pid]

        with _reporting(others):
            wait_for(lambda: not others(), _GONE_S)
        partial = [
            str(path.relative_to(state))
            for path in state.rglob("*")
            if path.name.endswith((".partial", ".part", ".raw", ".half")) or ".tmp-" in path.name
        ]
        partial += [str(path) for path in (state / "uploads").glob("*/*")]
        # Torch makes an empty folder there for each user of the machine.
        partial += [str(path) for path in self.scratch.rglob("*") if not path.name.startswith("torchinductor_")]
        assert not partial, f"files are left: {partial}"
        assert self.daemon.terminate() == 0
        assert processes_with("TMPDIR", scratch) == []
        with sqlite3.connect(state / "horizon.db") as database:
            assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        database.close()
        assert "Traceback" not in self.daemon.log(), self.daemon.log()

    @contextmanager
    def reported(self) -> Iterator[None]:
        """Print what happened if the test fails, and leave nothing running."""
        try:
            yield
        except BaseException:
            seed, number = self.trial.seed, self.trial.number
            print(
                f"again with: HORIZON_KILLS_SEED={seed} HORIZON_KILLS={max(number + 1, 40)} pytest -k '{self.trial.id}'"
            )
            print(self._story())
            raise
        finally:
            self._close()

    def _story(self) -> str:
        state = self.daemon.state_dir
        logs = [
            f"--- {log.relative_to(state)}\n{log.read_text('utf-8', 'replace')[-3000:]}"
            for log in state.glob("jobs/*/*/worker.log")
        ]
        seen = self.user.events if self.user is not None else []
        events = "\n".join(f"{event.sequence} {event.kind} {_brief(event)}" for event in seen)
        return "\n".join(
            [f"--- {self.trial}", f"--- events\n{events}", f"--- daemon\n{self.daemon.log()[-6000:]}", *logs]
        )


@dataclass(eq=False)
class KillScene(Scene):
    """A trial in which processes are killed."""

    hit: bool = field(init=False, default=False)
    """Whether what was to be killed was still alive."""
    states: list[str] = field(init=False, default_factory=list)
    """In which state of its job, if there was one, the daemon was killed each time."""

    @property
    def may_start_again(self) -> bool:
        # By what the kill has met, and not by the phase: on a busy machine a kill that is meant for the registration of
        # a dataset may come when the job is being prepared.
        return any(state in ("PREPARING", "STARTING") for state in self.states)

    def disturb(self) -> None:
        self._strike()
        if self.trial.phase == "recover":
            time.sleep(self.trial.downtime_s)
            self.daemon.launch()
            time.sleep(self.trial.again_s)
            self._strike()
        if self.daemon.process is None:
            time.sleep(self.trial.downtime_s)
            self.daemon.start()

    def _strike(self) -> None:
        """Kill it, as it is now."""
        target, state = self.trial.target, self.daemon.state_dir
        found: list[int] = []
        if target in ("worker", "both"):
            found = processes_of(WORKER, state)
        elif self.trial.phase == "check":
            found = [pid for pid in [self._check()] if pid is not None]
        elif target == "child":
            found = processes_of(PREPARATION, state)
        for pid in found:
            self.hit = _killed(pid) or self.hit
        if target in ("daemon", "both"):
            self.daemon.kill()
            self.hit = True
            self.states += _job_states(state)


@dataclass(eq=False)
class FullDiskScene(Scene):
    """A trial in which the disk of the state folder is full for some seconds. `folder` is that disk."""

    has_met_a_start: bool = field(init=False, default=False)
    """Whether the disk was full before the job's first step, and the job was there before it had space again."""

    @property
    def may_start_again(self) -> bool:
        # By what the full disk has met, and not by the phase: on a busy machine an upload may be over when it fills.
        return self.has_met_a_start

    def disturb(self) -> None:
        assert self.user is not None
        is_before_first_step = self.user.step == 0
        ballast = self.folder / "ballast"
        end_s = time.monotonic() + 1.0 + self.trial.downtime_s
        with ballast.open("wb") as file:
            self._fill(file.fileno())
            if self.trial.phase == "recover":
                self.daemon.kill()
                self.daemon.launch()
            while time.monotonic() < end_s:
                # What somebody removes meanwhile is no space.
                self._fill(file.fileno())
                time.sleep(0.02)
        self.has_met_a_start = is_before_first_step and self.user.moment in ("submit", "watch")
        ballast.unlink()
        if self.trial.phase == "recover":
            # As a service manager does with a daemon that could not start. One that met the full disk may take a moment
            # to end.
            if not self.daemon.comes_up():
                self.daemon.launch()
            self.daemon.wait_until_ready()

    def _fill(self, ballast: int) -> None:
        # Others write between the question and the answer.
        with contextlib.suppress(OSError):
            room = shutil.disk_usage(self.folder).free - self.trial.leave_bytes
            if room > 0:
                os.posix_fallocate(ballast, os.fstat(ballast).st_size, room)


def _job_states(state_dir: Path) -> list[str]:
    """Read the states of the jobs that a killed daemon has left."""
    # From a copy: whoever opens the database itself does what the next daemon is to do, and brings it up to date with
    # its journal.
    with tempfile.TemporaryDirectory() as folder:
        for file in state_dir.glob("horizon.db*"):
            shutil.copy(file, folder)
        with contextlib.closing(sqlite3.connect(Path(folder) / "horizon.db")) as database:
            return [state for (state,) in database.execute("SELECT job_state FROM jobs")]


def _brief(event: Any) -> str:
    return " ".join(
        str(asdict(event)[name]) for name in ("step", "state", "reason", "message", "text") if hasattr(event, name)
    )


@contextmanager
def _reporting(what: Callable[[], list[str]]) -> Iterator[None]:
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"processes are left: {what()}") from error


def _killed(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def _last_checkpoint(state: Path, job_id: str) -> Path:
    return max((state / "jobs" / job_id / "checkpoints").glob("step-*"))


def _digests(folder: Path) -> dict[str, str]:
    """sha256 of every file but the manifests, whose versions and times are not part of the result. The id of the job
    differs from trial to trial, so it is replaced by the word JOB before."""
    job_id = folder.parent.parent.name.encode()
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes().replace(job_id, b"JOB")).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "manifest.json"
    }
