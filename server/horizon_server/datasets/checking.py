"""Has a child process check the files of a dataset, so that no file can take the daemon's time, memory or life.

Owns the request to `datasets.check` and its answer. The daemon loads no Arrow and parses no row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from horizon_server.children.child import Limits, run_child
from horizon_server.datasets.data_file import DataFile
from horizon_server.datasets.formats import DatasetFormat
from horizon_server.datasets.validation import DatasetReport
from horizon_server.errors import InvalidData, OutOfMemory, WorkerCrashed
from horizon_server.settings import child_environment

# One thread reads, and an allocator that keeps nothing back leaves the memory limit to the data.
_ENVIRONMENT = {"ARROW_DEFAULT_MEMORY_POOL": "system", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_MEMORY_GIB = 1
"""For the rows. The worst row of 16 MiB takes about half of it, a usual file next to nothing."""
# The libraries take about 100 MiB more. Jobs may have planned all memory but a reserve: if the kernel has to choose, not the worker.
_LIMITS = Limits(memory_bytes=_MEMORY_GIB * 2**30 + 128 * 2**20, file_bytes=2**20, oom_score_adj=1000)


async def check_dataset(
    files: Sequence[DataFile], *, name: str, dataset_format: DatasetFormat, field_map: Mapping[str, str]
) -> DatasetReport:
    """Return what `validation.validate_dataset` returns, from a process of its own; cancelling ends it.

    Raises: as `validate_dataset`; InvalidData where the files crash their reader or take too much memory; WorkerDied where the child
    was killed, which says nothing about the data.
    """
    request = {
        "files": [{"path": str(file.path), "name": file.name} for file in files],
        "name": name,
        "format": dataset_format.value,
        "field_map": dict(field_map),
    }
    try:
        found = await run_child(
            "horizon_server.datasets.check", request, who=f"the check of {name}",
            environment=child_environment() | _ENVIRONMENT, limits=_LIMITS,
        )  # fmt: skip
    except WorkerCrashed as error:
        raise InvalidData(f"{name} crashes its reader; its files are damaged, so write them again") from error
    except OutOfMemory as error:
        raise InvalidData(
            f"{name} holds rows that take more than {_MEMORY_GIB} GiB of memory to read; write smaller ones"
        ) from error
    return DatasetReport(
        format=DatasetFormat(found["format"]), num_rows=found["num_rows"], num_blank_lines=found["num_blank_lines"]
    )
