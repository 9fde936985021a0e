"""Who calls: users and their tokens, what each of them may do, and how many calls at a time. Every service asks here."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from horizon_server.db.accounts import AccountStore
from horizon_server.db.database import Database
from horizon_server.errors import BadSetting, NotAllowed, NotFound, TooManyCalls, Unauthenticated
from horizon_server.records.account import ROLES, Principal, Token, User
from horizon_server.spec import NAME_PATTERN, NAME_RULE

TOKEN_PREFIX = "hzn_"  # noqa: S105  # a recognisable start lets secret scanners find leaked tokens
_RANDOM_BYTES = 32
_MAX_TOKEN_LENGTH = 256

# Half of the database's readers (`db.database.NUM_READERS`): two users at their bound still leave every other one a turn.
AT_ONCE = 2
# Of these `AT_ONCE` run and the others wait. Fifty scripts that poll every second stay far below it: a read takes milliseconds.
MAX_CALLS = 64


class Accounts(AccountStore):
    """The users and tokens of the database: what they may be called, how long they hold, and who presents a secret."""

    def __init__(self, database: Database, *, clock: Callable[[], float] = time.time) -> None:
        super().__init__(database)
        self._clock = clock

    async def add_user(self, name: str, *, role: str = "user", project: str | None = None) -> User:
        """Create a user; the project defaults to one of the user's own. Raises BadSetting for malformed values, or AlreadyExists."""
        for what, value in (("user name", name), ("project", project or name)):
            if not NAME_PATTERN.fullmatch(value):
                raise BadSetting(f"{what} {value!r} is not allowed: it must be {NAME_RULE}")
        if role not in ROLES:
            raise BadSetting(f"role {role!r} is not allowed: it must be one of {', '.join(ROLES)}")
        user = User(name=name, role=role, project=project or name, created_s=self._clock())
        await self.insert_user(user)
        return user

    async def create_token(self, user: str, *, lifetime_s: float | None) -> tuple[Token, str]:
        """Create a token for `user` and return it with its secret, which cannot be shown again. Raises NotFound without the user."""
        secret = TOKEN_PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)
        now_s = self._clock()
        token = Token(
            token_id="tok_" + secrets.token_hex(5),
            user=user,
            created_s=now_s,
            expires_s=None if lifetime_s is None else now_s + lifetime_s,
            revoked_s=None,
        )
        await self.insert_token(token, _hash(secret))
        return token, secret

    async def revoke_token(self, token_id: str) -> None:
        """Revoke a token: calls with it are refused from now on. Raises NotFound when there is no such token."""
        await self.revoke(token_id, self._clock())

    async def authenticate(self, secret: str) -> Principal:
        """Return who presents `secret`. Raises Unauthenticated when it is unknown, expired or revoked."""
        # A caller chooses the length of what is hashed here, before anything is known of them.
        found = await self.find(_hash(secret)) if secret and len(secret) <= _MAX_TOKEN_LENGTH else None
        if found is None:
            raise Unauthenticated("the token is not known here; ask an admin for one: horizond token create USER")
        token, user = found
        if token.revoked_s is not None:
            raise Unauthenticated(f"token {token.token_id} was revoked; ask an admin for a new one")
        if token.expires_s is not None and token.expires_s <= self._clock():
            raise Unauthenticated(f"token {token.token_id} has expired; ask an admin for a new one")
        return Principal(name=user.name, role=user.role, project=user.project)


def _hash(secret: str) -> str:
    # Plain sha256 is enough: the secret has 256 random bits, so there is nothing to guess.
    return hashlib.sha256(secret.encode()).hexdigest()


def may_see(principal: Principal, owner: str) -> bool:
    """Whether `principal` may know that a resource of `owner` exists."""
    return principal.sees_all or principal.name == owner


def require_visible(principal: Principal, owner: str, what: str) -> None:
    """Allow a look at a resource of `owner`. Raises NotFound when the caller may not see resources of `owner`."""
    # Never NotAllowed: other users must not learn which names exist.
    if not may_see(principal, owner):
        raise NotFound(f"{what} does not exist, or is not yours")


def require_change(principal: Principal, owner: str, what: str) -> None:
    """Allow a change of a resource of `owner`. Raises NotFound when the caller may not even see it, else NotAllowed."""
    require_visible(principal, owner, what)
    require_create(principal)
    if principal.role != "admin" and principal.name != owner:
        raise NotAllowed(f"{what} belongs to {owner}; only they or an admin may change it")


def require_create(principal: Principal) -> None:
    """Allow creating something. Raises NotAllowed for viewers."""
    if principal.role == "viewer":
        raise NotAllowed(
            f"{principal.name} has the role viewer and may look but not change; ask an admin for the role user"
        )


@dataclass
class _User:
    turns: asyncio.Semaphore
    num_calls: int = 0


class UserTurns:
    """Limits how many calls of one user run, so that others do not wait long for theirs. Thread: belongs to one event loop."""

    def __init__(self, *, at_once: int = AT_ONCE, max_calls: int = MAX_CALLS) -> None:
        self._at_once = at_once
        self._max_calls = max_calls
        self._users: dict[str, _User] = {}

    @asynccontextmanager
    async def of(self, name: str) -> AsyncIterator[None]:
        """Hold one turn of that user for the block. Raises TooManyCalls when too many of their calls are under way already."""
        user = self._users.setdefault(name, _User(asyncio.Semaphore(self._at_once)))
        if user.num_calls >= self._max_calls:
            raise TooManyCalls(
                f"{name} has {user.num_calls} calls under way, the maximum; wait for their answers, then call again",
                retry_after_s=1.0,
            )
        user.num_calls += 1
        try:
            async with user.turns:
                yield
        finally:
            user.num_calls -= 1
            if user.num_calls == 0:
                del self._users[name]
