"""Which rows are held out for evaluation: decided by what a row holds and nothing else.

So a row stays on its side whatever comes before or after it, and copies of one row are never on both. Must not know files or tokens.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json

from horizon_server.datasets.normalise import NormalRow

_HASH_BYTES = 8
_END = float(1 << (8 * _HASH_BYTES))


def row_content(row: NormalRow) -> bytes:
    """Return the bytes that stand for a row: equal for rows that mean the same, whatever else their lines hold."""
    content = {"kind": type(row).__name__} | {
        field.name: getattr(row, field.name)
        for field in dataclasses.fields(row)
        if getattr(row, field.name) is not None
    }
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode("ascii")


def is_held_out(content: bytes, fraction: float) -> bool:
    """Whether content is on the evaluation side of this fraction. What is held out at some fraction is so at every larger one."""
    number = int.from_bytes(hashlib.blake2b(content, digest_size=_HASH_BYTES).digest(), "big")
    return number < fraction * _END
