"""Models as large as this machine's memory allows, trained for real: some steps of the real worker, in memory and on
drives that outlive it, then the same again with a worker that is killed, and from a checkpoint.

A model of a named shape with random weights in bf16 is written tensor by tensor. Its table is so small that logits are
near 0, so the loss of the first step is the logarithm of the vocabulary. A process of its own trains it; the peak is
its VmHWM: heap, libraries, and the memory files that it is lent, but not the page cache. What is compared are the bytes
of these files: weights, optimizer states, and of what is on drives the checksums of its pieces.

python -m bench.giant_real 3b                         # compressed states, all in host memory
python -m bench.giant_real 4b --drive /nvme/horizon   # moments and low halves on a drive
"""

from __future__ import annotations

import argparse
import array
import dataclasses
import hashlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.giant import write_model_outline
from bench.giant_worker import REST_FILE
from horizon_formats.formats import DataKind
from horizon_server.children.entry import Failure, decode_line
from horizon_server.codec import to_plain
from horizon_server.events import AttemptReady, StepDone
from horizon_server.jobs.folders import CheckpointFolder
from horizon_server.planning.drives import drives_of
from horizon_server.planning.machine import HostMemory
from horizon_server.planning.planner import Planner
from horizon_server.planning.trainable import open_for_training
from horizon_server.records.plan import Plan
from horizon_server.settings import child_environment, load_settings
from horizon_server.spec import JobSpec, parse_job_spec
from horizon_server.store.cpus import available_cpus
from horizon_server.store.drive_files import lent_files, measure
from horizon_server.store.generations import PLANE as GENERATIONS
from horizon_server.store.generations import Generations
from horizon_server.store.layout import StoreLayout
from horizon_server.store.planes import lent_memory
from horizon_server.store.prepared import DocumentColumns, PreparedFolder
from horizon_server.store.safetensors_files import read_safetensors_headers
from horizon_server.worker_link.protocol import JOURNAL_FILE, LOG_FILE, REQUEST_FILE
from horizon_server.worker_link.request import WorkerRequest

_QWEN3 = {
    "model_type": "qwen3",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "num_attention_heads": 32,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model, how it is trained, and the GiB of host memory that its plan may take."""

    config: Mapping[str, Any]
    states: str = "exact"
    memory_gib: float
    has_drive: bool = False


SHAPES: Mapping[str, Shape] = {
    # Qwen3-4B.
    "4b": Shape(config={**_QWEN3, "num_hidden_layers": 36, "vocab_size": 151936}, memory_gib=16.0, has_drive=True),
    # As wide, with fewer layers and a vocabulary of 32,768, which takes exact states: 3.0 B parameters.
    "3b": Shape(config={**_QWEN3, "num_hidden_layers": 29, "vocab_size": 32768}, states="compressed", memory_gib=21.0),
    "tiny": Shape(
        config={
            **_QWEN3,
            "head_dim": 16,
            "num_key_value_heads": 2,
            "num_attention_heads": 4,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 16,
            "vocab_size": 256,
        },
        states="compressed",
        memory_gib=2.0,
    ),
}
_TABLE_STD, _STD = 0.005, 0.02
_PIECE_ELEMENTS = 1 << 24
_DOCUMENTS = 8
_HASHED_BYTES = 64 << 20
_POLL_S = 0.02
# What a worker may take for its steps.
_LONGEST_S = 1800.0
_GIB = 2**30


def write_weights(folder: Path) -> None:
    """Fill the outline of a model with random weights: ones for norms, a small table, and in pieces, so that no tensor
    is in memory as a whole."""
    generator = torch.Generator().manual_seed(0)
    for name, header in read_safetensors_headers(folder).items():
        is_table = "embed_tokens" in name or name.startswith("lm_head")
        with header.file.open("r+b") as stream:
            stream.seek(header.start)
            count = math.prod(header.shape)
            for start in range(0, count, _PIECE_ELEMENTS):
                size = min(_PIECE_ELEMENTS, count - start)
                if len(header.shape) == 1:
                    values = torch.ones(size)
                else:
                    values = torch.randn(size, generator=generator) * (_TABLE_STD if is_table else _STD)
                stream.write(values.to(torch.bfloat16).view(torch.uint8).numpy().data)


def write_documents(folder: Path, vocab_size: int, num_tokens: int) -> None:
    """Prepared data of random tokens, of which every document is as long as a row."""
    chosen, documents = random.Random(0), DocumentColumns()
    for _ in range(_DOCUMENTS):
        ids = array.array("i", (chosen.randrange(1, vocab_size) for _ in range(num_tokens)))
        documents.add(ids, b"\1" * num_tokens, num_tokens - 1)
    with PreparedFolder(folder, with_evaluation=False) as prepared:
        prepared.train.add(documents)
        prepared.publish({"kind": str(DataKind.TEXT)})


def spec_of(shape: Shape, *, num_tokens: int, num_steps: int, checkpoint_every: int) -> JobSpec:
    """A job with steps of that many tokens, no clipping, computed in bf16."""
    train = {
        "max_steps": num_steps,
        "tokens_per_step": num_tokens,
        "sequence_length": num_tokens,
        "max_grad_norm": None,
        "compute_dtype": "bfloat16",
        "compile": "off",
        "warmup_steps": 0,
        "optimizer_states": shape.states,
    }
    job = {"name": "giant", "model": "giant", "dataset": "rows", "device": "host", "train": train}
    memory = {"tier": "drive", "accept_wear": True} if shape.has_drive else {}
    checkpoint = {"every_steps": checkpoint_every, "every_minutes": 0}
    return parse_job_spec({**job, "memory": memory, "checkpoint": checkpoint})


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all lives of a model have in common."""

    folder: Path
    spec: JobSpec
    plan: Plan
    layout: StoreLayout


@dataclass(frozen=True, kw_only=True)
class Life:
    """What a worker has reported and taken: the step that it began after, those that it did, and the bytes of its
    peak."""

    began_after: int
    steps: Mapping[int, StepDone]
    peak_bytes: int


@contextmanager
def lent(job: Job) -> Iterator[dict[str, int]]:
    """The memory and the files of a job, as a daemon lends them."""
    folders = job.plan.execution.drives.folders
    with lent_memory(job.plan.plane_bytes) as memory, lent_files(folders, job.plan.drive_file_bytes) as files:
        yield memory | files


def live(job: Job, planes: Mapping[str, int], name: str, *, until: int, attempt: int = 1, **changes: Any) -> Life:
    """Start a worker, wait until it has done a step and its updates, and kill it."""
    place = job.folder / name
    place.mkdir()
    request = WorkerRequest(
        job_id="job_1",
        attempt=attempt,
        spec=job.spec,
        plan=job.plan,
        model=job.folder / "model",
        prepared=job.folder / "prepared",
        checkpoints=job.folder / "checkpoints",
        planes=dict(planes),
        **changes,
    )
    (place / REST_FILE).write_text(json.dumps(until), "utf-8")
    (place / REQUEST_FILE).write_text(json.dumps(to_plain(request)), "utf-8")
    command = [sys.executable, "-m", "bench.giant_worker", str(place / REQUEST_FILE)]
    in_memory = request.resume_from_memory
    generations, deadline_s = Generations(job.layout, planes[GENERATIONS]), time.monotonic() + _LONGEST_S
    with (place / LOG_FILE).open("wb") as log:
        worker = subprocess.Popen(
            command, pass_fds=tuple(planes.values()), env=child_environment(), stdout=log, stderr=log
        )
    try:
        while True:
            # Its last updates are under way when it reports.
            generation, life = generations.generation, _read(place / JOURNAL_FILE, worker.pid)
            # Generations are counted from what was loaded.
            if until in life.steps and generation == until - (0 if in_memory else life.began_after):
                return life
            if worker.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"the worker did not reach step {until}:\n{(place / LOG_FILE).read_text('utf-8')}")
            time.sleep(_POLL_S)
    finally:
        worker.send_signal(signal.SIGKILL)
        worker.wait()


def _read(journal: Path, pid: int) -> Life:
    lines = journal.read_bytes().splitlines(keepends=True) if journal.exists() else []
    events = [decode_line(line) for line in lines if line.endswith(b"\n")]
    if failures := [event.error for event in events if isinstance(event, Failure)]:
        raise failures[0]
    return Life(
        began_after=max((event.step for event in events if isinstance(event, AttemptReady)), default=-1),
        steps={event.step: event for event in events if isinstance(event, StepDone)},
        peak_bytes=_peak_bytes(pid),
    )


def _peak_bytes(pid: int) -> int:
    """The most that a process had resident; 0 where it has ended."""
    status = Path(f"/proc/{pid}/status").read_text("ascii")
    return int(status.split("VmHWM:")[1].split()[0]) * 1024 if "VmHWM:" in status else 0


def digest(job: Job, planes: Mapping[str, int]) -> str:
    """Of the weights and states in memory, and of the checksums of what is on drives."""
    found = hashlib.sha256()
    for name, num_bytes in sorted(job.plan.plane_bytes.items()):
        if name != GENERATIONS:
            # Not by a mapping: looking at what nobody wrote would take memory for it.
            for start in range(0, num_bytes, _HASHED_BYTES):
                found.update(os.pread(planes[name], _HASHED_BYTES, start))
    return found.hexdigest()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of one model: its steps without a break, the peak of any life, and what each way of being continued left: whether
    its bytes are those of the steps without a break."""

    life: Life
    peak_bytes: int
    is_same: Mapping[str, bool]


def rehearse(job: Job, *, num_steps: int, saved_step: int) -> Outcome:
    """Train without a break, then with a worker that is killed after a step, and from the checkpoint of `saved_step`;
    0 leaves that out."""
    peaks, is_same = [], {}
    with lent(job) as planes:
        whole = live(job, planes, "whole", until=num_steps)
        # The rest takes as long again.
        print(f"{num_steps} steps without a break: {_texts(whole)}", file=sys.stderr, flush=True)
        wanted = digest(job, planes)
    peaks.append(whole.peak_bytes)
    unsaved = dataclasses.replace(job, spec=_saving(job.spec, 0))
    with lent(job) as planes:
        first = live(unsaved, planes, "killed", until=1)
        second = live(unsaved, planes, "continued", until=num_steps, attempt=2, resume_from_memory=True)
        peaks += [first.peak_bytes, second.peak_bytes]
        is_same["killed after step 1, continued in the same memory"] = (
            second.began_after == 1 and digest(job, planes) == wanted
        )
    if saved_step:
        checkpoint = CheckpointFolder(job.folder / "checkpoints", "job_1").of_step(saved_step)
        with lent(job) as planes:
            third = live(unsaved, planes, "resumed", until=num_steps, attempt=3, resume_from=checkpoint)
            peaks.append(third.peak_bytes)
            is_same[f"from the checkpoint of step {saved_step}"] = (
                third.began_after == saved_step and digest(job, planes) == wanted
            )
    return Outcome(life=whole, peak_bytes=max(peaks), is_same=is_same)


def _texts(life: Life) -> str:
    losses = ", ".join(f"loss {step.loss:.4f} in {step.duration_s:.1f} s" for step in life.steps.values())
    return f"{losses}; peak {life.peak_bytes / _GIB:.2f} GiB"


def table(name: str, job: Job, outcome: Outcome, vocab_size: int) -> list[str]:
    """Steps and memory, as lines of Markdown."""
    plan, expected = job.plan, math.log(vocab_size)
    lines = [
        f"`{name}`: {plan.num_parameters / 1e9:.2f} * 10^9 parameters, {job.spec.train.optimizer_states} states, "
        + ("no drive" if plan.drives is None else f"on drives the {plan.drives.text}"),
        "",
        "| step | loss | of ln(vocabulary) | s | tokens/s |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {step.step} | {step.loss:.3f} | {step.loss / expected:.4f} | {step.duration_s:.1f} "
        f"| {step.num_tokens / step.duration_s:.1f} |"
        for step in outcome.life.steps.values()
    ]
    planned, measured = plan.host_total_bytes, outcome.peak_bytes
    lines += [
        "",
        "| planned peak | measured peak | planned / measured |" + "".join(f" {way} |" for way in outcome.is_same),
        "| --- | --- | --- |" + " --- |" * len(outcome.is_same),
        f"| {planned / _GIB:.2f} GiB | {measured / _GIB:.2f} GiB | {planned / measured:.3f} |"
        + "".join(f" {'same bytes' if same else '**other bytes**'} |" for same in outcome.is_same.values()),
    ]
    return lines


def prepare(folder: Path, shape: Shape, drives: Sequence[Path], *, num_tokens: int, saved_step: int) -> Job:
    """Write a model, where it is not there yet, and its data, and plan the job."""
    model = folder / "model"
    if not model.exists():
        write_model_outline(shape.config, model)
        write_weights(model)
    if not (folder / "prepared").exists():
        write_documents(folder / "prepared", shape.config["vocab_size"], num_tokens)
    # One more than are done: the job is never at its end, which would write a checkpoint.
    spec = spec_of(shape, num_tokens=num_tokens, num_steps=_DOCUMENTS, checkpoint_every=saved_step)
    limit_bytes = int(shape.memory_gib * _GIB)
    memory = HostMemory(limit_bytes=limit_bytes, available_bytes=limit_bytes)
    planner = Planner(
        load_settings(host_memory_reserve_bytes=0, numa_interleave=False),
        memory=lambda: memory,
        num_threads=available_cpus(),
        drives=drives_of([measure(drive) for drive in drives], None),
    )
    layout = open_for_training(model, spec.train).layout
    return Job(folder=folder, spec=spec, plan=planner.plan_to_start(spec, model), layout=layout)


def _saving(spec: JobSpec, every_steps: int) -> JobSpec:
    checkpoint = spec.checkpoint.model_copy(update={"every_steps": every_steps})
    return spec.model_copy(update={"checkpoint": checkpoint})


def main() -> int:
    """Train, and print two tables; 1 where the plan does not fit, or a resumed run has other bytes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("--drive", type=Path, action="append", default=[], help="a folder on a drive; may be repeated")
    parser.add_argument("--states", choices=["exact", "compressed"], help="of the optimizer (default: as the shape's)")
    parser.add_argument("--memory", type=float, help="GiB that the plan may take (default: as the shape's)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a step (default %(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="steps to do (default %(default)s)")
    parser.add_argument("--saved", type=int, default=0, help="step to write a checkpoint after, and to resume from")
    parser.add_argument("--folder", type=Path, help="where model and checkpoints are, and stay; default: temporary")
    parser.add_argument("--plan", action="store_true", help="write the model and print the plan alone")
    asked = parser.parse_args()
    shape = SHAPES[asked.shape]
    shape = dataclasses.replace(
        shape,
        states=asked.states or shape.states,
        memory_gib=asked.memory or shape.memory_gib,
        has_drive=bool(asked.drive),
    )
    with ExitStack() as stack:
        folder = asked.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(exist_ok=True)
        job = prepare(folder, shape, asked.drive, num_tokens=asked.tokens, saved_step=asked.saved)
        if asked.plan or not job.plan.fits:
            print(job.plan.message or job.plan.summary)
            return int(not job.plan.fits)
        outcome = rehearse(job, num_steps=asked.steps, saved_step=asked.saved)
    print("\n".join(table(asked.shape, job, outcome, shape.config["vocab_size"])))
    return int(not all(outcome.is_same.values()))


if __name__ == "__main__":
    sys.exit(main())
