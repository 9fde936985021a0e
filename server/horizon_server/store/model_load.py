"""Brings the weights of a model folder into the store: tensor by tensor, in place, with a bounded staging buffer.

Owns the checks of names, shapes, dtypes and finiteness, and the conversion to the exact master.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from horizon_server.errors import InvalidModel
from horizon_server.store import master_weights
from horizon_server.store.adamw import sum_squares
from horizon_server.store.cpus import available_cpus
from horizon_server.store.host_store import HostStore
from horizon_server.store.layout import StoreLayout, is_output_projection, parameter_shapes
from horizon_server.store.model_files import is_prediction_head, read_config
from horizon_server.store.safetensors_header import TensorHeader, read_safetensors_headers

STAGING_ELEMENTS = 1 << 21
"""Elements converted at once by each loading thread: 16 MiB of staging for fp32 files."""

MAX_THREADS = 4
_IN_PLACE_BYTES = 1 << 20

_DTYPES: Mapping[str, torch.dtype] = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_MAX_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What was loaded, and which tensors of the folder were left out with the reason for each."""

    num_tensors: int
    ignored: Mapping[str, str]


def load_model(store: HostStore, folder: Path) -> LoadReport:
    """Fill the store from a folder's safetensors (bf16, fp16 or fp32; one file or shards) and zero the moments.

    Every master is the exact value in the file. All names and shapes are checked before the first byte is written;
    needs no memory beyond the store and a small staging buffer per thread.

    Raises:
        InvalidModel: a tensor is missing, left over, misshapen, of a dtype that cannot be trained, or not finite; it
        is named.
    """
    headers = read_safetensors_headers(folder)
    ignored = _check(store.layout, headers, folder)
    tensors = [headers[place.name] for _, place in store.layout.tensors()]
    staging = _Staging()
    to_zero = [plane for plane in ("lo", "exp_avg", "exp_avg_sq") if not store.is_blank(plane)]
    with ThreadPoolExecutor(max_workers=min(MAX_THREADS, available_cpus())) as pool:
        list(pool.map(lambda plane: store.plane(plane).zero_(), to_zero))
        list(pool.map(lambda header: _load_tensor(store, header, staging), tensors))
    for name, header in headers.items():
        if store.layout.tied and is_output_projection(name):
            ignored[name] = _why_projection_is_ignored(store, header, staging)
            break
    return LoadReport(num_tensors=len(tensors), ignored=ignored)


class _Staging(threading.local):
    """One raw buffer and one fp32 buffer per loading thread, reused for every tensor."""

    def __init__(self) -> None:
        self.raw = bytearray(4 * STAGING_ELEMENTS)
        self.master = torch.empty(STAGING_ELEMENTS, dtype=torch.float32)


def _check(layout: StoreLayout, headers: Mapping[str, TensorHeader], folder: Path) -> dict[str, str]:
    wanted = {place.name: place.shape for _, place in layout.tensors()}
    if missing := sorted(set(wanted) - set(headers)):
        raise InvalidModel(
            f"{folder} lacks {_some(missing)}, which the model in its config.json has; config and weights must belong together"
        )
    for name, shape in wanted.items():
        header = headers[name]
        if header.shape != shape:
            raise InvalidModel(f"{header.file}: {name} has shape {list(header.shape)}, the model needs {list(shape)}")
        if header.dtype not in _DTYPES:
            raise InvalidModel(f"{header.file}: {name} is {header.dtype}; weights must be bfloat16, float16 or float32")
    return _explain_left_over(layout, headers, set(headers) - set(wanted), folder)


def _explain_left_over(
    layout: StoreLayout, headers: Mapping[str, TensorHeader], left_over: set[str], folder: Path
) -> dict[str, str]:
    parameters, config = parameter_shapes(headers), read_config(folder) if left_over else {}
    ignored: dict[str, str] = {}
    unknown: list[str] = []
    for name in sorted(left_over):
        if name not in parameters:
            ignored[name] = "a buffer that the model computes by itself"
        elif layout.tied and is_output_projection(name):
            ignored[name] = "tied to the embedding"
        elif is_prediction_head(config, name):
            ignored[name] = "part of a head that predicts further tokens, which the model class leaves out"
        else:
            unknown.append(name)
    if unknown:
        raise InvalidModel(
            f"{folder} holds {_some(unknown)}, which the model in its config.json does not have; "
            f"config and weights must belong together"
        )
    return ignored


def _load_tensor(store: HostStore, header: TensorHeader, staging: _Staging) -> None:
    unit, place = store.layout.find(header.name)
    hi = store.plane("hi").narrow(0, unit.offset + place.offset, place.num_elements)
    if header.dtype == "BF16":
        _read_in_place(hi, header)  # lo stays zero: the file holds no more than hi does
        return
    lo = store.plane("lo").narrow(0, unit.offset + place.offset, place.num_elements)
    for offset, piece in _pieces(header, staging):
        part = slice(offset, offset + piece.numel())
        master = staging.master[: piece.numel()].copy_(piece)
        master_weights.split(master, hi[part], lo[part])
        _require_finite(hi[part], header)


def _read_in_place(hi: torch.Tensor, header: TensorHeader) -> None:
    """From the file straight into the plane, each piece checked while it is still in the cache."""
    memory = memoryview(hi.view(torch.uint8).numpy().data)
    with header.file.open("rb", buffering=0) as stream:
        for start in range(0, len(memory), _IN_PLACE_BYTES):
            piece = memory[start : start + _IN_PLACE_BYTES]
            _read_fully(stream.fileno(), piece, header.start + start, header.file)
            _require_finite(hi[start // 2 : (start + len(piece)) // 2], header)


def _require_finite(hi: torch.Tensor, header: TensorHeader) -> None:
    if hi.numel() and not sum_squares(hi).is_finite:
        raise InvalidModel(f"{header.file}: {header.name} holds NaN or infinite values; the weights are broken")


def _pieces(header: TensorHeader, staging: _Staging) -> Iterator[tuple[int, torch.Tensor]]:
    dtype = _DTYPES[header.dtype]
    with header.file.open("rb", buffering=0) as stream:
        for offset in range(0, header.num_elements, STAGING_ELEMENTS):
            num_elements = min(STAGING_ELEMENTS, header.num_elements - offset)
            view = memoryview(staging.raw)[: num_elements * dtype.itemsize]
            _read_fully(stream.fileno(), view, header.start + offset * dtype.itemsize, header.file)
            yield offset, torch.frombuffer(staging.raw, dtype=dtype, count=num_elements)


def _read_fully(descriptor: int, view: memoryview, position: int, file: Path) -> None:
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], position + done)
        if count == 0:
            raise InvalidModel(f"{file} became shorter while it was read; copy or download it again")
        done += count


def _why_projection_is_ignored(store: HostStore, header: TensorHeader, staging: _Staging) -> str:
    table = next((place for place in store.layout.units[0].tensors if place.shape == header.shape), None)
    if table is None or header.dtype not in _DTYPES:
        return "the model ties it to the embedding, although its shape or dtype differs"
    hi = store.tensor(table.name, "hi").view(-1)
    for offset, piece in _pieces(header, staging):
        if not torch.equal(hi[offset : offset + piece.numel()], piece.to(torch.bfloat16)):
            return "the model ties it to the embedding, whose values are used although these differ"
    return "the model ties it to the embedding, which it equals"


def _some(names: list[str]) -> str:
    more = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
