"""Structured logs: one configuration for our own lines and for the libraries', on stderr, with no secret in them.

Any module logs with `structlog.get_logger()`.
"""

from __future__ import annotations

import asyncio
import logging
import re
import sys
from collections.abc import Mapping
from typing import Any, TextIO

import structlog
from structlog.types import Processor

HIDDEN = "[hidden]"

_CHATTY = ("alembic", "uvicorn", "asyncio")
"""Libraries whose info lines do not help an operator: only their warnings are logged, unless the level is debug."""

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
    handler = logging.StreamHandler(stream or sys.stderr)
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


def _is_not_a_cut_call(record: logging.LogRecord) -> bool:
    """Leave out what gRPC logs, with a traceback, about calls that their client has cut: our interceptor counts them."""
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
