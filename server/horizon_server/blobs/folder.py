"""A folder of named files made of contents by hard links: no byte is copied, and the files keep their users' names."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from horizon_server.blobs.store import BlobStore
from horizon_server.blobs.trash import Trash
from horizon_server.durable import sync_folder
from horizon_server.records.blob import BlobFile


def link_folder(store: BlobStore, files: Iterable[BlobFile], target: Path) -> None:
    """Make `target` hold exactly these files, durably; one that an earlier check left is replaced."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(mode=0o700, parents=True)
    for file in files:
        place = target / file.path
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.link(store.path(file.sha256), place)
    for folder in {target.parent, target, *(path for path in target.rglob("*") if path.is_dir())}:
        sync_folder(folder)


def remove_folder(target: Path) -> None:
    """Remove `target` where it is there. The contents it was made of stay."""
    if target.exists():
        shutil.rmtree(target)


def remove_unreferenced(root: Path, known: frozenset[str], trash: Trash) -> int:
    """Move the folders of `root` that no record knows to the trash, and take back those that one knows again. Return how many moved."""
    trash.take_back(root / name for name in known)
    return trash.put([path for path in root.iterdir() if path.name not in known] if root.is_dir() else [])
