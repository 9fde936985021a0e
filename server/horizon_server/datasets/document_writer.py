"""Documents to disk: raw planes that grow row by row, then one safetensors file, then one rename.

Owns the folder's layout, as the engine reads it. Must not know how documents were made. Memory is bounded: no plane is ever held.
"""

from __future__ import annotations

import array
import errno
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType

from horizon_server.datasets.tensor_file import TensorSource, write_tensor_file
from horizon_server.datasets.tokenization import Document
from horizon_server.errors import DiskFull

TOKENS_FILE = "tokens.safetensors"
REPORT_FILE = "report.json"

_COPY_BYTES = 4 * 1024 * 1024
_PLANES = {"input_ids": ("I32", 4), "trained": ("U8", 1), "document_starts": ("I64", 8)}


class DocumentWriter:
    """Writes a prepared dataset beside `target` and renames it into place when it is complete.

    Leaving the context without `publish` removes what was written. Raises: DiskFull when there is no space left.
    """

    def __init__(self, target: Path) -> None:
        self._target = target
        target.parent.mkdir(parents=True, exist_ok=True)
        self._folder = Path(tempfile.mkdtemp(prefix=f"{target.name}.tmp-", dir=target.parent))
        self._raw = {name: (self._folder / f"{name}.raw").open("wb") for name in _PLANES}
        self.num_documents = 0
        self.num_tokens = 0
        self.num_trained_tokens = 0
        self.longest_document = 0
        self._append("document_starts", _little_endian("q", [0]))

    def __enter__(self) -> DocumentWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for stream in self._raw.values():
            stream.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(
                f"no space left for the prepared dataset under {self._target.parent}; free some and retry"
            ) from error

    def add(self, document: Document) -> None:
        """Append one document."""
        self.num_documents += 1
        self.num_tokens += len(document.ids)
        self.num_trained_tokens += document.num_targets
        self.longest_document = max(self.longest_document, len(document.ids))
        self._append("input_ids", _little_endian("i", document.ids))
        self._append("trained", b"\0" + document.trained[1:])
        self._append("document_starts", _little_endian("q", [self.num_tokens]))

    def publish(self, report: Mapping[str, object]) -> None:
        """Assemble the files, sync them and give the folder its name; a folder that is there already is kept as it is."""
        for stream in self._raw.values():
            stream.close()
        lengths = {"input_ids": self.num_tokens, "trained": self.num_tokens, "document_starts": self.num_documents + 1}
        tensors = [
            TensorSource(name=name, dtype=dtype, shape=(lengths[name],), chunks=_read(self._folder / f"{name}.raw"))
            for name, (dtype, _) in _PLANES.items()
        ]
        write_tensor_file(self._folder / TOKENS_FILE, tensors)
        for name in _PLANES:
            (self._folder / f"{name}.raw").unlink()
        with (self._folder / REPORT_FILE).open("w", encoding="ascii") as report_file:
            json.dump(report, report_file, indent=2)
            report_file.flush()
            os.fsync(report_file.fileno())
        _sync_folder(self._folder)
        try:
            self._folder.rename(self._target)
        except OSError as error:
            # Another child has prepared the same request meanwhile: equal content, as the name is its key.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        _sync_folder(self._target.parent)

    def _append(self, plane: str, content: bytes) -> None:
        self._raw[plane].write(content)


def _little_endian(code: str, values: object) -> bytes:
    elements = array.array(code, values)  # type: ignore[call-overload]
    if sys.byteorder == "big":
        elements.byteswap()
    return bytes(elements.tobytes())


def _read(path: Path) -> Iterator[bytes]:
    with path.open("rb") as stream:
        while chunk := stream.read(_COPY_BYTES):
            yield chunk


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
