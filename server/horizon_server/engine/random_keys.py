"""Which random numbers dropout draws: a seed of its own for every piece of work, so that doing it again draws the same.

Owns the derivation of seeds.

A unit's work on a micro-batch has one seed per step of a run, whether it runs for the first time, is recomputed in backward, or runs
after a resume.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StepKey:
    """A step of a run: the run's seed and the steps taken before."""

    seed: int
    step: int

    def seed_of(self, unit_index: int, micro_batch: int) -> int:
        """The seed of a unit's work on a micro-batch (for the head: on a chunk), within 63 bits."""
        text = f"{self.seed}/{self.step}/{unit_index}/{micro_batch}"
        return int.from_bytes(hashlib.blake2b(text.encode("ascii"), digest_size=8).digest(), "big") >> 1
