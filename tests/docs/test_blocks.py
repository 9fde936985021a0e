"""Code blocks of other languages: job files are accepted, Python names what exists, settings are the daemon's."""

from __future__ import annotations

import ast
import importlib
import json
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from tests.support.pages import ROOT, Block, blocks

from horizon_client import Client
from horizon_server.settings import Settings
from horizon_server.spec import job_schema, parse_job_spec

REQUIRED = {"name": "example", "model": "tiny-base", "dataset": "chats"}
"""What a block may leave out that shows single fields of a job file."""


def _written_in(*languages: str) -> list[Any]:
    return [pytest.param(block, id=str(block)) for block in blocks() if block.language in languages]


@pytest.fixture(scope="module")
def only_for_the_client() -> set[str]:
    """The fields of a job file that the client reads and does not send."""
    schema = json.loads((ROOT / "client" / "horizon_client" / "job_schema.json").read_text("utf-8"))
    return set(schema["properties"]) - set(job_schema()["properties"])


@pytest.mark.parametrize("block", _written_in("yaml"))
def test_a_block_marked_yaml_alone_is_a_job_file(block: Block, only_for_the_client: set[str]) -> None:
    fields = yaml.safe_load(block.code)
    # Lines that go below `train:` in the block before are written with their indent.
    written = {"train": fields} if block.code.startswith("  ") else fields
    sent = {name: value for name, value in (REQUIRED | written).items() if name not in only_for_the_client}
    # The client pushes local files and sends their names.
    local = {name: "pushed" for name, value in sent.items() if str(value).startswith(("./", "~/"))}
    parse_job_spec(sent | local)


def test_blocks_of_other_yaml_name_what_they_are_for_and_parse() -> None:
    for block in blocks():
        if block.language.startswith("yaml "):
            list(yaml.safe_load_all(block.code))


def test_blocks_of_toml_have_settings_of_the_daemon() -> None:
    for block in blocks():
        if block.language == "toml":
            assert set(tomllib.loads(block.code)) <= set(Settings.model_fields), block


def _chains(tree: ast.AST) -> Iterator[list[str]]:
    """Yield `client.jobs.submit` as its three names, for all uses of a variable named client."""
    for node in ast.walk(tree):
        names: list[str] = []
        inner: ast.AST = node
        while isinstance(inner, ast.Attribute):
            names.insert(0, inner.attr)
            inner = inner.value
        if names and isinstance(inner, ast.Name) and inner.id == "client":
            yield names


@pytest.mark.parametrize("block", _written_in("python"))
def test_python_compiles_imports_what_is_there_and_calls_methods_that_the_client_has(block: Block) -> None:
    tree = compile(block.code, str(block), "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("horizon_"):
            module = importlib.import_module(str(node.module))
            assert [name.name for name in node.names if not hasattr(module, name.name)] == []
    with Client("127.0.0.1:1", token="of-nobody") as client:
        for names in _chains(tree):
            found: object = client
            for name in names[:2]:  # what a call answers is not asked here
                assert hasattr(found, name), f"{block}: client.{'.'.join(names)}"
                found = getattr(found, name)
