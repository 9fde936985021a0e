"""A form with one file, read as it arrives: the content is never in memory as a whole."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from horizon_server.api.openai.errors import BadParameter

# Of all fields together but the file, their names included.
MAX_FIELD_BYTES = 16 * 1024
_FILE = "file"


class FileForm:
    """One form. `fields` and `file_name` are whole once `content` has ended.

    Thread: belongs to one event loop.
    """

    def __init__(self, content_type: str, body: AsyncIterator[bytes]) -> None:
        """Raises BadParameter where the body is no form."""
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise BadParameter("Content-Type", "Content-Type must be multipart/form-data, with a boundary")
        self.fields: dict[str, str] = {}
        self.file_name = ""
        self._has_file = False
        self._body = body
        self._pieces: list[bytes] = []
        self._header = b""
        self._value = b""
        self._disposition = b""
        self._name: str | None = None
        self._in_file = False
        self._data = bytearray()
        self._num_field_bytes = 0
        callbacks: dict[str, Any] = {
            name: getattr(self, f"_{name}")
            for name in (
                "on_part_begin",
                "on_header_field",
                "on_header_value",
                "on_header_end",
                "on_headers_finished",
                "on_part_data",
                "on_part_end",
            )
        }
        self._parser = MultipartParser(boundary, callbacks)  # type: ignore[arg-type]  # a dictionary of these names

    async def content(self) -> AsyncIterator[bytes]:
        """Yield the content of the file. Raises BadParameter for a broken form, and for one without a file."""
        try:
            async for piece in self._body:
                self._parser.write(piece)
                for part in self._pieces:
                    yield part
                self._pieces.clear()
            self._parser.finalize()
        except FormParserError as error:
            raise BadParameter("", f"the form is broken: {error}") from error
        if not self._has_file:
            raise BadParameter(_FILE, f"Missing required parameter: '{_FILE}'", code="missing_required_parameter")

    def _on_part_begin(self) -> None:
        self._disposition, self._name, self._in_file = b"", None, False
        self._data.clear()

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _on_header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value
        self._header = self._value = b""

    def _on_headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        self._in_file = self._name == _FILE
        if not self._in_file:
            return
        if self._has_file:
            raise BadParameter(_FILE, "the form has two files; send one at a time")
        self._has_file = True
        self.file_name = options.get(b"filename", b"").decode("utf-8", "replace")

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._in_file:
            self._pieces.append(data[start:end])
            return
        self._num_field_bytes += end - start
        if self._num_field_bytes > MAX_FIELD_BYTES:
            raise BadParameter(self._name or "", f"the fields of the form have more than {MAX_FIELD_BYTES} bytes")
        self._data += data[start:end]

    def _on_part_end(self) -> None:
        if self._in_file or self._name is None:
            return
        if self._name in self.fields:
            raise BadParameter(self._name, f"Invalid value for '{self._name}': it is given twice")
        self.fields[self._name] = self._data.decode("utf-8", "replace")
