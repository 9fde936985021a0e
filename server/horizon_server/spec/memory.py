"""The section `memory`: where a job's weights and states are while it runs."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from horizon_server.spec.fields import Section

MemoryTier = Literal["ram", "drive"]


class MemorySpec(Section):
    """Ways to run a job that is too large for the device or the node's RAM. None of them is used unless asked for;
    what is left of memory is used for speed."""

    tier: MemoryTier = Field(
        default="ram",
        description="ram: everything is in host memory. drive: the optimizer's states of as many layers as do not fit "
        "there, and then of head and embedding, are on the node's drives (its setting tier_dirs; docs/drives.md). The "
        "result is the same.",
    )
    accept_wear: bool = Field(
        default=False,
        description="Let a job with tier drive write more than 5 % of what the node's drives are rated for (its "
        "setting tier_endurance_bytes), or any number of bytes where that is not known.",
    )
    experts: Literal["whole", "paged"] = Field(
        default="whole",
        description="How the experts of a mixture reach the device. whole: with their layer, so two layers and two "
        "gradients of a layer must fit; paged: in pages of at most 2**28 parameters, so that their number does not "
        "matter, while attention is computed once more in forward and once more in backward. For one device.",
    )
    keep_attention_outputs: bool = Field(
        default=True,
        description="Whether a job whose rows are computed in chunks (train.chunk_tokens) keeps what attention puts "
        "out in host memory that is left, so that backward does not attend again. false leaves that memory to other "
        "jobs; the result is the same.",
    )
