from __future__ import annotations

import pytest
import torch

from horizon_server.engine.device import device_for, index_of_gpu
from horizon_server.errors import InvalidSpec


def test_the_host_is_always_there() -> None:
    device = device_for("host", limit_bytes=1000, num_threads=1)
    assert device.name == "host"
    device.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_refused_in_one_sentence() -> None:
    with pytest.raises(InvalidSpec, match=r"torch .* finds none on this node; use device: host"):
        device_for("cuda")


def test_a_gpu_is_found_by_its_uuid_whatever_its_number() -> None:
    assert index_of_gpu("", ["11-aa", "22-aa"]) == 0
    assert index_of_gpu("GPU-22-aa", ["11-aa", "22-aa"]) == 1
    with pytest.raises(InvalidSpec, match=r"torch does not find the GPU GPU-33-aa .* \(it finds 11-aa\)"):
        index_of_gpu("GPU-33-aa", ["11-aa"])
