"""The top of the command tree: commands that load on use, and the one place that turns errors into messages and exit
codes."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import click

from horizon_client.cli.output import clean
from horizon_client.errors import HorizonClientError, did_you_mean
from horizon_client.version import client_version

MAX_VIOLATIONS = 100
# As a shell reports a command that was ended by SIGINT, and by SIGPIPE
INTERRUPTED = 130
READER_GONE = 141

# The summaries are here too, so that `horizon --help` loads no command
_COMMANDS = {
    "login": ("account:login", "Log in to a daemon and save it as a profile."),
    "logout": ("account:logout", "Forget a daemon and its token."),
    "profile": ("account:profile", "List, choose and remove the daemons you logged in to."),
    "whoami": ("access:whoami", "Show who you are, and what your token allows."),
    "token": ("access:token", "Create, list and revoke your tokens."),
    "project": ("access:project", "List your projects, and manage their members."),
    "dataset": ("pushed:dataset", "Push, list, preview, share and delete datasets."),
    "model": ("pushed:model", "Push, list, share and delete model folders."),
    "job": ("jobs:job", "Plan, submit, watch and control fine-tuning jobs."),
    "queue": ("sharing:queue", "Show who waits for what, and simulate a job."),
    "usage": ("sharing:usage", "Show what you have used of the node."),
    "quota": ("sharing:quota", "Show your weight and quotas, and how much of them is used."),
    "top": ("top:top", "Show the machine and its jobs, live."),
    "plan": ("plan:plan", "Predict a job's speed and memory on a machine that you do not have."),
    "checkpoint": (
        "checkpoints:checkpoint",
        "List, pull, merge, publish, evaluate, sample, chat with, keep and delete the checkpoints of a job.",
    ),
    "webhook": ("webhooks:webhook", "Tell another program, or a chat, when the state of a job changes."),
    "node": ("node:node", "Show the machine that the daemon runs on, and drain it for maintenance."),
    "mcp": ("mcp.command:mcp", "Let an AI assistant look at your jobs, over the Model Context Protocol."),
    "version": ("node:version", "Print the versions of client and server."),
    "completion": ("completion:completion", "Print the completion script for your shell."),
}


class Interrupted(Exception):
    """The user pressed Ctrl-C; the text says what continues and how to resume."""


# Not an OSError, which click would turn into exit code 1
class _ReaderGone(Exception):
    """The program that read our output has ended."""


class Commands(click.Group):
    """A group of commands that suggests a similar name for an unknown one."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that `args` names."""
        name = args[0]
        # A completion at the TAB key must not fail on a half-typed name
        if ctx.resilient_parsing or name.startswith("-") or self.get_command(ctx, name) is not None:
            return super().resolve_command(ctx, args)
        known = self.list_commands(ctx)
        hint = did_you_mean(name, known) or f"commands: {', '.join(known)}"
        raise click.UsageError(f"{name!r} is not a command of {ctx.command_path}; {hint}", ctx)


class RootGroup(Commands):
    """Loads a command when it is used, and turns every failure into a message on stderr and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of the help."""
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Load one command."""
        if cmd_name not in _COMMANDS:
            return None
        module, _, attribute = _COMMANDS[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(f"horizon_client.cli.{module}"), attribute)
        assert isinstance(command, click.Command)  # noqa: S101 - the table above is ours
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands from the table, without loading them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in _COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command that was parsed."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()  # a reader that is gone is noticed here, not after the exit code is decided
        except BrokenPipeError:
            raise _ReaderGone from None
        return result

    def main(  # type: ignore[override]
        self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any
    ) -> NoReturn:
        """Run a command line and exit with its code."""
        code: object = 0
        try:
            # Standalone, click would print errors in its own words and choose the exit codes
            code = super().main(args, prog_name, **{**extra, "standalone_mode": False})
        except HorizonClientError as error:
            show_error(error)
            code = error.exit_code
        except Interrupted as error:
            click.echo(f"\n{error}", err=True)
            code = INTERRUPTED
        except click.Abort:  # click's own Ctrl-C, where no command has said what continues
            click.echo("interrupted", err=True)
            code = INTERRUPTED
        except click.ClickException as error:
            error.show()
            code = 2
        except _ReaderGone:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the interpreter flushes stdout once more when it exits
            code = READER_GONE
        sys.exit(code if isinstance(code, int) else 0)  # a command may return its exit code


def show_error(error: HorizonClientError) -> None:
    """Print the message, then the violations that it does not contain, one per line."""
    click.echo(f"Error: {error_text(error)}", err=True)


def error_text(error: HorizonClientError) -> str:
    """Return the message, then the violations that it does not contain, one per line."""
    message = clean(error.message)
    # A single violation is usually the message itself, and of several it has the first
    more = [text for violation in error.violations if (text := clean(violation.description)) not in message]
    cut = [f"... and {len(more) - MAX_VIOLATIONS} more"] if len(more) > MAX_VIOLATIONS else []
    return "\n  ".join([message, *more[:MAX_VIOLATIONS], *cut])


def connection_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that choose the daemon to a command."""
    for option in (
        click.option("--profile", "profile_name", metavar="NAME", help="Profile to use."),
        click.option(
            "--ca",
            type=click.Path(),
            metavar="FILE",
            help="The daemon's CA file, or 'system' for a public certificate.",
        ),
        click.option("--token-file", type=click.Path(), metavar="FILE", help="File that contains your token."),
        click.option("--server", metavar="HOST:PORT", help="Address of the daemon."),
    ):
        command = option(command)
    return command


def _print_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        click.echo(f"horizon {client_version()}")
        ctx.exit()


@click.group(
    cls=RootGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="""\b
Exit codes:
    0  ok
    1  the job failed, or the planned job does not fit
    2  wrong usage, or the request cannot be carried out
    3  not authenticated or not allowed
    4  not found
    5  the server is unreachable, too slow or failed
  130  interrupted
  141  the program that reads the output has ended

\b
Configuration, first wins: option, environment (HORIZON_SERVER, HORIZON_TOKEN,
HORIZON_CA, HORIZON_PROFILE; HORIZON_CONFIG_DIR for the folder), profile.

\b
Example:
  horizon login gpubox:7171 --token-file token.txt --ca ca.pem
  horizon job submit job.yaml --watch
  horizon checkpoint pull JOB@best --to ./tuned""",
)
@connection_options
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Print the version."
)
@click.pass_context
def horizon(ctx: click.Context, /, **options: str | None) -> None:
    """Fine-tune language models on a shared machine.

    horizon sends your model and your data to a machine that runs horizond. That machine trains the model. You watch the
    training from here and download the result. Without a command, horizon shows your jobs and the machine.
    """
    if ctx.invoked_subcommand is None:
        from horizon_client.cli.home import show_home  # only here, so that `horizon --help` loads no view

        show_home(ctx)
