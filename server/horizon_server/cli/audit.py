"""`horizond audit`: who changed what."""

from __future__ import annotations

import dataclasses
import datetime
import re
import time
from pathlib import Path

import click

from horizon_server.cli.options import in_database, print_rows, with_output_option, with_settings_options
from horizon_server.db.audit import AuditStore
from horizon_server.errors import BadSetting

_UNITS_S = {"m": 60.0, "h": 3600.0, "d": 86400.0}


@click.command()
@click.option("--user", help="Only changes of this user, or of this system account of the node.")
@click.option(
    "--since", default="7d", show_default=True, help="Since when: 30m, 12h, 90d, or a day such as 2026-01-31."
)
@click.option("--action", help="Only actions that contain this text, such as CancelJob or 'token create'.")
@click.option("--outcome", help="Only changes that ended so: OK, UNKNOWN, or a reason such as NOT_ALLOWED.")
@click.option(
    "--limit", type=click.IntRange(1, 100_000), default=200, show_default=True, help="Maximum number to list."
)
@with_output_option
@with_settings_options
def audit(
    user: str | None,
    since: str,
    action: str | None,
    outcome: str | None,
    limit: int,
    output: str,
    config: Path | None,
    state_dir: Path | None,
) -> None:
    """Show the audit log: who changed what, when, from where, and how it ended. The newest entry is last.

    It has every change by gRPC, REST and horizond commands, refused ones too, and failed logins. Contents of uploads
    are left out. An entry is written before the change. Its outcome is UNKNOWN until the change has ended, and stays so
    where the daemon was killed meanwhile: look whether the change was made.

    Example: horizond audit --user ada --since 30d -o json
    """
    since_s = parse_since(since, time.time())
    entries = in_database(
        config,
        state_dir,
        lambda db: AuditStore(db).entries(user=user, since_s=since_s, action=action, outcome=outcome, limit=limit),
    )
    rows = []
    for entry in entries:
        row = dataclasses.asdict(entry)
        when = datetime.datetime.fromtimestamp(row.pop("time_s"), datetime.UTC)
        rows.append({"number": row.pop("number"), "time": when.isoformat(timespec="milliseconds"), **row})
    print_rows(rows, output, name_key="number")


def parse_since(text: str, now_s: float) -> float:
    """Return Unix seconds.

    Raises:
        BadSetting: when it is neither a number with m, h or d, nor a day.
    """
    match = re.fullmatch(r"(\d{1,6})([mhd])", text)
    if match is not None:
        return now_s - int(match.group(1)) * _UNITS_S[match.group(2)]
    try:
        return datetime.datetime.fromisoformat(text).replace(tzinfo=datetime.UTC).timestamp()
    except ValueError as error:
        raise BadSetting(
            f"--since {text!r} is not a time: write a number with m, h or d such as 90d, or a day such as 2026-01-31 "
            "(UTC)"
        ) from error
