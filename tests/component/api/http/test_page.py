"""How the web page is served: one document for its addresses, files from a fixed list, and a strict policy."""

from __future__ import annotations

import gzip
import re
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from horizon_server.api.http.web_page import ADDRESSES, WebPage

MOST_BYTES = 200_000
LONGEST_LINE = 120


async def test_every_address_of_the_page_is_the_same_document(connect: Any) -> None:
    first = await connect().get("/")
    assert first.headers["content-type"] == "text/html; charset=utf-8"
    for address in ADDRESSES:
        answer = await connect().get(address.replace("{job}", "some-job"))
        assert answer.status_code == 200
        assert answer.content == first.content
    assert (await connect().get("/elsewhere")).status_code == 404


async def test_the_document_loads_only_files_that_are_there_and_nothing_from_elsewhere(connect: Any) -> None:
    text = (await connect().get("/")).text
    named = re.findall(r"""(?:src|href)="([^"]*)\"""", text)
    assert len(named) > 20
    for path in named:
        answer = await connect().get(path)
        assert answer.status_code == 200, path
        assert not re.findall(r"""(?:src|from|import)\s*=?\s*["']https?:""", answer.text), path


async def test_the_policy_lets_only_our_own_files_run(connect: Any) -> None:
    answer = await connect().get("/")
    policy = answer.headers["content-security-policy"]
    assert "script-src 'self'; style-src 'self'" in policy
    assert "unsafe" not in policy
    assert not re.findall(r"<[^>]+\s(?:on\w+|style)=", answer.text)


async def test_files_are_kept_for_good_and_the_document_is_asked_for_again(connect: Any) -> None:
    client = connect()
    document = await client.get("/")
    assert document.headers["cache-control"] == "no-cache"
    tag = document.headers["etag"]
    assert (await client.get("/jobs", headers={"If-None-Match": tag})).status_code == 304
    (script,) = re.findall(r'<script type="module" src="([^"]*)"', document.text)
    answer = await client.get(script)
    assert answer.headers["cache-control"] == "public, max-age=31536000, immutable"
    assert answer.headers["content-type"] == "text/javascript; charset=utf-8"
    plain = await client.get(script, headers={"Accept-Encoding": "identity"})
    assert "content-encoding" not in plain.headers
    assert plain.content == answer.content  # which httpx has unpacked


@pytest.mark.parametrize("path", ["../server.py", "index.html", "vendor/README.md", "%2e%2e/server.py", "app.js/"])
async def test_nothing_else_of_the_folder_is_given_out(connect: Any, path: str) -> None:
    answer = await connect().get(f"/web/{WebPage.load().digest}/{path}")
    assert answer.status_code == 404


async def test_the_files_of_another_version_are_not_there(connect: Any) -> None:
    assert (await connect().get("/web/0123456789abcdef/app.js")).status_code == 404


def test_the_whole_page_is_light() -> None:
    page = WebPage.load()
    assert page.size_bytes < MOST_BYTES
    assert all(gzip.decompress(file.zipped) == file.content for file in page.files.values())


def test_no_script_writes_markup_or_runs_text() -> None:
    own = {path: file.content.decode() for path, file in WebPage.load().files.items() if not path.startswith("vendor/")}
    for path, text in own.items():
        for sink in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
            ".cookie",
        ):
            assert sink not in text, path


def test_lines_of_the_page_fit_a_screen_of_a_reviewer() -> None:
    folder = resources.files("horizon_server.api.http") / "web"
    files = [path for path in Path(str(folder)).rglob("*") if path.suffix in {".js", ".css", ".html", ".svg"}]
    long = [
        f"{path.relative_to(str(folder))}:{number} has {len(line)} characters"
        for path in files
        if "vendor" not in path.parts
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if len(line) > LONGEST_LINE
    ]
    assert len(files) > 30
    assert not long, "\n".join(long)
