"""States on drives: the same bytes as in memory, whatever updates, reads or is killed."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.drives import drive_folders, on_drives, store_on_drives, values_of
from tests.support.plans import settings
from tests.support.tiny_models import Run, TinyModel
from tests.support.worker_attempts import (
    EVALUATED,
    Daemon,
    always,
    assert_same,
    attempt,
    result,
    spec_of,
    write_inputs,
)

from horizon_server.children.entry import Line
from horizon_server.engine.called_trainer import CalledTrainer
from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.objectives import SESSION_LOSSES, Documents, StepObjective
from horizon_server.events import TurnWanted
from horizon_server.store.checkpoint import load_checkpoint, save_checkpoint
from horizon_server.store.drive_layout import DriveLayout
from horizon_server.store.host_store import HostStore
from horizon_server.worker_link.orders import RELEASE, TURN, YIELD

MakeModel = Callable[..., TinyModel]
Start = Callable[..., Run]
NUM_STEPS = 4


@pytest.fixture
def on_drive(tmp_path: Path) -> Any:
    """Makes stores of a model with the states of its layers on two drives."""
    with ExitStack() as stores:

        def make(model: TinyModel, *, grad_dtype: torch.dtype | None = torch.float32, **which: Any) -> HostStore:
            layout = model.template.layout
            on = on_drives(layout, drive_folders(tmp_path), **which)
            store = stores.enter_context(store_on_drives(layout, on, grad_dtype=grad_dtype))
            for name, weight in model.weights.items():
                store.write_master(name, weight)
            store.start_training(1)
            store.take_traffic()
            return store

        yield make


def state_of(store: HostStore) -> dict[str, torch.Tensor]:
    """All masters and moments by name and plane."""
    names = [tensor.name for _, tensor in store.layout.tensors()]
    planes = ("hi", "lo", "exp_avg", "exp_avg_sq")
    return {f"{name}/{plane}": values_of(store, name, plane) for name in names for plane in planes}


def assert_same_state(one: HostStore, other: HostStore) -> None:
    mine, theirs = state_of(one), state_of(other)
    for name, values in mine.items():
        assert torch.equal(values, theirs[name]), f"{name} differs"


CASES: dict[str, dict[str, Any]] = {
    "clipping": {},
    "updates in backward": {"max_grad_norm": None},
    "bf16, low halves too": {"dtype": torch.bfloat16},
    "bf16, updates in backward": {"dtype": torch.bfloat16, "max_grad_norm": None},
    "some of the layers": {"units": (2,)},
    "the least memory": {"slots": 1},
    "several spans a tensor": {"span": 96},
    "several spans a tensor, updates in backward": {"span": 4096, "max_grad_norm": None, "dtype": torch.bfloat16},
    "all units": {"units": range(5), "span": 2048},
    "all units, one slot, low halves too": {"units": range(5), "span": 1056, "slots": 1, "dtype": torch.bfloat16},
    "all units, updates in backward": {"units": range(5), "span": 2048, "max_grad_norm": None},
    "all units, updates in backward in bf16": {
        "units": range(5),
        "span": 96,
        "max_grad_norm": None,
        "dtype": torch.bfloat16,
    },
}


@pytest.mark.parametrize("model_type", ["qwen3", "llama", "mixtral"])
@pytest.mark.parametrize("case", CASES)
def test_states_on_drives_learn_the_same_bytes(
    case: str,
    model_type: str,
    tiny_model: MakeModel,
    start: Start,
    on_drive: Any,
    documents: Callable[..., list[torch.Tensor]],
    pack: Callable[[Sequence[torch.Tensor]], Any],
) -> None:
    options = dict(CASES[case])
    dtype = options.pop("dtype", torch.float32)
    which = {name: options.pop(name) for name in ("units", "slots", "span") if name in options}
    clips = options.get("max_grad_norm", 1.0) is not None
    grad_dtype = (torch.float32 if dtype is torch.float32 else torch.bfloat16) if clips else None
    model = tiny_model(model_type)
    in_memory = model.store(grad_dtype=grad_dtype)
    driven = on_drive(model, grad_dtype=grad_dtype, with_lo=dtype is torch.bfloat16, **which)
    runs = [
        start(model, store=store, device=HostDevice(num_threads=1, compute_dtype=dtype), **options)
        for store in (in_memory, driven)
    ]
    written = 0
    for step in range(NUM_STEPS):
        batch = [pack(documents(9, 14, seed=2 * step)), pack(documents(12, seed=2 * step + 1))]
        one, other = (run.trainer.train_step(batch) for run in runs)
        assert one.loss == other.loss and one.grad_norm == other.grad_norm
        assert not one.drives and len(other.drives) == 2
        written += sum(drive.written_bytes for drive in other.drives)
    for run in runs:
        run.trainer.flush()
    # Each step writes all once, before it is flushed at the latest.
    written += sum(drive.written_bytes for drive in driven.take_traffic())
    assert written == NUM_STEPS * DriveLayout(driven.layout, driven._drives._on).num_bytes
    assert_same_state(in_memory, driven)
    for run in runs:
        run.trainer.close()


def test_a_checkpoint_comes_from_drives_and_goes_back_to_them(
    tiny_model: MakeModel,
    start: Start,
    on_drive: Any,
    documents: Callable[..., list[torch.Tensor]],
    pack: Callable[[Sequence[torch.Tensor]], Any],
    tmp_path: Path,
) -> None:
    model = tiny_model("llama")
    source = tmp_path / "source"
    model.reference().save_pretrained(source)  # type: ignore[operator]
    in_memory, driven, again = model.store(), on_drive(model), on_drive(model, with_lo=False)
    runs = [start(model, store=store) for store in (in_memory, driven)]
    for run in runs:
        run.trainer.train_step([pack(documents(9, 14))])
        state = run.trainer.state()
    for name, store in (("memory", in_memory), ("drive", driven)):
        (tmp_path / name).mkdir()
        save_checkpoint(store, tmp_path / name / "step-1", source=source, trainer_state={"trainer": state})
    files = sorted(file.relative_to(tmp_path / "memory") for file in (tmp_path / "memory").rglob("*.safetensors"))
    assert files
    for file in files:
        assert (tmp_path / "memory" / file).read_bytes() == (tmp_path / "drive" / file).read_bytes(), file
    again.start_loading()
    load_checkpoint(again, tmp_path / "drive" / "step-1")
    again.start_training(1)
    assert_same_state(again, in_memory)
    # Training goes on after a checkpoint, whose reading took the place of what was read ahead.
    third = start(model, store=again)
    third.trainer.restore(state)
    for run in (runs[0], third):
        run.trainer.train_step([pack(documents(11, seed=5))])
        run.trainer.flush()
    assert_same_state(again, in_memory)
    for run in (*runs, third):
        run.trainer.close()


def every_turn_is_wanted_back(line: Line) -> bytes:
    """Grant every turn, and want it back at once."""
    return TURN + YIELD + RELEASE if isinstance(line, TurnWanted) else b""


@pytest.mark.parametrize(
    ("train", "react", "sizes", "span"),
    [
        ({}, every_turn_is_wanted_back, {}, 0),
        ({"max_grad_norm": None, "compute_dtype": "bfloat16"}, every_turn_is_wanted_back, {}, 0),
        # Adapters in every layer, whose frozen weights may be those of other jobs too.
        ({"trainable": "lora", "lora": {"rank": 4}}, always, {}, 0),
        ({"trainable": "lora", "lora": {"rank": 4, "dora": True}, "compute_dtype": "bfloat16"}, always, {}, 0),
        ({"trainable": [r"layers\.[12]\."]}, always, {}, 0),
        # All units, in spans that begin and end within tensors.
        ({}, every_turn_is_wanted_back, {}, 96),
        ({"max_grad_norm": None, "compute_dtype": "bfloat16"}, every_turn_is_wanted_back, {}, 2080),
        ({"max_grad_norm": None, "compute_dtype": "bfloat16"}, always, {"tie_word_embeddings": True}, 96),
        ({"trainable": "lora", "lora": {"rank": 4, "dora": True}}, always, {}, 32),
        ({"optimizer_states": "compressed"}, always, {"hidden_size": 64}, 1056),
        ({"optimizer_states": "compressed", "max_grad_norm": None}, always, {"hidden_size": 64}, 32),
    ],
)
def test_jobs_with_turns_evaluations_and_adapters_end_with_the_same_files(
    train: dict[str, Any], react: Any, sizes: dict[str, Any], span: int, tmp_path: Path
) -> None:
    spec = spec_of(5, train=train, checkpoint={"every_steps": 2, "keep_last": 9}, **EVALUATED)
    folders = drive_folders(tmp_path)
    for name in ("memory", "drives", "resumed"):
        (tmp_path / name).mkdir()
        write_inputs(tmp_path / name, "llama", **sizes)
    attempt(tmp_path / "memory", spec, Daemon(react))
    attempt(tmp_path / "drives", spec, Daemon(react), folders=folders, span=span)
    wanted = result(tmp_path / "memory", 5)
    assert_same(wanted, result(tmp_path / "drives", 5))
    # A checkpoint made in memory is continued on drives.
    shutil.copytree(tmp_path / "memory/checkpoints/step-00000002", tmp_path / "resumed/checkpoints/step-00000002")
    attempt(tmp_path / "resumed", spec, Daemon(react), resume_at=2, folders=folders, span=span)
    assert_same(wanted, result(tmp_path / "resumed", 5))


def test_a_session_on_drives_loads_what_one_in_memory_saved(
    tiny_model: MakeModel,
    on_drive: Any,
    documents: Callable[..., list[torch.Tensor]],
    pack: Callable[[Sequence[torch.Tensor]], Any],
) -> None:
    model = tiny_model("qwen3")
    stores = [model.store(), on_drive(model)]
    states = []
    for store in stores:
        recipe, execution = settings(optimizer_threads=1, adds_up=True)
        trainer = CalledTrainer(model.template, store, HostDevice(num_threads=1), recipe, execution, num_steps=20)

        def write(store: HostStore = store) -> None:
            for name, weight in model.weights.items():
                store.write_master(name, weight / 2)
            for moments in store.zero(["exp_avg", "exp_avg_sq"]):
                moments.zero_()

        for step in range(4):
            if step == 2:
                trainer.reload(write)
            for seed in (step, step + 10):
                batch = [pack(documents(9, 14, seed=seed))]
                weights_S = torch.ones(sum(row.num_targets for row in batch))
                objective = StepObjective(
                    objective=SESSION_LOSSES["cross_entropy"](), documents=Documents.of(batch), weights_S=weights_S
                )
                trainer.accumulate(batch, objective, key=seed)
            trainer.apply(learning_rate=0.01, betas=(0.9, 0.95), eps=1e-7, weight_decay=0.1, max_grad_norm=1.0)
        trainer.flush()
        states.append(state_of(store))
        trainer.close()
    for name, values in states[0].items():
        assert torch.equal(values, states[1][name]), f"{name} differs"
