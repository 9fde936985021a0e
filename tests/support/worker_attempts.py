"""Attempts of a tiny job in the test's own process, and the requests for such workers. The data needs no
preparation."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.drives import on_drives
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from horizon_server.children.entry import EventWriter, Line
from horizon_server.codec import from_plain, to_plain
from horizon_server.events import TurnWanted
from horizon_server.planning.machine import HostMemory
from horizon_server.planning.planner import Planner
from horizon_server.planning.trainable import open_for_training
from horizon_server.records.execution import NOTHING_STAYS, SPAN_ELEMENTS, Parallel, Residency
from horizon_server.settings import load_settings
from horizon_server.spec import EVERYTHING, JobSpec, parse_job_spec
from horizon_server.store import base_plane
from horizon_server.store.drive_files import lent_files
from horizon_server.store.drive_layout import INDEX_PLANE, DriveLayout
from horizon_server.store.generations import lent_planes
from horizon_server.store.manifest import is_complete
from horizon_server.store.planes import lent_memory
from horizon_server.worker.ending import Outcome
from horizon_server.worker.training import Training
from horizon_server.worker_link.orders import TURN, Orders
from horizon_server.worker_link.request import WorkerRequest

GIB = 2**30
WAIT_S = 240.0
SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
# Rows of more than 16 tokens are not packed.
LONG_ROPE = {
    "original_max_position_embeddings": 16,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [2.0, 3.0, 5.0, 9.0],
        "original_max_position_embeddings": 16,
    },
}


def write_inputs(folder: Path, model_type: str, **sizes: int) -> None:
    """Write a model, of other sizes where some are given, and documents of 8 tokens."""
    changes = {**(LONG_ROPE if model_type == "phi3" else {}), **sizes}
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**SIZES, **changes}))  # type: ignore[no-untyped-call]
    model.save_pretrained(folder / "model")
    starts = torch.arange(0, 8 * 13, 8)
    trained = torch.ones(int(starts[-1]), dtype=torch.uint8)
    trained[starts[:-1]] = 0
    tensors = {"input_ids": torch.randint(32, (len(trained),), dtype=torch.int32), "trained": trained}
    (folder / "prepared").mkdir()
    save_file({**tensors, "document_starts": starts}, folder / "prepared" / "tokens.safetensors")
    (folder / "prepared" / "report.json").write_text('{"kind": "text"}')


@contextmanager
def worker_request(
    folder: Path,
    spec: JobSpec,
    *,
    resume_from: Path | None = None,
    num_threads: int = 1,
    kept: Residency | None = None,
    num_ranks: int = 1,
    num_nodes: int = 1,
    lanes: int | None = None,
    parallel: Parallel = "rows",
    layer_ranks: tuple[int, ...] = (),
    numa_nodes: tuple[int, ...] = (),
    base_fd: int | None = None,
    folders: tuple[str, ...] = (),
    span: int = 0,
    **more: Any,
) -> Iterator[dict[str, Any]]:
    """Lend the memory of a job on what `write_inputs` has written, and yield its worker's request; `more` are fields of
    that, and `base_fd` is the memory of the base that it shares with another job. With `folders`, the states of all
    layers are on drives; with `span` too, those of all units, in spans of that number of elements."""
    plan = Planner(
        load_settings(host_memory_reserve_bytes=0, device_arena_bytes=GIB, numa_interleave=False),
        memory=lambda: HostMemory(limit_bytes=4 * GIB, available_bytes=4 * GIB),
        num_threads=num_threads,
        accelerators=(),
    ).plan_to_start(spec, folder / "model")
    lanes = plan.lanes if lanes is None else lanes
    execution = dataclasses.replace(
        plan.execution,
        micro_batch_tokens=0,
        residency=kept or NOTHING_STAYS,
        num_ranks=num_ranks,
        num_nodes=num_nodes,
        lanes=lanes,
        parallel=parallel,
        layer_ranks=layer_ranks,
        numa_nodes=numa_nodes,
    )
    layout = open_for_training(folder / "model", spec.train).layout
    if folders:
        # As the planner has it: what adapters or frozen tensors have there may be computed with, or be others' too.
        with_lo = execution.compute_dtype == "bfloat16" and spec.train.trainable == EVERYTHING
        units = [unit.index for unit in layout.units if unit.trained_elements] if span else ()
        on = on_drives(layout, folders, with_lo=with_lo, units=units, span=span or SPAN_ELEMENTS)
        execution = dataclasses.replace(execution, drives=on)
    drives = DriveLayout(layout, execution.drives)
    base = None if num_nodes > 1 else plan.base
    plane_bytes = lent_planes(layout, grad_dtype_bytes=execution.grad_bytes, max_ranks=lanes)
    request = WorkerRequest(
        job_id="job_1",
        attempt=1,
        spec=spec,
        plan=dataclasses.replace(plan, execution=execution, base=base),
        model=folder / "model",
        prepared=folder / "prepared",
        checkpoints=folder / "checkpoints",
        resume_from=resume_from,
    )
    if base is not None:
        plane_bytes[base_plane.PLANE] = base.num_bytes
    if folders:
        plane_bytes[INDEX_PLANE] = drives.index_bytes
    with lent_memory(plane_bytes) as memory, lent_files(folders, drives.file_bytes) as files:
        planes = memory | files
        if base_fd is not None:
            os.dup2(base_fd, planes[base_plane.PLANE], inheritable=False)
        yield {**to_plain(request), "planes": planes, **more}


React = Callable[[Line], bytes]
"""The daemon: what it orders when it reads a line."""


def until(condition: Callable[[], bool]) -> None:
    """Wait for the thread that reads orders."""
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.001)


class Daemon(EventWriter):
    """The other end of a worker in this process: keeps what the worker says, and answers at once."""

    def __init__(self, react: React = lambda _: b"") -> None:
        super().__init__()
        self.lines: list[Line] = []
        self._react = react
        self.orders = Orders()

    def send(self, line: Line) -> None:
        self.lines.append(line)
        self.order(self._react(line))

    def order(self, orders: bytes) -> None:
        self.orders.handle(orders)

    def hang_up(self) -> None:
        self.orders.lose_daemon()

    def said(self, *kinds: type[Any]) -> list[Any]:
        return [line for line in self.lines if isinstance(line, kinds)]


def spec_of(num_steps: int = 4, **changes: Any) -> Any:
    train = {"max_steps": num_steps, "sequence_length": 32, "tokens_per_step": 32, **changes.pop("train", {})}
    return parse_job_spec({"name": "job", "model": "m", "dataset": "d", "train": train, **changes})


EVALUATED: dict[str, Any] = {"eval_dataset": "e", "eval_every_steps": 2}


def attempt(folder: Path, spec: Any, daemon: Daemon, *, resume_at: int | None = None, **more: Any) -> Outcome:
    """Run one attempt in this process. A job with an `eval_dataset` evaluates on what it trains on."""
    resume_from = None if resume_at is None else folder / f"checkpoints/step-{resume_at:08d}"
    if spec.eval_dataset:
        more["evaluations"] = {"eval": str(folder / "prepared")}
    with worker_request(folder, spec, resume_from=resume_from, turns=True, **more) as request:
        training = Training(from_plain(WorkerRequest, request), events=daemon, orders=daemon.orders)
        try:
            return training.run()
        finally:
            training.close()


def result(folder: Path, step: int) -> dict[str, Tensor]:
    """All tensors of a checkpoint, by file and name."""
    checkpoint = folder / f"checkpoints/step-{step:08d}"
    assert is_complete(checkpoint)
    return {
        f"{file.name}/{name}": tensor
        for file in sorted(checkpoint.rglob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys() and one
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def always(line: Line) -> bytes:
    """Grant every turn at once, and never want it back."""
    return TURN if isinstance(line, TurnWanted) else b""


@pytest.fixture
def inputs(tmp_path: Path) -> Callable[[str], Path]:
    """A new folder with the inputs of a job."""

    def make(name: str) -> Path:
        (tmp_path / name).mkdir()
        write_inputs(tmp_path / name, "llama")
        return tmp_path / name

    return make
