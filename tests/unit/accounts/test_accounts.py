"""Users, tokens, and who may do what."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from horizon_server.db.database import Database
from horizon_server.errors import AlreadyExists, BadSetting, NotAllowed, NotFound, Unauthenticated
from horizon_server.records.account import Principal
from horizon_server.services.accounts import Accounts, may_see, require_change, require_create


class Clock:
    """Time that passes when told."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def accounts(tmp_path: Path, clock: Clock) -> AsyncIterator[Accounts]:
    database = await Database.open(tmp_path / "horizon.db")
    yield Accounts(database, clock=clock)
    await database.close()


async def test_a_token_tells_who_calls(accounts: Accounts) -> None:
    await accounts.add_user("ada", role="admin", project="nlp")
    _, secret = await accounts.create_token("ada", lifetime_s=None)
    assert await accounts.authenticate(secret) == Principal(name="ada", role="admin", project="nlp")


async def test_only_a_hash_is_stored(accounts: Accounts, tmp_path: Path) -> None:
    await accounts.add_user("ada")
    _, secret = await accounts.create_token("ada", lifetime_s=None)
    stored = b"".join(path.read_bytes() for path in sorted(tmp_path.iterdir()))
    assert secret.encode() not in stored
    assert secret.removeprefix("hzn_").encode() not in stored


@pytest.mark.parametrize("secret", ["", "hzn_wrong", "x" * 100_000])
async def test_an_unknown_token_is_refused(accounts: Accounts, secret: str) -> None:
    with pytest.raises(Unauthenticated, match="not known"):
        await accounts.authenticate(secret)


async def test_an_expired_and_a_revoked_token_are_refused(accounts: Accounts, clock: Clock) -> None:
    await accounts.add_user("ada")
    token, secret = await accounts.create_token("ada", lifetime_s=60)
    clock.now_s += 59
    await accounts.authenticate(secret)
    clock.now_s += 1
    with pytest.raises(Unauthenticated, match="has expired"):
        await accounts.authenticate(secret)
    await accounts.revoke_token(token.token_id)
    with pytest.raises(Unauthenticated, match="was revoked"):
        await accounts.authenticate(secret)


async def test_wrong_names_are_refused(accounts: Accounts) -> None:
    await accounts.add_user("ada")
    with pytest.raises(AlreadyExists, match="ada exists"):
        await accounts.add_user("ada")
    with pytest.raises(BadSetting, match="user name"):
        await accounts.add_user("../ada")
    with pytest.raises(NotFound, match="horizond user add bob"):
        await accounts.create_token("bob", lifetime_s=None)
    with pytest.raises(NotFound, match="tok_none"):
        await accounts.revoke_token("tok_none")


async def test_a_removed_user_is_gone_with_all_tokens(accounts: Accounts) -> None:
    await accounts.add_user("ada")
    await accounts.add_user("bob")
    secrets = [(await accounts.create_token(name, lifetime_s=None))[1] for name in ("ada", "ada", "bob")]
    assert await accounts.remove_user("ada") == 2
    for secret in secrets[:2]:
        with pytest.raises(Unauthenticated, match="not known"):
            await accounts.authenticate(secret)
    assert (await accounts.authenticate(secrets[2])).name == "bob"
    assert [user.name for user in await accounts.users()] == ["bob"]
    with pytest.raises(NotFound, match="horizond user list"):
        await accounts.remove_user("ada")


USER = Principal(name="ada", role="user", project="ada")
ADMIN = Principal(name="root", role="admin", project="root")
VIEWER = Principal(name="eve", role="viewer", project="eve")


def test_users_see_their_own_and_admins_and_viewers_all() -> None:
    assert [may_see(p, "ada") for p in (USER, ADMIN, VIEWER)] == [True, True, True]
    assert [may_see(p, "bob") for p in (USER, ADMIN, VIEWER)] == [False, True, True]


def test_strangers_learn_nothing_and_viewers_change_nothing() -> None:
    with pytest.raises(NotFound):
        require_change(USER, "bob", "job x")
    with pytest.raises(NotAllowed, match="viewer"):
        require_change(VIEWER, "ada", "job x")
    with pytest.raises(NotAllowed, match="viewer"):
        require_create(VIEWER)
    require_change(USER, "ada", "job x")
    require_change(ADMIN, "ada", "job x")
