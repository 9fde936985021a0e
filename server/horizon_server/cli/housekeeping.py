"""`horizond gc`: remove what nothing needs any more, with or without a running daemon."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from contextlib import nullcontext
from pathlib import Path

import click
import yaml

from horizon_server.cli.options import audited, with_settings_options
from horizon_server.db.database_file import opened_file
from horizon_server.db.existing import database_to_change, database_to_read
from horizon_server.errors import InUse
from horizon_server.records.housekeeping import Garbage
from horizon_server.settings import Settings, load_settings
from horizon_server.state_dir import existing_state_dir, held_state_dir, idle_state_dir
from horizon_server.telemetry.logs import configure_logging
from horizon_server.texts import size_text


@click.command()
@click.option("--dry-run", is_flag=True, help="Remove nothing; show what would be removed.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=1),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for a running daemon.",
)
@click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "json", "yaml"]),
    default="table",
    show_default=True,
    help="Output format.",
)
@with_settings_options
def gc(dry_run: bool, timeout_s: float, output: str, config: Path | None, state_dir: Path | None) -> int:
    """Remove what nothing needs any more.

    Partial uploads, contents without a dataset or model, unused prepared data and compiled layers, old attempts, long
    logs, the trainer state of succeeded jobs, and checkpoints whose announced deletion is due. A running daemon does
    the same every hour and carries this command out. What only a lost database could know again goes to the state
    folder's trash/ first. Exit code 1 when the database does not belong to the state folder: nothing is removed then.

    Example: horizond gc --dry-run
    """
    settings = load_settings(config, state_dir=state_dir)
    existing_state_dir(settings.state_dir)
    with opened_file(settings.database_path):  # refused where a newer version made it
        pass
    with nullcontext() if dry_run else audited(settings.database_path):
        found, problem = _swept(settings, dry_run=dry_run, timeout_s=timeout_s)
    if problem:
        click.echo(f"nothing is removed: {problem}", err=True)
        return 1
    if output == "json":
        click.echo(json.dumps([dataclasses.asdict(one) for one in found], indent=2))
    elif output == "yaml":
        click.echo(yaml.safe_dump([dataclasses.asdict(one) for one in found], sort_keys=False), nl=False)
    else:
        _print(found, dry_run=dry_run)
    return 0


def _swept(settings: Settings, *, dry_run: bool, timeout_s: float) -> tuple[list[Garbage], str]:
    """Sweep, or let the running daemon do it; return what was found, and why nothing may be removed."""
    try:
        with idle_state_dir(settings.state_dir) if dry_run else held_state_dir(settings.state_dir):
            configure_logging(settings.log_level, settings.log_json)
            return asyncio.run(_sweep(settings, dry_run=dry_run))
    except InUse:
        # Only here: the other commands answer sooner without these imports.
        from horizon_server.services.housekeeping.requests import ask_daemon

        click.echo("the running daemon sweeps ...", err=True)
        return ask_daemon(settings.state_dir, dry_run=dry_run, timeout_s=timeout_s)


async def _sweep(settings: Settings, *, dry_run: bool) -> tuple[list[Garbage], str]:
    from horizon_server.wiring import wire

    path = settings.database_path
    async with database_to_read(path, always_copy=True) if dry_run else database_to_change(path) as database:
        parts = await wire(settings, database, found=(), usable=())
        return await parts.sweep.run(dry_run=dry_run)


def _print(found: list[Garbage], *, dry_run: bool) -> None:
    for one in found:
        click.echo(f"{one.kind:<16}  {size_text(one.size_bytes):>10}  {one.place}  ({one.why})")
    verb = "would be removed" if dry_run else "removed"
    click.echo(f"{len(found)} {verb}, {size_text(sum(one.size_bytes for one in found))} in all", err=True)
