"""Users and tokens in the database."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

from sqlalchemy import delete, select

from horizon_server.db.database import Database
from horizon_server.db.tables import TokenRow, UserRow
from horizon_server.errors import AlreadyExists, NotFound
from horizon_server.records.account import Token, User

RecordT = TypeVar("RecordT", User, Token)


class AccountStore:
    """The tables of users and tokens. Each call is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def insert_user(self, user: User) -> None:
        """Store a new user. Raises AlreadyExists when the name is taken."""
        async with self._database.session() as session:
            if await session.get(UserRow, user.name) is not None:
                raise AlreadyExists(f"user {user.name} exists already")
            session.add(UserRow(**dataclasses.asdict(user)))

    async def users(self) -> list[User]:
        """Return all users by name."""
        async with self._database.reading() as session:
            rows = await session.scalars(select(UserRow).order_by(UserRow.name))
            return [_record(User, row) for row in rows]

    async def remove_user(self, name: str) -> int:
        """Remove a user and all their tokens; what they own stays. Return how many tokens they had. Raises NotFound."""
        async with self._database.session() as session:
            row = await session.get(UserRow, name)
            if row is None:
                raise NotFound(f"user {name} does not exist; see: horizond user list")
            tokens = await session.execute(delete(TokenRow).where(TokenRow.user == name).returning(TokenRow.token_id))
            await session.delete(row)
            return len(tokens.all())

    async def insert_token(self, token: Token, sha256: str) -> None:
        """Store a token by its hash. Raises NotFound when the user does not exist."""
        async with self._database.session() as session:
            if await session.get(UserRow, token.user) is None:
                raise NotFound(
                    f"user {token.user} does not exist; create it first with: horizond user add {token.user}"
                )
            session.add(TokenRow(**dataclasses.asdict(token), sha256=sha256))

    async def tokens(self) -> list[Token]:
        """Return all tokens, oldest first, without their secrets."""
        async with self._database.reading() as session:
            rows = await session.scalars(select(TokenRow).order_by(TokenRow.created_s))
            return [_record(Token, row) for row in rows]

    async def revoke(self, token_id: str, now_s: float) -> None:
        """Revoke a token from `now_s` on. Raises NotFound when there is no such token."""
        async with self._database.session() as session:
            row = await session.get(TokenRow, token_id)
            if row is None:
                raise NotFound(f"token {token_id} does not exist; see: horizond token list")
            row.revoked_s = row.revoked_s or now_s  # the first time counts

    async def find(self, sha256: str) -> tuple[Token, User] | None:
        """Return the token with this hash and its user."""
        async with self._database.reading() as session:
            query = select(TokenRow, UserRow).join(UserRow, UserRow.name == TokenRow.user)
            found = (await session.execute(query.where(TokenRow.sha256 == sha256))).first()
            return (_record(Token, found[0]), _record(User, found[1])) if found else None


def _record(kind: type[RecordT], row: UserRow | TokenRow) -> RecordT:
    return kind(**{field.name: getattr(row, field.name) for field in dataclasses.fields(kind)})
