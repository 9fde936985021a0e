"""The check of a dataset's files in a child process, so that no file can take the daemon's time, memory or life.

`check_dataset` is the daemon's side: it loads no Arrow and parses no row. The child, `python -m horizon_server.datasets.checking`, reads a
request from stdin and writes the answer to stdout, both JSON. Data files come from other users, and Arrow is native code: what makes it
crash or use too much memory ends the child only.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from horizon_formats.file_check import DatasetReport, check_files
from horizon_formats.formats import DatasetFormat
from horizon_formats.problems import FieldViolation
from horizon_server.datasets.reading import StoredFile, server_errors
from horizon_server.errors import HorizonError, InvalidData, InvalidSpec, WorkerFailed
from horizon_server.settings import child_environment

MAX_MEMORY_BYTES = 2**30
"""What the child may use beyond what is mapped when it begins. The worst row of 16 MiB takes about half of it, a usual file little."""

# One thread reads, and an allocator that keeps nothing back leaves the memory limit to the data.
_ENVIRONMENT = {"ARROW_DEFAULT_MEMORY_POOL": "system", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
_ERRORS = {kind.reason: kind for kind in (InvalidData, InvalidSpec)}


async def check_dataset(
    files: Sequence[StoredFile], *, name: str, dataset_format: DatasetFormat, field_map: Mapping[str, str]
) -> DatasetReport:
    """Return what `check_files` returns, from a process of its own; cancelling ends it.

    Raises: InvalidData and InvalidSpec for what is wrong with files and map; InvalidData where the files crash their reader, WorkerFailed
    where the child was killed.
    """
    request = {
        "files": [{"path": str(file.path), "name": file.name} for file in files],
        "name": name,
        "format": dataset_format.value,
        "field_map": dict(field_map),
    }
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "horizon_server.datasets.checking",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env=child_environment() | _ENVIRONMENT, start_new_session=True,
    )  # fmt: skip
    try:
        output, complaint = await child.communicate(json.dumps(request).encode())
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()
    if -(child.returncode or 0) in _CRASHES:
        raise InvalidData(f"{name} crashes its reader; its files are damaged, so write them again")
    if child.returncode != 0:
        last_words = complaint.decode("utf-8", "replace").strip().splitlines()[-1:]
        raise WorkerFailed(
            f"the check of {name} ended with code {child.returncode}: {''.join(last_words) or 'it was killed'}"
        )
    answer = json.loads(output)
    if "reason" in answer:
        violations = [FieldViolation(field=field, description=text) for field, text in answer["violations"]]
        raise _ERRORS[answer["reason"]](answer["message"], violations=violations)
    return DatasetReport(
        format=DatasetFormat(answer["format"]), num_rows=answer["num_rows"], num_blank_lines=answer["num_blank_lines"]
    )


def main() -> int:
    """Serve one request in the child; the exit code is 0 where there is an answer, good or bad."""
    request = json.load(sys.stdin)
    _limit_memory()
    try:
        answer = _answer(request)
    except HorizonError as error:
        violations = [[violation.field, violation.description] for violation in error.violations]
        answer = {"reason": error.reason, "message": error.message, "violations": violations}
    json.dump(answer, sys.stdout)
    return 0


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    files = [StoredFile.at(Path(file["path"]), name=file["name"]) for file in request["files"]]
    try:
        with server_errors():
            report = check_files(
                files,
                name=request["name"],
                dataset_format=DatasetFormat(request["format"]),
                field_map=request["field_map"],
            )
    except MemoryError:
        raise InvalidData(
            f"{request['name']} holds rows that need more than {MAX_MEMORY_BYTES // 2**30} GiB of memory to read; write smaller ones"
        ) from None
    return {"format": report.format.value, "num_rows": report.num_rows, "num_blank_lines": report.num_blank_lines}


def _limit_memory() -> None:
    # Arrow maps much when it is loaded, so it is loaded first; the limit then is on what the data asks for.
    import pyarrow.parquet  # noqa: F401

    pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
    limit = pages * resource.getpagesize() + MAX_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Jobs may have planned all memory but a reserve: if the kernel has to choose, it should not be the worker.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", "ascii")


if __name__ == "__main__":
    sys.exit(main())
