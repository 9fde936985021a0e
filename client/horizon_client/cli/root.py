"""The top of the command tree: lazy sub-commands, and the one place that turns errors into sentences and exit codes."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from horizon_client.cli.text import clean
from horizon_client.errors import HorizonClientError

MAX_VIOLATIONS = 100
INTERRUPTED = 130

_COMMANDS = {
    "login": ("login:login", "Log in to a daemon and remember it as a profile."),
    "profile": ("login:profile", "List the daemons you logged in to, and choose one."),
    "dataset": ("datasets:dataset", "Push, list, preview and delete datasets."),
    "model": ("models:model", "Push, list and delete model folders."),
    "job": ("jobs:job", "Plan, submit, watch and steer fine-tuning jobs."),
    "checkpoint": ("checkpoints:checkpoint", "List, pull and delete what a job has written."),
    "node": ("node:node", "Show the machine the daemon runs on."),
    "version": ("node:version", "Print the versions of client and server."),
    "completion": ("completion:completion", "Print the completion script of your shell."),
}


class Interrupted(Exception):
    """The user pressed Ctrl-C; the text says what goes on and how to come back."""


class RootGroup(click.Group):
    """Loads a sub-command when it is named, and ends every failure in one sentence on stderr."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of the help."""
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Load one sub-command."""
        if cmd_name not in _COMMANDS:
            return None
        module, _, attribute = _COMMANDS[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(f"horizon_client.cli.{module}"), attribute)
        assert isinstance(command, click.Command)  # noqa: S101 - the table above is ours
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the command list from the table, without loading any command."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in _COMMANDS.items()])

    def main(  # type: ignore[override]
        self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any
    ) -> NoReturn:
        """Run a command line and leave with its exit code."""
        extra["standalone_mode"] = False
        sys.exit(self._exit_code(args, prog_name, extra))

    def _exit_code(self, args: Sequence[str] | None, prog_name: str | None, extra: dict[str, Any]) -> int:
        """Return the exit code; a command that has one of its own returns it."""
        try:
            code = super().main(args, prog_name, **extra)
            sys.stdout.flush()
        except HorizonClientError as error:
            show_error(error)
            return error.exit_code
        except Interrupted as error:
            click.echo(f"\n{error}", err=True)
            return INTERRUPTED
        except click.Abort:
            click.echo("interrupted", err=True)
            return INTERRUPTED
        except click.ClickException as error:
            error.show()
            return 2
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the reader has gone; keep the interpreter's last flush quiet
            return 0
        return code if isinstance(code, int) else 0


def show_error(error: HorizonClientError) -> None:
    """Print the sentence, then the violations that say more than the sentence, one a line."""
    click.echo(f"Error: {clean(error.message)}", err=True)
    for violation in error.violations[:MAX_VIOLATIONS]:
        field, description = clean(violation.field), clean(violation.description)
        if description != clean(error.message):
            click.echo(f"  {description}" if description.startswith(field) else f"  {field}: {description}", err=True)
    if len(error.violations) > MAX_VIOLATIONS:
        click.echo(f"  ... and {len(error.violations) - MAX_VIOLATIONS} more", err=True)


@click.group(
    cls=RootGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="""\b
Exit codes:
  0  ok                     3  not authenticated or not allowed
  1  the job failed         4  not found
  2  usage, or the request  5  the server is unreachable, too slow
     cannot be carried out     or failed
                          130  interrupted

\b
Configuration, first wins: flag, environment (HORIZON_SERVER, HORIZON_TOKEN,
HORIZON_CA, HORIZON_PROFILE; HORIZON_CONFIG_DIR for the folder), profile file.

\b
Example:
  horizon login gpubox:7171 --token-file token.txt --ca ca.pem
  horizon dataset push train.jsonl --name notes
  horizon job submit job.yaml --watch
  horizon checkpoint pull JOB@best --to ./tuned""",
)
@click.option("--server", metavar="HOST:PORT", help="The daemon to speak to.")
@click.option("--token-file", metavar="FILE", help="File that holds your token.")
@click.option("--ca", metavar="FILE", help="CA file of the daemon, or the word 'system'.")
@click.option("--profile", "profile_name", metavar="NAME", help="Profile to use.")
@click.pass_context
def horizon(
    ctx: click.Context, server: str | None, token_file: str | None, ca: str | None, profile_name: str | None
) -> None:
    """Fine-tune language models on a shared machine, from anywhere."""
    ctx.obj = {"server": server, "token_file": token_file, "ca": ca, "profile_name": profile_name}
