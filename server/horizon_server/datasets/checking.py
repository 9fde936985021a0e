"""The check of a dataset's files in a child process, so that no file can take the daemon's time, memory or life."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from horizon_formats.checks import DatasetReport, check_files
from horizon_formats.formats import DatasetFormat
from horizon_server.children.child import ChildTask, Limits
from horizon_server.children.entry import EventWriter, serve
from horizon_server.codec import from_plain, to_plain
from horizon_server.datasets.reading import StoredFile, server_errors
from horizon_server.errors import InvalidData, OutOfMemory, Stalled, WorkerCrashed
from horizon_server.settings import child_environment

# One thread reads, and an allocator that keeps nothing back leaves the memory limit to the data.
_ENVIRONMENT = {"ARROW_DEFAULT_MEMORY_POOL": "system", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
# For the rows. The worst row of 16 MiB takes about half of it, a usual file little.
_MEMORY_GIB = 1
# The libraries take about 100 MiB more. Jobs may have planned all memory but a reserve: if the kernel has to choose,
# not the worker. The time is for 64 GiB of rows, the largest that may be pushed, on a slow disk.
_LIMITS = Limits(
    memory_bytes=_MEMORY_GIB * 2**30 + 128 * 2**20, file_bytes=2**20, wall_s=4 * 3600.0, oom_score_adj=1000
)


@dataclass(frozen=True, kw_only=True)
class CheckRequest:
    """One call of the child."""

    files: tuple[StoredFile, ...]
    name: str
    format: DatasetFormat
    field_map: Mapping[str, str]


async def check_dataset(
    files: Sequence[StoredFile], *, name: str, dataset_format: DatasetFormat, field_map: Mapping[str, str]
) -> DatasetReport:
    """Return what `check_files` returns, from a process of its own; cancelling ends it.

    Raises: InvalidData and InvalidSpec for what is wrong with files and map; InvalidData where the files crash their
    reader or take too much memory; WorkerDied where the child was killed, which says nothing about the data.
    """
    task = ChildTask(
        module="horizon_server.datasets.checking",
        who=f"the check of {name}",
        environment=child_environment() | _ENVIRONMENT,
        limits=_LIMITS,
        meanings={
            # Arrow is native code, and the files come from other users: what crashes it ends the child only.
            WorkerCrashed: InvalidData(
                f"{name} could not be read: the reader crashed. The files are probably damaged; create them again"
            ),
            Stalled: Stalled(
                f"checking {name} took longer than {_LIMITS.wall_s:,.0f} s; push it as several smaller datasets, or "
                "ask an admin "
                "whether the node's disk is slow"
            ),
            OutOfMemory: InvalidData(
                f"{name} holds rows that need more than {_MEMORY_GIB} GiB of memory to read; write smaller ones"
            ),
        },
    )
    request = CheckRequest(files=tuple(files), name=name, format=dataset_format, field_map=field_map)
    return from_plain(DatasetReport, await task.run(to_plain(request)))


def work(plain: Any, _: EventWriter) -> Any:
    """Check every row: the child's side."""
    request = from_plain(CheckRequest, plain)
    with server_errors():
        return to_plain(
            check_files(request.files, name=request.name, dataset_format=request.format, field_map=request.field_map)
        )


if __name__ == "__main__":
    sys.exit(serve(work, who="the data check"))
