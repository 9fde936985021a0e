"""Walks through the pages of a list call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

ItemT = TypeVar("ItemT")

_PAGE_SIZE = 200


async def all_pages(
    page: Callable[[str, int], Awaitable[tuple[Sequence[ItemT], str]]], limit: int | None
) -> list[ItemT]:
    """Return the items of all pages, or the first `limit`; `page` takes a page token and a page size."""
    items: list[ItemT] = []
    token = ""
    while limit is None or len(items) < limit:
        size = _PAGE_SIZE if limit is None else min(_PAGE_SIZE, limit - len(items))
        found, token = await page(token, size)
        items += found
        if not token:
            break
    return items[:limit]
