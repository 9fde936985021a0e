"""`horizon model`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from horizon_client.cli.completion import model_names
from horizon_client.cli.output import (
    View,
    age_text,
    bytes_text,
    count_text,
    limit_option,
    output_option,
    print_list,
    print_one,
    time_text,
)
from horizon_client.cli.reporter import PUSH_INTERRUPTED, TransferReporter
from horizon_client.cli.root import Commands
from horizon_client.cli.session import connected

if TYPE_CHECKING:
    from horizon_client.resources import Model
    from horizon_client.sync_client import Client

_NAME = click.argument("name", shell_complete=model_names)

_VIEW: View[Model] = View(
    columns=[
        ("NAME", lambda m: m.name),
        ("STATE", lambda m: m.state),
        ("ARCHITECTURE", lambda m: m.architecture or "-"),
        ("PARAMETERS", lambda m: count_text(m.num_parameters) if m.state == "READY" else "-"),
        ("SIZE", lambda m: bytes_text(m.size_bytes)),
        ("AGE", lambda m: age_text(m.create_time)),
    ],
    details=lambda m: [
        ("name", m.name),
        ("id", m.model_id),
        ("owner", m.owner),
        ("state", m.state),
        ("architecture", m.architecture or "-"),
        ("parameters", count_text(m.num_parameters) if m.state == "READY" else "-"),
        ("size", bytes_text(m.size_bytes)),
        ("files", ", ".join(f.path for f in m.files)),
        ("created", time_text(m.create_time)),
        ("digest", m.digest),
    ],
    name=lambda m: m.name,
)


@click.group(cls=Commands)
def model() -> None:
    """Push, list and delete model folders."""


@model.command(
    epilog="""\b
Example:
  horizon model push ./Qwen3-8B --name qwen3-8b

\b
Config, tokenizer and *.safetensors are pushed, pickle files never are. Content
that the server already has is not sent again; after an interruption the same
command continues."""
)
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False))
@click.option("--name", help="Name of the model. Default: the folder's name.")
@click.option(
    "--request-id", metavar="UUID", help="Repeating a request with the same id does not create a second model."
)
@output_option
@connected
def push(client: Client, folder: str, name: str | None, request_id: str | None, output: str) -> None:
    """Push a model folder."""
    from horizon_client.local_inputs import valid_name

    with TransferReporter(PUSH_INTERRUPTED) as reporter:
        result = client.models.push(
            folder, name=name or valid_name(Path(folder).expanduser()), request_id=request_id, reporter=reporter
        )
    click.echo(f"sent {bytes_text(result.sent_bytes)} of {bytes_text(result.model.size_bytes)}", err=True)
    print_one(result.model, _VIEW, output, plain=result)


@model.command(name="list", epilog="\b\nExample:\n  horizon model list")
@limit_option
@output_option
@connected
def list_models(client: Client, limit: int, output: str) -> None:
    """List your models, newest first."""
    print_list(client.models.list(limit=limit), _VIEW, output)


@model.command(epilog="\b\nExample:\n  horizon model get qwen3-8b -o yaml")
@_NAME
@output_option
@connected
def get(client: Client, name: str, output: str) -> None:
    """Show one model by name or id."""
    print_one(client.models.get(name), _VIEW, output)


@model.command(epilog="\b\nExample:\n  horizon model delete qwen3-8b")
@_NAME
@output_option
@connected
def delete(client: Client, name: str, output: str) -> None:
    """Delete a model that no active job needs."""
    gone = client.models.get(name)
    client.models.delete(gone.model_id)
    print_one(gone, _VIEW, output, message=f"deleted model {gone.name}")
