"""The version is written in pyproject.toml alone: everything else takes it from the installed package."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from tests.daemon_parts import DaemonParts
from tests.support.released_states import RELEASES

from horizon_server.telemetry.metrics import Metrics
from horizon_server.version import VERSION

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return found


def test_what_is_installed_has_the_projects_version(project: dict[str, Any]) -> None:
    assert project["version"] == VERSION, "pip install -e . makes the installed version that of pyproject.toml"


@pytest.mark.parametrize("module", ["horizon_client", "horizon_server"])
def test_both_commands_say_it(module: str) -> None:
    command = [sys.executable, "-m", module, "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
    assert done.stdout.split()[-1] == VERSION


async def test_the_daemon_and_its_metrics_say_it(daemon: DaemonParts) -> None:
    node = await daemon.services.node.describe(await daemon.user("ada"))
    assert node.version == VERSION
    assert f'horizon_build_info{{version="{VERSION}"}} 1.0' in Metrics().render()[0].decode()


def test_no_other_file_spells_it(project: dict[str, Any]) -> None:
    pattern = re.compile(rf"(?<![\d.]){re.escape(project['version'])}(?![\d.]*\d)")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)
    if listed.returncode:
        pytest.skip("needs a git checkout: the rule holds for what is committed")
    texts = (
        name for name in listed.stdout.splitlines() if name.endswith((".py", ".md", ".toml", ".yaml", ".yml", ".proto"))
    )
    found = {name for name in texts if (ROOT / name).is_file() and pattern.search((ROOT / name).read_text("utf-8"))}
    assert found <= {"pyproject.toml", "CHANGELOG.md"}


def test_the_newest_release_of_the_changelog_is_the_projects_version(project: dict[str, Any]) -> None:
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert headings[:2] == ["Unreleased", project["version"]]


def test_upgrades_from_this_version_are_tested(project: dict[str, Any]) -> None:
    assert project["version"] in RELEASES, "make its state folder: python -m tools.make_upgrade_fixture"
