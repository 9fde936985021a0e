"""`horizon job import`."""

from __future__ import annotations

from pathlib import Path

import click

from horizon_client.choices import METHODS
from horizon_client.cli.output import clean
from horizon_client.errors import BadFile

_TOOLS = ("axolotl", "llama-factory", "trl", "transformers")


@click.command(
    name="import",
    epilog="""\b
Example:
  horizon job import axolotl.yaml --to job.yaml
  horizon job import dpo_config.yaml --method dpo --gpus 8 --to job.yaml

\b
Exit code 0 when everything that matters was carried over, 1 when something was
not: the job file is written in both cases and says it at its end.""",
)
@click.argument("config", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--to", "target", type=click.Path(path_type=Path), help="Write it to this file, which must not exist.")
@click.option(
    "--from",
    "tool",
    type=click.Choice(_TOOLS),
    help="The tool that the config is for. Default: recognised by its field names.",
)
@click.option(
    "--method", type=click.Choice(METHODS), help="The method of the trainer, where the config does not say it."
)
@click.option(
    "--gpus",
    "num_gpus",
    type=click.IntRange(1, 65536),
    default=1,
    show_default=True,
    help="How many GPUs the config was for, which a step's rows are counted by.",
)
def import_config(config: Path, target: Path | None, tool: str | None, method: str | None, num_gpus: int) -> int:
    """Make a job file from the config of Axolotl, LLaMA-Factory, TRL or TrainingArguments.

    Says of every setting what became of it. Nothing is sent to the server.
    """
    from horizon_client.importing import convert, read_config, tool_of  # only here, because it loads yaml

    given = read_config(config)
    found = tool_of(given, named=tool or "", file=str(config))
    imported = convert(given, found, file=str(config), method=method or "", num_gpus=num_gpus)
    if target is None:
        click.echo(imported.job_file(), nl=False)
    else:
        try:
            with target.open("x", encoding="utf-8") as file:
                file.write(imported.job_file())
        except FileExistsError:
            raise BadFile(f"{target} exists; choose another name") from None
        except OSError as error:
            raise BadFile(f"cannot write {target}: {error.strerror}") from error
    click.echo(f"{config} is a config of {found.name}", err=True)
    for outcome, lines in imported.grouped():
        click.echo(f"{outcome.value}:", err=True)
        for line in lines:
            click.echo(f"  {clean(str(line))}", err=True)
    if target is not None:
        click.echo(f"wrote {target}; next: horizon job plan {target}", err=True)
    return 0 if imported.is_complete else 1
