"""The checking child: the files of one dataset in, one answer out.

`python -m horizon_server.datasets.check` reads a request from stdin and writes the answer to stdout, both JSON, see `datasets.checking`.
Data files are strangers' bytes, and Arrow is native code: what makes it crash or eat memory ends this process and no other.
"""

from __future__ import annotations

import contextlib
import json
import resource
import sys
from pathlib import Path
from typing import Any

from horizon_server.datasets.data_file import DataFile
from horizon_server.datasets.formats import DatasetFormat
from horizon_server.datasets.validation import validate_dataset
from horizon_server.errors import HorizonError, InvalidData

MAX_MEMORY_BYTES = 2**30
"""Beyond what the process has mapped when it begins. The worst row of 16 MiB takes about half of it, a usual file next to nothing."""


def main() -> int:
    """Serve one request; the exit code is 0 where there is an answer, good or bad."""
    request = json.load(sys.stdin)
    files = [DataFile.at(Path(file["path"]), name=file["name"]) for file in request["files"]]
    _limit_memory()
    try:
        answer = _check(files, request)
    except HorizonError as error:
        violations = [[violation.field, violation.description] for violation in error.violations]
        answer = {"reason": error.reason, "message": error.message, "violations": violations}
    json.dump(answer, sys.stdout)
    return 0


def _check(files: list[DataFile], request: dict[str, Any]) -> dict[str, Any]:
    try:
        report = validate_dataset(
            files,
            name=request["name"],
            dataset_format=DatasetFormat(request["format"]),
            field_map=request["field_map"],
        )
    except MemoryError:
        raise InvalidData(
            f"{request['name']} holds rows that take more than {MAX_MEMORY_BYTES // 2**30} GiB of memory to read; write smaller ones"
        ) from None
    return {"format": report.format.value, "num_rows": report.num_rows, "num_blank_lines": report.num_blank_lines}


def _limit_memory() -> None:
    # Arrow maps much when it is loaded, so it is loaded first; the limit then is on what the data asks for.
    import pyarrow.parquet  # noqa: F401

    pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
    limit = pages * resource.getpagesize() + MAX_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Jobs may have planned all memory but a reserve: if the kernel has to choose, it shall not be the worker.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", "ascii")


if __name__ == "__main__":
    sys.exit(main())
