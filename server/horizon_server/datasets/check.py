"""The child that checks a dataset: its files in, what they hold or what is wrong with them out.

Data files are other people's bytes, and Arrow is native code: what makes it crash or take memory ends this process and no other.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from horizon_server.children.entry import EventWriter, serve
from horizon_server.datasets.data_file import DataFile
from horizon_server.datasets.formats import DatasetFormat
from horizon_server.datasets.validation import validate_dataset


def work(request: Any, _: EventWriter) -> dict[str, Any]:
    """Check every row. Raises: as `validate_dataset`."""
    report = validate_dataset(
        [DataFile.at(Path(file["path"]), name=file["name"]) for file in request["files"]],
        name=request["name"],
        dataset_format=DatasetFormat(request["format"]),
        field_map=request["field_map"],
    )
    return {"format": report.format.value, "num_rows": report.num_rows, "num_blank_lines": report.num_blank_lines}


if __name__ == "__main__":
    sys.exit(serve(work, who="the data check"))
