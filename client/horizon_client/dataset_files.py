"""The fast look through the files of a dataset before a byte is sent.

The server checks every row; this only saves the upload of a file that it would refuse anyway. Knows no template and no tokenizer.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from horizon_client.data_containers import (
    Container,
    container_of,
    open_expanded,
)
from horizon_client.data_fields import AUTO, TEXT, RowFields
from horizon_client.data_rows import check_array, check_lines, check_text
from horizon_client.errors import BadFile
from horizon_client.transfer.files import SourceFile, in_pieces
from horizon_client.transfer.reporter import Progress


async def check_dataset_files(
    files: Sequence[SourceFile],
    on_progress: Callable[[Progress], None],
    *,
    format: str = AUTO,  # noqa: A002 - the name users know from the command and the contract
    field_map: Mapping[str, str] | None = None,
) -> None:
    """Read the files through once, those that only the server can read excepted.

    Raises:
        BadFile: naming the file and its bad rows, the first 100 of them as violations.
    """
    total = sum(file.size_bytes for file in files)
    done = 0
    formats: dict[str, Path] = {}
    for file in files:

        def report(num_bytes: int, name: str = file.path) -> None:
            nonlocal done
            done = min(done + num_bytes, total)
            on_progress(Progress(phase="check", name=name, done_bytes=done, total_bytes=total))

        fields = RowFields(format, field_map or {})
        await in_pieces(_checking(file.source, fields), report)
        if fields.decided:
            formats.setdefault(fields.format, file.source)
    if len(formats) > 1:
        found = ", ".join(f"{path} is {name}" for name, path in formats.items())
        raise BadFile(f"the files of one dataset must have one format, but {found}; push them as separate datasets")


def _checking(path: Path, fields: RowFields) -> Iterator[int]:
    try:
        container = container_of(path)
        if container is Container.UNREAD:
            return
        with open_expanded(path) as file:
            if container is Container.PLAIN_TEXT:
                if fields.format not in (AUTO, TEXT):
                    raise BadFile(f"{path} is plain text, but format {fields.format} needs rows; write JSON lines")
                fields.format = TEXT
                yield from check_text(path, file)
            elif container is Container.JSON_ARRAY:
                yield from check_array(path, file, fields)
            else:
                yield from check_lines(path, file, fields)
    except (EOFError, zlib.error) as error:
        raise BadFile(f"{path} is a damaged gzip file; compress it again") from error
    except OSError as error:
        if error.strerror is None:
            raise BadFile(f"{path} is a damaged gzip file: {error}; compress it again") from error
        raise BadFile(f"cannot read {path}: {error.strerror}") from error
