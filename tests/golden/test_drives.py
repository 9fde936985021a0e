"""States on drives: the same bytes as in memory, whatever updates, reads or is killed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.drives import drive_folders, on_drives, store_on_drives
from tests.support.tiny_models import Run, TinyModel

from horizon_server.engine.device.host import HostDevice
from horizon_server.store.checkpoint import load_checkpoint, save_checkpoint
from horizon_server.store.drive_layout import DriveLayout
from horizon_server.store.host_store import HostStore

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
                with store.writing(name, "lo"):
                    store.write_master(name, weight)
            store.start_training(1)
            store.take_traffic()
            return store

        yield make


def state_of(store: HostStore) -> dict[str, torch.Tensor]:
    """All masters and moments by name and plane."""
    found = {}
    for _, tensor in store.layout.tensors():
        for plane in ("hi", "lo", "exp_avg", "exp_avg_sq"):
            with store.reading(tensor.name, plane):
                found[f"{tensor.name}/{plane}"] = store.tensor(tensor.name, plane).clone()
    return found


def assert_same_state(one: HostStore, other: HostStore) -> None:
    mine, theirs = state_of(one), state_of(other)
    for name, values in mine.items():
        assert torch.equal(values, theirs[name]), f"{name} differs"


CASES: dict[str, dict[str, Any]] = {
    "clipping": {},
    "updates in backward": {"max_grad_norm": None},
    "bf16, low halves too": {"dtype": torch.bfloat16},
    "bf16, updates in backward": {"dtype": torch.bfloat16, "max_grad_norm": None},
    "some of the layers": {"layers": (2,)},
    "the least memory": {"slots": 1},
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
    which = {name: options.pop(name) for name in ("layers", "slots") if name in options}
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
