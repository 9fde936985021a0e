"""The ranks of a job: processes with a device each that compute every step together, on one store.

torch.distributed moves bytes between them and never adds: what a backend's sums give depends on the backend, its
topology and the number of ranks, while a step's bits depend on its lanes alone (`engine.lanes`).

There is one process group for each queue of a device, so that queues do not wait for each other, and one for calls from
the first rank. Every rank queues the collectives of a group in the same order.

Thread: the methods that take a queue's name are called in that queue's work; `send`, `receive` and `meet` by the
driving thread.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, get_args

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, Store, TCPStore

from horizon_server.engine.device.protocol import Device
from horizon_server.engine.device.timeline import RANKS
from horizon_server.figures import CollectiveFigures, CollectiveKind, DeviceFigures, RankFigures
from horizon_server.planning.lane_tree import lanes_of_rank, ranges_of
from horizon_server.records.execution import DeviceKind, Execution, Parallel
from horizon_server.store.layout import StoreLayout
from horizon_server.store.ownership import Ownership

QueueName = Literal["h2d", "compute", "d2h"]
GroupName = Literal["h2d", "compute", "d2h", "d2h node", "d2h peers"]
"""All ranks in the work of a queue; and in that of d2h, those of one node, and those at one place of each node."""
GROUPS = ("h2d", "compute", "d2h", "calls")
_COLLECTIVES: tuple[CollectiveKind, ...] = get_args(CollectiveKind)
# A rank waits for the first one while that waits for its turn on the device. Who has died is seen otherwise.
_PATIENCE = timedelta(days=365)
# How long the first rank may take to listen: it does so before any other is started.
_MEETING = timedelta(seconds=60)
_TAG = 0
# What the first rank writes in the store through which all have met, once the others may close their connections.
_LEFT = "left"
# Between two looks at what another rank has done.
_POLL_S = 5e-5
_BACKENDS: Mapping[DeviceKind, Literal["gloo", "nccl"]] = {"host": "gloo", "cuda": "nccl"}

# Newer versions of torch have another name for it, and warn of this one.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


@dataclass(frozen=True, kw_only=True)
class Call:
    """What the first rank has the others do: a method of the trainer, and what it is given."""

    name: str
    values: Mapping[str, Any] = field(default_factory=dict)
    """JSON values."""
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    """On the CPU."""


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Where the ranks of an attempt find each other: on one node in a file that all of them are given, which only
    their account can read; else at the first rank, which listens on `listener` there."""

    file: Path | None = None
    host: str = ""
    port: int = 0
    listener: int = -1

    def open(self, num_ranks: int) -> Store:
        """What the ranks write into and read from until they are connected."""
        if self.file is not None:
            return FileStore(str(self.file), num_ranks)
        leads = self.listener >= 0
        return TCPStore(
            self.host,
            self.port,
            num_ranks,
            leads,
            timeout=_MEETING,
            wait_for_workers=False,
            master_listen_fd=self.listener if leads else None,
        )


class Ranks:
    """This process's place among the ranks, and the ways between them. Without `groups` it is alone.

    With `gathers`, a unit's weights come from the parts of all ranks, over the ways between their devices; else each
    rank reads all of them from the store. `shared_fd` is a memory file that all of them map, empty at first.
    """

    def __init__(
        self,
        rank: int = 0,
        num_ranks: int = 1,
        groups: Mapping[str, dist.ProcessGroup] | None = None,
        *,
        parallel: Parallel = "rows",
        layer_ranks: tuple[int, ...] = (),
        gathers: bool = False,
        shared_fd: int = -1,
        num_nodes: int = 1,
        store: Store | None = None,
    ) -> None:
        self.num_nodes = num_nodes
        self._store = store
        self.rank, self.num_ranks, self.gathers, self.shared_fd = rank, num_ranks, gathers, shared_fd
        self.parallel, self._layer_ranks = parallel, layer_ranks
        self._dealt: list[range] | None = None
        self.is_broken = False
        """Whether a rank has died: nothing is sent or waited for any more."""
        self._groups = groups or {}
        self._met_s = 0.0
        self.path: Literal["gloo", "nccl"] = "gloo"
        """The library that carries what goes between devices."""

    @classmethod
    def join(cls, rank: int, meeting: Meeting, execution: Execution, *, shared_fd: int) -> Ranks:
        """Meet the other ranks and return once all are there.

        CUDA: the process's current device is the rank's.
        """
        num_ranks, device_kind, parallel = execution.num_ranks, execution.device_kind, execution.parallel
        store = meeting.open(num_ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=_PATIENCE)
        backends = {name: "gloo" if name == "calls" else _BACKENDS[device_kind] for name in GROUPS}
        groups = {name: dist.new_group(backend=backend, timeout=_PATIENCE) for name, backend in backends.items()}
        for name, ranks_of_group in groups_of_nodes(num_ranks, execution.num_nodes):
            # Every rank takes part in making every group.
            group = dist.new_group(ranks_of_group, backend=_BACKENDS[device_kind], timeout=_PATIENCE)
            if rank in ranks_of_group:
                groups[name] = group
        # Whole layers come from the store, each over the link of its rank.
        gathers = parallel == "rows" and (device_kind == "cuda" or execution.num_nodes > 1)
        ranks = cls(
            rank,
            num_ranks,
            groups,
            parallel=parallel,
            layer_ranks=execution.layer_ranks,
            gathers=gathers,
            shared_fd=shared_fd,
            num_nodes=execution.num_nodes,
            store=store,
        )
        ranks.path = _BACKENDS[device_kind]
        return ranks

    @property
    def ranks_per_node(self) -> int:
        """As many are on each node."""
        return self.num_ranks // self.num_nodes

    @property
    def is_alone(self) -> bool:
        """Whether there are no other ranks."""
        return self.num_ranks == 1

    @property
    def leads(self) -> bool:
        """Whether this is the first rank, which the others follow."""
        return self.rank == 0

    @property
    def by_layers(self) -> bool:
        """Whether each computes all lanes of its layers, and not its lanes of all layers."""
        return self.parallel == "layers" and not self.is_alone

    def ownership(self, layout: StoreLayout) -> Ownership:
        """What each rank owns of a store."""
        return Ownership(layout=layout, num_ranks=self.num_ranks, parallel=self.parallel, dealt=self._layer_ranks)

    def lanes(self, num_lanes: int) -> list[range]:
        """The lanes of each rank: about as many for each, unless they were dealt otherwise."""
        if self._dealt is not None and self._dealt[-1].stop == num_lanes:
            return self._dealt
        return [lanes_of_rank(rank, self.num_ranks, num_lanes) for rank in range(self.num_ranks)]

    def deal(self, sizes: Sequence[int]) -> None:
        """From now on, the ranks compute as many lanes each. All ranks call it alike, between two steps."""
        self._dealt = ranges_of(sizes)

    def complete(self, out: Tensor, parts: Sequence[slice], queue: QueueName) -> None:
        """Fill flat memory in which each rank has written its own part; all parts are equal but the last, which may be
        longer."""
        group, start, size = self._groups[queue], parts[0].start, parts[0].stop - parts[0].start
        if self.path == "gloo":
            self._broadcast_parts(out, parts, queue)
            return
        if size:
            whole = out[start : start + size * self.num_ranks]
            own = whole[self.rank * size : (self.rank + 1) * size]
            _all_gather(whole, own, group=group)
        rest = out[start + size * self.num_ranks : parts[-1].stop]
        if rest.numel():
            dist.broadcast(rest, group_src=self.num_ranks - 1, group=group)

    def _broadcast_parts(self, out: Tensor, parts: Sequence[slice], queue: QueueName) -> None:
        """As `complete`. gloo's gather takes the memory of four such tensors, and its broadcasts know no nodes: on
        several, each part goes once to the ranks at its owner's place, and from there to the others of their node."""

        def send(group: str, owner: int, source: int) -> None:
            if parts[owner].start < parts[owner].stop:
                dist.broadcast(out[parts[owner]], group_src=source, group=self._groups[group])

        if self.num_nodes == 1:
            for owner in range(self.num_ranks):
                send(queue, owner, owner)
            return
        per_node = self.ranks_per_node
        for node in range(self.num_nodes):
            send(f"{queue} peers", node * per_node + self.rank % per_node, node)
        for owner in range(self.num_ranks):
            send(f"{queue} node", owner, owner % per_node)

    def exchange(
        self, out: Tensor, source: Tensor, out_sizes: Sequence[int], sizes: Sequence[int], among: GroupName
    ) -> None:
        """Send each rank of a group its run of `source`, and receive a run from each in `out`; flat, one after the
        other, of these numbers of elements."""
        dist.all_to_all_single(out, source, list(out_sizes), list(sizes), group=self._groups[among])

    def collect(self, own: Tensor, queue: QueueName) -> Tensor:
        """The equally long tensors of all ranks, one row each. Shapes: [K] to [ranks, K]."""
        if self.is_alone:
            return own[None]
        out = own.new_empty(self.num_ranks * own.numel())
        _all_gather(out, own.contiguous(), group=self._groups[queue])
        return out.view(self.num_ranks, -1)

    def broadcast(self, values: Tensor, queue: QueueName) -> None:
        """Give all ranks what the first one has in `values`."""
        if not self.is_alone:
            dist.broadcast(values, group_src=0, group=self._groups[queue])

    def join_parts(self, own: Tensor, sizes: Sequence[int]) -> Tensor:
        """The flat tensors of all ranks, one after the other; `sizes` are their lengths. On the CPU."""
        if self.is_alone:
            return own
        padded = own.new_zeros(max(sizes))
        padded[: own.numel()] = own
        out = own.new_empty(self.num_ranks * padded.numel())
        _all_gather(out, padded, group=self._groups["calls"])
        parts = out.view(self.num_ranks, -1)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def give(self, values: Tensor, rank: int) -> None:
        """Send bytes to a rank, which takes them. On the CPU, contiguous."""
        self._groups["calls"].send([values.view(torch.uint8)], rank, _TAG).wait()

    def take(self, out: Tensor, rank: int) -> None:
        """Receive in `out` what a rank gives."""
        self._groups["calls"].recv([out.view(torch.uint8)], rank, _TAG).wait()

    def send(self, call: Call) -> None:
        """Have the other ranks `receive` a call."""
        if self.is_broken:
            return
        header = json.dumps({"name": call.name, "values": call.values})
        tensors = {name: tensor.contiguous() for name, tensor in call.tensors.items()}
        data = safetensors.torch.save(tensors, metadata={"call": header})
        payload = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        dist.broadcast(torch.tensor([payload.numel()]), group_src=0, group=self._groups["calls"])
        dist.broadcast(payload, group_src=0, group=self._groups["calls"])

    def receive(self) -> Call:
        """Wait for the first rank's next call."""
        size = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(size, group_src=0, group=self._groups["calls"])
        payload = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(payload, group_src=0, group=self._groups["calls"])
        data = payload.numpy().tobytes()
        header = json.loads(_metadata(data)["call"])
        return Call(name=header["name"], values=header["values"], tensors=safetensors.torch.load(data))

    def leave(self) -> None:
        """Part from the others, at the end: the first rank once all that it sent has arrived, the others after it.

        A connection that one of them closes earlier fails what the first one still sends to a third.
        """
        if self._store is None or self.is_broken:
            return
        if self.leads:
            self._store.set(_LEFT, "")
        else:
            self._store.wait([_LEFT], _PATIENCE)

    def meet(self, numbers: Sequence[float] = ()) -> Tensor:
        """Wait until all ranks are here, and return the numbers that each has brought. Shapes: [ranks, K], fp64."""
        own = torch.tensor([0.0, *numbers], dtype=torch.float64)
        if self.is_alone or self.is_broken:
            return own[None, 1:]
        out, start_s = torch.empty(self.num_ranks * own.numel(), dtype=torch.float64), time.perf_counter()
        _all_gather(out, own, group=self._groups["calls"])
        self._met_s += time.perf_counter() - start_s
        return out.view(self.num_ranks, -1)[:, 1:]

    def figures(self, use: DeviceFigures) -> tuple[RankFigures, ...]:
        """What each rank did with the others, of which this one has brought its own part; nothing where it is alone."""
        if self.is_alone:
            return ()
        own = {one.kind: (one.bytes, one.busy_s, one.exposed_s) for one in use.collectives}
        numbers = [number for kind in _COLLECTIVES for number in own.get(kind, (0, 0.0, 0.0))]
        # Since it was asked last: compute is idle while ranks meet.
        met_s, self._met_s = self._met_s, 0.0
        found = []
        for wait_s, *of_kinds in self.meet([use.ranks_wait_s + met_s, *numbers]).tolist():
            by_kind = zip(_COLLECTIVES, of_kinds[0::3], of_kinds[1::3], of_kinds[2::3], strict=True)
            collectives = [
                CollectiveFigures(kind=kind, bytes=int(num_bytes), busy_s=busy_s, exposed_s=exposed_s)
                for kind, num_bytes, busy_s, exposed_s in by_kind
                if busy_s
            ]
            found.append(RankFigures(path=self.path, collectives=tuple(collectives), wait_s=wait_s))
        return tuple(found)


def groups_of_nodes(num_ranks: int, num_nodes: int) -> list[tuple[str, list[int]]]:
    """The groups of ranks on several nodes besides those of all: for the work of h2d and of d2h, those of each node,
    and those at one place of each node."""
    if num_nodes == 1:
        return []
    per_node, found = num_ranks // num_nodes, list[tuple[str, list[int]]]()
    for queue in ("h2d", "d2h"):
        found += [(f"{queue} node", list(range(first, first + per_node))) for first in range(0, num_ranks, per_node)]
        found += [(f"{queue} peers", list(range(place, num_ranks, per_node))) for place in range(per_node)]
    return found


def _metadata(data: bytes) -> dict[str, str]:
    """Of tensors in the safetensors format, whose header is JSON after its length in eight bytes."""
    length = int.from_bytes(data[:8], "little")
    found: dict[str, str] = json.loads(data[8 : 8 + length])["__metadata__"]
    return found


@dataclass(frozen=True)
class RankEvent:
    """What other ranks have done, as an event that a queue of `device` waits for; `is_done` looks into memory that they
    share."""

    is_done: Callable[[], bool]
    ranks: Ranks
    device: Device
    origin = RANKS

    @property
    def happened(self) -> bool:
        """Whether it is done."""
        return self.is_done()

    def wait(self) -> None:
        """Block until it is.

        Raises:
            RuntimeError: another rank has died; and what has failed on this one.
        """
        while not self.is_done():
            if self.ranks.is_broken:
                raise RuntimeError("another rank has died")
            # What has failed here may be what the other one waits for.
            self.device.raise_failure()
            time.sleep(_POLL_S)


ALONE = Ranks()
"""Of a job that one device computes."""
