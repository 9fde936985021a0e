"""Optimizer states that stay on the device and have their home on drives: no bit depends on it, no step moves them, and
the drives have them whenever they are read."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.golden.test_drives import assert_same_state, state_of
from tests.golden.test_kept_on_device import device_of, grad_dtype_of
from tests.golden.test_states_on_device import ALL, CLIPPING, KINDS, SOME, rows_of, started
from tests.support.drives import drive_folders, lent_planes, on_drives

from horizon_server.errors import DriveFailed
from horizon_server.planning.residency import moving_units, state_units
from horizon_server.records.execution import Execution, OnDrives, Residency
from horizon_server.store.drive_layout import DriveLayout
from horizon_server.store.host_store import HostStore

if TYPE_CHECKING:
    from tests.support.tiny_models import Engine, Run, TinyModel

# All layers, those whose states stay and one more, one that is not among them, the least memory, parts of tensors.
HOMES: dict[str, dict[str, Any]] = {
    "all layers": {},
    "two layers": {"units": (2, 3)},
    "another layer": {"units": (1,)},
    "one slot": {"slots": 1},
    "short spans": {"span": 512},
    "embedding and head too": {"units": (0, 1, 2, 4), "span": 512},
}


class Home:
    """A model's store on drives, which can be opened again from its files."""

    def __init__(self, model: TinyModel, on: OnDrives, planes: dict[str, int], grad_dtype: torch.dtype | None) -> None:
        self.layout, self.on, self._planes, self._grad_dtype = model.template.layout, on, planes, grad_dtype
        self.store = self.opened()
        for name, weight in model.weights.items():
            self.store.write_master(name, weight)
        self.store.start_training(1)
        self.store.take_traffic()

    def opened(self) -> HostStore:
        """What a worker finds that is started now."""
        return HostStore.attach(self.layout, self._planes, grad_dtype=self._grad_dtype, drives=self.on)

    def moved_bytes(self) -> tuple[int, int]:
        """Read and written since the last time."""
        traffic = self.store.take_traffic()
        return sum(drive.read_bytes for drive in traffic), sum(drive.written_bytes for drive in traffic)


@contextmanager
def home_of(model: TinyModel, folder: Path, kind: str, *, clips: bool, **which: Any) -> Iterator[Home]:
    """The store of a run that `started` makes."""
    options = {"compute_dtype": torch.bfloat16} if kind == "host in bf16" else {}
    device = device_of("cuda" if kind == "cuda" else "host", **options)
    grad_dtype = grad_dtype_of(device) if clips else None
    on = on_drives(model.template.layout, drive_folders(folder), with_lo=kind != "host", **which)
    with ExitStack() as stack:
        planes = stack.enter_context(lent_planes(model.template.layout, on, grad_dtype=grad_dtype))
        home = Home(model, on, planes, grad_dtype)
        stack.callback(home.store.close)
        yield home


def trained(engine: Engine, run: Run, *, steps: int = 3) -> list[float]:
    """The figures of some steps, with an evaluation after each."""
    numbers = []
    for step in range(steps):
        rows = rows_of(engine, step)
        report = run.trainer.train_step(rows)
        numbers += [report.loss, report.grad_norm, run.trainer.evaluate(rows).eval_loss]
    run.trainer.flush()
    return numbers


@pytest.mark.parametrize("options", CLIPPING, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("home", HOMES)
def test_no_bit_depends_on_which_of_the_three_places_they_are_in(
    home: str, kind: str, options: dict[str, Any], engine: Engine, tmp_path: Path
) -> None:
    model = engine.tiny_model("llama")
    plain = started(engine, model, kind, **options)
    wanted = trained(engine, plain)
    clips = options["max_grad_norm"] is not None
    for kept in (SOME, ALL):
        with home_of(model, tmp_path, kind, clips=clips, **HOMES[home]) as at_home:
            run = started(engine, model, kind, store=at_home.store, **kept, **options)
            assert trained(engine, run) == wanted
            # From the files: what is in the ring could be newer.
            again = at_home.opened()
            assert_same_state(plain.store, again)
            assert at_home.store.generations.generation == 3
            again.close()
            run.trainer.close()


@pytest.mark.parametrize("options", CLIPPING, ids=str)
@pytest.mark.parametrize("kind", ["host in bf16", "cuda"])
def test_no_step_moves_what_stays_and_it_goes_home_once(
    kind: str, options: dict[str, Any], engine: Engine, tmp_path: Path
) -> None:
    model = engine.tiny_model("llama")
    with home_of(model, tmp_path, kind, clips=options["max_grad_norm"] is not None) as home:
        run = started(engine, model, kind, store=home.store, **SOME, **options)
        execution = Execution(residency=Residency(**SOME), drives=home.on)
        [kept] = [unit.index for unit in state_units(home.layout, execution.residency)]
        moving = moving_units(home.layout, execution)
        assert {kept, *moving} == set(home.on.units) and kept not in moving
        each_step = sum(_block_bytes(home, unit) for unit in moving)
        run.trainer.train_step(rows_of(engine, 0))
        run.trainer._optimizer.finish().wait()
        home.moved_bytes()
        for step in (1, 2):
            report = run.trainer.train_step(rows_of(engine, step))
            run.trainer._optimizer.finish().wait()
            by_now = home.moved_bytes()[1] + sum(drive.written_bytes for drive in report.drives)
            assert by_now == each_step
        run.trainer.flush()
        assert home.moved_bytes()[1] == _block_bytes(home, kept)
        run.trainer.flush()
        assert home.moved_bytes()[1] == 0
        run.trainer.close()


def _block_bytes(home: Home, unit: int) -> int:
    on = OnDrives(units=(unit,), planes=home.on.planes, folders=home.on.folders)
    return DriveLayout(home.layout, on).num_bytes


@pytest.mark.parametrize("kind", ["host", "cuda"])
def test_with_all_of_them_on_the_device_steps_leave_the_drives_alone(kind: str, engine: Engine, tmp_path: Path) -> None:
    model = engine.tiny_model("llama")
    with home_of(model, tmp_path, kind, clips=True) as home:
        run = started(engine, model, kind, store=home.store, **ALL)
        run.trainer.train_step(rows_of(engine, 0))
        home.moved_bytes()
        for step in (1, 2):
            run.trainer.train_step(rows_of(engine, step))
        run.trainer._optimizer.finish().wait()
        assert home.moved_bytes() == (0, 0)
        run.trainer.close()


@pytest.mark.parametrize("kind", ["host", "cuda"])
def test_a_turn_of_another_job_sends_them_home_and_brings_them_back(kind: str, engine: Engine, tmp_path: Path) -> None:
    model = engine.tiny_model("llama")
    plain = started(engine, model, kind)
    wanted = [plain.trainer.train_step(rows_of(engine, step)).loss for step in range(4)]
    plain.trainer.flush()
    with home_of(model, tmp_path, kind, clips=True) as home:
        run, found = started(engine, model, kind, store=home.store, **ALL), []
        for step in range(4):
            found.append(run.trainer.train_step(rows_of(engine, step)).loss)
            run.trainer.release_device()
            assert not any(run.device.arena.held_bytes().values())
            assert home.store.generations.generation == step + 1
        assert found == wanted
        assert_same_state(plain.store, home.store)
        run.trainer.close()


def test_a_drive_that_fails_on_the_way_home_leaves_no_generation(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = engine.tiny_model("llama")
    with home_of(model, tmp_path, "host", clips=True) as home:
        run = started(engine, model, "host", store=home.store, **ALL)
        run.trainer.train_step(rows_of(engine, 0))
        run.trainer._optimizer.finish().wait()

        def fail(*_: Any) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(os, "pwritev", fail)
        with pytest.raises(DriveFailed, match=r"the drive of .*drive-\d"):
            run.trainer.flush()
        assert home.store.generations.generation is None
        run.trainer.close()
        assert home.store.generations.generation is None


def test_states_read_from_a_checkpoint_of_either_place_are_the_same(engine: Engine, tmp_path: Path) -> None:
    model = engine.tiny_model("llama")
    with home_of(model, tmp_path, "host", clips=True) as home:
        run = started(engine, model, "host", store=home.store, **ALL)
        trained(engine, run, steps=2)
        state, masters = run.trainer.state(), state_of(home.store)
        # What comes after it is not in it.
        run.trainer.train_step(rows_of(engine, 7))
        run.trainer.flush()
        for place, values in masters.items():
            name, plane = place.rsplit("/", 1)
            for part in home.store.stretches(name):
                with home.store.writing(name, plane, part):
                    home.store.flat(name, plane, part).copy_(values.view(-1)[part])
        run.trainer.restore(state)
        other = started(engine, model, "host")
        wanted = trained(engine, other, steps=3)[6:]
        rows = rows_of(engine, 2)
        report = run.trainer.train_step(rows)
        assert [report.loss, report.grad_norm, run.trainer.evaluate(rows).eval_loss] == wanted
        run.trainer.close()
