"""Checkpoints by steps and by the clock, and a disk that has no room for one: training continues, and only the last one
is waited for."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tests.component.worker.test_resuming import train
from tests.support.orders import CANCEL, STOP
from tests.support.worker_attempts import Daemon, always, assert_same, attempt, result, spec_of, write_inputs

from horizon_server.children.entry import Line
from horizon_server.events import CheckpointWritten, Message, StepDone
from horizon_server.jobs.folders import CheckpointFolder
from horizon_server.records.job import StopRequest
from horizon_server.spec import CheckpointSpec
from horizon_server.store.host_store import HostStore
from horizon_server.store.layout import build_layout
from horizon_server.worker import saving
from horizon_server.worker.saving import CheckpointWriter
from horizon_server.worker_link.orders import GIVE_UP

Inputs = Callable[[str], Path]
MINUTE_S = 60.0


@dataclasses.dataclass
class Clock:
    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s


def writer_of(folder: Path, clock: Clock, **spec: Any) -> CheckpointWriter:
    daemon = Daemon()
    return CheckpointWriter(
        CheckpointFolder(folder / "checkpoints", "job_1"),
        CheckpointSpec(**spec),
        source=folder / "model",
        events=daemon,
        orders=daemon.orders,
        clock=clock,
    )


@pytest.fixture
def store() -> Iterator[HostStore]:
    layout = build_layout(
        {"embed_tokens.weight": (8, 4), "layers.0.w": (4, 4), "norm.weight": (4,)}, num_layers=1, tied=False
    )
    store = HostStore.allocate(layout)
    yield store
    store.close()


def test_a_checkpoint_is_due_by_steps_or_by_the_clock_and_once_for_each_step(tmp_path: Path) -> None:
    clock = Clock()
    writer = writer_of(tmp_path, clock, every_steps=4, every_minutes=10)
    assert [step for step in range(9) if writer.is_due(step)] == [4, 8]
    clock.now_s += 10 * MINUTE_S
    assert writer.is_due(3) and not writer.is_due(0)
    writer.saved = 3
    assert not writer.is_due(3) and writer.is_due(4)


def test_without_minutes_the_clock_does_not_count(tmp_path: Path) -> None:
    clock = Clock()
    writer = writer_of(tmp_path, clock, every_steps=0, every_minutes=0)
    clock.now_s += 1e9
    assert not any(writer.is_due(step) for step in range(9))


def test_by_the_clock_writing_takes_at_most_a_twentieth_of_the_time(
    tmp_path: Path, store: HostStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    writer = writer_of(tmp_path, clock, every_steps=0, every_minutes=1)

    def slow(*given: Any, **named: Any) -> Any:
        clock.now_s += 100.0
        return type("Manifest", (), {"size_bytes": 1})

    monkeypatch.setattr(saving, "save_checkpoint", slow)
    clock.now_s += MINUTE_S
    assert writer.is_due(1) and writer.try_to_write(1, store, {}, None)
    clock.now_s += 1899.0
    assert not writer.is_due(2), "100 s of writing come after 1900 s without"
    clock.now_s += 2.0
    assert writer.is_due(2)


class FullDisk:
    """A disk with no room until `free` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free, self._usage = False, shutil.disk_usage
        monkeypatch.setattr(shutil, "disk_usage", self.disk_usage)

    def disk_usage(self, path: Path) -> Any:
        usage = self._usage(path)
        return usage if self.free else usage._replace(free=17)


def test_a_periodic_checkpoint_without_room_is_tried_again_while_training_continues(
    inputs: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed, folder, disk = inputs("undisturbed"), inputs("full"), FullDisk(monkeypatch)
    monkeypatch.setattr(saving, "RETRY_S", 0.0)

    def free_later(line: Line) -> bytes:
        disk.free = disk.free or (isinstance(line, StepDone) and line.step == 4)
        return always(line)

    daemon = Daemon(free_later)
    spec = spec_of(6, checkpoint={"every_steps": 2})
    assert attempt(folder, spec, daemon).outcome == "succeeded"
    assert [done.step for done in daemon.said(StepDone)] == [1, 2, 3, 4, 5, 6]
    # Due at 2, and again at every step since; there is room from 4 on.
    assert [written.step for written in daemon.said(CheckpointWritten)] == [4, 6]
    [first, second] = [message.text for message in daemon.said(Message) if message.level == "warning"]
    assert first.startswith("the checkpoint of step 2 could not be written: step-00000002 needs ")
    assert "bytes, but its disk has " in first and "training continues" in first
    assert str(folder) not in first
    assert second.startswith("the checkpoint of step 3 ")

    assert attempt(undisturbed, spec, Daemon(always)).outcome == "succeeded"
    assert_same(result(folder, 6), result(undisturbed, 6))


def test_a_checkpoint_leaves_free_what_the_daemon_says(inputs: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = inputs("job")
    monkeypatch.setattr(saving, "RETRY_S", 1000.0)

    def cancel(line: Line) -> bytes:
        return CANCEL if isinstance(line, Message) and "the job waits for it" in line.text else always(line)

    free_bytes, daemon = shutil.disk_usage(folder).free, Daemon(cancel)
    assert attempt(folder, spec_of(2), daemon, min_free_bytes=2 * free_bytes).outcome == "stopped"
    assert f"0 free besides {2 * free_bytes} that are kept for the daemon" in daemon.said(Message)[-1].text
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"total": 2**50, "free": 2**20 * 8}))
    assert attempt(folder, spec_of(2), Daemon(always), min_free_bytes=0).outcome == "succeeded", "2 GiB by default"


def test_the_last_checkpoint_waits_for_room(inputs: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, disk = inputs("full"), FullDisk(monkeypatch)
    monkeypatch.setattr(saving, "RETRY_S", 0.0)
    warnings = 0

    def free_at_the_third(line: Line) -> bytes:
        nonlocal warnings
        warnings += isinstance(line, Message) and line.level == "warning"
        disk.free = warnings == 3
        return always(line)

    daemon = Daemon(free_at_the_third)
    assert attempt(folder, spec_of(2), daemon).outcome == "succeeded"
    assert [written.step for written in daemon.said(CheckpointWritten)] == [2]
    assert "the job waits for it" in daemon.said(Message)[-1].text


def test_a_pause_while_the_job_waits_for_room_ends_it_at_the_checkpoint_before(
    inputs: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed, folder, disk = inputs("undisturbed"), inputs("full"), FullDisk(monkeypatch)
    monkeypatch.setattr(saving, "RETRY_S", 1000.0)
    disk.free = True

    def pause(line: Line) -> bytes:
        disk.free = not (isinstance(line, StepDone) and line.step == 4) and disk.free
        return STOP + GIVE_UP if isinstance(line, Message) and "the job waits for it" in line.text else always(line)

    daemon, spec = Daemon(pause), spec_of(4, checkpoint={"every_steps": 3})
    assert attempt(folder, spec, daemon).outcome == "stopped"
    assert [written.step for written in daemon.said(CheckpointWritten)] == [3]
    assert daemon.said(Message)[-1].text == (
        "the job was paused while it waited for disk space: the checkpoint of step 4 is not written, so the job "
        "continues from the checkpoint of step 3 and repeats the steps since"
    )
    disk.free = True
    again = Daemon(always)
    assert attempt(folder, spec, again, resume_at=3).outcome == "succeeded"
    assert attempt(undisturbed, spec, Daemon(always)).outcome == "succeeded"
    assert_same(result(folder, 4), result(undisturbed, 4))


def test_a_pause_that_led_to_the_last_checkpoint_still_waits_for_room(
    inputs: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, disk = inputs("full"), FullDisk(monkeypatch)
    monkeypatch.setattr(saving, "RETRY_S", 0.0)

    def pause(line: Line) -> bytes:
        disk.free = disk.free or (isinstance(line, Message) and "the job waits for it" in line.text)
        return STOP + GIVE_UP if isinstance(line, StepDone) and line.step == 2 else always(line)

    daemon = Daemon(pause)
    assert attempt(folder, spec_of(4), daemon).outcome == "stopped"
    assert [written.step for written in daemon.said(CheckpointWritten)] == [2]


def test_a_job_that_waits_for_room_can_be_cancelled(inputs: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = inputs("full"), FullDisk(monkeypatch)

    def cancel(line: Line) -> bytes:
        return CANCEL if isinstance(line, Message) and "the job waits for it" in line.text else always(line)

    daemon = Daemon(cancel)
    assert attempt(folder, spec_of(2), daemon).outcome == "stopped"
    assert daemon.orders.current is StopRequest.CANCEL
    assert daemon.said(CheckpointWritten) == [] and not list((folder / "checkpoints").glob("*"))


def test_an_infinite_number_of_fp16_is_a_warning_that_names_the_tensor_and_the_way_on(tmp_path: Path) -> None:
    write_inputs(tmp_path, "llama")
    file = tmp_path / "model/model.safetensors"
    names = ["model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"]
    tensors = load_file(file)
    for name in names:
        tensors[name][0, 0] = 70000.0
    save_file(tensors, file, metadata={"format": "pt"})
    told = [message.text for message in train(tmp_path, dtype="fp16", learning_rate=0.0) if message.level == "warning"]
    assert told == [
        f"the checkpoint of step {step} cannot be used as a model: {names[0]} and 1 more tensors hold numbers beyond "
        "65504, the largest "
        "of fp16, which are infinite there. Training continues with the exact numbers, which trainer/ has; for a model "
        "that can be used, set checkpoint.dtype: bf16 or fp32"
        for step in (1, 2)
    ]
