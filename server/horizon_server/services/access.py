"""Who may do what: the one place where that is decided, for gRPC, REST, event streams, the page and the metrics.

Owners decide about what is theirs. A job is in a project: its members see it, its admins may change it too. A dataset
or model is visible beyond its owner where they shared it. Over all of that are the roles of users (an admin may do
everything, a viewer sees everything) and the scopes of tokens, which only take away.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

from horizon_server.errors import NotAllowed, NotFound
from horizon_server.records.account import EVERYONE, Principal

Need = Literal["metrics", "read", "change"]
"""What a call needs of its caller's token: to scrape /metrics, to look, or to change something or use the node."""

_ALLOWED_BY_SCOPE: Mapping[str, frozenset[Need]] = {
    "full": frozenset({"metrics", "read", "change"}),
    "read": frozenset({"metrics", "read"}),
    "metrics": frozenset({"metrics"}),
}


def may_see(principal: Principal, owner: str, *, project: str = "", shared_with: Collection[str] = ()) -> bool:
    """Whether `principal` may know that a resource of `owner` exists.

    Args:
        project: that a job is charged to; its members see it.
        shared_with: projects, or `EVERYONE`, that a dataset or model is shared with.
    """
    if principal.sees_all or principal.name == owner or project in principal.memberships:
        return True
    return EVERYONE in shared_with or any(name in principal.memberships for name in shared_with)


def require_visible(
    principal: Principal, owner: str, what: str, *, project: str = "", shared_with: Collection[str] = ()
) -> None:
    """Allow a look at a resource of `owner`. Raises NotFound when the caller may not see it."""
    # Never NotAllowed: other users must not learn which names exist.
    if not may_see(principal, owner, project=project, shared_with=shared_with):
        raise NotFound(f"{what} does not exist, or is not yours")


def require_change(
    principal: Principal, owner: str, what: str, *, project: str = "", shared_with: Collection[str] = ()
) -> None:
    """Allow a change of a resource of `owner`. Raises NotFound when the caller may not even see it, else NotAllowed."""
    require_visible(principal, owner, what, project=project, shared_with=shared_with)
    require_create(principal)
    if principal.role == "admin" or principal.name == owner:
        return
    if not is_project_admin(principal, project):
        others = f", an admin of project {project}" if project in principal.memberships else ""
        raise NotAllowed(f"{what} belongs to {owner}; only they{others} or an admin may change it")


def require_sample(principal: Principal, owner: str, what: str, *, project: str = "") -> None:
    """Allow having a checkpoint of a job of `owner` answer prompts, or evaluated: who may see it and may use the node.

    Raises NotFound when the caller may not even see the job, NotAllowed for viewers and for tokens that allow no
    changes.
    """
    require_visible(principal, owner, what, project=project)
    # Nothing is changed, but memory and processors of the node are used.
    require_create(principal)


def may_change(principal: Principal) -> bool:
    """Whether a caller may change anything at all."""
    return "change" in _ALLOWED_BY_SCOPE.get(principal.scope, ()) and principal.role != "viewer"


def require_create(principal: Principal) -> None:
    """Allow creating something. Raises NotAllowed for viewers, and for tokens that allow no changes."""
    require_scope(principal, "change")
    if principal.role == "viewer":
        raise NotAllowed(
            f"{principal.name} has the role viewer and may look but not change; ask an admin for the role user"
        )


def require_submit(principal: Principal, project: str) -> None:
    """Allow submitting a job to a project. Raises NotAllowed."""
    require_create(principal)
    require_project(principal, project)


def require_project(principal: Principal, project: str) -> None:
    """Allow naming a project to charge: the caller's own, or one that they are a member or admin of. Raises
    NotAllowed."""
    role = principal.memberships.get(project)
    if role in ("member", "admin") or principal.role == "admin" or (role is None and project == principal.project):
        return
    if role == "viewer":
        raise NotAllowed(
            f"{principal.name} is a viewer of project {project} and may not submit there; ask an admin of the project"
        )
    raise NotAllowed(f"project {project} is not yours; leave project out or set it to {principal.project}")


def require_scope(principal: Principal, need: Need) -> None:
    """The gate of every call: allow what the caller's token is for. Raises NotAllowed."""
    if need in _ALLOWED_BY_SCOPE.get(principal.scope, ()):
        return
    if principal.scope == "metrics":
        raise NotAllowed(
            f"token {principal.token_id} has the scope metrics, which allows only GET /metrics; use a token of another "
            "scope"
        )
    raise NotAllowed(
        f"token {principal.token_id} has the scope {principal.scope}, which allows no changes; use a token of scope "
        "full"
    )


def require_admin(principal: Principal, what: str) -> None:
    """Allow a change of the node. Raises NotAllowed for all but admins, and for tokens that allow no changes."""
    require_scope(principal, "change")
    if principal.role != "admin":
        raise NotAllowed(f"{principal.name} has the role {principal.role}; only an admin may {what}")


def require_members_change(principal: Principal, project: str) -> None:
    """Allow a change of a project's members. Raises NotFound when the caller is not in it, else NotAllowed."""
    if not principal.sees_all and project not in principal.memberships:
        raise NotFound(f"project {project} does not exist, or you are not a member of it")
    require_create(principal)
    if principal.role != "admin" and not is_project_admin(principal, project):
        raise NotAllowed(f"only an admin of project {project}, or of the node, may change its members")


def require_webhook(principal: Principal, project: str) -> None:
    """Allow a webhook for the caller's own jobs or, with a project, of all jobs of that.

    Raises NotFound when the caller is not in the project, NotAllowed when they are not an admin of it.
    """
    if project and not principal.sees_all and project not in principal.memberships:
        raise NotFound(f"project {project} does not exist, or you are not a member of it")
    require_create(principal)
    if not may_listen(principal, project):
        raise NotAllowed(
            f"only an admin of project {project}, or of the node, may create a webhook of all its jobs; without a "
            "project a webhook is notified of your own"
        )


def may_listen(owner: Principal, project: str) -> bool:
    """Whether a webhook of `owner` is notified of jobs: of their own, or of all jobs of a project, as its admin."""
    return not project or owner.role == "admin" or is_project_admin(owner, project)


def has_lost_rights(before: Principal, now: Principal) -> bool:
    """Whether a caller may do less now than when a call of theirs began."""
    lost_role = now.role != before.role and (before.role == "admin" or now.role != "admin")
    return lost_role or not before.memberships.keys() <= now.memberships.keys()


def is_project_admin(principal: Principal, project: str) -> bool:
    """Whether the caller may change the jobs and the members of a project."""
    return principal.memberships.get(project) == "admin"


def may_see_series(
    principal: Principal | None, labels: Mapping[str, str], owners: Mapping[str, tuple[str, str]]
) -> bool:
    """Whether a caller of /metrics, or one without a token (None), may see a series.

    Args:
        labels: of the series. Those without a job, a user or a project are about the node, and everybody sees them.
        owners: owner and project of the jobs that there are series of, by id.
    """
    if not labels.keys() & {"job_id", "user", "project"}:
        return True
    if principal is None:
        return False
    if principal.scope == "metrics" or principal.sees_all:
        return True
    if "job_id" in labels:
        owner, project = owners.get(labels["job_id"], ("", ""))
        return bool(owner) and may_see(principal, owner, project=project)
    if "user" in labels:
        return may_see(principal, labels["user"], project=labels.get("project", ""))
    return labels["project"] == principal.project or labels["project"] in principal.memberships
