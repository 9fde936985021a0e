"""The `horizond` command line: what an administrator types on the node. Works while the daemon runs."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from horizon_server.cli.accounts import token_group, user_group
from horizon_server.cli.allowances import project_group
from horizon_server.cli.audit import audit
from horizon_server.cli.doctor import doctor
from horizon_server.cli.housekeeping import gc
from horizon_server.cli.maintenance import backup_command, check_command, restore_command
from horizon_server.cli.models import model_group
from horizon_server.cli.nodes import node_group
from horizon_server.cli.options import Commands, with_settings_options
from horizon_server.cli.plan import plan
from horizon_server.errors import HorizonError, NotAllowed, NotFound, Unauthenticated
from horizon_server.imports import seldom_collecting
from horizon_server.settings import load_settings, quiet_libraries
from horizon_server.version import VERSION


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(VERSION, prog_name="horizond")
def horizond() -> None:
    """Run and administer horizon on the machine with the GPU.

    horizon fine-tunes language models that are far larger than the GPU's memory; users submit jobs from their laptops
    with 'horizon'.

    First steps: horizond doctor; horizond serve; horizond user add ada; horizond token create ada
    """


@horizond.command()
@click.option("--grpc", metavar="HOST:PORT", help="Address of the gRPC interface. [default: 127.0.0.1:7171]")
@click.option("--http", metavar="HOST:PORT", help="Address of REST, web page and /metrics. [default: 127.0.0.1:7172]")
@click.option(
    "--tls-name",
    "tls_names",
    multiple=True,
    metavar="NAME",
    help="Host name or address that clients connect to, for the certificate (repeatable).",
)
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), help="[default: info]")
@click.option("--log-json", is_flag=True, default=None, help="One JSON object per line.")
@with_settings_options
def serve(config: Path | None, state_dir: Path | None, tls_names: tuple[str, ...], **flags: str | bool | None) -> int:
    """Run the daemon in the foreground.

    SIGTERM ends the daemon alone: workers train on, and the next daemon takes them over. Ctrl-C ends everything:
    running jobs are checkpointed, and continue when the daemon is back. Exit code 0.

    Beyond loopback it speaks TLS only. On the first start it makes a certificate for this machine's name and every
    --tls-name, and prints the CA file that clients need.
    """
    settings = load_settings(config, state_dir=state_dir, tls_names=tls_names or None, **flags)
    quiet_libraries()
    # Only this command and the demo need the whole daemon; the others answer sooner without its imports.
    with seldom_collecting():
        from horizon_server.main import run_daemon

    return run_daemon(settings)


@horizond.command()
@click.option(
    "--output-dir",
    type=click.Path(path_type=Path),
    default=Path("demo-output"),
    show_default=True,
    help="Folder of the tuned model. Replaced each time.",
)
@click.option("--max-steps", type=click.IntRange(min=2), help="Number of optimizer steps, instead of the recipe's.")
@click.option("--config", type=click.Path(path_type=Path), help="TOML file of the demo's own daemon.")
@click.option(
    "--state-dir", type=click.Path(path_type=Path), help="Folder to keep the daemon's state in, instead of deleting it."
)
def demo(output_dir: Path, max_steps: int | None, config: Path | None, state_dir: Path | None) -> int:
    """Run a whole fine-tuning job on this machine.

    Daemon, login, upload, training, download and proof, in minutes on two cores.
    Needs no GPU and no network. Exit code 0 only when the loss fell and plain transformers gives the same loss.
    """
    from horizon_server.demo.run import run_demo

    return run_demo(output_dir=output_dir, max_steps=max_steps, config=config, state_dir=state_dir)


_COMMANDS = (
    user_group,
    project_group,
    token_group,
    model_group,
    node_group,
    audit,
    gc,
    plan,
    doctor,
    backup_command,
    restore_command,
    check_command,
)
for _command in _COMMANDS:
    horizond.add_command(_command)


def run() -> int:
    """Run the command line; errors for users are one message on stderr."""
    try:
        # Standalone, click would exit by itself with 1 for every error that it does not know.
        code = horizond.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return 2
    except click.Abort:
        sys.stderr.write("interrupted\n")
        return 130
    except HorizonError as error:
        sys.stderr.write(f"Error: {error.message}\n")
        # The first one is the message itself.
        for violation in error.violations[1:100]:
            sys.stderr.write(f"  {violation.description}\n")
        return exit_code(error)
    return code if isinstance(code, int) else 0


def exit_code(error: HorizonError) -> int:
    """Return the exit code of an error: 3 not allowed, 4 not found, 2 everything else that a user can fix."""
    if isinstance(error, Unauthenticated | NotAllowed):
        return 3
    return 4 if isinstance(error, NotFound) else 2
