"""The pages of the documentation, and what is written in their code blocks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = re.compile(
    # What may stand before the command: other accounts, containers and tools that start it.
    r"^\s*(?:\$ )?(?:\(?umask \d+; ?|sudo (?:-u \S+ )?|docker compose exec (?:-T )?(?!-)\S+ "
    r"|kubectl (?:-n \S+ )?exec (?:-i |-t |-it )?\S+ (?:-c \S+ )?-- "
    r"|nohup |time |exec |watch (?:-n \d+ )?|srun |\w+=\S+ |systemd-run .*?(?=horizond))*"
    r"(?P<command>(?:[\w./~$-]*/)?horizond?)(?P<words>(?: .*)?)$"
)


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced code block."""

    page: str
    line: int
    """Of its first line of code, from 1."""
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    """Return every page that a user or an administrator reads."""
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md"), *ROOT.glob("deploy/**/*.md")]
    return sorted(found)


def blocks() -> Iterator[Block]:
    """Yield the code blocks of all pages."""
    for page in pages():
        fence = re.compile(r"^```(?P<language>[^\n`]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
        text = page.read_text("utf-8")
        for found in fence.finditer(text):
            yield Block(
                page=str(page.relative_to(ROOT)),
                line=text.count("\n", 0, found.start()) + 2,
                language=found["language"].strip(),
                code=found["code"],
            )


def commands_in(code: str) -> Iterator[tuple[int, str]]:
    """Yield each call of horizon or horizond in lines of a shell, with the number of lines before it."""
    lines = code.split("\n")
    number = 0
    while number < len(lines):
        first, line = number, lines[number]
        while line.endswith("\\") and number + 1 < len(lines):
            number += 1
            line = line[:-1] + lines[number]
        number += 1
        for part in _simple_commands(line):
            match = COMMANDS.match(part)
            if match:
                yield first, f"{match['command'].rpartition('/')[2]}{match['words']}"


def _simple_commands(line: str) -> list[str]:
    """Split a line where one command ends and another begins, outside of quotes, without comments."""
    parts, quote, start, at = [], "", 0, 0
    while at < len(line):
        sign = line[at]
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "'\"":
            quote = sign
        elif sign == "#" and (at == 0 or line[at - 1].isspace()):
            line = line[:at]
            break
        elif sign in "|;&<>()" and not (
            sign == "|" and line[at - 1 : at].isalnum() and line[at + 1 : at + 2].isalnum()
        ):
            parts.append(line[start:at])
            # What follows a redirection is a file.
            start = at + 1
            if sign in "<>":
                parts.append("")
                rest = line[at + 1 :].lstrip("> ")
                at = len(line) - len(rest) + len(rest.split(" ", 1)[0]) - 1
                start = at + 1
        at += 1
    return [*parts, line[start:]]
