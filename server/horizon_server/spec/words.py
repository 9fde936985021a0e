"""A field of the job spec in words: which values it takes, and what is wrong with one that was given. Reads the JSON
Schema alone."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from horizon_formats.other_names import other_name, other_value

RULE = "x-allowed"
"""Schema key of a field whose pattern is not readable: what is allowed, in words."""


def problem_with(error: Any, keys: Sequence[str], plain: Any, schema: Mapping[str, Any]) -> str:
    """Return what is wrong with one field: the part of the message after its path."""
    in_list = any(isinstance(key, int) for key in error["loc"])
    if error["type"] == "missing" and not in_list:
        return "is required"
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    if error["type"] == "extra_forbidden" and not in_list:
        known = list(field_at(schema, keys[:-1])["properties"])
        # Often right but one level off: learning_rate for train.learning_rate.
        exact = [path for path in _paths(schema) if path.rpartition(".")[2] == keys[-1]]
        near = exact[:1] or difflib.get_close_matches(keys[-1], known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"fields: {', '.join(known)}"
        if not exact:
            hint = other_name(keys[-1]) or hint
        return f"is not a field of the job spec; {hint}"
    value = plain
    for key in keys:
        value = value[key]
    if not in_list and (meant := other_value(".".join(keys), value)):
        return f"is {value!r:.60}; {meant}"
    if error["type"] == "model_type" and not in_list:
        return f"must be a mapping, not {value!r:.40}"
    return f"is {value!r:.60}; it must be {allowed_values(field_at(schema, keys))}"


def _paths(schema: Mapping[str, Any], *keys: str) -> Iterator[str]:
    for name in field_at(schema, keys).get("properties", {}):
        yield ".".join((*keys, name))
        yield from _paths(schema, *keys, name)


def field_at(schema: Mapping[str, Any], keys: Sequence[str]) -> Mapping[str, Any]:
    """Return the part of the schema that describes the field at this path."""
    part = schema
    for key in keys:
        # A mapping whose keys the user names describes them all alike.
        part = part["properties"][key] if "properties" in part else part["additionalProperties"]
        part = section_of(part, schema) or part
    return part


def section_of(field: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the section that a field is, or may be where it is not null; None for a plain value."""
    for option in (field, *field.get("anyOf", ())):
        if "$ref" in option:
            found: Mapping[str, Any] = schema["$defs"][option["$ref"].rsplit("/", 1)[1]]
            return found
    return None


def allowed_values(field: Mapping[str, Any]) -> str:
    """Return in words which values a field of the schema takes: the part of a message after "it must be"."""
    if "anyOf" in field:
        return ", or ".join(allowed_values(option) for option in field["anyOf"])
    if "$ref" in field:
        return "a mapping of its fields"
    if RULE in field:
        return str(field[RULE])
    if "enum" in field:
        return f"one of {', '.join(dict.fromkeys(str(value).lower() for value in field['enum']))}"
    match field["type"]:
        case "integer":
            return f"a whole number from {field['minimum']} to {field['maximum']}"
        case "number":
            low = (
                f"above {field['exclusiveMinimum']:g}" if "exclusiveMinimum" in field else f"from {field['minimum']:g}"
            )
            high = f"below {field['exclusiveMaximum']:g}" if "exclusiveMaximum" in field else f"{field['maximum']:g}"
            return f"a number {low} {'up ' if low.startswith('above') else ''}to {high}"
        case "array":
            return f"a list of {field['maxItems']}, each {allowed_values(field['prefixItems'][0])}"
        case "boolean":
            return "true or false"
        case kind:
            return str(kind)
