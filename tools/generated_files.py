"""What the generators of this folder share: their command line, and the layout of generated Python code."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def write_or_check(about: str, generate: Callable[[], Mapping[Path, str]], *, make_target: str) -> int:
    """Write the files that `generate` returns; with --check only compare them with the committed ones. Return the exit
    code."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a committed file is stale")
    check = parser.parse_args().check
    exit_code = 0
    for path, text in generate().items():
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
        elif not path.is_file() or path.read_text("utf-8") != text:
            print(f"stale: {path.relative_to(ROOT)}; run `make {make_target}` and commit the result")
            exit_code = 1
    return exit_code


def python_code(text: str, path: Path) -> str:
    """Return `text` with sorted imports, laid out as the rest of the tree."""
    ruff = str(Path(sys.executable).with_name("ruff"))
    for command in (["check", "--select", "I", "--fix-only", "--quiet"], ["format"]):
        done = subprocess.run(
            [ruff, *command, "--stdin-filename", str(path), "-"],
            input=text,
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
        )
        text = done.stdout
    return text
