"""`horizon dataset` and `horizon model`: what is pushed, and rows as a model sees them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from horizon_client.choices import DATASET_FORMATS, METHODS, TRAIN_ON
from horizon_client.cli.access import add_share_commands
from horizon_client.cli.completion import Completer, dataset_names, model_names
from horizon_client.cli.deletion import add_delete
from horizon_client.cli.output import (
    View,
    age_text,
    bytes_text,
    limit_option,
    output_option,
    print_list,
    print_one,
    print_result,
    time_text,
)
from horizon_client.cli.preview_page import place_of, preview_page
from horizon_client.cli.root import Commands
from horizon_client.cli.session import TransferReporter, connected

if TYPE_CHECKING:
    from horizon_client.pushed import DatasetPush, ModelPush
    from horizon_client.sync_client import Client

_PUSH_INTERRUPTED = "interrupted; what the server has is kept: the same command continues from there"
_MAPPING = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.+")


@click.group(cls=Commands)
def dataset() -> None:
    """Push, list, preview, share and delete datasets."""


@click.group(cls=Commands)
def model() -> None:
    """Push, list, share and delete model folders."""


def _view(
    kind: str, columns: Sequence[tuple[str, Callable[[Any], str]]], facts: Callable[[Any], Sequence[tuple[str, str]]]
) -> View[Any]:
    """Return how datasets or models are shown: what both have, around what only this kind has."""
    return View(
        columns=[
            ("NAME", lambda item: item.name),
            ("OWNER", lambda item: item.owner),
            ("STATE", lambda item: item.state),
            *columns,
            ("SIZE", lambda item: bytes_text(item.size_bytes)),
            ("AGE", lambda item: age_text(item.create_time)),
        ],
        details=lambda item: [
            ("name", item.name),
            ("id", getattr(item, f"{kind}_id")),
            ("owner", item.owner),
            ("state", item.state),
            *facts(item),
            ("size", bytes_text(item.size_bytes)),
            ("files", ", ".join(file.path for file in item.files)),
            ("shared with", ", ".join("everyone" if one == "*" else one for one in item.shared_with)),
            ("created", time_text(item.create_time)),
            ("digest", item.digest),
        ],
        name=lambda item: item.name,
    )


def _count(item: Any, number: int) -> str:
    return f"{number:,}" if item.state == "READY" else "-"


DATASET_VIEW = _view(
    "dataset",
    [("FORMAT", lambda d: d.format or "-"), ("ROWS", lambda d: _count(d, d.num_rows))],
    lambda d: [
        ("format", d.format or "-"),
        ("kind", d.data_kind or "-"),
        *([("map", ", ".join(f"{k}={v}" for k, v in d.field_map.items()))] if d.field_map else []),
        ("rows", _count(d, d.num_rows)),
    ],
)
MODEL_VIEW = _view(
    "model",
    [("ARCHITECTURE", lambda m: m.architecture or "-"), ("PARAMETERS", lambda m: _count(m, m.num_parameters))],
    lambda m: [("architecture", m.architecture or "-"), ("parameters", _count(m, m.num_parameters))],
)


def _add_commands(group: click.Group, view: View[Any], complete: Completer, examples: dict[str, str]) -> None:
    """Add `list`, `get` and `delete`, which are the same for datasets and models."""
    kind = str(group.name)
    name_argument = click.argument("name", shell_complete=complete)

    def command(name: str, summary: str) -> Callable[[Callable[..., None]], click.Command]:
        example = f"\b\nExample:\n  horizon {kind} {name}{examples[name]}"
        return group.command(name=name, help=summary, epilog=example)

    @command("list", f"List your {kind}s, newest first.")
    @limit_option
    @output_option
    @connected
    def _list(client: Client, limit: int, output: str) -> None:
        print_list(getattr(client, f"{kind}s").list(limit=limit), view, output)

    @command("get", f"Show one {kind} by name or id.")
    @name_argument
    @output_option
    @connected
    def _get(client: Client, name: str, output: str) -> None:
        print_one(getattr(client, f"{kind}s").get(name), view, output)

    add_delete(group, kind, complete, examples["delete"])


_add_commands(dataset, DATASET_VIEW, dataset_names, {"list": " -o json", "get": " notes", "delete": "notes"})
_add_commands(model, MODEL_VIEW, model_names, {"list": "", "get": " qwen3-8b -o yaml", "delete": "qwen3-8b"})
add_share_commands(dataset, dataset_names)
add_share_commands(model, model_names)


@model.command(
    name="push",
    epilog="""\b
Example:
  horizon model push ./Qwen3-8B --name qwen3-8b

\b
Config, tokenizer and *.safetensors are pushed, pickle files never are. Content
that the server already has is not sent again; after an interruption the same
command continues.""",
)
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False))
@click.option("--name", help="Name of the model. Default: the folder's name.")
@click.option(
    "--request-id", metavar="UUID", help="Repeating a request with the same id does not create a second model."
)
@output_option
@connected
def push_model(client: Client, folder: str, name: str | None, request_id: str | None, output: str) -> None:
    """Push a model folder."""
    from horizon_client.local_files import valid_name

    name = name or valid_name(Path(folder).expanduser())
    with TransferReporter(_PUSH_INTERRUPTED) as reporter:
        result = client.models.push(folder, name=name, request_id=request_id, reporter=reporter)
    _print_push(result, result.model, MODEL_VIEW, output)


@dataset.command(
    name="push",
    epilog="""\b
Example:
  horizon dataset push train.jsonl --name notes
  horizon dataset push gsm8k.parquet --name gsm8k --map prompt=question --map completion=answer
  horizon dataset push corpus/ --name corpus

\b
Files: .jsonl .ndjson .json .txt, also with .gz or .zst, and .parquet; a folder
means the data files in it and in its subfolders. Content that the server
already has is not sent again; after an interruption the same command continues.""",
)
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path())
@click.option("--name", help="Name of the dataset. Default: the first file's name without its endings.")
@click.option(
    "--format",
    "format_",
    type=click.Choice(DATASET_FORMATS),
    default="auto",
    show_default=True,
    help="Format of the rows.",
)
@click.option(
    "--map", "mappings", multiple=True, metavar="FIELD=COLUMN", help="Use this column for a field (repeatable)."
)
@click.option(
    "--request-id", metavar="UUID", help="Repeating a request with the same id does not create a second dataset."
)
@output_option
@connected
def push_dataset(
    client: Client,
    files: tuple[str, ...],
    name: str | None,
    format_: str,
    mappings: tuple[str, ...],
    request_id: str | None,
    output: str,
) -> None:
    """Push data files as one dataset.

    Every row is checked before the dataset is READY.
    """
    from horizon_client.local_files import valid_name

    # With --map, an argument `a=b` that is not a file is a further mapping
    further = [f for f in files if mappings and _MAPPING.fullmatch(f) and not Path(f).exists()]
    paths = [f for f in files if f not in further]
    if not paths:
        raise click.UsageError("Missing argument 'FILE...'.")
    field_map = field_map_of((*mappings, *further))
    with TransferReporter(_PUSH_INTERRUPTED) as reporter:
        result = client.datasets.push(
            paths,
            name=name or valid_name(Path(paths[0])),
            format=format_,
            field_map=field_map,
            request_id=request_id,
            reporter=reporter,
        )
    _print_push(result, result.dataset, DATASET_VIEW, output)


def field_map_of(mappings: Iterable[str]) -> dict[str, str]:
    """Return what `--map field=column` says. Raises click.UsageError for one that is written otherwise, or a field
    twice."""
    field_map: dict[str, str] = {}
    for mapping in mappings:
        field, separator, column = mapping.partition("=")
        if not separator or not field or not column:
            raise click.UsageError(f"--map {mapping}: write it as field=column, such as prompt=question")
        if field in field_map:
            raise click.UsageError(f"--map names the field {field!r} twice")
        field_map[field] = column
    return field_map


def _print_push(result: DatasetPush | ModelPush, item: Any, view: View[Any], output: str) -> None:
    click.echo(f"sent {bytes_text(result.sent_bytes)} of {bytes_text(item.size_bytes)}", err=True)
    print_one(item, view, output, plain=result)


@dataset.command(
    epilog="""\b
Example:
  horizon dataset preview notes --model tiny-base -n 2
  horizon dataset preview notes --model tiny-base --offset 6173 -n 1 --train-on last-assistant

Trained text is green on a terminal. Elsewhere, and with NO_COLOR, it is
between [[ and ]]. What is chosen and what is rejected stand side by side on
a terminal of 100 columns, else one after the other."""
)
@click.argument("name", shell_complete=dataset_names)
@click.option(
    "--model",
    required=True,
    shell_complete=model_names,
    help="Name of the pushed model whose chat template and tokenizer render the rows.",
)
@click.option(
    "-n", "--rows", "num_rows", type=click.IntRange(1, 100), default=3, show_default=True, help="Number of rows."
)
@click.option("--offset", type=click.IntRange(0), default=0, show_default=True, help="Number of rows to skip.")
@click.option(
    "--train-on", type=click.Choice(TRAIN_ON), default="assistant", show_default=True, help="As in the job spec."
)
@click.option("--method", type=click.Choice(METHODS), default="sft", show_default=True, help="As in the job spec.")
@click.option(
    "--sequence-length", type=click.IntRange(8), default=1024, show_default=True, help="Longest row in tokens."
)
@output_option
@connected
def preview(client: Client, name: str, output: str, **options: Any) -> None:
    """Show rows as the model sees them, with the trained part marked."""
    shown = client.datasets.preview(name, **options)
    print_result(shown, output, names=map(place_of, shown.rows), page=lambda: preview_page(name, shown))
