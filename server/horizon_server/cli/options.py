"""Options and output that every horizond command shares."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import click
import yaml

from horizon_server.db.database import Database
from horizon_server.errors import HorizonError
from horizon_server.services.audit import Audit, command_account
from horizon_server.settings import load_settings
from horizon_server.state_dir import private_state_dir

Result = TypeVar("Result")


def with_settings_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --config and --state-dir, which every command takes."""
    config = click.option(
        "--config", type=click.Path(path_type=Path), envvar="HORIZOND_CONFIG", help="The daemon's TOML file."
    )
    state_dir = click.option(
        "--state-dir",
        type=click.Path(path_type=Path),
        help="Folder with everything the daemon owns. [default: /var/lib/horizond for root, else ~/.local/share/horizond]",
    )

    return config(state_dir(command))


# The last word of commands that change nothing. All others are written into the audit log.
_READING = frozenset({"audit", "check", "doctor", "list", "plan", "show"})


def in_database(config: Path | None, state_dir: Path | None, call: Callable[[Database], Awaitable[Result]]) -> Result:
    """Return what `call` returns of the daemon's database, whether or not the daemon runs. A command that changes something is audited."""
    settings = load_settings(config, state_dir=state_dir)
    # The first command on a machine may be this one, before the daemon has made its folder.
    private_state_dir(settings.state_dir)

    async def run() -> Result:
        async with Database.opened(settings.database_path) as database:
            try:
                result = await call(database)
            except HorizonError as error:
                await _audit(database, error)
                raise
            await _audit(database, None)
            return result

    return asyncio.run(run())


def note_command(config: Path | None, state_dir: Path | None) -> None:
    """Write the command that is running into the audit log, for those that do not work in the database themselves."""

    async def nothing_else(_database: Database) -> None:
        return None

    in_database(config, state_dir, nothing_else)


async def _audit(database: Database, error: HorizonError | None) -> None:
    context = click.get_current_context(silent=True)
    if context is None or context.info_name in _READING:
        return
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
    for name in ("config", "state_dir", "output"):
        given.pop(name, None)
    await Audit(database).write(
        user=account,
        token_id="",
        origin=origin,
        action=" ".join(["horizond", *words]),
        resource=resource,
        outcome=error.reason if error else "OK",
        detail=error.message if error else json.dumps(given, default=str) if given else "",
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
