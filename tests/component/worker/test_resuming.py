"""Whole attempts: what their spec chooses, and what a resumed one refuses and warns of: other rows, and another number
of threads."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support.worker_attempts import worker_request, write_inputs

from horizon_server.children.entry import EventWriter, decode_line
from horizon_server.codec import from_plain
from horizon_server.engine.data import StepPlan
from horizon_server.errors import InvalidModel, InvalidSpec
from horizon_server.events import Message
from horizon_server.jobs.folders import CheckpointFolder
from horizon_server.records.execution import Residency
from horizon_server.records.session import LoadState
from horizon_server.spec import parse_job_spec
from horizon_server.store.checkpoint_parts import adapter_part
from horizon_server.store.layout import MOMENT_PLANES
from horizon_server.store.manifest import Manifest, read_manifest, record_file, write_manifest
from horizon_server.worker.device_turn import DeviceTurn
from horizon_server.worker.session_states import load_state
from horizon_server.worker.set_up import SetUp
from horizon_server.worker.training import Training
from horizon_server.worker_link.orders import Orders
from horizon_server.worker_link.request import WorkerRequest

STATE = "trainer/trainer_state.json"


def train(
    folder: Path,
    *,
    resume: bool = False,
    num_threads: int = 1,
    dtype: str = "source",
    kept: Residency | None = None,
    export: str = "adapter",
    **changes: object,
) -> list[Message]:
    """Run one attempt to its end, and return what it had to say. `changes` are of the spec's `train`."""
    spec = parse_job_spec(
        {
            "name": "job",
            "model": "m",
            "dataset": "d",
            "checkpoint": {"every_steps": 1, "keep_last": 2, "dtype": dtype, "export": export},
            "train": {"max_steps": 2, "sequence_length": 32, "tokens_per_step": 32, **changes},
        }
    )
    shutil.rmtree(folder / "checkpoints/step-00000002", ignore_errors=True)
    lines = folder / "events"
    events = EventWriter(os.open(lines, os.O_WRONLY | os.O_CREAT | os.O_TRUNC))
    resume_from = folder / "checkpoints/step-00000001" if resume else None
    start = folder / "start"
    with worker_request(folder, spec, resume_from=resume_from, num_threads=num_threads, kept=kept) as request:
        request["adapter"] = str(start) if start.is_dir() else None
        training = Training(from_plain(WorkerRequest, request), events=events, orders=Orders())
        try:
            assert training.run().outcome == "succeeded"
        finally:
            training.close()
    said = [decode_line(line) for line in lines.read_bytes().splitlines()]
    return [line for line in said if isinstance(line, Message)]


def test_no_job_waits_for_the_device_while_another_reads_its_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_inputs(tmp_path, "llama")
    done: list[str] = []

    def recorded(kind: type[Any], name: str) -> None:
        call = getattr(kind, name)

        def record(self: Any, *args: Any) -> Any:
            done.append(name)
            return call(self, *args)

        monkeypatch.setattr(kind, name, record)

    for kind, name in ((WorkerRequest, "tokens_digest"), (StepPlan, "digest"), (DeviceTurn, "take")):
        recorded(kind, name)
    train(tmp_path)
    assert done[:3] == ["tokens_digest", "digest", "take"]
    assert set(done[3:]) == {"take"}


def test_a_job_that_continues_with_other_spare_memory_has_the_same_bits(tmp_path: Path) -> None:
    write_inputs(tmp_path, "llama")
    train(tmp_path)
    weights = tmp_path / "checkpoints/step-00000002/model.safetensors"
    straight = weights.read_bytes()
    for kept in (
        Residency(resident_layers=1, product_layers=2, product_bytes=1 << 20),
        Residency(resident_layers=2),
        Residency(resident_layers=2, state_layers=1),
    ):
        train(tmp_path, resume=True, kept=kept)
        assert weights.read_bytes() == straight


@pytest.mark.parametrize("base", ["source", "int8", "nf4"])
def test_a_job_with_adapters_and_dropout_continues_with_the_same_bits(tmp_path: Path, base: str) -> None:
    write_inputs(tmp_path, "llama")
    changes: dict[str, Any] = {"trainable": "lora", "lora": {"rank": 2, "dropout": 0.3, "base": base}}
    train(tmp_path, **changes)
    checkpoint = tmp_path / "checkpoints/step-00000002"
    straight = {file.name: file.read_bytes() for file in checkpoint.rglob("*.safetensors")}
    assert straight
    train(tmp_path, resume=True, **changes)
    assert {file.name: file.read_bytes() for file in checkpoint.rglob("*.safetensors")} == straight


def test_a_checkpoint_has_the_format_that_the_spec_chooses(tmp_path: Path) -> None:
    write_inputs(tmp_path, "llama")
    train(tmp_path, dtype="fp16")
    weights = load_file(tmp_path / "checkpoints/step-00000002/model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.float16}


def test_weight_decay_applies_to_what_the_spec_chooses(tmp_path: Path) -> None:
    norms = []
    for rule in ("trainer", "all"):
        (tmp_path / rule).mkdir()
        write_inputs(tmp_path / rule, "llama")
        train(tmp_path / rule, decay=rule, weight_decay=0.5, learning_rate=0.1, warmup_steps=0)
        norms.append(load_file(tmp_path / rule / "checkpoints/step-00000001/model.safetensors")["model.norm.weight"])
    assert (norms[0] - norms[1]).min() > 0.01


def test_a_learning_rate_group_moves_what_it_fits(tmp_path: Path) -> None:
    moved = []
    for scale in (1, 100):
        (tmp_path / str(scale)).mkdir()
        write_inputs(tmp_path / str(scale), "llama")
        groups = [{"match": r"model\.norm", "scale": scale}]
        train(tmp_path / str(scale), lr_groups=groups, learning_rate=1e-3, warmup_steps=0)
        weights = load_file(tmp_path / str(scale) / "checkpoints/step-00000001/model.safetensors")
        before = load_file(tmp_path / str(scale) / "model/model.safetensors")
        moved.append({name: (weights[name] - before[name]).abs().max().item() for name in weights})
    norm = "model.norm.weight"
    assert moved[1].pop(norm) == pytest.approx(100 * moved[0].pop(norm), rel=1e-3)
    assert moved[0] == moved[1]


def test_a_job_of_frozen_parameters_continues_bit_by_bit_and_leaves_them_as_they_were(tmp_path: Path) -> None:
    write_inputs(tmp_path, "llama")
    train(tmp_path, trainable=[r"layers\.1\."], learning_rate=1e-2, warmup_steps=0)
    weights = tmp_path / "checkpoints/step-00000002/model.safetensors"
    straight, moments = weights.read_bytes(), load_file(weights.parent / "trainer/exp_avg.safetensors")
    found, before = load_file(weights), load_file(tmp_path / "model/model.safetensors")
    assert set(moments) == {name for name in before if "layers.1." in name}
    assert {name for name in before if not torch.equal(found[name], before[name])} == set(moments)
    train(tmp_path, resume=True, trainable=[r"layers\.1\."], learning_rate=1e-2, warmup_steps=0)
    assert weights.read_bytes() == straight


LORA: dict[str, Any] = {
    "trainable": ["lora"],
    "lora": {"rank": 4, "dropout": 0.2},
    "learning_rate": 1e-2,
    "warmup_steps": 0,
}


DORA: dict[str, Any] = {**LORA, "lora": {**LORA["lora"], "dora": True}}
KINDS = pytest.mark.parametrize(
    ("export", "how"), [("adapter", LORA), ("merged", LORA), ("both", LORA), ("adapter", DORA), ("both", DORA)]
)


@KINDS
def test_a_job_of_adapters_continues_bit_by_bit_from_a_checkpoint_of_them_alone(
    tmp_path: Path, export: str, how: dict[str, Any]
) -> None:
    write_inputs(tmp_path, "llama")
    train(tmp_path, export=export, **how)
    last = tmp_path / "checkpoints/step-00000002"
    straight = {path: path.read_bytes() for path in last.rglob("*.safetensors")}
    assert {path.name for path in straight} >= {"adapter_model.safetensors", "exp_avg.safetensors"}
    adapter = load_file(next(path for path in straight if path.name == "adapter_model.safetensors"))
    assert all(tensor.abs().max() > 0 for tensor in adapter.values())
    train(tmp_path, resume=True, export=export, **how)
    assert {path: path.read_bytes() for path in last.rglob("*.safetensors")} == straight


def test_a_job_of_adapters_is_not_continued_on_another_base(tmp_path: Path) -> None:
    write_inputs(tmp_path, "llama")
    train(tmp_path, **LORA)
    file = tmp_path / "model/model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(InvalidModel, match="the model m is not the one that the checkpoint's adapter was trained on"):
        train(tmp_path, resume=True, **LORA)


@KINDS
def test_a_job_starts_with_the_adapter_of_a_linked_checkpoint(tmp_path: Path, export: str, how: dict[str, Any]) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
        write_inputs(folder, "llama")
    train(first, export=export, **how)
    checkpoints = CheckpointFolder(first / "checkpoints", "job")
    part = adapter_part(checkpoints.manifest(2).files)
    assert part is not None
    checkpoints.link_part(2, part, second / "start")
    trained = load_file(checkpoints.of_step(2) / part / "adapter_model.safetensors")

    # At a rate of 0 nothing moves: what is saved is what was loaded.
    train(second, **how | {"learning_rate": 0.0, "seed": 1})
    found = load_file(second / "checkpoints/step-00000001/adapter_model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in trained.items())
    (second / "start" / "base.sha256").write_text("0" * 64)
    with pytest.raises(InvalidModel, match="the model is not the one that the adapter of init_from was trained on"):
        train(second, **how)


def test_a_job_starts_with_the_weights_of_a_linked_checkpoint_and_a_new_optimizer(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
        write_inputs(folder, "llama")
    train(first, learning_rate=1e-2, warmup_steps=0)
    shutil.rmtree(second / "model")
    CheckpointFolder(first / "checkpoints", "job").link_part(2, "", second / "model")
    trained = load_file(first / "checkpoints/step-00000002/model.safetensors")

    # At a rate of 0 nothing moves: what is saved is what was loaded.
    train(second, learning_rate=0.0, seed=1)
    for name, weight in load_file(second / "checkpoints/step-00000001/model.safetensors").items():
        assert torch.equal(weight, trained[name]), name
    state = json.loads((second / "checkpoints/step-00000001" / STATE).read_text())
    assert (state["trainer"]["step"], state["trainer"]["num_updates"]) == (1, 1)


def test_a_checkpoint_of_rows_that_were_packed_without_a_limit_is_not_continued_with_one(tmp_path: Path) -> None:
    write_inputs(tmp_path, "phi3")
    train(tmp_path)
    train(tmp_path, resume=True)
    change_state(tmp_path, packing_limit=None)
    with pytest.raises(InvalidSpec, match="its rows were packed without a limit, and are up to 16 tokens now"):
        train(tmp_path, resume=True)


def change_state(folder: Path, **changes: Any) -> None:
    """Change what the checkpoint of step 1 says of its data."""
    checkpoint = folder / "checkpoints" / "step-00000001"
    state = json.loads((checkpoint / STATE).read_text())
    state["data"] |= changes
    (checkpoint / STATE).write_text(json.dumps(state))
    found = read_manifest(checkpoint)
    write_manifest(
        checkpoint, Manifest(files={**found.files, STATE: record_file(checkpoint / STATE)}, versions=found.versions)
    )


def test_a_job_whose_data_was_prepared_again_continues_where_the_tokens_are_the_same(tmp_path: Path) -> None:
    """As after an upgrade, whose preparation has another key."""
    write_inputs(tmp_path, "llama")
    train(tmp_path)
    straight = (tmp_path / "checkpoints/step-00000002/model.safetensors").read_bytes()
    change_state(tmp_path, prepared="before")
    train(tmp_path, resume=True)
    assert (tmp_path / "checkpoints/step-00000002/model.safetensors").read_bytes() == straight


def test_a_checkpoint_that_cannot_be_continued_says_what_differs_and_the_way_on(tmp_path: Path) -> None:
    write_inputs(tmp_path, "llama")
    train(tmp_path)
    way_on = r"Submit a new job that starts with its weights: init_from: \S+@1$"
    tokens = json.loads((tmp_path / "checkpoints" / "step-00000001" / STATE).read_text())["data"]["tokens"]
    change_state(tmp_path, tokens="0" * 64)
    with pytest.raises(InvalidSpec, match=r"its tokens are others \(their sha256 was 000000000000 and is .*" + way_on):
        train(tmp_path, resume=True)
    change_state(tmp_path, tokens=tokens, rows="0" * 64)
    with pytest.raises(InvalidSpec, match="its documents were in another order. " + way_on):
        train(tmp_path, resume=True)
    # Which steps are looked at depends on how many there are.
    change_state(tmp_path, rows="0" * 64, num_steps=9)
    words = "the job had 9 steps and has 2 now. "
    with pytest.raises(InvalidSpec, match=words + way_on):
        train(tmp_path, resume=True)


def test_a_job_that_continues_with_another_number_of_threads_is_told_so_once(tmp_path: Path) -> None:
    write_inputs(tmp_path, "llama")
    assert not any(message.level == "warning" for message in train(tmp_path))
    assert not any(message.level == "warning" for message in train(tmp_path, resume=True))
    [warning] = [m for m in train(tmp_path, resume=True, num_threads=2) if m.level == "warning"]
    assert warning.text.startswith("the checkpoint was made with 1 CPU threads and this attempt has 2")


def test_a_warmup_that_is_as_long_as_the_job_is_reported_where_the_plan_could_not_know(tmp_path: Path) -> None:
    write_inputs(tmp_path, "llama")
    [warning] = [m for m in train(tmp_path, max_steps=None, epochs=1, warmup_steps=3) if m.level == "warning"]
    assert warning.text.startswith(
        "train.warmup_steps is 3 and the job has 3 steps, so the learning rate never reaches"
    )


def test_a_warmup_that_is_shorter_than_the_job_is_not_reported(tmp_path: Path) -> None:
    write_inputs(tmp_path, "llama")
    messages = train(tmp_path, max_steps=None, epochs=1, warmup_steps=2)
    assert not any(message.level == "warning" for message in messages)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_job_ends_with_the_bits_of_one_that_was_never_stopped(dtype: str, tmp_path: Path) -> None:
    write_inputs(tmp_path, "llama")
    train(tmp_path, compute_dtype=dtype)
    last = tmp_path / "checkpoints/step-00000002"
    whole = {file.name: load_file(file) for file in sorted(last.rglob("*.safetensors"))}

    train(tmp_path, resume=True, compute_dtype=dtype)

    assert whole
    for file in sorted(last.rglob("*.safetensors")):
        for name, tensor in load_file(file).items():
            assert torch.equal(tensor, whole[file.name][name]), f"{file.name}: {name}"


@pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), ("bfloat16", "auto")])
def test_a_checkpoint_is_continued_only_in_the_dtype_that_made_it(dtypes: tuple[str, str], tmp_path: Path) -> None:
    write_inputs(tmp_path, "llama")
    first, second = dtypes
    train(tmp_path, compute_dtype=first)
    with pytest.raises(InvalidSpec, match=f"exactly: it was made in {first}, and this attempt computes in"):
        train(tmp_path, resume=True, compute_dtype=second)
    train(tmp_path, resume=True, compute_dtype=first)


@pytest.mark.parametrize(("architecture", "keeps"), [("bloom", True), ("llama", False)])
def test_a_job_says_why_its_model_keeps_masks(tmp_path: Path, architecture: str, keeps: bool) -> None:
    write_inputs(tmp_path, architecture)
    said = [message.text for message in train(tmp_path, max_steps=1) if message.text.startswith("keeps masks: ")]
    assert len(said) == keeps
    assert all("attention has one over all pairs of a row's tokens, because " in text for text in said)


@pytest.mark.parametrize("export", ["adapter", "both"])
@pytest.mark.parametrize(("before", "now"), [("exact", "compressed"), ("compressed", "exact")])
def test_a_job_never_continues_with_optimizer_states_of_another_form(
    before: str, now: str, export: str, tmp_path: Path
) -> None:
    write_inputs(tmp_path, "llama", hidden_size=64, intermediate_size=96)
    # Adapters of rank 64 are matrices of 4,096 elements, which are compressed.
    how: dict[str, Any] = {} if export == "adapter" else {"trainable": "lora", "lora": {"rank": 64}}
    train(tmp_path, optimizer_states=before, export=export, **how)
    files = read_manifest(tmp_path / "checkpoints/step-00000002").files
    assert ("trainer/scales.safetensors" in files) == (before == "compressed")
    wanted = {file: record.sha256 for file, record in files.items()}

    with pytest.raises(InvalidModel, match=f"has {before} optimizer states, and this job keeps {now} ones"):
        train(tmp_path, resume=True, optimizer_states=now, export=export, **how)

    train(tmp_path, resume=True, optimizer_states=before, export=export, **how)
    again = read_manifest(tmp_path / "checkpoints/step-00000002").files
    assert {file: record.sha256 for file, record in again.items() if file.endswith(".safetensors")} == {
        file: sha256 for file, sha256 in wanted.items() if file.endswith(".safetensors")
    }


@pytest.mark.parametrize("optimizer", [True, False])
@pytest.mark.parametrize(("before", "now"), [("exact", "compressed"), ("compressed", "exact")])
def test_a_session_loads_states_of_the_other_form_and_says_so(
    before: str, now: str, optimizer: bool, tmp_path: Path
) -> None:
    write_inputs(tmp_path, "llama", hidden_size=64, intermediate_size=96)
    train(tmp_path, optimizer_states=before)
    train_of = {"max_steps": 2, "sequence_length": 32, "tokens_per_step": 32, "optimizer_states": now}
    spec = parse_job_spec({"name": "job", "model": "m", "dataset": "d", "train": train_of})
    events = EventWriter(os.open(tmp_path / "events", os.O_WRONLY | os.O_CREAT | os.O_TRUNC))
    said: list[str] = []
    with worker_request(tmp_path, spec) as plain:
        request = from_plain(WorkerRequest, plain)
        set_up = SetUp.open(request, events)
        call = LoadState(checkpoint="job_1@2", optimizer=optimizer)
        folder = tmp_path / "checkpoints/step-00000002"
        state = load_state(folder, call, request=request, set_up=set_up, warn=said.append)
        moments = [set_up.store.plane(plane).any() for plane in MOMENT_PLANES if plane in set_up.store.fds]
        set_up.close()
    assert len(said) == 1 and f"has {before} optimizer states, and this job keeps {now} ones" in said[0]
    assert (state is not None and state["step"] == 2) == optimizer
    assert any(moments) == optimizer
