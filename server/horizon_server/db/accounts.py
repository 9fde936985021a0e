"""Users, tokens, projects and their members in the database."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from typing import Any, TypeVar

from sqlalchemy import Connection, bindparam, delete, exists, func, select, union, update
from sqlalchemy.ext.asyncio import AsyncSession

from horizon_server.db.database import Database, parts
from horizon_server.db.tables import (
    AllowanceRow,
    DatasetRow,
    GrantRow,
    JobRow,
    MemberRow,
    ModelRow,
    TokenRow,
    UserRow,
    WebhookRow,
)
from horizon_server.db.webhooks import delete_webhooks
from horizon_server.errors import AlreadyExists, NotFound, QuotaExceeded
from horizon_server.records.account import Owned, Principal, ProjectMember, Token, User
from horizon_server.records.job import ENDED

RecordT = TypeVar("RecordT", User, Token, ProjectMember)
MAX_TOKENS = 100
"""Of a user: that many tokens that are accepted, and as many that have ended."""

# Every call needs it: as plain columns, since objects of the ORM take ten times as long.
# One query, made once: every call of the daemon begins with it.
_CALLERS = (
    select(
        *TokenRow.__table__.columns,
        *(column.label(f"user_{column.name}") for column in UserRow.__table__.columns),
        MemberRow.project.label("member_project"),
        MemberRow.role.label("member_role"),
    )
    .join(UserRow, UserRow.name == TokenRow.user)
    .outerjoin(MemberRow, MemberRow.user == UserRow.name)
)
_BY_SHA256 = _CALLERS.where(TokenRow.sha256 == bindparam("key"))


class AccountStore:
    """The tables of users, tokens and members. Each call is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def insert_user(self, user: User) -> None:
        """Store a new user, as the admin of the project of their name where nobody uses that yet. Raises
        AlreadyExists."""
        async with self._database.session() as session:
            if await session.get(UserRow, user.name) is not None:
                raise AlreadyExists(f"user {user.name} exists already")
            # In a project that others use, the role would show them the jobs of those: that is for an admin to decide.
            is_new = user.project == user.name and not await _is_used(session, user.project)
            session.add(UserRow(**dataclasses.asdict(user)))
            if is_new:
                session.add(MemberRow(project=user.project, user=user.name, role="admin", added_s=user.created_s))

    async def users(self) -> list[User]:
        """Return all users by name."""
        async with self._database.reading() as session:
            rows = await session.scalars(select(UserRow).order_by(UserRow.name))
            return [_record(User, row) for row in rows]

    async def change_user(self, name: str, now_s: float, **fields: Any) -> User:
        """Set fields of a user and return the user. Raises NotFound."""
        async with self._database.session() as session:
            row = await _user(session, name)
            for field, value in fields.items():
                setattr(row, field, value)
            if row.role == "user":
                # Only a role that sees everything may create these, and they would outlive it.
                mine = (TokenRow.user == name, TokenRow.created_by == name, TokenRow.scope == "metrics")
                revoke = update(TokenRow).where(*mine, TokenRow.revoked_s.is_(None)).values(revoked_s=now_s)
                await session.execute(revoke)
            return _record(User, row)

    async def remove_user(self, name: str) -> int:
        """Remove a user with their tokens, memberships, webhooks and allowance; what they own stays. Return how many
        tokens they had.

        Raises NotFound.
        """
        async with self._database.session() as session:
            row = await _user(session, name)
            tokens = await session.execute(delete(TokenRow).where(TokenRow.user == name).returning(TokenRow.token_id))
            # Or another person who gets the name later would have them.
            await session.execute(delete(MemberRow).where(MemberRow.user == name))
            await delete_webhooks(session, WebhookRow.owner == name)
            allowance = (AllowanceRow.holder == "user", AllowanceRow.name == name)
            await session.execute(delete(AllowanceRow).where(*allowance))
            await session.delete(row)
            return len(tokens.all())

    async def owned(self, name: str) -> Owned:
        """Return what a user owns. Raises NotFound when there is no such user."""
        ended = JobRow.job_state.in_(sorted(ENDED))
        async with self._database.reading() as session:
            await _user(session, name)

            async def number(row: type[Any], *conditions: Any) -> int:
                return (
                    await session.scalar(select(func.count()).select_from(row).where(row.owner == name, *conditions))
                    or 0
                )

            return Owned(
                num_jobs=await number(JobRow),
                num_jobs_not_ended=await number(JobRow, ~ended),
                num_datasets=await number(DatasetRow),
                num_models=await number(ModelRow),
            )

    async def insert_token(self, token: Token, sha256: str) -> None:
        """Store a token by its hash. Raises NotFound when the user does not exist, QuotaExceeded when they have too
        many."""
        async with self._database.session() as session:
            if await session.get(UserRow, token.user) is None:
                raise NotFound(
                    f"user {token.user} does not exist; create it first with: horizond user add {token.user}"
                )
            rows = await session.scalars(
                select(TokenRow).where(TokenRow.user == token.user).order_by(TokenRow.created_s.desc())
            )
            ended: list[str] = []
            num_accepted = 0
            for row in rows:
                if _record(Token, row).has_ended(token.created_s):
                    ended.append(row.token_id)
                else:
                    num_accepted += 1
            if num_accepted >= MAX_TOKENS:
                raise QuotaExceeded(
                    f"{token.user} has {num_accepted} tokens, the maximum; revoke one first: horizon token revoke "
                    "TOKEN_ID"
                )
            for part in parts(ended[MAX_TOKENS - 1 :]):
                await session.execute(delete(TokenRow).where(TokenRow.token_id.in_(part)))
            session.add(TokenRow(**dataclasses.asdict(token), sha256=sha256))

    async def tokens(self, user: str | None = None) -> list[Token]:
        """Return the tokens of a user, or all (None), oldest first, without their secrets."""
        query = select(TokenRow).order_by(TokenRow.created_s)
        if user is not None:
            query = query.where(TokenRow.user == user)
        async with self._database.reading() as session:
            return [_record(Token, row) for row in await session.scalars(query)]

    async def token(self, token_id: str) -> Token:
        """Return one token. Raises NotFound."""
        async with self._database.reading() as session:
            return _record(Token, await _token(session, token_id))

    async def revoke(self, token_id: str, now_s: float) -> Token:
        """Revoke a token from `now_s` on and return it. Raises NotFound when there is no such token."""
        async with self._database.session() as session:
            row = await _token(session, token_id)
            row.revoked_s = row.revoked_s or now_s  # the first time counts
            return _record(Token, row)

    async def valid_hashes(self, now_s: float) -> dict[str, str]:
        """Return the users of all tokens that are neither revoked nor expired, by hash; without users that are
        disabled."""
        query = select(TokenRow.sha256, TokenRow.user).join(UserRow, UserRow.name == TokenRow.user)
        query = query.where(TokenRow.revoked_s.is_(None), UserRow.disabled_s.is_(None))
        query = query.where(TokenRow.expires_s.is_(None) | (TokenRow.expires_s > now_s))
        async with self._database.reading() as session:
            return {row.sha256: row.user for row in await session.execute(query)}

    async def used(self, token_id: str, now_s: float) -> None:
        """Note that a token was used."""
        async with self._database.session() as session:
            await session.execute(update(TokenRow).where(TokenRow.token_id == token_id).values(last_used_s=now_s))

    async def find(self, sha256: str) -> tuple[Token, User, Principal] | None:
        """Return the token with this hash, its user, and the caller that it makes."""

        def read(connection: Connection) -> tuple[Token, User, Principal] | None:
            found = _callers(connection.execute(_BY_SHA256, {"key": sha256}).all())
            return found[0] if found else None

        return await self._database.look_up(("caller", sha256), read)

    async def callers(self, token_ids: Collection[str]) -> list[tuple[Token, User, Principal]]:
        """Return those of these tokens that exist, each with its user and the caller that it makes."""
        found: list[tuple[Token, User, Principal]] = []
        async with self._database.reading() as session:
            for part in parts(token_ids):
                found += _callers((await session.execute(_CALLERS.where(TokenRow.token_id.in_(part)))).all())
        return found

    async def set_member(self, member: ProjectMember) -> ProjectMember:
        """Add a user to a project, or give them another role there. Raises NotFound when there is no such user."""
        async with self._database.session() as session:
            await _user(session, member.user)
            row = await session.get(MemberRow, (member.project, member.user))
            if row is None:
                row = MemberRow(**dataclasses.asdict(member))
                session.add(row)
            row.role = member.role
            return _record(ProjectMember, row)

    async def remove_member(self, project: str, user: str) -> None:
        """Remove a user from a project. Raises NotFound when they are not in it."""
        async with self._database.session() as session:
            row = await session.get(MemberRow, (project, user))
            if row is None:
                raise NotFound(f"user {user} is not a member of project {project}")
            await session.delete(row)

    async def members(self, projects: Collection[str] | None = None) -> list[ProjectMember]:
        """Return the members of these projects, or of all (None), by project and user."""
        found: list[ProjectMember] = []
        query = select(MemberRow)
        async with self._database.reading() as session:
            for part in [None] if projects is None else parts(projects):
                some = query if part is None else query.where(MemberRow.project.in_(part))
                found += [_record(ProjectMember, row) for row in await session.scalars(some)]
        return sorted(found, key=lambda member: (member.project, member.user))

    async def projects(self) -> list[str]:
        """Return every project that a user, a member, a job, an allowance or a grant names."""
        sources = (
            select(UserRow.project),
            select(MemberRow.project),
            select(JobRow.project).distinct(),
            select(AllowanceRow.name).where(AllowanceRow.holder == "project"),
        )
        async with self._database.reading() as session:
            return sorted(await session.scalars(union(*sources)))


def _callers(rows: Iterable[Any]) -> list[tuple[Token, User, Principal]]:
    """Return the tokens of rows of `_CALLERS`, with their users and the callers that they make."""
    tokens: dict[str, tuple[Token, User]] = {}
    memberships: dict[str, dict[str, str]] = {}
    for row in rows:
        if row.token_id not in tokens:
            user = User(**{field.name: getattr(row, f"user_{field.name}") for field in dataclasses.fields(User)})
            token = Token(**{field.name: getattr(row, field.name) for field in dataclasses.fields(Token)})
            tokens[row.token_id] = token, user
        roles = memberships.setdefault(row.token_id, {})
        if row.member_project is not None:
            roles[row.member_project] = row.member_role
    return [
        (
            token,
            user,
            Principal(
                name=user.name,
                role=user.role,
                project=user.project,
                scope=token.scope,
                token_id=token_id,
                memberships=memberships[token_id],
            ),
        )
        for token_id, (token, user) in tokens.items()
    ]


async def _is_used(session: AsyncSession, project: str) -> bool:
    """Whether anybody is in a project, or was charged there, or shares with it."""
    uses = (
        exists().where(UserRow.project == project),
        exists().where(MemberRow.project == project),
        exists().where(JobRow.project == project),
        exists().where(GrantRow.project == project),
    )
    return any([await session.scalar(select(use)) for use in uses])


async def _user(session: AsyncSession, name: str) -> UserRow:
    row = await session.get(UserRow, name)
    if row is None:
        raise NotFound(f"user {name} does not exist; see: horizond user list")
    return row


async def _token(session: AsyncSession, token_id: str) -> TokenRow:
    row = await session.get(TokenRow, token_id)
    if row is None:
        raise NotFound(f"token {token_id} does not exist; see: horizond token list")
    return row


def _record(kind: type[RecordT], row: UserRow | TokenRow | MemberRow) -> RecordT:
    return kind(**{field.name: getattr(row, field.name) for field in dataclasses.fields(kind)})
