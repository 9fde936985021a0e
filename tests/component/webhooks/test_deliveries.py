"""What receivers of webhooks get, from a daemon with a real database over real connections."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from pathlib import Path

import pytest
from sqlalchemy import update
from tests.component.webhooks.conftest import ADA, LOOPBACK, Post
from tests.conftest import MakeDaemon
from tests.daemon_parts import DaemonParts
from tests.support.webhook_receiver import SECRET, Receiver, documented_check, receiver

from horizon_server.db import webhooks as stored
from horizon_server.db.tables import WebhookDeliveryRow
from horizon_server.network import own_certificate
from horizon_server.records.account import Principal
from horizon_server.records.job import JobState
from horizon_server.services.webhooks import deliveries
from horizon_server.services.webhooks.deliveries import LONGEST_WAIT_S, MAX_ATTEMPTS, MAX_GIVEN_UP, wait_s
from horizon_server.services.webhooks.receiver import Receivers, Refused

DAY_S = 86400.0


def lead_to(monkeypatch: pytest.MonkeyPatch, addresses: list[str]) -> None:
    """Have every host name lead to these addresses."""

    async def getaddrinfo(host: str, port: int, **_: object) -> list[object]:
        return [(2, 1, 6, "", (address, port)) for address in addresses]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)


async def test_a_change_is_told_once_and_signed_as_the_page_says(
    daemon: DaemonParts, post: Post, ada: Principal, inbox: Receiver
) -> None:
    webhook = await post.add(ada, inbox.url("/hook?x=1"), "succeeded", "running")
    job = await daemon.job_in(JobState.SUCCEEDED, ada, name="first", message="done")
    assert await post.send() == 2
    assert await post.send(after_s=DAY_S) == 0
    running, succeeded = inbox.requests
    assert (running.json["type"], succeeded.json["type"]) == ("job.running", "job.succeeded")
    assert succeeded.json["data"] == {
        "job_id": job.job_id,
        "name": "first",
        "owner": "ada",
        "project": "ada",
        "state": "SUCCEEDED",
        "reason": "",
        "message": "done",
        "step": 0,
        "num_steps": 0,
    }
    assert succeeded.path == "/hook?x=1"
    is_genuine = documented_check()
    for request in inbox.requests:
        assert is_genuine(SECRET, request.headers, request.body)
        assert not is_genuine(SECRET, request.headers, request.body + b" ")
        assert not is_genuine("whsec_" + "A" * 32, request.headers, request.body)
    assert (await post.newest(webhook)).outcome == "delivered"
    assert (await post.webhook(webhook)).last_result == "delivered"


async def test_what_is_not_answered_is_sent_again_with_the_same_id_for_a_day(
    daemon: DaemonParts, post: Post, ada: Principal, inbox: Receiver
) -> None:
    inbox.answers.extend(["500 Oh", "", "503 Later\r\nretry-after: 3600"])
    webhook = await post.add(ada, inbox.url())
    await daemon.job_in(JobState.FAILED, ada)
    assert await post.send() == 1
    first = await post.newest(webhook)
    assert (first.outcome, first.status_code, first.error) == ("pending", 500, "the receiver answered HTTP 500")
    assert await post.send(after_s=1.0) == 0, "it waits before the next attempt"
    assert await post.send(after_s=10.0) == 1
    cut = await post.newest(webhook)
    assert (cut.status_code, cut.outcome) == (0, "pending")
    assert "connection" in cut.error
    assert await post.send(after_s=30.0) == 1
    assert await post.send(after_s=3000.0) == 0, "the receiver wants an hour"
    assert await post.send(after_s=1000.0) == 1
    assert len({request.id for request in inbox.requests}) == 1
    assert len({request.body for request in inbox.requests}) == 1
    done = await post.newest(webhook)
    assert (done.outcome, done.num_attempts, done.error) == ("delivered", 4, "")
    waits = [wait_s(number) for number in range(1, MAX_ATTEMPTS)]
    assert sorted(waits) == waits and waits[-1] == LONGEST_WAIT_S
    assert 0.8 * DAY_S < sum(waits) < 1.2 * DAY_S


async def test_a_daemon_that_is_killed_between_sending_and_storing_sends_again_with_the_same_id(
    make_daemon: MakeDaemon, state: Path, inbox: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make_daemon(state, queue=False, webhook_networks=LOOPBACK) as first:
        post = Post(first)
        await post.add(ADA, inbox.url())
        await first.job_in(JobState.SUCCEEDED, ADA)
        inbox.news.clear()

        async def never(*_: object, **__: object) -> str:
            await asyncio.Event().wait()
            return ""

        monkeypatch.setattr(post.webhooks.store, "store_attempt", never)
        [task] = await post.webhooks.deliveries.send_due()
        await asyncio.wait_for(inbox.news.wait(), 240)
        task.cancel()
        await asyncio.wait([task])
    async with make_daemon(state, queue=False, webhook_networks=LOOPBACK) as second:
        assert await Post(second).send() == 1
    assert len(inbox.requests) == 2
    assert len({request.id for request in inbox.requests}) == 1


async def test_one_that_is_given_up_is_shown_and_five_in_a_row_disable(
    daemon: DaemonParts, post: Post, ada: Principal, inbox: Receiver
) -> None:
    webhook = await post.add(ada, inbox.url())
    for number in range(MAX_GIVEN_UP + 1):
        await daemon.job_in(JobState.SUCCEEDED, ada, name=f"job-{number}")
    rows = await post.webhooks.store.deliveries(webhook.webhook_id)
    # All but the last one have had all attempts but one.
    almost = update(WebhookDeliveryRow).where(WebhookDeliveryRow.delivery_id.in_([row.delivery_id for row in rows[1:]]))
    async with daemon.database.session() as session:
        await session.execute(almost.values(num_attempts=MAX_ATTEMPTS - 1))
    inbox.answers.extend(["500 Oh"] * MAX_GIVEN_UP)
    await post.send()
    outcomes = [delivery.outcome for delivery in await post.webhooks.store.deliveries(webhook.webhook_id)]
    assert outcomes == ["dropped", *["failed"] * MAX_GIVEN_UP]
    disabled = await post.webhook(webhook)
    assert "5 deliveries in a row were given up" in disabled.disable_reason and disabled.disabled_s is not None
    await daemon.job_in(JobState.SUCCEEDED, ada, name="unheard")
    inbox.answers.append("500 Still")
    refused = await post.webhooks.test(ada, webhook.webhook_id)
    assert (refused.outcome, refused.event, refused.num_attempts) == ("failed", "webhook.test", 1)
    assert (await post.webhook(webhook)).disabled_s is not None
    assert (await post.webhooks.test(ada, webhook.webhook_id)).outcome == "delivered"
    assert (await post.webhook(webhook)).disabled_s is None, "an answer enables it"
    assert inbox.requests[-1].json["data"]["webhook_id"] == webhook.webhook_id
    await daemon.job_in(JobState.SUCCEEDED, ada, name="heard")
    await post.send()
    assert inbox.requests[-1].json["data"]["name"] == "heard"


async def test_gone_disables_at_once_and_a_redirect_is_not_followed(
    daemon: DaemonParts, post: Post, ada: Principal, inbox: Receiver
) -> None:
    async with receiver() as elsewhere:
        inbox.answers.append(f"307 There\r\nlocation: {elsewhere.url()}")
        webhook = await post.add(ada, inbox.url())
        await daemon.job_in(JobState.SUCCEEDED, ada)
        await post.send()
        redirected = await post.newest(webhook)
        assert (redirected.outcome, redirected.status_code) == ("pending", 307)
        assert "redirects (HTTP 307), which is not followed" in redirected.error
        assert elsewhere.requests == []
    inbox.answers.append("410 Gone")
    await post.send(after_s=60.0)
    assert (await post.newest(webhook)).outcome == "failed"
    assert (await post.webhook(webhook)).disable_reason == "the receiver says that it wants no more (HTTP 410)"


async def test_a_name_is_checked_when_the_connection_is_opened(
    daemon: DaemonParts, post: Post, ada: Principal, inbox: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name leads to a public address when the webhook is created, and to loopback when it is told something."""
    guarded = Receivers(())
    monkeypatch.setattr(post.webhooks, "receivers", guarded)
    monkeypatch.setattr(post.webhooks.deliveries, "_receivers", guarded)
    leads_to = ["93.184.215.14"]
    lead_to(monkeypatch, leads_to)
    webhook = await post.add(ada, inbox.url(host="rebinding.example"))
    leads_to[0] = "127.0.0.1"
    await daemon.job_in(JobState.SUCCEEDED, ada)
    await post.send()
    refused = await post.newest(webhook)
    assert "an admin of the node can allow its network with the setting webhook_networks" in refused.error
    assert inbox.requests == []


async def test_the_certificate_is_checked_against_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = own_certificate(tmp_path, ())
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served.load_cert_chain(made.certificate, made.key)
    async with receiver(served) as secure:
        url = secure.url(scheme="https", host="localhost")
        with pytest.raises(OSError, match="the certificate is not valid"):
            await Receivers(LOOPBACK).post(url, "{}", {})
        monkeypatch.setenv("SSL_CERT_FILE", str(made.authority))
        assert (await Receivers(LOOPBACK).post(url, "{}", {})).status_code == 204
        lead_to(monkeypatch, ["127.0.0.1"])
        with pytest.raises(OSError, match="the certificate is not valid: Hostname mismatch"):
            await Receivers(LOOPBACK).post(secure.url(scheme="https", host="other.example"), "{}", {})
    assert [request.body for request in secure.requests] == [b"{}"]


async def test_nobody_is_connected_to_whom_the_daemon_does_not_send_to(inbox: Receiver) -> None:
    for host in ("127.0.0.1", "localhost"):
        with pytest.raises(Refused):
            await Receivers(("10.0.0.0/8",)).post(inbox.url(host=host), "{}", {})
    assert inbox.requests == []


async def test_a_receiver_that_sends_a_byte_now_and_then_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("horizon_server.services.webhooks.receiver.CONNECT_S", 0.1)
    monkeypatch.setattr("horizon_server.services.webhooks.receiver.ANSWER_S", 0.2)

    async def drip(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.02)
        ended.set()

    ended = asyncio.Event()
    server = await asyncio.start_server(drip, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(OSError, match=r"no answer within 0\.2 s|connection"):
        await Receivers(LOOPBACK).post(f"http://127.0.0.1:{port}/", "{}", {})
    await asyncio.wait_for(ended.wait(), 240)
    server.close()


async def test_few_requests_are_under_way_and_few_of_one_user(
    daemon: DaemonParts, post: Post, ada: Principal, inbox: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deliveries, "MAX_AT_ONCE", 3)
    bob, cy = await daemon.user("bob"), await daemon.user("cy")
    for user in (ada, ada, ada, bob, bob, cy):
        await post.add(user, inbox.url())
    for user in (ada, bob, cy):
        await daemon.job_in(JobState.SUCCEEDED, user, name=f"of-{user.name}")
    begun = await post.webhooks.deliveries.send_due()
    owners = sorted(owner for owner, _ in post.webhooks.deliveries._sending.values())
    assert len(begun) == 3 and owners.count("ada") == 2, owners
    assert await post.webhooks.deliveries.send_due() == []
    await asyncio.gather(*begun)
    await post.send()
    assert len(inbox.requests) == 6


async def test_the_oldest_of_too_many_make_room_and_old_ones_are_forgotten(
    daemon: DaemonParts, post: Post, ada: Principal, inbox: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "MAX_PENDING", 3)
    webhook = await post.add(ada, inbox.url(), "queued")
    for number in range(5):
        await daemon.submit(ada, f"job-{number}")
    found = await post.webhooks.store.deliveries(webhook.webhook_id)
    assert [delivery.outcome for delivery in found] == ["pending"] * 3 + ["dropped"] * 2
    assert found[-1].error == "more than 3 deliveries waited"
    await post.send()
    await post.webhooks.sweep()
    assert len(await post.webhooks.store.deliveries(webhook.webhook_id)) == 5
    assert await post.webhooks.store.trim(before_s=time.time() + 60.0) == 5


async def test_slack_gets_a_sentence_in_which_nobody_is_called(
    make_daemon: MakeDaemon, state: Path, inbox: Receiver
) -> None:
    settings = {"webhook_networks": LOOPBACK, "public_url": "https://gpubox.lab.edu:7172/"}
    async with make_daemon(state, queue=False, **settings) as daemon:
        post = Post(daemon)
        await post.add(ADA, inbox.url(), format="slack")
        job = await daemon.job_in(JobState.FAILED, ADA, name="first", message="out of memory <!channel> & more")
        await post.send()
    link = f"https://gpubox.lab.edu:7172/jobs/{job.job_id}"
    assert inbox.requests[0].json == {
        "text": f"Job *<{link}|first>* (ada, project ada) is FAILED: out of memory &lt;!channel&gt; &amp; more"
    }


async def test_a_long_message_of_a_job_is_cut(daemon: DaemonParts, post: Post, ada: Principal, inbox: Receiver) -> None:
    await post.add(ada, inbox.url())
    await daemon.job_in(JobState.FAILED, ada, message="x" * 5000)
    await post.send()
    assert inbox.requests[0].json["data"]["message"] == "x" * 2000
