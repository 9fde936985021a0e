"""Structured logs: one configuration for our own lines and for the libraries', on stderr, with no secret in them.

Any module logs with `structlog.get_logger()`.
"""

from __future__ import annotations

import asyncio
import logging
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TextIO

import structlog
from structlog.types import Processor

HIDDEN = "[hidden]"

_CHATTY = ("alembic", "uvicorn", "asyncio")
"""Libraries whose info lines do not help an operator: only their warnings are logged, unless the level is debug."""

# Lines of one kind: a burst, then on average.
LINES_BURST = 300
LINES_PER_S = 1.0
# All lines together: a burst, then on average, which is 86 MB a day.
LOG_BURST_BYTES = 16 * 2**20
LOG_BYTES_PER_S = 1000.0
# A traceback with its causes fits.
MAX_LINE_CHARS = 32 * 1024
_KIND_CHARS = 40
_MAX_KINDS = 2000

_GRPC_CORE = "grpc._cython.cygrpc"

_SECRET_KEY = re.compile(r"authorization|secret|password|cookie|private_?key|(^|[_-])token$", re.IGNORECASE)
_HARMLESS_KEYS = frozenset({"page_token", "next_page_token"})
_BEARER = re.compile(r"\b(bearer)(\s+|%20)[^\s\"',;)}\]]+", re.IGNORECASE)
_HEADER = re.compile(r"\b(authorization)([\"']?\s*[:=,]\s*)(?!\s*[\"']?bearer\b)[\"']?[^\s\"',;)}\]]+", re.IGNORECASE)


def configure_logging(level: str, json: bool, stream: TextIO | None = None) -> None:
    """Send every log line of the process to `stream` (stderr) from `level` (debug, info, warning, error) on.

    `json` writes one object per line, otherwise text for people. May be called again; the last call holds.
    """
    before: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time" if json else "timestamp"),
        structlog.processors.StackInfoRenderer(),
    ]
    # Secrets go last before rendering: a traceback becomes text first and is searched like any other value.
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=before,
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.format_exc_info,
            lambda _logger, _method, event: _clean("", event),
            structlog.processors.JSONRenderer(sort_keys=True)
            if json
            else structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
        ],
    )
    # Who sets the level debug wants to see all.
    handler = logging.StreamHandler(stream or sys.stderr) if level == "debug" else BoundedHandler(stream or sys.stderr)
    handler.setFormatter(formatter)
    logging.getLogger(_GRPC_CORE).addFilter(_is_not_a_cut_call)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.NOTSET if level == "debug" else max(logging.WARNING, root.level))
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, *before, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )


class BoundedHandler(logging.StreamHandler[TextIO]):
    """Limits the lines of each kind and the bytes in all, as callers could fill the disk with what they cause."""

    def __init__(self, stream: TextIO, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(stream)
        self._clock = clock
        self._kinds: dict[tuple[str, str], _Kind] = {}
        self._room_bytes = float(LOG_BURST_BYTES)
        self._room_at_s = clock()

    def filter(self, record: logging.LogRecord) -> bool:
        """Refuse lines of a kind that has been written too often; the next one that is written says how many were left
        out."""
        if not super().filter(record):
            return False
        now_s = self._clock()
        # Not the whole text, which may hold what a caller has sent.
        text = record.msg.get("event", "") if isinstance(record.msg, dict) else record.msg
        key = record.name, str(text)[:_KIND_CHARS]
        kind = self._kinds.get(key)
        if kind is None:
            if len(self._kinds) >= _MAX_KINDS:
                self._kinds.pop(next(iter(self._kinds)))
            kind = self._kinds[key] = _Kind(at_s=now_s)
        kind.room = min(LINES_BURST, kind.room + (now_s - kind.at_s) * LINES_PER_S)
        kind.at_s = now_s
        self._room_bytes = min(LOG_BURST_BYTES, self._room_bytes + (now_s - self._room_at_s) * LOG_BYTES_PER_S)
        self._room_at_s = now_s
        if kind.room < 1 or self._room_bytes < 0:
            kind.num_left_out += 1
            return False
        kind.room -= 1
        if kind.num_left_out:
            if isinstance(record.msg, dict):
                record.msg = {**record.msg, "left_out": kind.num_left_out}
            else:
                record.left_out = kind.num_left_out
            kind.num_left_out = 0
        return True

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, cut where it is too long."""
        text = super().format(record)
        if len(text) > MAX_LINE_CHARS:
            text = f"{text[:MAX_LINE_CHARS]} ... ({len(text) - MAX_LINE_CHARS} more characters)"
        self._room_bytes -= len(text)
        return text


@dataclass
class _Kind:
    """Lines of one logger that begin alike."""

    at_s: float
    room: float = LINES_BURST
    num_left_out: int = 0


def _is_not_a_cut_call(record: logging.LogRecord) -> bool:
    """Leave out what gRPC logs, with a traceback, about calls that their client has cut: our interceptor counts
    them."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, asyncio.CancelledError) and "RPC already finished" not in str(error)


def _clean(key: str, value: Any) -> Any:
    """Replace the values of keys that name a secret, and bearer tokens anywhere in the text, however deep."""
    if _SECRET_KEY.search(key) and key not in _HARMLESS_KEYS:
        return HIDDEN
    if isinstance(value, bytes):
        return _clean(key, value.decode("utf-8", "replace"))
    if isinstance(value, str):
        return _HEADER.sub(rf"\1\2{HIDDEN}", _BEARER.sub(rf"\1\2{HIDDEN}", value))
    if isinstance(value, Mapping):
        return {str(name): _clean(str(name), inner) for name, inner in value.items()}
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str | bytes):
        # Headers and gRPC metadata come as pairs: the secret's name is then a value, not a key.
        name = value[0].decode("latin-1") if isinstance(value[0], bytes) else value[0]
        return [_clean(key, value[0]), _clean(name, value[1])]
    if isinstance(value, list | tuple | set | frozenset):
        return [_clean(key, inner) for inner in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    return _clean(key, str(value))
