"""`horizond backup`, `restore` and `check`: the whole state folder, with or without a running daemon."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from functools import partial
from pathlib import Path

import click

from horizon_server.cli.options import print_rows, this_command, with_output_option, with_settings_options
from horizon_server.db.existing import complete_entry, insert_entry
from horizon_server.errors import HorizonError
from horizon_server.maintenance.backup import CHECKPOINTS, make_backup
from horizon_server.maintenance.check import Report, check_backup, check_state_dir
from horizon_server.maintenance.restore import restore
from horizon_server.settings import load_settings
from horizon_server.state_dir import existing_state_dir, private_state_dir, require_state
from horizon_server.texts import size_text

_FOLDER = click.Path(path_type=Path, file_okay=False)
_report = partial(click.echo, err=True)


@click.command("backup")
@click.argument("backup_dir", type=_FOLDER)
@click.option(
    "--with-checkpoints",
    type=click.Choice(CHECKPOINTS),
    default="newest",
    show_default=True,
    help="Checkpoints of every job: none, the newest and the best, or all.",
)
@with_settings_options
def backup_command(backup_dir: Path, with_checkpoints: str, config: Path | None, state_dir: Path | None) -> int:
    """Make BACKUP_DIR a backup of the state folder, while the daemon runs, for restic, borg or rsync to copy to another
    disk.

    Database, datasets, models, certificates, checkpoints and logs; not uploads under way, prepared data and compiled
    layers, which are made again. Contents and checkpoints are hard links: they take no space until the daemon deletes
    them. So BACKUP_DIR must be on the file system of the state folder, best the folder 'backup' in it. What an earlier
    backup has left there is replaced. It holds keys and all users' data.

    Exit code 1 when a file is missing or damaged; the backup then has everything else. Example: horizond backup
    /var/lib/horizond/backup && restic backup /var/lib/horizond/backup
    """
    settings = load_settings(config, state_dir=state_dir)
    existing_state_dir(settings.state_dir)
    backup = make_backup(settings.state_dir, backup_dir, checkpoints=with_checkpoints)
    # After it, as it changes nothing here: the entry is the first change that the backup does not have.
    insert_entry(settings.database_path, replace(this_command(), outcome="OK"))
    for problem in backup.problems:
        click.echo(f"Error: {problem}", err=True)
    click.echo(
        f"{backup_dir} has {len(backup.files)} files of {size_text(backup.size_bytes)}; copy it to another disk",
        err=True,
    )
    if backup.problems:
        click.echo("keep older copies; 'horizond check --full' lists everything that is wrong", err=True)
    return 1 if backup.problems else 0


@click.command("restore")
@click.argument("backup_dir", type=_FOLDER)
@click.option(
    "--replace",
    "replaces",
    is_flag=True,
    help="Also into a state folder with contents: replace its database, put back lost and damaged files.",
)
@with_settings_options
def restore_command(backup_dir: Path, replaces: bool, config: Path | None, state_dir: Path | None) -> None:
    """Restore the state folder from BACKUP_DIR, or a copy of it. The daemon must be stopped, and its workers too.

    Every file is read and compared first; when one is missing or damaged, nothing is restored. Without --replace the
    state folder must be empty. With it, the present database is kept as before-restore-TIME.db, and what is not in the
    restored one goes to the trash at the daemon's next start. Tokens that were revoked since the backup are valid
    again.

    Example: restic restore latest:/var/lib/horizond/backup --target /mnt/restored; horizond restore /mnt/restored
    """
    settings = load_settings(config, state_dir=state_dir)
    entry = this_command()
    if settings.database_path.exists():
        private_state_dir(settings.state_dir)
        entry = replace(entry, number=insert_entry(settings.database_path, entry))
    try:
        # The restored database takes its place with the entry in it.
        result = restore(
            backup_dir, settings.state_dir, replace=replaces, entry=replace(entry, outcome="OK"), on_progress=_report
        )
    except HorizonError as error:
        complete_entry(settings.database_path, replace(entry, outcome=error.reason, detail=error.message))
        raise
    if result.old_database is not None:
        complete_entry(result.old_database, replace(entry, outcome="OK"))
    for problem in result.backup.problems:
        click.echo(f"note: when the backup was made: {problem}", err=True)
    click.echo(
        f"the backup of {result.backup.made} is restored to {settings.state_dir}: {result.num_restored} files put "
        f"back, {result.num_kept} were there; {result.num_requeued} jobs that ran then are queued again",
        err=True,
    )
    if result.old_database is not None:
        click.echo(f"the database that was there is {result.old_database}", err=True)
    click.echo(
        "next: horizond check; horizond token list (tokens revoked since the backup are valid again); horizond serve",
        err=True,
    )


@click.command("check")
@click.option("--full", is_flag=True, help="Read every byte and compare it with its sha256, instead of sizes only.")
@click.option("--backup-dir", type=_FOLDER, help="Check this backup, or a copy of one, instead of the state folder.")
@with_output_option
@with_settings_options
def check_command(full: bool, backup_dir: Path | None, output: str, config: Path | None, state_dir: Path | None) -> int:
    """Check the database, datasets, models and checkpoints, also while the daemon runs. Changes nothing.

    Exit code 1 when something is wrong; every line says what to do. Example: horizond check --full
    """
    if backup_dir is not None:
        report = check_backup(backup_dir, full=full)
    else:
        settings = load_settings(config, state_dir=state_dir)
        require_state(settings.state_dir)
        report = check_state_dir(settings.state_dir, full=full)
    _print(report, output)
    read = f", {size_text(report.num_bytes_read)} read" if full else "; --full reads every byte"
    click.echo(f"{'good' if report.is_good else 'NOT good'}: {report.num_files} files checked{read}", err=True)
    return 0 if report.is_good else 1


def _print(report: Report, output: str) -> None:
    if output != "table":
        print_rows([dataclasses.asdict(finding) for finding in report.findings], output, name_key="where")
        return
    for finding in report.findings:
        advice = f"; {finding.advice}" if finding.advice else ""
        click.echo(f"{finding.level}: {finding.where}: {finding.what}{advice}")
