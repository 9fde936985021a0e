"""`client.checkpoints`: list, pull and delete the checkpoints of jobs."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from horizon_client.connection import Connection
from horizon_client.conversion import from_message
from horizon_client.errors import NotFound
from horizon_client.resources import Checkpoint, CheckpointPull
from horizon_client.transfer.download import TRAINER_PREFIX, CheckpointDownload
from horizon_client.transfer.reporter import SILENT, Reporter
from horizon_proto.v1 import checkpoint_pb2


class AsyncCheckpoints:
    """`client.checkpoints`: the checkpoints of the caller's jobs."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def list(self, job: str) -> list[Checkpoint]:
        """Return the complete checkpoints of a job, oldest first."""
        request = checkpoint_pb2.ListCheckpointsRequest(job_id=job)
        answer = await self._connection.unary(self._connection.calls.checkpoints.ListCheckpoints, request)
        return [from_message(Checkpoint, item) for item in answer.checkpoints]

    async def pull(
        self,
        job: str,
        to: str | os.PathLike[str],
        *,
        at: int | str = "last",
        with_trainer: bool = False,
        force: bool = False,
        reporter: Reporter = SILENT,
    ) -> CheckpointPull:
        """Download a checkpoint (a step, `last` or `best`) into the folder `to`, which becomes a Hugging Face model folder.

        A pull that was interrupted continues. `with_trainer` downloads the trainer state as well.

        Raises:
            NotFound: when the job has no such checkpoint.
            FileConflict: when different files are in the way and `force` is not given.
            CorruptDownload: when a file does not have the listed sha256.
        """
        checkpoint = _chosen(await self.list(job), job, at)
        files = [f for f in checkpoint.files if with_trainer or not f.path.startswith(TRAINER_PREFIX)]
        folder = _folder(to)

        async def read_file(path: str, offset: int) -> AsyncIterator[tuple[int, bytes]]:
            request = checkpoint_pb2.ReadCheckpointFileRequest(
                job_id=checkpoint.job_id, step=checkpoint.step, path=path, offset=offset
            )
            async for piece in self._connection.stream(self._connection.calls.checkpoints.ReadCheckpointFile, request):
                yield piece.offset, piece.data

        download = CheckpointDownload(read_file, folder, retry=self._connection.stream_retry, reporter=reporter)
        received_bytes = await download.fetch(files, force=force)
        return CheckpointPull(
            checkpoint=checkpoint, folder=str(folder), files=tuple(f.path for f in files), received_bytes=received_bytes
        )

    async def delete(self, job: str, step: int) -> None:
        """Delete one checkpoint."""
        request = checkpoint_pb2.DeleteCheckpointRequest(job_id=job, step=step)
        await self._connection.unary(self._connection.calls.checkpoints.DeleteCheckpoint, request, idempotent=False)


def _folder(to: str | os.PathLike[str]) -> Path:
    return Path(to).expanduser()


def _chosen(checkpoints: Sequence[Checkpoint], job: str, at: int | str) -> Checkpoint:
    if not checkpoints:
        raise NotFound(f"job {job} has no checkpoint yet")
    if at == "last":
        return next((c for c in checkpoints if c.last), checkpoints[-1])
    steps = ", ".join(str(c.step) for c in checkpoints)
    if at == "best":
        found = next((c for c in checkpoints if c.best and c.eval_loss is not None), None)
        missing = "no evaluated checkpoint, so none is the best; evaluate with eval_every_steps, or pull @last"
    else:
        found = next((c for c in checkpoints if str(c.step) == str(at)), None)
        missing = f"no checkpoint at step {at}; it has checkpoints at steps {steps}"
    if found is None:
        raise NotFound(f"job {job} has {missing}")
    return found
