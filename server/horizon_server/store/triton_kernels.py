"""Where Triton kernels run."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch


def runs_triton(device: torch.device) -> bool:
    """Whether the device is one that Triton compiles for, and Triton is installed."""
    return device.type == "cuda" and _is_installed()


def triton_version(device: torch.device) -> str:
    """The version of Triton, on which the bits of kernels depend; empty where it does not run."""
    if not runs_triton(device):
        return ""
    import triton

    return str(triton.__version__)


@cache
def _is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None
