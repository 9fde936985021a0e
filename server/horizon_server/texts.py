"""Numbers as people read them."""

from __future__ import annotations


def size_text(num_bytes: float) -> str:
    """A size in MiB, or in GiB from one GiB on."""
    return f"{num_bytes / 2**30:,.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.1f} MiB"
