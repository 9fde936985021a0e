"""A checkpoint whose optimizer states have another form than those of the store that it is loaded into: a tensor's
halves and moments, from one form to the other, piece by piece.

From exact to compressed, masters are rounded to 24 bits and moments to their codes, to the nearest. The way back
changes no number.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from horizon_server.store import reference
from horizon_server.store.host_store import HostStore, merge_master, split_master
from horizon_server.store.layout import COMPRESSED_GROUP
from horizon_server.store.safetensors_files import TensorHeader

_NEAREST = np.full(COMPRESSED_GROUP, 0.5, dtype=np.float32)

PLANES_OF = {
    "lo": ("hi", "lo8"),
    "exp_avg": ("exp_avg8", "scales"),
    "exp_avg_sq": ("root8", "scales"),
    "lo8": ("lo",),
    "exp_avg8": ("exp_avg",),
    "root8": ("exp_avg_sq",),
    "scales": (),
}
"""The planes of the store that the files of a stem are converted to; `hi` has to be there before `lo`."""
_COLUMNS = {"exp_avg8": 0, "root8": 1}
_DTYPES = {
    "lo": torch.int16,
    "exp_avg": torch.float32,
    "exp_avg_sq": torch.float32,
    "lo8": torch.int8,
    "exp_avg8": torch.int8,
    "root8": torch.uint8,
}


def read_scales(header: TensorHeader) -> torch.Tensor:
    """The scales of one tensor of a checkpoint: 4 bytes for each 32 elements. Shapes: [groups, 2], bf16."""
    raw = bytearray(header.end - header.start)
    with header.file.open("rb", buffering=0) as stream:
        done = 0
        while done < len(raw):
            # A file that became shorter does not pass its checksum, which is compared afterwards.
            if not (count := os.preadv(stream.fileno(), [memoryview(raw)[done:]], header.start + done)):
                break
            done += count
    return torch.frombuffer(raw, dtype=torch.bfloat16).view(-1, 2)


def convert(
    store: HostStore, name: str, stem: str, piece: memoryview, start: int, scales_of: Mapping[str, torch.Tensor]
) -> None:
    """Put a piece of a tensor's bytes in the files of a stem where the store has it. `start` is its first element, with
    which a group begins; `scales_of` are the checkpoint's, by name, where that is compressed."""
    if stem == "scales":
        return
    values = torch.frombuffer(piece, dtype=_DTYPES[stem])
    part = slice(start, start + len(values))
    groups = slice(start // COMPRESSED_GROUP, -(-part.stop // COMPRESSED_GROUP))
    if stem == "lo":
        hi, master = store.flat(name, "hi", part), torch.empty(len(values))
        merge_master(hi, values, master)
        split_master(master, hi, store.flat(name, "lo8", part))
    elif stem == "lo8":
        store.flat(name, "lo", part).copy_(values.to(torch.int16) * 256)
    elif stem in ("exp_avg8", "root8"):
        scales = scales_of[name][groups]
        store.flat(name, PLANES_OF[stem][0], part).copy_(_decoded(stem, values, scales)[: len(values)])
    else:
        plane = PLANES_OF[stem][0]
        kept = store.flat(name, plane, part)
        codes, column = _encoded(stem, values, kept.dtype)
        kept.copy_(codes[: len(values)])
        store.flat(name, "scales", part).view(-1, 2)[:, _COLUMNS[plane]] = column


def _decoded(stem: str, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    column = scales[:, _COLUMNS[stem]].contiguous().view(torch.uint16).numpy()
    if stem == "exp_avg8":
        return torch.from_numpy(reference.decode_first(_whole_groups(codes), column))
    return torch.from_numpy(reference.decode_root(_whole_groups(codes), column)).square_()


def _encoded(stem: str, values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes of moments and their scales. Shapes: [G * 32] and [G]."""
    whole = _whole_groups(values)
    codes, column = (
        torch.empty(len(whole), dtype=dtype),
        torch.empty(len(whole) // COMPRESSED_GROUP, dtype=torch.bfloat16),
    )
    out = column.view(torch.uint16).numpy()
    if stem == "exp_avg":
        reference.encode_first(whole, _NEAREST, codes.numpy(), out)
    else:
        reference.encode_root(np.sqrt(whole), _NEAREST, codes.numpy(), out)
    return codes, column


def _whole_groups(values: torch.Tensor) -> npt.NDArray[Any]:
    """With zeros after the end. Pieces of a file begin with groups, but a tensor may end within one."""
    return np.pad(values.numpy(), (0, -len(values) % COMPRESSED_GROUP))
