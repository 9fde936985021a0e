"""Small files are replaced whole or not at all, and a full disk is recognised in one place."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from horizon_server.durable import is_out_of_space, remove_half_files, replace_file


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    target = tmp_path / "rates.json"
    target.write_text("old")
    replace_file(target, "text\n")
    assert target.read_text() == "text\n"
    assert list(tmp_path.iterdir()) == [target]


def test_threads_that_replace_the_same_file_leave_one_of_their_contents(tmp_path: Path) -> None:
    target, texts = tmp_path / "digest", [str(number) * 100_000 for number in range(8)]
    for _ in range(10):
        with ThreadPoolExecutor(max_workers=len(texts)) as pool:
            list(pool.map(lambda text: replace_file(target, text), texts))
        assert target.read_text() in texts
    assert list(tmp_path.iterdir()) == [target]


def test_half_files_of_processes_that_are_gone_are_removed(tmp_path: Path) -> None:
    program = (
        "import os, pathlib, sys; from horizon_server import durable;"
        "os.fsync = lambda _: os.kill(os.getpid(), 9);"
        "durable.replace_file(pathlib.Path(sys.argv[1]), 'text')"
    )
    killed = subprocess.run([sys.executable, "-c", program, str(tmp_path / "file")], timeout=240, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 1
    remove_half_files(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_written_leaves_the_old_content(tmp_path: Path) -> None:
    target = tmp_path / "rates.json"
    target.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        replace_file(target, "\ud800")
    assert (target.read_text(), list(tmp_path.iterdir())) == ("old", [target])
    with pytest.raises(IsADirectoryError):
        replace_file(tmp_path, "x")


def test_which_errors_mean_a_full_disk() -> None:
    errors = {
        number: is_out_of_space(OSError(number, os.strerror(number)))
        for number in (errno.ENOSPC, errno.EDQUOT, errno.EIO)
    }
    assert errors == {errno.ENOSPC: True, errno.EDQUOT: True, errno.EIO: False}
    assert not is_out_of_space(None)
