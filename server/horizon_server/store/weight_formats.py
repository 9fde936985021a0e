"""Stored weights in the number formats that a checkpoint's model folder can have, and back without losing a bit.

A master weight is `hi` (bfloat16, rounded half up) and `lo`. What a model folder holds of it, and what is kept for training in addition:

* F32: the master itself, and nothing else;
* BF16: the master rounded half to even, as torch rounds; in addition `lo`, and one bit per weight where `hi` was rounded the other way;
* F16: the master rounded half to even, which training cannot use; in addition `hi` and `lo`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from horizon_server.store import master_weights
from horizon_server.store.host_store import HostStore
from horizon_server.store.safetensors_header import TensorHeader

ExportDtype = Literal["source", "bf16", "fp16", "fp32"]

CONFIG_NAMES: Mapping[str, str] = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_ASKED_FOR: Mapping[ExportDtype, str] = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}

_PIECE_ELEMENTS = 1 << 22
_TIE = -32768
"""The `lo` of a weight halfway between two bfloat16 numbers."""


def export_dtypes(store: HostStore, source: Mapping[str, TensorHeader], wanted: ExportDtype) -> dict[str, str]:
    """The safetensors dtype of every stored tensor in a model folder; bfloat16 for those that the source does not have."""
    names = [place.name for _, place in store.layout.tensors()]
    if wanted != "source":
        return dict.fromkeys(names, _ASKED_FOR[wanted])
    return {
        name: source[name].dtype if name in source and source[name].dtype in CONFIG_NAMES else "BF16" for name in names
    }


def exported(store: HostStore, name: str, dtype: str) -> Iterator[memoryview]:
    """The bytes of a tensor in a format, in pieces; each is valid until the next is asked for."""
    hi, lo = _halves(store, name)
    master = torch.empty(min(len(hi), _PIECE_ELEMENTS) if dtype != "BF16" else 0, dtype=torch.float32)
    for part in _parts(len(hi)):
        if dtype == "BF16":
            bits = hi[part].view(torch.uint16).numpy()
            down = _rounded_down(bits, lo[part].numpy())
            # Hardly any piece has a tie, so the plane's own memory is written.
            yield (bits - down if down.any() else bits).view(np.uint8).data
            continue
        merged = master[: part.stop - part.start]
        master_weights.merge(hi[part], lo[part], merged)
        yield (merged if dtype == "F32" else merged.to(torch.float16)).view(torch.uint8).numpy().data


def rounding_bytes(num_elements: int) -> int:
    """Size of `rounding` for a tensor."""
    return -(-num_elements // 8)


def rounding(store: HostStore, name: str) -> Iterator[memoryview]:
    """One bit per weight: whether BF16 as exported is the bfloat16 number below `hi`."""
    hi, lo = _halves(store, name)
    for part in _parts(len(hi)):
        yield np.packbits(_rounded_down(hi[part].view(torch.uint16).numpy(), lo[part].numpy()).astype(np.bool_)).data


def apply_rounding(store: HostStore, name: str, offset_bytes: int, piece: memoryview) -> None:
    """Make `hi` of what was exported as BF16 and restored into its place."""
    hi, _ = _halves(store, name)
    bits = hi[8 * offset_bytes : 8 * (offset_bytes + len(piece))].view(torch.uint16).numpy()
    bits += np.unpackbits(np.frombuffer(piece, dtype=np.uint8), count=len(bits))


def apply_master(store: HostStore, name: str, offset_bytes: int, piece: memoryview) -> None:
    """Take a piece of a tensor that was exported as F32 as the master."""
    hi, lo = _halves(store, name)
    master = torch.frombuffer(piece, dtype=torch.float32)
    part = slice(offset_bytes // 4, offset_bytes // 4 + len(master))
    master_weights.split(master, hi[part], lo[part])


def _halves(store: HostStore, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    return store.tensor(name, "hi").view(-1), store.tensor(name, "lo").view(-1)


def _parts(num_elements: int) -> Iterator[slice]:
    for start in range(0, num_elements, _PIECE_ELEMENTS):
        yield slice(start, min(start + _PIECE_ELEMENTS, num_elements))


def _rounded_down(hi_bits: npt.NDArray[np.uint16], lo: npt.NDArray[np.int16]) -> npt.NDArray[np.uint16]:
    """1 where half to even gives the number below `hi`: on a tie, and where `hi` is odd."""
    return np.where(lo == _TIE, hi_bits & np.uint16(1), np.uint16(0)).astype(np.uint16, copy=False)
