"""Sends one HTTP request to an address that a user has chosen, and never to one that it may not reach.

httpcore rather than a larger client: it follows no redirects, reads no proxy from the environment, keeps no cookies,
and lets the caller open the connection. So a host name is resolved here, once, and what was checked is what is
connected to.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import ipaddress
import os
import socket
import ssl
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

import httpcore2 as httpcore

from horizon_server.errors import InvalidSpec
from horizon_server.version import VERSION

IP = ipaddress.IPv4Address | ipaddress.IPv6Address

MAX_URL_CHARS = 2048
# From the first byte to the head of the answer: a receiver should answer first and work then.
ANSWER_S = 15.0
CONNECT_S = 5.0
# Addresses of one name that are tried.
_MAX_ADDRESSES = 4
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


class Refused(Exception):
    """The address is one that this daemon does not send to; the text says what an admin can do."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """How a receiver has answered."""

    status_code: int
    retry_after_s: float = 0.0


class Receivers:
    """Whom webhooks may be sent to, and how. Thread: belongs to one event loop.

    Args:
        networks: what may be reached besides public addresses.
    """

    def __init__(self, networks: Iterable[str]) -> None:
        self._networks = [ipaddress.ip_network(network) for network in networks]
        self._tls = ssl.create_default_context()

    async def check(self, url: str) -> None:
        """Let pass an address that requests may be sent to. Raises InvalidSpec.

        A name that cannot be resolved now passes: it may be later.
        """
        parsed = _parsed(url)
        try:
            await self.addresses(parsed.hostname or "", _port(parsed))
        except Refused as error:
            raise InvalidSpec.of("url", f"url: {error}") from error
        except OSError:
            return

    async def addresses(self, host: str, port: int) -> list[str]:
        """Return the addresses of a host that may be reached. Raises Refused, OSError."""
        try:
            found = [ipaddress.ip_address(host)]
        except ValueError:
            try:
                async with asyncio.timeout(CONNECT_S):
                    infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
            except UnicodeError as error:
                raise OSError(f"{host} is not a host name") from error
            except OSError as error:  # also of the time limit
                raise OSError(f"the host name {host} cannot be resolved") from error
            # A scope (fe80::1%eth0) is of addresses that are refused anyway.
            found = [ipaddress.ip_address(str(info[4][0]).partition("%")[0]) for info in infos]
        allowed = [str(address) for address in dict.fromkeys(found) if self._may_reach(address)]
        if not allowed:
            raise Refused(
                f"{host} is a loopback, private or otherwise reserved address, which this daemon does not send to; an "
                "admin of the node can allow its network with the setting webhook_networks"
            )
        return allowed[:_MAX_ADDRESSES]

    async def post(self, url: str, body: str, headers: Mapping[str, str]) -> Answer:
        """Send one request and return how it was answered. Raises Refused, OSError with what went wrong."""
        sent = {"content-type": "application/json", "user-agent": f"horizond/{VERSION}", **headers}
        pool = httpcore.AsyncConnectionPool(ssl_context=self._tls, network_backend=_CheckedBackend(self))
        try:
            # One limit over all: a receiver that sends a byte now and then would pass any limit of a single read.
            async with asyncio.timeout(CONNECT_S + ANSWER_S), pool:
                request = pool.stream("POST", url, headers=[*sent.items()], content=body.encode())
                # The head is enough: what else a receiver sends is not read.
                async with request as response:
                    return Answer(status_code=response.status, retry_after_s=_retry_after_s(response.headers))
        except TimeoutError as error:
            raise OSError(f"no answer within {ANSWER_S:g} s") from error
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException) as error:
            raise OSError(_why(error)) from error
        except (httpcore.UnsupportedProtocol, ValueError) as error:
            raise OSError(f"the request cannot be sent: {error}") from error

    def _may_reach(self, address: IP) -> bool:
        meant = _embedded(address)
        if any(one in network for network in self._networks for one in (address, meant)):
            return True
        return all(one.is_global and not one.is_multicast for one in (address, meant))


class _CheckedBackend(httpcore.AsyncNetworkBackend):
    """Opens connections to addresses that were checked, and to no others."""

    def __init__(self, receivers: Receivers) -> None:
        self._receivers = receivers
        self._backend = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109  # the library's signature
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Connect to the first address that answers. TLS then checks the certificate against the name, not these."""
        addresses = await self._receivers.addresses(host, port)
        for address in addresses[:-1]:
            with contextlib.suppress(httpcore.ConnectError, httpcore.ConnectTimeout):
                return await self._backend.connect_tcp(address, port, timeout=CONNECT_S / len(addresses))
        return await self._backend.connect_tcp(addresses[-1], port, timeout=CONNECT_S / len(addresses))


def shown_url(url: str) -> str:
    """Return what others than its owner see of an address: such addresses are often secrets."""
    parsed = urlsplit(url)
    return f"{parsed.scheme}://{parsed.hostname}/..."


def _why(error: Exception) -> str:
    """Return what went wrong, with the reason of the system or of TLS where there is one."""
    cause: BaseException = error
    while (before := cause.__cause__ or cause.__context__) is not None:
        cause = before
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"the certificate is not valid: {cause.verify_message}"
    text = str(cause)
    if isinstance(cause, OSError) and not isinstance(cause, ssl.SSLError) and cause.errno:
        text = os.strerror(cause.errno)
    return f"no connection: {text}" if isinstance(error, httpcore.ConnectError) else f"the connection broke: {text}"


def _parsed(url: str) -> SplitResult:
    if len(url) > MAX_URL_CHARS:
        raise InvalidSpec.of("url", f"url has {len(url):,} characters; it may have {MAX_URL_CHARS:,}")
    if not url.isascii() or not url.isprintable() or " " in url:
        raise InvalidSpec.of("url", "url must be printable ASCII without spaces; percent-encode the rest")
    problem = None
    try:
        parsed = urlsplit(url)
        _port(parsed)
    except ValueError as error:
        problem = str(error)
    else:
        if parsed.scheme not in ("http", "https") or not parsed.hostname:
            problem = "it must begin with https:// or http:// and a host"
        elif parsed.username is not None or parsed.password is not None:
            problem = "it must not contain a user name or password"
        elif parsed.fragment:
            problem = "it must not contain a # fragment"
    if problem is not None:
        # Not the address itself: messages end up in logs.
        raise InvalidSpec.of("url", f"url cannot be used: {problem}")
    return parsed


def _port(parsed: SplitResult) -> int:
    return parsed.port if parsed.port is not None else {"http": 80}.get(parsed.scheme, 443)


def _embedded(address: IP) -> IP:
    """Return the IPv4 address that an IPv6 one leads to, or itself."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or address


def _retry_after_s(headers: Sequence[tuple[bytes, bytes]]) -> float:
    """Return for how long the receiver wants to be left alone; 0 where it does not say."""
    value = next((value for name, value in headers if name.lower() == b"retry-after"), b"").decode("latin-1").strip()
    if value.isascii() and value.isdigit():
        return float(value[:9])
    with contextlib.suppress(ValueError, TypeError):
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    return 0.0
