"""Brings the weights of a model folder into the store: tensor by tensor, in place, with a bounded staging buffer."""

from __future__ import annotations

import hashlib
import math
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import torch

from horizon_server import progress
from horizon_server.errors import InvalidModel
from horizon_server.store.adamw import sum_squares
from horizon_server.store.adapter_norms import adapted_norms, rows_at_once
from horizon_server.store.adapters import LORA_A, LORA_B
from horizon_server.store.cpus import available_cpus
from horizon_server.store.host_store import HostStore, merge_master, split_master
from horizon_server.store.layout import (
    MOMENT_PLANES,
    StoreLayout,
    TensorLayout,
    is_output_projection,
    parameter_shapes,
)
from horizon_server.store.model_files import is_prediction_head, read_config
from horizon_server.store.packing import piece_elements
from horizon_server.store.safetensors_files import TensorHeader, read_safetensors_headers

# Elements converted at once by each loading thread: 16 MiB of staging for fp32 files.
STAGING_ELEMENTS = 1 << 21
MAX_THREADS = 4
# Small enough that a piece is still in the cache when it is checked.
_IN_PLACE_BYTES = 1 << 20
_ZEROED_ELEMENTS = 1 << 26

_DTYPES: Mapping[str, torch.dtype] = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def load_model(
    store: HostStore, folder: Path, *, seed: int = 0, adapters: Mapping[str, TensorHeader] | None = None
) -> None:
    """Fill the store from a folder's safetensors (bf16, fp16 or fp32; one file or shards) and zero the moments.

    Every master is the exact value in the file. All names and shapes are checked before the first byte is written;
    needs no memory beyond the store and a small staging buffer per thread. Adapters, which no model folder holds, are
    read from `adapters`, headers by stored name; without them A is random by `seed`, B zero, and a magnitude the norm
    of its weights.

    Frozen weights that another job has loaded already, which this store maps too, are not read again.

    Raises:
        InvalidModel: a tensor is missing, left over, misshapen, of a dtype that cannot be trained, or not finite; it is
            named.
    """
    headers = read_safetensors_headers(folder)
    own = [place for _, place in store.layout.tensors() if not place.adapts]
    added = [place for _, place in store.layout.tensors() if place.adapts]
    _check(store.layout, own, headers, folder)
    tensors = [headers[place.name] for place in own if not place.trained]
    trained = [headers[place.name] for place in own if place.trained]
    if adapters is not None:
        _check_tensors(added, adapters, next((header.file.parent for header in adapters.values()), folder))
        trained += [adapters[place.name] for place in added]
        added = []
    staging = _Staging()
    # A plane that was never touched is zero already: each byte of the store is written once.
    parts = [
        memory[start : start + _ZEROED_ELEMENTS]
        for memory in store.zero(("lo", "lo8", *MOMENT_PLANES))
        for start in range(0, len(memory), _ZEROED_ELEMENTS)
    ]
    with ThreadPoolExecutor(max_workers=min(MAX_THREADS, available_cpus())) as pool:
        list(pool.map(_zero, parts))
        with store.loading_frozen(folder) as has_to_load:
            if has_to_load:
                list(pool.map(lambda header: _load_tensor(store, header, staging), tensors))
        list(pool.map(lambda header: _load_tensor(store, header, staging), trained))
        list(pool.map(lambda place: _start_adapter(store, place, seed), [p for p in added if p.norm_dim is None]))
    # One after the other: each may take a weight in fp32.
    for place in added:
        if place.norm_dim is not None:
            _start_adapter(store, place, seed)


class _Staging(threading.local):
    """One raw buffer and one fp32 buffer per loading thread, reused for every tensor."""

    def __init__(self) -> None:
        self.raw = bytearray(4 * STAGING_ELEMENTS)
        self.master = torch.empty(STAGING_ELEMENTS, dtype=torch.float32)


def _check(layout: StoreLayout, own: Sequence[TensorLayout], headers: Mapping[str, TensorHeader], folder: Path) -> None:
    _check_tensors(own, headers, folder)
    left_over = set(headers) - {place.name for place in own}
    parameters, config = parameter_shapes(headers), read_config(folder) if left_over else {}
    # What the model class leaves out as well: buffers that it computes, a projection that is the embedding, heads for
    # further tokens.
    unknown = [
        name
        for name in sorted(left_over & set(parameters))
        if not (layout.tied and is_output_projection(name)) and not is_prediction_head(config, name)
    ]
    if unknown:
        raise InvalidModel(
            f"holds {_some(unknown)}, which the model in its config.json does not have; "
            f"config and weights must belong together",
            file=folder,
        )


def _check_tensors(places: Sequence[TensorLayout], headers: Mapping[str, TensorHeader], folder: Path) -> None:
    wanted = {place.name: place.shape for place in places}
    if missing := sorted(set(wanted) - set(headers)):
        raise InvalidModel(
            f"lacks {_some(missing)}, which the model in its config.json has; config and weights must belong together",
            file=folder,
        )
    for name, shape in wanted.items():
        header = headers[name]
        if header.shape != shape:
            raise InvalidModel(
                f": {name} has shape {list(header.shape)}, the model needs {list(shape)}", file=header.file
            )
        if header.dtype not in _DTYPES:
            raise InvalidModel(
                f": {name} is {header.dtype}; weights must be bfloat16, float16 or float32", file=header.file
            )


def _zero(part: torch.Tensor) -> None:
    part.zero_()
    progress.advance()


def _start_adapter(store: HostStore, place: TensorLayout, seed: int) -> None:
    """The values that a new adapter begins with: A as PEFT has it, B zero, a magnitude what it is divided by, so that
    the model begins as it is. All weights are in the store.

    Each tensor has random numbers of its own, so they depend neither on threads nor on which other adapters there are.
    """
    norms = None if place.norm_dim is None else _norms(store, place.adapts, place.norm_dim)
    plane = place.low
    assert plane is not None, "what is trained has both halves"
    digest = hashlib.blake2b(f"{seed}/{place.name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
    for stretch in store.stretches(place.name):
        with store.writing(place.name, "hi", stretch), store.writing(place.name, plane, stretch):
            hi, lo = store.flat(place.name, "hi", stretch), store.flat(place.name, plane, stretch)
            if norms is not None:
                split_master(norms[stretch], hi, lo)
            elif place.name.endswith(LORA_B):
                hi.zero_()
                lo.zero_()
            else:
                _draw_adapter(place, hi, lo, generator)


def _draw_adapter(place: TensorLayout, hi: torch.Tensor, lo: torch.Tensor, generator: torch.Generator) -> None:
    """Draw the next of its elements."""
    assert place.name.endswith(LORA_A)
    # kaiming_uniform_(a=sqrt(5)) for [rank, inputs].
    bound = 1 / math.sqrt(place.shape[1])
    for start in range(0, len(hi), STAGING_ELEMENTS):
        part = slice(start, start + STAGING_ELEMENTS)
        values = torch.empty(len(hi[part]), dtype=torch.float32).uniform_(-bound, bound, generator=generator)
        split_master(values, hi[part], lo[part])
    progress.advance()


def _norms(store: HostStore, name: str, norm_dim: int) -> torch.Tensor:
    """The norms of a frozen weight as it is computed with. Shapes: [outputs], fp32."""
    place = store.layout.find(name)[1]
    num_rows, width = place.shape

    def values(start: int, end: int) -> torch.Tensor:
        part = slice(start * width, end * width)
        hi, lo, master = store.flat(name, "hi")[part], store.low(name), torch.empty((end - start) * width)
        if lo is not None:
            merge_master(hi, lo[part], master)
        else:
            master.copy_(hi)
        return master.view(-1, width)

    (whole_weight,) = store.stretches(name)
    with ExitStack() as read:
        for plane in _halves(place) if place.packing == "none" else ():
            read.enter_context(store.reading(name, plane, whole_weight))
        if place.packing != "none" or not norm_dim:
            whole = values(0, num_rows) if place.packing == "none" else store.unpacked(name)
            return adapted_norms(whole, None, None, scale=0.0, norm_dim=norm_dim)
        # In pieces: next to the largest models a whole matrix in fp32 is much.
        step = rows_at_once(width)
        pieces = (values(start, min(start + step, num_rows)) for start in range(0, num_rows, step))
        return torch.cat([adapted_norms(piece, None, None, scale=0.0, norm_dim=norm_dim) for piece in pieces])


def _load_tensor(store: HostStore, header: TensorHeader, staging: _Staging) -> None:
    place = store.layout.find(header.name)[1]
    dtype = _DTYPES[header.dtype]
    if dtype is torch.bfloat16 and place.packing == "none":
        whole = slice(0, place.num_elements)
        with store.writing(header.name, "hi", whole):
            _load_in_place(store.flat(header.name, "hi"), header)
        return
    planes = _halves(place) if place.packing == "none" else ("packed",)
    at_once = STAGING_ELEMENTS if place.packing == "none" else piece_elements(place, STAGING_ELEMENTS)
    with header.file.open("rb", buffering=0) as stream:
        for stretch in store.stretches(header.name):
            with ExitStack() as written:
                for plane in planes:
                    written.enter_context(store.writing(header.name, plane, stretch))
                for offset in range(stretch.start, stretch.stop, at_once):
                    num_elements = min(at_once, stretch.stop - offset)
                    view = memoryview(staging.raw)[: num_elements * dtype.itemsize]
                    _read_fully(stream.fileno(), view, header.start + offset * dtype.itemsize, header.file)
                    values = torch.frombuffer(staging.raw, dtype=dtype, count=num_elements)
                    _store_values(store, header, offset, staging.master[:num_elements].copy_(values))


def _store_values(store: HostStore, header: TensorHeader, offset: int, master: torch.Tensor) -> None:
    """Put a tensor's values from an element on into the planes, which are in memory."""
    place = store.layout.find(header.name)[1]
    if place.packing != "none":
        _require_finite(master, header)
        store.write_packed(header.name, master, start=offset)
        return
    part = slice(offset, offset + len(master))
    hi, lo = store.flat(header.name, "hi", part), store.low(header.name, part)
    assert lo is not None, "only what bfloat16 holds exactly has one half"
    split_master(master, hi, lo)
    _require_finite(hi, header)


def _halves(place: TensorLayout) -> tuple[str, ...]:
    """The planes of an unpacked weight."""
    return ("hi",) if place.low is None else ("hi", place.low)


def _load_in_place(hi: torch.Tensor, header: TensorHeader) -> None:
    """From the file straight into the plane; `lo` stays zero: the file holds no more than `hi` does."""
    memory = memoryview(hi.view(torch.uint8).numpy().data)
    with header.file.open("rb", buffering=0) as stream:
        for start in range(0, len(memory), _IN_PLACE_BYTES):
            piece = memory[start : start + _IN_PLACE_BYTES]
            _read_fully(stream.fileno(), piece, header.start + start, header.file)
            _require_finite(hi[start // 2 : (start + len(piece)) // 2], header)


def _require_finite(values: torch.Tensor, header: TensorHeader) -> None:
    if values.numel() and not sum_squares(values).is_finite:
        raise InvalidModel(f": {header.name} holds NaN or infinite values; the weights are broken", file=header.file)


def _read_fully(descriptor: int, view: memoryview, position: int, file: Path) -> None:
    progress.advance()
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], position + done)
        if count == 0:
            raise InvalidModel("became shorter while it was read; copy or download it again", file=file)
        done += count


def _some(names: list[str]) -> str:
    more = len(names) - 3
    return ", ".join(names[:3]) + (f" and {more} more" if more > 0 else "")
