"""Every command and every option that a page, a help text or a job of the documentation names exists."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import click
import pytest
from tests.support.pages import ROOT, blocks, commands_in, pages

from horizon_client.cli.root import horizon
from horizon_server.cli import horizond

ROOTS: dict[str, click.Group] = {"horizon": horizon, "horizond": horizond}
SHELLS = ("", "bash", "sh", "console", "shell")
INLINE = re.compile(r"(?<!`)`(horizond? [^`]+)`(?!`)")


def problem_of(line: str) -> str | None:
    """Return what is wrong with a command line, as click itself says it."""
    # [--option] may be left out, and ... stands for what is not said.
    try:
        first, *rest = shlex.split(re.sub(r"[\[\]]|\.\.\.", " ", line))
    except ValueError as error:
        return f"{line!r}: {error}"
    command: click.Command = ROOTS[first]
    context = click.Context(command, info_name=first)
    try:
        while isinstance(command, click.Group):
            _, rest, _ = command.make_parser(context).parse_args(rest)
            if not rest:
                return None
            name, *rest = rest
            if "|" in name:  # sample|chat
                each = (problem_of(f"{context.command_path} {one} {shlex.join(rest)}") for one in name.split("|"))
                return next((problem for problem in each if problem), None)
            found = command.get_command(context, name)
            if found is None:
                return f"{line!r}: {context.command_path} has no command {name!r}"
            command, context = found, click.Context(found, info_name=name, parent=context)
        _, unread, _ = command.make_parser(context).parse_args(rest)
    except click.UsageError as error:
        return f"{line!r}: {error.format_message()}"
    return f"{line!r}: nothing takes {unread}" if unread else None


def every_command() -> Iterator[tuple[str, click.Command]]:
    """Yield all commands of both programs by their names."""
    waiting: list[tuple[str, click.Command]] = [*ROOTS.items()]
    for name, command in waiting:
        yield name, command
        if isinstance(command, click.Group):
            context = click.Context(command)
            found = ((one, command.get_command(context, one)) for one in command.list_commands(context))
            waiting += [(f"{name} {one}", inner) for one, inner in found if inner is not None]


@pytest.mark.parametrize(
    "line",
    [
        "horizon job sbumit job.yaml",
        "horizon job submit job.yaml --wacth",
        "horizond token create ada --expires",
        "horizon version now",
        "horizon checkpoint sample|caht JOB",
    ],
)
def test_a_wrong_line_is_found(line: str) -> None:
    assert problem_of(line) is not None


def test_commands_are_found_behind_accounts_containers_and_pipes() -> None:
    code = """
(umask 077; sudo -u horizond /opt/horizon/bin/horizond token create ada > ada.token)
docker compose exec -T horizond horizond user add ada   # horizon is the client
watch -n 5 horizon queue | tee "horizon; log" && horizon job \\
    list
systemctl restart horizond
"""
    assert [line for _, line in commands_in(code)] == [
        "horizond token create ada ",
        "horizond user add ada   ",
        "horizon queue ",
        "horizon job     list",
    ]


def test_every_command_of_a_code_block_exists() -> None:
    shells = [block for block in blocks() if block.language in SHELLS]
    lines = [(block.page, block.line + at, line) for block in shells for at, line in commands_in(block.code)]
    assert len(lines) > 50
    found = [f"{page}:{number}: {problem}" for page, number, line in lines if (problem := problem_of(line))]
    assert not found, "\n".join(found)


def test_every_command_between_words_exists() -> None:
    lines = [
        (page, " ".join(found[1].split()))
        for page in pages()
        for found in INLINE.finditer(
            re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
        )
    ]
    assert len(lines) > 50
    # An option between words may be named without its value.
    problems = ((page, problem_of(line) and problem_of(f"{line} VALUE")) for page, line in lines)
    found = [f"{page.relative_to(ROOT)}: {problem}" for page, problem in problems if problem]
    assert not found, "\n".join(found)


def test_every_example_of_a_help_text_exists() -> None:
    texts = [(name, command.epilog or "") for name, command in every_command()]
    lines = [(name, line) for name, text in texts for _, line in commands_in(text)]
    assert len(lines) > 50
    found = [f"{name} --help: {problem}" for name, line in lines if (problem := problem_of(line))]
    assert not found, "\n".join(found)
