"""The house's own rules, held by tests: file sizes, import contracts, fresh generated code, nothing of the workplace in the tree."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_LINES = 500


def tracked(*patterns: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    if listed.returncode:
        pytest.skip("needs a git checkout: the rules hold for what is committed")
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def ours(*patterns: str) -> list[Path]:
    """Return the tracked files that are written by hand."""
    return [path for path in tracked(*patterns) if "_pb2" not in path.name and path.name != "sync_client.py"]


def test_no_file_is_longer_than_500_lines() -> None:
    sizes = {
        str(path.relative_to(ROOT)): path.read_bytes().count(b"\n")
        for path in ours("*.py", "*.cpp", "*.toml", "Makefile")
    }
    assert sizes
    assert {name: size for name, size in sizes.items() if size > MAX_LINES} == {}


@pytest.mark.parametrize("word", ["utils", "helpers", "common", "misc", "manager", "base", "core"])
def test_no_module_is_named_for_nothing(word: str) -> None:
    assert [path.name for path in ours("*.py") if path.stem == word or path.parent.name == word] == []


def test_our_code_is_ascii() -> None:
    assert [
        str(path.relative_to(ROOT)) for path in ours("*.py", "*.cpp", "*.proto") if not path.read_bytes().isascii()
    ] == []


def test_nothing_unfinished_is_left_in_the_code() -> None:
    unfinished = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b|raise NotImplementedError")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in ours("client/*.py", "server/*.py", "tools/*.py")
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if unfinished.search(line)
    ]
    assert found == []


def test_the_environment_is_read_in_one_place() -> None:
    readers = [
        str(path.relative_to(ROOT))
        for path in ours("server/*.py")
        if re.search(r"os\.environ|os\.getenv|getenv\(", path.read_text("utf-8"))
    ]
    assert readers == ["server/horizon_server/settings.py"]


def test_no_test_waits_for_a_process_without_a_limit() -> None:
    texts = {path: path.read_text("utf-8") for path in ours("tests/*.py")}
    unbounded = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for path, text in texts.items()
        if "subprocess.run(" in text
        for call in ast.walk(ast.parse(text))
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "subprocess.run"
        if "timeout" not in {keyword.arg for keyword in call.keywords}
    ]
    assert unbounded == []


@pytest.mark.timeout(300)
def test_import_contracts_hold() -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-logo"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_daemon_loads_no_torch() -> None:
    code = (
        "import sys, horizon_server.cli, horizon_server.main; "
        "print([name for name in ('torch', 'transformers', 'tokenizers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr
