"""To which addresses webhooks may be sent, and what of them is never written down."""

from __future__ import annotations

import asyncio

import pytest

from horizon_proto.v1 import webhook_pb2
from horizon_server.api.grpc.audited import asked_by, resource_of
from horizon_server.errors import InvalidSpec
from horizon_server.services.webhooks.receiver import MAX_URL_CHARS, Receivers


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("ftp://example.com/", "must begin with https:// or http:// and a host"),
        ("https:///path", "must begin with https:// or http:// and a host"),
        ("https://user:password@example.com/", "must not contain a user name or password"),
        ("https://example.com/#here", "must not contain a # fragment"),
        ("https://example.com:99999/", "Port out of range"),
        ("http://[::1", "Invalid IPv6 URL"),
        ("https://example.com/a b", "without spaces"),
        ("https://example.com/" + "a" * MAX_URL_CHARS, "it may have 2,048"),
        ("http://127.0.0.1/", "setting webhook_networks"),
        ("http://localhost:8080/", "setting webhook_networks"),
        ("http://10.1.2.3/hook", "setting webhook_networks"),
        ("http://169.254.169.254/latest/meta-data", "setting webhook_networks"),
        ("http://100.64.0.1/", "setting webhook_networks"),
        ("http://0.0.0.0/", "setting webhook_networks"),
        ("http://224.0.0.1/", "setting webhook_networks"),
        ("http://[::1]/", "setting webhook_networks"),
        ("http://[fe80::1]/", "setting webhook_networks"),
        ("http://[fd00::1]/", "setting webhook_networks"),
        ("http://[::ffff:10.0.0.1]/", "setting webhook_networks"),
        ("http://[2002:a00:1::]/", "setting webhook_networks"),
        ("http://[64:ff9b::a00:1]/", "setting webhook_networks"),
    ],
)
async def test_an_address_that_is_not_sent_to_is_refused(url: str, why: str) -> None:
    with pytest.raises(InvalidSpec, match="url") as refused:
        await Receivers(()).check(url)
    assert why in refused.value.message
    assert refused.value.violations[0].field == "url"


async def test_public_addresses_and_allowed_networks_pass() -> None:
    receivers = Receivers(("10.1.0.0/16", "fd00::/8"))
    for host in ("93.184.215.14", "10.1.2.3", "[fd00::1]", "[::ffff:10.1.0.1]", "[2606:4700::1]"):
        await receivers.check(f"http://{host}:8443/hook?x=1")
    with pytest.raises(InvalidSpec):
        await receivers.check("http://10.2.0.1/")


async def test_few_addresses_of_a_name_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    many = [f"93.184.215.{number}" for number in range(20)]

    async def getaddrinfo(host: str, port: int, **_: object) -> list[object]:
        return [(2, 1, 6, "", (address, port)) for address in ("10.0.0.1", *many)]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    assert await Receivers(()).addresses("many.example", 443) == many[:4], "without the private one"


async def test_the_audit_log_has_neither_address_nor_secret() -> None:
    request = webhook_pb2.CreateWebhookRequest(url="https://hooks.example/T0/key", secret="whsec_x", format="slack")
    answer = webhook_pb2.CreateWebhookResponse(webhook=webhook_pb2.Webhook(webhook_id="wh_1", url=request.url))
    assert (resource_of(answer), asked_by(request).values) == ("wh_1", {"format": "slack"})
