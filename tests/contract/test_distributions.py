"""The client and the server are two distributions, which together are what a checkout installs."""

from __future__ import annotations

import email.message
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from build_distributions import CLIENT, SERVER, build, requirements

from horizon_formats.trackers import TRACKERS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return found


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each wheel, built from its source distribution with the packages that are installed here."""
    folder = tmp_path_factory.mktemp("dist")
    built = {distribution.name: build(distribution, folder, isolated=False) for distribution in (CLIENT, SERVER)}
    return {name: next(file for file in files if file.suffix == ".whl") for name, files in built.items()}


def _modules(wheel: Path) -> set[str]:
    names = zipfile.ZipFile(wheel).namelist()
    return {name for name in names if ".dist-info/" not in name and not name.endswith(".so")}


def _metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as files:
        (name,) = (name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(files.read(name))


def test_every_requirement_of_the_checkout_is_in_one_of_them(project: dict[str, Any]) -> None:
    client, of_client = requirements(project, CLIENT)
    server, extras = requirements(project, SERVER)
    assert client == project["dependencies"]
    assert {**of_client, "server": [], "dev": []}.keys() == project["optional-dependencies"].keys()
    assert server[0] == f"{CLIENT.name}=={project['version']}"
    assert sorted(server[1:] + extras["cpu"]) == sorted(project["optional-dependencies"]["server"])
    # The daemon of a node without a GPU fetches no torch before it is told which build.
    assert not any(one.startswith(("torch", "triton")) for one in server)
    assert [one.split(">")[0] for one in extras["cuda"]] == ["torch", "triton"]


def test_no_file_is_in_both_and_none_is_in_neither(wheels: dict[str, Path]) -> None:
    client, server = _modules(wheels[CLIENT.name]), _modules(wheels[SERVER.name])
    assert client & server == set()
    listed = subprocess.run(
        ["git", "ls-files", *CLIENT.packages, *SERVER.packages],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    if listed.returncode:
        pytest.skip("needs a git checkout: what is committed is what is published")
    assert {name.partition("/")[2] for name in listed.stdout.splitlines()} <= client | server


def test_the_client_is_pure_python_and_the_server_needs_exactly_its_version(
    wheels: dict[str, Path], project: dict[str, Any]
) -> None:
    assert wheels[CLIENT.name].name.endswith("-py3-none-any.whl")
    client, server = _metadata(wheels[CLIENT.name]), _metadata(wheels[SERVER.name])
    assert (client["Version"], server["Version"]) == (project["version"], project["version"])
    assert (client["Requires-Python"], server["Requires-Python"]) == (">=3.10", project["requires-python"])
    assert f"{CLIENT.name}=={project['version']}" in server.get_all("Requires-Dist", [])
    assert {"cpu", "cuda"} == set(server.get_all("Provides-Extra", [])) - set(client.get_all("Provides-Extra", []))


def test_every_extra_that_the_client_names_is_in_both(project: dict[str, Any]) -> None:
    sources = [path.read_text("utf-8") for folder in CLIENT.packages for path in (ROOT / folder).rglob("*.py")]
    named = {name for text in sources for name in re.findall(r"horizon-train(?:-client)?\[([\w-]+)\]", text)}
    assert {"hub", "plot"} <= named
    for distribution in (CLIENT, SERVER):
        _, extras = requirements(project, distribution)
        assert named | set(TRACKERS) <= extras.keys()


def test_the_command_runs_from_the_clients_wheel_alone(wheels: dict[str, Path], project: dict[str, Any]) -> None:
    # Its requirements come from this environment; -P and the first place make its modules those of the wheel.
    script = """
import sys
ours = ("/client", "/server", "/proto")
sys.path[:] = [sys.argv.pop(1), *(folder for folder in sys.path if not folder.endswith(ours))]
import horizon_client
assert ".whl/" in horizon_client.__file__, horizon_client.__file__
from horizon_client.cli import main
main()
"""
    for argument, expected in (
        ("--version", f"horizon {project['version']}\n"),
        ("--help", "Fine-tune language models"),
    ):
        command = [sys.executable, "-P", "-c", script, str(wheels[CLIENT.name]), argument]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
        assert expected in done.stdout


def test_no_pin_contradicts_a_cuda_build_of_torch() -> None:
    # It requires one version each of Triton and of CUDA's own packages; a CPU build, as here, requires none of them.
    pinned = [line.split("==")[0] for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines()]
    assert "torch" in pinned
    assert [name for name in pinned if name == "triton" or re.match(r"nvidia-(?!ml-py)|cuda", name)] == []
