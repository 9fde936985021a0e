"""Users, their tokens and projects, and an authenticated caller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from horizon_server.records.times import UnixTime

ROLES = ("user", "admin", "viewer")
SCOPES = ("full", "read", "metrics")
PROJECT_ROLES = ("viewer", "member", "admin")
EVERYONE = "*"
"""In place of a project: a dataset or model is shared with all users. Not a possible name of a project."""


@dataclass(frozen=True, kw_only=True)
class Principal:
    """An authenticated caller. `role` is user, admin or viewer; `project` is charged for the caller's jobs."""

    name: str
    role: str
    project: str
    scope: str = "full"
    """What the token that was presented allows: full, read (no changes) or metrics (only /metrics)."""
    token_id: str = ""
    memberships: Mapping[str, str] = field(default_factory=dict)
    """The caller's role (viewer, member or admin) by project."""

    @property
    def sees_all(self) -> bool:
        """Whether everybody's resources are visible: admins see and touch all, viewers see all and touch nothing."""
        return self.role in ("admin", "viewer")


NODE = Principal(name="horizond", role="admin", project="horizond")
"""Owns what an administrator adds for everybody with `horizond model add`. Not a user, and no user has its name."""


@dataclass(frozen=True, kw_only=True)
class Owned:
    """What a user owns, which stays when the user is removed."""

    num_jobs: int
    num_jobs_not_ended: int
    num_datasets: int
    num_models: int


@dataclass(frozen=True, kw_only=True)
class User:
    """A person or a script that calls. `project` is charged for its jobs."""

    name: str
    role: str
    project: str
    created_s: UnixTime
    disabled_s: UnixTime | None = None
    """Since when no token of theirs is accepted."""


@dataclass(frozen=True, kw_only=True)
class Token:
    """What is known of a bearer token: never the token itself. Times are Unix seconds."""

    token_id: str
    user: str
    created_s: UnixTime
    expires_s: UnixTime | None = None
    revoked_s: UnixTime | None = None
    scope: str = "full"
    label: str = ""
    created_by: str = ""
    """The user who created it; for commands on the node, the system account."""
    last_used_s: UnixTime | None = None
    """To the minute."""

    def has_ended(self, now_s: float) -> bool:
        """Whether it is not accepted any more: revoked, or expired."""
        return self.revoked_s is not None or (self.expires_s is not None and self.expires_s <= now_s)


@dataclass(frozen=True, kw_only=True)
class ProjectMember:
    """A user in a project, and what they may do there: viewer, member or admin."""

    project: str
    user: str
    role: str
    added_s: UnixTime


@dataclass(frozen=True, kw_only=True)
class Project:
    """A project as a caller sees it."""

    name: str
    role: str
    """The caller's own; empty where they are not a member."""
    members: tuple[ProjectMember, ...]
