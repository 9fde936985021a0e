"""The documentation site is built without a warning: no link, no anchor and no page is left over; and loads only what
is its own."""

from __future__ import annotations

import json
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
    for source in (ROOT / "docs").rglob("*.md"):
        assert (site / source.relative_to(ROOT)).with_suffix(".html").is_file()
    assert "docs/index.html" in (site / "index.html").read_text("utf-8")


def test_a_reader_loads_nothing_from_elsewhere(site: Path) -> None:
    loaded = {found["address"] for file in site.rglob("*.html") for found in LOADED.finditer(file.read_text("utf-8"))}
    assert len(loaded) > 10
    assert {address for address in loaded if re.match(r"(?:https?:)?//", address)} == set()
    styles = [file.read_text("utf-8") for file in site.rglob("*.css")]
    assert not any(re.search(r"url\(\s*['\"]?(?:https?:)?//|@import", style) for style in styles)


@pytest.mark.parametrize("generator", ["generate_reference_pages", "generate_models_page"])
def test_generated_pages_are_fresh(generator: str) -> None:
    command = [sys.executable, f"tools/{generator}.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_family_that_was_tried_trains_with_the_same_numbers_or_is_refused() -> None:
    outcomes = json.loads((ROOT / "docs" / "supported-models.json").read_bytes())["outcomes"]
    results = {one["family"]: one["result"] for one in outcomes}
    assert {results[name] for name in ("llama", "qwen3", "mistral", "gemma3_text", "gpt_oss")} == {"trains"}
    assert "differs" not in results.values()
