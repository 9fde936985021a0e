"""A file that is written in parts, over several processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from horizon_server.store import growing_file
from horizon_server.store.growing_file import GrowingFile, remove_others


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep everything that is appended at once."""
    monkeypatch.setattr(growing_file, "_LEAST_PAUSE_S", 0.0)
    monkeypatch.setattr(growing_file, "_MAX_SHARE", float("inf"))


def grow(path: Path, *parts: bytes, facts: str = "a") -> int:
    """Append parts as a process that is killed then, and return the place where it continued."""
    with GrowingFile(path, facts=facts, header=b"head") as growing:
        found = growing.place
        for part in parts:
            growing.append(part, place=growing.place + 1)
    return found


def test_the_next_process_continues_after_what_was_kept(tmp_path: Path) -> None:
    path, target = tmp_path / "parts" / "one", tmp_path / "target"
    assert grow(path, b"1", b"22") == 0
    # Bytes that were written and not recorded, as after a power cut.
    with path.open("ab") as stream:
        stream.write(b"lost")
    with GrowingFile(path, facts="a", header=b"head") as growing:
        assert growing.place == 2
        growing.append(b"333", place=3)
        growing.finish(target)
    assert target.read_bytes() == b"head122333"
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize("damage", ["facts", "bytes", "short", "record", "gone"])
def test_what_is_of_something_else_or_damaged_is_begun_again(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "one"
    grow(path, b"11", b"22")
    record = tmp_path / "one.json"
    match damage:
        case "bytes":
            path.write_bytes(b"head1x22")
        case "short":
            os.truncate(path, 5)
        case "record":
            record.write_text("{")
        case "gone":
            path.unlink()
    assert grow(path, b"33", facts="b" if damage == "facts" else "a") == 0
    assert path.read_bytes() == b"head33"


def test_a_file_that_is_not_kept_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), GrowingFile(tmp_path / "one", facts="a", is_kept=False) as growing:
        growing.append(b"1", place=1)
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_it_is_kept_so_seldom_that_keeping_takes_a_small_part_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growing_file, "_LEAST_PAUSE_S", 3600.0)
    with GrowingFile(tmp_path / "one", facts="a") as growing:
        growing.append(b"1", place=1)
        assert growing.place == 0
        growing.keep()
        assert growing.place == 1


def test_another_file_system_gets_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = Path.replace

    def refuse(self: Path, target: Path) -> Path:
        if self.name == "one":
            raise OSError(18, "Invalid cross-device link")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", refuse)
    with GrowingFile(tmp_path / "one", facts="a") as growing:
        growing.append(b"1", place=1)
        growing.finish(tmp_path / "target")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("target", b"1")]


def test_files_that_are_not_wanted_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    remove_others(folder, set())
    grow(folder / "one", b"1")
    grow(folder / "two", b"2")
    remove_others(folder, {"two"})
    assert {path.name for path in folder.iterdir()} == {"two", "two.json"}
    remove_others(folder, set())
    assert not folder.exists()
