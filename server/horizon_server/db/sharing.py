"""How the node is shared, in the database: what was used, by whom, what everyone may take, and the node's condition."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from sqlalchemy import Connection, delete, func, insert, select, union, update
from sqlalchemy.dialects.sqlite import insert as upsert

from horizon_server.db.database import Database
from horizon_server.db.pushed import pushed_bytes
from horizon_server.db.tables import AllowanceRow, JobRow, NodeConditionRow, ShareUseRow, UsageHourRow, UserRow
from horizon_server.records.job import ENDED
from horizon_server.records.sharing import Allowance, NodeCondition, Quota, ShareUse, Usage

_HOUR_S = 3600
_ENDED = [state.value for state in ENDED]
_QUOTA = [field.name for field in dataclasses.fields(Quota)]


_CONDITION = select(*(getattr(NodeConditionRow, field.name) for field in dataclasses.fields(NodeCondition)))


class SharingStore:
    """The tables of shares, usage, allowances and the node's condition. Each call is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def charge(
        self, project: str, user: str, *, device_s: float = 0.0, num_tokens: int = 0, job_id: str, now_s: float
    ) -> None:
        """Add what a job has just used to the present hour of its user and project, and to the job itself."""
        hour = upsert(UsageHourRow).values(
            hour_s=int(now_s) // _HOUR_S * _HOUR_S,
            project=project,
            user=user,
            device_s=device_s,
            num_tokens=num_tokens,
        )
        added = {
            "device_s": UsageHourRow.device_s + hour.excluded.device_s,
            "num_tokens": UsageHourRow.num_tokens + hour.excluded.num_tokens,
        }
        more = {"device_s": JobRow.device_s + device_s, "num_tokens": JobRow.num_tokens + num_tokens}
        async with self._database.session() as session:
            await session.execute(hour.on_conflict_do_update(set_=added))
            await session.execute(update(JobRow).where(JobRow.job_id == job_id).values(**more))

    async def uses(self) -> list[ShareUse]:
        """Return the decayed use of everybody as it was last saved."""
        async with self._database.reading() as session:
            return [
                ShareUse(project=row.project, user=row.user, device_s=row.device_s, as_of_s=row.as_of_s)
                for row in await session.scalars(select(ShareUseRow))
            ]

    async def save_uses(self, uses: Iterable[ShareUse]) -> None:
        """Replace what was saved of everybody's decayed use."""
        rows = [dataclasses.asdict(use) for use in uses]
        async with self._database.session() as session:
            await session.execute(delete(ShareUseRow))
            if rows:
                await session.execute(insert(ShareUseRow), rows)

    async def device_s_since(self, since_s: float) -> dict[tuple[str, str], float]:
        """Return the device seconds of each project and user since a time, with the whole of the hour that it is in."""
        return {key: device_s for key, (device_s, _) in (await self._used_since(since_s)).items()}

    async def usage(self, since_s: float) -> list[Usage]:
        """Return what each user has used in each project since a time, by project and user, without `stored_bytes`.

        The hour that the time is in counts as a whole. Jobs are those that ended since then.
        """
        used = await self._used_since(since_s)
        jobs: defaultdict[tuple[str, str], dict[str, int]] = defaultdict(dict)
        who = (JobRow.project, JobRow.owner, JobRow.job_state)
        query = select(*who, func.count()).where(JobRow.ended_s >= since_s, JobRow.job_state.in_(_ENDED)).group_by(*who)
        async with self._database.reading() as session:
            for project, user, job_state, number in await session.execute(query):
                jobs[project, user][job_state] = number
        nothing = (0.0, 0)
        return [
            Usage(project=project, user=user, device_s=device_s, num_tokens=num_tokens, jobs=jobs.get(key, {}))
            for key in sorted(used.keys() | jobs.keys())
            for (project, user), (device_s, num_tokens) in ((key, used.get(key, nothing)),)
        ]

    async def allowances(self) -> list[Allowance]:
        """Return every weight and quota that an admin has set, by holder and name."""
        query = select(AllowanceRow).order_by(AllowanceRow.holder, AllowanceRow.name)
        async with self._database.reading() as session:
            return [_allowance(row) for row in await session.scalars(query)]

    async def set_allowance(self, allowance: Allowance) -> None:
        """Set the weight and the whole quota of a user or project."""
        quota = dataclasses.asdict(allowance.quota)
        async with self._database.session() as session:
            await session.merge(
                AllowanceRow(holder=allowance.holder, name=allowance.name, weight=allowance.weight, **quota)
            )

    async def projects(self) -> dict[str, list[str]]:
        """Return the users of each project that a user, a job or an allowance names."""
        charged = select(JobRow.project).distinct()
        allowed = select(AllowanceRow.name).where(AllowanceRow.holder == "project")
        async with self._database.reading() as session:
            members: dict[str, list[str]] = {name: [] for name in await session.scalars(union(charged, allowed))}
            for user in await session.scalars(select(UserRow).order_by(UserRow.name)):
                members.setdefault(user.project, []).append(user.name)
        return dict(sorted(members.items()))

    async def pushed_bytes(self) -> dict[str, int]:
        """Return the bytes of the datasets and models, READY or announced, of each owner."""
        async with self._database.reading() as session:
            return await pushed_bytes(session)

    async def condition(self) -> NodeCondition:
        """Return what an admin has set the node to."""

        def read(connection: Connection) -> NodeCondition:
            row = connection.execute(_CONDITION).mappings().first()
            return NodeCondition(**{**row, "withdrawn": tuple(row["withdrawn"])}) if row else NodeCondition()

        return await self._database.look_up("condition", read)

    async def set_condition(self, condition: NodeCondition) -> None:
        """Set the node's condition; it holds until it is set again, also after a restart."""
        async with self._database.session() as session:
            values = {**dataclasses.asdict(condition), "withdrawn": list(condition.withdrawn)}
            await session.merge(NodeConditionRow(row_id=1, **values))

    async def _used_since(self, since_s: float) -> dict[tuple[str, str], tuple[float, int]]:
        who = (UsageHourRow.project, UsageHourRow.user)
        sums = (func.sum(UsageHourRow.device_s), func.sum(UsageHourRow.num_tokens))
        query = select(*who, *sums).where(UsageHourRow.hour_s > since_s - _HOUR_S).group_by(*who)
        async with self._database.reading() as session:
            rows = await session.execute(query)
            return {(project, user): (device_s, num_tokens) for project, user, device_s, num_tokens in rows}


def _allowance(row: AllowanceRow) -> Allowance:
    limits: dict[str, Any] = {name: getattr(row, name) for name in _QUOTA}
    holder: Any = row.holder
    return Allowance(holder=holder, name=row.name, weight=row.weight, quota=Quota(**limits))
