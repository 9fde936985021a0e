"""The page for everybody: axe finds nothing wrong, a phone cuts nothing off, and the keyboard reaches what is there."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from horizon_server.records.sharing import NodeCondition

if TYPE_CHECKING:
    from playwright.sync_api import Page
    from tests.support.page_world import PageWorld

Open = Callable[..., "Page"]

sync_api = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs the package axe-playwright-python")
expect = sync_api.expect

ADDRESSES = {
    "/": "Overview",
    "/jobs": "Jobs",
    "/jobs/fast": "fast",
    "/jobs/fast?tab=evaluations": "Answers",
    "/jobs/slow?tab=checkpoints": "4 on the node",
    "/jobs/fast?tab=config": "fields differ",
    "/jobs/fast?tab=plan": "Host memory",
    "/jobs/fast?tab=log": "Log",
    "/new?from=fast": "Clone fast",
    "/compare?jobs=slow,fast": "fields differ",
    "/queue": "Queue",
    "/usage": "Device time",
    "/models": "Models",
    "/datasets": "Datasets",
    "/new": "New job",
}
"""By address, a heading that is there once the page is."""


def _violations(page: Page) -> list[str]:
    found = axe.Axe().run(page).response["violations"]
    return [f"{one['id']}: {node['html'][:160]} {node.get('failureSummary')}" for one in found for node in one["nodes"]]


@pytest.mark.parametrize(("width", "scheme"), [(1440, "light"), (390, "dark")])
def test_axe_finds_nothing_and_nothing_is_cut_off(open_page: Open, width: int, scheme: str) -> None:
    page = open_page("ann", "/", width=width, scheme=scheme)
    base = page.url.rstrip("/")
    wrong = []
    for address, heading in ADDRESSES.items():
        page.goto(base + address)
        expect(page.get_by_role("heading", name=re.compile(heading)).first).to_be_visible()
        expect(page.get_by_role("status", name="Loading")).to_have_count(0)
        wrong += [f"{address}: {text}" for text in _violations(page)]
        if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
            wrong.append(f"{address} is wider than {width} px")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("width", "scheme"), [(1440, "dark"), (390, "light")])
def test_axe_finds_nothing_where_one_signs_in_and_in_a_question(open_page: Open, width: int, scheme: str) -> None:
    page = open_page(None, "/", width=width, scheme=scheme)
    expect(page.get_by_label("Token")).to_be_visible()
    assert _violations(page) == []
    page = open_page("ann", "/jobs/slow?tab=checkpoints", width=width, scheme=scheme)
    page.get_by_role("button", name="Delete step 80").click()
    expect(page.get_by_role("dialog")).to_be_visible()
    assert _violations(page) == []


def test_maintenance_is_announced_on_every_page_and_axe_finds_nothing_wrong_with_it(
    world: PageWorld, open_page: Open
) -> None:
    sharing, root = world.daemon.parts.services.sharing, world.users["root"]
    start_s = time.time() + 86400
    window = NodeCondition(window_start_s=start_s, window_end_s=start_s + 3600, message="New disks.")
    world.daemon.call(sharing.set_node(root, window))
    try:
        page = open_page("bob", "/models")
        notice = page.get_by_text(re.compile(r"^Maintenance .* New disks\.$"))
        expect(notice).to_be_visible()
        assert _violations(page) == []
        page.get_by_role("link", name="Queue").click()
        expect(notice).to_be_visible()
    finally:
        world.daemon.call(sharing.set_node(root, NodeCondition()))
    expect(notice).to_have_count(0)


def test_the_keyboard_skips_to_the_content_and_reaches_every_link(open_page: Open) -> None:
    page = open_page("ann", "/jobs")
    expect(page.get_by_role("link", name="slow")).to_be_visible()
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="New job")).to_be_focused()
    for _ in range(30):
        if page.evaluate("document.activeElement.textContent") == "slow":
            break
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="slow")).to_be_visible()
    # Reading goes on from the beginning of the page that was opened.
    expect(page.get_by_role("main")).to_be_focused()
