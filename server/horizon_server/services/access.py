"""Who may do what: the only place where that is decided."""

from __future__ import annotations

from horizon_server.errors import NotAllowed, NotFound
from horizon_server.records.account import Principal


def may_see(principal: Principal, owner: str) -> bool:
    """Whether `principal` may know that a resource of `owner` exists."""
    return principal.sees_all or principal.name == owner


def require_visible(principal: Principal, owner: str, what: str) -> None:
    """Raise NotFound, never NotAllowed: other users must not learn which names exist.

    Raises:
        NotFound: when the caller may not see resources of `owner`.
    """
    if not may_see(principal, owner):
        raise NotFound(f"{what} does not exist, or is not yours")


def require_change(principal: Principal, owner: str, what: str) -> None:
    """Allow a change of a resource of `owner`.

    Raises:
        NotFound: when the caller may not even see it.
        NotAllowed: when the caller may see but not change it.
    """
    require_visible(principal, owner, what)
    require_create(principal)
    if principal.role != "admin" and principal.name != owner:
        raise NotAllowed(f"{what} belongs to {owner}; only they or an admin may change it")


def require_create(principal: Principal) -> None:
    """Allow making something new.

    Raises:
        NotAllowed: for viewers.
    """
    if principal.role == "viewer":
        raise NotAllowed(
            f"{principal.name} has the role viewer and may look but not change; ask an admin for the role user"
        )
