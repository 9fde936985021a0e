"""`horizon job schema` and `horizon job init`: the fields of a job spec, for editors and for people who write their first one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import click

from horizon_client.errors import BadFile

SCHEMA_FILE = "job.schema.json"


@cache
def job_schema() -> dict[str, Any]:
    """Return the JSON Schema of the job spec, as generated from the server's definition of each field."""
    schema: dict[str, Any] = json.loads((files("horizon_client") / "job_schema.json").read_text("utf-8"))
    return schema


def header_line(schema_file: str) -> str:
    """Return the first line of a YAML file that editors with YAML support read to find its schema."""
    return f"# yaml-language-server: $schema={schema_file}"


def spec_fields() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the dotted path and the schema of each field that takes a value, in the order of the reference."""
    schema = job_schema()
    for name, field in schema["properties"].items():
        if "$ref" in field:
            section = schema["$defs"][field["$ref"].rsplit("/", 1)[1]]
            for inner, inner_field in section["properties"].items():
                yield f"{name}.{inner}", inner_field
        else:
            yield name, field


@click.command(epilog="\b\nExample:\n  horizon job schema --to job.schema.json")
@click.option("--to", "target", type=click.Path(path_type=Path), help="Write the schema to this file.")
def schema(target: Path | None) -> None:
    """Print the JSON Schema of a job spec.

    Editors use it for completion and checks.
    """
    text = json.dumps(job_schema(), indent=1)
    if target is None:
        click.echo(text)
    else:
        _write(target, text + "\n", mode="w")
    note = "make this the first line of the job file, so that an editor with YAML support checks it:"
    click.echo(f"{note}\n{header_line(str(target) if target else SCHEMA_FILE)}", err=True)


@click.command(epilog="\b\nExample:\n  horizon job init --to job.yaml")
@click.option("--to", "target", type=click.Path(path_type=Path), help="Write it to this file, which must not exist.")
def init(target: Path | None) -> None:
    """Print a job spec to start from.

    It contains the required fields, and every other field with its default as a comment.
    """
    if target is None:
        click.echo(template(), nl=False)
        return
    _write(target, template(), mode="x")
    click.echo(f"wrote {target}; set name, model and dataset, then: horizon job plan {target}", err=True)


def template() -> str:
    """Return a YAML file that contains every field of the spec with its default and description."""
    import yaml  # only here: `horizon job --help` imports this module

    required = job_schema()["required"]
    lines = [header_line(SCHEMA_FILE)]
    section = ""
    for path, field in spec_fields():
        prefix, _, name = path.rpartition(".")
        if prefix != section:
            section = prefix
            lines += ["", *([f"{prefix}:"] if prefix else [])]
        indent = "  " if prefix else ""
        if path in required:
            lines.append(f"{name}: my-{name}  # {field['description']}")
        else:
            value = yaml.safe_dump(field.get("default"), default_flow_style=True).splitlines()[0]
            lines.append(f"{indent}# {name}: {value}  # {field['description']}")
    return "\n".join(lines) + "\n"


def _write(target: Path, text: str, *, mode: str) -> None:
    try:
        with target.open(mode, encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise BadFile(f"{target} exists; choose another name") from None
    except OSError as error:
        raise BadFile(f"cannot write {target}: {error.strerror}") from error
