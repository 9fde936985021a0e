"""What one address and one user may take, by a clock of the test's own where time matters."""

from __future__ import annotations

import asyncio

import pytest

from horizon_server.api import limits
from horizon_server.api.limits import CallLimits, Rate, address_of
from horizon_server.errors import TooManyCalls


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.0.0.5:4711", "10.0.0.5"),
        ("10.0.0.5", "10.0.0.5"),
        ("ipv6:%5B2001:db8::5%5D:4711", "2001:db8::/64"),
        ("2001:db8::ffff", "2001:db8::/64"),
        ("ipv6:%5B::ffff:10.0.0.5%5D:4711", "10.0.0.5"),
        ("unix:/run/x", "unix:/run/x"),
    ],
)
def test_a_caller_is_an_ipv4_address_or_a_network_of_ipv6(peer: str, address: str) -> None:
    assert address_of(peer) == address


def test_a_rate_has_a_burst_then_waits_then_no_room() -> None:
    now = [0.0]
    rate = Rate(10.0, 2, clock=lambda: now[0])
    assert [rate.reserve("a", 0.2) for _ in range(5)] == [0.0, 0.0, 0.1, 0.2, None]
    assert rate.reserve("b") == 0.0, "each key has its own"
    now[0] += 0.3
    assert rate.has_room("a")
    assert rate.reserve("a") == 0.0
    assert rate.reserve("a") is None


def test_a_rate_keeps_a_limited_number_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_KEYS", 3)
    rate = Rate(1.0, 1, clock=lambda: 0.0)
    for i in range(100):
        rate.reserve(str(i))
    assert len(rate._levels) == 3
    assert not rate.has_room("99")


async def test_calls_of_one_user_beyond_the_rate_wait_then_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CALLS_BURST", 1)
    monkeypatch.setattr(limits, "CALLS_PATIENCE_S", 0.25)
    calls = CallLimits(calls_per_s=20.0)
    monkeypatch.setattr(calls._calls, "_clock", lambda: 0.0)  # with time, more would be served
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    outcomes = await asyncio.gather(*(one_call(calls) for _ in range(40)))
    assert outcomes.count("refused") == 40 - 10 - 5, "a burst of half a second, and what the patience allows"
    assert loop.time() - started_s >= 0.2
    async with calls.of_user("bob"):
        pass


async def one_call(calls: CallLimits, *, is_change: bool = False) -> str:
    try:
        async with calls.of_user("ann", is_change=is_change):
            return "served"
    except TooManyCalls as error:
        assert error.retry_after_s
        return "refused"


async def test_changes_have_a_rate_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CHANGES_PATIENCE_S", 0.0)
    calls = CallLimits(calls_per_s=100_000.0)
    monkeypatch.setattr(calls._changes, "_clock", lambda: 0.0)  # with time, more would be served
    outcomes = [await one_call(calls, is_change=True) for _ in range(limits.CHANGES_BURST + 20)]
    assert "refused" in outcomes[limits.CHANGES_BURST :]
    assert "refused" not in outcomes[: limits.CHANGES_BURST]
    assert await one_call(calls) == "served"


async def test_a_user_and_an_address_have_a_maximum_of_open_calls() -> None:
    calls = CallLimits(calls_per_s=100_000.0)
    holding = [calls.of_user("ann") for _ in range(limits.MAX_CALLS_PER_USER)]
    for one in holding:
        await one.__aenter__()
    with pytest.raises(TooManyCalls, match="ann has 256 calls open"):
        await calls.of_user("ann").__aenter__()
    for one in holding:
        await one.__aexit__(None, None, None)
    assert await one_call(calls) == "served"
    opened = [calls.of_address(f"10.0.0.{i // 16}") for i in range(limits.MAX_OPEN_CALLS)]
    for other in opened:
        other.__enter__()
    for address in ("10.0.0.0", "10.9.9.9"):
        with pytest.raises(TooManyCalls, match="too many calls without a token"):
            calls.of_address(address).__enter__()
    opened[0].__exit__(None, None, None)
    with calls.of_address("10.9.9.9"):
        pass


async def test_refusals_beyond_the_rate_are_held_back_for_a_limited_number_of_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = CallLimits()
    monkeypatch.setattr(calls._refusals, "_clock", lambda: 0.0)  # with time, fewer would be held back
    held, over, sleep = list[float](), asyncio.Event(), asyncio.sleep

    async def hold(seconds: float) -> None:
        held.append(seconds)
        await over.wait()

    monkeypatch.setattr(asyncio, "sleep", hold)
    num_calls = limits.REFUSALS_BURST + limits.MAX_HELD + 50
    waiting = [asyncio.create_task(calls.hold_back("10.0.0.5")) for _ in range(num_calls)]
    await sleep(0)
    assert held == [limits.HELD_S] * limits.MAX_HELD
    over.set()
    await asyncio.gather(*waiting)
