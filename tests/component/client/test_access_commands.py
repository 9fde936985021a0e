"""`horizon whoami`, `token`, `project`, and `share` and `unshare`, against a small daemon."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from click.testing import Result

from horizon_client import Client, NotAllowed, NotFound

if TYPE_CHECKING:
    from tests.component.client.conftest import Daemon

Run = Callable[..., Result]


@pytest.fixture
def bobs_token(daemon: Daemon) -> str:
    """A token of another user."""

    async def make() -> str:
        await daemon.served.parts.user("bob")
        return await daemon.served.parts.token("bob")

    return daemon.served.call(make())


def test_whoami_shows_the_user_and_what_the_token_allows(run: Run) -> None:
    shown = json.loads(run("whoami", "-o", "json").stdout)
    assert (shown["name"], shown["role"], shown["project"], shown["scope"]) == ("ada", "user", "ada", "full")
    assert shown["memberships"] == {"ada": "admin"}
    assert shown["token_id"] in run("whoami").stdout
    assert "ada (admin)" in run("whoami").stdout


def test_a_token_of_ones_own_from_making_to_revoking(daemon: Daemon, run: Run) -> None:
    made = run("token", "create", "--label", "dashboard", "--scope", "read", "--expires", "30d")
    secret = made.stdout.strip()
    assert secret.startswith("hzn_")
    assert "scope read" in made.stderr and secret not in made.stderr
    with Client(daemon.address, token=secret) as client:
        assert client.account.whoami().scope == "read"
        with pytest.raises(NotAllowed, match="scope read, which allows no changes"):
            client.account.create_token()
        with pytest.raises(NotAllowed, match="scope read"):
            client.jobs.submit({"name": "first", "model": "tiny-base", "dataset": "gsm8k"})
    newest = json.loads(run("token", "list", "-o", "json").stdout)[0]
    assert (newest["label"], newest["scope"], newest["user"], newest["created_by"]) == (
        "dashboard",
        "read",
        "ada",
        "ada",
    )
    assert newest["last_use_time"] and newest["expire_time"] and newest["revoke_time"] is None
    gone = run("token", "revoke", newest["token_id"])
    assert gone.stdout == f"token {newest['token_id']} is revoked\n"
    assert json.loads(run("token", "list", "-o", "json").stdout)[0]["revoke_time"]


def test_what_a_token_may_be_is_said(run: Run) -> None:
    too_long = run("token", "create", "--expires", "500d")
    assert too_long.exit_code == 2
    assert "lifetime is 500 days; it must be above 0 and at most 365 days" in too_long.stderr
    assert "at most 63 printable letters" in run("token", "create", "--label", "x" * 64).stderr
    of_all = run("token", "create", "--scope", "metrics")
    assert (of_all.exit_code, "only an admin or a viewer" in of_all.stderr) == (3, True)
    of_others = run("token", "list", "--user", "bob")
    assert (of_others.exit_code, "only an admin may list" in of_others.stderr) == (3, True)
    assert run("token", "revoke", "tok_0000000000").exit_code == 4


def test_a_member_sees_the_jobs_of_the_project_and_leaves(daemon: Daemon, run: Run, bobs_token: str) -> None:
    job = daemon.add_job("first")
    with Client(daemon.address, token=bobs_token) as bob:
        with pytest.raises(NotFound):
            bob.jobs.get(job.job_id)
        added = run("project", "add", "ada", "bob", "--role", "viewer")
        assert added.stdout == "user bob is viewer of project ada\n"
        assert bob.jobs.get(job.job_id).owner == "ada"
        with pytest.raises(NotAllowed):
            bob.jobs.cancel(job.job_id)
        run("project", "add", "ada", "bob", "--role", "admin")
        assert bob.jobs.cancel(job.job_id).state == "CANCELLED"
        listed = run("project", "list").stdout
        assert "ada (admin), bob (admin)" in listed
        assert run("project", "members", "ada", "-o", "name").stdout == "ada\nbob\n"
        bob.account.remove_member("ada", "bob")
        with pytest.raises(NotFound):
            bob.jobs.get(job.job_id)
    unknown = run("project", "members", "lab")
    assert (unknown.exit_code, "you are not a member of it" in unknown.stderr) == (4, True)
    assert run("project", "add", "ada", "nobody").exit_code == 4
    assert run("project", "remove", "ada", "bob").exit_code == 4


def test_a_dataset_is_shared_and_not_shared_any_more(daemon: Daemon, run: Run, bobs_token: str) -> None:
    with Client(daemon.address, token=bobs_token) as bob:
        assert bob.datasets.list() == []
        assert run("dataset", "share", "gsm8k", "--everyone").stdout == "dataset gsm8k is shared with everyone\n"
        assert run("dataset", "share", "gsm8k", "--project", "ada").stdout.endswith("with everyone, project ada\n")
        (seen,) = bob.datasets.list()
        assert (seen.name, seen.owner, seen.shared_with) == ("gsm8k", "ada", ("*",))
        with pytest.raises(NotAllowed, match="belongs to ada"):
            bob.datasets.delete("gsm8k")
        with pytest.raises(NotAllowed):
            bob.account.share("dataset", "gsm8k", "bob")
        assert "everyone, ada" in run("dataset", "get", "gsm8k").stdout
        assert run("dataset", "unshare", "gsm8k", "--everyone").stdout == "dataset gsm8k is shared with project ada\n"
        with pytest.raises(NotFound):
            bob.datasets.get("gsm8k")
    assert run("dataset", "unshare", "gsm8k", "--project", "ada").stdout == "dataset gsm8k is not shared\n"
    neither = run("model", "share", "tiny-base")
    assert (neither.exit_code, "give either --project PROJECT or --everyone" in neither.stderr) == (2, True)
    not_mine = run("model", "share", "tiny-base", "--project", "bob")
    assert (not_mine.exit_code, "you are not a member of it" in not_mine.stderr) == (4, True)
