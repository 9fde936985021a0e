"""Another implementation of attention: tried on random rows, adopted where it is as exact and faster, and used for what
it was tried on alone. The stand-ins are registered with torch as FlashAttention-4 is, for the operators of a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import Library, get_kernel
from torch.nn.attention import current_flash_attention_impl, register_flash_attention_impl

from horizon_server.engine.attention import adoption, host_kernel, implementation
from horizon_server.engine.attention.adoption import Finding, adopt_for_hopper, try_implementation
from horizon_server.engine.attention.function import attend
from horizon_server.engine.attention.implementation import Heads, adopt

FORWARD, BACKWARD = (f"_scaled_dot_product_flash_attention_for_cpu{suffix}" for suffix in ("", "_backward"))
# torch says so once when an operator has two kernels of a kind, whichever they are.
pytestmark = pytest.mark.filterwarnings("ignore:Warning only once for all operators")
HEADS = Heads(queries=4, keys=2, size=16, value_size=16)
CPU = torch.device("cpu")
# torch's own, taken before a stand-in hides them.
OWN = {name: get_kernel(f"aten::{name}", "CPU") for name in (FORWARD, BACKWARD)}


@pytest.fixture(autouse=True)
def nothing_adopted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # The engine's own kernel for a CPU would take the place of those that the stand-ins hide.
    monkeypatch.setattr(host_kernel, "runs", lambda *_: False)
    yield
    implementation._adopted.clear()
    assert current_flash_attention_impl() is None


class Handle:
    """What torch keeps of an active implementation."""

    def __init__(self, library: Library) -> None:
        self.library: Library | None = library

    def remove(self) -> None:
        self.library = None


def register(name: str, change: Callable[[str, Any], Any], *, is_causal: bool | None = None) -> list[str]:
    """An implementation that computes with torch's own kernels and then does `change` to what they give, with
    `is_causal` to that of such calls alone; returns the names of its calls, as they come."""
    calls: list[str] = []

    def of(operator: str) -> Callable[..., Any]:
        def run(keys: torch._C.DispatchKeySet, *args: Any, **options: Any) -> Any:
            calls.append(operator)
            found = OWN[operator].call_boxed(keys, *args, **options)
            # The only flag among the arguments, which is left out where it is as in the operator's signature.
            changes = is_causal is None or is_causal is any(one is True for one in args)
            return change(operator, found) if changes else found

        return run

    def activate() -> Handle:
        library = Library("aten", "IMPL", "CPU")  # type: ignore[no-untyped-call]
        for operator in (FORWARD, BACKWARD):
            library.impl(operator, of(operator), "CPU", with_keyset=True)  # type: ignore[no-untyped-call]
        return Handle(library)

    register_flash_attention_impl(name, register_fn=activate)
    return calls


def slower(operator: str, found: Any) -> Any:
    time.sleep(0.1)
    return found


def tried(name: str, dtype: torch.dtype = torch.float32, *, in_chunks: bool = False) -> Finding:
    return try_implementation(name, HEADS, dtype=dtype, device=CPU, documents=[64, 64], in_chunks=in_chunks)


def attended(window: int = 0, heads: Heads = HEADS) -> Tensor:
    """One pass of forward and backward on two documents."""
    generator = torch.Generator().manual_seed(1)
    documents = (50, 33)
    query, key, value = (
        torch.randn(1, n, sum(documents), heads.size, generator=generator, requires_grad=True)
        for n in (heads.queries, heads.keys, heads.keys)
    )
    output = attend(query, key, value, torch.tensor([0, *accumulate(documents)]), window=window)
    torch.autograd.backward(output, torch.ones_like(output))
    return output.detach()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_that_computes_the_same_in_less_time_is_adopted(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    calls = register("same", lambda _, found: found)
    # The first of each pair is torch's own.
    times = iter([2.8, 2.0] * 100)
    monkeypatch.setattr(adoption, "timed", lambda run, device: next(times))
    found = tried("same", dtype)
    assert found == Finding(
        is_adopted=True, text="FlashAttention-4, 1.40 times as fast as torch's own on documents of 64 tokens"
    )
    assert set(calls) == {FORWARD, BACKWARD}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_that_is_wrong_over_earlier_keys_alone_is_not_for_rows_in_chunks(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    whole = register("causal", lambda _, found: found)
    earlier = register("earlier", lambda _, found: (found[0] * 1.02, *found[1:]), is_causal=False)
    times = iter([2.8, 2.0] * 100)
    monkeypatch.setattr(adoption, "timed", lambda run, device: next(times))
    assert tried("causal", dtype, in_chunks=True).is_adopted
    assert tried("earlier", dtype).is_adopted
    found = tried("earlier", dtype, in_chunks=True)
    assert not found.is_adopted
    assert "in its output of rows in chunks, torch's own by" in found.text
    assert set(whole) == set(earlier) == {FORWARD, BACKWARD}


def test_one_that_is_slower_is_not() -> None:
    calls = register("slow", slower)
    found = tried("slow")
    assert not found.is_adopted and found.text.startswith("torch's own kernels: FlashAttention-4 is 0.")
    assert calls
    calls.clear()
    attended()
    assert not calls


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (lambda operator, found: (found[0] * 1.02, *found[1:]) if operator == FORWARD else found, "its output"),
        (lambda operator, found: (found[0], found[1] + 1, *found[2:]) if operator == FORWARD else found, "its sums"),
        (
            lambda operator, found: (found[0], found[1] * torch.nan, *found[2:]) if operator == BACKWARD else found,
            "keys' gradients",
        ),
    ],
    ids=["output", "sums", "not a number"],
)
def test_one_with_other_numbers_is_not(wrong: Callable[[str, Any], Any], named: str) -> None:
    register("wrong", wrong)
    found = tried("wrong")
    assert not found.is_adopted and f" in {named}, " in found.text


def test_one_that_does_not_run_is_not() -> None:
    def broken(operator: str, found: Any) -> Any:
        raise RuntimeError(f"no kernel for {operator}\nand a second line")

    register("broken", broken)
    found = tried("broken")
    assert not found.is_adopted
    assert found.text == (
        f"torch's own kernels: FlashAttention-4 does not run here (RuntimeError: no kernel for {FORWARD})"
    )
    assert not tried("of no name").is_adopted


def test_it_computes_what_it_was_tried_on_and_nothing_else() -> None:
    """Layers with windows, other heads and what else asks torch for attention keep torch's own kernels."""
    calls = register("same", lambda _, found: found)
    expected = attended()
    adopt(HEADS, "same")
    assert torch.equal(attended(), expected)
    # Forward and backward of two documents.
    assert sorted(calls) == sorted([FORWARD, BACKWARD] * 2)
    calls.clear()
    attended(window=20)
    attended(heads=Heads(queries=4, keys=4, size=16, value_size=16))
    query = torch.randn(1, 4, 32, 16)
    torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
    assert not calls
    # A window that hides nothing is none.
    attended(window=60)
    assert calls


def test_a_host_has_nothing_to_say_of_it() -> None:
    assert adopt_for_hopper(None, None, None, CPU) == ""  # type: ignore[arg-type]  # looked at after the device


def test_deterministic_kernels_are_a_switch_that_the_host_does_not_need() -> None:
    """torch's switch fills memory before it is written, unless it is set otherwise."""
    implementation.use_deterministic_kernels(True, CPU)
    assert not torch.are_deterministic_algorithms_enabled()
    try:
        implementation.use_deterministic_kernels(True, torch.device("cuda"))
        assert torch.are_deterministic_algorithms_enabled() and torch.is_deterministic_algorithms_warn_only_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    finally:
        implementation.use_deterministic_kernels(False, torch.device("cuda"))
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
