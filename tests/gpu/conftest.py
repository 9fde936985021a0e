"""Tests that need a GPU: skipped without one, failed without one where HORIZON_REQUIRE_GPU=1 says that there must be.

On a machine with torch and pytest only::

    export PYTHONPATH=proto:server:. HORIZON_REQUIRE_GPU=1
    python -m pytest -c /dev/null --rootdir . --import-mode=importlib tests/gpu
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator

import pytest
import torch
from tests.support.tiny_models import documents, engine, pack, plain_loss, quiet_transformers, start, tiny_model
from torch.nn.attention import SDPBackend, sdpa_kernel

from horizon_server.engine.attention import kernels
from horizon_server.engine.device.cuda import CudaDevice

__all__ = ["documents", "engine", "pack", "plain_loss", "quiet_transformers", "start", "tiny_model"]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip or fail where there is no device."""
    if torch.cuda.is_available():
        return
    reason = f"needs 1 CUDA device, found {torch.cuda.device_count()}"
    if os.environ.get("HORIZON_REQUIRE_GPU") == "1":
        pytest.fail(f"{reason}, and HORIZON_REQUIRE_GPU=1", pytrace=False)
    pytest.skip(reason)


@pytest.fixture
def make_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., CudaDevice]]:
    """Makes cuda devices whose arithmetic does not depend on the order of atomic additions, as fused attention's
    backward does."""
    # No head is small enough for the fused kernel.
    monkeypatch.setattr(kernels, "_MAX_HEAD", 0)
    with sdpa_kernel(SDPBackend.MATH):
        yield CudaDevice


@pytest.fixture
def whole_device() -> Iterator[None]:
    """Nothing cached by earlier tests, and no limit left behind for later ones."""
    gc.collect()
    # Each handle keeps one for every stream that it has worked on, and streams of earlier devices come from a pool.
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
