"""What callers can do with their own account: see who they are, make and revoke tokens, form projects, share datasets
and models."""

from __future__ import annotations

from dataclasses import dataclass

from horizon_server.errors import BadSetting, InvalidSpec, NotAllowed, NotFound
from horizon_server.records.account import EVERYONE, Principal, Project, ProjectMember, Token
from horizon_server.records.blob import PushedRecord
from horizon_server.services.access import (
    require_create,
    require_members_change,
    require_scope,
)
from horizon_server.services.accounts import Accounts
from horizon_server.services.pushed import DatasetService, ModelService
from horizon_server.spec import NAME_PATTERN, NAME_RULE

DEFAULT_TOKEN_DAYS = 90.0
DAY_S = 86400.0


@dataclass(kw_only=True, eq=False)
class IdentityService:
    """The use cases around accounts. Thread: belongs to one event loop.

    Args:
        max_token_days: the longest life of a token that a caller makes; `horizond token create` has no such limit.
    """

    accounts: Accounts
    datasets: DatasetService
    models: ModelService
    max_token_days: float

    async def create_token(
        self, principal: Principal, *, label: str, scope: str, lifetime_s: float | None
    ) -> tuple[Token, str]:
        """Create a token of the caller's own and return it with its secret. A lifetime of None is the default, 90 days.

        Raises:
            NotAllowed: when the caller's token allows no changes; for the scope metrics, when their role does not see
                everything.
            QuotaExceeded: when they have too many tokens.
        """
        require_scope(principal, "change")
        # It shows the series of all users.
        if scope == "metrics" and not principal.sees_all:
            raise NotAllowed(
                f"{principal.name} has the role {principal.role}; a token of scope metrics shows the jobs of all "
                "users, "
                "so only an admin or a viewer may create one"
            )
        longest_s = self.max_token_days * DAY_S
        if lifetime_s is None:
            lifetime_s = min(DEFAULT_TOKEN_DAYS * DAY_S, longest_s)
        if not 0 < lifetime_s <= longest_s:
            raise InvalidSpec.of(
                "lifetime",
                f"lifetime is {lifetime_s / DAY_S:g} days; it must be above 0 and at most {self.max_token_days:g} days",
            )
        try:
            return await self.accounts.create_token(
                principal.name, lifetime_s=lifetime_s, scope=scope, label=label, created_by=principal.name
            )
        except BadSetting as error:
            raise InvalidSpec.of("label", error.message) from error

    async def tokens(self, principal: Principal, user: str = "") -> list[Token]:
        """Return the tokens of the caller, newest first; an admin may name another user. Raises NotAllowed."""
        user = user or principal.name
        if user != principal.name and principal.role != "admin":
            raise NotAllowed(
                f"{principal.name} has the role {principal.role}; only an admin may list the tokens of others"
            )
        return (await self.accounts.tokens(user))[::-1]

    async def revoke_token(self, principal: Principal, token_id: str) -> Token:
        """Revoke a token of the caller's own, or for admins of anybody. Open streams with it end within seconds. Raises
        NotFound."""
        require_scope(principal, "change")
        absent = NotFound(f"token {token_id!r:.80} does not exist, or is not yours; see: horizon token list")
        if not token_id.isascii():
            raise absent
        try:
            token = await self.accounts.token(token_id)
        except NotFound:
            raise absent from None
        if token.user != principal.name and principal.role != "admin":
            raise absent
        return await self.accounts.revoke_token(token_id)

    async def projects(self, principal: Principal) -> list[Project]:
        """Return the projects that the caller is in, with their members, by name; all projects for admins and
        viewers."""
        own = {principal.project, *principal.memberships}
        names = await self.accounts.projects() if principal.sees_all else sorted(own)
        # Who else is in the project that a user is charged to, only its members see.
        shown = names if principal.sees_all else list(principal.memberships)
        members: dict[str, list[ProjectMember]] = {}
        for member in await self.accounts.members(shown):
            members.setdefault(member.project, []).append(member)
        return [
            Project(name=name, role=principal.memberships.get(name, ""), members=tuple(members.get(name, ())))
            for name in names
        ]

    async def set_member(self, principal: Principal, *, project: str, user: str, role: str) -> ProjectMember:
        """Add a user to a project, or give them another role there: viewer, member or admin.

        Raises:
            NotFound: when the caller is not in the project, or there is no such user.
            NotAllowed: when the caller is not an admin of it.
        """
        _check_name("project", project)
        require_members_change(principal, project)
        try:
            return await self.accounts.add_member(project, user, role)
        except BadSetting as error:
            raise InvalidSpec.of("role", error.message) from error

    async def remove_member(self, principal: Principal, *, project: str, user: str) -> None:
        """Remove a user from a project; everybody may leave. Raises NotFound, NotAllowed."""
        _check_name("project", project)
        if user == principal.name and project in principal.memberships:
            require_scope(principal, "change")
        else:
            require_members_change(principal, project)
        await self.accounts.remove_member(project, user)

    async def share(self, principal: Principal, *, kind: str, name: str, project: str) -> PushedRecord:
        """Let all members of a project, or `EVERYONE`, use a dataset or model of the caller's; return it.

        Raises:
            NotFound: when there is no such dataset or model, or the caller is not in the project.
        """
        require_create(principal)
        if project != EVERYONE:
            _check_name("project", project)
            if principal.role != "admin" and project not in principal.memberships:
                raise NotFound(
                    f"project {project} does not exist, or you are not a member of it; see: horizon project list"
                )
        return await self._pushed(kind).share(principal, name, project)

    async def unshare(self, principal: Principal, *, kind: str, name: str, project: str) -> PushedRecord:
        """Take back what `share` allowed; return the dataset or model. Raises NotFound, NotAllowed."""
        if project != EVERYONE:
            _check_name("project", project)
        return await self._pushed(kind).unshare(principal, name, project)

    def _pushed(self, kind: str) -> DatasetService | ModelService:
        kinds: dict[str, DatasetService | ModelService] = {"dataset": self.datasets, "model": self.models}
        if kind not in kinds:
            raise InvalidSpec.of("kind", f"kind is {kind!r:.80}; it must be dataset or model")
        return kinds[kind]


def _check_name(field: str, name: str) -> None:
    if not NAME_PATTERN.fullmatch(name):
        raise InvalidSpec.of(field, f"{field} is {name!r:.80}; it must be {NAME_RULE}")
