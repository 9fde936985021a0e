"""Documents to disk: raw planes that grow batch by batch, then safetensors files, then one rename.

Owns the folder's layout, as the engine reads it. Must not know how documents were made. Memory is bounded: no plane is ever held.
"""

from __future__ import annotations

import array
import contextlib
import errno
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from types import TracebackType

from horizon_server.datasets.preparation import EVALUATION_FOLDER, REPORT_FILE, TOKENS_FILE
from horizon_server.datasets.token_batch import DocumentColumns
from horizon_server.durable import is_out_of_space
from horizon_server.errors import DiskFull
from horizon_server.store.safetensors_writer import file_header

# Wide elements first, so that each plane stays aligned in the file.
_PLANES = {"document_starts": "I64", "input_ids": "I32", "trained": "U8"}
_COPY_BYTES = 16 * 1024 * 1024


class DocumentPlanes:
    """The documents of one folder, and how many there are."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._raw = {name: (folder / f"{name}.raw").open("wb") for name in _PLANES}
        self.num_documents = 0
        self.num_tokens = 0
        self.num_targets = 0
        self.longest_document = 0
        self._raw["document_starts"].write(_little_endian(array.array("q", [0])))

    def add(self, documents: DocumentColumns) -> None:
        """Append documents."""
        if not documents.lengths:
            return
        starts = array.array("q", accumulate(documents.lengths, initial=self.num_tokens))[1:]
        self._raw["document_starts"].write(_little_endian(starts))
        self._raw["input_ids"].write(_little_endian(documents.ids))
        self._raw["trained"].write(documents.trained)
        self.num_documents += len(documents.lengths)
        self.num_tokens = starts[-1]
        self.num_targets += documents.num_targets
        self.longest_document = max(self.longest_document, *documents.lengths)

    def finish(self, report: Mapping[str, object]) -> None:
        """Assemble the folder's files and sync them."""
        self.close()
        lengths = {"input_ids": self.num_tokens, "trained": self.num_tokens, "document_starts": self.num_documents + 1}
        raw = {name: self._folder / f"{name}.raw" for name in _PLANES}
        header = [(name, _PLANES[name], (lengths[name],), raw[name].stat().st_size) for name in _PLANES]
        with (self._folder / TOKENS_FILE).open("wb") as whole:
            whole.write(file_header(header))
            for plane in raw.values():
                with plane.open("rb") as stream:
                    shutil.copyfileobj(stream, whole, _COPY_BYTES)
                plane.unlink()
        (self._folder / REPORT_FILE).write_text(json.dumps(report, indent=2) + "\n", encoding="ascii")
        for path in (self._folder / TOKENS_FILE, self._folder / REPORT_FILE, self._folder):
            _sync(path)

    def close(self) -> None:
        """Close the raw files."""
        for stream in self._raw.values():
            stream.close()


class PreparedFolder:
    """Writes a prepared dataset beside `target` and renames it into place when it is complete.

    Leaving the context without `publish` removes what was written. Raises: DiskFull when there is no space left.
    """

    def __init__(self, target: Path, *, with_evaluation: bool) -> None:
        self._target = target
        target.parent.mkdir(parents=True, exist_ok=True)
        self._folder = Path(tempfile.mkdtemp(prefix=f"{target.name}.tmp-", dir=target.parent))
        self.train = DocumentPlanes(self._folder)
        self.evaluation: DocumentPlanes | None = None
        if with_evaluation:
            (self._folder / EVALUATION_FOLDER).mkdir()
            self.evaluation = DocumentPlanes(self._folder / EVALUATION_FOLDER)

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
            raise DiskFull(
                f"no space left under {self._target.parent} for the prepared dataset ({error.strerror}); free some and retry"
            ) from error

    def publish(self, report: Mapping[str, object]) -> None:
        """Finish the files and give the folder its name; a folder that is there already is kept as it is."""
        if self.evaluation is not None:
            self.evaluation.finish(report)
        self.train.finish(report)
        try:
            self._folder.rename(self._target)
        except OSError as error:
            # Another child has prepared the same request meanwhile: equal content, as the name is its key.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        _sync(self._target.parent)


def _little_endian(elements: array.array[int]) -> bytes:
    if sys.byteorder == "big":
        elements = elements[:]
        elements.byteswap()
    return elements.tobytes()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
