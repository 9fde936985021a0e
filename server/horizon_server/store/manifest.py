"""The manifest of a checkpoint, trainer/manifest.json: every file with its size and sha256, and what wrote it.

Torch-free: the daemon lists checkpoints with it. A folder without a readable manifest, or whose files do not have the
sizes it states, is not a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from horizon_server.durable import replace_file
from horizon_server.errors import InvalidModel

TRAINER_FOLDER = "trainer"
MANIFEST_FILE = f"{TRAINER_FOLDER}/manifest.json"
FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """Size and sha256 (hex) of one file."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class BaseModel:
    """The frozen model that a checkpoint of adapters belongs to: its name in the job, and its
    `base_digest.model_digest`."""

    model: str
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Files by their path relative to the checkpoint, and the versions of the software that wrote them.

    `base` is set where the checkpoint holds adapters and not the model that they are for. One that is `kept` is not
    deleted automatically; `names` are those that the calls of a session have given it.
    """

    files: Mapping[str, FileRecord]
    versions: Mapping[str, str]
    base: BaseModel | None = None
    kept: bool = False
    names: tuple[str, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Bytes of all files, the manifest itself not counted."""
        return sum(record.size_bytes for record in self.files.values())


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest into a checkpoint folder; it comes last, after every file it names."""
    document = {"format_version": FORMAT_VERSION, **asdict(manifest)}
    replace_file(folder / MANIFEST_FILE, json.dumps(document, indent=2) + "\n")


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder.

    Raises:
        InvalidModel: there is none, it is damaged, or a newer version wrote it.
    """
    file = folder / MANIFEST_FILE
    if not file.is_file():
        raise InvalidModel(f"is not a checkpoint: it has no {MANIFEST_FILE}", file=folder)
    try:
        document: dict[str, Any] = json.loads(file.read_bytes())
        version = document["format_version"]
        if type(version) is not int or version > FORMAT_VERSION:
            raise InvalidModel(
                f"has format_version {version!r}, this version reads up to {FORMAT_VERSION}; update horizon-train",
                file=file,
            )
        files = {
            name: FileRecord(size_bytes=int(entry["size_bytes"]), sha256=str(entry["sha256"]))
            for name, entry in document["files"].items()
        }
        versions = {str(name): str(version) for name, version in document["versions"].items()}
        named = document["base"]
        base = None if named is None else BaseModel(model=str(named["model"]), sha256=str(named["sha256"]))
        kept = document.get("kept", False) is True  # release 0.1 wrote none
        names = tuple(str(name) for name in document.get("names", ()))
    except InvalidModel:
        raise  # the one of above, which is a ValueError too
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidModel(
            f"is damaged ({type(error).__name__}: {error}); use another checkpoint", file=file
        ) from error
    # Names are joined to the folder, and what they name is read.
    if outside := [name for name in files if Path(name).is_absolute() or ".." in Path(name).parts]:
        raise InvalidModel(f"names {outside[0]}, which is outside the checkpoint; use another checkpoint", file=file)
    return Manifest(files=files, versions=versions, base=base, kept=kept, names=names)


def is_complete(folder: Path) -> bool:
    """Whether a folder is a whole checkpoint: a readable manifest and every file at its stated size. Checks no
    checksum."""
    try:
        manifest = read_manifest(folder)
    except InvalidModel:
        return False
    sizes = {name: (folder / name).stat().st_size for name in manifest.files if (folder / name).is_file()}
    return sizes == {name: record.size_bytes for name, record in manifest.files.items()}


def record_file(file: Path) -> FileRecord:
    """Size and sha256 of a file, read in pieces."""
    with file.open("rb") as stream:
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
        return FileRecord(size_bytes=stream.tell(), sha256=sha256)
