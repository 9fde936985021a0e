"""The host store of a job on several nodes: each has what its own ranks own, and what nobody owns, which are the packed
weights, whole.

Ranks of other nodes get weights from their owners, over the ways between devices; nothing of a step reads another
node's memory. What happens between steps does: the first node reads a model or a checkpoint tensor by tensor and sends
every part to the node that has its owner, and collects the parts of a tensor again to write it. So no other node needs
a file, and none has ever more than one tensor per thread that is not its own.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from horizon_server import progress
from horizon_server.engine.ranks import ALONE, Call, Ranks
from horizon_server.store import planes
from horizon_server.store.generations import KeptState
from horizon_server.store.host_store import HostStore, PlacePlane, check_planes
from horizon_server.store.layout import StoreLayout
from horizon_server.store.ownership import Ownership

# At most this much travels at once, so that progress is seen of the largest tensors.
_PIECE_BYTES = 256 << 20
_NOTHING_LOADED = -1


@dataclass(frozen=True, kw_only=True)
class Division:
    """What each of `num_nodes` nodes has of the planes: what as many ranks own, in their order."""

    ownership: Ownership
    num_nodes: int

    @property
    def ranks_per_node(self) -> int:
        """As many are on each."""
        return self.ownership.num_ranks // self.num_nodes

    def ranks_of(self, node: int) -> range:
        """Those of a node, whose first one leads there."""
        return range(node * self.ranks_per_node, (node + 1) * self.ranks_per_node)

    def held(self, plane: str, node: int) -> list[slice]:
        """What a node has of a plane with owners, in ascending order."""
        parts = [part for rank in self.ranks_of(node) for part in self.ownership.parts_in(plane, rank)]
        joined: list[slice] = []
        for part in sorted(parts, key=lambda part: int(part.start)):
            if joined and joined[-1].stop == part.start:
                joined[-1] = slice(joined[-1].start, part.stop)
            else:
                joined.append(part)
        return joined


class DividedStore(HostStore):
    """One node's part of a store. On the first node `reading` and `writing` have a parameter whole; on the others
    `handlers` answer them.

    Thread: as HostStore; on the first node any thread may read and write, the others answer in the thread that follows.
    """

    def __init__(
        self,
        layout: StoreLayout,
        fds: Mapping[str, int],
        *,
        division: Division,
        node: int,
        grad_dtype: torch.dtype | None,
        rank: int = 0,
        max_ranks: int = 1,
        place: PlacePlane | None = None,
    ) -> None:
        """On the memory files that this node's daemon lends, of the size of the whole store: what other nodes have is
        never touched. `rank` is this process's place among the ranks of the node. Raises as HostStore.attach."""
        check_planes(layout, fds, grad_dtype)
        self._division, self._node = division, node
        self._parts: dict[tuple[str, int], list[slice]] = {}
        self._ranks = ALONE
        self._lock, self._num_users = threading.RLock(), Counter[tuple[str, str]]()
        super().__init__(
            layout,
            fds,
            grad_dtype=grad_dtype,
            owns_fds=False,
            num_threads=0,
            rank=rank,
            max_ranks=max_ranks,
            place=place,
        )

    def connect(self, ranks: Ranks) -> None:
        """These are the ranks of all nodes. Before anything is read or written."""
        self._ranks = ranks

    def held(self, plane: str) -> Sequence[slice]:
        """What this node has of a plane."""
        return super().held(plane) if plane == "packed" else self._of_node(plane, self._node)

    @contextmanager
    def reading(self, name: str, plane: str, stretch: slice) -> Iterator[None]:
        """As HostStore, on the first node; the memory of what is not its own is given back at the end. Nothing is on
        drives here: a stretch is a whole parameter."""
        key, whole = (name, plane), self._whole(name, plane)
        with self._lock:
            # Several files of a checkpoint may hold what follows from one tensor.
            if not self._num_users[key]:
                self._collect(plane, whole)
            self._num_users[key] += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_users[key] -= 1
                if not self._num_users[key]:
                    self._give_back(plane, whole)

    @contextmanager
    def writing(self, name: str, plane: str, stretch: slice, *, reads: bool = False) -> Iterator[None]:
        """As HostStore, on the first node."""
        whole = self._whole(name, plane)
        if reads:
            with self._lock:
                self._collect(plane, whole)
        yield
        with self._lock:
            self._distribute(plane, whole)
            self._give_back(plane, whole)

    def start_loading(self) -> None:
        """As HostStore, on all nodes."""
        super().start_loading()
        self._call("reset")

    def find_kept(self) -> KeptState | str:
        """As HostStore; all nodes must have the weights of one step."""
        found = super().find_kept()
        with self._lock:
            self._call("generation")
            generations = set(self._ranks.meet([self._generation()])[:, 0].tolist())
        if isinstance(found, KeptState) and len(generations) > 1:
            return "the nodes of the job do not have the weights of one step"
        return found

    def start_training(self, num_ranks: int) -> None:
        """As HostStore, on all nodes."""
        with self._lock:
            self._call("share")
            self.generations.share(self._division.ranks_per_node)
            self._ranks.meet()

    def zero(self, names: Sequence[str]) -> list[torch.Tensor]:
        """As HostStore, for this node; the others do it themselves."""
        self._call("zero", planes=list(names))
        return super().zero(names)

    @property
    def handlers(self) -> Mapping[str, Callable[[Call], object]]:
        """What a rank does that is not the first one when that calls it."""
        return {
            "reset": lambda call: self._if_leading(self.generations.reset),
            "generation": lambda call: self._ranks.meet([self._generation()]),
            "share": lambda call: self._share(),
            "zero": lambda call: self._if_leading(lambda: self._zero(call.values["planes"])),
            "give": lambda call: self._answer(call, self._ranks.give),
            "take": lambda call: self._answer(call, self._ranks.take),
        }

    def _if_leading(self, work: Callable[[], None]) -> None:
        """Do what is done once on a node; the first one's ranks have it done already."""
        if self._node and self._ranks.rank == self._division.ranks_of(self._node)[0]:
            work()

    def _share(self) -> None:
        self._if_leading(lambda: self.generations.share(self._division.ranks_per_node))
        # The other ranks of the node read what its first one has written.
        self._ranks.meet()

    def _zero(self, names: Sequence[str]) -> None:
        for memory in super().zero(names):
            memory.zero_()
            progress.advance()

    def _generation(self) -> float:
        generation = self.generations.generation if self.generations.is_valid else None
        return _NOTHING_LOADED if generation is None else float(generation)

    def _answer(self, call: Call, move: Callable[[torch.Tensor, int], None]) -> None:
        values = call.values
        if values["node"] == self._node:
            for start, stop in values["parts"]:
                self._if_leading(partial(self._move, move, values["plane"], slice(start, stop), 0))

    def _call(self, name: str, **values: object) -> None:
        with self._lock:
            assert not self._ranks.is_alone, "connect comes first"
            self._ranks.send(Call(name=name, values=values))

    def _collect(self, plane: str, whole: slice) -> None:
        """Have what other nodes have of a stretch of a plane. The lock is held."""
        if plane == "packed":
            return
        for node in range(1, self._division.num_nodes):
            self._travel("give", self._ranks.take, node, plane, self._among(plane, whole, node))

    def _distribute(self, plane: str, whole: slice) -> None:
        """Send what belongs to other nodes of a stretch of a plane. The lock is held."""
        for node in range(1, self._division.num_nodes):
            parts = [whole] if plane == "packed" else self._among(plane, whole, node)
            self._travel("take", self._ranks.give, node, plane, parts)

    def _travel(
        self, call: str, move: Callable[[torch.Tensor, int], None], node: int, plane: str, parts: Sequence[slice]
    ) -> None:
        if parts:
            self._call(call, node=node, plane=plane, parts=[(part.start, part.stop) for part in parts])
            for part in parts:
                self._move(move, plane, part, self._division.ranks_of(node)[0])

    def _move(self, move: Callable[[torch.Tensor, int], None], plane: str, part: slice, rank: int) -> None:
        memory = self.plane(plane)
        step = _PIECE_BYTES // memory.itemsize
        for start in range(part.start, part.stop, step):
            move(memory[start : min(start + step, part.stop)], rank)
            progress.advance()

    def _give_back(self, plane: str, whole: slice) -> None:
        """Free the memory of what belongs to other nodes."""
        if plane == "packed":
            return
        for node in range(1, self._division.num_nodes):
            for part in self._among(plane, whole, node):
                planes.give_back(self.plane(plane)[part].view(torch.uint8).numpy().data)

    def _of_node(self, plane: str, node: int) -> list[slice]:
        key = plane, node
        if key not in self._parts:
            self._parts[key] = self._division.held(plane, node)
        return self._parts[key]

    def _among(self, plane: str, whole: slice, node: int) -> list[slice]:
        """What a node has of a stretch of a plane."""
        cut = [slice(max(part.start, whole.start), min(part.stop, whole.stop)) for part in self._of_node(plane, node)]
        return [part for part in cut if part.start < part.stop]

    def _whole(self, name: str, plane: str) -> slice:
        """Where a plane has a parameter."""
        unit, place = self.layout.find(name)
        if plane == "packed":
            packed, offset = unit.packed_parts[name], self.layout.offset_in(plane, unit)
            stop = max(packed.scales.stop, packed.group_scales.stop)
            return slice(offset + packed.codes.start, offset + stop)
        return self.layout.part_in(plane, unit, slice(place.offset, place.offset + place.num_elements))
