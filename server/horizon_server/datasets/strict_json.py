"""JSON as the standard has it: the library's parser, without the extensions that lose or invent data.

Python's parser takes NaN and Infinity, and of two equal keys keeps the last. Here both are problems that come with the parsed value.
"""

from __future__ import annotations

import json
from typing import Any


class StrictDecoder:
    """Parses one value at a time. After each, `problem` says what the standard or we forbid in it, or is None.

    Thread: one at a time.
    """

    def __init__(self) -> None:
        self.problem: str | None = None
        decoder = json.JSONDecoder(object_pairs_hook=self._object, parse_constant=self._constant)
        self._decode, self._raw_decode = decoder.decode, decoder.raw_decode

    def decode(self, text: str) -> Any:
        """Return the value that is all of `text`.

        Raises: json.JSONDecodeError; ValueError or RecursionError for numbers too long and nesting too deep.
        """
        self.problem = None
        return self._decode(text)

    def decode_at(self, text: str, start: int) -> tuple[Any, int]:
        """Return the value that begins at `start`, and where it ends. Raises: as `decode`."""
        self.problem = None
        return self._raw_decode(text, start)

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        columns = dict(pairs)
        if len(columns) != len(pairs) and self.problem is None:
            keys = [key for key, _ in pairs]
            twice = next(key for key in columns if keys.count(key) > 1)
            self.problem = f"holds the key {twice!r:.40} twice in one object; only one of the values could be kept"
        return columns

    def _constant(self, name: str) -> float:
        self.problem = f"holds {name}, which is not JSON; write null or a number"
        return float(name)
