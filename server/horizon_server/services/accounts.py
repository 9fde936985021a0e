"""Who calls: users and their tokens, and how many calls at a time."""

from __future__ import annotations

import asyncio
import difflib
import hashlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from horizon_server.db.accounts import AccountStore
from horizon_server.db.database import Database
from horizon_server.errors import BadSetting, DatabaseUnavailable, DiskFull, NotFound, TooManyCalls, Unauthenticated
from horizon_server.records.account import NODE, PROJECT_ROLES, ROLES, SCOPES, Principal, ProjectMember, Token, User
from horizon_server.spec import NAME_PATTERN, NAME_RULE

TOKEN_PREFIX = "hzn_"  # noqa: S105  # a recognisable start lets secret scanners find leaked tokens
_RANDOM_BYTES = 32
_MAX_TOKEN_LENGTH = 256
# How often all valid tokens are read at most.
VALID_READ_EVERY_S = 1.0
MAX_LABEL = 63
# A write for each call would cost more than the call.
_USED_EVERY_S = 60.0

# Half of the database's readers (`db.database.NUM_READERS`): two users at their bound still leave every other one a
# turn.
AT_ONCE = 2
# Of these `AT_ONCE` run and the others wait. Fifty scripts that poll every second stay far below it: a read takes
# milliseconds.
MAX_CALLS = 64


class Accounts(AccountStore):
    """The users and tokens of the database: what they may be called, how long they hold, and who presents a secret."""

    def __init__(self, database: Database, *, clock: Callable[[], float] = time.time) -> None:
        super().__init__(database)
        self._clock = clock
        self._valid: dict[str, str] = {}
        self._valid_read_s = float("-inf")

    async def add_user(self, name: str, *, role: str = "user", project: str | None = None) -> User:
        """Create a user; the project defaults to one of the user's own. Raises BadSetting for malformed values, or
        AlreadyExists."""
        _check_name("user name", name)
        _check_name("project", project or name)
        if name == NODE.name:
            raise BadSetting(f"user name {name!r} is not allowed: it is the node's own; choose another")
        _check_choice("role", role, ROLES)
        user = User(name=name, role=role, project=project or name, created_s=self._clock())
        await self.insert_user(user)
        return user

    async def set_role(self, name: str, role: str) -> User:
        """Give a user another role. Their open streams end within seconds. Raises BadSetting, NotFound."""
        _check_choice("role", role, ROLES)
        return await self.change_user(name, self._clock(), role=role)

    async def disable(self, name: str, *, is_disabled: bool) -> User:
        """Accept no token of a user any more, or accept them again; open streams end within seconds. Raises
        NotFound."""
        now_s = self._clock()
        return await self.change_user(name, now_s, disabled_s=now_s if is_disabled else None)

    async def add_member(self, project: str, user: str, role: str) -> ProjectMember:
        """Add a user to a project, or give them another role there. Raises BadSetting; NotFound when there is no such
        user or project."""
        _check_choice("role", role, PROJECT_ROLES)
        await self.require_project(project)
        return await self.set_member(ProjectMember(project=project, user=user, role=role, added_s=self._clock()))

    async def require_project(self, project: str) -> None:
        """Let pass a project that there is. Raises BadSetting, NotFound: a typing error must not make one."""
        _check_name("project", project)
        known = await self.projects()
        if project not in known:
            near = difflib.get_close_matches(project, known, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise NotFound(
                f"project {project} does not exist{hint}; an administrator creates it on the node: horizond project "
                f"add {project}"
            )

    async def create_token(
        self, user: str, *, lifetime_s: float | None, scope: str = "full", label: str = "", created_by: str = ""
    ) -> tuple[Token, str]:
        """Create a token for `user` and return it with its secret, which cannot be shown again.

        Raises BadSetting for malformed values, NotFound without the user, QuotaExceeded when they have too many.
        """
        _check_choice("scope", scope, SCOPES)
        if len(label) > MAX_LABEL or not label.isprintable():
            raise BadSetting(f"label {label!r:.80} is not allowed: it must be at most {MAX_LABEL} printable letters")
        secret = TOKEN_PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)
        now_s = self._clock()
        token = Token(
            token_id="tok_" + secrets.token_hex(5),
            user=user,
            created_s=now_s,
            expires_s=None if lifetime_s is None else now_s + lifetime_s,
            revoked_s=None,
            scope=scope,
            label=label,
            created_by=created_by,
        )
        await self.insert_token(token, _hash(secret))
        return token, secret

    async def revoke_token(self, token_id: str) -> Token:
        """Revoke a token: calls with it are refused from now on, and open streams end within seconds. Raises
        NotFound."""
        return await self.revoke(token_id, self._clock())

    async def authenticate(self, secret: str) -> Principal:
        """Return who presents `secret`. Raises Unauthenticated when it is unknown, expired or revoked, or its user
        disabled."""
        # A caller chooses the length of what is hashed here, before anything is known of them.
        found = await self.find(_hash(secret)) if secret and len(secret) <= _MAX_TOKEN_LENGTH else None
        if found is None:
            raise Unauthenticated("the token is not known here; ask an admin for one: horizond token create USER")
        token, user, principal = found
        if why := self._why_refused(token, user):
            raise Unauthenticated(why)
        now_s = self._clock()
        if token.last_used_s is None or not 0 <= now_s - token.last_used_s < _USED_EVERY_S:
            # A database that takes no writes must not keep callers out.
            with suppress(DiskFull, DatabaseUnavailable):
                await self.used(token.token_id, now_s)
        return principal

    async def still_accepted(self, token_ids: Collection[str]) -> dict[str, Principal]:
        """Return the callers that those of these tokens make now which are accepted, by token id."""
        return {
            token.token_id: principal
            for token, user, principal in await self.callers(token_ids)
            if not self._why_refused(token, user)
        }

    def _why_refused(self, token: Token, user: User) -> str:
        if token.revoked_s is not None:
            return f"token {token.token_id} was revoked; ask an admin for a new one"
        if token.has_ended(self._clock()):
            return f"token {token.token_id} has expired; ask an admin for a new one"
        if user.disabled_s is not None:
            return (
                f"user {user.name} is disabled; ask an admin to enable the account: horizond user set {user.name} "
                "--enable"
            )
        return ""

    async def user_of(self, secret: str) -> str | None:
        """Return whose valid token `secret` was a moment ago. It costs no query, so that guesses are cheap to
        refuse."""
        if self._clock() - self._valid_read_s >= VALID_READ_EVERY_S:
            # Before the query: of callers that come meanwhile, each would make one of its own.
            self._valid_read_s = self._clock()
            self._valid = await self.valid_hashes(self._valid_read_s)
        return self._valid.get(_hash(secret)) if len(secret) <= _MAX_TOKEN_LENGTH else None


def _check_name(what: str, name: str) -> None:
    if not NAME_PATTERN.fullmatch(name):
        raise BadSetting(f"{what} {name!r:.80} is not allowed: it must be {NAME_RULE}")


def _check_choice(what: str, value: str, choices: Collection[str]) -> None:
    if value not in choices:
        raise BadSetting(f"{what} {value!r:.80} is not allowed: it must be one of {', '.join(choices)}")


def _hash(secret: str) -> str:
    # Plain sha256 is enough: the secret has 256 random bits, so there is nothing to guess.
    return hashlib.sha256(secret.encode()).hexdigest()


@dataclass
class _User:
    turns: asyncio.Semaphore
    num_calls: int = 0


class UserLocks:
    """Limits how many calls of one user run, so that others do not wait long for theirs. Thread: belongs to one event
    loop."""

    def __init__(self, *, at_once: int = AT_ONCE, max_calls: int = MAX_CALLS) -> None:
        self._at_once = at_once
        self._max_calls = max_calls
        self._users: dict[str, _User] = {}

    @asynccontextmanager
    async def of(self, name: str) -> AsyncIterator[None]:
        """Hold one turn of that user for the block. Raises TooManyCalls when too many of their calls are under way
        already."""
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
