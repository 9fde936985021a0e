"""What this daemon does for the one that sends it jobs: it says what it has, takes models, data and jobs, and tells
what becomes of them."""

from __future__ import annotations

import asyncio
import socket
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from horizon_server.errors import InvalidSpec
from horizon_server.events import encode
from horizon_server.records.account import Principal
from horizon_server.records.blob import BlobRef, BlobStatus
from horizon_server.records.boxes import Box, JobUpdate, SentEvent
from horizon_server.records.job import JobRecord
from horizon_server.records.sharing import Outlook
from horizon_server.services.fleet.records import Announced, Asked, BoxReport, Needed, SentJob
from horizon_server.services.jobs import JobService
from horizon_server.services.node import NodeFacts, NodeStatus
from horizon_server.services.pushed import DatasetService, ModelService
from horizon_server.services.uploads import Uploads
from horizon_server.store.model_files import CONFIG_FILE

# Of one job, in one answer.
MAX_EVENTS = 500


@dataclass(kw_only=True, eq=False)
class Guest:
    """The use cases of another daemon. Thread: belongs to one event loop."""

    name: str
    jobs: JobService
    node: NodeFacts
    datasets: DatasetService
    models: ModelService
    uploads: Uploads

    async def report(self, principal: Principal) -> BoxReport:
        """Return what this machine has, and how busy it is."""
        status = await self.node.describe(principal)
        facts = await asyncio.to_thread(lambda: self.jobs.planner.facts)
        idle = self.jobs.scheduler.free_devices
        resident = await self.jobs.queue(principal)
        ends = [job.outlook.estimated_end_s for job in resident if job.outlook and job.outlook.share]
        is_open = status.mode == "open" and not status.draining
        return BoxReport(
            box=Box(
                name=self.name,
                address="",
                state="open" if is_open else "closed",
                hostname=socket.gethostname(),
                gpus=tuple(gpu.name for gpu in status.accelerators),
                num_idle=len(idle),
                host_memory_limit_bytes=status.host_memory_limit_bytes,
                host_memory_available_bytes=status.host_memory_available_bytes,
                num_jobs=len(resident),
                next_free_s=0.0 if idle else min((end for end in ends if end), default=0.0),
                message="" if is_open else _why_closed(status),
            ),
            planner=facts,
        )

    async def simulate(self, principal: Principal, job: JobRecord, coming: Sequence[JobRecord]) -> Outlook:
        """Return when a job would start and end here, after those that are on their way. Raises InvalidSpec where its
        model is a folder that this node does not have."""
        await self._check_folder(principal, job.spec.model)
        here = [one for one in coming if await self.jobs.journal.store.get(one.job_id) is None]
        return await self.jobs.scheduler.simulate(job, coming=here)

    async def missing(self, principal: Principal, refs: Sequence[BlobRef]) -> list[BlobStatus]:
        """Return how far each content is that has to be sent."""
        return await self.uploads.missing(principal.name, refs)

    async def write(self, principal: Principal, ref: BlobRef, offset: int, data: AsyncIterator[bytes]) -> BlobStatus:
        """Take a content from `offset` on. Raises as `Uploads.write` does."""
        return await self.uploads.write(principal.name, ref, offset, data)

    async def announce(self, principal: Principal, needed: Needed) -> Announced:
        """Take the announcement of a copy. Raises as `DatasetService.create` and `ModelService.create` do."""
        # Not the request that made it: what has been deleted here since then is to be made again.
        request_id, files = str(uuid.uuid4()), needed.files
        record = (
            await self.models.create(principal, request_id=request_id, name=needed.name_there, files=files)
            if needed.kind == "model"
            else await self.datasets.create(
                principal,
                request_id=request_id,
                name=needed.name_there,
                format=needed.format,
                field_map=needed.field_map,
                files=files,
            )
        )
        return Announced(id=record.id, ready=record.ready)

    async def finalize(self, principal: Principal, kind: str, resource_id: str) -> None:
        """Check a copy whose files have all arrived. Raises as `PushedService.finalize` does."""
        service = self.models if kind == "model" else self.datasets
        await service.finalize(principal, resource_id)

    async def submit(self, principal: Principal, sent: SentJob) -> JobRecord:
        """Queue a job that was sent here, or return it where it was before. Raises as `JobService.submit` does."""
        return await self.jobs.take(principal, sent)

    async def updates(self, principal: Principal, asked: Asked) -> list[JobUpdate]:
        """Return what has become of jobs that were sent here."""
        self.jobs.scheduler.runtime.view.shares.raise_to(asked.uses)
        return [await self._update(job_id, after) for job_id, after in asked.after.items()]

    async def _update(self, job_id: str, after: int) -> JobUpdate:
        store = self.jobs.journal.store
        # Before its events: what is known of the job is never behind them by more than those that come meanwhile.
        events = await store.events_after(job_id, after, MAX_EVENTS)
        job = await store.get(job_id)
        return JobUpdate(
            job=job,
            outlook=None if job is None else self.jobs.scheduler.outlook(job_id),
            events=tuple(
                SentEvent(sequence=one.sequence, time_s=one.time_s, body=encode(one.payload)) for one in events
            ),
        )

    async def _check_folder(self, principal: Principal, model: str) -> None:
        if model.startswith("/") and not await asyncio.to_thread((Path(model) / CONFIG_FILE).is_file):
            raise InvalidSpec.of("model", f"model: {self.name} has no folder {model}")
        if model.startswith("/"):
            await self.jobs.resources.model(principal, model)


def _why_closed(status: NodeStatus) -> str:
    if status.draining:
        return "the daemon is shutting down"
    message = status.condition.message
    return f"{status.mode} ({message})" if message else status.mode
