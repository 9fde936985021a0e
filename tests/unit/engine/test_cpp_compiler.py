"""The C++ compiler of layers: what it makes shares the C++ runtime that torch has loaded."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch  # noqa: F401  # loads the runtime

from horizon_server.engine.compiled.cpp_compiler import with_torchs_runtime

RUNTIME = b"libstdc++.so.6"
SOURCE = '#include <regex>\nint f(const char* text) { return std::regex_match(text, std::regex("a+")); }\n'


def runtime_of(compiler: str, source: Path) -> bytes:
    """The runtime that a library made of `source` asks for, empty where it has its own."""
    made = source.with_suffix(".so")
    subprocess.run([compiler, "-shared", "-fPIC", source, "-o", made], check=True, timeout=120)
    return RUNTIME if RUNTIME in made.read_bytes() else b""


def test_a_compiler_without_a_shared_runtime_links_torchs(tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    command = [compiler, "-print-file-name=libstdc++.a"]
    archive = Path(subprocess.run(command, capture_output=True, text=True, check=True, timeout=240).stdout.strip())
    if not archive.is_file():
        pytest.skip("needs the C++ runtime as an archive")
    source, bare, alone = tmp_path / "source.cpp", tmp_path / "bare" / "g++", tmp_path / "alone"
    source.write_text(SOURCE, "utf-8")
    alone.mkdir()
    (alone / "libstdc++.a").symlink_to(archive)
    bare.parent.mkdir()
    # gcc compiles C++ as well, and adds no runtime by itself.
    bare.write_text(f'#!/bin/sh\nexec gcc "$@" -L{alone} -lstdc++\n', "utf-8")
    bare.chmod(0o755)
    assert runtime_of(str(bare), source) == b""

    for _ in range(2):  # what an earlier compilation has left is replaced
        program = with_torchs_runtime(str(bare), tmp_path / "compiler")

    # TorchInductor looks for g++ in the name.
    assert Path(program).name == "g++" and os.access(program, os.X_OK)
    assert runtime_of(program, source) == RUNTIME


def test_no_compiler_is_left_to_be_reported(tmp_path: Path) -> None:
    assert with_torchs_runtime("no-such-compiler", tmp_path / "compiler") == "no-such-compiler"
