"""Tests that need a GPU: skipped without one, failed without one where HORIZON_REQUIRE_GPU=1 says that there must be.

On a machine with torch and pytest only::

    PYTHONPATH=server:. HORIZON_REQUIRE_GPU=1 python -m pytest -c /dev/null --rootdir . --import-mode=importlib tests/gpu
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from tests.golden.conftest import documents, pack, plain_loss, quiet_transformers, start, tiny_model

from horizon_server.engine.device.cuda import CudaDevice

__all__ = ["documents", "pack", "plain_loss", "quiet_transformers", "start", "tiny_model"]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip or fail where there is no device."""
    if torch.cuda.is_available():
        return
    reason = f"needs 1 CUDA device, found {torch.cuda.device_count()}"
    if os.environ.get("HORIZON_REQUIRE_GPU") == "1":
        pytest.fail(f"{reason}, and HORIZON_REQUIRE_GPU=1", pytrace=False)
    pytest.skip(reason)


@pytest.fixture
def make_device() -> Callable[..., CudaDevice]:
    """Makes cuda devices whose arithmetic does not depend on the order of atomic additions."""
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    return CudaDevice
