"""A model folder with an adapter merged into it, written tensor by tensor with bounded memory: V = W + scale * B A, or
with magnitudes m (DoRA) m V / |V|. Torch-free.

Each number is computed in fp32 from the exact values of base and adapter, and rounded once to the format it is written
in. The values of a base that was trained on in fewer bits may be those that it was rounded to.

Sources: LoRA (arXiv 2106.09685), section 4.2; DoRA (arXiv 2402.09353), equation 5.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from horizon_server.errors import InvalidModel
from horizon_server.store.adapter_files import AdapterFolder
from horizon_server.store.checkpoint_parts import MergeBase
from horizon_server.store.cpus import available_cpus
from horizon_server.store.exported import CONFIG_DTYPES, DTYPE_OF_EXPORT, ExportDtype, folder_bytes, write_model_folder
from horizon_server.store.layout import BLOCKS_PER_GROUP, NF4_BLOCK, Packing
from horizon_server.store.manifest import FileRecord
from horizon_server.store.safetensors_files import (
    DEFAULT_SHARD_BYTES,
    DTYPE_BYTES,
    TensorBytes,
    TensorHeader,
    read_safetensors_headers,
    write_text,
)

ORIGIN_FILE = "horizon_merge.json"
"""In the folder of a merged model: what it was made from."""

# Of a tensor, converted at once by a thread: what it makes stays in the processor's cache.
_PIECE_ELEMENTS = 1 << 18
_NUM_THREADS = 4
Floats = npt.NDArray[np.float32]
ChangeOf = Callable[[TensorHeader, TensorHeader, float, bool], Callable[[int, int], Floats]]
RoundRows = Callable[[Floats, Packing], None]
"""Replaces rows of a matrix, in fp32, by what they are in fewer bits: `packing.round_rows`, which has torch."""


@dataclass(frozen=True, kw_only=True)
class MergeOrigin:
    """What a merged model was made from, as `ORIGIN_FILE` says it: the base's name and digest, and how its values were
    taken.

    `base` is what was asked for; `base_format` is the packing whose rounded values were used, or `source` for the
    folder's own values.
    """

    base_model: str
    base_sha256: str
    base: MergeBase
    base_format: str


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """How a base was rounded when it was trained on: the packing of each tensor that was packed, by name."""

    packing_of: Mapping[str, Packing]
    round_rows: RoundRows


def base_format(base: MergeBase, packing_of: Mapping[str, Packing]) -> str:
    """The `MergeOrigin.base_format` of a base whose packed tensors are those."""
    return next(iter(packing_of.values()), "source") if base == "trained" else "source"


def read_origin(merged: Path) -> MergeOrigin:
    """What a merged model in this folder was made from. Raises InvalidModel where it does not say."""
    try:
        return MergeOrigin(**json.loads((merged / ORIGIN_FILE).read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise InvalidModel(
            f"{merged / ORIGIN_FILE} cannot be read ({error}); remove the merged model, then merge again"
        ) from error


def merged_dtype(merged: Path) -> ExportDtype:
    """The number format of the weights of a model; `source` where they have several, which only the base's own formats
    can give."""
    found = {header.dtype for header in read_safetensors_headers(merged).values()} & CONFIG_DTYPES.keys()
    return next((name for name, dtype in DTYPE_OF_EXPORT.items() if found == {dtype}), "source")


def has_dtype(merged: Path, dtype: ExportDtype, base: Path | None) -> bool:
    """Whether a merged model's tensors are in the formats that `dtype` gives them; `source` is compared with its
    base."""
    headers = read_safetensors_headers(merged)
    of_base = headers if base is None else read_safetensors_headers(base)
    return all(
        name in of_base and header.dtype == _written_as(of_base[name], dtype) for name, header in headers.items()
    )


def merged_bytes(base: Path, dtype: ExportDtype) -> int:
    """The disk space that a merged model takes at most."""
    headers = read_safetensors_headers(base).values()
    return folder_bytes(base, ((h.name, math.prod(h.shape) * DTYPE_BYTES[_written_as(h, dtype)]) for h in headers))


def write_merged(
    folder: Path,
    *,
    base: Path,
    adapter: AdapterFolder,
    dtype: ExportDtype = "source",
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    advance: Callable[[int], None] = lambda _: None,
    change_of: ChangeOf | None = None,
    rounding: Rounding | None = None,
    origin: MergeOrigin | None = None,
    generation_config: str | None = None,
) -> dict[str, FileRecord]:
    """Fill `folder`, which is empty, with the model of `base` and `adapter`; returns its files. `advance` is given
    bytes as they are read. `change_of` multiplies in the place of `weight_change`. With `rounding` the base's values
    are those that it was trained on; `origin` is written next to the model.

    Tensors, config and companions are those of `base`; with dtype "source" each tensor keeps its format.
    `generation_config` takes the place of the base's own.

    Raises:
        InvalidModel: the adapter is for another model, or a tensor is not finite in the format; it is named.
    """
    headers = read_safetensors_headers(base)
    adapters = adapter.of_weights({name: header.shape for name, header in headers.items()})
    with ThreadPoolExecutor(max_workers=min(_NUM_THREADS, available_cpus())) as pool:
        tensors = []
        for name, header in headers.items():
            written_as = _written_as(header, dtype)
            merged = None
            if (found := adapters.get(name)) is not None:
                transposed = adapter.config.transposed
                multiply = partial(change_of or weight_change, found.a, found.b, adapter.config.scale, transposed)
                merged = _Merged(multiply=multiply, magnitude=found.magnitude, transposed=transposed)
            pieces = partial(_pieces, header, written_as, merged, rounding, advance, pool)
            size_bytes = math.prod(header.shape) * DTYPE_BYTES[written_as]
            tensors.append(
                TensorBytes(name=name, dtype=written_as, shape=header.shape, size_bytes=size_bytes, pieces=pieces)
            )
        files = write_model_folder(
            folder, tensors, source=base, shard_bytes=shard_bytes, generation_config=generation_config
        )
    if origin is not None:
        files[ORIGIN_FILE] = write_text(folder / ORIGIN_FILE, json.dumps(asdict(origin), indent=2) + "\n")
    return files


@dataclass(frozen=True, kw_only=True)
class _Merged:
    """What an adapter makes of a weight. `multiply` gives what `weight_change` does; `magnitude` are DoRA's."""

    multiply: Callable[[], Callable[[int, int], Floats]]
    magnitude: TensorHeader | None
    transposed: bool

    def into(self, rows: Callable[[], Iterator[tuple[int, int, Floats]]]) -> Callable[[int, int, Floats], None]:
        """Returns what changes rows `start` to `end` of the weight in place; `rows` reads all of them, a piece at a
        time."""
        change = self.multiply()

        def add(start: int, end: int, values: Floats) -> None:
            values += change(start, end)

        if self.magnitude is None:
            return add
        magnitude_O = read_floats(self.magnitude)
        if not self.transposed:

            def scale_rows(start: int, end: int, values: Floats) -> None:
                add(start, end, values)
                values *= (magnitude_O[start:end] / lengths(np.square(values).sum(axis=1)))[:, None]

            return scale_rows
        # The weights of an output are in all rows, so they are read twice.
        squares_O = np.zeros(magnitude_O.shape, dtype=np.float64)
        for start, end, values in rows():
            add(start, end, values)
            squares_O += np.square(values).sum(axis=0)
        gains_O = magnitude_O / lengths(squares_O)

        def scale_columns(start: int, end: int, values: Floats) -> None:
            add(start, end, values)
            values *= gains_O

        return scale_columns


def lengths(squares: npt.NDArray[Any]) -> Floats:
    """The norms of sums of squares, which may be divided by; as `adapter_norms` has them."""
    found: Floats = np.maximum(np.sqrt(squares).astype(np.float32), np.finfo(np.float32).tiny)
    return found


def weight_change(a: TensorHeader, b: TensorHeader, scale: float, transposed: bool) -> Callable[[int, int], Floats]:
    """Returns what gives rows `start` to `end` of scale * B A, in the orientation of the adapted weight.

    Shapes: [end - start, inputs], or [end - start, outputs] of a transposed weight.
    """
    a_RI, b_OR = read_floats(a), read_floats(b)
    left, right = (a_RI.T, b_OR.T) if transposed else (b_OR, a_RI)
    # Once here, instead of for every piece of the weight.
    left = np.ascontiguousarray(np.float32(scale) * left)
    return lambda start, end: left[start:end] @ right


def read_floats(header: TensorHeader) -> Floats:
    """A whole small tensor, exactly, in fp32. Raises InvalidModel where a value is not finite."""
    with header.file.open("rb") as stream:
        stream.seek(header.start)
        values = _as_floats(stream.read(header.end - header.start), header.dtype)
    if not np.isfinite(values).all():
        raise InvalidModel(f": {header.name} holds NaN or infinite values; the adapter is broken", file=header.file)
    return values.reshape(header.shape)


def _written_as(header: TensorHeader, dtype: ExportDtype) -> str:
    """The format of a tensor in the merged model: buffers of whole numbers stay as they are."""
    return header.dtype if dtype == "source" or header.dtype not in CONFIG_DTYPES else DTYPE_OF_EXPORT[dtype]


def _pieces(
    header: TensorHeader,
    written_as: str,
    merged: _Merged | None,
    rounding: Rounding | None,
    advance: Callable[[int], None],
    pool: ThreadPoolExecutor,
) -> Iterator[memoryview]:
    width = header.shape[-1] if len(header.shape) > 1 else 1
    num_rows = math.prod(header.shape) // width if width else 0
    packing: Packing = "none" if rounding is None else rounding.packing_of.get(header.name, "none")
    # Whole groups of scales, so that a piece is rounded as the whole tensor is.
    grain = math.lcm(width, NF4_BLOCK * BLOCKS_PER_GROUP) // width if packing == "nf4" else 1
    rows_at_once = max(grain, _PIECE_ELEMENTS // max(1, width) // grain * grain)
    row_bytes = width * DTYPE_BYTES[header.dtype]

    def values_of(raw: bytearray) -> Floats:
        values = _as_floats(raw, header.dtype)
        if rounding is not None and packing != "none":
            rounding.round_rows(values.reshape(-1, width), packing)
        return values

    def converted(raw: bytearray, start: int, end: int) -> memoryview:
        if merge is None and packing == "none" and written_as == header.dtype:
            return memoryview(raw)
        values = values_of(raw)
        if merge is not None:
            merge(start, end, values.reshape(-1, width))
        return _encoded(values, written_as, header.name).view(np.uint8).data

    def read() -> Iterator[tuple[int, int, bytearray]]:
        with header.file.open("rb", buffering=0) as stream:
            stream.seek(header.start)
            for start in range(0, num_rows, rows_at_once):
                end = min(start + rows_at_once, num_rows)
                raw = bytearray((end - start) * row_bytes)
                done = 0
                while done < len(raw):
                    count = stream.readinto(memoryview(raw)[done:])
                    if not count:
                        raise InvalidModel(
                            "became shorter while it was read; copy or download it again", file=header.file
                        )
                    done += count
                yield start, end, raw

    def rows() -> Iterator[tuple[int, int, Floats]]:
        return ((start, end, values_of(raw).reshape(-1, width)) for start, end, raw in read())

    merge = None if merged is None else merged.into(rows)
    # Read in order and converted by several threads, a few pieces ahead of what is written.
    waiting: deque[Future[memoryview]] = deque()
    for start, end, raw in read():
        advance(len(raw))
        waiting.append(pool.submit(converted, raw, start, end))
        if len(waiting) > _NUM_THREADS:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _as_floats(raw: bytes | bytearray, dtype: str) -> Floats:
    if dtype == "BF16":
        return (np.frombuffer(raw, dtype="<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    return np.frombuffer(raw, dtype="<f2" if dtype == "F16" else "<f4").astype(np.float32)


def _encoded(values: Floats, dtype: str, name: str) -> npt.NDArray[Any]:
    if dtype == "F32":
        encoded: npt.NDArray[Any] = values
    elif dtype == "F16":
        with np.errstate(over="ignore"):
            encoded = values.astype(np.float16)
    else:
        bits = values.view(np.uint32)
        # Half to even, as torch rounds.
        odd = bits >> np.uint32(16)
        odd &= np.uint32(1)
        odd += bits
        odd += np.uint32(0x7FFF)
        odd >>= np.uint32(16)
        encoded = odd.astype(np.uint16)
    # One pass without a copy; a sum of finite values may be too large, so what it finds is looked at again.
    with np.errstate(over="ignore", invalid="ignore"):
        is_sound = np.isfinite(values.sum()) and (
            dtype != "F16" or (np.isfinite(encoded.max()) and np.isfinite(encoded.min()))
        )
    if not is_sound and not (np.isfinite(values).all() and (dtype != "F16" or np.isfinite(encoded).all())):
        raise InvalidModel(
            f"{name} holds values that are not finite in {CONFIG_DTYPES[dtype]}; export with dtype bf16 or fp32"
        )
    return encoded
