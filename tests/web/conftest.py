"""A real browser over a real daemon; only the workers follow a script. Without the browser, these tests skip.

Playwright keeps an event loop running in the thread that it is used from. That is a thread of its own here: in the
thread of the tests, no asynchronous test of the same process could run afterwards.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page
    from tests.support.page_world import PageWorld

WAIT_MS = 240_000.0

Open = Callable[..., "Page"]

_BROWSER_THREAD = ThreadPoolExecutor(max_workers=1, thread_name_prefix="browser")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool:
    """Run the tests of this folder in the thread of the browser."""
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    _BROWSER_THREAD.submit(pyfuncitem.obj, **arguments).result()
    return True


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium without a window."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
    executable = shutil.which("chromium")
    if executable is None:
        pytest.skip("needs chromium: apt-get install chromium")
    stack = ExitStack()

    def opened() -> Browser:
        playwright = stack.enter_context(sync_api.sync_playwright())
        sync_api.expect.set_options(timeout=WAIT_MS)
        # Containers have no user namespaces, and small /dev/shm.
        browser: Browser = playwright.chromium.launch(
            executable_path=executable, args=["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
        )
        stack.callback(browser.close)
        return browser

    try:
        yield _BROWSER_THREAD.submit(opened).result()
    finally:
        _BROWSER_THREAD.submit(stack.close).result()


@pytest.fixture(scope="module")
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
    stack = ExitStack()

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
    _BROWSER_THREAD.submit(stack.close).result()
    # The browser itself reports each answer that is not a success; tests provoke those.
    assert [text for text in said if not text.startswith("Failed to load resource")] == []
