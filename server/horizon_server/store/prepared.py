"""A prepared dataset on disk: the planes of its tokens, for the writer and the reader.

A folder holds `tokens.safetensors`, with three planes, those that the kind of the data adds, and one of weights where
some target has one, and `report.json` with the kind and the counts; rows held out for evaluation are in a folder of the
same layout inside it.
"""

from __future__ import annotations

import array
import contextlib
import errno
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO

from horizon_formats.formats import DataKind
from horizon_server.durable import is_out_of_space, replace_file, sync_folder
from horizon_server.errors import DiskFull, InvalidData
from horizon_server.store.safetensors_files import file_header

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TOKENS_FILE = "tokens.safetensors"
REPORT_FILE = "report.json"
EVALUATION_FOLDER = "evaluation"

# Names and safetensors dtypes. Document d has the tokens from `document_starts[d]` to `document_starts[d + 1]`;
# `trained[t]` is 1 where token t is a target.
PLANES = {"document_starts": "I64", "input_ids": "I32", "trained": "U8"}
# What a kind adds: a label for each document, numbers for each target in the order of the documents.
_MORE_PLANES: Mapping[DataKind, Mapping[str, str]] = {
    DataKind.KTO: {"labels": "I8"},
    DataKind.SAMPLES: {"old_logprobs": "F32", "advantages": "F32"},
}
# Of kind `text`, one for each target, where at least one is not 1.
WEIGHTS = "weights"
_WIDTHS = {"I64": 8, "I32": 4, "F32": 4, "U8": 1, "I8": 1}

# Values of the plane `labels`; the objective of KTO has the same. A mismatched document is a prompt with another row's
# completion.
DESIRABLE, UNDESIRABLE, MISMATCHED = 1, 0, -1

_COPY_BYTES = 16 * 1024 * 1024
# Five planes; its own writer needs a tenth of it.
_MAX_HEADER_BYTES = 64 * 1024
_ONES_AT_ONCE = 1024 * 1024
# Between the name of the folder and a random end: what a killed writer left can be found by its target.
_PARTIAL = ".tmp-"


def planes_of(kind: DataKind, *, weighted: bool = False) -> dict[str, str]:
    """Return the names and dtypes of the planes of a kind, in the order of the file: wide elements first, so that each
    is aligned."""
    planes = PLANES | dict(_MORE_PLANES.get(kind, {})) | ({WEIGHTS: "F32"} if weighted else {})
    return dict(sorted(planes.items(), key=lambda plane: -_WIDTHS[plane[1]]))


def group_size_of(kind: DataKind) -> int:
    """Return how many documents belong together and must be in one step.

    2 for `preference`, chosen before rejected, and for `kto`, a row before the document that joins its prompt with
    another completion.
    """
    return 2 if kind in (DataKind.PREFERENCE, DataKind.KTO) else 1


@dataclass(kw_only=True)
class DocumentColumns:
    """Documents laid end to end: their tokens, their masks and their lengths, and what their kind adds (empty for the
    others).

    `weights` has one for each target up to the last that was given one; those of the others are 1.
    """

    ids: array.array[int] = field(default_factory=lambda: array.array("i"))
    trained: bytearray = field(default_factory=bytearray)
    lengths: array.array[int] = field(default_factory=lambda: array.array("q"))
    num_targets: int = 0
    labels: array.array[int] = field(default_factory=lambda: array.array("b"))
    old_logprobs: array.array[float] = field(default_factory=lambda: array.array("f"))
    advantages: array.array[float] = field(default_factory=lambda: array.array("f"))
    weights: array.array[float] = field(default_factory=lambda: array.array("f"))

    def add(
        self,
        ids: array.array[int],
        trained: bytes,
        num_targets: int,
        *,
        label: int | None = None,
        old_logprobs: array.array[float] | None = None,
        advantages: array.array[float] | None = None,
        weights: array.array[float] | None = None,
    ) -> None:
        """Append one document; `label` of kind `kto`, the numbers, one for each target, of kind `samples`, weights of
        kind `text`."""
        assert num_targets, "every document has something to train on"
        if weights is not None:
            assert len(weights) == num_targets, "one weight for each target"
            self.weights += _ones(self.num_targets - len(self.weights)) + weights
        if label is not None:
            self.labels.append(label)
        if old_logprobs is not None and advantages is not None:
            assert len(old_logprobs) == len(advantages) == num_targets, "one number for each target"
            self.old_logprobs += old_logprobs
            self.advantages += advantages
        self.ids += ids
        # Nothing precedes a document's first token, so it is never a target.
        self.trained += b"\0" + trained[1:]
        self.lengths.append(len(ids))
        self.num_targets += num_targets


def _ones(number: int) -> array.array[float]:
    return array.array("f", [1.0]) * number


class DocumentPlanes:
    """The documents of one folder being written, and how many there are."""

    def __init__(self, folder: Path, kind: DataKind) -> None:
        self._folder, self._kind = folder, kind
        # Planes grow side by side as raw files and are joined in the end: memory does not follow the size of the
        # dataset.
        self._raw = {name: (folder / f"{name}.raw").open("wb") for name in planes_of(kind)}
        self.num_documents = 0
        self.num_tokens = 0
        self.num_targets = 0
        self.longest_document = 0
        self._raw["document_starts"].write(array.array("q", [0]))

    def add(self, documents: DocumentColumns) -> None:
        """Append documents."""
        if not documents.lengths:
            return
        starts = array.array("q", accumulate(documents.lengths, initial=self.num_tokens))[1:]
        self._raw["document_starts"].write(starts)
        self._raw["input_ids"].write(documents.ids)
        self._raw["trained"].write(documents.trained)
        for name in _MORE_PLANES.get(self._kind, {}):
            self._raw[name].write(getattr(documents, name))
        if documents.weights and WEIGHTS not in self._raw:
            self._begin_weights()
        if WEIGHTS in self._raw:
            self._raw[WEIGHTS].write(documents.weights + _ones(documents.num_targets - len(documents.weights)))
        self.num_documents += len(documents.lengths)
        self.num_tokens = starts[-1]
        self.num_targets += documents.num_targets
        self.longest_document = max(self.longest_document, *documents.lengths)

    def _begin_weights(self) -> None:
        """Begin the plane of weights, with a 1 for each target that is there already."""
        stream = self._raw[WEIGHTS] = (self._folder / f"{WEIGHTS}.raw").open("wb")
        for done in range(0, self.num_targets, _ONES_AT_ONCE):
            stream.write(_ones(min(_ONES_AT_ONCE, self.num_targets - done)))

    def finish(self, report: Mapping[str, object], on_bytes: Callable[[], None]) -> None:
        """Join the planes to one file and sync it; calls `on_bytes` now and then."""
        self.close()
        planes = planes_of(self._kind, weighted=WEIGHTS in self._raw)
        lengths = {"input_ids": self.num_tokens, "trained": self.num_tokens, "document_starts": self.num_documents + 1}
        lengths |= {"labels": self.num_documents}
        lengths |= dict.fromkeys(("old_logprobs", "advantages", WEIGHTS), self.num_targets)
        raw = {name: self._folder / f"{name}.raw" for name in planes}
        header = [(name, planes[name], (lengths[name],), raw[name].stat().st_size) for name in planes]
        with (self._folder / TOKENS_FILE).open("wb") as whole:
            whole.write(file_header(header))
            for plane in raw.values():
                with plane.open("rb") as stream:
                    while block := stream.read(_COPY_BYTES):
                        whole.write(block)
                        on_bytes()
                plane.unlink()
            whole.flush()
            os.fsync(whole.fileno())
        # Syncs the folder too.
        replace_file(self._folder / REPORT_FILE, json.dumps(report, indent=2) + "\n")

    def close(self) -> None:
        """Close the raw files."""
        for stream in self._raw.values():
            stream.close()


class PreparedFolder:
    """Writes a prepared dataset next to `target` and renames it into place when it is complete.

    Leaving the context without `publish` removes what was written. Raises: DiskFull when there is no space left.
    """

    def __init__(self, target: Path, *, with_evaluation: bool, kind: DataKind = DataKind.TEXT) -> None:
        self._target = target
        target.parent.mkdir(parents=True, exist_ok=True)
        self._folder = Path(tempfile.mkdtemp(prefix=f"{target.name}{_PARTIAL}", dir=target.parent))
        self.train = DocumentPlanes(self._folder, kind)
        self.evaluation: DocumentPlanes | None = None
        if with_evaluation:
            (self._folder / EVALUATION_FOLDER).mkdir()
            self.evaluation = DocumentPlanes(self._folder / EVALUATION_FOLDER, kind)

    def __enter__(self) -> PreparedFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for planes in (self.train, self.evaluation):
            # What could not be written is thrown away anyway.
            with contextlib.suppress(OSError):
                if planes is not None:
                    planes.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        if is_out_of_space(error):
            raise DiskFull(f"no space left for the prepared dataset ({error.strerror}); free some and retry") from error

    def publish(self, report: Mapping[str, object], *, on_bytes: Callable[[], None] = lambda: None) -> None:
        """Finish the files and give the folder its name; a folder that is there already is kept as it is."""
        if self.evaluation is not None:
            self.evaluation.finish(report, on_bytes)
        self.train.finish(report, on_bytes)
        try:
            self._folder.rename(self._target)
        except OSError as error:
            # Another child has prepared the same request meanwhile: equal content, as the name is its key.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        sync_folder(self._target.parent)


def remove_partial(target: Path) -> None:
    """Remove what writers of `target` left that were killed before they could publish it; none may be running."""
    for leftover in target.parent.glob(f"{target.name}{_PARTIAL}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def remove_all_partial(root: Path) -> None:
    """Remove what killed writers left of any folder two levels below `root`; none may be running."""
    for leftover in root.glob(f"*/*{_PARTIAL}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def is_prepared(folder: Path, *, with_evaluation: bool) -> bool:
    """Whether the folder is there with all its files."""
    folders = [folder, folder / EVALUATION_FOLDER] if with_evaluation else [folder]
    return all((place / name).is_file() for place in folders for name in (TOKENS_FILE, REPORT_FILE))


def parse_kind(name: str, path: Path) -> DataKind:
    """Return the kind of that name. Raises: InvalidData for one that this version does not know."""
    try:
        return DataKind(name)
    except ValueError:
        known = ", ".join(DataKind)
        raise InvalidData(f"holds data of kind {name!r:.40}; this version knows {known}", file=path) from None


def document_lengths(folder: Path) -> NDArray[np.int64]:
    """Return the tokens of each document of a folder, without torch. Raises: InvalidData where the folder is
    incomplete."""
    # The daemon imports this module for its names, and counts documents in few calls.
    import numpy as np

    with _planes_in(folder) as (stream, planes):
        begin, end = planes["document_starts"]["data_offsets"]
        starts = np.fromfile(stream, dtype="<i8", count=(end - begin) // 8, offset=begin)
    lengths: NDArray[np.int64] = np.diff(starts)
    return lengths


def has_weights(folder: Path) -> bool:
    """Return whether targets of a folder have different weights, without torch. Raises: InvalidData where the folder is
    incomplete."""
    with _planes_in(folder) as (_, planes):
        return WEIGHTS in planes


@contextmanager
def _planes_in(folder: Path) -> Iterator[tuple[BinaryIO, dict[str, Any]]]:
    """The file of a folder, at the first byte after its header, and what the header says of the planes. What fails
    inside the block is said as the folder's fault."""
    path = folder / TOKENS_FILE
    try:
        with path.open("rb") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            if not 0 < size <= _MAX_HEADER_BYTES:
                raise InvalidData("is damaged; prepare the dataset again", file=path)
            yield stream, json.loads(stream.read(size))
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise InvalidData(f"is not a prepared dataset ({error}); prepare the dataset again", file=folder) from error


def open_prepared(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the planes of a folder as NumPy arrays, mapped from disk and never loaded as a whole, and its report.

    Raises: InvalidData where the folder is incomplete or its planes have other types.
    """
    # The daemon and the preparation import this module for its names, and must not load torch with it.
    from safetensors import SafetensorError, safe_open

    path = folder / TOKENS_FILE
    try:
        report = json.loads((folder / REPORT_FILE).read_text(encoding="utf-8"))
        # Only torch's tensors are views of the mapped file; NumPy's would be copies.
        with safe_open(path, framework="pt") as tensors:
            kind = parse_kind(report["kind"], path)
            planes = planes_of(kind, weighted=WEIGHTS in set(tensors.keys()))
            for name, dtype in planes.items():
                found = tensors.get_slice(name).get_dtype()
                if found != dtype:
                    raise InvalidData(f": {name} is {found}, expected {dtype}; prepare the dataset again", file=path)
            return {name: tensors.get_tensor(name).numpy() for name in planes}, report
    except (OSError, SafetensorError, json.JSONDecodeError, KeyError) as error:
        raise InvalidData(f"is not a prepared dataset ({error}); prepare the dataset again", file=folder) from error
