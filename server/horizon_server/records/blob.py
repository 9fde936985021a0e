"""Contents (blobs), the datasets and models that are made of them, and the one check of what a caller announces."""

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar, Self

from horizon_formats.formats import DatasetFormat, kind_of
from horizon_server.errors import FieldViolation, InvalidSpec, TooLarge
from horizon_server.records.times import UnixTime

MAX_FILES = 4096
MAX_PATH_BYTES = 512
EMPTY_SHA256 = hashlib.sha256().hexdigest()

# NAME_MAX of Linux file systems: a longer name could not be linked into a model's folder.
_MAX_SEGMENT_BYTES = 255
_SHA256 = re.compile(r"[0-9a-f]{64}")
_PATH_RULE = (
    f"a relative path with forward slashes, of at most {MAX_PATH_BYTES} bytes, without '.', '..', empty parts, "
    "backslashes or "
    "control characters"
)


@dataclass(frozen=True, kw_only=True)
class BlobRef:
    """Names one content: lower-case hexadecimal sha256, and size in bytes."""

    sha256: str
    size_bytes: int

    @property
    def is_empty(self) -> bool:
        """Whether this is the content of zero bytes, which everybody has."""
        return self.size_bytes == 0


@dataclass(frozen=True, kw_only=True)
class BlobFile:
    """One file of a dataset or a model folder."""

    path: str
    sha256: str
    size_bytes: int

    @property
    def ref(self) -> BlobRef:
        """The file's content."""
        return BlobRef(sha256=self.sha256, size_bytes=self.size_bytes)


@dataclass(frozen=True, kw_only=True)
class WholeBlob:
    """A small content that came in one piece; nothing is checked yet."""

    blob: BlobRef
    data: bytes


@dataclass(frozen=True, kw_only=True)
class BlobStatus:
    """How much of a content has arrived from its uploader; `complete` means whole and verified."""

    blob: BlobRef
    committed_bytes: int
    complete: bool


def check_ref(ref: BlobRef, *, max_bytes: int, field: str = "blob") -> None:
    """Refuse what cannot name a content. Raises InvalidSpec for an impossible sha256 or size; TooLarge above
    `max_bytes`."""
    if problems := _ref_problems(ref, field):
        raise InvalidSpec(problems[0].description, violations=problems)
    if ref.size_bytes > max_bytes:
        raise TooLarge(f"{field} announces {ref.size_bytes} bytes; this daemon accepts at most {max_bytes} per file")


def check_files(files: Sequence[BlobFile], *, what: str, max_bytes: int) -> None:
    """Refuse an announcement that no upload could fulfil, or that would leave its folder; `what` is dataset or model.

    Raises InvalidSpec with one violation per offending file; TooLarge: too many files, or more than `max_bytes` in all.
    """
    if not files:
        raise InvalidSpec.of("files", f"files is empty; a {what} needs at least one file")
    if len(files) > MAX_FILES:
        raise TooLarge(f"the {what} announces {len(files)} files; at most {MAX_FILES} are allowed")
    problems = []
    for i, file in enumerate(files):
        problems += _ref_problems(file.ref, f"files[{i}]")
        # Half a surrogate pair, which isprintable() refuses, would make a plain encode() raise.
        encoded = file.path.encode("utf-8", "surrogatepass")
        parts = encoded.split(b"/")
        if (
            len(encoded) > MAX_PATH_BYTES
            or "\\" in file.path
            or not file.path.isprintable()
            or any(part in (b"", b".", b"..") or len(part) > _MAX_SEGMENT_BYTES for part in parts)
        ):
            problem = f"files[{i}].path is {file.path!r:.80}; it must be {_PATH_RULE}"
            problems.append(FieldViolation(field=f"files[{i}].path", description=problem))
    problems += _clashes(files)
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise InvalidSpec(f"{problems[0].description}{more}", violations=problems)
    total_bytes = sum(file.size_bytes for file in files)
    if total_bytes > max_bytes:
        raise TooLarge(
            f"the {what} announces {total_bytes} bytes; this daemon accepts at most {max_bytes} "
            f"(setting max_{what}_bytes), so split it or ask an admin"
        )


def digest(files: Sequence[BlobFile], *extra: object) -> str:
    """Return the sha256 over the files' paths and contents, in their order, and over `extra` plain data."""
    document = [[file.path, file.sha256, file.size_bytes] for file in files]
    return hashlib.sha256(json.dumps([*extra, document], sort_keys=True).encode()).hexdigest()


def _ref_problems(ref: BlobRef, field: str) -> list[FieldViolation]:
    problems = []
    if not _SHA256.fullmatch(ref.sha256):
        problems.append(("sha256", f"is {ref.sha256!r:.80}; it must be 64 lower-case hexadecimal digits"))
    if ref.size_bytes < 0:
        problems.append(("size_bytes", f"is {ref.size_bytes}; it must be 0 or more"))
    if not problems and ref.is_empty != (ref.sha256 == EMPTY_SHA256):
        problems.append(("size_bytes", f"is {ref.size_bytes}, which does not belong to sha256 {ref.sha256}"))
    return [
        FieldViolation(field=f"{field}.{name}", description=f"{field}.{name} {problem}") for name, problem in problems
    ]


def _clashes(files: Sequence[BlobFile]) -> list[FieldViolation]:
    """Files of the same path, files that are folders of others, and one sha256 with two sizes."""
    folders = {file.path[:i] for file in files for i, letter in enumerate(file.path) if letter == "/"}
    seen: set[str] = set()
    size_of: dict[str, int] = {}
    problems = []
    for i, file in enumerate(files):
        if file.path in seen:
            problems.append((f"files[{i}].path", f"is {file.path!r:.80}, which is given twice; give each file once"))
        elif file.path in folders:
            problems.append((f"files[{i}].path", f"is {file.path!r:.80}, which is a folder of other files too"))
        seen.add(file.path)
        if size_of.setdefault(file.sha256, file.size_bytes) != file.size_bytes:
            problems.append((f"files[{i}].size_bytes", f"differs from that of another file with sha256 {file.sha256}"))
    return [FieldViolation(field=field, description=f"{field} {problem}") for field, problem in problems]


@dataclass(frozen=True, kw_only=True)
class PushedRecord(ABC):
    """One pushed resource. Until it is `ready` its contents are missing or unchecked; from then on it never changes."""

    kind: ClassVar[str]  # what users call it: dataset or model; its id is the field `<kind>_id`

    owner: str
    name: str
    files: tuple[BlobFile, ...]
    ready: bool = False
    digest: str = ""
    """sha256 over the files' paths and contents, and over what else decides how they are read."""
    created_s: UnixTime = 0.0
    shared_with: tuple[str, ...] = ()
    """Projects whose members may use it; `*` is everyone. What the caller may not see of it is left out."""

    @property
    def id(self) -> str:
        """Its stable id."""
        return str(getattr(self, f"{self.kind}_id"))

    @property
    def state(self) -> str:
        """READY or UPLOADING."""
        return "READY" if self.ready else "UPLOADING"

    @property
    def size_bytes(self) -> int:
        """Bytes over all files."""
        return sum(file.size_bytes for file in self.files)

    @property
    @abstractmethod
    def announcement(self) -> object:
        """What makes two create calls the same call, as plain data."""

    @abstractmethod
    def same_content(self, other: Self) -> bool:
        """Whether a push of the one repeats a push of the other."""


@dataclass(frozen=True, kw_only=True)
class DatasetRecord(PushedRecord):
    """One dataset."""

    kind: ClassVar[str] = "dataset"

    dataset_id: str
    format: str
    """Wire name of the format: as announced until ready, then as found in the data, never auto."""
    field_map: dict[str, str]
    num_rows: int = 0

    @property
    def data_kind(self) -> str:
        """What can be learnt from it: text, preference, kto or samples; empty while its format is not decided."""
        return "" if self.format == DatasetFormat.AUTO else kind_of(DatasetFormat(self.format)).value

    @property
    def announcement(self) -> object:
        """What makes two create calls the same call, as plain data."""
        # In their order: it is that of the rows.
        return [self.name, self.format, self.field_map, [asdict(file) for file in self.files]]

    def same_content(self, other: Self) -> bool:
        """Whether a push of the one repeats a push of the other."""
        # A repeated push announces `auto` again, where the first one has the format that was found by now.
        same_format = self.format == other.format or "auto" in (self.format, other.format)
        return same_format and self.field_map == other.field_map and self.files == other.files


@dataclass(frozen=True, kw_only=True)
class ModelRecord(PushedRecord):
    """One model."""

    kind: ClassVar[str] = "model"

    model_id: str
    architecture: str = ""
    """model_type of its config.json; known when ready."""
    num_parameters: int = 0

    @property
    def announcement(self) -> object:
        """What makes two create calls the same call, as plain data, in whatever order the files are named."""
        return [self.name, [asdict(file) for file in sorted(self.files, key=lambda file: file.path)]]

    def same_content(self, other: Self) -> bool:
        """Whether a push of the one repeats a push of the other, in whatever order the files are named."""
        return set(self.files) == set(other.files)
