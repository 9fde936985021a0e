"""The exact fp32 master weight, kept as a bf16 `hi` and an int16 `lo` half: merge and split on torch tensors.

Owns the dispatch between the compiled kernel and the NumPy reference, which give the same bits. Knows no layout.
"""

from __future__ import annotations

import torch

from horizon_server.store import reference


def merge(hi: torch.Tensor, lo: torch.Tensor, out: torch.Tensor, *, num_threads: int = 1) -> None:
    """Restore the fp32 master: `out` gets `hi + lo`, exactly.

    Shapes: hi bfloat16 [N], lo int16 [N], out float32 [N]; all contiguous, on the CPU.
    """
    _check(hi, lo, out)
    reference.merge(hi.view(torch.uint16).numpy(), lo.numpy(), out.numpy())


def split(master: torch.Tensor, hi: torch.Tensor, lo: torch.Tensor, *, num_threads: int = 1) -> None:
    """Split an fp32 master into `hi` (its bf16 rounding) and `lo` (what is left); `merge` gives it back exactly.

    Shapes: master float32 [N], hi bfloat16 [N], lo int16 [N]; all contiguous, on the CPU.
    """
    _check(hi, lo, master)
    reference.split(master.numpy(), hi.view(torch.uint16).numpy(), lo.numpy())


def _check(hi: torch.Tensor, lo: torch.Tensor, master: torch.Tensor) -> None:
    assert hi.dtype == torch.bfloat16 and lo.dtype == torch.int16 and master.dtype == torch.float32
    assert hi.dim() == 1 and hi.shape == lo.shape == master.shape
    assert hi.is_contiguous() and lo.is_contiguous() and master.is_contiguous()
