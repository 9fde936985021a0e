"""The certificate the daemon makes: a client that trusts the authority accepts the server, and nobody else's."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest

from horizon_server import network
from horizon_server.errors import BadSetting
from horizon_server.network import ServerCertificate, given_certificate, own_certificate


async def handshake(server: ServerCertificate, authority: Path) -> str:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server.certificate, server.key)

    async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()
        await writer.wait_closed()

    listener = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    port = listener.sockets[0].getsockname()[1]
    client = ssl.create_default_context(cafile=str(authority))
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client, server_hostname="127.0.0.1")
        text = (await reader.read()).decode()
        writer.close()
        await writer.wait_closed()
        return text
    finally:
        listener.close()
        await listener.wait_closed()


async def test_a_client_with_the_authority_accepts_the_server(tmp_path: Path) -> None:
    made = own_certificate(tmp_path, ())
    assert made.authority is not None
    assert await handshake(made, made.authority) == "hello"


async def test_a_client_with_another_authority_does_not(tmp_path: Path) -> None:
    other = own_certificate(tmp_path / "other", ())
    assert other.authority is not None
    with pytest.raises(ssl.SSLError):
        await handshake(own_certificate(tmp_path / "one", ()), other.authority)


def test_it_is_kept_and_made_again_for_new_names_by_the_same_authority(tmp_path: Path) -> None:
    first = own_certificate(tmp_path, ())
    assert first.authority is not None
    server, authority = first.certificate.read_bytes(), first.authority.read_bytes()
    assert own_certificate(tmp_path, ()).certificate.read_bytes() == server
    again = own_certificate(tmp_path, ("box.lab",))
    assert again.certificate.read_bytes() != server
    assert first.authority.read_bytes() == authority


def test_it_is_made_again_before_it_ends_and_where_its_key_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "_SERVER_DAYS", network.RENEWED_DAYS - 1)
    short = own_certificate(tmp_path, ())
    assert short.authority is not None
    before, authority, ends_s = short.stamp(), short.authority.read_bytes(), short.expires_s
    monkeypatch.undo()
    renewed = own_certificate(tmp_path, ())
    assert renewed.stamp() != before and renewed.expires_s > ends_s
    assert short.authority.read_bytes() == authority, "laptops need no other file"
    made = renewed.stamp()
    assert own_certificate(tmp_path, ()).stamp() == made
    renewed.key.write_bytes(own_certificate(tmp_path / "other", ()).key.read_bytes())
    own_certificate(tmp_path, ()).check()


def test_keys_are_private(tmp_path: Path) -> None:
    made = own_certificate(tmp_path, ())
    assert {path.stat().st_mode & 0o777 for path in (made.key, tmp_path / "ca.key")} == {0o600}


def test_a_missing_certificate_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match=r"tls_cert: .*missing\.pem does not exist"):
        given_certificate(tmp_path / "missing.pem", tmp_path / "missing.key")
