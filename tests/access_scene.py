"""A daemon with one caller of each kind, and what the owner among them has: for the tests of who may do what."""

from __future__ import annotations

import dataclasses
import itertools
import uuid
from typing import Any

from horizon_proto.v1 import job_pb2
from horizon_server.api.grpc.convert import to_message
from horizon_server.api.limits import CallLimits
from horizon_server.api.logins import Logins
from horizon_server.records.account import EVERYONE
from horizon_server.records.job import JobRecord, JobState

REFUSED = ("none", "bad", "revoked", "expired", "disabled")
"""Callers whose token is absent, or not accepted."""
ACCEPTED = ("read", "other", "watcher", "member", "manager", "granted", "viewer", "admin", "owner", "admin_read")
"""`read` is the owner with a token of scope read, and `admin_read` an admin with one; watcher, member and manager have
the three roles in the owner's project; what the owner has shared is for the project of `granted`; viewer and admin are
roles on the node."""
CALLERS = (*REFUSED, "metrics", *ACCEPTED)


class Scene:
    """A daemon with ann's job, dataset and model, and one caller of each kind."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.daemon = world.daemon
        # Every call presents its token: the limits on wrong ones would answer otherwise after a few.
        self.services = dataclasses.replace(
            world.services,
            logins=Logins(
                world.services.accounts,
                world.services.audit,
                CallLimits(calls_per_s=1e6),
                clock=itertools.count(0.0, 1000.0).__next__,
            ),
        )
        self.tokens: dict[str, str] = {"none": "", "bad": "hzn_" + "x" * 43}
        self.job: JobRecord

    async def prepare(self) -> None:
        accounts, daemon = self.services.accounts, self.daemon
        self.tokens |= {
            name: self.world.tokens[user]
            for name, user in (("owner", "ann"), ("other", "bob"), ("admin", "root"), ("viewer", "eve"))
        }
        for name in ("watcher", "member", "manager", "granted", "disabled", "extra"):
            await daemon.user(name)
            self.tokens[name] = await daemon.token(name)
        for name, role in (("watcher", "viewer"), ("member", "member"), ("manager", "admin")):
            await accounts.add_member("ann", name, role)
        for name, options in (
            ("read", {"scope": "read"}),
            ("metrics", {"scope": "metrics"}),
            ("expired", {"lifetime_s": -1.0}),
            ("revoked", {}),
        ):
            token, self.tokens[name] = await accounts.create_token("ann", **{"lifetime_s": None, **options})
            if name == "revoked":
                await accounts.revoke_token(token.token_id)
        _, self.tokens["admin_read"] = await accounts.create_token("root", lifetime_s=None, scope="read")
        await accounts.disable("disabled", is_disabled=True)
        ann = self.world.principal("ann")
        await daemon.dataset(ann, "chats")
        await daemon.dataset(ann, "public")
        await daemon.model(ann, "tiny")
        await self.grant("dataset", "chats")
        await self.grant("model", "tiny")
        await self.services.datasets.share(ann, "public", EVERYONE)
        self.job = await self.new_job(JobState.SUCCEEDED)
        daemon.write_log(self.job, b"a line\n")
        daemon.write_checkpoint(self.job, 3, {"model/config.json": b"{}"})

    async def new_job(self, state: JobState = JobState.QUEUED) -> JobRecord:
        made: JobRecord = await self.daemon.job_in(
            state, self.world.principal("ann"), name=f"job-{uuid.uuid4().hex[:8]}"
        )
        return made

    async def grant(self, kind: str, name: str) -> None:
        pushed = self.services.datasets if kind == "dataset" else self.services.models
        await pushed.share(self.world.principal("ann"), name, "granted")

    async def token_id(self) -> str:
        token, _ = await self.services.accounts.create_token("ann", lifetime_s=60.0)
        return str(token.token_id)

    def spec(self) -> job_pb2.JobSpec:
        """A job in ann's project, of data that everybody may use."""
        return to_message(self.daemon.spec("theirs", dataset="public", project="ann"), job_pb2.JobSpec)
