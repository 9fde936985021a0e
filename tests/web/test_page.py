"""What people do with the page, in a real browser: look, compare, make changes, and go on when the daemon is back."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from tests.support.page_world import learning_script, train

from horizon_server.events import Message
from horizon_server.records.job import JobState
from horizon_server.records.task_result import TaskResult

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route
    from tests.support.page_world import PageWorld

Open = Callable[..., "Page"]

sync_api = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
expect = sync_api.expect


def sign_in(page: Page, token: str) -> None:
    page.get_by_label("Token").fill(token)
    page.get_by_role("button", name="Sign in").click()


def sign_in_after_a_refusal(page: Page, token: str) -> None:
    sign_in(page, "hzn_wrong")
    expect(page.get_by_role("alert").filter(has_text=re.compile("token"))).to_be_visible()
    sign_in(page, token)
    expect(page.get_by_role("heading", name="slow")).to_be_visible()


def test_signing_in_says_what_is_wrong_and_leads_to_the_address_that_was_asked_for(
    world: PageWorld, open_page: Open
) -> None:
    page = open_page(None, "/jobs/slow")
    sign_in_after_a_refusal(page, world.tokens["ann"])
    expect(page.get_by_role("status").filter(has_text="live")).to_be_visible()
    stored = "[sessionStorage.getItem('horizon-token'), localStorage.getItem('horizon-token'), document.cookie]"
    assert page.evaluate(stored) == [world.tokens["ann"], None, ""]
    page.reload()
    expect(page.get_by_role("heading", name="slow")).to_be_visible()
    page.get_by_role("button", name="Sign out").click()
    page.get_by_label("Token").fill(world.tokens["ann"])
    page.get_by_label("Stay signed in on this browser").check()
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("heading", name="slow")).to_be_visible()
    assert page.evaluate(stored) == [None, world.tokens["ann"], ""]


def test_a_late_refusal_of_an_earlier_token_does_not_sign_out_who_came_after(world: PageWorld, open_page: Open) -> None:
    page = open_page(None, "/jobs/slow")
    refused: list[Route] = []

    def hold_all_but_one(route: Route) -> None:
        if route.request.headers.get("authorization") == "Bearer hzn_wrong":
            refused.append(route)
            if len(refused) > 1:
                return
        route.continue_()

    page.route("**/horizon/v1/**", hold_all_but_one)
    sign_in_after_a_refusal(page, world.tokens["ann"])
    assert len(refused) > 1
    for route in refused[1:]:
        with page.expect_event("requestfinished"):
            route.continue_()
    expect(page.get_by_role("status").filter(has_text="live")).to_be_visible()


def test_every_address_can_be_opened_and_back_leads_where_one_was(world: PageWorld, open_page: Open) -> None:
    page = open_page("ann")
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    page.get_by_role("link", name="Jobs", exact=True).click()
    page.get_by_label("Search").fill("slo")
    expect(page.get_by_role("row")).to_have_count(2)  # with the heading
    expect(page).to_have_url(re.compile(r"/jobs\?search=slo$"))
    page.get_by_role("link", name="slow").click()
    expect(page.get_by_role("heading", name="slow")).to_be_visible()
    page.get_by_role("link", name="Checkpoints").click()
    expect(page.get_by_text(re.compile(r"horizon checkpoint pull slow@80"))).to_be_visible()
    page.go_back()
    page.go_back()
    expect(page.get_by_label("Search")).to_have_value("slo")
    page.reload()
    expect(page.get_by_role("row")).to_have_count(2)
    for address, heading in (
        ("/queue", "Queue"),
        ("/usage", "Usage"),
        ("/models", "Models"),
        ("/datasets", "Datasets"),
    ):
        page.goto(world.url + address)
        expect(page.get_by_role("heading", name=heading, exact=True)).to_be_visible()
        expect(page.get_by_role("alert")).to_have_count(0)


def test_a_job_is_watched_from_its_queue_to_its_end_with_few_calls(world: PageWorld, open_page: Open) -> None:
    script = learning_script(300, hold_at=1, step_s=0.01, eval_at=(100, 200))
    job = world.submit("ann", "watched", script, train=train(300), checkpoint={"every_steps": 0})
    world.until(job, JobState.RUNNING)
    page = open_page("ann", "/jobs/watched")
    calls: list[str] = []
    page.on("request", lambda request: calls.append(request.url))
    expect(page.get_by_text("No steps yet.")).to_be_visible()
    world.daemon.parts.release("watched")
    loss = page.get_by_role("application", name=re.compile("^Loss"))
    expect(loss).to_be_visible()
    expect(page.get_by_role("application", name=re.compile("^Gradient norm"))).to_be_visible()
    expect(page.get_by_role("heading", name=re.compile("watched Finished"))).to_be_visible()
    expect(page.get_by_text("watched is now finished")).to_be_attached()
    expect(page.get_by_text("step 300 of 300")).to_be_visible()
    # 300 steps, two evaluations, a checkpoint and the end: the stream tells it all, and the job is read again for some.
    told = [url for url in calls if "/stream" in url]
    assert len(calls) <= 12, calls
    assert len(told) <= 2, told
    loss.focus()
    page.keyboard.press("Home")
    expect(page.get_by_text(re.compile(r"^step 1: train"))).to_be_attached()
    page.get_by_role("link", name="Evaluations").click()
    page.get_by_role("button", name=re.compile("Let me work it out|The numbers")).first.click()
    expect(page.get_by_role("dialog")).to_contain_text("Reference")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.get_by_role("link", name="Log").click()
    expect(page.get_by_role("log")).to_contain_text("step 1/300")
    page.get_by_role("link", name="Config").click()
    expect(page.get_by_role("row", name=re.compile("train.learning_rate"))).to_contain_text("2e-5")
    page.get_by_role("link", name="Plan and use").click()
    expect(page.get_by_role("heading", name="Host memory")).to_be_visible()


def test_an_open_page_makes_less_than_ten_calls_a_minute(world: PageWorld, open_page: Open) -> None:
    page = open_page("ann", "/")
    expect(page.get_by_role("status").filter(has_text="live")).to_be_visible()
    page.clock.install()
    page.reload()
    expect(page.get_by_role("status").filter(has_text="live")).to_be_visible()
    calls: list[str] = []
    page.on("request", lambda request: calls.append(request.url))
    page.clock.run_for(30_000)
    assert len(calls) <= 5, calls


def test_jobs_are_compared_with_what_differs_first(open_page: Open) -> None:
    page = open_page("ann", "/jobs")
    for name in ("slow", "fast"):
        page.get_by_label(f"Compare {name}").check()
    page.get_by_role("link", name="Compare", exact=True).click()
    expect(page.get_by_role("heading", name=re.compile("1 of .* fields differ"))).to_be_visible()
    first = page.get_by_role("row").nth(1)
    expect(first).to_contain_text("train.learning_rate")
    expect(first).to_contain_text("1e-5")
    expect(first).to_contain_text("3e-5")
    loss = page.get_by_role("application", name=re.compile(r"^Loss\. (slow|fast): .* (slow|fast): "))
    expect(loss).to_be_visible()
    box = loss.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + 60, steps=4)
    page.mouse.up()
    expect(page).to_have_url(re.compile(r"from=\d+&to=\d+"))
    page.get_by_role("button", name=re.compile("^All steps")).click()
    expect(page).not_to_have_url(re.compile("from="))
    page.get_by_label("Smoothing").fill("0.9")
    expect(page).to_have_url(re.compile("smooth=0.9"))


def test_a_clone_shows_errors_at_the_field_then_its_plan_and_is_submitted(world: PageWorld, open_page: Open) -> None:
    world.daemon.parts.script("slow-2", learning_script(5))
    page = open_page("ann", "/jobs/slow")
    page.get_by_role("link", name="Clone").click()
    expect(page.get_by_role("textbox", name="name", exact=True)).to_have_value("slow-2")
    rate = page.get_by_role("textbox", name="learning_rate")
    rate.fill("-1")
    page.get_by_role("button", name="Show the plan").click()
    expect(rate).to_have_attribute("aria-invalid", "true")
    expect(rate).to_be_focused()
    rate.fill("7e-5")
    page.get_by_role("button", name="Show the plan").click()
    expect(page.get_by_role("heading", name="Plan")).to_be_visible()
    expect(page.get_by_text("2 fields differ from slow")).to_be_visible()
    page.get_by_role("button", name="Submit").click()
    expect(page.get_by_role("heading", name=re.compile("slow-2"))).to_be_visible()
    expect(page.get_by_role("heading", name=re.compile("slow-2 Finished"))).to_be_visible()
    page.get_by_role("link", name="Config").click()
    page.get_by_label("from").select_option(label="slow (ann)")
    expect(page.get_by_role("row", name=re.compile("train.learning_rate"))).to_contain_text("1e-5")


def test_a_job_is_paused_resumed_and_cancelled_after_a_question(world: PageWorld, open_page: Open) -> None:
    job = world.submit("ann", "acted-on", learning_script(400, hold_at=20), train=train(400))
    world.until(job, step=19)
    page = open_page("ann", "/jobs/acted-on")
    pause = page.get_by_role("button", name="Pause")
    pause.click()
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(pause).to_be_focused()
    pause.click()
    page.get_by_role("dialog").get_by_role("button", name="Pause").click()
    expect(page.get_by_role("heading", name=re.compile("acted-on Paused"))).to_be_visible()
    page.get_by_role("button", name="Priority").click()
    page.get_by_role("spinbutton").fill("7")
    page.get_by_role("button", name="Set priority").click()
    expect(page.get_by_role("definition").filter(has_text=re.compile("^7$"))).to_be_visible()
    page.get_by_role("link", name="Checkpoints").click()
    page.get_by_role("button", name="Keep step 19").click()
    page.get_by_role("dialog").get_by_role("button", name="Keep").click()
    expect(page.get_by_text("kept", exact=True)).to_be_visible()
    page.get_by_role("button", name="Resume").click()
    page.get_by_role("dialog").get_by_role("button", name="Resume").click()
    expect(page.get_by_role("heading", name=re.compile("acted-on (Running|Starting|Preparing|Queued)"))).to_be_visible()
    page.get_by_role("button", name="Cancel", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel the job").click()
    expect(page.get_by_role("heading", name=re.compile("acted-on Cancelled"))).to_be_visible()
    assert world.until(job, JobState.CANCELLED).priority == 7


def test_a_checkpoint_is_deleted_once_that_is_confirmed(world: PageWorld, open_page: Open) -> None:
    page = open_page("ann", "/jobs/fast?tab=checkpoints")
    expect(page.get_by_role("heading", name="4 on the node")).to_be_visible()
    page.get_by_role("button", name="Delete step 20").click()
    page.get_by_role("dialog").get_by_role("button", name="Not now").click()
    expect(page.get_by_role("button", name="Delete step 20")).to_be_focused()
    page.get_by_role("button", name="Delete step 20").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(page.get_by_role("heading", name="3 on the node")).to_be_visible()
    expect(page.get_by_text("fast@20 ")).to_have_count(0)


def test_results_of_evaluation_programs_are_shown_as_they_are_recorded(world: PageWorld, open_page: Open) -> None:
    page = open_page("ann", "/jobs/slow?tab=evaluations")
    expect(page.get_by_role("heading", name="Answers", exact=True)).to_be_visible()
    expect(page.get_by_role("heading", name="Results of evaluation programs")).to_have_count(0)
    found = TaskResult(
        step=0, task="gsm8k", metric="exact_match", value=0.5, stderr=0.25, num_samples=4, num_documents=1319
    )
    services = world.daemon.parts.services
    for step in (40, 80):
        world.daemon.call(services.task_results.record(world.users["ann"], "slow", step, [found]))
    rows = page.get_by_role("row", name=re.compile("gsm8k exact_match 0.5 0.25 4 of 1,319"))
    expect(rows).to_have_count(2)
    expect(rows.first).to_contain_text("80")


def test_files_that_are_to_be_deleted_are_kept_after_a_question(world: PageWorld, open_page: Open) -> None:
    parts, call = world.daemon.parts, world.daemon.call
    job = call(parts.services.jobs.get(world.users["ann"], "slow"))
    told = Message(level="warning", text="its checkpoints will be deleted tomorrow")
    call(parts.services.jobs.journal.append_now(job.job_id, told, deletion_s=time.time() + 86400))
    page = open_page("ann", "/jobs/slow?tab=checkpoints")
    expect(page.get_by_text("These checkpoints are deleted automatically")).to_be_visible()
    page.get_by_role("button", name="Keep them").click()
    page.get_by_role("dialog").get_by_role("button", name="Keep").click()
    expect(page.get_by_text("These checkpoints are deleted automatically")).to_have_count(0)
    assert call(parts.services.jobs.get(world.users["ann"], "slow")).keep_files


def test_models_and_datasets_are_searched_in_the_address(world: PageWorld, open_page: Open) -> None:
    page = open_page("ann", "/datasets")
    expect(page.get_by_role("row", name=re.compile("gsm8k"))).to_be_visible()
    page.get_by_label("Search").fill("nothing-like-it")
    expect(page.get_by_text("No dataset is like that.")).to_be_visible()
    expect(page).to_have_url(re.compile(r"/datasets\?search=nothing-like-it$"))
    page.get_by_label("Search").fill("GSM")
    expect(page.get_by_role("row", name=re.compile("gsm8k"))).to_be_visible()
    page.get_by_label("Owner").select_option("ann")
    expect(page).to_have_url(re.compile("owner=ann"))
    page.goto(f"{world.url}/models?search=qwen")
    expect(page.get_by_label("Search")).to_have_value("qwen")
    expect(page.get_by_role("row", name=re.compile("qwen3-tiny"))).to_be_visible()


def test_another_user_sees_nothing_of_a_job_but_that_it_is_there(world: PageWorld, open_page: Open) -> None:
    job = world.submit("ann", "secret-plan", learning_script(400, hold_at=5), train=train(400))
    world.until(job, step=4)
    page = open_page("bob", "/queue")
    entry = page.get_by_role("listitem").filter(has_text="a job of ann")
    expect(entry.first).to_be_visible()
    assert "secret-plan" not in page.content()
    page.goto(f"{world.url}/jobs/{job.job_id}")
    expect(page.get_by_text("There is no such job, or it is not yours.")).to_be_visible()
    page.goto(f"{world.url}/jobs")
    expect(page.get_by_text("There are no jobs yet.")).to_be_visible()
    page.goto(f"{world.url}/")
    expect(page.get_by_text(re.compile("Also on the machine: ann"))).to_be_visible()
    assert "secret-plan" not in page.content()
    world.daemon.call(world.daemon.parts.services.jobs.cancel(world.users["ann"], job.job_id))
    world.until(job, JobState.CANCELLED)


def test_a_page_goes_on_by_itself_when_the_daemon_is_back(world: PageWorld, open_page: Open) -> None:
    job = world.submit("ann", "long-lived", learning_script(300, hold_at=30), train=train(300))
    world.until(job, step=29)
    page = open_page("ann", "/jobs/long-lived")
    expect(page.get_by_text(re.compile("^step 29 of 300"))).to_be_visible()
    world.daemon.terminate()
    expect(page.get_by_role("status").filter(has_text=re.compile("^reconnecting$"))).to_be_visible()
    world.daemon.start()
    expect(page.get_by_role("status").filter(has_text=re.compile("^live$"))).to_be_visible()
    world.daemon.parts.release("long-lived")
    expect(page.get_by_role("heading", name=re.compile("long-lived Finished"))).to_be_visible()
    expect(page.get_by_text(re.compile("^step 300 of 300"))).to_be_visible()


def test_a_token_that_only_reads_gets_no_buttons_that_change(world: PageWorld, open_page: Open) -> None:
    secret = world.daemon.call(_reading_token(world))
    world.tokens["reader"] = secret
    page = open_page("reader", "/jobs/slow")
    expect(page.get_by_role("heading", name="slow")).to_be_visible()
    expect(page.get_by_text("read only")).to_be_visible()
    expect(page.get_by_role("link", name="Clone")).to_have_count(0)
    page.get_by_role("link", name="Checkpoints").click()
    expect(page.get_by_text(re.compile("slow@80"))).to_be_visible()
    expect(page.get_by_role("button", name="Delete")).to_have_count(0)


async def _reading_token(world: PageWorld) -> str:
    _, secret = await world.daemon.parts.services.accounts.create_token("ann", lifetime_s=None, scope="read")
    return secret
