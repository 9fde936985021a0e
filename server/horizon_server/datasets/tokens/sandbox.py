"""The dialect of Jinja that chat templates are written in, run in a sandbox: templates come with models from anywhere.

Also the limit on their processor time.
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from types import FrameType
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

OPEN_MARK, CLOSE_MARK = "_generation_begins", "_generation_ends"
"""Variables that are printed before and after each generation block: nothing, unless they are given."""


@contextmanager
def processor_time_limit(limit_s: float, error: Exception) -> Iterator[None]:
    """Raise `error` inside the block once the process has used this much processor time in it.

    Processor time, as a template must not be blamed for a busy machine. Works in the main thread only, which is where Python runs signal
    handlers; elsewhere there is no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise error

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


class GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}`: renders its body, in a scope of its own, between the two marks."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Read the block; part of jinja2's interface."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return [_printed(OPEN_MARK, line), nodes.Scope(body).set_lineno(line), _printed(CLOSE_MARK, line)]


def chat_environment() -> ImmutableSandboxedEnvironment:
    """Return an environment with all that chat templates use; its `GenerationTag` is among its extensions."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _SafeNamespace
    environment.globals["dict"] = lambda *args, **kwargs: dict(*args, **kwargs)
    return environment


def has_generation_blocks(template: nodes.Template) -> bool:
    """Whether a parsed template marks what an assistant generates."""
    return _holds_blocks(template)


def blocks_reach_the_text(template: nodes.Template) -> bool:
    """Whether every generation block is printed as it is: none is where its output is filtered, stored or passed on."""
    for holder in template.find_all((nodes.AssignBlock, nodes.FilterBlock, nodes.Macro, nodes.CallBlock)):
        if _holds_blocks(holder):
            return False
    return True


def _holds_blocks(node: nodes.Node) -> bool:
    return any(name.name == OPEN_MARK for name in node.find_all(nodes.Name))


def _printed(variable: str, line: int) -> nodes.Node:
    return nodes.Output([nodes.Name(variable, "load")]).set_lineno(line)


class _SafeNamespace(Namespace):
    """Jinja's namespace object, without the underscored attributes through which a template could reach Python."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        for name in dict(*args, **kwargs):
            _refuse_reserved(name)
        super().__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_reserved(name)
        super().__setitem__(name, value)


def _refuse_reserved(name: object) -> None:
    if str(name).startswith("_"):
        raise TemplateError(f"a namespace may not hold {name!r}: names with a leading underscore are reserved")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)
