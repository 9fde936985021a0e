"""Has a child process check the files of a dataset, so that no file can take the daemon's time, memory or life.

Owns the request and the answer that cross to `datasets.check` and back. The daemon loads no Arrow and parses no row.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import Mapping, Sequence

from horizon_server.datasets.data_file import DataFile
from horizon_server.datasets.formats import DatasetFormat
from horizon_server.datasets.validation import DatasetReport
from horizon_server.errors import FieldViolation, InvalidData, InvalidSpec, WorkerFailed
from horizon_server.settings import child_environment

# One thread reads, and an allocator that keeps nothing back leaves the memory limit to the data.
_ENVIRONMENT = {"ARROW_DEFAULT_MEMORY_POOL": "system", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
_ERRORS = {kind.reason: kind for kind in (InvalidData, InvalidSpec)}


async def check_dataset(
    files: Sequence[DataFile], *, name: str, dataset_format: DatasetFormat, field_map: Mapping[str, str]
) -> DatasetReport:
    """Return what `validation.validate_dataset` returns, from a process of its own; cancelling ends it.

    Raises: as `validate_dataset`; InvalidData where the files crash their reader, WorkerFailed where the child was killed.
    """
    request = {
        "files": [{"path": str(file.path), "name": file.name} for file in files],
        "name": name,
        "format": dataset_format.value,
        "field_map": dict(field_map),
    }
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "horizon_server.datasets.check",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env=child_environment() | _ENVIRONMENT, start_new_session=True,
    )  # fmt: skip
    try:
        answer, complaint = await child.communicate(json.dumps(request).encode())
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()
    if child.returncode == 0:
        return _report(answer)
    if -(child.returncode or 0) in _CRASHES:
        raise InvalidData(f"{name} crashes its reader; its files are damaged, so write them again")
    last_words = complaint.decode("utf-8", "replace").strip().splitlines()[-1:]
    raise WorkerFailed(
        f"the check of {name} ended with code {child.returncode}: {''.join(last_words) or 'it was killed'}"
    )


def _report(answer: bytes) -> DatasetReport:
    told = json.loads(answer)
    if "reason" in told:
        violations = [FieldViolation(field=field, description=sentence) for field, sentence in told["violations"]]
        raise _ERRORS[told["reason"]](told["message"], violations=violations)
    return DatasetReport(
        format=DatasetFormat(told["format"]), num_rows=told["num_rows"], num_blank_lines=told["num_blank_lines"]
    )
