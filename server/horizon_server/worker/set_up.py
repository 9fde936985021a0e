"""What an attempt works with, opened and laid out before the device is used: model, store and device, and where it has
data of its own, that with the order of its steps."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from horizon_server.children.entry import EventWriter
from horizon_server.engine.data import PreparedDataset, StepPlan
from horizon_server.engine.device import device_for
from horizon_server.engine.device.protocol import Device
from horizon_server.engine.device.timeline import Trace
from horizon_server.engine.divided_store import DividedStore, Division
from horizon_server.engine.template import Template
from horizon_server.errors import InvalidSpec
from horizon_server.events import Message
from horizon_server.planning.model_folder import ModelFolder
from horizon_server.planning.trainable import open_for_training
from horizon_server.records.execution import Execution
from horizon_server.spec import TrainSpec
from horizon_server.store import base_plane, numa
from horizon_server.store.base_plane import BasePlane
from horizon_server.store.checkpoint import AdapterExport
from horizon_server.store.host_store import HostStore, PlacePlane
from horizon_server.store.layout import StoreLayout
from horizon_server.store.ownership import Ownership
from horizon_server.worker import continuation
from horizon_server.worker.adapter_export import adapter_export
from horizon_server.worker.objective import MethodData
from horizon_server.worker_link.request import WorkerRequest


@dataclass(frozen=True, kw_only=True)
class SetUp:
    """Made by `open`, and closed once. Thread: the caller's."""

    request: WorkerRequest
    folder: ModelFolder
    """Its layout is the daemon's, who sized the planes by it: where the model class differs, the tensor is named."""
    template: Template
    adapter: AdapterExport | None
    """How the adapters of the job are written; None where it trains none."""
    store: HostStore
    """On the planes that the daemon lends; nothing is loaded yet."""
    device: Device
    trace: Trace | None

    @classmethod
    def open(cls, request: WorkerRequest, events: EventWriter) -> SetUp:
        """Open everything. Raises InvalidSpec or InvalidModel: the job does not go with the model."""
        train, execution = request.spec.train, request.plan.execution
        folder, template = template_of(request)
        # The daemon checks what config.json says; the model's class may bring a limit that config.json leaves out.
        longest = template.max_document_tokens
        if longest is not None and train.sequence_length > longest:
            problem = f"train.sequence_length is {train.sequence_length}; the model allows at most {longest} positions"
            raise InvalidSpec.of("train.sequence_length", problem)
        adapter = adapter_export(request, template)
        homes = Homes(execution, template.layout)
        # Before the planes are touched: pages are taken where the policy of the touching thread says.
        if execution.numa_interleave and (refusal := numa.interleave()):
            events.send(Message(level="warning", text=refusal))
        store = attached_store(request, template, place=homes.place)
        if homes.refusal:
            events.send(Message(level="warning", text=homes.refusal))
        homes.run_rank(0)
        trace = Trace() if request.trace else None
        return cls(
            request=request,
            folder=folder,
            template=template,
            adapter=adapter,
            store=store,
            device=device_for(
                execution.device_kind,
                compute_dtype=execution.compute_dtype,
                limit_bytes=execution.device_limit_bytes,
                num_threads=execution.num_threads,
                trace=trace,
                gpu=gpu_of_rank(execution, 0),
            ),
            trace=trace,
        )

    def load(self, *, resume_from: Path | None, from_memory: bool) -> continuation.Continuation:
        """Fill the store: from what a killed worker left in it, a checkpoint, or the model."""
        found = continuation.load(
            self.store,
            model=self.request.model,
            seed=self.request.spec.train.seed,
            adapter=self.request.adapter,
            base_sha256=None if self.adapter is None else self.adapter.base_sha256,
            resume_from=resume_from,
            from_memory=from_memory,
        )
        self.store.start_training(self.request.plan.execution.num_ranks)
        return found

    def close(self) -> None:
        """Free everything; the planes' memory stays with the daemon. Writes the trace, where one was asked for."""
        # Each even where one before it fails: the device's copies use the store.
        with ExitStack() as parts:
            if self.trace is not None and self.request.trace is not None:
                parts.callback(self.trace.write, self.request.trace)
            parts.callback(self.store.close)
            parts.callback(self.device.close)


class TrainingData:
    """The data of a job and the order of its steps. Thread: the caller's."""

    def __init__(self, request: WorkerRequest) -> None:
        """Open the data. Raises InvalidSpec: the method does not learn from data of its kind."""
        assert request.prepared is not None, "a session has no data"
        self.of_method = MethodData(request.prepared, request.spec)
        self._request, self._prepared = request, request.prepared

    @property
    def dataset(self) -> PreparedDataset:
        """Its documents."""
        return self.of_method.dataset

    def plan(self, template: Template) -> StepPlan:
        """Return which documents are in which step; rows that turn out not to pack are split by the trainer."""
        train = self._request.spec.train
        return make_step_plan(
            self.dataset,
            train,
            template,
            packing=train.packing != "false",
            seed=train.seed,
            epochs=train.epochs,
            max_steps=train.max_steps,
        )

    def identity(self, plan: StepPlan, packing_limit: int | None) -> dict[str, Any]:
        """Return what must be the same for a resumed run to see the same batches; `packing_limit` is the template's.
        Reads all tokens, where nobody has their digest yet."""
        train = self._request.spec.train
        limit = packing_limit if train.packing != "false" else None
        return {
            # For people. What must be the same is the content.
            "prepared": self._prepared.name,
            "tokens": self._request.tokens_digest(self._prepared),
            "rows": plan.digest(),
            "num_steps": plan.num_steps,
            "seed": train.seed,
            # None where no row is long enough to reach it.
            "packing_limit": limit if limit is not None and limit < train.sequence_length else None,
        }


def template_of(request: WorkerRequest) -> tuple[ModelFolder, Template]:
    """Return the model's folder, laid out for the job, and its template."""
    folder = open_for_training(request.model, request.spec.train)
    return folder, Template.from_folder(folder.path, layout=folder.layout, recipe=request.spec.train.recipe)


class Homes:
    """The NUMA nodes of an attempt's ranks; none where the daemon was started with a memory policy, which is kept.
    `refusal` says why the kernel does not place memory."""

    def __init__(self, execution: Execution, layout: StoreLayout) -> None:
        """Before this process sets a policy of its own."""
        self.nodes = () if numa.has_policy() else execution.numa_nodes
        self._ownership = Ownership.of(layout, execution)
        self.refusal = ""

    def place(self, name: str, plane: torch.Tensor) -> None:
        """Have what each rank owns of a plane that nothing has touched yet taken from its node."""
        # Packed weights are divided nowhere: every rank reads all of them.
        for rank, node in enumerate(self.nodes if name != "packed" else ()):
            for part in self._ownership.parts_in(name, rank):
                memory = plane[part]
                self.refusal = self.refusal or numa.prefer(memory.data_ptr(), memory.nbytes, node)

    def run_rank(self, rank: int) -> None:
        """Keep the threads that this process starts later next to the rank's GPU."""
        if self.nodes:
            numa.run_on(self.nodes[rank])


def attached_store(
    request: WorkerRequest, template: Template, *, rank: int = 0, place: PlacePlane | None = None
) -> HostStore:
    """Return the store on the planes that the daemon lends; on several nodes, this node's part of it."""
    execution = request.plan.execution
    grad_dtype = {0: None, 2: torch.bfloat16, 4: torch.float32}[execution.grad_bytes]
    if execution.num_nodes > 1:
        node, place_on_node = divmod(rank, execution.ranks_per_node)
        return DividedStore(
            template.layout,
            request.planes,
            division=Division(
                ownership=Ownership.of(template.layout, execution),
                num_nodes=execution.num_nodes,
            ),
            node=node,
            grad_dtype=grad_dtype,
            rank=place_on_node,
            max_ranks=execution.lanes,
            place=place,
        )
    base, shared = None, request.plan.base
    if shared is not None:
        base = BasePlane(template.layout, request.planes[base_plane.PLANE], key=shared.key)
    return HostStore.attach(
        template.layout,
        request.planes,
        grad_dtype=grad_dtype,
        rank=rank,
        max_ranks=execution.lanes,
        place=place,
        base=base,
        drives=execution.drives,
    )


def gpu_of_rank(execution: Execution, rank: int) -> str:
    """Return the UUID of a rank's GPU; empty where there are none, or it is the first that torch finds."""
    return execution.gpu.split(",")[rank] if execution.gpu else ""


def make_step_plan(dataset: PreparedDataset, train: TrainSpec, template: Template, **how: Any) -> StepPlan:
    """Return the plan of a dataset in the rows and steps of a job; `how` are further arguments of the plan."""
    return StepPlan(
        dataset,
        sequence_length=train.sequence_length,
        tokens_per_step=train.tokens_per_step,
        packing_limit=template.packing_limit,
        group_size=dataset.group_size,
        **how,
    )
