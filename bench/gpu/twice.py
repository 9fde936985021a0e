"""Stage: the same steps twice from the same weights, and whether they give the same bits."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import torch

from bench.gpu.engine import job_trainer, set_up
from bench.gpu.report import Report
from bench.gpu.shapes import SIZES, Engine
from bench.gpu.steps import Model, choose_model, forget, opened, rows_for
from bench.gpu.task import Task
from horizon_server.engine.micro_batch import MicroBatch
from horizon_server.store.host_store import HostStore

_ENGINES: tuple[tuple[Engine, bool], ...] = (("job", False), ("eager", False), ("job", True))
"""And whether the job is deterministic."""
_NUM_STEPS = 2
_MOMENTS = ("lo", "exp_avg", "exp_avg_sq")
_CHUNK = 1 << 20
_EXPECTED = {"cuda": "no: attention's backward adds in order of arrival", "host": "yes"}


@dataclass(frozen=True, kw_only=True)
class _Run:
    losses: list[float]
    norms: list[float]
    weights: str
    num_compiled: int


def run(task: Task, report: Report) -> None:
    """A row for each engine: packed rows joined into micro-batches, compiled layers and eager ones, and a deterministic
    job."""
    sizes, clock, model = SIZES[task.device], task.clock(), choose_model(task)
    rows = rows_for(model.template.vocab_size, kind="packed", tokens=sizes.twice_tokens, row_tokens=sizes.row_tokens)
    report.table(
        f"{_NUM_STEPS} steps, twice from the same weights: the same bits?",
        {
            "engine": "",
            "compiled": "",
            "tokens": ",d",
            "first loss": "",
            "all losses": "",
            "gradient norms": "",
            "weights and moments": "",
            "expected of weights": "",
            "loss": ".6f",
            "note": "",
        },
    )
    last_s = 0.0
    for engine, deterministic in _ENGINES:
        cells = {
            "engine": f"{engine}, deterministic" if deterministic else engine,
            "tokens": sizes.twice_tokens,
            "expected_of_weights": "yes" if deterministic else _EXPECTED[model.kind],
        }
        before_s = clock.left_s
        if not clock.allows(last_s):
            report.row(**cells, note="no time left")
            continue
        try:
            one, other = (_run(task, model, rows, engine, deterministic) for _ in range(2))
        except Exception as error:  # noqa: BLE001 the other engine may still run.
            report.row(**cells, note=f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}")
            continue
        last_s = before_s - clock.left_s
        report.row(
            **cells,
            compiled=f"{one.num_compiled} of {model.template.num_layers}",
            first_loss=_same(one.losses[0] == other.losses[0]),
            all_losses=_same(one.losses == other.losses),
            gradient_norms=_same(one.norms == other.norms),
            weights_and_moments=_same(one.weights == other.weights),
            loss=one.losses[-1],
            losses=[one.losses, other.losses],
            norms=[one.norms, other.norms],
        )


def _run(task: Task, model: Model, rows: list[MicroBatch], engine: Engine, deterministic: bool) -> _Run:
    found = set_up(task, model, rows, engine)
    found = replace(found, recipe=replace(found.recipe, deterministic=deterministic))
    with opened(task, model) as (store, device):
        for plane in _MOMENTS:
            store.plane(plane).zero_()
        forget(model.kind)
        trainer = job_trainer(model, store, device, found)
        try:
            steps = [trainer.train_step(rows) for _ in range(_NUM_STEPS)]
            trainer.flush()
        finally:
            trainer.close()
        return _Run(
            losses=[step.loss for step in steps],
            norms=[step.grad_norm for step in steps],
            weights=_digest(store),
            num_compiled=found.layers.num_layers,
        )


def _digest(store: HostStore) -> str:
    """Of sums of pieces, which a hundred gigabytes take a second for; two runs that differ have other sums."""
    digest = hashlib.sha256()
    for name in ("hi", *_MOMENTS):
        words = store.plane(name).view(torch.int32)
        for start in range(0, len(words), _CHUNK):
            part = words[start : start + _CHUNK]
            digest.update(int(part.sum(dtype=torch.int64)).to_bytes(8, "little", signed=True))
    return digest.hexdigest()


def _same(is_same: bool) -> str:
    return "same" if is_same else "differ"
