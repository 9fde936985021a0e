"""Wrong tokens: limited by address, logged and audited, and never in the way of those who have a valid one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest

from horizon_server.api import logins as module
from horizon_server.api.limits import CallLimits
from horizon_server.api.logins import Logins
from horizon_server.errors import TooManyCalls, Unauthenticated

PEER = "ipv4:10.0.0.5:1"


@pytest.fixture
def logins(base_world: Any) -> Logins:
    """By a clock that stands: with time, an address may fail again."""
    services = base_world.services
    return Logins(services.accounts, services.audit, CallLimits(), clock=lambda: 1000.0)


async def attempt(logins: Logins, secret: str, peer: str = PEER) -> str:
    try:
        async with logins.admitted(secret, peer) as principal:
            return principal.name
    except (Unauthenticated, TooManyCalls) as error:
        return error.reason


async def test_an_address_may_fail_for_a_while_and_others_at_it_are_served_all_the_same(
    logins: Logins, base_world: Any
) -> None:
    outcomes = [await attempt(logins, f"hzn_{i}") for i in range(module.FAILED_LOGINS_BURST + 10)]
    assert outcomes[0] == "UNAUTHENTICATED"
    assert outcomes[-1] == "TOO_MANY_CALLS"
    assert await attempt(logins, base_world.tokens["ann"]) == "ann"
    assert await attempt(logins, "hzn_x", "ipv4:10.0.0.6:1") == "UNAUTHENTICATED"


async def test_all_addresses_together_have_a_limit_too(logins: Logins, base_world: Any) -> None:
    for i in range(module.ALL_FAILED_LOGINS_BURST + 20):
        await attempt(logins, "hzn_x", f"ipv4:10.1.{i // 200}.{i % 200}:1")
    assert await attempt(logins, "hzn_x", "ipv4:10.9.9.9:1") == "TOO_MANY_CALLS"
    assert await attempt(logins, base_world.tokens["ann"]) == "ann"


async def test_a_revoked_token_is_refused_at_once_though_it_was_valid_a_moment_ago(
    logins: Logins, base_world: Any
) -> None:
    assert await attempt(logins, base_world.tokens["bob"]) == "bob"
    (token,) = [one for one in await base_world.services.accounts.tokens() if one.user == "bob"]
    await base_world.services.accounts.revoke_token(token.token_id)
    assert await attempt(logins, base_world.tokens["bob"]) == "UNAUTHENTICATED"


async def test_a_new_token_works_on_an_address_under_attack_within_moments(
    logins: Logins, base_world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("horizon_server.services.accounts.VALID_READ_EVERY_S", 0.05)
    for i in range(module.FAILED_LOGINS_BURST + 10):
        await attempt(logins, f"hzn_{i}")
    _, secret = await base_world.services.accounts.create_token("ann", lifetime_s=None)
    async with asyncio.timeout(240):
        while await attempt(logins, secret) != "ann":  # noqa: ASYNC110  # nothing announces it
            await asyncio.sleep(0.01)


async def test_failures_are_one_line_and_one_entry_a_minute(base_world: Any, caplog: pytest.LogCaptureFixture) -> None:
    now = [1000.0]
    clock: Callable[[], float] = lambda: now[0]  # noqa: E731
    logins = Logins(base_world.services.accounts, base_world.services.audit, CallLimits(), clock=clock)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            await attempt(logins, "hzn_guessed")
        now[0] += 61
        await attempt(logins, "hzn_guessed")
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split(",")[0] for line in lines] == ["refused 1 wrong", "refused 5 wrong"]
    entries = [one for one in await base_world.services.audit.entries(limit=100) if one.action == "login"]
    assert [(one.origin, one.outcome) for one in entries] == [("10.0.0.5", "UNAUTHENTICATED")] * 2
    assert "guessed" not in str(entries) + str(lines)
