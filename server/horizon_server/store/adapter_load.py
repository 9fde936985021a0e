"""Adapters merged with torch: into the weights of a store that only reads them, and for the files of a process that has torch anyway."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from horizon_server import progress
from horizon_server.store.adapter_files import AdapterFolder
from horizon_server.store.host_store import HostStore, merge_master, split_master
from horizon_server.store.layout import Packing
from horizon_server.store.merging import Floats, Rounding, read_floats
from horizon_server.store.packing import round_rows
from horizon_server.store.safetensors_files import TensorHeader

_PIECE_ELEMENTS = 1 << 20


def weight_change(a: TensorHeader, b: TensorHeader, scale: float, transposed: bool) -> Callable[[int, int], Floats]:
    """Do what `merging.weight_change` does. NumPy's own threads spin while they wait, next to torch's."""
    a_RI, b_OR = torch.from_numpy(read_floats(a)), torch.from_numpy(read_floats(b))
    left, right = (a_RI.T, b_OR.T) if transposed else (b_OR, a_RI)
    left = (scale * left).contiguous()

    def rows(start: int, end: int) -> Floats:
        product: Floats = (left[start:end] @ right).numpy()
        return product

    return rows


def rounding_of(packing_of: Mapping[str, Packing]) -> Rounding | None:
    """How a base with these packed tensors was rounded; None where it was not."""
    packed = {name: packing for name, packing in packing_of.items() if packing != "none"}
    if not packed:
        return None
    return Rounding(packing_of=packed, round_rows=lambda values, packing: round_rows(torch.from_numpy(values), packing))


def merge_into(store: HostStore, adapter: AdapterFolder) -> None:
    """Add scale * B A to the weights that the adapter is for, in fp32; these must have both halves of the master in the store.

    Raises:
        InvalidModel: the adapter is of another model, or not finite.
    """
    shapes = {place.name: place.shape for _, place in store.layout.tensors()}
    for name, pair in adapter.of_weights(shapes).items():
        change = weight_change(*pair, adapter.config.scale, adapter.config.transposed)
        hi, lo, (num_rows, width) = store.flat(name, "hi"), store.flat(name, "lo"), shapes[name]
        rows_at_once = max(1, _PIECE_ELEMENTS // width)
        for start in range(0, num_rows, rows_at_once):
            end = min(start + rows_at_once, num_rows)
            part = slice(start * width, end * width)
            master = torch.empty((end - start) * width)
            merge_master(hi[part], lo[part], master)
            master += torch.from_numpy(change(start, end)).reshape(-1)
            split_master(master, hi[part], lo[part])
        progress.advance()
