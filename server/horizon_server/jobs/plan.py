"""The memory plan of a job: the store's own arithmetic over safetensors headers, held against this node's limits. Loads no torch."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from horizon_server.errors import InvalidSpec
from horizon_server.jobs.job import JobPlan
from horizon_server.jobs.node import HostMemory
from horizon_server.spec import JobSpec
from horizon_server.store.layout import (
    StoreLayout,
    plane_sizes,
)
from horizon_server.store.ledger import MemoryPlan, ModelShape, plan_memory
from horizon_server.store.model_folder import open_model_folder
from horizon_server.store.planes import create_memory_file

GRAD_DTYPE_BYTES = 4
"""The host device accumulates and keeps gradients in fp32."""


@dataclass(frozen=True, kw_only=True)
class WorkerMemory:
    """The plan of one attempt and the sizes of the planes that the daemon lends its worker."""

    plan: JobPlan
    plane_bytes: dict[str, int]
    grad_dtype_bytes: int

    @contextmanager
    def lent(self) -> Iterator[dict[str, int]]:
        """Create the planes as anonymous memory files and give them back at the end: plane -> descriptor.

        They belong to the daemon: a worker that dies leaves them whole.
        """
        descriptors: dict[str, int] = {}
        try:
            for plane, size_bytes in self.plane_bytes.items():
                descriptors[plane] = create_memory_file(plane, size_bytes)
            yield descriptors
        finally:
            for descriptor in descriptors.values():
                os.close(descriptor)


class Planner:
    """Plans jobs against the limits of this node."""

    def __init__(
        self,
        *,
        memory: Callable[[], HostMemory],
        limit_bytes: int | None,
        reserve_bytes: int,
        arena_limit_bytes: int,
        num_threads: int,
    ) -> None:
        self._memory = memory
        self._limit_bytes = limit_bytes
        self._reserve_bytes = reserve_bytes
        self._arena_limit_bytes = arena_limit_bytes
        self._num_threads = num_threads

    def plan(self, spec: JobSpec, folder: Path) -> JobPlan:
        """Return the ledger of the job against the node's limit, whatever else is running.

        Raises:
            InvalidModel: when the folder's config or safetensors cannot be read.
            InvalidSpec: when the spec asks for what the model or this node cannot do.
        """
        return self._against(self._limit(), spec, folder)[0]

    def worker_memory(self, spec: JobSpec, folder: Path) -> WorkerMemory:
        """Return the ledger against what is free now, with the planes to lend."""
        free = max(0, self._memory().available_bytes - self._reserve_bytes)
        plan, layout = self._against(min(self._limit(), free), spec, folder)
        return WorkerMemory(
            plan=plan,
            plane_bytes=dict(plane_sizes(layout, grad_dtype_bytes=GRAD_DTYPE_BYTES)),
            grad_dtype_bytes=GRAD_DTYPE_BYTES,
        )

    def _limit(self) -> int:
        machine = self._memory().limit_bytes
        limit = machine if self._limit_bytes is None else min(machine, self._limit_bytes)
        return max(0, limit - self._reserve_bytes)

    def _against(self, limit_bytes: int, spec: JobSpec, folder: Path) -> tuple[JobPlan, StoreLayout]:
        if spec.device == "cuda":
            raise InvalidSpec("device: cuda is not available in this version; use device: host or auto")
        found = open_model_folder(folder)
        model, layout = found.shape, found.layout
        if spec.train.sequence_length > model.max_position_embeddings:
            longest = model.max_position_embeddings
            raise InvalidSpec(
                f"train.sequence_length is {spec.train.sequence_length}; the model allows at most {longest} positions"
            )
        ledger = self._ledger(spec, model, layout)
        plan = JobPlan(
            host_bytes=dict(ledger.host),
            device_bytes=dict(ledger.device),
            host_limit_bytes=limit_bytes,
            device_limit_bytes=self._arena_limit_bytes,
            num_parameters=layout.num_parameters,
            device="host",
            message=self._complaint(spec, model, layout, ledger, limit_bytes),
        )
        return plan, layout

    def _ledger(self, spec: JobSpec, model: ModelShape, layout: StoreLayout) -> MemoryPlan:
        return plan_memory(
            layout,
            model=model,
            tokens_per_step=spec.train.tokens_per_step,
            sequence_length=spec.train.sequence_length,
            device_kind="host",
            grad_bytes=GRAD_DTYPE_BYTES,
            num_threads=self._num_threads,
        )

    def _complaint(
        self, spec: JobSpec, model: ModelShape, layout: StoreLayout, ledger: MemoryPlan, limit_bytes: int
    ) -> str:
        """Say in one sentence why it does not fit, with the numbers and the smallest change that would make it fit; or nothing."""
        need, arena = sum(ledger.host.values()), sum(ledger.device.values())
        if need <= limit_bytes and arena <= self._arena_limit_bytes:
            return ""
        if need > limit_bytes:
            short = f"the job needs {_gib(need)} GiB of host memory and {_gib(limit_bytes)} GiB are available"
        else:
            short = f"the job needs {_gib(arena)} GiB on the device and {_gib(self._arena_limit_bytes)} GiB are allowed"
        store = sum(ledger.host.get(part, 0) for part in ("weights", "moments", "gradients"))
        if store > limit_bytes:
            billions = layout.num_parameters / 1e9
            return f"{short}; {_gib(store)} GiB of it hold the {billions:.2f} B parameters and their moments: only a smaller model fits"
        return f"{short}; {self._advice(spec, model, layout, limit_bytes)}"

    def _advice(self, spec: JobSpec, model: ModelShape, layout: StoreLayout, limit_bytes: int) -> str:
        tokens = spec.train.tokens_per_step
        while tokens > 8:
            tokens //= 2
            length = min(spec.train.sequence_length, tokens)
            train = dataclasses.replace(spec.train, tokens_per_step=tokens, sequence_length=length)
            ledger = self._ledger(dataclasses.replace(spec, train=train), model, layout)
            if sum(ledger.host.values()) <= limit_bytes and sum(ledger.device.values()) <= self._arena_limit_bytes:
                shorter = f" and train.sequence_length: {length}" if length < spec.train.sequence_length else ""
                return f"it would fit with train.tokens_per_step: {tokens}{shorter}"
        return "no smaller train.tokens_per_step makes it fit; use a smaller model or a node with more memory"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f}"
