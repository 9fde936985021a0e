"""Options and output that every horizond command shares."""

from __future__ import annotations

import asyncio
import difflib
import json
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import click
import yaml

from horizon_server.db.database import Database
from horizon_server.db.existing import complete_entry, database_to_change, database_to_read, insert_entry
from horizon_server.errors import HorizonError
from horizon_server.records.audit import UNKNOWN, AuditEntry
from horizon_server.services.audit import command_account
from horizon_server.settings import load_settings
from horizon_server.state_dir import existing_state_dir

Result = TypeVar("Result")


class Commands(click.Group):
    """A group of commands that suggests a similar name for an unknown one."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that `args` names."""
        name = args[0]
        if ctx.resilient_parsing or name.startswith("-") or self.get_command(ctx, name) is not None:
            return super().resolve_command(ctx, args)
        known = self.list_commands(ctx)
        hint = did_you_mean(name, known) or f"commands: {', '.join(known)}"
        raise click.UsageError(f"{name!r} is not a command of {ctx.command_path}; {hint}", ctx)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `did you mean X?` with the most similar of these names, or nothing when none is similar."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {near[0]}?" if near else ""


def with_settings_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --config and --state-dir, which every command takes."""
    config = click.option(
        "--config", type=click.Path(path_type=Path), envvar="HORIZOND_CONFIG", help="The daemon's TOML file."
    )
    state_dir = click.option(
        "--state-dir",
        type=click.Path(path_type=Path),
        help="Folder with everything the daemon owns. [default: /var/lib/horizond for root, else "
        "~/.local/share/horizond]",
    )

    return config(state_dir(command))


# The last word of commands that change nothing. All others are written into the audit log.
_READING = frozenset({"audit", "check", "doctor", "list", "plan", "show"})


def in_database(
    config: Path | None,
    state_dir: Path | None,
    call: Callable[[Database], Awaitable[Result]],
    *,
    only_look: bool = False,
) -> Result:
    """Return what `call` returns of the daemon's database, whether or not the daemon runs.

    A command that changes something is audited; with `only_look`, `call` is the look of such a command before its
    change.

    Raises BadSetting: the state folder holds no daemon's state; or the command changes something and the database is of
    another version.
    """
    settings = load_settings(config, state_dir=state_dir)
    existing_state_dir(settings.state_dir)

    async def run() -> Result:
        if is_reading():
            async with database_to_read(settings.database_path) as database:
                return await call(database)
        async with database_to_change(settings.database_path) as database:
            with nullcontext() if only_look else audited(settings.database_path):
                return await call(database)

    return asyncio.run(run())


def is_reading() -> bool:
    """Whether the command that is running changes nothing."""
    context = click.get_current_context(silent=True)
    return context is None or context.info_name in _READING


@contextmanager
def audited(database: Path) -> Iterator[None]:
    """Write the command that is running into the audit log before the block, which makes its change, and how it ended
    after it."""
    entry = this_command()
    entry = replace(entry, number=insert_entry(database, entry))
    try:
        yield
    except HorizonError as error:
        complete_entry(database, replace(entry, outcome=error.reason, detail=error.message))
        raise
    complete_entry(database, replace(entry, outcome="OK"))


def this_command() -> AuditEntry:
    """Return what the audit log says of the command that is running, before it is known how it ends."""
    context = click.get_current_context()
    words: list[str] = []
    level: click.Context | None = context
    # The first one is the program, which has another name when it is run as a module.
    while level is not None and level.parent is not None:
        words.insert(0, level.info_name or "")
        level = level.parent
    account, origin = command_account()
    given = {name: value for name, value in context.params.items() if value not in (None, (), False)}
    # What stands alone in a command is what it is about; the rest are options.
    arguments = [parameter.name for parameter in context.command.params if isinstance(parameter, click.Argument)]
    resource = " ".join(str(given.pop(name)) for name in arguments if name in given)
    for name in ("config", "state_dir", "output", "yes"):
        given.pop(name, None)
    return AuditEntry(
        time_s=time.time(),
        user=account,
        token_id="",
        origin=origin,
        action=" ".join(["horizond", *words]),
        resource=resource,
        outcome=UNKNOWN,
        detail=json.dumps(given, default=str) if given else "",
    )


def with_output_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add -o table|json|yaml|name."""
    kinds = click.Choice(["table", "json", "yaml", "name"])
    return click.option("-o", "--output", type=kinds, default="table", show_default=True, help="Output format.")(
        command
    )


def print_rows(rows: list[dict[str, Any]], output: str, *, name_key: str) -> None:
    """Print rows in the form asked for; `name_key` is what -o name prints."""
    if output == "json":
        click.echo(json.dumps(rows, indent=2))
    elif output == "yaml":
        click.echo(yaml.safe_dump(rows, sort_keys=False), nl=False)
    elif output == "name":
        for row in rows:
            click.echo(row[name_key])
    elif rows:
        cells = [[str(key).upper() for key in rows[0]], *([str(value) for value in row.values()] for row in rows)]
        widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
        for line in cells:
            click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    else:
        click.echo("none")


def print_mapping(mapping: dict[str, Any], output: str) -> None:
    """Print one thing; as a table, one key per line."""
    if output == "json":
        click.echo(json.dumps(mapping, indent=2))
    elif output == "yaml":
        click.echo(yaml.safe_dump(mapping, sort_keys=False), nl=False)
    else:
        width = max(map(len, mapping), default=0)
        for key, value in mapping.items():
            click.echo(f"{key:<{width}}  {value}")
