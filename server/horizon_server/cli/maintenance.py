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
from horizon_server.maintenance.backup_folder import BackupFolder
from horizon_server.maintenance.check import Report, check_backups, check_state_dir
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
@click.option(
    "--keep", type=click.IntRange(min=1), default=7, show_default=True, help="Number of backups to keep in BACKUP_DIR."
)
@click.option(
    "--hard-links",
    is_flag=True,
    help="Link contents and checkpoints instead of copying them: no space, no time, and no protection against a broken disk.",
)
@with_settings_options
def backup_command(
    backup_dir: Path, with_checkpoints: str, keep: int, hard_links: bool, config: Path | None, state_dir: Path | None
) -> int:
    """Back up the state folder into BACKUP_DIR, while the daemon runs.

    Database, datasets, models, certificates, checkpoints and logs; not uploads under way, prepared data and compiled layers, which are made
    again. Files that have not changed since an earlier backup in BACKUP_DIR are not copied again. BACKUP_DIR then holds keys and all users'
    data.

    Exit code 1 when a file is missing or damaged; the backup then has everything else. Example: horizond backup /mnt/backup/horizon
    """
    settings = load_settings(config, state_dir=state_dir)
    existing_state_dir(settings.state_dir)
    result = make_backup(
        settings.state_dir,
        backup_dir,
        checkpoints=with_checkpoints,
        keep=keep,
        hard_links=hard_links,
        on_progress=_report,
    )
    # After it, as it changes nothing here: the entry is the first change that the backup does not have.
    insert_entry(settings.database_path, replace(this_command(), outcome="OK"))
    backup = result.backup
    for problem in backup.problems:
        click.echo(f"Error: {problem}", err=True)
    removed = f", {size_text(result.removed_bytes)} of older backups removed" if result.removed_bytes else ""
    click.echo(
        f"{len(backup.entries)} files of {size_text(backup.size_bytes)}; {result.num_copied} were new, "
        f"{size_text(result.copied_bytes)}{removed}",
        err=True,
    )
    if backup.problems:
        click.echo("older backups are kept; 'horizond check --full' lists everything that is wrong", err=True)
    click.echo(backup.name)
    return 1 if backup.problems else 0


@click.command("restore")
@click.argument("backup_dir", type=_FOLDER)
@click.option("--backup", "name", metavar="NAME", help="Which backup; --list shows them. [default: the newest]")
@click.option(
    "--replace",
    "replaces",
    is_flag=True,
    help="Also into a state folder with contents: replace its database, put back lost and damaged files.",
)
@click.option("--list", "list_only", is_flag=True, help="List the backups in BACKUP_DIR and restore nothing.")
@with_output_option
@with_settings_options
def restore_command(
    backup_dir: Path,
    name: str | None,
    replaces: bool,
    list_only: bool,
    output: str,
    config: Path | None,
    state_dir: Path | None,
) -> None:
    """Restore the state folder from BACKUP_DIR. The daemon must be stopped, and its workers too.

    Without --replace the state folder must be empty. With it, the present database is kept as before-restore-TIME.db, and what is not in
    the restored one goes to the trash at the daemon's next start. Tokens that were revoked since the backup are valid again.

    Example: horizond restore /mnt/backup/horizon --list; horizond restore /mnt/backup/horizon
    """
    if list_only:
        folder = BackupFolder(backup_dir)
        folder.read()
        backups = [folder.read(each) for each in folder.names()]
        rows = [
            {"name": b.name, "version": b.version, "checkpoints": b.checkpoints, "files": len(b.entries), "size": size_text(b.size_bytes),
             "problems": len(b.problems)}
            for b in backups
        ]  # fmt: skip
        print_rows(rows, output, name_key="name")
        return
    settings = load_settings(config, state_dir=state_dir)
    entry = this_command()
    if settings.database_path.exists():
        private_state_dir(settings.state_dir)
        entry = replace(entry, number=insert_entry(settings.database_path, entry))
    try:
        # The restored database takes its place with the entry in it.
        result = restore(
            backup_dir, settings.state_dir, name=name, replace=replaces, entry=replace(entry, outcome="OK"), on_progress=_report
        )  # fmt: skip
    except HorizonError as error:
        complete_entry(settings.database_path, replace(entry, outcome=error.reason, detail=error.message))
        raise
    if result.old_database is not None:
        complete_entry(result.old_database, replace(entry, outcome="OK"))
    click.echo(
        f"backup {result.backup.name} is restored to {settings.state_dir}: {result.num_restored} files put back, "
        f"{result.num_kept} were there; {result.num_requeued} jobs that ran then are queued again", err=True,
    )  # fmt: skip
    if result.old_database is not None:
        click.echo(f"the database that was there is {result.old_database}", err=True)
    click.echo(
        "next: horizond check; horizond token list (tokens revoked since the backup are valid again); horizond serve",
        err=True,
    )


@click.command("check")
@click.option("--full", is_flag=True, help="Read every byte and compare it with its sha256, instead of sizes only.")
@click.option("--backup-dir", type=_FOLDER, help="Check the backups in this folder instead of the state folder.")
@with_output_option
@with_settings_options
def check_command(full: bool, backup_dir: Path | None, output: str, config: Path | None, state_dir: Path | None) -> int:
    """Check the database, datasets, models and checkpoints, also while the daemon runs. Changes nothing.

    Exit code 1 when something is wrong; every line says what to do. Example: horizond check --full
    """
    if backup_dir is not None:
        report = check_backups(backup_dir, full=full)
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
