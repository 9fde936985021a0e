"""What a hostile caller does to a daemon. Run as a program of its own, so that it cannot slow the test's own calls.

    python attacks.py NAME GRPC HTTP TOKEN SECONDS

Prints `ready` when the attack is under way, then one line of JSON when it is over.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio

NUM_CALLS = 1100
NUM_CONNECTIONS = 1100
NUM_BAD_REQUESTS = 200
GET_NODE = "/horizon_proto.v1.NodeService/GetNode"
HEALTH = "/grpc.health.v1.Health/"
UNDECODABLE = b"\x0a\xff\xff\xff\xff\x0f"
# The preface of HTTP/2 and an empty SETTINGS frame: a whole connection that makes no call.
HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"

Attack = Callable[[str, str, str, float], Coroutine[Any, Any, Counter[str]]]


async def silent_calls(server: str, _http: str, token: str, seconds: float) -> Counter[str]:
    """Open calls that never send their message."""

    async def never() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    return await _held_calls(
        server, lambda c: c.stream_unary(GET_NODE)(never(), timeout=seconds, metadata=metadata), seconds
    )


async def health_watches(server: str, _http: str, _token: str, seconds: float) -> Counter[str]:
    """Watch the health of the server, again and again."""
    return await _held_calls(server, lambda c: c.unary_stream(HEALTH + "Watch")(b"", timeout=seconds), seconds)


async def silent_checks(server: str, _http: str, _token: str, seconds: float) -> Counter[str]:
    """Open health checks that never send their message."""

    async def never() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    return await _held_calls(server, lambda c: c.stream_unary(HEALTH + "Check")(never(), timeout=seconds), seconds)


async def _held_calls(server: str, make: Callable[[Any], Any], seconds: float) -> Counter[str]:
    # Several connections: one takes a limited number of calls.
    options = (("grpc.use_local_subchannel_pool", 1),)
    channels: list[Any] = [grpc.aio.insecure_channel(server, options=options) for _ in range(8)]
    calls = [make(channels[i % len(channels)]) for i in range(NUM_CALLS)]
    print("ready", flush=True)
    await asyncio.sleep(seconds)
    counts = Counter(["open" if not call.done() else (await call.code()).name for call in calls])
    for channel in channels:
        with suppress(TimeoutError):
            await asyncio.wait_for(channel.close(), 5)
    return counts


async def idle_connections(server: str, _http: str, _token: str, seconds: float) -> Counter[str]:
    """Connect to gRPC and say nothing."""
    return await _held_connections(server, b"", seconds)


async def greeted_connections(server: str, _http: str, _token: str, seconds: float) -> Counter[str]:
    """Connect to gRPC, speak HTTP/2, and make no call."""
    return await _held_connections(server, HTTP2_HELLO, seconds)


async def half_requests(_server: str, http: str, _token: str, seconds: float) -> Counter[str]:
    """Send requests to HTTP whose head never ends."""
    return await _held_connections(http, b"GET /version HTTP/1.1\r\nHost: x\r\nX-A: ", seconds, drip=b"a")


async def _held_connections(address: str, hello: bytes, seconds: float, drip: bytes = b"") -> Counter[str]:
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + seconds

    async def hold() -> str:
        # Whoever is cut connects again, ten times a second at most.
        num_cut = 0
        while time.monotonic() < deadline:
            try:
                reader, writer = await asyncio.wait_for(asyncio.open_connection(host, int(port)), 5)
                writer.write(hello)
                while time.monotonic() < deadline:
                    with suppress(TimeoutError):
                        if not await asyncio.wait_for(reader.read(4096), 1.0):
                            break
                    if drip:
                        writer.write(drip)
                writer.close()
            except (OSError, TimeoutError):
                pass
            num_cut += 1
            await asyncio.sleep(0.1)
        return "kept" if num_cut <= 1 else "cut"

    tasks = [asyncio.create_task(hold()) for _ in range(NUM_CONNECTIONS)]
    await asyncio.sleep(1.0)
    print("ready", flush=True)
    return Counter(await asyncio.gather(*tasks))


async def flood(server: str, _http: str, token: str, seconds: float) -> Counter[str]:
    """Make calls as fast as they are answered, on several connections."""
    return await _flooded(server, GET_NODE, b"", token, seconds)


async def wrong_tokens(server: str, _http: str, _token: str, seconds: float) -> Counter[str]:
    """Guess tokens as fast as the server says no."""
    return await _flooded(server, GET_NODE, b"", "hzn_guess", seconds)


async def undecodable(server: str, _http: str, _token: str, seconds: float) -> Counter[str]:
    """Send messages that cannot be decoded to the service that needs no token."""
    return await _flooded(server, HEALTH + "Check", UNDECODABLE, "", seconds)


async def _flooded(server: str, method: str, message: bytes, token: str, seconds: float) -> Counter[str]:
    deadline = time.monotonic() + seconds
    counts: Counter[str] = Counter()
    metadata = (("authorization", f"Bearer {token}"),) if token else ()

    async def one(channel: Any) -> None:
        call = channel.unary_unary(method)
        while time.monotonic() < deadline:
            try:
                await call(message, metadata=metadata, timeout=20)
                counts["OK"] += 1
            except grpc.aio.AioRpcError as error:
                counts[error.code().name] += 1

    options = (("grpc.use_local_subchannel_pool", 1),)
    channels: list[Any] = [grpc.aio.insecure_channel(server, options=options) for _ in range(4)]
    tasks = [asyncio.create_task(one(channels[i % len(channels)])) for i in range(128)]
    print("ready", flush=True)
    await asyncio.gather(*tasks)
    for channel in channels:
        await channel.close()
    return counts


async def bad_requests(_server: str, http: str, _token: str, seconds: float) -> Counter[str]:
    """Send to HTTP what is not HTTP: for so long, and until it is many requests, however slow the machine is."""
    host, _, port = http.rpartition(":")
    deadline = time.monotonic() + seconds
    counts: Counter[str] = Counter()

    async def one() -> None:
        while time.monotonic() < deadline or sum(counts.values()) < NUM_BAD_REQUESTS:
            try:
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(b"this is neither HTTP nor TLS\r\n\r\n")
                await asyncio.wait_for(reader.read(), 10)
                writer.close()
                counts["answered"] += 1
            except (OSError, TimeoutError):
                counts["cut"] += 1

    print("ready", flush=True)
    await asyncio.gather(*(one() for _ in range(16)))
    return counts


ATTACKS: dict[str, Attack] = {
    attack.__name__: attack
    for attack in (
        silent_calls,
        health_watches,
        silent_checks,
        idle_connections,
        greeted_connections,
        half_requests,
        flood,
        wrong_tokens,
        undecodable,
        bad_requests,
    )
}


if __name__ == "__main__":
    # On a machine of its own it would not compete with the daemon for processors.
    os.nice(19)
    name, server, http, token, seconds = sys.argv[1:]
    print(json.dumps(asyncio.run(ATTACKS[name](server, http, token, float(seconds)))), flush=True)
