"""Checkpoints: the store on disk, as a Hugging Face model folder plus, under trainer/, what training needs to continue
bit by bit.

A master weight is `hi` (bfloat16, rounded half up) and `lo`. What the model folder holds of it, and what is kept under
trainer/ besides the moments, the trainer's state and the manifest:

* F32: the master itself, and nothing else;
* BF16: the master rounded half to even, as torch rounds; in addition `lo`, and one bit per weight where `hi` was
  rounded the other way;
* F16: the master rounded half to even, which training cannot use; in addition `hi` and `lo`.

Of a tensor with compressed states, `lo8` is what `lo` is of others, and the moments are their codes and scales, as the
store has them. A store whose states have the other form takes a checkpoint where its caller says so.

A checkpoint of a job that trains adapters holds these and their moments alone, as a PEFT folder in F32, and names the
frozen model by its digest. With `export` merged or both it has that model with the adapters merged into it as well;
`checkpoint_parts` says where.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import torch

from horizon_server import progress
from horizon_server.durable import durable_folder
from horizon_server.errors import InvalidModel
from horizon_server.store.adapter_files import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_STEM,
    BASE_SHA256_FILE,
    PEFT_PREFIX,
    AdapterConfig,
    adapter_config_text,
    read_adapter_folder,
)
from horizon_server.store.adapter_load import rounding_of, weight_change
from horizon_server.store.base_digest import check_base
from horizon_server.store.checkpoint_parts import (
    ADAPTER_PREFIX,
    MERGED_FOLDER,
    MERGED_PREFIX,
    Export,
    MergeBase,
    adapter_part,
)
from horizon_server.store.exported import (
    CONFIG_DTYPES,
    DTYPE_OF_EXPORT,
    MODEL_STEM,
    ExportDtype,
    copy_companions,
    folder_bytes,
    write_model_folder,
)
from horizon_server.store.generation_config import text_with_ends
from horizon_server.store.host_store import HostStore, merge_master, split_master
from horizon_server.store.layout import COMPRESSED_GROUP, COMPRESSED_PLANES, EXACT_PLANES, StoreLayout, TensorLayout
from horizon_server.store.manifest import (
    TRAINER_FOLDER,
    BaseModel,
    FileRecord,
    Manifest,
    read_manifest,
    record_file,
    write_manifest,
)
from horizon_server.store.merging import (
    MergeOrigin,
    base_format,
    merged_bytes,
    write_merged,
)
from horizon_server.store.model_card import Holds, ResultFacts, write_card, write_facts
from horizon_server.store.model_files import CONFIG_FILE
from horizon_server.store.model_load import load_model
from horizon_server.store.safetensors_files import (
    DEFAULT_SHARD_BYTES,
    DTYPE_BYTES,
    PIECE_BYTES,
    TensorBytes,
    TensorHeader,
    read_safetensors_headers,
    write_sharded,
    write_text,
)
from horizon_server.store.states_conversion import PLANES_OF, convert, read_scales
from horizon_server.version import VERSION

STATE_FILE = f"{TRAINER_FOLDER}/trainer_state.json"

# The stems of the safetensors files: the model's own, and those under trainer/.
_ROUNDING = "rounding"
_DTYPE_OF_PLANE = {
    "hi": "BF16",
    "lo": "I16",
    "exp_avg": "F32",
    "exp_avg_sq": "F32",
    "lo8": "I8",
    "exp_avg8": "I8",
    "root8": "U8",
    "scales": "BF16",
}
_STEMS = (MODEL_STEM, _ROUNDING, *_DTYPE_OF_PLANE)
NUM_WRITERS = 5
"""Files that are written or read at a time: each thread keeps the memory of what it converts."""

# Of a tensor, converted at once. Each writer thread keeps the memory of one such piece: at 4 Mi elements a worker grew
# by 180 MiB, at this size by 27, and writing takes as long.
_PIECE_ELEMENTS = 1 << 19


@dataclass(frozen=True, kw_only=True)
class AdapterExport:
    """How the checkpoints of a job that trains adapters are written.

    `base_sha256` gives the digest of the model, once it is needed. `module_prefix` is what the model's class has before
    the names of the folder's tensors, such as `transformer.` where the folder was saved without it. `merge_base` says
    what adapters are merged into where the store's frozen weights are packed.
    """

    config: AdapterConfig
    base_sha256: Callable[[], str]
    module_prefix: str = ""
    export: Export = "adapter"
    merge_base: MergeBase = "trained"


def save_checkpoint(
    store: HostStore,
    target: Path,
    *,
    source: Path,
    trainer_state: Mapping[str, Any],
    dtype: ExportDtype = "source",
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    min_free_bytes: int | None = None,
    adapter: AdapterExport | None = None,
    on_overflow: Callable[[str], None] | None = None,
    answer_ends: Collection[int] = (),
    facts: ResultFacts | None = None,
) -> Manifest:
    """Write the folder `target`: whole, checksummed and on disk when this returns, or not there at all.

    Config and tokenizer come from the model folder `source`, and with dtype "source" each tensor's format. Nothing may
    update the store meanwhile. `min_free_bytes` of the disk stay free; None takes the default for the disk. `adapter`
    is needed where the store has adapters; the model that they are merged into is then `source`. `answer_ends` are
    tokens that end answers besides those that the source's generation_config.json lists; the checkpoint's lists them
    too. `facts` are what the folder says of itself; without them it has the card of `source`. `on_overflow` gets the
    name of each tensor that holds numbers which are infinite in fp16, once; trainer/ has them as they are.

    Raises:
        AlreadyExists: `target` is there already.
        DiskFull: there is not enough space; nothing is left there.
        InvalidModel: `source` has no readable config.json or weights.
    """
    assert (adapter is not None) == _has_adapters(store.layout), "adapters are written as the job says"
    dtypes = _export_dtypes(store, source, dtype) if adapter is None else _adapter_dtypes(store.layout)
    generation_config = text_with_ends(source, answer_ends)
    groups = {stem: tensors for stem in _STEMS if (tensors := _tensor_bytes(store, stem, dtypes, adapter, on_overflow))}
    needed_bytes = folder_bytes(source, ((t.name, t.size_bytes) for tensors in groups.values() for t in tensors))
    if adapter is not None and adapter.export != "adapter":
        needed_bytes += merged_bytes(source, dtype)
    # Before anything is written: it may take long the first time.
    base = None if adapter is None else BaseModel(model=adapter.config.base, sha256=adapter.base_sha256())
    model_prefix = "" if adapter is None else ADAPTER_PREFIX[adapter.export]
    files: dict[str, FileRecord] = {}
    with durable_folder(target, needed_bytes=needed_bytes, min_free_bytes=min_free_bytes) as folder:

        def write_group(stem: str) -> dict[str, FileRecord]:
            tensors = groups[stem]
            if stem != MODEL_STEM:
                prefix = f"{TRAINER_FOLDER}/"
                return _below(prefix, write_sharded(folder / prefix, stem, tensors, shard_bytes=shard_bytes))
            if adapter is None:
                return write_model_folder(
                    folder, tensors, source=source, shard_bytes=shard_bytes, generation_config=generation_config
                )
            # PEFT reads no shards.
            whole_bytes = sum(tensor.size_bytes for tensor in tensors)
            written = write_sharded(folder / model_prefix, ADAPTER_STEM, tensors, shard_bytes=whole_bytes)
            return _below(model_prefix, written)

        (folder / TRAINER_FOLDER).mkdir()
        (folder / model_prefix).mkdir(parents=True, exist_ok=True)
        if adapter is not None:
            name, text = f"{model_prefix}{ADAPTER_CONFIG_FILE}", _adapter_config(store.layout, adapter)
            files[name] = write_text(folder / name, text)
            assert base is not None, "adapters have a base"
            # Without the manifest, which is not part of the adapter, who gets it would not know what it is for.
            name = f"{model_prefix}{BASE_SHA256_FILE}"
            files[name] = write_text(folder / name, base.sha256)
            files |= copy_companions(source, folder, generation_config=generation_config)
        # Hashing and writing release the GIL, so the groups take no longer than the largest of them.
        with ThreadPoolExecutor(max_workers=min(len(groups), NUM_WRITERS)) as pool:
            for written in pool.map(write_group, groups):
                files |= written
        if adapter is not None and adapter.export != "adapter":
            prefix, merged = MERGED_PREFIX[adapter.export], read_adapter_folder(folder / model_prefix)
            (folder / prefix).mkdir(exist_ok=True)
            assert base is not None, "adapters have a base"
            packing_of = {place.name: place.packing for _, place in store.layout.tensors() if place.packing != "none"}
            found = write_merged(
                folder / prefix,
                base=source,
                adapter=merged,
                dtype=dtype,
                shard_bytes=shard_bytes,
                advance=lambda _: progress.advance(),
                change_of=weight_change,
                generation_config=generation_config,
                rounding=rounding_of(packing_of) if adapter.merge_base == "trained" else None,
                origin=MergeOrigin(
                    base_model=base.model,
                    base_sha256=base.sha256,
                    base=adapter.merge_base,
                    base_format=base_format(adapter.merge_base, packing_of),
                ),
            )
            files |= _below(prefix, found)
        if facts is not None:
            # In the place of the source's own card.
            whole: Holds = "model" if adapter is None else "merged"
            files |= write_facts(folder, facts, whole if CONFIG_FILE in files else "adapter")
            prefix = f"{MERGED_FOLDER}/"
            if f"{prefix}{CONFIG_FILE}" in files:
                files |= _below(prefix, write_card(folder / prefix, facts, "merged"))
        files[STATE_FILE] = write_text(folder / STATE_FILE, json.dumps(trainer_state, indent=2) + "\n")
        versions = {"horizon": VERSION, "torch": torch.__version__, "python": platform.python_version()}
        manifest = Manifest(files=dict(sorted(files.items())), versions=versions, base=base)
        write_manifest(folder, manifest)
    return manifest


def load_checkpoint(
    store: HostStore,
    folder: Path,
    *,
    base: Path | None = None,
    base_sha256: Callable[[], str] | None = None,
    on_conversion: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Restore every plane bit by bit, checking every file against the manifest on the way; returns the trainer's state.
    Where optimizer states have another form than the store's, they are converted, and `on_conversion` gets a sentence
    about it; without that, such a checkpoint is refused.

    Names, shapes and sizes are checked before anything is written. When a checksum fails later on, the store's
    contents are undefined and must not be trained on. Where the store has adapters, its frozen weights come from the
    model folder `base`, whose digest `base_sha256` gives.

    Raises:
        InvalidModel: the folder is not a checkpoint, is truncated, belongs to another model, has optimizer states of
            another form, or a file's checksum fails; it is named.
    """
    manifest = read_manifest(folder)
    if _has_adapters(store.layout) != (manifest.base is not None):
        held = "the whole model" if manifest.base is None else "adapters only"
        raise InvalidModel(
            f"is a checkpoint of {held}, which this job does not train; use another checkpoint", file=folder
        )
    if manifest.base is not None:
        assert base is not None and base_sha256 is not None, "adapters have a base"
        check_base("the checkpoint's adapter", manifest.base.sha256, base_sha256(), model=manifest.base.model)
    for name, record in manifest.files.items():
        if not (folder / name).is_file():
            raise InvalidModel("is missing from the checkpoint; use another checkpoint", file=folder / name)
        if (size_bytes := (folder / name).stat().st_size) != record.size_bytes:
            raise InvalidModel(
                f"has {size_bytes} bytes, its manifest says {record.size_bytes}; it is truncated; use another "
                "checkpoint",
                file=folder / name,
            )
    headers = _compressed_headers(folder, manifest)
    if is_converted := _is_converted(store.layout, headers):
        forms = ("exact", "compressed") if not headers else ("compressed", "exact")
        has = f"has {forms[0]} optimizer states, and this job keeps {forms[1]} ones (train.optimizer_states)"
        if on_conversion is None:
            raise InvalidModel(f"{has}; start a new job with it: init_from", file=folder)
        how = "rounded to 8 bits, and the weights to 24" if not headers else "widened, which changes no number"
        on_conversion(f"the checkpoint {has}: they were {how}")
    contents = _plan_reads(store, folder, manifest, compressed=headers)
    scales_of = {name: read_scales(header) for name, header in headers.items()} if is_converted else {}
    if manifest.base is not None:
        assert base is not None
        load_model(store, base)

    def restore(name: str) -> None:
        file, content = folder / name, contents.get(name)
        # A file without tensors is read for its checksum only.
        sha256 = record_file(file).sha256 if content is None else _restore_tensors(store, file, *content, scales_of)
        if sha256 != manifest.files[name].sha256:
            raise InvalidModel("does not match its checksum: the file is corrupt; use another checkpoint", file=file)

    # The rounding bits change what the model's own files have put in place, and 24 bits are rounded from what is then
    # exact.
    turns = {_ROUNDING: 1, "lo": 2 if is_converted else 0}
    turn_of = {name: turns.get(contents[name][0], 0) if name in contents else 0 for name in manifest.files}
    for turn in range(3):
        # Files that are converted write to the same planes.
        with ThreadPoolExecutor(max_workers=1 if is_converted else NUM_WRITERS) as pool:
            list(pool.map(restore, [name for name in manifest.files if turn_of[name] == turn]))
    state = json.loads((folder / STATE_FILE).read_bytes())
    assert isinstance(state, dict), "the trainer's state was written as an object"
    return state


def _compressed_headers(folder: Path, manifest: Manifest) -> dict[str, TensorHeader]:
    """Of the tensors whose states are compressed in a checkpoint, the scales."""
    if not any(name.startswith(f"{TRAINER_FOLDER}/scales") for name in manifest.files):
        return {}
    return read_safetensors_headers(folder / TRAINER_FOLDER, stem="scales")


def _is_converted(layout: StoreLayout, compressed: Collection[str]) -> bool:
    """Whether a store has the states of some tensor in another form than a checkpoint."""
    return any(place.compressed != (place.name in compressed) for place in _held(layout))


def _has_adapters(layout: StoreLayout) -> bool:
    return any(place.adapts for _, place in layout.tensors())


def _held(layout: StoreLayout) -> list[TensorLayout]:
    """What a checkpoint holds: the adapters, or where there are none, everything."""
    places = [place for _, place in layout.tensors()]
    return [place for place in places if place.adapts] or places


def _adapter_dtypes(layout: StoreLayout) -> dict[str, str]:
    # They are small, and exact so.
    return {place.name: "F32" for place in _held(layout)}


def _adapter_config(layout: StoreLayout, adapter: AdapterExport) -> str:
    weights = {place.name for _, place in layout.tensors() if not place.adapts and place.name.endswith(".weight")}
    adapted = {place.adapts for place in _held(layout)}
    modules, targets = (
        [adapter.module_prefix + name.removesuffix(".weight") for name in names] for names in (weights, adapted)
    )
    return adapter_config_text(adapter.config, targets, modules)


def _below(prefix: str, files: Mapping[str, FileRecord]) -> dict[str, FileRecord]:
    return {f"{prefix}{name}": record for name, record in files.items()}


def _export_dtypes(store: HostStore, source: Path, wanted: ExportDtype) -> dict[str, str]:
    """The safetensors dtype of every stored tensor in the model folder."""
    headers = read_safetensors_headers(source)
    names = [place.name for _, place in store.layout.tensors()]
    if wanted != "source":
        return dict.fromkeys(names, DTYPE_OF_EXPORT[wanted])
    dtypes = {name: headers[name].dtype if name in headers else "" for name in names}
    # bfloat16 for what the source does not have, such as a projection that it ties and the model does not.
    return {name: dtype if dtype in CONFIG_DTYPES else "BF16" for name, dtype in dtypes.items()}


def _tensor_bytes(
    store: HostStore,
    stem: str,
    dtypes: Mapping[str, str],
    adapter: AdapterExport | None,
    on_overflow: Callable[[str], None] | None,
) -> list[TensorBytes]:
    """The tensors of the files of a stem, which may be none."""
    tensors = []
    for place in _held(store.layout):
        if (form := _form(stem, place, dtypes[place.name])) is None:
            continue
        dtype, shape = form
        size_bytes = math.prod(shape) * DTYPE_BYTES[dtype]
        pieces = partial(_pieces, store, place.name, stem, dtype, on_overflow)
        name = place.name
        if stem == MODEL_STEM and adapter is not None:
            name = f"{PEFT_PREFIX}{adapter.module_prefix}{name}"
        tensors.append(TensorBytes(name=name, dtype=dtype, shape=shape, size_bytes=size_bytes, pieces=pieces))
    return tensors


def _form(stem: str, place: TensorLayout, exported_as: str) -> tuple[str, tuple[int, ...]] | None:
    """Dtype and shape of a tensor in the files of a stem; None where they do not hold it."""
    if stem == MODEL_STEM:
        return exported_as, place.shape
    if stem == _ROUNDING:
        return ("U8", (-(-place.num_elements // 8),)) if exported_as == "BF16" and place.exact else None
    if stem == "hi":
        is_kept = exported_as == "F16"
    elif stem in ("lo", "lo8"):
        is_kept = place.low == stem and exported_as != "F32"
    else:
        is_kept = place.trained and place.compressed == (stem in COMPRESSED_PLANES)
    shape = (-(-place.num_elements // COMPRESSED_GROUP), 2) if stem == "scales" else place.shape
    return (_DTYPE_OF_PLANE[stem], shape) if is_kept else None


def _pieces(
    store: HostStore, name: str, stem: str, dtype: str, on_overflow: Callable[[str], None] | None
) -> Iterator[memoryview]:
    """The bytes of a tensor in the files of a stem; each piece is valid until the next is asked for."""
    if stem in _DTYPE_OF_PLANE:
        for stretch in store.stretches(name):
            with store.reading(name, stem, stretch):
                yield store.flat(name, stem, stretch).view(torch.uint8).numpy().data
        return
    for stretch in store.stretches(name):
        if (yield from _pieces_of_halves(store, name, stretch, stem, dtype, on_overflow)):
            on_overflow = None


def _pieces_of_halves(
    store: HostStore, name: str, stretch: slice, stem: str, dtype: str, on_overflow: Callable[[str], None] | None
) -> Generator[memoryview, None, bool]:
    """`_pieces` of a stretch in a file that has neither of the planes as they are. Returns whether `on_overflow` was
    called, which is called once."""
    overflows = False
    hi, plane = store.flat(name, "hi", stretch), store.layout.find(name)[1].low
    is_merged = dtype in ("F32", "F16")
    master = torch.empty(min(len(hi), _PIECE_ELEMENTS) if is_merged else 0, dtype=torch.float32)
    with ExitStack() as read:
        for half in ("hi",) if plane is None else ("hi", plane):
            read.enter_context(store.reading(name, half, stretch))
        low = store.low(name, stretch)
        # What has no `lo` half is what it would be if all of that were 0.
        lo = torch.zeros(min(len(hi), _PIECE_ELEMENTS), dtype=torch.int16) if low is None else low
        # Of a weight halfway between two bfloat16 numbers.
        tie = torch.iinfo(lo.dtype).min
        for start in range(0, len(hi), _PIECE_ELEMENTS):
            part = slice(start, start + _PIECE_ELEMENTS)
            lo_part = lo[: len(hi[part])] if plane is None else lo[part]
            if is_merged:
                merged = master[: len(hi[part])]
                merge_master(hi[part], lo_part, merged)
                written = merged if dtype == "F32" else merged.to(torch.float16)
                if dtype == "F16" and on_overflow is not None and not overflows:
                    overflows = bool((written.isinf() & merged.isfinite()).any())
                    if overflows:
                        on_overflow(name)
                yield written.view(torch.uint8).numpy().data
                continue
            bits = hi[part].view(torch.uint16).numpy()
            # 1 where half to even gives the number below `hi`: on a tie, and where `hi` is odd.
            down = np.where(lo_part.numpy() == tie, bits & np.uint16(1), np.uint16(0))
            if stem == _ROUNDING:
                yield np.packbits(down.astype(np.bool_)).data
            else:
                # Hardly any piece has a tie, so the plane's own memory is written.
                yield (bits - down if down.any() else bits).view(np.uint8).data
    return overflows


def _plan_reads(
    store: HostStore, folder: Path, manifest: Manifest, *, compressed: Collection[str]
) -> dict[str, tuple[str, list[TensorHeader]]]:
    """For every safetensors file: its stem and its tensors in file order. `compressed` are those whose states are so in
    the checkpoint."""
    contents: dict[str, tuple[str, list[TensorHeader]]] = {}
    dtypes: dict[str, str] = {}
    held = [replace(place, compressed=place.name in compressed) for place in _held(store.layout)]
    of_adapter = adapter_part(manifest.files)
    for stem in _STEMS:
        prefix = "" if stem == MODEL_STEM else f"{TRAINER_FOLDER}/"
        wanted = {t.name: form for t in held if (form := _form(stem, t, dtypes.get(t.name, "")))}
        if not wanted:
            continue
        if stem == MODEL_STEM and of_adapter is not None:
            headers = read_adapter_folder(folder / of_adapter).tensors(wanted)
        else:
            headers = read_safetensors_headers(folder / prefix, stem=stem)
        if differing := sorted(set(wanted) ^ set(headers)):
            raise InvalidModel(
                f"is a checkpoint of another model: {differing[0]} is in only one of the two", file=folder
            )
        for name, (dtype, shape) in wanted.items():
            found = headers[name]
            # The model's own weights may have any dtype that is exported.
            is_read = found.dtype in CONFIG_DTYPES if stem == MODEL_STEM else found.dtype == dtype
            if found.shape != shape or not is_read:
                raise InvalidModel(
                    f": {name} is {found.dtype} {list(found.shape)}, "
                    f"the store holds {dtype or 'BF16'} {list(shape)}; the checkpoint is of another model",
                    file=found.file,
                )
        if stem == MODEL_STEM:
            # Which halves are in the files under trainer/ follows from the format of the model's own.
            dtypes = {name: header.dtype for name, header in headers.items()}
        for header in headers.values():
            name = header.file.relative_to(folder).as_posix()
            if name not in manifest.files:
                raise InvalidModel("is not in the checkpoint's manifest; use another checkpoint", file=header.file)
            contents.setdefault(name, (stem, []))[1].append(header)
    return contents


def _restore_tensors(
    store: HostStore, file: Path, stem: str, headers: Sequence[TensorHeader], scales_of: Mapping[str, torch.Tensor]
) -> str:
    """Read a file once: its tensors into the store, every byte into the checksum that is returned."""
    digest = hashlib.sha256()
    staging = memoryview(bytearray(PIECE_BYTES))
    with file.open("rb", buffering=0) as stream:
        header = memoryview(bytearray(headers[0].start))
        _read_into(stream, header)
        digest.update(header)
        for tensor in headers:
            place = store.layout.find(tensor.name)[1]
            # BF16 is `hi` but for its rounding; these bytes go to the plane as they are, all others through staging.
            plane = "hi" if stem == MODEL_STEM and tensor.dtype == "BF16" else stem
            is_converted = plane in PLANES_OF and place.compressed == (plane in EXACT_PLANES)
            is_master = stem == MODEL_STEM and tensor.dtype == "F32"
            # Those that the file's values go to; of a model in fp16 they are in other files.
            written_planes = ["hi"] if is_master or stem == _ROUNDING else []
            if is_master and place.low is not None:
                written_planes.append(place.low)
            if is_converted:
                written_planes += PLANES_OF[plane]
            elif plane in _DTYPE_OF_PLANE:
                written_planes.append(plane)
            for stretch in store.stretches(tensor.name):
                with ExitStack() as written:
                    for name in written_planes:
                        reads = is_converted or stem == _ROUNDING
                        written.enter_context(store.writing(tensor.name, name, stretch, reads=reads))
                    in_place = None
                    if plane in _DTYPE_OF_PLANE and not is_converted:
                        in_place = store.flat(tensor.name, plane, stretch).view(torch.uint8).numpy().data
                    begin, end = (_bytes_before(stem, tensor.dtype, count) for count in (stretch.start, stretch.stop))
                    for start in range(begin, end, PIECE_BYTES):
                        size = min(PIECE_BYTES, end - start)
                        piece = staging[:size] if in_place is None else in_place[start - begin : start - begin + size]
                        _read_into(stream, piece)
                        digest.update(piece)
                        if is_converted:
                            convert(store, tensor.name, plane, piece, start // DTYPE_BYTES[tensor.dtype], scales_of)
                        elif stem == _ROUNDING:
                            part = slice(8 * start, min(8 * (start + size), stretch.stop))
                            bits = store.flat(tensor.name, "hi", part).view(torch.uint16).numpy()
                            bits += np.unpackbits(np.frombuffer(piece, dtype=np.uint8), count=len(bits))
                        elif is_master:
                            part = slice(start // 4, (start + size) // 4)
                            lo = store.low(tensor.name, part)
                            lo = torch.empty(size // 4, dtype=torch.int16) if lo is None else lo
                            master = torch.frombuffer(piece, dtype=torch.float32)
                            split_master(master, store.flat(tensor.name, "hi", part), lo)
    return digest.hexdigest()


def _bytes_before(stem: str, dtype: str, num_elements: int) -> int:
    """What a tensor's first elements take in the files of a stem; they end with a group of compressed states, or are
    all."""
    if stem == _ROUNDING:
        return -(-num_elements // 8)
    if stem == "scales":
        return 2 * DTYPE_BYTES[dtype] * -(-num_elements // COMPRESSED_GROUP)
    return num_elements * DTYPE_BYTES[dtype]


def _read_into(stream: FileIO, piece: memoryview) -> None:
    progress.advance()
    done = 0
    # One raw read may return fewer bytes than were asked for.
    while done < len(piece):
        count = stream.readinto(piece[done:])
        if not count:
            raise InvalidModel(f"{stream.name} became shorter while it was read; use another checkpoint")
        done += count
