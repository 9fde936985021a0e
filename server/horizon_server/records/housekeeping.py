"""What is deleted, by users and by the daemon itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from horizon_server.records.job import JobState

ResourceKind = Literal["dataset", "model", "job", "checkpoint"]


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What a caller wants to delete: by key, by filter, or by both, where filters narrow what the keys mean."""

    kind: ResourceKind
    keys: tuple[str, ...] = ()
    """Names or ids; of checkpoints JOB@STEP, or JOB for all of a job."""
    states: frozenset[JobState] = frozenset()
    older_than_s: float = 0.0
    owner: str = ""
    """Without keys: whose; empty is the caller."""
    dry_run: bool = False


@dataclass(frozen=True, kw_only=True)
class Deletion:
    """One thing that was deleted, refused, or would be deleted."""

    key: str
    """Its id; of a checkpoint, JOB@STEP with the job's id."""
    name: str
    owner: str
    size_bytes: int
    """Bytes that this frees."""
    refusal: str = ""
    """Why it was not deleted, for people."""
    reason: str = ""
    """The same as a stable name, such as IN_USE."""


@dataclass(frozen=True, kw_only=True)
class Garbage:
    """Something that the daemon removes by itself."""

    kind: str
    place: str
    """A path in the state folder, or what the database calls it."""
    size_bytes: int
    why: str
