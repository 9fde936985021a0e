"""Calls of tools in the text of an answer, as Qwen's, Hermes' and other models write them:

<tool_call>
{"name": "weather", "arguments": {"city": "Rome"}}
</tool_call>
"""

from __future__ import annotations

import json
import re
from typing import Any

_BEGIN = "<tool_call>"
_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


def calls_in(text: str) -> tuple[str, list[dict[str, Any]]]:
    """Return what is said before the first call, and the calls as name and arguments. A text in which one is no JSON
    has none."""
    begin = text.find(_BEGIN)
    if begin < 0:
        return text, []
    calls = []
    for found in _CALL.finditer(text, begin):
        try:
            call = json.loads(found[1])
        except (ValueError, RecursionError):
            return text, []
        name, arguments = call.get("name"), call.get("arguments", {})
        if not isinstance(name, str):
            return text, []
        calls.append({"name": name, "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments)})
    return (text[:begin].rstrip(), calls) if calls else (text, [])


def sayable(text: str) -> int:
    """Return how many characters of a growing text are no part of a call, whatever follows."""
    begin = text.find(_BEGIN)
    if begin >= 0:
        return begin
    # What may be its beginning.
    for length in range(min(len(_BEGIN) - 1, len(text)), 0, -1):
        if _BEGIN.startswith(text[-length:]):
            return len(text) - length
    return len(text)
