"""Users, tokens, and who may do what."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from horizon_server.db.accounts import MAX_TOKENS
from horizon_server.db.database import Database
from horizon_server.errors import (
    AlreadyExists,
    BadSetting,
    DiskFull,
    NotAllowed,
    NotFound,
    QuotaExceeded,
    Unauthenticated,
)
from horizon_server.records.account import Principal
from horizon_server.services.access import (
    may_see,
    require_change,
    require_create,
    require_members_change,
    require_submit,
)
from horizon_server.services.accounts import Accounts


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
    token, secret = await accounts.create_token("ada", lifetime_s=None)
    expected = Principal(name="ada", role="admin", project="nlp", token_id=token.token_id)
    assert await accounts.authenticate(secret) == expected


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


async def test_a_disabled_user_is_refused_until_enabled(accounts: Accounts) -> None:
    await accounts.add_user("ada")
    _, secret = await accounts.create_token("ada", lifetime_s=None)
    await accounts.disable("ada", is_disabled=True)
    with pytest.raises(Unauthenticated, match="ada is disabled"):
        await accounts.authenticate(secret)
    await accounts.disable("ada", is_disabled=False)
    assert (await accounts.authenticate(secret)).name == "ada"


async def test_a_tokens_last_use_is_kept_to_the_minute(
    accounts: Accounts, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    await accounts.add_user("ada")
    _, secret = await accounts.create_token("ada", lifetime_s=None)
    written: list[float] = []
    inner = accounts.used

    async def used(token_id: str, now_s: float) -> None:
        written.append(now_s)
        await inner(token_id, now_s)

    monkeypatch.setattr(accounts, "used", used)
    for _ in range(120):
        await accounts.authenticate(secret)
        clock.now_s += 1.0
    assert written == [1000.0, 1060.0]
    [token] = await accounts.tokens("ada")
    assert token.last_used_s == 1060.0


async def test_a_database_without_space_keeps_no_caller_out(
    accounts: Accounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    await accounts.add_user("ada")
    _, secret = await accounts.create_token("ada", lifetime_s=None)

    async def used(token_id: str, now_s: float) -> None:
        raise DiskFull("no space")

    monkeypatch.setattr(accounts, "used", used)
    assert (await accounts.authenticate(secret)).name == "ada"


async def test_the_number_of_a_users_tokens_is_bounded(accounts: Accounts, clock: Clock) -> None:
    await accounts.add_user("ada")
    made = [(await accounts.create_token("ada", lifetime_s=None))[0] for _ in range(MAX_TOKENS)]
    with pytest.raises(QuotaExceeded, match="ada has 100 tokens, the maximum"):
        await accounts.create_token("ada", lifetime_s=None)
    for token in made:
        clock.now_s += 1.0
        await accounts.revoke_token(token.token_id)
        await accounts.create_token("ada", lifetime_s=None)
    tokens = await accounts.tokens("ada")
    assert len(tokens) <= 2 * MAX_TOKENS
    assert sum(not token.has_ended(clock.now_s) for token in tokens) == MAX_TOKENS


async def test_only_who_starts_a_project_is_its_admin(accounts: Accounts) -> None:
    await accounts.add_user("ada")
    await accounts.add_user("bob", project="lab")
    await accounts.add_user("lab")  # the project is in use: this user must not see bob's jobs by a coincidence of names
    members = [(member.project, member.user, member.role) for member in await accounts.members()]
    assert members == [("ada", "ada", "admin")]
    _, secret = await accounts.create_token("ada", lifetime_s=None)
    assert (await accounts.authenticate(secret)).memberships == {"ada": "admin"}


async def test_a_lost_role_takes_the_metrics_of_all_users_away(accounts: Accounts) -> None:
    await accounts.add_user("eve", role="viewer")
    _, own = await accounts.create_token("eve", lifetime_s=None, scope="metrics", created_by="eve")
    _, given = await accounts.create_token("eve", lifetime_s=None, scope="metrics", created_by="root")
    await accounts.set_role("eve", "user")
    with pytest.raises(Unauthenticated, match="was revoked"):
        await accounts.authenticate(own)
    assert (await accounts.authenticate(given)).scope == "metrics"


@pytest.mark.parametrize("scope", ["read", "metrics"])
def test_a_token_of_a_lesser_scope_changes_nothing_not_even_for_admins(scope: str) -> None:
    root = Principal(name="root", role="admin", project="root", scope=scope, token_id="tok_1")
    changes: tuple[Callable[[], None], ...] = (
        lambda: require_create(root),
        lambda: require_change(root, "root", "job j"),
        lambda: require_submit(root, "root"),
        lambda: require_members_change(root, "root"),
    )
    for change in changes:
        with pytest.raises(NotAllowed, match=f"tok_1 has the scope {scope}"):
            change()


def test_a_viewer_of_the_own_project_may_not_submit_there() -> None:
    ada = Principal(name="ada", role="user", project="lab", memberships={"lab": "viewer"})
    with pytest.raises(NotAllowed, match="viewer of project lab"):
        require_submit(ada, "lab")
    require_submit(Principal(name="ada", role="user", project="lab"), "lab")
