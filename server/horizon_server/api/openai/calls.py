"""What the routes share: who calls, and the shape of a list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import Depends, Query

from horizon_server.api.http.changes import Change, change_of

Changing = Annotated[Change, Depends(change_of)]
"""Who makes a change; unlike other routes' bodies, those of files are no JSON."""
Limit = Annotated[int, Query(ge=1, le=10_000)]
Cursor = Annotated[str, Query(max_length=200)]
"""The id of the last object of the page before."""


def page_of(objects: Sequence[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """Return a page of a list."""
    ends = {"first_id": objects[0]["id"], "last_id": objects[-1]["id"]} if objects else {}
    return {"object": "list", "data": list(objects), "has_more": has_more, **ends}
