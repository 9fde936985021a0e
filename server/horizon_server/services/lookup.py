"""From what a caller typed, an id or a name, to the one resource they may mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from horizon_server.errors import InvalidSpec, NotFound
from horizon_server.records.account import Principal
from horizon_server.services.access import may_see
from horizon_server.spec import NAME_PATTERN, NAME_RULE


class Owned(Protocol):
    """A resource with an owner."""

    @property
    def owner(self) -> str:
        """Name of the user it belongs to."""
        ...

    @property
    def id(self) -> str:
        """Its stable id."""
        ...


OwnedT = TypeVar("OwnedT", bound=Owned)

DEFAULT_PAGE_SIZE = 100
MAX_PAGE_SIZE = 1000


def choose(principal: Principal, key: str, candidates: Sequence[OwnedT], *, what: str) -> OwnedT:
    """Return the candidate that `key` means to the caller: by id, else their own of that name, else the only one they may see.

    Raises:
        NotFound: when there is none that they may see.
        InvalidSpec: when several users have one of that name.
    """
    visible = [one for one in candidates if may_see(principal, one.owner)]
    by_id = [one for one in visible if one.id == key]
    own = [one for one in visible if one.owner == principal.name]
    found = by_id or own or visible
    if not found:
        raise NotFound(f"{what} {key!r:.80} does not exist, or is not yours")
    if len(found) > 1:
        owners = ", ".join(f"{one.id} of {one.owner}" for one in found[:5])
        raise InvalidSpec(f"several users have a {what} named {key}; give an id: {owners}")
    return found[0]


def check_name(name: str) -> None:
    """Refuse a name that resources cannot have.

    Raises:
        InvalidSpec: with the rule.
    """
    if not NAME_PATTERN.fullmatch(name):
        sentence = f"name is {name!r:.80}; it must be {NAME_RULE}"
        raise InvalidSpec.of("name", sentence)


def page_limit(page_size: int) -> int:
    """Return how many items a page may have: 0 means the default, and more than the maximum means the maximum.

    Raises:
        InvalidSpec: for a negative size.
    """
    if page_size < 0:
        sentence = f"page_size is {page_size}; it must be 0 or more"
        raise InvalidSpec.of("page_size", sentence)
    return min(page_size or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)
