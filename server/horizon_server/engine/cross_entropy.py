"""The loss over a vocabulary, and its gradient in the place of the logits: no copy of them in fp32, no softmax that is
kept.

A few rows at a time are computed in fp32. On a GPU with Triton each row is a program of one kernel; elsewhere blocks of
rows go through torch, small enough to stay in the cache.

Shapes: S = supervised tokens of a chunk, V = vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from horizon_server.store.triton_kernels import runs_triton

# In fp32 elements: 2 MiB, which a processor's own cache holds. On a GPU enough to keep it busy.
_BLOCK_ELEMENTS = 1 << 19
_GPU_BLOCK_ELEMENTS = 1 << 26


def chunk_loss(
    logits_SV: Tensor,
    targets_S: Tensor,
    *,
    divisor: float,
    weights_S: Tensor | None = None,
    gradient_SV: Tensor | None = None,
    logprobs_S: Tensor | None = None,
    smoothing: float = 0.0,
) -> Tensor:
    """This chunk's share of the step's mean loss, in fp64. Every target counts: ignored positions were dropped before.

    `divisor` is the number of the step's targets. With `weights_S`, one for each target of the chunk, it is the sum of
    the step's weights, and the loss is their weighted mean: sum(weight * loss) / sum(weight). With a divisor of 1 it is
    a sum, whose weights may have any sign. Without smoothing, weights of 1 give the bits that none give.

    It is what the plain forward of transformers computes, for any split into micro-batches and chunks. For mixtures of
    experts that forward adds the routers' auxiliary loss only where the config sets `output_router_logits`; such a
    config is refused.

    With `smoothing`, this share of each target is spread evenly over the vocabulary, as torch's cross_entropy does with
    `label_smoothing` (Szegedy et al., arXiv 1512.00567, section 7).

    `gradient_SV` receives the gradient of the logits, and may be the logits themselves. `logprobs_S` receives what
    `log_probabilities` returns; there is no smoothing then.
    """
    assert logprobs_S is None or not smoothing, "a smoothed loss is not a log-probability"
    # A sum over the step's count, because a mean of the chunks' means would weigh tokens of short chunks more.
    scale = 1.0 / divisor
    scales = scale if weights_S is None else (weights_S.double() * scale).float()
    losses_S = _row_losses(logits_SV, targets_S, gradient_SV, scales, smoothing)
    if logprobs_S is not None:
        torch.neg(losses_S, out=logprobs_S)
    losses_S = losses_S.double()
    return (losses_S if weights_S is None else losses_S * weights_S.double()).sum() * scale


def num_correct(logits_SV: Tensor, targets_S: Tensor) -> Tensor:
    """How many targets are the likeliest token of their row, the first of several: a whole number on the device.
    Shapes: []."""
    # In the logits' own type: fp32 is finer, and no two numbers of bf16 become equal in it or change their order.
    return (logits_SV.argmax(dim=-1) == targets_S).sum()


def log_probabilities(logits_SV: Tensor, targets_S: Tensor) -> Tensor:
    """The log-probability of each target, in fp32. Shapes: [S]."""
    return -_row_losses(logits_SV, targets_S, None, 1.0)


def write_gradient(logits_SV: Tensor, targets_S: Tensor, coefficients_S: Tensor, gradient_SV: Tensor) -> None:
    """Write the gradient of a loss by the logits, where `coefficients_S` is its derivative by each target's
    log-probability.

    Row s becomes `coefficients_S[s] * (onehot(targets_S[s]) - softmax(logits_SV[s]))`. `gradient_SV` may be the logits
    themselves. With -1 / N as every coefficient it has the bits of `chunk_loss`.
    """
    _row_losses(logits_SV, targets_S, gradient_SV, -coefficients_S.float())


def _row_losses(
    logits_SV: Tensor, targets_S: Tensor, gradient_SV: Tensor | None, scale: float | Tensor, smoothing: float = 0.0
) -> Tensor:
    """Every row's loss, in fp32; `gradient_SV` receives its gradient times `scale`, a number or one for each row."""
    if runs_triton(logits_SV.device):
        from horizon_server.engine.cross_entropy_triton import row_losses

        losses_S = row_losses(logits_SV, targets_S, gradient_SV, scale, smoothing)
    else:
        losses_S = _torch_row_losses(logits_SV, targets_S, gradient_SV, scale, smoothing)
    if gradient_SV is not None:
        # Autograd must know, because an operator of the model may have kept the logits for its own backward.
        torch.autograd.graph.increment_version(gradient_SV)
    return losses_S


def _torch_row_losses(
    logits_SV: Tensor, targets_S: Tensor, gradient_SV: Tensor | None, scale: float | Tensor, smoothing: float
) -> Tensor:
    num_rows, vocab_size = logits_SV.shape
    losses_S = torch.empty(num_rows, dtype=torch.float32, device=logits_SV.device)
    size = max(1, (_GPU_BLOCK_ELEMENTS if logits_SV.is_cuda else _BLOCK_ELEMENTS) // vocab_size)
    # The gradient of the log-probabilities: nothing but the scale at each row's target.
    num_kept = 0 if gradient_SV is None else min(size, num_rows)
    at_targets_RV = logits_SV.new_zeros(num_kept, vocab_size, dtype=torch.float32)
    for start in range(0, num_rows, size):
        rows = slice(start, start + size)
        targets_R1 = targets_S[rows, None]
        # torch's own kernels, so that the bits are those of its cross_entropy; blocks are for the cache alone.
        values_RV = torch.log_softmax(logits_SV[rows], 1, dtype=torch.float32)
        losses_R = -values_RV.gather(1, targets_R1)[:, 0]
        if smoothing:
            losses_R = (1.0 - smoothing) * losses_R - values_RV.sum(1) * (smoothing / vocab_size)
        losses_S[rows] = losses_R
        if gradient_SV is not None:
            grad_RV = at_targets_RV[: values_RV.shape[0]]
            if isinstance(scale, Tensor):
                grad_RV.scatter_(1, targets_R1, -scale[rows, None])
            else:
                grad_RV.scatter_(1, targets_R1, -scale)
            out_RV = gradient_SV[rows] if gradient_SV.dtype == torch.float32 else values_RV
            torch.ops.aten._log_softmax_backward_data.out(grad_RV, values_RV, 1, torch.float32, out=out_RV)
            if smoothing:
                # Afterwards, because torch's kernel adds up a gradient's row: a sum over the whole vocabulary would
                # lose digits.
                share = scale[rows, None] * smoothing if isinstance(scale, Tensor) else scale * smoothing
                out_RV.sub_(share / vocab_size)
                out_RV.scatter_add_(1, targets_R1, torch.zeros_like(values_RV[:, :1]).add_(share))
            if out_RV is values_RV:
                gradient_SV[rows] = values_RV
            grad_RV.scatter_(1, targets_R1, 0.0)
    return losses_S
