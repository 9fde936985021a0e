"""Attention in bf16 on a CPU with AVX512-BF16: the C ABI of store/kernels/attention.cpp.

Torch's own kernel for CPUs takes two to six times as long: it was half of a compiled layer's time (bench/RESULTS.md).

Parameters: as the package says. Shapes: T = tokens of the row, E = size of a head.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from horizon_server.store import native

_MAX_HEAD = 256


class _Heads(ctypes.Structure):
    """A tensor [heads, T, E] whose last stride is 1; strides in elements."""

    _fields_ = (("data", ctypes.c_void_p), ("head_stride", ctypes.c_int64), ("token_stride", ctypes.c_int64))


class _Problem(ctypes.Structure):
    _fields_ = (
        ("num_heads", ctypes.c_int64),
        ("num_key_heads", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("value_size", ctypes.c_int64),
        ("num_tokens", ctypes.c_int64),
        ("num_documents", ctypes.c_int64),
        ("ends", ctypes.POINTER(ctypes.c_int64)),
        ("scale", ctypes.c_float),
    )


def runs(query: Tensor, value: Tensor) -> bool:
    """Whether the kernel computes attention of these here, causal and within documents."""
    is_bf16 = query.device.type == "cpu" and query.dtype is torch.bfloat16
    return is_bf16 and max(query.shape[-1], value.shape[-1]) <= _MAX_HEAD and _kernel() is not None


def attend(
    query: Tensor, key: Tensor, value: Tensor, ends: Sequence[int], scale: float, output: Tensor, logsumexp: Tensor
) -> None:
    """Write into `output`, here [heads, T, E], and `logsumexp`."""
    kernel, parallel = _loaded()
    given = [_dense(tensor) for tensor in (query, key, value)]
    problem = _problem(query, key, value, ends, scale)
    heads = [_heads(tensor) for tensor in (*given, output)]
    kernel.hz_attention(problem, *heads, logsumexp.data_ptr(), parallel, torch.get_num_threads())


def gradients(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    ends: Sequence[int],
    scale: float,
    results: Sequence[Tensor],
) -> None:
    """Write the gradients of query, key and value into `results`; `output` and its gradient are [heads, T, E] here."""
    kernel, parallel = _loaded()
    given = [_dense(tensor) for tensor in (query, key, value, output, gradient)]
    logsumexp = logsumexp.contiguous()
    # Of the output and its gradient, for each query: the first half of the work finds them, the second needs them.
    dots = torch.empty_like(logsumexp)
    before, after = [_heads(tensor) for tensor in given], [_heads(tensor) for tensor in results]
    problem = _problem(query, key, value, ends, scale)
    sums = (logsumexp.data_ptr(), dots.data_ptr())
    kernel.hz_attention_backward(problem, *before, *sums, *after, parallel, torch.get_num_threads())


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _heads(tensor: Tensor) -> _Heads:
    assert tensor.dtype is torch.bfloat16 and tensor.stride(-1) == 1
    return _Heads(tensor.data_ptr(), tensor.stride(0), tensor.stride(1))


def _problem(query: Tensor, key: Tensor, value: Tensor, ends: Sequence[int], scale: float) -> _Problem:
    places = (ctypes.c_int64 * len(ends))(*ends)
    num_tokens = query.shape[1]
    # The kernel reads and writes where these say.
    assert max(ends) <= num_tokens
    sizes = (query.shape[0], key.shape[0], query.shape[-1], value.shape[-1], num_tokens, len(ends) - 1)
    return _Problem(*sizes, places, scale)


def _loaded() -> tuple[ctypes.CDLL, ctypes.c_void_p]:
    found = _kernel()
    assert found is not None, "the caller has asked `runs`"
    return found


@functools.cache
def _kernel() -> tuple[ctypes.CDLL, ctypes.c_void_p] | None:
    """The kernel and the function that starts the threads of torch's OpenMP, or None where it cannot run."""
    kernel, _ = native.find(native.ATTENTION_SOURCE_FILE)
    # Torch has made its OpenMP visible to the whole process. Without one that is called so, torch attends.
    start = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    if kernel is None or start is None or not kernel.hz_attention_runs():
        return None
    problem, heads, pointer = ctypes.POINTER(_Problem), ctypes.POINTER(_Heads), ctypes.c_void_p
    kernel.hz_attention.argtypes = (problem, *[heads] * 4, pointer, pointer, ctypes.c_int)
    kernel.hz_attention_backward.argtypes = (
        problem,
        *[heads] * 5,
        *[pointer] * 2,
        *[heads] * 3,
        pointer,
        ctypes.c_int,
    )
    kernel.hz_attention.restype = kernel.hz_attention_backward.restype = None
    return kernel, ctypes.cast(start, ctypes.c_void_p)
