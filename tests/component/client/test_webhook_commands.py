"""`horizon webhook`, against a small daemon."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from click.testing import Result
from tests.support.webhook_receiver import SECRET, receiver

if TYPE_CHECKING:
    from tests.component.client.conftest import Daemon

Run = Callable[..., Result]
# A public address, to which nothing is sent here: the queue does not run.
URL = "https://93.184.215.14/hook"


def test_a_webhook_from_adding_to_removing(run: Run, tmp_path: Path) -> None:
    made = run("webhook", "add", URL, "--on", "failed,succeeded,paused")
    assert made.exit_code == 0, made.stderr
    assert made.stdout.startswith("whsec_") and "cannot be shown again" in made.stderr
    [listed] = json.loads(run("webhook", "list", "-o", "json").stdout)
    assert (listed["url"], listed["events"], listed["format"]) == (URL, ["paused", "succeeded", "failed"], "json")
    webhook_id = listed["webhook_id"]
    assert f"try it: horizon webhook test {webhook_id}" in made.stderr
    assert webhook_id in run("webhook", "list").stdout and "secret" not in listed
    assert run("webhook", "deliveries", webhook_id, "-o", "json").stdout == "[]\n"
    (tmp_path / "key").write_text(f"{SECRET}\n")
    own = run("webhook", "add", URL, "--format", "slack", "--secret-file", str(tmp_path / "key"), "-o", "name")
    assert own.stdout.startswith("wh_") and SECRET not in own.stdout + own.stderr
    assert run("webhook", "remove", webhook_id).stdout == f"webhook {webhook_id} is removed\n"
    assert run("webhook", "list", "-o", "name").stdout == own.stdout
    assert run("webhook", "remove", webhook_id).exit_code == 4


def test_a_test_says_how_it_was_answered(run: Run, daemon: Daemon) -> None:
    from horizon_server.services.webhooks.receiver import Receivers

    webhooks = daemon.served.parts.services.webhooks
    webhooks.receivers = webhooks.deliveries._receivers = Receivers(("127.0.0.0/8",))

    async def listen() -> tuple[object, str]:
        made = receiver()
        inbox = await made.__aenter__()
        inbox.answers.append("404 Not Found")
        return made, inbox.url()

    made, url = daemon.served.call(listen())
    webhook_id = run("webhook", "add", url, "-o", "name").stdout.strip()
    refused = run("webhook", "test", webhook_id)
    assert (refused.exit_code, refused.stdout) == (1, "not delivered: the receiver answered HTTP 404\n")
    assert run("webhook", "test", webhook_id).stdout == "delivered: HTTP 204\n"
    shown = run("webhook", "deliveries", webhook_id).stdout.splitlines()
    assert ["delivered" in shown[1], "failed" in shown[2], "HTTP 404" in shown[2]] == [True] * 3
    daemon.served.call(made.__aexit__(None, None, None))  # type: ignore[attr-defined]


def test_what_cannot_be_is_said(run: Run) -> None:
    private = run("webhook", "add", "http://10.0.0.1/")
    assert private.exit_code == 2
    assert "an admin of the node can allow its network with the setting webhook_networks" in private.stderr
    assert "'done' is not a state of a job; choose from queued" in run("webhook", "add", URL, "--on", "done").stderr
    assert run("webhook", "add", URL, "--project", "nobodys").exit_code == 4
