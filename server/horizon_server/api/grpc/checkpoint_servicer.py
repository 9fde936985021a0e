"""CheckpointService on the wire: lists what a job has written and reads its files out in pieces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from horizon_proto.v1 import checkpoint_pb2, checkpoint_pb2_grpc
from horizon_server.api.grpc.convert import to_message
from horizon_server.api.grpc.interceptor import caller
from horizon_server.errors import FieldViolation, InvalidSpec, NotFound
from horizon_server.services.jobs import JobService

PIECE_BYTES = 2**20


class CheckpointServicer(checkpoint_pb2_grpc.CheckpointServiceServicer):
    """Lists, reads and deletes checkpoints."""

    def __init__(self, jobs: JobService) -> None:
        self._jobs = jobs

    async def ListCheckpoints(
        self, request: checkpoint_pb2.ListCheckpointsRequest, context: Any
    ) -> checkpoint_pb2.ListCheckpointsResponse:
        checkpoints = await self._jobs.checkpoints(caller(), request.job_id)
        messages = (to_message(one, checkpoint_pb2.Checkpoint) for one in checkpoints)
        return checkpoint_pb2.ListCheckpointsResponse(checkpoints=messages)

    async def ReadCheckpointFile(
        self, request: checkpoint_pb2.ReadCheckpointFileRequest, context: Any
    ) -> AsyncIterator[checkpoint_pb2.ReadCheckpointFileResponse]:
        size = await self._listed_size(request)
        _check_range(request, size)
        path = await self._jobs.checkpoint_file(caller(), request.job_id, request.step, request.path)
        offset = request.offset
        end = min(size, offset + request.length) if request.length else size
        with await asyncio.to_thread(path.open, "rb") as file:
            await asyncio.to_thread(file.seek, offset)
            while offset < end:
                data = await asyncio.to_thread(file.read, min(PIECE_BYTES, end - offset))
                if not data:
                    raise NotFound(
                        f"{request.path} of step {request.step} is shorter than listed; the checkpoint is damaged"
                    )
                yield checkpoint_pb2.ReadCheckpointFileResponse(data=data, offset=offset)
                offset += len(data)

    async def DeleteCheckpoint(
        self, request: checkpoint_pb2.DeleteCheckpointRequest, context: Any
    ) -> checkpoint_pb2.DeleteCheckpointResponse:
        await self._jobs.delete_checkpoint(caller(), request.job_id, request.step)
        return checkpoint_pb2.DeleteCheckpointResponse()

    async def _listed_size(self, request: checkpoint_pb2.ReadCheckpointFileRequest) -> int:
        """Return the size of a file that the checkpoint lists: nothing else can be read, whatever the path says."""
        checkpoints = await self._jobs.checkpoints(caller(), request.job_id)
        chosen = next((one for one in checkpoints if one.step == request.step), None)
        if chosen is None:
            steps = ", ".join(str(one.step) for one in checkpoints) or "none"
            raise NotFound(f"job {request.job_id} has no checkpoint of step {request.step}; it has: {steps}")
        file = next((one for one in chosen.files if one.path == request.path), None)
        if file is None:
            raise NotFound(
                f"the checkpoint of step {request.step} has no file {request.path!r:.200}; list it to see its files"
            )
        return file.size_bytes


def _check_range(request: checkpoint_pb2.ReadCheckpointFileRequest, size: int) -> None:
    problems = []
    if not 0 <= request.offset <= size:
        problems.append(("offset", f"offset is {request.offset}; it must be from 0 to the file's size, {size}"))
    if request.length < 0:
        problems.append(("length", f"length is {request.length}; it must be 0 (all) or more"))
    if problems:
        violations = [FieldViolation(field=field, description=sentence) for field, sentence in problems]
        raise InvalidSpec(problems[0][1], violations=violations)
