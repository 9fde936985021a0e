"""A job spec as users write it: YAML, JSON or a mapping, with `--set` overrides, and with local files that are pushed
first.

A value is local when it exists on this disk, relative to the spec file's folder or else to the working folder. A bare
word that is also the name of something pushed means that. Only `model`, `dataset`, `eval_dataset` and the datasets of
`eval.sets` can be local. `map` names the columns of local data, and `format` its format: it is pushed with them, and
neither is a field of the job that is sent. Data may also be rows in memory (`memory_data`), which are pushed under the
job's name.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias, cast

import yaml

from horizon_client.choices import DATASET_FORMATS
from horizon_client.conversion import spec_to_proto
from horizon_client.errors import BadFile, InvalidRequest, NotFound
from horizon_client.job_spec_types import JobSpec
from horizon_client.memory_data import as_file, is_in_memory
from horizon_client.pushed import AsyncDatasets, AsyncModels, AsyncPushed, push_under_free_name
from horizon_client.reporter import Reporter
from horizon_formats.model_files import CONFIG_FILE
from horizon_proto.v1 import job_pb2

SpecLike: TypeAlias = JobSpec | str | os.PathLike[str]
"""A job spec, or the path of a YAML or JSON file. For type checkers a spec is a JobSpec, so that they find a misspelt
key; any mapping is accepted."""

MAX_SPEC_BYTES = 1 << 20
_PLACEHOLDER = "local"
_Place: TypeAlias = tuple[str, ...]
_MODEL: _Place = ("model",)
_EVAL_SETS: _Place = ("eval", "sets")
_MAP, _FORMAT = "map", "format"
_ARGUMENTS = {_MAP: "field_map", _FORMAT: "row_format"}


async def spec_to_send(
    spec: SpecLike,
    overrides: Sequence[str],
    *,
    push_to: tuple[AsyncModels, AsyncDatasets] | None,
    reporter: Reporter,
) -> job_pb2.JobSpec:
    """Return the wire form of a spec; local files that it names are pushed, unless there is nothing to push them to."""
    written, folders = _loaded(spec)
    mapping = with_overrides(written, overrides)
    options = _push_options(mapping)
    if push_to is None:
        for name in options:
            raise InvalidRequest.of(
                name,
                f"{name} is for data files that are pushed, and nothing is pushed here (--no-push, in Python "
                f"push=False): leave {name} out",
            )
        return spec_to_proto(mapping)
    models, datasets = push_to
    kinds: dict[_Place, AsyncPushed[Any]] = {_MODEL: models, **dict.fromkeys(_data_places(mapping), datasets)}
    in_memory = {place: value for place in kinds if place != _MODEL and is_in_memory(value := _at(mapping, place))}
    files = [place for place in kinds if place not in in_memory]
    local = {place: _local_sources(_at(mapping, place), folders, many=place != _MODEL) for place in files}
    _refuse_missing_paths(mapping, local)
    local = {place: sources for place, sources in local.items() if sources}
    if not in_memory and not local.keys() - {_MODEL}:
        _refuse_unused(options, mapping)
    # Refuse a malformed spec before anything is uploaded; the names of what is pushed are not known yet
    checked = _copied(mapping)
    for place in (*local, *in_memory):
        _put(checked, place, _PLACEHOLDER)
    spec_to_proto(checked)
    pushed_with = {_ARGUMENTS[name]: value for name, value in options.items()}
    for place, rows in in_memory.items():
        with ExitStack() as stack:
            part = "" if place == ("dataset",) else f"-{place[-1]}"
            file = await asyncio.to_thread(stack.enter_context, as_file(rows, f"{mapping['name']}{part}"))
            reporter.notice(f"pushing the rows of {'.'.join(place)}")
            _put(mapping, place, await push_under_free_name(datasets, [file], reporter, **pushed_with))
    for place, sources in local.items():
        if not await _is_pushed(_at(mapping, place), kinds[place]):
            noun = "model folder" if place == _MODEL else place[0].replace("_", " ")
            if len(place) > 1:
                noun = f"eval set {place[-1]}"
            reporter.notice(f"pushing the {noun} {', '.join(map(str, sources))}")
            of_data = pushed_with if place != _MODEL else {}
            _put(mapping, place, await push_under_free_name(kinds[place], sources, reporter, **of_data))
    return spec_to_proto(mapping)


def _push_options(mapping: dict[str, Any]) -> dict[str, Any]:
    """Take what local data is pushed with out of a spec: those of `map` and `format` that are given."""
    options: dict[str, Any] = {}
    field_map, row_format = mapping.pop(_MAP, None), mapping.pop(_FORMAT, None)
    if field_map is not None:
        if not isinstance(field_map, Mapping) or not all(
            isinstance(t, str) for pair in field_map.items() for t in pair
        ):
            raise InvalidRequest.of(
                _MAP, f"map is {field_map!r:.60}; it must name a column for each field, such as {{prompt: question}}"
            )
        if field_map:
            options[_MAP] = dict(field_map)
    if row_format is not None:
        if row_format not in DATASET_FORMATS:
            raise InvalidRequest.of(
                _FORMAT, f"format is {row_format!r:.60}; it must be one of {', '.join(DATASET_FORMATS)}"
            )
        options[_FORMAT] = row_format
    return options


def _refuse_unused(options: Mapping[str, Any], mapping: Mapping[str, Any]) -> None:
    for name in options:
        raise InvalidRequest.of(
            name,
            f"{name} is for data files that the job file names, and dataset {_at(mapping, ('dataset',))!r:.80} is not "
            f"a file here; a pushed dataset has the {name} that it was pushed with: leave {name} out",
        )


def _data_places(mapping: Mapping[str, Any]) -> list[_Place]:
    """Where a spec names data."""
    sets = _at(mapping, _EVAL_SETS)
    named = [(*_EVAL_SETS, name) for name in sets if isinstance(name, str)] if isinstance(sets, Mapping) else []
    return [("dataset",), ("eval_dataset",), *named]


def without_data(spec: SpecLike, overrides: Sequence[str], name: str) -> JobSpec:
    """Return a spec in which everything that names data has this name instead."""
    mapping = with_overrides(_loaded(spec)[0], overrides)
    _push_options(mapping)
    for place in _data_places(mapping):
        if place == ("dataset",) or _at(mapping, place) is not None:
            _put(mapping, place, name)
    return cast("JobSpec", mapping)


def local_config(spec: SpecLike, overrides: Sequence[str]) -> bytes:
    """Return the config.json of the local model folder that a spec names, where the folder has no weights; else
    nothing. Blocking."""
    written, folders = _loaded(spec)
    sources = _local_sources(_at(with_overrides(written, overrides), _MODEL), folders, many=False)
    if not sources or not (config := sources[0] / CONFIG_FILE).is_file() or any(sources[0].glob("*.safetensors*")):
        return b""
    return config.read_bytes()


def _at(mapping: Mapping[str, Any], place: _Place) -> Any:
    value: Any = mapping
    for key in place:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _put(mapping: dict[str, Any], place: _Place, value: object) -> None:
    for key in place[:-1]:
        mapping = mapping[key]
    mapping[place[-1]] = value


def _refuse_missing_paths(mapping: Mapping[str, Any], local: Mapping[_Place, Sequence[Path]]) -> None:
    for place, sources in local.items():
        value, field = _at(mapping, place), ".".join(place)
        # an absolute path may be a folder on the node
        if sources or not isinstance(value, str) or not value.startswith(("./", "../", "~")):
            continue
        what = "folder" if field == "model" else "file or folder"
        raise InvalidRequest.of(
            field,
            f"{field} is {value!r}, and there is no such {what} on this machine; relative paths start at the job "
            f"file's folder or the current one; give an existing {what}, or the name of a pushed "
            f"{'model' if field == 'model' else 'dataset'}",
        )


def _loaded(spec: SpecLike) -> tuple[Mapping[str, Any], list[Path]]:
    """Return the spec, and the folders that relative paths in it start from."""
    if isinstance(spec, Mapping):
        return spec, [Path()]
    path = Path(spec).expanduser()
    return load_spec_file(path), [path.parent, Path()]


def _local_sources(value: object, folders: Sequence[Path], *, many: bool) -> list[Path]:
    """Return the local paths that a spec's value means; empty when it names something pushed."""
    if many and isinstance(value, list | tuple) and value:
        each = [_local_sources(item, folders, many=False) for item in value]
        # A list must consist of local files; the checks of the spec refuse any other
        return [paths[0] for paths in each] if all(each) else []
    if not isinstance(value, str) or not value or "\0" in value:
        return []
    path = Path(value).expanduser()
    return next(([folder / path] for folder in folders if (folder / path).exists()), [])


async def _is_pushed(value: object, kind: AsyncPushed[Any]) -> bool:
    # Only a bare word can be the name of something pushed
    if not isinstance(value, str) or "/" in value or os.sep in value or value.startswith((".", "~")):
        return False
    try:
        await kind.get(value)
    except NotFound:
        return False
    return True


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
    """Return the mapping in a YAML or JSON file; BadFile with the line when it holds anything else."""
    try:
        # A mistyped path may name a data file
        if path.stat().st_size > MAX_SPEC_BYTES:
            raise BadFile(f"{path} is larger than 1 MiB; is it a job spec?")
        text = path.read_text(encoding="utf-8-sig")  # editors on Windows put a byte order mark before the text
    except OSError as error:
        raise BadFile(f"cannot read the job spec {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BadFile(f"{path} is not UTF-8 text at byte {error.start}") from error
    return parse_spec(text, name=str(path), as_json=path.suffix == ".json")


def parse_spec(text: str, *, name: str, as_json: bool = False) -> dict[str, Any]:
    """Return the mapping that `text` holds; `name` is the file's name in messages."""
    try:
        content = json.loads(text) if as_json else yaml.load(text, Loader=_StrictLoader)  # noqa: S506 - a SafeLoader
    except json.JSONDecodeError as error:
        raise BadFile(f"{name}, line {error.lineno}: not JSON: {error.msg}") from error
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise BadFile(f"{name}{line}: not YAML: {_bad_escape(error) or error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise BadFile(f"{name}: not YAML: {error}".splitlines()[0]) from error
    except RecursionError as error:  # both parsers recurse
        raise BadFile(f"{name} is nested too deeply") from error
    if not isinstance(content, dict):
        raise BadFile(f"{name} must contain a mapping of fields such as name, model and dataset")
    return content


def _bad_escape(error: yaml.YAMLError) -> str:
    """Return what to write for an expression with a backslash in double quotes; empty for any other error."""
    if not isinstance(error, yaml.MarkedYAMLError) or "unknown escape character" not in str(error.problem):
        return ""
    return r"in YAML a backslash, as in \., needs single quotes: ['layers\.[4-5]']"


def with_overrides(mapping: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return a copy of `mapping` with each `path.to.field=value` applied; values are read as YAML."""
    result = _copied(mapping)
    for override in overrides:
        path, separator, text = override.partition("=")
        keys = path.strip().split(".")
        if not separator or not all(keys):
            raise InvalidRequest(f"--set {override}: write it as field=value, such as train.learning_rate=1e-5")
        try:
            value = yaml.load(text, Loader=_StrictLoader)  # noqa: S506 - a SafeLoader
        except yaml.YAMLError as error:
            problem = _bad_escape(error) or "the value is not YAML; put it in quotes"
            raise InvalidRequest(f"--set {override}: {problem}") from error
        section = result
        for depth, key in enumerate(keys[:-1]):
            if section.get(key) is None:
                section[key] = {}
            if not isinstance(section[key], dict):
                at = ".".join(keys[: depth + 1])
                raise InvalidRequest.of(at, f"--set {override}: {at} is not a section, so it has no fields to set")
            section = section[key]
        section[keys[-1]] = value
    return result


def _copied(mapping: Mapping[str, Any]) -> dict[str, Any]:
    # The overrides and the names of what is pushed must not reach the caller's own mapping
    def copied(value: Any) -> Any:
        return os.fspath(value) if isinstance(value, os.PathLike) else value

    return {key: _copied(value) if isinstance(value, Mapping) else copied(value) for key, value in mapping.items()}
