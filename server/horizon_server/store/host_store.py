"""The host parameter store: every parameter's master weight and moments, in planes of host memory.

The exact fp32 master is kept as a bf16 half `hi` and an int16 half `lo`; beside compressed moments, 24 bits of it as
`hi` and an int8 `lo8`. Memory comes from memory files that the daemon creates and hands over by descriptor, or from the
store's own.

Thread: all of it may be used from any thread; two threads must not write one unit at the same time, and nothing checks
that.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from horizon_server.errors import InvalidModel
from horizon_server.figures import DriveFigures
from horizon_server.records.execution import NOTHING_ON_DRIVES, OnDrives
from horizon_server.store import generations as generations_plane
from horizon_server.store import native, packing, planes, reference
from horizon_server.store.base_plane import BasePlane, can_be_shared, file_bytes, frozen_bytes
from horizon_server.store.cpus import available_cpus
from horizon_server.store.drive import DriveStates
from horizon_server.store.drive_layout import DriveLayout, check_files
from horizon_server.store.generations import Generations, KeptState
from horizon_server.store.layout import StoreLayout, UnitLayout, plane_sizes

_NO_ROOM = "the store keeps no gradient of an embedding whose gradient is rows"
PlacePlane = Callable[[str, torch.Tensor], None]

_PLANE_DTYPES = {
    "hi": torch.bfloat16,
    "lo": torch.int16,
    "packed": torch.uint8,
    "exp_avg": torch.float32,
    "exp_avg_sq": torch.float32,
    "lo8": torch.int8,
    "exp_avg8": torch.int8,
    "root8": torch.uint8,
    "scales": torch.bfloat16,
}
_COMPONENTS = {
    "hi": "weights",
    "lo": "weights",
    "packed": "weights",
    "exp_avg": "moments",
    "exp_avg_sq": "moments",
    "lo8": "weights",
    "exp_avg8": "moments",
    "root8": "moments",
    "scales": "moments",
    "grad": "gradients",
}


class HostStore:
    """Planes `hi` (bf16), `lo` (int16), `exp_avg` and `exp_avg_sq` (fp32), `grad` where updates are deferred, and
    `packed` (uint8) where frozen weights are kept in fewer bits; where states are compressed, also `lo8` and `exp_avg8`
    (int8), `root8` (uint8) and `scales` (bf16), as `reference` has them.

    `fds` are the planes' descriptors, to attach another store to the same memory; `blank` names the planes that hold
    zeros only. `generations` says which updates the units have. With a `base`, the frozen weights of its planes are in
    a memory file that other jobs may map too. What is on `drives` of a plane is never touched in its memory file.
    """

    def __init__(
        self,
        layout: StoreLayout,
        fds: Mapping[str, int],
        *,
        grad_dtype: torch.dtype | None,
        owns_fds: bool,
        num_threads: int,
        rank: int = 0,
        max_ranks: int = 1,
        place: PlacePlane | None = None,
        base: BasePlane | None = None,
        drives: OnDrives = NOTHING_ON_DRIVES,
    ) -> None:
        """Map `fds`; use `allocate` or `attach`."""
        self.layout = layout
        self._base = base
        self._drives: DriveStates | None = None
        if drives.units:
            # The optimizer's: updates in backward come to the last unit first, all others to the first layer.
            is_deferred, units = grad_dtype is not None, drives.units
            order = [unit for unit in dict.fromkeys((1, 0, *units)) if unit in units] if is_deferred else units[::-1]
            num_touching = num_threads or available_cpus()
            self._drives = DriveStates(layout, drives, fds, order=order, num_threads=num_touching)
        self.grad_dtype = grad_dtype
        self.fds = dict(fds)
        self._owns_fds = owns_fds
        self.generations = Generations(layout, fds.get(generations_plane.PLANE), rank=rank, max_ranks=max_ranks)
        self._planes: dict[str, torch.Tensor] = {}
        sizes = _sizes(layout, grad_dtype)
        # A memory file that has no block yet was never written, so its plane is zero without anybody writing zeros.
        self.blank = {name for name in sizes if os.fstat(fds[name]).st_blocks == 0}
        for name, size_bytes in sizes.items():
            mapping = planes.map_memory_file(fds[name], size_bytes)
            if base is not None:
                base.lay_over(name, mapping)
            dtype = grad_dtype or torch.float32 if name == "grad" else _PLANE_DTYPES[name]
            # The tensor keeps the mapping alive, so closing the store never pulls memory from under a view.
            self._planes[name] = torch.frombuffer(mapping, dtype=dtype, count=size_bytes // dtype.itemsize)
            if place is not None:
                place(name, self._planes[name])
            # Now and on all threads, so that lack of memory shows here and not as a kill in the middle of a step.
            item_bytes = dtype.itemsize
            parts = [(part.start * item_bytes, part.stop * item_bytes) for part in self._own(name)]
            planes.touch(mapping, num_threads=num_threads or available_cpus(), parts=parts)

    @classmethod
    def allocate(
        cls, layout: StoreLayout, *, grad_dtype: torch.dtype | None = torch.float32, num_threads: int = 0
    ) -> HostStore:
        """A store on memory files of its own; no `grad` plane without `grad_dtype`. 0 threads means one per CPU."""
        fds: dict[str, int] = {}
        try:
            for name, size_bytes in _sizes(layout, grad_dtype).items():
                fds[name] = planes.create_memory_file(name, size_bytes)
            return cls(layout, fds, grad_dtype=grad_dtype, owns_fds=True, num_threads=num_threads)
        except BaseException:
            for fd in fds.values():
                os.close(fd)
            raise

    @classmethod
    def attach(
        cls,
        layout: StoreLayout,
        fds: Mapping[str, int],
        *,
        grad_dtype: torch.dtype | None = torch.float32,
        rank: int = 0,
        max_ranks: int = 1,
        place: PlacePlane | None = None,
        base: BasePlane | None = None,
        drives: OnDrives = NOTHING_ON_DRIVES,
    ) -> HostStore:
        """A store on memory files that another process created by `plane_sizes` and owns; contents stay as they are.

        Up to `max_ranks` processes may share it; this one is `rank`. `place` is given each plane before its memory is
        touched, and may say where that is to be. `base` is mapped where the layout has frozen weights. `drives` says
        what is on the files of drives among the descriptors.

        Raises:
            ValueError: a plane's descriptor is missing.
            InvalidModel: a plane's file was not sized by this layout.
        """
        check_planes(layout, fds, grad_dtype)
        if drives.units:
            check_files(DriveLayout(layout, drives), fds)
        return cls(
            layout,
            fds,
            grad_dtype=grad_dtype,
            owns_fds=False,
            num_threads=0,
            rank=rank,
            max_ranks=max_ranks,
            place=place,
            base=base,
            drives=drives,
        )

    def held(self, plane: str) -> Sequence[slice]:
        """What of a plane is in this store's memory."""
        parts, start = [], 0
        for unit in self.layout.units:
            if self._is_on_drives(unit.index, plane):
                offset = self._offset(unit, plane)
                parts.append(slice(start, offset))
                start = offset + unit.elements_in(plane)
        return [part for part in (*parts, slice(start, self._planes[plane].numel())) if part.start < part.stop]

    def _is_on_drives(self, index: int, plane: str) -> bool:
        return self._drives is not None and self._drives.holds(index, plane)

    def _own(self, plane: str) -> Sequence[slice]:
        """What of that is this job's alone."""
        if self._base is None or plane not in ("hi", "lo", "packed"):
            return self.held(plane)
        if plane == "packed":
            return []
        units = [unit for unit in self.layout.units if unit.trained_elements]
        return [self.layout.part_in(plane, unit, slice(0, unit.trained_elements)) for unit in units]

    def frozen_writable(self) -> AbstractContextManager[None]:
        """Have the pages of frozen weights that other jobs map too writable within the block: drivers ask for that
        where they pin memory, although they only read it."""
        return nullcontext() if self._base is None else self._base.writable()

    def loading_frozen(self, model: Path) -> AbstractContextManager[bool]:
        """Tell whether the frozen weights have to be loaded from a model folder, within the block. Waits while another
        job loads them. Raises as `BasePlane.loading`."""
        return nullcontext(True) if self._base is None else self._base.loading(model)

    def stretches(self, name: str) -> Sequence[slice]:
        """The parts of a parameter, in order, of which each can be had in memory at a time: all of it, or where it is
        on drives what of it is in each span. They begin with compressed groups."""
        unit, place = self.layout.find(name)
        begin, end = place.offset, place.offset + place.num_elements
        parts = () if self._drives is None else self._drives.parts(unit.index)
        cut = [slice(max(part.start, begin) - begin, min(part.stop, end) - begin) for part in parts]
        return [part for part in cut if part.start < part.stop] or [slice(0, place.num_elements)]

    def reading(self, name: str, plane: str, stretch: slice) -> AbstractContextManager[None]:
        """Have one of the `stretches` of a parameter in a plane within the block, where the store holds only a part of
        it, or it is on drives. Views of it are of use within the block alone."""
        return self._opened(name, plane, stretch, writes=False)

    def writing(self, name: str, plane: str, stretch: slice, *, reads: bool = False) -> AbstractContextManager[None]:
        """Write one of the `stretches` of a parameter in a plane within the block, all of it; with `reads`, change what
        is there. At the end of the block it is where it belongs, or will be after `flush`. Views of it are of use
        within the block alone."""
        return self._opened(name, plane, stretch, writes=True)

    def _opened(self, name: str, plane: str, stretch: slice, *, writes: bool) -> AbstractContextManager[None]:
        unit, place = self.layout.find(name)
        if self._drives is not None and self._drives.holds(unit.index, plane):
            part = slice(place.offset + stretch.start, place.offset + stretch.stop)
            return self._drives.opened(unit.index, plane, part, writes=writes)
        return nullcontext()

    def update(self, index: int, part: slice, work: Callable[[slice], None], done: Callable[[], None]) -> None:
        """Have `work` update these elements of a unit: all of them at once, or span by span where they are on drives.
        `done` is called when all results are where they belong: before this returns, or later by a thread that writes
        to drives. Raises DriveFailed."""
        drives = self._drives
        if drives is None or not (spans := drives.parts(index)):
            work(part)
            done()
            return
        assert part.start <= spans[0].start and spans[-1].stop <= part.stop, "what is on drives is updated as a whole"
        left = len(spans)

        def written() -> None:
            # Called by threads that write, one at a time.
            nonlocal left
            left -= 1
            if not left:
                done()

        for span in spans:
            with drives.updating(index, span, written):
                work(span)

    def is_on_drives(self, index: int) -> bool:
        """Whether a unit has states on drives, which are updated span by span."""
        return self._drives is not None and bool(self._drives.parts(index))

    def is_in_memory(self, index: int, plane: str) -> bool:
        """Whether what a plane has of a unit is in memory, and not on drives."""
        return self._drives is None or not self._drives.holds(index, plane)

    def leave_out(self, units: Collection[int]) -> None:
        """These units are updated elsewhere from now on, so that nothing is read ahead for them."""
        if self._drives is not None:
            self._drives.leave_out(units)

    def read_ahead(self) -> None:
        """Begin to read what the next updates take from drives. Raises DriveFailed: a drive has failed meanwhile."""
        if self._drives is not None:
            self._drives.read_ahead()

    def flush(self) -> None:
        """Block until what belongs on drives is there. Raises DriveFailed."""
        if self._drives is not None:
            self._drives.flush()

    def take_traffic(self) -> tuple[DriveFigures, ...]:
        """What each drive has read and written since the last call; empty where nothing is on drives."""
        return () if self._drives is None else self._drives.take_traffic()

    def start_loading(self) -> None:
        """Other weights are to be loaded: what was kept with those that are there is forgotten."""
        self.generations.reset()
        if self._drives is not None:
            self._drives.forget()

    def find_kept(self) -> KeptState | str:
        """The state of the weights in memory, or why there is none."""
        if self._base is not None and not self._base.is_loaded:
            return "the frozen weights are not there"
        return self.generations.find()

    def start_training(self, num_ranks: int) -> None:
        """The weights are there: from now on, this many ranks update them. Raises DriveFailed."""
        self.flush()
        self.generations.share(num_ranks)

    def zero(self, names: Sequence[str]) -> list[torch.Tensor]:
        """What the caller has to fill with zeros, so that these planes are zero: nothing of a plane that was never
        written, or that the layout has no use for. What is on drives is zero then."""
        if self._drives is not None:
            for name in names:
                self._drives.forget(name)
        written = [name for name in names if name in self._planes and name not in self.blank]
        return [self.plane(name)[part] for name in written for part in self._own(name)]

    def plane(self, name: str) -> torch.Tensor:
        """A whole plane. Shapes: [layout.num_elements] for `hi` where nothing is packed, less for a plane that holds no
        frozen tensors."""
        # The caller may write to the view.
        self.blank.discard(name)
        return self._planes[name]

    def unit(self, index: int, plane: str) -> torch.Tensor:
        """One unit's block of a plane that is not on drives, with its padding. Shapes: [unit.elements_in(plane)]."""
        unit = self.layout.units[index]
        assert not self._is_on_drives(index, plane), f"{plane} of {unit.name} is on drives"
        return self.plane(plane).narrow(0, self._offset(unit, plane), unit.elements_in(plane))

    def flat(self, name: str, plane: str, part: slice | None = None) -> torch.Tensor:
        """One parameter in a plane that holds it, or a part of it that begins with a compressed group. Shapes:
        [parameter.num_elements] or [part], of `scales` two for each group."""
        unit, place = self.layout.find(name)
        start, stop = (0, place.num_elements) if part is None else (part.start, min(part.stop, place.num_elements))
        found = self.part(unit.index, plane, slice(place.offset + start, place.offset + stop))
        assert len(found) or start == stop, f"{plane} does not hold {name}"
        return found

    def part(self, index: int, plane: str, elements: slice) -> torch.Tensor:
        """What a plane holds of these elements of a unit, see `StoreLayout.part_in`; where it is on drives, they are of
        one span. Shapes: [what that is]."""
        unit = self.layout.units[index]
        if self._drives is not None and self._drives.holds(index, plane):
            return self._drives.view(index, plane, elements, self._planes[plane].dtype)
        start, found = self._offset(unit, plane), self.layout.part_in(plane, unit, elements)
        return self.unit(index, plane)[found.start - start : found.stop - start]

    def low(self, name: str, part: slice | None = None) -> torch.Tensor | None:
        """What a parameter's master has beside `hi`, int16 or int8; None where that is nothing. Shapes: as `flat`."""
        plane = self.layout.find(name)[1].low
        return None if plane is None else self.flat(name, plane, part)

    def tensor(self, name: str, plane: str) -> torch.Tensor:
        """One parameter in a plane, in its own shape; otherwise as `flat`."""
        return self.flat(name, plane).view(self.layout.find(name)[1].shape)

    def _offset(self, unit: UnitLayout, plane: str) -> int:
        offset = self.layout.offset_in(plane, unit)
        # A negative offset would count from the plane's end.
        assert offset >= 0, _NO_ROOM
        return offset

    def merge_master(self, index: int, out: torch.Tensor, *, num_threads: int = 1) -> None:
        """Write the exact fp32 master of one unit, padding included, into `out`. Shapes: [unit.num_elements]."""
        self.merge_unpacked(index, out, num_threads=num_threads)
        if self.layout.units[index].packed_bytes:
            self.unpack(index, self.unit(index, "packed"), out)

    def merge_unpacked(self, index: int, out: torch.Tensor, *, num_threads: int = 1) -> None:
        """Like `merge_master`, for the unit's first part alone: what is not packed of it, or as much of that as `out`
        is long."""
        self.merge_part(index, slice(0, len(out)), out, num_threads=num_threads)

    def merge_part(self, index: int, part: slice, out: torch.Tensor, *, num_threads: int = 1) -> None:
        """Like `merge_unpacked`, for these elements of the unit alone; `out` begins where they do."""
        unit, hi = self.layout.units[index], self.unit(index, "hi")[part]
        end = 0
        for plane in ("lo8", "lo"):
            lo = self._planes[plane][self.layout.part_in(plane, unit, part)] if plane in self._planes else hi[:0]
            if len(lo):
                merge_master(hi[end : end + len(lo)], lo, out[end : end + len(lo)], num_threads=num_threads)
                end += len(lo)
        out[end : len(hi)].copy_(hi[end:])

    def unpack(self, index: int, block: torch.Tensor, out: torch.Tensor) -> None:
        """Write the values of a unit's packed tensors to their places in `out`, in its dtype. `block` is the unit's
        part of the `packed` plane, or a copy of it where `out` is.

        Shapes: [unit.packed_bytes] and [unit.num_elements]. CUDA: launches on the current stream.
        """
        unit = self.layout.units[index]
        for place in unit.tensors:
            if place.packing != "none":
                packing.unpack(
                    place, block, unit.packed_parts[place.name], out[place.offset : place.offset + place.num_elements]
                )

    def unpacked(self, name: str) -> torch.Tensor:
        """The values of one packed parameter. Shapes: its own, fp32."""
        unit, place = self.layout.find(name)
        values = torch.empty(place.num_elements)
        packing.unpack(place, self.unit(unit.index, "packed"), unit.packed_parts[name], values)
        return values.view(place.shape)

    def exact(self, index: int, read: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """The exact fp32 master of a part of a unit whose states are exact, contiguous; `read` cuts the part out of a
        plane of the unit."""
        hi, lo, held = self.unit(index, "hi"), self.unit(index, "lo"), self.layout.units[index].held_in("lo")
        if len(lo) < len(hi):
            # `read` expects the whole unit; pages of zeros that nothing touches take no memory.
            whole = torch.zeros(len(hi), dtype=torch.int16)
            whole[held] = lo
            lo = whole
        return join_halves(read(hi), read(lo))

    def exact_rows(self, name: str, rows_R: torch.Tensor) -> torch.Tensor:
        """The exact fp32 master of some rows of a 2-D parameter. Shapes: [R, width]."""
        bits: torch.Tensor = self.tensor(name, "hi")[rows_R].view(torch.int16).int() << 16
        if self.layout.find(name)[1].exact:
            bits += self.tensor(name, "lo")[rows_R].int()
        return bits.view(torch.float32)

    def write_master(self, name: str, tensor: torch.Tensor) -> None:
        """Set one parameter from any floating dtype, exactly where fp32 holds it (`reference` has the guards), or where
        bf16 does if it has no `lo` half; a packed one as near as its bits allow.
        """
        _, place = self.layout.find(name)
        assert tuple(tensor.shape) == place.shape, f"{name}: {tuple(tensor.shape)} given, {place.shape} stored"
        master = tensor.detach().to(device="cpu", dtype=torch.float32).contiguous().view(-1)
        if place.packing != "none":
            self.write_packed(name, master)
            return
        for part in self.stretches(name):
            with self._opened(name, place.low or "hi", part, writes=True):
                hi, lo = self.flat(name, "hi", part), self.low(name, part)
                split_master(master[part], hi, torch.empty(len(hi), dtype=torch.int16) if lo is None else lo)

    def write_packed(self, name: str, values: torch.Tensor, *, start: int = 0) -> None:
        """Pack elements of one parameter from `start` on, as `packing.pack` does. Shapes: flat, fp32."""
        unit, place = self.layout.find(name)
        packing.pack(values, place, self.unit(unit.index, "packed"), unit.packed_parts[name], start=start)

    def host_bytes(self) -> dict[str, int]:
        """Bytes of host memory by component: weights, moments, gradients, and under adapters the base."""
        totals = {"weights": 0, "moments": 0, "gradients": 0}
        for name, plane in self._planes.items():
            totals[_COMPONENTS[name]] += sum(plane[part].nbytes for part in self.held(name))
        if can_be_shared(self.layout):
            totals["base"] = file_bytes(self.layout)
            totals["weights"] -= frozen_bytes(self.layout)
        return totals

    def close(self) -> None:
        """Let go of the planes. Memory is unmapped when its last view is gone; owned descriptors are closed now."""
        if self._drives is not None:
            self._drives.close()
            self._drives = None
        self._planes.clear()
        self._base = None
        if self._owns_fds:
            for fd in self.fds.values():
                os.close(fd)
        self.fds.clear()


def check_planes(layout: StoreLayout, fds: Mapping[str, int], grad_dtype: torch.dtype | None) -> None:
    """Let pass memory files that were sized by a layout. Raises ValueError and InvalidModel as `HostStore.attach`."""
    sizes = _sizes(layout, grad_dtype)
    if missing := sorted(set(sizes) - set(fds)):
        raise ValueError(f"no memory file was given for the planes {', '.join(missing)}")
    for name, size_bytes in sizes.items():
        if (actual_bytes := os.fstat(fds[name]).st_size) != size_bytes:
            raise InvalidModel(
                f"memory was planned for {actual_bytes} bytes of {name}, but the model takes {size_bytes}: "
                "its folder has changed since; submit the job again"
            )


def join_halves(hi: torch.Tensor, lo: torch.Tensor) -> torch.Tensor:
    """The exact fp32 values of a small tensor's halves, contiguous, wherever they are. CUDA: launches on the current
    stream."""
    bits: torch.Tensor = (hi.view(torch.int16).int() << 16) + lo.int()
    return bits.contiguous().view(torch.float32)


def merge_master(hi: torch.Tensor, lo: torch.Tensor, out: torch.Tensor, *, num_threads: int = 1) -> None:
    """Restore the fp32 master: `out` gets `hi + lo`, exactly.

    Shapes: hi bfloat16 [N], lo int16 or int8 [N], out float32 [N]; contiguous, on the CPU.
    """
    _check(hi, lo, out)
    if (kernel := native.library()) is None:
        reference.merge(hi.view(torch.uint16).numpy(), lo.numpy(), out.numpy())
    else:
        merge = kernel.hz_merge_24 if lo.dtype == torch.int8 else kernel.hz_merge
        merge(hi.data_ptr(), lo.data_ptr(), out.data_ptr(), out.numel(), num_threads)


def split_master(master: torch.Tensor, hi: torch.Tensor, lo: torch.Tensor, *, num_threads: int = 1) -> None:
    """Split an fp32 master into `hi`, its bf16 rounding, and `lo`, what is left; `merge_master` gives it back exactly,
    or with int8 the nearest number of 24 bits.

    Shapes: master float32 [N], hi bfloat16 [N], lo int16 or int8 [N]; contiguous, on the CPU.
    """
    _check(hi, lo, master)
    if (kernel := native.library()) is None:
        reference.split(master.numpy(), hi.view(torch.uint16).numpy(), lo.numpy())
    else:
        split = kernel.hz_split_24 if lo.dtype == torch.int8 else kernel.hz_split
        split(master.data_ptr(), hi.data_ptr(), lo.data_ptr(), master.numel(), num_threads)


def _check(hi: torch.Tensor, lo: torch.Tensor, master: torch.Tensor) -> None:
    assert hi.dtype == torch.bfloat16 and lo.dtype in (torch.int16, torch.int8) and master.dtype == torch.float32
    for tensor in (hi, lo, master):
        assert tensor.dim() == 1 and tensor.shape == master.shape, "a master and its halves are flat, of one length"
        assert tensor.is_contiguous() and tensor.device.type == "cpu", "a master and its halves are contiguous, on CPU"


def _sizes(layout: StoreLayout, grad_dtype: torch.dtype | None) -> dict[str, int]:
    assert grad_dtype in (None, torch.float32, torch.bfloat16), f"gradients are fp32 or bf16, not {grad_dtype}"
    return plane_sizes(layout, grad_dtype_bytes=0 if grad_dtype is None else grad_dtype.itemsize)
