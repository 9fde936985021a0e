"""`horizond model`: models of the Hugging Face hub for everybody on the node, with or without a running daemon."""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from horizon_formats.model_files import is_hub_id
from horizon_server.blobs.space import Space
from horizon_server.cli.options import (
    Commands,
    in_database,
    print_rows,
    with_output_option,
    with_settings_options,
)
from horizon_server.db.database import Database
from horizon_server.db.pushed import ModelStore
from horizon_server.errors import BadSetting, InvalidSpec, TooLarge
from horizon_server.records.account import EVERYONE
from horizon_server.records.blob import ModelRecord
from horizon_server.settings import Settings, child_environment, load_settings
from horizon_server.spec import NAME_PATTERN, NAME_RULE
from horizon_server.texts import size_text

if TYPE_CHECKING:
    from horizon_server.api.services import Services
    from horizon_server.hub import HubModel
    from horizon_server.services.model_check import ModelFacts

Result = TypeVar("Result")

_COLUMNS = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())

_OPEN_LICENCES = frozenset({"apache-2.0", "mit", "bsd-2-clause", "bsd-3-clause", "cc0-1.0", "cc-by-4.0", "unlicense"})
"""Licences that `--yes` accepts without a word: they put no limit on who may use a model, or for what."""


@click.group(cls=Commands, name="model")
def model_group() -> None:
    """Add and list models that everybody on the node may use."""


@model_group.command("add")
@click.argument("hub_id", metavar="ORG/NAME")
@click.option("--revision", metavar="REV", help="Branch, tag or commit. [default: the repository's default branch]")
@click.option("--name", help="Name by which jobs mean it. [default: its id]")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@click.option(
    "--allow-licence",
    "licences",
    multiple=True,
    metavar="LICENCE",
    help="With --yes, also accept this licence, as its page names it (repeatable); none: one that names no licence.",
)
@with_settings_options
def model_add(
    hub_id: str,
    revision: str | None,
    name: str | None,
    yes: bool,
    licences: tuple[str, ...],
    config: Path | None,
    state_dir: Path | None,
) -> None:
    """Fetch a model of the Hugging Face hub for everybody on this node.

    Shows its commit, licence, architecture and size, and asks, before any weight is fetched. Takes config, tokenizer,
    texts and safetensors; never code or pickles. Each file is compared with the hash that the hub gives. After an
    interruption the same command continues. A job file then says 'model: ORG/NAME'.

    A gated or private model needs the account's token: hf auth login, or HF_TOKEN in the environment. Without a network
    the account's own Hugging Face cache is used. An admin deletes a model with: horizon model delete ORG/NAME.

    \b
    Example:
      horizond model add Qwen/Qwen3-8B
      horizond model add meta-llama/Llama-3.1-8B --yes --allow-licence llama3.1
    """
    settings = load_settings(config, state_dir=state_dir)
    if not is_hub_id(hub_id):
        raise InvalidSpec(f"{hub_id!r:.100} is not the id of a model on the hub: write ORG/NAME, such as Qwen/Qwen3-8B")
    if name is not None and not NAME_PATTERN.fullmatch(name):
        raise InvalidSpec.of("name", f"name is {name!r:.80}; it must be {NAME_RULE}")
    # Only here: the other commands answer sooner without these imports.
    from horizon_server.hub import fetch_model, find_model
    from horizon_server.services.housekeeping.caches import HUB_FOLDER
    from horizon_server.services.hub_models import add_model, known_model

    with_services = partial(_with_services, config, state_dir, settings)

    async def require_database(_: Services) -> None:
        """One that cannot be read is refused before the hub is asked."""

    with_services(require_database, only_look=True)
    model = find_model(hub_id, revision)
    name = name or model.repo
    known = with_services(lambda services: known_model(services.models, model, name), only_look=True)
    if known is not None:
        click.echo(f"model {name} is here already, of commit {model.commit}", err=True)
        click.echo(name)
        return
    facts = _checked(model)
    space = Space(settings.state_dir, settings.min_free_bytes)
    folder = settings.state_dir / HUB_FOLDER / model.repo.replace("/", "--") / model.commit
    here_bytes = sum((folder / file.path).stat().st_size for file in model.files if (folder / file.path).is_file())
    for line in _facts_lines(model, facts, name, settings=settings, free_bytes=space.free_bytes):
        click.echo(line, err=True)
    if model.size_bytes > settings.max_model_bytes:
        raise TooLarge(
            f"{model.repo} has {size_text(model.size_bytes)}; this node takes models of at most "
            f"{size_text(settings.max_model_bytes)} (setting max_model_bytes)"
        )
    space.require(model.size_bytes - here_bytes, f"model {model.repo}")
    _ask(model, yes=yes, licences=licences)
    with Progress(*_COLUMNS, console=Console(stderr=True)) as progress:
        task = progress.add_task(model.repo, total=model.size_bytes)
        files = fetch_model(model, folder, advance=lambda num_bytes: progress.advance(task, num_bytes))

    async def add(services: Services) -> ModelRecord:
        return await add_model(services.models, services.blobs, files, name=name, folder=folder)

    record = with_services(add)
    # Its files have other names by now, in the blob store.
    shutil.rmtree(folder.parent, ignore_errors=True)
    click.echo(
        f"model {record.name} is ready for everybody: {record.architecture}, {record.num_parameters:,} parameters; a "
        f"job file says 'model: {record.name}'",
        err=True,
    )
    click.echo(record.name)


@model_group.command("list")
@with_output_option
@with_settings_options
def model_list(output: str, config: Path | None, state_dir: Path | None) -> None:
    """List all models of the node, of all users."""

    async def read(database: Database) -> list[ModelRecord]:
        store, found, token = ModelStore(database), list[ModelRecord](), ""
        while True:
            page, token = await store.page(owner=None, limit=1000, token=token)
            found += page
            if not token:
                return found

    rows = [
        {
            "name": record.name,
            "owner": record.owner,
            "id": record.model_id,
            "state": record.state,
            "architecture": record.architecture,
            "parameters": record.num_parameters,
            "size": size_text(record.size_bytes),
            "shared_with": ", ".join("everybody" if name == EVERYONE else name for name in record.shared_with),
        }
        for record in in_database(config, state_dir, read)
    ]
    print_rows(rows, output, name_key="name")


def _with_services(
    config: Path | None,
    state_dir: Path | None,
    settings: Settings,
    call: Callable[[Services], Awaitable[Result]],
    *,
    only_look: bool = False,
) -> Result:
    """Return what `call` returns of the daemon's services, over its database."""
    from horizon_server.wiring import wire

    async def wired(database: Database) -> Result:
        parts = await wire(settings, database, found=(), usable=())
        return await call(parts.services)

    return in_database(config, state_dir, wired, only_look=only_look)


def _checked(model: HubModel) -> ModelFacts:
    """What the config and the headers of the weights say; before any weight is fetched."""
    from horizon_server.hub import write_model_outline
    from horizon_server.services.hub_models import check_outline
    from horizon_server.services.model_child import try_model

    with tempfile.TemporaryDirectory(prefix="horizond-model-") as folder:
        outline = write_model_outline(model, Path(folder))
        return asyncio.run(check_outline(outline, partial(try_model, environment=child_environment())))


def _facts_lines(model: HubModel, facts: ModelFacts, name: str, *, settings: Settings, free_bytes: int) -> list[str]:
    source = "" if model.snapshot is None else " (from this account's Hugging Face cache; the hub does not answer)"
    return [
        f"model         {model.repo}{source}",
        f"commit        {model.commit}",
        f"licence       {model.licence or 'not named'}",
        f"architecture  {facts['architecture']}, {facts['num_parameters']:,} parameters; can be trained here",
        f"size          {size_text(model.size_bytes)} in {len(model.files)} files",
        f"free          {size_text(free_bytes)} on the disk of {settings.state_dir}, besides the daemon's reserve",
        f"name          {name}; every user of this node may use it",
    ]


def _ask(model: HubModel, *, yes: bool, licences: tuple[str, ...]) -> None:
    """Have the administrator agree to size and licence, or refuse where nobody can."""
    licence = model.licence or "none"
    if yes:
        # A script must not accept terms that nobody has read.
        if licence not in _OPEN_LICENCES and licence not in licences:
            raise BadSetting(
                f"the licence of {model.repo} is {licence}; read it (https://huggingface.co/{model.repo}), and accept "
                f"it with --allow-licence {licence}"
            )
        return
    if not sys.stdin.isatty():
        raise BadSetting(f"nobody can be asked here whether to fetch {model.repo}; add --yes")
    click.confirm("Fetch it?", abort=True, err=True)
