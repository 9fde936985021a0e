"""Users and bearer tokens: making, hashing, checking. Tokens are shown once and stored as sha256 only."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable

from horizon_server.db.accounts import AccountStore
from horizon_server.errors import BadSetting, Unauthenticated
from horizon_server.records.account import ROLES, Principal, Token, User
from horizon_server.spec import NAME_PATTERN, NAME_RULE

TOKEN_PREFIX = "hzn_"  # noqa: S105  # a recognisable start lets secret scanners find leaked tokens
_RANDOM_BYTES = 32
_MAX_TOKEN_LENGTH = 256


class Accounts:
    """Makes users and tokens, and finds the user of a token."""

    def __init__(self, store: AccountStore, *, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock

    async def add_user(self, name: str, *, role: str = "user", project: str | None = None) -> User:
        """Make a user; the project defaults to one of their own.

        Raises:
            BadSetting: when name, role or project is malformed.
            AlreadyExists: when the name is taken.
        """
        for what, value in (("user name", name), ("project", project or name)):
            if not NAME_PATTERN.fullmatch(value):
                raise BadSetting(f"{what} {value!r} is not allowed: it must be {NAME_RULE}")
        if role not in ROLES:
            raise BadSetting(f"role {role!r} is not allowed: it must be one of {', '.join(ROLES)}")
        user = User(name=name, role=role, project=project or name, created_s=self._clock())
        await self._store.add_user(user)
        return user

    async def users(self) -> list[User]:
        """Return all users by name."""
        return await self._store.users()

    async def remove_user(self, name: str) -> int:
        """Remove a user and all their tokens; what they own stays. Return how many tokens they had.

        Raises:
            NotFound: when there is no such user.
        """
        return await self._store.remove_user(name)

    async def create_token(self, user: str, *, lifetime_s: float | None) -> tuple[Token, str]:
        """Make a token for `user` and return it with its secret, which cannot be shown again.

        Raises:
            NotFound: when the user does not exist.
        """
        secret = TOKEN_PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)
        now_s = self._clock()
        token = Token(
            token_id="tok_" + secrets.token_hex(5),
            user=user,
            created_s=now_s,
            expires_s=None if lifetime_s is None else now_s + lifetime_s,
            revoked_s=None,
        )
        await self._store.add_token(token, _hash(secret))
        return token, secret

    async def tokens(self) -> list[Token]:
        """Return all tokens, oldest first, without their secrets."""
        return await self._store.tokens()

    async def revoke_token(self, token_id: str) -> None:
        """Make a token useless from now on.

        Raises:
            NotFound: when there is no such token.
        """
        await self._store.revoke(token_id, self._clock())

    async def authenticate(self, secret: str) -> Principal:
        """Return who presents `secret`.

        Raises:
            Unauthenticated: when it is unknown, expired or revoked.
        """
        found = await self._store.find(_hash(secret)) if secret and len(secret) <= _MAX_TOKEN_LENGTH else None
        if found is None:
            raise Unauthenticated("the token is not known here; ask an admin for one: horizond token create USER")
        token, user = found
        if token.revoked_s is not None:
            raise Unauthenticated(f"token {token.token_id} was revoked; ask an admin for a new one")
        if token.expires_s is not None and token.expires_s <= self._clock():
            raise Unauthenticated(f"token {token.token_id} has expired; ask an admin for a new one")
        return Principal(name=user.name, role=user.role, project=user.project)


def _hash(secret: str) -> str:
    """Plain sha256 is enough: the secret has 256 random bits, so there is nothing to guess."""
    return hashlib.sha256(secret.encode()).hexdigest()
