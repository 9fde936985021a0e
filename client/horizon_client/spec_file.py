"""Job spec files: YAML or JSON text -> plain mapping, with `--set` overrides applied."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from horizon_client.errors import BadFile, FieldViolation, InvalidRequest

MAX_SPEC_BYTES = 1 << 20


class _StrictLoader(yaml.SafeLoader):
    """A safe loader that refuses a key given twice, instead of keeping the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build one mapping."""
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = str(key_node.value)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def load_spec_file(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML or JSON file.

    Raises:
        BadFile: when it cannot be read or is not one mapping; names the line.
    """
    try:
        if path.stat().st_size > MAX_SPEC_BYTES:
            raise BadFile(f"{path} is larger than 1 MiB; is it a job spec?")
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise BadFile(f"cannot read the job spec {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BadFile(f"{path} is not UTF-8 text at byte {error.start}") from error
    return parse_spec(text, name=str(path), as_json=path.suffix == ".json")


def parse_spec(text: str, *, name: str, as_json: bool = False) -> dict[str, Any]:
    """Return the mapping that `text` holds; `name` is the file's name in messages.

    Raises:
        BadFile: when it is not one mapping; names the line.
    """
    try:
        content = json.loads(text) if as_json else yaml.load(text, Loader=_StrictLoader)  # noqa: S506 - a SafeLoader
    except json.JSONDecodeError as error:
        raise BadFile(f"{name}, line {error.lineno}: not JSON: {error.msg}") from error
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise BadFile(f"{name}{line}: not YAML: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise BadFile(f"{name}: not YAML: {error}".splitlines()[0]) from error
    except RecursionError as error:
        raise BadFile(f"{name} is nested too deeply") from error
    if not isinstance(content, dict):
        raise BadFile(f"{name} must contain a mapping of fields such as name, model and dataset")
    return content


def with_overrides(mapping: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return `mapping` with each `path.to.field=value` applied; values are read as YAML.

    Raises:
        InvalidRequest: when an override has no '=', or one of its parents is not a section.
    """
    result = _copied(mapping)
    for override in overrides:
        path, separator, text = override.partition("=")
        keys = path.strip().split(".")
        if not separator or not all(keys):
            raise InvalidRequest(f"--set {override}: write it as field=value, such as train.learning_rate=1e-5")
        try:
            value = yaml.load(text, Loader=_StrictLoader)  # noqa: S506 - a SafeLoader
        except yaml.YAMLError as error:
            raise InvalidRequest(f"--set {override}: the value is not YAML; put it in quotes") from error
        section = result
        for depth, key in enumerate(keys[:-1]):
            if section.get(key) is None:
                section[key] = {}
            if not isinstance(section[key], dict):
                at = ".".join(keys[: depth + 1])
                problem = f"--set {override}: {at} is not a section, so it has no fields to set"
                raise InvalidRequest(problem, violations=[FieldViolation(field=at, description=problem)])
            section = section[key]
        section[keys[-1]] = value
    return result


def _copied(mapping: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copied(value) if isinstance(value, Mapping) else value for key, value in mapping.items()}
