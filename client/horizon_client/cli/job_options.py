"""What commands about jobs take: a job, a job file, and changes of its fields."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, cast

import click

from horizon_client.cli.completion import job_names, spec_keys
from horizon_client.errors import InvalidRequest

if TYPE_CHECKING:
    from horizon_client.job_spec import SpecLike

JOB_ARGUMENT = click.argument("job_id", metavar="JOB", shell_complete=job_names)
JOBS_ARGUMENT = click.argument("job_ids", metavar="JOB...", nargs=-1, required=True, shell_complete=job_names)
SPEC_ARGUMENT = click.argument("spec", metavar="SPEC.yaml", type=click.Path(allow_dash=True))
SET_OPTION = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="FIELD=VALUE",
    shell_complete=spec_keys,
    help="Change a field, such as train.learning_rate=1e-5 (repeatable).",
)
NO_PUSH_OPTION = click.option(
    "--no-push", is_flag=True, help="Send model and dataset as written, even if local files have these names."
)


def read_spec(text: str) -> SpecLike:
    """Return the path, or the mapping on stdin, whatever it holds."""
    if text != "-":
        return text
    from horizon_client.job_spec import parse_spec  # only here, because it loads grpc

    try:
        # YAML, which JSON is a part of
        return cast("SpecLike", parse_spec(sys.stdin.read(), name="stdin"))
    except UnicodeDecodeError as error:
        raise InvalidRequest("stdin is not UTF-8 text") from error
