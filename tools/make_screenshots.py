"""Make the pictures of the web page that the docs show, docs/pictures/*.png: of a real daemon with scripted workers.

python -m tools.make_screenshots [FOLDER]
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from playwright.sync_api import Page, expect, sync_playwright
from tests.support.page_world import PageWorld, fill, page_world

from horizon_server.demo.recipe import write_demo_model

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
MAX_BYTES = 150_000
_WAIT_MS = 60_000.0
_WIDE, _PHONE = (1280, 860), (390, 844)


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One picture: an address as ann sees it."""

    name: str
    address: str
    shows: str
    """A text that is there once the page is."""
    size: tuple[int, int] = _WIDE
    scheme: Literal["light", "dark"] = "light"
    prepare: Callable[[Page], None] = lambda page: None


def _hover(page: Page) -> None:
    box = page.get_by_role("application").first.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.45, box["y"] + 80)


def _down(page: Page) -> None:
    """Leave out what the other pictures show: the top of the page."""
    page.evaluate("scrollTo(0, 360)")


PICTURES = (
    Picture(name="overview", address="/", shows="Ended in the last day"),
    Picture(name="job", address="/jobs/gsm8k-long?smooth=0.8", shows="Gradient norm", prepare=_hover),
    Picture(name="job-dark", address="/jobs/gsm8k-lr1e5", shows="Gradient norm", scheme="dark", prepare=_hover),
    Picture(
        name="answers", address="/jobs/gsm8k-long?tab=evaluations", shows="expected", size=(1280, 700), prepare=_down
    ),
    Picture(
        name="compare",
        address="/compare?jobs=gsm8k-lr2e5,gsm8k-lr1e5,gsm8k-long",
        shows="Gradient norm",
        size=(1280, 1180),
    ),
    Picture(name="queue", address="/queue", shows="Who has used it lately"),
    Picture(name="clone", address="/new?from=gsm8k-lr1e5", shows="Show the plan"),
    Picture(name="phone", address="/jobs/gsm8k-long", shows="Gradient norm", size=_PHONE),
    Picture(name="phone-dark", address="/", shows="Ended in the last day", size=_PHONE, scheme="dark"),
)


def make_pictures(world: PageWorld, folder: Path) -> None:
    """Take every picture."""
    folder.mkdir(parents=True, exist_ok=True)
    executable = shutil.which("chromium")
    assert executable is not None, "chromium is missing: apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        for picture in PICTURES:
            width, height = picture.size
            context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=picture.scheme)
            context.add_init_script(f"sessionStorage.setItem('horizon-token', '{world.tokens['ann']}')")
            page = context.new_page()
            page.goto(world.url + picture.address)
            expect(page.get_by_text(picture.shows).first).to_be_visible(timeout=_WAIT_MS)
            expect(page.get_by_role("status", name="Loading")).to_have_count(0, timeout=_WAIT_MS)
            picture.prepare(page)
            page.evaluate("document.fonts.ready.then(() => new Promise(requestAnimationFrame))")
            path = folder / f"{picture.name}.png"
            page.screenshot(path=path, animations="disabled")
            context.close()
            size_bytes = path.stat().st_size
            assert size_bytes < MAX_BYTES, f"{path} has {size_bytes} bytes"
            print(f"{path.name}: {size_bytes} bytes")
        browser.close()


def main(arguments: list[str]) -> None:
    """Run a daemon, fill it and take the pictures."""
    folder = Path(arguments[0]) if arguments else FOLDER
    with tempfile.TemporaryDirectory() as work:
        model = write_demo_model(Path(work) / "model")
        with page_world(Path(work) / "state", model, max_resident_jobs=1) as world:
            fill(world)
            make_pictures(world, folder)


if __name__ == "__main__":
    main(sys.argv[1:])
