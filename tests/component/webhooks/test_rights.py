"""Who may have a webhook, who sees it, and when it is told nothing any more."""

from __future__ import annotations

import pytest
from tests.component.webhooks.conftest import Post
from tests.daemon_parts import DaemonParts
from tests.support.webhook_receiver import Receiver

from horizon_server.db.webhooks import MAX_WEBHOOKS
from horizon_server.errors import InvalidSpec, NotAllowed, NotFound, QuotaExceeded
from horizon_server.records.account import Principal
from horizon_server.records.job import JobState


async def caller(daemon: DaemonParts, user: str) -> Principal:
    """Who calls with a token of that user, with their memberships."""
    return await daemon.services.accounts.authenticate(await daemon.token(user))


async def test_another_user_sees_nothing_and_is_told_nothing(
    daemon: DaemonParts, post: Post, ada: Principal, inbox: Receiver
) -> None:
    bob = await daemon.user("bob")
    webhook = await post.add(ada, inbox.url())
    await post.add(bob, inbox.url("/bob"))
    await daemon.job_in(JobState.SUCCEEDED, ada)
    await post.send()
    assert [request.path for request in inbox.requests] == ["/hook"]
    assert [one.owner for one in await post.webhooks.list(bob)] == ["bob"]
    for call in (post.webhooks.delete, post.webhooks.test, post.webhooks.list_deliveries):
        with pytest.raises(NotFound):
            await call(bob, webhook.webhook_id)
    await post.webhooks.delete(ada, webhook.webhook_id)
    with pytest.raises(NotFound):
        await post.webhooks.list_deliveries(ada, webhook.webhook_id)


async def test_a_projects_webhook_is_of_its_admins_and_its_address_of_its_owner(
    daemon: DaemonParts, post: Post, ada: Principal, inbox: Receiver
) -> None:
    for name, role in (("bob", "member"), ("cy", "admin")):
        await daemon.user(name)
        await daemon.services.accounts.add_member("ada", name, role)
    bob, cy = await caller(daemon, "bob"), await caller(daemon, "cy")
    with pytest.raises(NotAllowed, match="only an admin of project ada"):
        await post.add(bob, inbox.url(), project="ada")
    with pytest.raises(NotFound, match="project nowhere does not exist"):
        await post.add(cy, inbox.url(), project="nowhere")
    with pytest.raises(InvalidSpec, match="project 'a b' is not allowed: it must be") as malformed:
        await post.add(Principal(name="root", role="admin", project="root"), inbox.url(), project="a b")
    assert [violation.field for violation in malformed.value.violations] == ["project"]
    webhook = await post.add(cy, inbox.url("/T0/secret"), project="ada")
    [seen] = await post.webhooks.list(bob)
    assert seen.url == "http://127.0.0.1/..."
    assert [one.url for one in await post.webhooks.list(cy)] == [webhook.url]
    with pytest.raises(NotAllowed):
        await post.webhooks.delete(bob, webhook.webhook_id)
    await daemon.job_in(JobState.SUCCEEDED, ada)
    await post.send()
    assert [request.json["data"]["owner"] for request in inbox.requests] == ["ada"]
    await post.webhooks.delete(await caller(daemon, "ada"), webhook.webhook_id)


async def test_who_loses_the_role_or_the_account_is_told_nothing_more(
    daemon: DaemonParts, post: Post, ada: Principal, inbox: Receiver
) -> None:
    accounts = daemon.services.accounts
    await daemon.user("cy")
    await accounts.add_member("ada", "cy", "admin")
    of_project = await post.add(await caller(daemon, "cy"), inbox.url("/cy"), project="ada")
    of_ada = await post.add(ada, inbox.url("/ada"))
    await daemon.job_in(JobState.SUCCEEDED, ada)
    await accounts.add_member("ada", "cy", "member")
    await accounts.disable("ada", is_disabled=True)
    await post.send()
    assert inbox.requests == []
    dropped = await post.newest(of_project)
    assert (dropped.outcome, dropped.error) == ("dropped", "cy is no admin of project ada any more")
    assert (await post.webhook(of_project)).disable_reason == dropped.error
    assert (await post.webhook(of_ada)).disable_reason == "the account of ada is disabled"
    tested = await post.webhooks.test(Principal(name="root", role="admin", project="root"), of_project.webhook_id)
    assert (tested.outcome, inbox.requests) == ("dropped", [])
    await accounts.remove_user("cy")
    assert [one.owner for one in await post.webhooks.store.all()] == ["ada"]


async def test_what_else_is_wrong_is_named_and_a_user_has_few(post: Post, ada: Principal, inbox: Receiver) -> None:
    given = {"url": inbox.url(), "project": "", "events": (), "format": "", "secret": ""}
    for field, value in {"events": ("done",), "format": "xml", "secret": "whsec_AAAA"}.items():
        with pytest.raises(InvalidSpec) as refused:
            await post.webhooks.create(ada, **(given | {field: value}))  # type: ignore[arg-type]
        assert refused.value.violations[0].field == field
    made, secret = await post.webhooks.create(ada, **given)  # type: ignore[arg-type]
    assert (made.events, made.format) == (("succeeded", "failed", "cancelled"), "json")
    assert secret.startswith("whsec_") and secret not in repr(made)
    for _ in range(MAX_WEBHOOKS - 1):
        await post.add(ada, inbox.url())
    with pytest.raises(QuotaExceeded, match="the maximum; remove one first"):
        await post.add(ada, inbox.url())
