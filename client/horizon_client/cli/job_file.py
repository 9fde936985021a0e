"""A job file to start from, and the schema that an editor checks it with: every field of the job spec."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

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
    """Yield the dotted path and the schema of each field that takes a value, those of a section after all others of its
    level."""
    schema = job_schema()

    def below(prefix: str, part: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
        sections = []
        for name, field in part["properties"].items():
            # A section that may be null is one of two choices.
            found = next((choice["$ref"] for choice in field.get("anyOf", [field]) if "$ref" in choice), None)
            if found is None:
                yield prefix + name, field
            else:
                sections.append((f"{prefix}{name}.", schema["$defs"][found.rsplit("/", 1)[1]]))
        for path, section in sections:
            yield from below(path, section)

    return below("", schema)


def template() -> str:
    """Return a YAML file that contains every field of the spec with its default and description."""
    import yaml  # only here: `horizon job --help` imports this module

    schema = job_schema()
    methods = schema["properties"]["method"]["enum"]
    lines = [header_line(SCHEMA_FILE)]
    section = ""
    for path, field in spec_fields():
        prefix, _, name = path.rpartition(".")
        outer, _, inner = prefix.rpartition(".")
        # With its heading: what is in such a section is refused in jobs that it is not for.
        is_special = bool(outer) or prefix in methods
        if prefix != section:
            section = prefix
            heading = f"  # {inner}:" if outer else f"# {inner}:" if is_special else f"{inner}:"
            lines += [*([] if outer else [""]), heading]
        if path in schema["required"]:
            lines.append(f"{name}: my-{name}  # {field['description']}")
        else:
            value = yaml.safe_dump(field.get("default"), default_flow_style=True).splitlines()[0]
            indent = "  #   " if outer else "#   " if is_special else "  # " if prefix else "# "
            lines.append(f"{indent}{name}: {value}  # {field['description']}")
    return "\n".join(lines) + "\n"
