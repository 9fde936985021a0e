"""The documentation site is built without a warning: no link, no anchor and no page is left over; and loads only what
is its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOADED = re.compile(r"""<(?:script|img|link|iframe|source)[^>]+(?:src|href)=["'](?P<address>[^"']+)""")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, as `make docs` builds it."""
    built = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-n", "-W", "--keep-going", "-q", "-c", "docs", ".", str(built)]
    # What it warns of names the page and the line: a link to nowhere, a page that index.md does not list.
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=540)
    assert done.returncode == 0, done.stderr
    return built


def test_every_page_of_docs_is_built(site: Path) -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        assert (site / page.relative_to(ROOT)).with_suffix(".html").is_file()
    assert "docs/index.html" in (site / "index.html").read_text("utf-8")


def test_a_reader_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    loaded = {found["address"] for page in pages for found in LOADED.finditer(page.read_text("utf-8"))}
    assert len(loaded) > 10
    assert {address for address in loaded if re.match(r"(?:https?:)?//", address)} == set()
    styles = [file.read_text("utf-8") for file in site.rglob("*.css")]
    assert not any(re.search(r"url\(\s*['\"]?(?:https?:)?//|@import", style) for style in styles)
