"""Who may call a box, and what it makes of calls that are none."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.component.fleet.conftest import Fleet

from horizon_server.children.entry import Failure, decode_line
from horizon_server.codec import to_json, to_plain
from horizon_server.errors import BoxLost, InvalidSpec, UploadInProgress, WorkerFailed
from horizon_server.nodes.boxes import BoxCall, BoxClient, Item, decode_call, encode_item
from horizon_server.nodes.key import client_context, make_key
from horizon_server.records.account import NODE
from horizon_server.records.blob import BlobRef, BlobStatus

REPORT = BoxCall(name="report", caller=NODE)


def client_of(fleet: Fleet, key: Path | None = None) -> BoxClient:
    return BoxClient(name="box2", address=fleet.server.address, key_file=key or fleet.key)


async def answered(fleet: Fleet, context: ssl.SSLContext | None, sent: bytes) -> bytes:
    """What the box answers before it ends the connection; nothing where it ends it at once."""
    with contextlib.suppress(OSError):
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", fleet.port, ssl=context, server_hostname="horizon-fleet" if context else None
        )
        try:
            writer.write(sent)
            await writer.drain()
            async with asyncio.timeout(240):
                return await reader.read()
        finally:
            writer.close()
    return b""


async def test_only_who_has_the_key_is_answered(fleet: Fleet, tmp_path: Path) -> None:
    line = to_json(REPORT).encode() + b"\n"
    assert b"hostname" in await answered(fleet, client_context(fleet.key), line)
    without = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    without.check_hostname, without.verify_mode = False, ssl.CERT_NONE
    make_key(tmp_path / "other.pem")
    other = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    other.check_hostname, other.verify_mode = False, ssl.CERT_NONE
    other.load_cert_chain(tmp_path / "other.pem")
    for context in (None, without, other):
        assert b"hostname" not in await answered(fleet, context, line)
    with pytest.raises(BoxLost, match=r"box box2 .* has another key, or does not serve other daemons \(box_port\)"):
        await client_of(fleet, tmp_path / "other.pem").ask(REPORT)
    assert await client_of(fleet).ask(REPORT)


async def test_what_is_no_call_is_refused_and_the_next_one_answered(fleet: Fleet) -> None:
    context, version = client_context(fleet.key), REPORT.version
    for sent, why in (
        (b"\n", "the caller is not a daemon of this version"),
        (b"{\n", "the caller is not a daemon of this version"),
        (
            json.dumps({"version": version, "name": "report"}).encode() + b"\n",
            "the caller is not a daemon of this version",
        ),
        (to_json(dataclasses.replace(REPORT, version="0.0.1")).encode() + b"\n", f"it runs horizon {version}, and the"),
    ):
        end = decode_line(await answered(fleet, context, sent))
        assert isinstance(end, Failure) and why in end.error.message, end
    client = client_of(fleet)
    with pytest.raises(InvalidSpec, match="no call is named 'format'"):
        await client.ask(BoxCall(name="format", caller=NODE))
    with pytest.raises(InvalidSpec, match="the call submit is not one of this version"):
        await client.ask(BoxCall(name="submit", caller=NODE, body={"job_id": "job_1"}))
    assert await client.ask(REPORT)


async def test_a_cut_upload_continues_where_it_stopped(fleet: Fleet) -> None:
    content = bytes(range(256)) * 8192
    ref = BlobRef(sha256=hashlib.sha256(content).hexdigest(), size_bytes=len(content))
    client = client_of(fleet)
    missing = BoxCall(name="missing", caller=fleet.ada, body={"refs": [to_plain(ref)]})

    def write(offset: int) -> BoxCall:
        return BoxCall(name="write", caller=fleet.ada, body={"ref": to_plain(ref), "offset": offset})

    _, writer = await asyncio.open_connection(
        "127.0.0.1", fleet.port, ssl=client_context(fleet.key), server_hostname="horizon-fleet"
    )
    writer.write(to_json(write(0)).encode() + b"\n" + content[: 2**20])
    await writer.drain()
    writer.close()

    async def is_kept() -> bool:
        (status,) = await client.ask(missing)
        return bool(status["committed_bytes"] == 2**20)

    await fleet.until(is_kept)

    async def rest() -> AsyncIterator[bytes]:
        yield content[2**20 :]

    async def whole() -> bool:
        # The first call may still be at its end.
        with contextlib.suppress(UploadInProgress):
            answer = await client.ask(write(2**20), rest())
            return bool(answer == to_plain(BlobStatus(blob=ref, committed_bytes=len(content), complete=True)))
        return False

    await fleet.until(whole)
    assert await client.ask(missing) == []


def test_items_and_calls_are_framed() -> None:
    assert encode_item(Item({"a": 1}, b"xyz")) == b'{"item":{"a":1},"num_bytes":3}\nxyz'
    assert decode_call(to_json(REPORT).encode()) == REPORT
    with pytest.raises(WorkerFailed, match="install the same version on both"):
        decode_call(to_json(dataclasses.replace(REPORT, version="9.9.9")).encode())
