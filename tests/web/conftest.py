"""A real browser over a real daemon; only the workers follow a script. Without the browser, these tests skip."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page
    from tests.support.page_world import PageWorld

WAIT_MS = 60_000.0

Open = Callable[..., "Page"]


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """Chromium without a window."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
    executable = shutil.which("chromium")
    if executable is None:
        pytest.skip("needs chromium: apt-get install chromium")
    # Not the session's: its event loop would run during the asynchronous tests of other packages.
    with sync_api.sync_playwright() as playwright:
        sync_api.expect.set_options(timeout=WAIT_MS)
        # Containers have no user namespaces, and small /dev/shm.
        opened = playwright.chromium.launch(
            executable_path=executable, args=["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
        )
        yield opened
        opened.close()


@pytest.fixture(scope="package")
def world(browser: Browser, tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Iterator[PageWorld]:
    """A daemon with ann, bob and root, and two jobs of ann that have ended."""
    from tests.support.page_world import ended_jobs, page_world

    with page_world(tmp_path_factory.mktemp("page") / "state", model_folder) as made:
        ended_jobs(made)
        yield made


@pytest.fixture
def open_page(browser: Browser, world: PageWorld) -> Iterator[Open]:
    """Open an address as a user, in a browser of their own; at the end, no page may have reported an error."""
    said: list[str] = []
    with ExitStack() as stack:

        def open_as(user: str | None, address: str = "/", *, width: int = 1440, scheme: str = "light") -> Page:
            context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]  # light or dark
            stack.callback(context.close)
            context.set_default_timeout(WAIT_MS)
            if user is not None:
                context.add_init_script(f"sessionStorage.setItem('horizon-token', '{world.tokens[user]}')")
            page = context.new_page()
            page.on("console", lambda one: said.append(one.text) if one.type in ("error", "warning") else None)
            page.on("pageerror", lambda error: said.append(str(error)))
            page.goto(world.url + address)
            return page

        yield open_as
    # The browser itself reports each answer that is not a success; tests provoke those.
    assert [text for text in said if not text.startswith("Failed to load resource")] == []
