"""Local files to push: which files make a dataset or a model, the checks before anything is sent, and the hashes.

The rules for datasets are those of the server, by the same code (`horizon_formats`). Parquet and zstd need Arrow: the
server reads those. Of a model folder only what a model needs is pushed. Pickle files never are, whatever their name.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeAlias

from horizon_client.errors import BadFile, InvalidRequest
from horizon_client.reporter import SILENT, Phase, Progress, Reporter
from horizon_formats.checks import DatasetCheck
from horizon_formats.files import COMPRESSED_SUFFIXES, SENT_FROM_FOLDERS, DataFile, plain_suffix
from horizon_formats.formats import parse_format
from horizon_formats.model_files import ADAPTER_WEIGHTS_FILE, is_adapter, is_pickle, pushed_files
from horizon_formats.problems import FormatError, InvalidOption, ServerOnly, writable

Sources: TypeAlias = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""One file or folder, or several."""

PIECE_BYTES = 4 * 2**20  # files are read in pieces, so that an interrupt is noticed between two of them
MAX_NAME = 63

_MOST_NAMED = 5
_NO_FILES = {
    stat.S_ISFIFO: "pipe",
    stat.S_ISSOCK: "socket",
    stat.S_ISCHR: "device",
    stat.S_ISBLK: "device",
    stat.S_ISDIR: "folder",
}
# Binary files, and texts that no program reads.
_NOT_CHECKED = (
    *("*.model", "*.model.v*", "LICENSE*", "NOTICE*", "README.md", "USE_POLICY*", "model_card.md", "MODEL_CARD.md"),
    *("vocab.bpe", "bpe.codes"),
)
_MAX_HEADER_BYTES = 64 * 2**20
_MAX_TEXT_BYTES = 256 * 2**20
_BITS = {"F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16, "U16": 16}
_BITS |= {"F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I8": 8, "U8": 8, "BOOL": 8}


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an error of the operating system into a BadFile that names the file."""
    try:
        yield
    except OSError as error:
        raise BadFile(f"cannot read {writable(str(path))}: {error.strerror}") from error


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """A local file and the path it will have in the dataset or model."""

    source: Path
    path: str
    size_bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, source: Path, path: str) -> SourceFile:
        """Return the file at `source`, which will be `path` on the server; BadFile when it cannot be read, or there is
        nothing to read."""
        if writable(path) != path:
            raise BadFile(f"the name of the file {writable(str(source))} is not UTF-8; rename it")
        with reading(source):
            status = source.stat()
            # Before it is opened: a named pipe would wait for somebody who writes into it
            kind = next((name for is_kind, name in _NO_FILES.items() if is_kind(status.st_mode)), None)
            if kind is not None:
                raise BadFile(f"{source} is a {kind}, not a regular file; write its data to a file and push that")
            # stat works without the right to read, and that should be noticed before the first file is sent
            with source.open("rb"):
                pass
        if status.st_size == 0:
            raise BadFile(f"{source} is empty")
        return cls(source=source, path=path, size_bytes=status.st_size, mtime_ns=status.st_mtime_ns)

    def require_unchanged(self) -> None:
        """Refuse a file that was written to in the meantime."""
        with reading(self.source):
            status = self.source.stat()
        if (status.st_size, status.st_mtime_ns) != (self.size_bytes, self.mtime_ns):
            raise BadFile(f"{self.source} was changed while it was being pushed; run the same command again")


@dataclass(frozen=True, kw_only=True)
class HashedFile(SourceFile):
    """A local file with the sha256 of its content."""

    sha256: str


async def read_through(
    files: Sequence[SourceFile],
    read: Callable[[SourceFile], Iterator[int]],
    phase: Phase,
    on_progress: Callable[[Progress], None],
) -> None:
    """Read all files; `read` yields the bytes that it has processed of one, and each of its steps runs in a thread."""
    total = sum(file.size_bytes for file in files)
    done = 0
    for file in files:
        steps = read(file)
        while True:
            # Only around the step: an error of `on_progress`, the caller's code, is not an error of the file
            with reading(file.source):
                num_bytes = await asyncio.to_thread(next, steps, None)
            if num_bytes is None:
                break
            done = min(done + num_bytes, total)  # a file may grow while it is read
            on_progress(Progress(phase=phase, name=file.path, done_bytes=done, total_bytes=total))


async def hash_files(files: Sequence[SourceFile], reporter: Reporter) -> list[HashedFile]:
    """Return the files with their sha256, reading each once."""
    hashed: list[HashedFile] = []

    def read(file: SourceFile) -> Iterator[int]:
        digest = hashlib.sha256()
        with file.source.open("rb") as content:
            while piece := content.read(PIECE_BYTES):
                digest.update(piece)
                yield len(piece)
        file.require_unchanged()  # or the hash would be of neither version
        hashed.append(HashedFile(**vars(file), sha256=digest.hexdigest()))

    await read_through(files, read, "hash", reporter.progress)
    return hashed


def valid_name(source: Path) -> str:
    """Return the name under which a local file (without its endings) or folder is pushed."""
    resolved = source.resolve()
    # Of `train.jsonl.gz` both endings go; a folder may well be called `Qwen2.5-7B`
    text = resolved.name if resolved.is_dir() else resolved.name.split(".")[0]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:MAX_NAME] or "data"


def dataset_sources(sources: Sources, reporter: Reporter = SILENT) -> list[SourceFile]:
    """Return the data files of `sources`, each with its path in the dataset; notices name what is skipped.

    A folder means the data files in it and in its subfolders. Skipped are hidden files, links to folders, and links to
    files outside the folder: nothing is sent that is not in the folder.

    Raises:
        BadFile: when a source does not exist or cannot be read, a folder contains no data, or a file was given twice.
    """
    # A str is also a sequence, of its letters
    given = [sources] if isinstance(sources, str | os.PathLike) else list(sources)
    found: list[tuple[Path, str]] = []
    for source in given:
        path = Path(source).expanduser()
        found += _inside(path, reporter) if path.is_dir() else [(path, path.name)]
    if not found:
        raise BadFile("no file was given")
    if len({name for _, name in found}) < len(found):
        # Names must differ, so they start at the common folder
        absolute = [path.absolute() for path, _ in found]
        if len(set(absolute)) != len(absolute):
            twice = next(path for path in absolute if absolute.count(path) > 1)
            raise BadFile(f"{twice} was given twice")
        common = Path(os.path.commonpath([path.parent for path in absolute]))
        found = [(path, path.relative_to(common).as_posix()) for path in absolute]
    return [SourceFile.of(path, name) for path, name in found]


async def check_dataset_files(
    files: Sequence[SourceFile],
    on_progress: Callable[[Progress], None],
    *,
    format: str = "auto",  # noqa: A002 - the name users know from the command and the contract
    field_map: Mapping[str, str] | None = None,
) -> None:
    """Read the files through once, except those that only the server can read.

    Raises:
        BadFile: naming the first file with bad rows, the first 100 of them as violations.
        InvalidRequest: when format or map are wrong whatever the files hold.
    """

    def read(file: SourceFile) -> Iterator[int]:
        with suppress(ServerOnly):
            yield from check.read(DataFile(path=file.source, name=str(file.source)))
        check.violations.refuse()  # after each file, so that the error is about one file

    try:
        check = DatasetCheck(parse_format(format), field_map or {})
        await read_through(files, read, "check", on_progress)
        check.report()
    except FormatError as error:
        kind = InvalidRequest if isinstance(error, InvalidOption) else BadFile
        raise kind(error.message, violations=error.violations) from error


def _inside(folder: Path, reporter: Reporter) -> list[tuple[Path, str]]:
    """Return the data files in a folder, each with its path in it."""

    def refuse(error: OSError) -> None:
        raise BadFile(f"cannot read the folder {error.filename}: {error.strerror}") from error

    data: list[tuple[Path, str]] = []
    others: list[str] = []
    outside: list[str] = []
    root = folder.resolve()
    for place, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        # Not followed, because a link to a folder may lead in a circle; listed, so that a notice names it
        links = [name for name in folders if (Path(place) / name).is_symlink()]
        for path in (Path(place) / name for name in sorted([*links, *files]) if not name.startswith(".")):
            name = path.relative_to(folder).as_posix()
            with reading(path):
                if not path.is_file() or plain_suffix(path.name) not in SENT_FROM_FOLDERS:
                    others.append(name)
                elif not path.resolve().is_relative_to(root):
                    outside.append(name)
                else:
                    data.append((path, name))
    for names, why in ((others, "not data files"), (outside, "links to files outside it")):
        if names:
            reporter.notice(f"skipped in {folder} ({why}): {_first(names)}")
    if not data:
        by_link = "; to push the files that its links lead to, name them one by one" if outside else ""
        endings = " or ".join(COMPRESSED_SUFFIXES)
        raise BadFile(
            f"the folder {folder} contains no data file; a data file ends in {', '.join(SENT_FROM_FOLDERS)}, also with "
            f"{endings}{by_link}"
        )
    return data


def _first(names: Sequence[str]) -> str:
    return writable(
        f"{', '.join(names[:_MOST_NAMED])}{', ...' if len(names) > _MOST_NAMED else ''} ({len(names)} in all)"
    )


def model_files(folder: str | os.PathLike[str]) -> list[SourceFile]:
    """Return the files of a folder that are pushed; BadFile when they are not a complete model or adapter in
    safetensors."""
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise BadFile(
            f"{root} is not a folder; a model is a folder with config.json, tokenizer files and *.safetensors"
        )
    chosen = pushed_files(root)
    of_adapter = is_adapter(chosen)
    if not of_adapter and "config.json" not in chosen:
        raise BadFile(f"{root} contains no config.json, so it is not a model folder")
    if of_adapter and ADAPTER_WEIGHTS_FILE not in chosen:
        raise BadFile(
            f"{root} is an adapter without {ADAPTER_WEIGHTS_FILE}; save it with PEFT's save_pretrained, as safetensors"
        )
    if not any(name.endswith(".safetensors") for name in chosen):
        pickles = sorted(entry.name for entry in root.iterdir() if entry.is_file() and is_pickle(entry.name))
        if not pickles:
            raise BadFile(f"{root} contains no *.safetensors file, so there are no weights to push")
        raise BadFile(
            f"{root} contains its weights as pickle only ({pickles[0]}), which can run code when it is loaded and is "
            "never pushed; convert it once where you trust it: "
            f"AutoModelForCausalLM.from_pretrained({str(root)!r}).save_pretrained('converted'), "
            "then push that folder"
        )
    files = [SourceFile.of(root / name, name) for name in chosen]
    for file in files:  # what would be refused after hours of upload
        _check(file, set(chosen))
    return files


def links_outside(folder: str | os.PathLike[str], files: Sequence[SourceFile]) -> str:
    """Return a notice that names the files of a model folder that are links out of it, "" without any. They are pushed
    all the same."""
    # A snapshot in a Hugging Face cache consists of links to the blobs next to it.
    root = Path(folder).expanduser().resolve()
    cache = root.parents[1] / "blobs" if root.parent.name == "snapshots" else root
    targets = {file.path: file.source.resolve() for file in files}
    outside = [name for name, target in targets.items() if not any(map(target.is_relative_to, (root, cache)))]
    return f"in {folder}, links to files outside it are pushed too: {_first(outside)}" if outside else ""


def _check(file: SourceFile, names: set[str]) -> None:
    if file.path.endswith(".safetensors"):
        _check_safetensors(file)
    elif file.path.endswith(".json"):
        try:
            content = json.loads(_text(file))
        except json.JSONDecodeError as error:
            raise BadFile(f"{file.source}, line {error.lineno}: not JSON: {error.msg}") from error
        except RecursionError as error:
            raise BadFile(f"{file.source} is nested too deeply") from error
        if file.path == "config.json" and not isinstance(content, dict):
            raise BadFile(f"{file.source} must hold a JSON object")
        if file.path.endswith(".safetensors.index.json"):
            _check_index(file, content, names)
    elif not any(fnmatchcase(file.path, pattern) for pattern in _NOT_CHECKED):
        _text(file)


def _text(file: SourceFile) -> str:
    if file.size_bytes > _MAX_TEXT_BYTES:
        raise BadFile(f"{file.source} is larger than 256 MiB; it is not what its name says")
    try:
        with reading(file.source):
            return file.source.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BadFile(f"{file.source} is not UTF-8 text at byte {error.start + 1}") from error


def _check_index(file: SourceFile, content: Any, names: set[str]) -> None:
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise BadFile(f"{file.source} contains no weight_map from tensors to files")
    missing = sorted(set(weight_map.values()) - names)
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise BadFile(
            f"{file.source} names {missing[0]}{more}, which is not in the folder; the download of the model is "
            "incomplete"
        )


def _check_safetensors(file: SourceFile) -> None:
    """Read the header only: tensors must fill the file from the header's end to its last byte, without gaps."""
    try:
        with reading(file.source), file.source.open("rb") as stream:
            num_header_bytes = int.from_bytes(stream.read(8), "little")
            if file.size_bytes < 8 or num_header_bytes > min(_MAX_HEADER_BYTES, file.size_bytes - 8):
                raise BadFile(
                    f"{file.source} is not a safetensors file, or is truncated: it is smaller than its header"
                )
            header = json.loads(stream.read(num_header_bytes).decode("utf-8"))
    except BadFile:  # is a ValueError too
        raise
    except (ValueError, RecursionError) as error:
        raise BadFile(f"{file.source} is not a safetensors file: its header is not JSON") from error
    if not isinstance(header, dict):
        raise BadFile(f"{file.source} is not a safetensors file: its header is not a JSON object")
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    spans = sorted(_span(file, name, entry) for name, entry in tensors.items())
    at = 0
    for begin, end in spans:
        if begin != at:
            raise BadFile(f"{file.source}: its tensors overlap or leave a gap at data byte {at}")
        at = end
    num_data_bytes = file.size_bytes - 8 - num_header_bytes
    if at != num_data_bytes:
        raise BadFile(
            f"{file.source} is damaged: its header describes {at} bytes of tensors, but it contains {num_data_bytes}"
        )


def _span(file: SourceFile, name: str, entry: object) -> tuple[int, int]:
    fields = entry if isinstance(entry, dict) else {}
    offsets, shape = _whole_numbers(fields.get("data_offsets")), _whole_numbers(fields.get("shape"))
    if offsets is None or shape is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise BadFile(f"{file.source}: the header's entry of tensor {name!r:.80} is malformed")
    bits = _BITS.get(str(fields.get("dtype")))
    # Of a dtype that this client does not know, the server judges the size
    if bits is not None and offsets[1] - offsets[0] != math.prod(shape) * bits // 8:
        raise BadFile(f"{file.source}: tensor {name!r:.80} has another size than its shape {shape} and dtype need")
    return offsets[0], offsets[1]


def _whole_numbers(value: object) -> list[int] | None:
    if not isinstance(value, list) or not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in value):
        return None
    return value
