"""What a reader waits for with a job of 100,000 steps: Chromium opens its page at a real daemon, five times, each with
nothing kept from before. The daemon has shown its overview once, and at the first visit has read no step of the job.

    python -m bench.page [STEPS]

It needs `chromium` and the package `playwright`.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import statistics
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright
from tests.support.page_world import PageWorld, learning_script, page_world, train

from bench.series import write_steps
from horizon_server.demo.recipe import write_demo_model
from horizon_server.records.job import JobState

VISITS = 5
_WAIT_MS = 120_000.0
# A chart has its canvas only once it has values to draw.
_WATCH = """
window.drawn = new Promise((tell) => new MutationObserver((_, watch) => {
  if (!document.querySelector('.chart canvas')) return;
  watch.disconnect();
  // The frame after the next has the lines on the screen.
  requestAnimationFrame(() => requestAnimationFrame(() => tell(performance.now())));
}).observe(document, { childList: true, subtree: true }));
"""
_FIRST_PAINT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"


def _job_of(world: PageWorld, database: Path, num_steps: int) -> str:
    """A job that has ended, with so many steps in its journal."""
    job = world.submit("ann", "long", learning_script(20, step_s=0.001), train=train(20))
    job = world.until(job, JobState.SUCCEEDED)
    # The events of the few steps it did are those of its first ones.
    write_steps(database, job.job_id, job.last_sequence + 1, num_steps)
    with sqlite3.connect(database) as connection:
        connection.execute(
            "update jobs set last_sequence = ?, num_steps = ? where job_id = ?",
            (num_steps, num_steps, job.job_id),
        )
    return job.job_id


def _visit(browser: Browser, world: PageWorld, address: str) -> tuple[float, float]:
    """The first paint and the drawn curve of one visit, in milliseconds since its navigation."""
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    context.add_init_script(f"sessionStorage.setItem('horizon-token', '{world.tokens['ann']}')")
    context.add_init_script(_WATCH)
    page = context.new_page()
    page.goto(world.url + address)
    page.locator(".chart canvas").first.wait_for(timeout=_WAIT_MS)
    drawn_ms, painted_ms = page.evaluate("window.drawn"), page.evaluate(_FIRST_PAINT)
    context.close()
    return painted_ms, drawn_ms


def main(num_steps: int) -> int:
    """Open the page and print what was waited for."""
    executable = shutil.which("chromium")
    if executable is None:
        print("chromium is missing: apt-get install chromium", file=sys.stderr)
        return 1
    flags = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
    with tempfile.TemporaryDirectory() as work, sync_playwright() as playwright:
        state, model = Path(work) / "state", write_demo_model(Path(work) / "model")
        with page_world(state, model) as world:
            job_id = _job_of(world, state / "horizon.db", num_steps)
            browser = playwright.chromium.launch(executable_path=executable, args=flags)
            overview = browser.new_page()
            overview.goto(world.url)
            overview.get_by_label("Token").fill(world.tokens["ann"])
            overview.get_by_role("button", name="Sign in").click()
            overview.get_by_role("heading", name="Overview").wait_for(timeout=_WAIT_MS)
            overview.close()
            visits = [_visit(browser, world, f"/jobs/{job_id}") for _ in range(VISITS)]
            browser.close()
    print(f"{num_steps} steps, {VISITS} visits, load {os.getloadavg()[0]:.1f}\n")
    print("| what | least ms | median ms | first visit ms |\n| --- | --- | --- | --- |")
    for what, times in zip(("first paint", "curve drawn"), zip(*visits, strict=True), strict=True):
        print(f"| {what} | {min(times):.0f} | {statistics.median(times):.0f} | {times[0]:.0f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000))
