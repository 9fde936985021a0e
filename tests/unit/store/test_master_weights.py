"""hi + lo is the master: for every exponent, every tie, and random bits, by the kernel and by NumPy alike."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from horizon_server.store import native, reference
from horizon_server.store.host_store import merge_master, split_master

LARGEST_EXACT = np.uint32(0x7F7F7FFF)
INFINITY = np.uint32(0x7F800000)
BITS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=200).map(
    lambda values: np.array(values, dtype=np.uint32)
)


def split_and_merge(bits: npt.NDArray[np.uint32]) -> tuple[torch.Tensor, torch.Tensor, npt.NDArray[np.uint32]]:
    master = torch.from_numpy(bits.view(np.float32).copy())
    hi, lo = torch.empty(len(bits), dtype=torch.bfloat16), torch.empty(len(bits), dtype=torch.int16)
    back = torch.empty(len(bits))
    split_master(master, hi, lo)
    merge_master(hi, lo, back)
    return hi, lo, back.numpy().view(np.uint32)


def assert_contract(bits: npt.NDArray[np.uint32]) -> None:
    hi, _, back = split_and_merge(bits)
    magnitude, sign = bits & np.uint32(0x7FFFFFFF), bits & np.uint32(0x80000000)
    exact = (magnitude <= LARGEST_EXACT) | (magnitude == INFINITY)
    saturated = (magnitude > LARGEST_EXACT) & (magnitude < INFINITY)
    is_nan = magnitude > INFINITY
    np.testing.assert_array_equal(back[exact], bits[exact])
    np.testing.assert_array_equal(back[saturated], sign[saturated] | LARGEST_EXACT)
    np.testing.assert_array_equal(back[is_nan], sign[is_nan] | np.uint32(0x7FC00000))
    assert hi.isnan().tolist() == is_nan.tolist()
    assert hi.isinf().tolist() == (magnitude == INFINITY).tolist()


def every_exponent_with_its_ties() -> npt.NDArray[np.uint32]:
    exponents = np.arange(256, dtype=np.uint32) << 23
    low = np.array([0, 1, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF], dtype=np.uint32)
    top = np.array([0, 1, 2, 0x3F, 0x40, 0x7E, 0x7F], dtype=np.uint32) << 16
    grid = exponents[:, None, None] | top[None, :, None] | low[None, None, :]
    return np.concatenate([grid.ravel(), grid.ravel() | np.uint32(0x80000000)])


@given(bits=BITS)
@settings(max_examples=60)
def test_any_bit_pattern_keeps_the_contract(bits: npt.NDArray[np.uint32]) -> None:
    assert_contract(bits)


def test_every_exponent_and_tie_keeps_the_contract() -> None:
    assert_contract(every_exponent_with_its_ties())


def test_a_million_random_patterns_keep_the_contract() -> None:
    assert_contract(np.random.default_rng(0).integers(0, 2**32, 1_000_003, dtype=np.uint32))


def test_hi_is_the_nearest_bf16() -> None:
    bits = np.random.default_rng(1).integers(0, int(LARGEST_EXACT), 100_000, dtype=np.uint32)
    hi, _, _ = split_and_merge(bits)
    master = torch.from_numpy(bits.view(np.float32))
    error = (hi.double() - master.double()).abs()
    torch_error = (master.bfloat16().double() - master.double()).abs()
    assert torch.equal(error, torch_error), "ties may go the other way, the distance may not grow"


@pytest.mark.skipif(native.library() is None, reason="no compiled kernel")
@pytest.mark.parametrize("num_threads", [1, 2])
def test_kernel_and_numpy_agree(num_threads: int) -> None:
    bits = np.concatenate(
        [every_exponent_with_its_ties(), np.random.default_rng(2).integers(0, 2**32, 300_001, dtype=np.uint32)]
    )
    master = torch.from_numpy(bits.view(np.float32))
    hi, lo = torch.empty(len(bits), dtype=torch.bfloat16), torch.empty(len(bits), dtype=torch.int16)
    split_master(master, hi, lo, num_threads=num_threads)
    expected_hi, expected_lo = np.empty(len(bits), dtype=np.uint16), np.empty(len(bits), dtype=np.int16)
    reference.split(master.numpy(), expected_hi, expected_lo)
    np.testing.assert_array_equal(hi.view(torch.uint16).numpy(), expected_hi)
    np.testing.assert_array_equal(lo.numpy(), expected_lo)
    random_hi = torch.from_numpy(bits.astype(np.uint16)).view(torch.bfloat16)
    random_lo = torch.from_numpy((bits >> np.uint32(16)).astype(np.uint16).view(np.int16))
    out, expected = torch.empty(len(bits)), np.empty(len(bits), dtype=np.float32)
    merge_master(random_hi, random_lo, out, num_threads=num_threads)
    reference.merge(random_hi.view(torch.uint16).numpy(), random_lo.numpy(), expected)
    np.testing.assert_array_equal(out.numpy().view(np.uint32), expected.view(np.uint32))


def test_strided_views_are_refused() -> None:
    hi, lo = torch.empty(8, dtype=torch.bfloat16)[::2], torch.empty(4, dtype=torch.int16)
    with pytest.raises(AssertionError, match="contiguous"):
        merge_master(hi, lo, torch.empty(4))
