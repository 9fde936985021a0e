"""What may be announced."""

from __future__ import annotations

import pytest

from horizon_server.errors import InvalidSpec, TooLarge
from horizon_server.records.blob import (
    EMPTY_SHA256,
    MAX_FILES,
    BlobFile,
    BlobRef,
    check_files,
    check_ref,
    digest,
)

SHA = "ab" * 32


def file(path: str, *, sha256: str = SHA, size_bytes: int = 3) -> BlobFile:
    return BlobFile(path=path, sha256=sha256, size_bytes=size_bytes)


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/etc/passwd",
        "../x",
        "a/../../x",
        "a/..",
        "./a",
        ".",
        "a//b",
        "a/",
        "a\\b",
        "a\0b",
        "a\nb",
        "x" * 513,
        "y" * 256,
    ],
)
def test_paths_that_leave_the_folder_or_cannot_be_names_are_refused(path: str) -> None:
    with pytest.raises(InvalidSpec) as caught:
        check_files([file("fine.jsonl"), file(path)], what="dataset", max_bytes=100)
    assert caught.value.violations[0].field == "files[1].path"


@pytest.mark.parametrize("path", ["a.jsonl", "sub/folder/a b.txt", "..a", "daten-\u00e4.jsonl", "x" * 255])
def test_ordinary_paths_pass(path: str) -> None:
    check_files([file(path)], what="dataset", max_bytes=100)


@pytest.mark.parametrize("sha256", ["", "ab", SHA.upper(), SHA[:-1] + "g", SHA + "a", "../" + SHA[3:], SHA + "\n"])
def test_impossible_names_of_contents_are_refused(sha256: str) -> None:
    with pytest.raises(InvalidSpec) as caught:
        check_ref(BlobRef(sha256=sha256, size_bytes=1), max_bytes=10)
    assert caught.value.violations[0].field == "blob.sha256"


@pytest.mark.parametrize(("sha256", "size"), [(SHA, -1), (SHA, 0), (EMPTY_SHA256, 1)])
def test_impossible_sizes_are_refused(sha256: str, size: int) -> None:
    with pytest.raises(InvalidSpec) as caught:
        check_ref(BlobRef(sha256=sha256, size_bytes=size), max_bytes=10)
    assert caught.value.violations[0].field == "blob.size_bytes"


def test_bounds() -> None:
    with pytest.raises(TooLarge, match="at most 10"):
        check_ref(BlobRef(sha256=SHA, size_bytes=11), max_bytes=10)
    with pytest.raises(TooLarge, match="max_dataset_bytes"):
        check_files([file("a"), file("b")], what="dataset", max_bytes=5)
    with pytest.raises(TooLarge, match=str(MAX_FILES)):
        check_files([file(str(i)) for i in range(MAX_FILES + 1)], what="dataset", max_bytes=10**9)
    with pytest.raises(InvalidSpec, match="at least one file"):
        check_files([], what="dataset", max_bytes=5)


def test_clashing_names_are_refused_together() -> None:
    files = [file("a"), file("a"), file("b/c"), file("b"), file("d", size_bytes=4)]
    with pytest.raises(InvalidSpec, match="and 2 more") as caught:
        check_files(files, what="model", max_bytes=100)
    assert [v.field for v in caught.value.violations] == ["files[1].path", "files[3].path", "files[4].size_bytes"]


def test_the_digest_follows_paths_contents_order_and_extras() -> None:
    a, b = file("a"), file("b", sha256="cd" * 32)
    digests = {digest([a, b]), digest([b, a]), digest([a]), digest([a, b], "messages"), digest([file("c"), b])}
    assert len(digests) == 5
    assert digest([a, b]) == digest([file("a"), b])
