"""The dialect of Jinja that chat templates are written in, run in a sandbox: templates come with models from anywhere.

Owns the environment and the generation markers. Must not know what a chat is.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

# Noncharacters: Unicode reserves them for internal use, so no text may hold them.
OPEN_MARK, CLOSE_MARK = "\ufdd0", "\ufdd1"


class GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}`: renders its body, between marks while `marking`; counts the blocks."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so
    marking = False
    num_blocks = 0

    def parse(self, parser: Parser) -> nodes.Node:
        """Read the block; part of jinja2's interface."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_between_marks"), [], [], body).set_lineno(line)

    def _between_marks(self, caller: Callable[[], str]) -> str:
        self.num_blocks += 1
        return f"{OPEN_MARK}{caller()}{CLOSE_MARK}" if self.marking else caller()


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
    return bool(_generation_blocks(template))


def blocks_reach_the_text(template: nodes.Template) -> bool:
    """Whether every generation block is printed as it is: none lies where its output is filtered, kept or handed on."""
    for holder in template.find_all((nodes.AssignBlock, nodes.FilterBlock, nodes.Macro, nodes.CallBlock)):
        assert isinstance(holder, nodes.AssignBlock | nodes.FilterBlock | nodes.Macro | nodes.CallBlock)
        if any(_generation_blocks(part) for part in holder.body):
            return False
    return True


def _generation_blocks(node: nodes.Node) -> list[nodes.ExtensionAttribute]:
    found = node.find_all(nodes.ExtensionAttribute)
    return [attribute for attribute in found if attribute.identifier == GenerationTag.identifier]


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
