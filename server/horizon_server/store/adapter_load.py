"""Adapters merged with torch: into the weights of a store that only reads them, and for the files of a process that has
torch anyway."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from horizon_server import progress
from horizon_server.store.adapter_files import AdapterConfig, AdapterFolder, AdapterHeaders
from horizon_server.store.host_store import HostStore, merge_master, split_master
from horizon_server.store.layout import Packing
from horizon_server.store.merging import Floats, Rounding, lengths, read_floats
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
    """Merge an adapter into the weights that it is for, in fp32; these must have both halves of the master in the
    store.

    Raises:
        InvalidModel: the adapter is of another model, or not finite.
    """
    shapes = {place.name: place.shape for _, place in store.layout.tensors()}
    for name, found in adapter.of_weights(shapes).items():
        _merge_one(store, name, found, adapter.config)
        progress.advance()


def _merge_one(store: HostStore, name: str, found: AdapterHeaders, config: AdapterConfig) -> None:
    change = weight_change(found.a, found.b, config.scale, config.transposed)
    hi, lo = store.flat(name, "hi"), store.low(name)
    assert lo is not None, "the weights under an adapter have both halves"
    num_rows, width = store.layout.find(name)[1].shape
    step = max(1, _PIECE_ELEMENTS // width)

    def pieces() -> Iterator[tuple[slice, torch.Tensor]]:
        for start in range(0, num_rows, step):
            rows = slice(start, min(start + step, num_rows))
            part = slice(rows.start * width, rows.stop * width)
            master = torch.empty(part.stop - part.start)
            merge_master(hi[part], lo[part], master)
            yield rows, master.view(-1, width).add_(torch.from_numpy(change(rows.start, rows.stop)))

    gain_O = None
    if found.magnitude is not None:
        # Over all pieces before the first is written: a transposed weight has each output in all rows.
        squares = [values.double().square().sum(int(not config.transposed)) for _, values in pieces()]
        squares_O = torch.stack(squares).sum(0) if config.transposed else torch.cat(squares)
        gain_O = torch.from_numpy(read_floats(found.magnitude) / lengths(squares_O.numpy()))
    for rows, values in pieces():
        if gain_O is not None:
            values *= gain_O if config.transposed else gain_O[rows, None]
        part = slice(rows.start * width, rows.stop * width)
        split_master(values.view(-1), hi[part], lo[part])
