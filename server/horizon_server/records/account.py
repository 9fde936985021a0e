"""Users, their tokens, and an authenticated caller."""

from __future__ import annotations

from dataclasses import dataclass

ROLES = ("user", "admin", "viewer")


@dataclass(frozen=True, kw_only=True)
class Principal:
    """An authenticated caller. `role` is user, admin or viewer; `project` is charged for the caller's jobs."""

    name: str
    role: str
    project: str

    @property
    def sees_all(self) -> bool:
        """Whether everybody's resources are visible: admins see and touch all, viewers see all and touch nothing."""
        return self.role in ("admin", "viewer")


@dataclass(frozen=True, kw_only=True)
class User:
    """A person or a script that calls. `project` is charged for its jobs."""

    name: str
    role: str
    project: str
    created_s: float


@dataclass(frozen=True, kw_only=True)
class Token:
    """What is known of a bearer token: never the token itself. Times are Unix seconds."""

    token_id: str
    user: str
    created_s: float
    expires_s: float | None
    revoked_s: float | None
