"""What each kind of caller finds in lists and in /metrics, and what a token that a caller makes may be."""

from __future__ import annotations

import time

import httpx
from tests.access_scene import ACCEPTED, Scene

from horizon_server.api.http.server import make_app
from horizon_server.errors import HorizonError
from horizon_server.records.job import JobState
from horizon_server.services.identity import DAY_S


async def test_lists_show_what_the_caller_may_see(scene: Scene) -> None:
    jobs = {caller: set[str]() for caller in ACCEPTED}
    datasets, models = {caller: set[str]() for caller in ACCEPTED}, {caller: set[str]() for caller in ACCEPTED}
    for caller in ACCEPTED:
        principal = await scene.services.accounts.authenticate(scene.tokens[caller])
        jobs[caller] = {job.job_id for job in (await scene.services.jobs.list(principal))[0]}
        datasets[caller] = {record.name for record in (await scene.services.datasets.list(principal))[0]}
        models[caller] = {record.name for record in (await scene.services.models.list(principal))[0]}
    all_of = {"read", "viewer", "admin", "owner", "admin_read"}
    assert {caller for caller, ids in jobs.items() if ids} == all_of | {"watcher", "member", "manager"}
    assert {caller for caller, names in datasets.items() if "chats" in names} == all_of | {"granted"}
    assert {caller for caller, names in datasets.items() if "public" in names} == set(ACCEPTED)
    assert {caller for caller, names in models.items() if "tiny" in names} == all_of | {"granted"}


async def test_the_metrics_of_a_job_are_for_those_who_may_see_it(scene: Scene) -> None:
    job = await scene.new_job(JobState.RUNNING)
    scene.world.metrics.on_device_use("host", project="ann", user="ann", device_s=1.0)
    app = make_app(scene.services, scene.world.metrics, metrics_open=True, ready=lambda: None)
    shown: dict[str, set[str]] = {"job": set(), "user": set(), "node": set()}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://node") as client:
        for caller in ("none", "metrics", *ACCEPTED):
            token = scene.tokens[caller]
            text = (await client.get("/metrics", headers={"Authorization": f"Bearer {token}"} if token else {})).text
            for what, mark in (
                ("job", job.job_id),
                ("user", 'user="ann"'),
                ("node", 'horizon_jobs{state="RUNNING"} 1.0'),
            ):
                if mark in text:
                    shown[what].add(caller)
        for caller in ("bad", "revoked", "expired", "disabled"):
            answer = await client.get("/metrics", headers={"Authorization": f"Bearer {scene.tokens[caller]}"})
            assert answer.status_code == 401, caller
    see_it = {"metrics", "read", "watcher", "member", "manager", "viewer", "admin", "owner", "admin_read"}
    assert shown == {"job": see_it, "user": see_it, "node": {"none", "metrics", *ACCEPTED}}


async def test_a_grantee_is_not_told_of_other_projects_that_share_it(scene: Scene) -> None:
    ann = scene.world.principal("ann")
    await scene.services.datasets.share(ann, "chats", "secret-plan")
    granted = await scene.services.accounts.authenticate(scene.tokens["granted"])
    assert (await scene.services.datasets.get(granted, "chats")).shared_with == ("granted",)
    assert (await scene.services.datasets.get(ann, "chats")).shared_with == ("granted", "secret-plan")


async def test_a_token_that_a_caller_makes_has_no_more_rights_and_no_longer_life_than_allowed(scene: Scene) -> None:
    identity, owner = scene.services.identity, await scene.services.accounts.authenticate(scene.tokens["owner"])
    token, secret = await identity.create_token(owner, label="ci", scope="read", lifetime_s=None)
    assert token.expires_s is not None and token.expires_s - token.created_s == 90 * DAY_S
    assert (token.user, token.created_by, token.label) == ("ann", "ann", "ci")
    assert (await scene.services.accounts.authenticate(secret)).scope == "read"
    for lifetime_s in (366 * DAY_S, 0.0, -1.0):
        try:
            await identity.create_token(owner, label="", scope="full", lifetime_s=lifetime_s)
        except HorizonError as error:
            assert "at most 365 days" in error.message
        else:
            raise AssertionError(lifetime_s)
    (listed,) = [one for one in await identity.tokens(owner) if one.token_id == token.token_id]
    assert listed.last_used_s is not None and abs(listed.last_used_s - time.time()) < 60
