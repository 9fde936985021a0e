"""`horizon model`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from horizon_client.cli.datasets import RESUME_HINT
from horizon_client.cli.output import View, output_option, print_list, print_one, print_plain
from horizon_client.cli.root import Interrupted
from horizon_client.cli.session import connected
from horizon_client.cli.text import age_text, bytes_text, count_text, time_text
from horizon_client.cli.transfer_view import TransferView

if TYPE_CHECKING:
    from horizon_client.resources import Model
    from horizon_client.sync_client import Client

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


@click.group()
def model() -> None:
    """Push, list and delete model folders."""


@model.command(
    epilog="""\b
Example:
  horizon model push ./Qwen3-8B --name qwen3-8b

\b
Pushed are config, tokenizer and *.safetensors; pickle files never are. What
the server has already does not travel again, and after an interruption the
same command goes on where it stopped."""
)
@click.argument("folder", metavar="DIR")
@click.option("--name", help="Name of the model. Default: the folder's.")
@click.option("--request-id", metavar="UUID", help="Repeats with the same id make no second model.")
@output_option
@connected
def push(client: Client, folder: str, name: str | None, request_id: str | None, output: str) -> None:
    """Push a model folder."""
    from horizon_client.local_inputs import valid_name

    with TransferView() as view:
        try:
            result = client.models.push(
                folder,
                name=name or valid_name(Path(folder).expanduser()),
                request_id=request_id,
                on_progress=view.on_progress,
                on_notice=view.on_notice,
            )
        except KeyboardInterrupt:
            raise Interrupted(RESUME_HINT) from None
    click.echo(f"sent {bytes_text(result.sent_bytes)} of {bytes_text(result.model.size_bytes)}", err=True)
    if output in ("json", "yaml"):
        print_plain(result, output)
    else:
        print_one(result.model, _VIEW, output)


@model.command(name="list", epilog="\b\nExample:\n  horizon model list")
@click.option(
    "--limit", type=click.IntRange(min=1), default=100, show_default=True, help="At most so many, newest first."
)
@output_option
@connected
def list_models(client: Client, limit: int, output: str) -> None:
    """List your models, newest first."""
    print_list(client.models.list(limit=limit), _VIEW, output)


@model.command(epilog="\b\nExample:\n  horizon model get qwen3-8b -o yaml")
@click.argument("name")
@output_option
@connected
def get(client: Client, name: str, output: str) -> None:
    """Show one model by name or id."""
    print_one(client.models.get(name), _VIEW, output)


@model.command(epilog="\b\nExample:\n  horizon model delete qwen3-8b")
@click.argument("name")
@output_option
@connected
def delete(client: Client, name: str, output: str) -> None:
    """Delete a model that no job still needs."""
    gone = client.models.get(name)
    client.models.delete(gone.model_id)
    if output == "table":
        click.echo(f"deleted model {gone.name}")
    else:
        print_one(gone, _VIEW, output)
