"""The host parameter store: every parameter's master weight and moments, in planes of host memory.

Owns the tensors that view the planes and the split of a master weight into `hi` and `lo`. Memory comes from memory
files that the daemon creates and hands over by descriptor, or from its own.

Thread: views may be used from any thread; two threads must not write one unit at the same time, and the store does
not check.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from horizon_server.errors import InvalidModel
from horizon_server.store import master_weights, planes
from horizon_server.store.cpus import available_cpus
from horizon_server.store.layout import StoreLayout, plane_sizes

_PLANE_DTYPES: Mapping[str, torch.dtype] = {
    "hi": torch.bfloat16,
    "lo": torch.int16,
    "exp_avg": torch.float32,
    "exp_avg_sq": torch.float32,
}
_COMPONENT_OF_PLANE: Mapping[str, str] = {
    "hi": "weights",
    "lo": "weights",
    "exp_avg": "moments",
    "exp_avg_sq": "moments",
    "grad": "gradients",
}


class HostStore:
    """Planes `hi` (bf16), `lo` (int16), `exp_avg` and `exp_avg_sq` (fp32), and `grad` where updates are deferred."""

    def __init__(
        self,
        layout: StoreLayout,
        fds: Mapping[str, int],
        *,
        grad_dtype: torch.dtype | None,
        owns_fds: bool,
        num_threads: int,
    ) -> None:
        """Map `fds`; use `allocate` or `attach`."""
        self.layout = layout
        self.grad_dtype = grad_dtype
        self._fds = dict(fds)
        self._owns_fds = owns_fds
        self._planes: dict[str, torch.Tensor] = {}
        # A memory file that has no block yet was never written, so its plane is zero without anybody writing zeros.
        self._blank = {name for name in _sizes(layout, grad_dtype) if os.fstat(fds[name]).st_blocks == 0}
        for name, size_bytes in _sizes(layout, grad_dtype).items():
            mapping = planes.map_memory_file(fds[name], size_bytes)
            planes.touch(mapping, num_threads=num_threads)
            dtype = grad_dtype or torch.float32 if name == "grad" else _PLANE_DTYPES[name]
            # The tensor keeps the mapping alive, so closing the store never pulls memory from under a view.
            self._planes[name] = torch.frombuffer(mapping, dtype=dtype, count=layout.num_elements)

    @classmethod
    def allocate(
        cls, layout: StoreLayout, *, grad_dtype: torch.dtype | None = torch.float32, num_threads: int = 0
    ) -> HostStore:
        """A store on memory files of its own; no `grad` plane without `grad_dtype`. 0 threads means one per CPU."""
        fds: dict[str, int] = {}
        try:
            for name, size_bytes in _sizes(layout, grad_dtype).items():
                fds[name] = planes.create_memory_file(name, size_bytes)
            return cls(layout, fds, grad_dtype=grad_dtype, owns_fds=True, num_threads=num_threads or available_cpus())
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
        num_threads: int = 0,
    ) -> HostStore:
        """A store on memory files that another process created by `plane_sizes` and owns; contents stay as they are.

        Raises:
            ValueError: a plane's descriptor is missing.
            InvalidModel: a plane's file was not sized by this layout.
        """
        sizes = _sizes(layout, grad_dtype)
        missing = sorted(set(sizes) - set(fds))
        if missing:
            raise ValueError(f"no memory file was given for the planes {', '.join(missing)}")
        for name, size_bytes in sizes.items():
            if (actual_bytes := os.fstat(fds[name]).st_size) != size_bytes:
                raise InvalidModel(
                    f"memory was planned for {actual_bytes} bytes of {name}, but the model takes {size_bytes}: "
                    "its folder has changed since; submit the job again"
                )
        return cls(layout, fds, grad_dtype=grad_dtype, owns_fds=False, num_threads=num_threads or available_cpus())

    @property
    def fds(self) -> dict[str, int]:
        """The planes' descriptors, to attach another store to the same memory."""
        return dict(self._fds)

    def plane(self, name: str) -> torch.Tensor:
        """A whole plane. Shapes: [layout.num_elements]."""
        self._blank.discard(name)
        return self._planes[name]

    def is_blank(self, name: str) -> bool:
        """Whether a plane is known to hold zeros only: fresh memory that has not been used yet."""
        return name in self._blank

    def unit(self, index: int, plane: str) -> torch.Tensor:
        """One unit's block of a plane, with its padding. Shapes: [unit.num_elements]."""
        unit = self.layout.units[index]
        self._blank.discard(plane)
        return self._planes[plane].narrow(0, unit.offset, unit.num_elements)

    def tensor(self, name: str, plane: str) -> torch.Tensor:
        """One parameter in a plane, in its own shape.

        Raises:
            KeyError: the store has no such parameter.
        """
        return self._flat(name, plane).view(self.layout.find(name)[1].shape)

    def merge_master(self, index: int, out: torch.Tensor, *, num_threads: int = 1) -> None:
        """Write the exact fp32 master of one unit, padding included, into `out`. Shapes: [unit.num_elements]."""
        master_weights.merge(self.unit(index, "hi"), self.unit(index, "lo"), out, num_threads=num_threads)

    def write_master(self, name: str, tensor: torch.Tensor) -> None:
        """Set one parameter from any floating dtype, exactly where fp32 holds it (`reference` has the guards)."""
        _, place = self.layout.find(name)
        assert tuple(tensor.shape) == place.shape, f"{name}: {tuple(tensor.shape)} given, {place.shape} stored"
        master = tensor.detach().to(device="cpu", dtype=torch.float32).contiguous().view(-1)
        master_weights.split(master, self._flat(name, "hi"), self._flat(name, "lo"))

    def host_bytes(self) -> dict[str, int]:
        """Bytes of host memory by component: weights, moments, gradients."""
        totals = {"weights": 0, "moments": 0, "gradients": 0}
        for name, plane in self._planes.items():
            totals[_COMPONENT_OF_PLANE[name]] += plane.numel() * plane.element_size()
        return totals

    def close(self) -> None:
        """Let go of the planes. Memory is unmapped when its last view is gone; owned descriptors are closed now."""
        self._planes.clear()
        if self._owns_fds:
            for fd in self._fds.values():
                os.close(fd)
        self._fds.clear()

    def _flat(self, name: str, plane: str) -> torch.Tensor:
        unit, place = self.layout.find(name)
        self._blank.discard(plane)
        return self._planes[plane].narrow(0, unit.offset + place.offset, place.num_elements)


def _sizes(layout: StoreLayout, grad_dtype: torch.dtype | None) -> dict[str, int]:
    assert grad_dtype in (None, torch.float32, torch.bfloat16), f"gradients are fp32 or bf16, not {grad_dtype}"
    return plane_sizes(layout, grad_dtype_bytes=0 if grad_dtype is None else grad_dtype.itemsize)
