"""Ranks of one job in threads of one process: as many trainers on one store, joined by gloo as processes would be.

Random numbers come from torch's one generator, which threads share: what draws any needs processes
(`tests/support/rank_processes.py`).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from tests.support.plans import settings
from tests.support.tiny_models import Engine, TinyModel
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.device.protocol import Work
from horizon_server.engine.micro_batch import MicroBatch
from horizon_server.engine.ranks import ALONE, GROUPS, Ranks, groups_of_nodes
from horizon_server.engine.template import Template
from horizon_server.engine.trainer import Trainer
from horizon_server.figures import CollectiveKind, DeviceFigures, StepFigures
from horizon_server.records.execution import Parallel
from horizon_server.store.generations import PLANE, plane_bytes
from horizon_server.store.host_store import HostStore
from horizon_server.store.layout import PLANE_BYTES, StoreLayout
from horizon_server.store.ownership import Ownership
from horizon_server.store.planes import create_memory_file

_PATIENCE = timedelta(seconds=30)
LANES = 8
# Fourteen documents, so that some lanes have two and none is cut.
LENGTHS = [(9, 14, 5), (21,), (7, 3, 12), (16, 4), (11, 8), (6, 19, 10)]
STEP: dict[str, Any] = {"micro_batch_tokens": 24, "tokens_per_step": 160, "weight_decay": 0.1}

Steps = Sequence[Sequence[MicroBatch]]
Result = TypeVar("Result")


def group_of(store: Store, name: str, rank: int, num_ranks: int) -> dist.ProcessGroup:
    """A gloo group of its own, which a process may have several ranks of."""
    own = PrefixStore(name, store)
    backend = dist.ProcessGroup.BackendType.GLOO
    group = dist.ProcessGroup(own, rank, num_ranks)
    group._set_default_backend(backend)
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
    options._timeout = _PATIENCE
    group._register_backend(torch.device("cpu"), backend, dist.ProcessGroupGloo(own, rank, num_ranks, options))
    return group


def in_ranks(
    num_ranks: int,
    work: Callable[[Ranks], Result],
    *,
    parallel: Parallel = "rows",
    layer_ranks: tuple[int, ...] = (),
    gathers: bool = False,
    kind: type[Ranks] = Ranks,
    num_nodes: int = 1,
) -> Result:
    """Run `work` in a thread for each rank; returns the first one's result. Raises the first error."""
    store, results, errors = HashStore(), dict[int, Result](), list[BaseException]()
    shared_fd = create_memory_file("ranks", 0)

    def run(rank: int) -> None:
        try:
            torch.set_num_threads(1)
            groups = {name: group_of(store, name, rank, num_ranks) for name in GROUPS}
            for name, members in groups_of_nodes(num_ranks, num_nodes):
                if rank in members:
                    groups[name] = group_of(store, f"{name} {members}", members.index(rank), len(members))
            how: dict[str, Any] = {"parallel": parallel, "layer_ranks": layer_ranks, "gathers": gathers}
            results[rank] = work(kind(rank, num_ranks, groups, shared_fd=shared_fd, num_nodes=num_nodes, **how))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(45)
        if errors:
            raise errors[0]
        assert not thread.is_alive(), "a rank hangs"
    os.close(shared_fd)
    return results[0]


class SharedStore:
    """The memory of one store, which several ranks attach to."""

    def __init__(self, model: TinyModel, *, max_ranks: int = 8, grad_dtype: torch.dtype | None = torch.float32) -> None:
        self.model, self._max_ranks, self._grad_dtype = model, max_ranks, grad_dtype
        self._first = model.store(grad_dtype=grad_dtype)
        size_bytes = plane_bytes(model.template.layout, max_ranks=max_ranks)
        self._fds = {**self._first.fds, PLANE: create_memory_file(PLANE, size_bytes)}
        self.attach(0).generations.reset()

    def attach(self, rank: int) -> HostStore:
        return HostStore.attach(
            self.model.template.layout, self._fds, grad_dtype=self._grad_dtype, rank=rank, max_ranks=self._max_ranks
        )

    def bits(self) -> dict[str, bytes]:
        """Weights and moments."""
        return {name: self._first.plane(name).view(torch.uint8).numpy().tobytes() for name in self.planes}

    @property
    def planes(self) -> list[str]:
        """Those of weights and moments."""
        return [name for name in PLANE_BYTES if name in self._first.fds]


class StoresOfNodes:
    """The memory of two machines: the first half of the ranks attach to one store, the others to another, and in both
    what the ranks of the other own is spoilt."""

    def __init__(self, model: TinyModel, num_ranks: int, **how: Any) -> None:
        self.model, self._num_ranks = model, num_ranks
        self._stores = [SharedStore(model, **how) for _ in range(2)]
        self._ownership = Ownership(layout=model.template.layout, num_ranks=num_ranks)
        for index, store in enumerate(self._stores):
            here = store.attach(0)
            here.generations.share(num_ranks)
            others = [rank for rank in range(num_ranks) if 2 * rank // num_ranks != index]
            for name in store.planes:
                plane = here.plane(name)
                for part in (part for rank in others for part in self._ownership.parts_in(name, rank)):
                    plane[part] = torch.nan if plane.is_floating_point() else 99

    def attach(self, rank: int) -> HostStore:
        return self._stores[2 * rank // self._num_ranks].attach(rank)

    def bits(self) -> dict[str, bytes]:
        """Weights and moments, of each part what its owner has."""
        found = {}
        for name in self._stores[0].planes:
            plane = self.attach(0).plane(name).clone()
            for rank in range(self._num_ranks):
                for part in self._ownership.parts_in(name, rank):
                    plane[part] = self.attach(rank).plane(name)[part]
            found[name] = plane.view(torch.uint8).numpy().tobytes()
        return found


class UnevenDevice(HostDevice):
    """Says of its compute that each micro-batch of the first layer took a given time, whatever it took."""

    def __init__(self, seconds: float) -> None:
        super().__init__(num_threads=1)
        self._seconds, self._num_done, submit = seconds, 0, self.compute.submit

        def counted(
            work: Work, *, num_bytes: int = 0, label: str = "", collective: CollectiveKind | None = None
        ) -> None:
            self._num_done += label == "forward 1"
            submit(work, num_bytes=num_bytes, label=label, collective=collective)

        self.compute.submit = counted  # type: ignore[method-assign]

    def take_use(self) -> DeviceFigures:
        done, self._num_done = self._num_done, 0
        return dataclasses.replace(super().take_use(), compute_s=done * self._seconds)


_TEMPLATES: dict[tuple[str, StoreLayout, int], Template] = {}


def template_of_rank(model: TinyModel, rank: int) -> Template:
    """A template of its own, because threads must not share modules."""
    if rank == 0:
        return model.template
    key = model.config.to_json_string(use_diff=False), model.template.layout, rank
    if key not in _TEMPLATES:
        _TEMPLATES[key] = Template.from_config(copy.deepcopy(model.config), layout=model.template.layout)
    return _TEMPLATES[key]


def trained(
    shared: SharedStore | StoresOfNodes,
    work: Callable[[Trainer], Result],
    *,
    num_ranks: int,
    lanes: int,
    gathers: bool = False,
    num_steps: int = 10,
    make_device: Callable[[int], HostDevice] | None = None,
    kind: type[Ranks] = Ranks,
    **how: Any,
) -> Result:
    """What `work` returns that is given the first rank's trainer, on `num_ranks` ranks of a kind."""
    recipe, execution = settings(lanes=lanes, num_ranks=num_ranks, **how)
    shared.attach(0).generations.share(num_ranks)
    # Here and not in their threads: a template tries its model out, with switches that are the whole process's.
    templates = [template_of_rank(shared.model, rank) for rank in range(num_ranks)]

    def one(ranks: Ranks) -> Result | None:
        with made(ranks) as trainer:
            if ranks.leads:
                return work(trainer)
            trainer.follow()
            return None

    @contextlib.contextmanager
    def made(ranks: Ranks) -> Iterator[Trainer]:
        device = HostDevice(num_threads=1) if make_device is None else make_device(ranks.rank)
        trainer = Trainer(
            templates[ranks.rank],
            shared.attach(ranks.rank),
            device,
            recipe,
            execution,
            num_steps=num_steps,
            ranks=ranks,
        )
        try:
            yield trainer
            if ranks.leads:
                trainer.close()
        finally:
            device.close()

    divided: dict[str, Any] = {"parallel": execution.parallel, "layer_ranks": execution.layer_ranks}
    result = one(ALONE) if num_ranks == 1 else in_ranks(num_ranks, one, gathers=gathers, kind=kind, **divided)
    assert result is not None
    return result


def rows_of(engine: Engine, *, num_steps: int = 3) -> Steps:
    return [
        [engine.pack(engine.documents(*lengths, seed=10 * step + index)) for index, lengths in enumerate(LENGTHS)]
        for step in range(num_steps)
    ]


def numbers_of(figures: StepFigures) -> tuple[Any, ...]:
    return figures.loss, figures.grad_norm, figures.skipped, figures.noise_scale_tokens, figures.method_figures


def whole_life(rows: Steps) -> Callable[[Trainer], list[Any]]:
    """Steps, an evaluation and log-probabilities."""

    def work(trainer: Trainer) -> list[Any]:
        figures = [trainer.train_step(step) for step in rows]
        evaluated, logprobs = trainer.evaluate(rows[0]), trainer.log_probabilities(rows[1])
        trainer.flush()
        numbers = [values.numpy().tobytes() for values in logprobs]
        return [*map(numbers_of, figures), (evaluated.eval_loss, evaluated.num_correct), numbers]

    return work


def results(
    model: TinyModel,
    work: Callable[[Trainer], Any],
    *,
    ranks: Sequence[int],
    grad_dtype: torch.dtype | None = torch.float32,
    **how: Any,
) -> list[Any]:
    """What the work says and leaves in the store, for each number of ranks."""
    found = []
    for num_ranks in ranks:
        shared = SharedStore(model, grad_dtype=grad_dtype)
        said = trained(shared, work, num_ranks=num_ranks, **{"lanes": LANES, **STEP, **how})
        found.append((said, shared.bits()))
    return found
