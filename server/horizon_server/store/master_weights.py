"""The exact fp32 master weight, kept as a bf16 `hi` and an int16 `lo` half: merge and split on torch tensors.

The compiled kernel and the NumPy reference give the same bits.

Thread: both functions may run on any thread and release the GIL while the kernel works.
"""

from __future__ import annotations

import torch

from horizon_server.store import native, reference


def merge(hi: torch.Tensor, lo: torch.Tensor, out: torch.Tensor, *, num_threads: int = 1) -> None:
    """Restore the fp32 master: `out` gets `hi + lo`, exactly.

    Shapes: hi bfloat16 [N], lo int16 [N], out float32 [N]; contiguous, on the CPU.
    """
    _check(hi, lo, out)
    kernel = native.library()
    if kernel is None:
        reference.merge(hi.view(torch.uint16).numpy(), lo.numpy(), out.numpy())
        return
    kernel.hz_merge(hi.data_ptr(), lo.data_ptr(), out.data_ptr(), out.numel(), num_threads)


def split(master: torch.Tensor, hi: torch.Tensor, lo: torch.Tensor, *, num_threads: int = 1) -> None:
    """Split an fp32 master into `hi`, its bf16 rounding, and `lo`, what is left; `merge` gives it back exactly.

    Shapes: master float32 [N], hi bfloat16 [N], lo int16 [N]; contiguous, on the CPU.
    """
    _check(hi, lo, master)
    kernel = native.library()
    if kernel is None:
        reference.split(master.numpy(), hi.view(torch.uint16).numpy(), lo.numpy())
        return
    kernel.hz_split(master.data_ptr(), hi.data_ptr(), lo.data_ptr(), master.numel(), num_threads)


def _check(hi: torch.Tensor, lo: torch.Tensor, master: torch.Tensor) -> None:
    assert hi.dtype == torch.bfloat16 and lo.dtype == torch.int16 and master.dtype == torch.float32
    for tensor in (hi, lo, master):
        assert tensor.dim() == 1 and tensor.shape == master.shape, "merge and split take flat tensors of one length"
        assert tensor.is_contiguous() and tensor.device.type == "cpu", "merge and split run on contiguous CPU memory"
