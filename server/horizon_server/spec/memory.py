"""Where a job's data is while it runs, beyond what fits into memory."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from horizon_server.spec.fields import Section

MemoryTier = Literal["ram", "drive"]


class MemorySpec(Section):
    """Slower and larger memory that a job may use. No result depends on it."""

    tier: MemoryTier = Field(
        default="ram",
        description="ram: everything is in host memory. drive: the optimizer's states of as many layers as do not fit "
        "there are on the node's drives (its setting tier_dirs; docs/drives.md). The result is the same.",
    )
    accept_wear: bool = Field(
        default=False,
        description="Let a job with tier drive write more than 5 % of what the node's drives are rated for (its "
        "setting tier_endurance_bytes), or any number of bytes where that is not known.",
    )
