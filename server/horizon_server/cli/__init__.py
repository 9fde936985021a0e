"""The `horizond` command line: what an administrator types on the node. Works beside a running daemon."""

from __future__ import annotations

import sys

import click

from horizon_server.cli.accounts import token_group, user_group
from horizon_server.cli.demo import demo
from horizon_server.cli.doctor import doctor
from horizon_server.cli.plan import plan
from horizon_server.cli.serve import serve
from horizon_server.errors import HorizonError, NotAllowed, NotFound, Unauthenticated
from horizon_server.version import VERSION


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(VERSION, prog_name="horizond")
def horizond() -> None:
    """Run and administer horizon on the machine with the GPU.

    horizon fine-tunes language models that are far larger than the GPU's memory; users submit jobs from their laptops with 'horizon'.

    First steps: horizond doctor; horizond serve; horizond user add ada; horizond token create ada
    """


for _command in (serve, demo, user_group, token_group, plan, doctor):
    horizond.add_command(_command)


def run() -> int:
    """Run the command line; errors for users are one message on stderr."""
    try:
        code = horizond.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return 2
    except click.Abort:
        sys.stderr.write("interrupted\n")
        return 130
    except HorizonError as error:
        sys.stderr.write(f"error: {error.message}\n")
        for violation in error.violations[1:100]:
            sys.stderr.write(f"  {violation.description}\n")
        return exit_code(error)
    return code if isinstance(code, int) else 0


def exit_code(error: HorizonError) -> int:
    """Return the exit code of an error: 3 not allowed, 4 not found, 2 everything else a user can mend."""
    if isinstance(error, Unauthenticated | NotAllowed):
        return 3
    return 4 if isinstance(error, NotFound) else 2
