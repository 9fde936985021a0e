"""What a job computes on, and in which numbers. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

DeviceKind = Literal["host", "cuda"]
ComputeDtype = Literal["float32", "bfloat16"]
"""What layers are computed in. The master weights, their moments and the sums of gradients are in fp32 whatever it is."""

# The host is the reference that other ways of computing are compared with; a GPU computes in the format that its store's `hi` plane has.
DEFAULT_COMPUTE_DTYPE: Mapping[DeviceKind, ComputeDtype] = {"host": "float32", "cuda": "bfloat16"}
ELEMENT_BYTES: Mapping[ComputeDtype, int] = {"float32": 4, "bfloat16": 2}
"""Of a weight on its way up, a hidden state, and a gradient that has left the device."""
