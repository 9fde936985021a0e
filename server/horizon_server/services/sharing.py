"""What callers can ask and set of how the node is shared: usage, quotas, the node's condition, and when a job would
run."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from horizon_server.db.accounts import AccountStore
from horizon_server.db.sharing import SharingStore
from horizon_server.errors import InvalidSpec
from horizon_server.jobs.scheduler import Scheduler
from horizon_server.records.account import Principal
from horizon_server.records.boxes import Place
from horizon_server.records.plan import Plan
from horizon_server.records.sharing import Allowance, NodeCondition, Outlook, QuotaUse, Usage
from horizon_server.scheduling.quotas import with_defaults
from horizon_server.scheduling.texts import time_text
from horizon_server.services.access import may_see, require_admin
from horizon_server.services.jobs import JobService
from horizon_server.services.quotas import Quotas
from horizon_server.spec import JobSpec

MAX_MESSAGE_LENGTH = 1000


@dataclass(kw_only=True, eq=False)
class SharingService:
    """The use cases around sharing. Thread: belongs to one event loop."""

    store: SharingStore
    accounts: AccountStore
    quotas: Quotas
    jobs: JobService
    scheduler: Scheduler

    async def usage(self, principal: Principal, since_s: float) -> list[Usage]:
        """Return what was used since a time, by project and user: the caller's own; everybody's for admins and viewers.

        The hour that the time is in counts as a whole. What a user stores is in the row of their own project.
        """
        if since_s < 0 or since_s > time.time():
            raise InvalidSpec.of("since_time", f"since_time is {since_s:g}; it must be a time in the past")
        async with self.jobs.turns.of(principal.name):
            rows = {(row.project, row.user): row for row in await self.store.usage(since_s)}
            home = {user.name: user.project for user in await self.accounts.users()}
            stored = await self.quotas.stored_bytes()
        for user, num_bytes in stored.items():
            key = home.get(user, user), user  # of a removed user the project is not known any more
            rows[key] = replace(rows.get(key, Usage(project=key[0], user=user)), stored_bytes=num_bytes)
        return [rows[key] for key in sorted(rows) if may_see(principal, key[1])]

    async def quota(self, principal: Principal) -> list[tuple[Allowance, QuotaUse]]:
        """Return what the caller may take, what their own project and the others that they submit to may, and how much
        of it is used."""
        others = sorted(name for name, role in principal.memberships.items() if role != "viewer")
        projects = list(dict.fromkeys([principal.project, *others]))
        async with self.jobs.turns.of(principal.name):
            allowances = await self.quotas.of(principal.name, *projects)
            used = await self.quotas.used(principal.name, *projects)
        most = self.scheduler.runtime.view.rules.max_resident_jobs
        return list(zip([with_defaults(one, max_resident_jobs=most) for one in allowances], used, strict=True))

    async def condition(self) -> NodeCondition:
        """Return what an admin has set the node to."""
        return await self.store.condition()

    async def set_node(self, principal: Principal, condition: NodeCondition) -> NodeCondition:
        """Open, cordon or drain the node, set its maintenance window, or withdraw devices; it replaces what was set
        before, and devices that the daemon has found to fail are tried again. Return it.

        Raises:
            NotAllowed: when the caller is not an admin, or their token allows no changes.
            InvalidSpec: when the message is too long or not printable, the window has no length, only one end, or has
                passed already, or the node has no device of a name that is withdrawn.
        """
        require_admin(principal, "cordon or drain the node")
        if len(condition.message) > MAX_MESSAGE_LENGTH:
            number = len(condition.message)
            raise InvalidSpec.of("message", f"message has {number} letters; it must have at most {MAX_MESSAGE_LENGTH}")
        if not condition.message.isprintable():
            raise InvalidSpec.of(
                "message",
                f"message is {condition.message!r:.80}; it is shown on all terminals, so it must be one line of "
                "printable letters",
            )
        start_s, end_s = condition.window_start_s, condition.window_end_s
        if (start_s is None) != (end_s is None):
            absent = "window_start_time" if start_s is None else "window_end_time"
            raise InvalidSpec.of(absent, f"{absent} is missing; a maintenance window needs its start and its end")
        if start_s is not None and end_s is not None and not start_s < end_s:
            raise InvalidSpec.of("window_end_time", "window_end_time must be after window_start_time")
        now_s = time.time()
        if end_s is not None and end_s <= now_s:
            raise InvalidSpec.of(
                "window_end_time",
                f"the window has ended already (window_end_time is {time_text(end_s, now_s)}); give one that ends in "
                "the future",
            )
        if unknown := [name for name in condition.withdrawn if name not in self.scheduler.turns]:
            known = ", ".join(self.scheduler.turns)
            raise InvalidSpec.of(
                "withdrawn", f"withdrawn has {unknown[0]!r:.80}; the devices of this node are: {known}"
            )
        await self.store.set_condition(condition)
        self.scheduler.runtime.view.health.forget()
        self.scheduler.wake()
        return condition

    async def simulate(self, principal: Principal, spec: JobSpec) -> tuple[Outlook, Plan, tuple[Place, ...]]:
        """Return when a job would start and end if it were submitted now, its plan, and what it would be on each
        machine of a fleet. Nothing is stored.

        Raises what `JobService.submit` does, but also answers those who may look and not submit.
        """
        self.jobs.require_open()
        async with self.jobs.proposals.of(principal, spec) as proposal:
            proposal.require_fit()
            await self.quotas.require_room(principal.name, proposal.job.project)
        placed = proposal.placed
        outlook = placed.outlook or await self.scheduler.simulate(proposal.job)
        return self.jobs.as_read(principal, outlook, is_owner=True), placed.plan, placed.places
