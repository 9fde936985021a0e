"""Documents to disk: raw planes that grow row by row, then one safetensors file, then one rename.

Owns the folder's layout, as the engine reads it. Must not know how documents were made. Memory is bounded: no plane is ever held.
"""

from __future__ import annotations

import array
import contextlib
import errno
import json
import mmap
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from horizon_server.datasets.preparation import REPORT_FILE, TOKENS_FILE
from horizon_server.datasets.tokenization import Document
from horizon_server.errors import DiskFull
from horizon_server.store.safetensors_writer import TensorBytes, write_sharded

# Wide elements first, so that each plane stays aligned in the file.
_PLANES = {"document_starts": "I64", "input_ids": "I32", "trained": "U8"}
_OUT_OF_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


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
            # What could not be written is thrown away anyway.
            with contextlib.suppress(OSError):
                stream.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in _OUT_OF_SPACE:
            raise DiskFull(
                f"no space left under {self._target.parent} for the prepared dataset ({error.strerror}); free some and retry"
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
        tensors = [_plane(self._folder / f"{name}.raw", name, lengths[name]) for name in _PLANES]
        write_sharded(self._folder, "tokens", tensors, shard_bytes=sys.maxsize, on_bytes=lambda _: None)
        for name in _PLANES:
            (self._folder / f"{name}.raw").unlink()
        (self._folder / REPORT_FILE).write_text(json.dumps(report, indent=2) + "\n", encoding="ascii")
        for path in (self._folder / TOKENS_FILE, self._folder / REPORT_FILE, self._folder):
            _sync(path)
        try:
            self._folder.rename(self._target)
        except OSError as error:
            # Another child has prepared the same request meanwhile: equal content, as the name is its key.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        _sync(self._target.parent)

    def _append(self, plane: str, content: bytes) -> None:
        self._raw[plane].write(content)


def _little_endian(code: str, values: object) -> bytes:
    elements = array.array(code, values)  # type: ignore[call-overload]
    if sys.byteorder == "big":
        elements.byteswap()
    return bytes(elements.tobytes())


def _plane(path: Path, name: str, length: int) -> TensorBytes:
    def load() -> memoryview:
        with path.open("rb") as stream:
            return memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))

    return TensorBytes(name=name, dtype=_PLANES[name], shape=(length,), size_bytes=path.stat().st_size, load=load)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
