"""`client.account`: who you are, your tokens, your projects, and with whom you share datasets and models."""

from __future__ import annotations

from dataclasses import dataclass, field

from horizon_client.connection import Connection
from horizon_client.conversion import from_message
from horizon_client.resources import Account, Project, ProjectMember, Token
from horizon_proto.v1 import account_pb2

EVERYONE = "*"
"""In place of a project: share with all users of the node."""


@dataclass(frozen=True, kw_only=True)
class CreatedToken:
    """A new token with its secret, which cannot be shown again."""

    token: Token
    secret: str = field(repr=False)


class AsyncAccounts:
    """`client.account`: your account on the node."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def whoami(self) -> Account:
        """Return who you are, and what your token allows."""
        answer = await self._connection.unary(self._connection.calls.account.WhoAmI, account_pb2.WhoAmIRequest())
        return from_message(Account, answer.account)

    async def create_token(
        self, *, label: str = "", scope: str = "full", lifetime_s: float | None = None
    ) -> CreatedToken:
        """Create a token of your own: `full`, `read` (no changes) or `metrics` (only GET /metrics). The default life is
        90 days.

        Raises:
            NotAllowed: when your token allows no changes; for `metrics`, when you are neither admin nor viewer.
        """
        request = account_pb2.CreateTokenRequest(label=label, scope=scope)
        if lifetime_s is not None:
            request.lifetime.FromMilliseconds(round(lifetime_s * 1000))
        # Once: a repeated call would leave a token whose secret nobody has seen
        answer = await self._connection.unary(self._connection.calls.account.CreateToken, request, repeatable=False)
        return CreatedToken(token=from_message(Token, answer.token), secret=answer.secret)

    async def tokens(self, user: str = "") -> list[Token]:
        """Return your tokens, newest first; an admin may name another user."""
        request = account_pb2.ListTokensRequest(user=user)
        answer = await self._connection.unary(self._connection.calls.account.ListTokens, request)
        return [from_message(Token, token) for token in answer.tokens]

    async def revoke_token(self, token_id: str) -> Token:
        """End a token: calls with it are refused, and open streams end within seconds. For admins, any token."""
        request = account_pb2.RevokeTokenRequest(token_id=token_id)
        answer = await self._connection.unary(self._connection.calls.account.RevokeToken, request)
        return from_message(Token, answer.token)

    async def projects(self) -> list[Project]:
        """Return your projects with their members; all projects for admins and viewers."""
        request = account_pb2.ListProjectsRequest()
        answer = await self._connection.unary(self._connection.calls.account.ListProjects, request)
        return [from_message(Project, project) for project in answer.projects]

    async def set_member(self, project: str, user: str, role: str = "member") -> ProjectMember:
        """Add a user to a project that you are an admin of, or give them another role: `viewer`, `member` or
        `admin`."""
        request = account_pb2.SetMemberRequest(project=project, user=user, role=role)
        answer = await self._connection.unary(self._connection.calls.account.SetMember, request)
        return from_message(ProjectMember, answer.member)

    async def remove_member(self, project: str, user: str) -> None:
        """Remove a user from a project that you are an admin of, or yourself from any."""
        request = account_pb2.RemoveMemberRequest(project=project, user=user)
        await self._connection.unary(self._connection.calls.account.RemoveMember, request, repeatable=False)

    async def share(self, kind: str, name: str, project: str) -> tuple[str, ...]:
        """Let all members of a project, or everyone (`*`), use your dataset or model; return with whom it is shared.

        `kind` is `dataset` or `model`.
        """
        request = account_pb2.ShareRequest(kind=kind, name=name, project=project)
        answer = await self._connection.unary(self._connection.calls.account.Share, request)
        return tuple(answer.shared_with)

    async def unshare(self, kind: str, name: str, project: str) -> tuple[str, ...]:
        """Take back what `share` allowed; return with whom it is still shared. Jobs that were submitted before keep
        it."""
        request = account_pb2.UnshareRequest(kind=kind, name=name, project=project)
        answer = await self._connection.unary(self._connection.calls.account.Unshare, request)
        return tuple(answer.shared_with)
