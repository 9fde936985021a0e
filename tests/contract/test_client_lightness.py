"""The client stays light: what it loads, not how long it takes on this machine."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

FORBIDDEN = {"torch", "transformers", "fastapi", "starlette", "sqlalchemy", "pydantic", "numpy", "horizon_server"}


def _loaded_by(code: str) -> set[str]:
    """Return the top-level modules that a fresh interpreter has loaded after `code`."""
    script = f"{code}\nimport sys, json\nprint(json.dumps(sorted(sys.modules)), file=sys.stderr)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=240)
    return {name.partition(".")[0] for name in json.loads(result.stderr.splitlines()[-1])}


_RUN = """
import sys
from horizon_client.cli import main
sys.argv = {argv!r}
try:
    main()
except SystemExit as leaving:
    assert leaving.code == 0, leaving.code
"""


def test_bare_import_loads_no_grpc_and_no_cli() -> None:
    loaded = _loaded_by("import horizon_client; horizon_client.HorizonClientError")
    assert not loaded & (FORBIDDEN | {"grpc", "google", "horizon_proto", "rich", "yaml", "click", "asyncio"})


def test_client_loads_nothing_of_the_server() -> None:
    loaded = _loaded_by("from horizon_client import AsyncClient, Client")
    assert {"grpc", "google", "horizon_proto"} <= loaded
    assert not loaded & (FORBIDDEN | {"rich", "click"})


@pytest.mark.parametrize(
    "argv",
    [
        ["horizon", "--help"],
        ["horizon", "job", "--help"],
        ["horizon", "job", "submit", "--help"],
        ["horizon", "mcp", "--help"],
    ],
)
def test_help_loads_no_grpc(argv: list[str]) -> None:
    loaded = _loaded_by(_RUN.format(argv=argv))
    assert not loaded & (FORBIDDEN | {"grpc", "google", "horizon_proto", "rich", "yaml"})
