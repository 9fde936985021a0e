"""Small files are replaced whole or not at all, and a full disk is recognised in one place."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from horizon_server.durable import is_out_of_space, replace_file


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    target = tmp_path / "rates.json"
    target.write_text("old")
    replace_file(target, "text\n")
    assert target.read_text() == "text\n"
    assert list(tmp_path.iterdir()) == [target]


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
