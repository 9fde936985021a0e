"""How one daemon calls another one of its fleet: one call per connection, over TLS with the fleet's key.

The caller sends one line, a `BoxCall` as JSON, and the bytes that belong to it. The called one answers with lines of
JSON: items, each with the bytes that it announces, and at the end an answer or an error of `children.entry`. While it
works it sends an empty line every second, so that a lost machine is noticed. Who has the key may call as any user.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from horizon_server.children.entry import Answer, Failure, decode_line
from horizon_server.codec import from_json, to_json
from horizon_server.errors import BoxLost, WorkerFailed
from horizon_server.network import parse_address
from horizon_server.nodes.key import SERVER_NAME, client_context
from horizon_server.nodes.protocol import LOST_S, close_stream
from horizon_server.records.account import Principal
from horizon_server.version import VERSION

MAX_LINE_BYTES = 64 * 2**20
MAX_PIECE_BYTES = 4 * 2**20
"""The most bytes that an item may announce."""
# How long a connection may take to be there, with its TLS.
_CONNECT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class BoxCall:
    """What another daemon is asked for, and for whom. Only daemons of one version work together."""

    name: str
    caller: Principal
    body: dict[str, Any] = field(default_factory=dict)
    version: str = VERSION


@dataclass(frozen=True)
class Item:
    """One part of an answer that comes in parts: plain data, and bytes."""

    value: Any
    data: bytes = b""


def encode_item(item: Item) -> bytes:
    """An item as it is sent."""
    head = json.dumps({"item": item.value, "num_bytes": len(item.data)}, separators=(",", ":"))
    return head.encode("ascii") + b"\n" + item.data


def decode_call(line: bytes) -> BoxCall:
    """Return the call that a line holds. Raises WorkerFailed where it is not a call of this version."""
    try:
        version = json.loads(line)["version"]
        if version != VERSION:
            raise WorkerFailed(f"it runs horizon {VERSION}, and the caller {version}; install the same version on both")
        return from_json(BoxCall, line)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise WorkerFailed("the caller is not a daemon of this version") from error


@dataclass(frozen=True, kw_only=True)
class BoxClient:
    """Calls the daemon of one box. Thread: belongs to one event loop."""

    name: str
    address: str
    key_file: Path

    async def ask(self, call: BoxCall, data: AsyncIterator[bytes] | None = None) -> Any:
        """The plain answer to a call, with which `data` is sent. Raises what the box answers, and BoxLost."""
        async with contextlib.aclosing(self.stream(call, data)) as items:
            async for item in items:
                last = item
        return last.value

    async def stream(self, call: BoxCall, data: AsyncIterator[bytes] | None = None) -> AsyncGenerator[Item, None]:
        """Yield the items of an answer, and its end as the last one. Raises as `ask`."""
        with self._told_as_lost():
            place = parse_address("boxes", self.address)
            async with asyncio.timeout(_CONNECT_S):
                reader, writer = await asyncio.open_connection(
                    place.host,
                    place.port,
                    ssl=client_context(self.key_file),
                    server_hostname=SERVER_NAME,
                    limit=MAX_LINE_BYTES,
                )
        sending: asyncio.Task[None] | None = None
        try:
            with self._told_as_lost():
                writer.write(to_json(call).encode("ascii") + b"\n")
                await writer.drain()
            sending = asyncio.create_task(_send(writer, data)) if data is not None else None
            while True:
                with self._told_as_lost():
                    item = await self._next(reader)
                if isinstance(item, Item):
                    yield item
                elif isinstance(item, Answer):
                    yield Item(item.value)
                    return
                elif isinstance(item, Failure):
                    raise item.error
        finally:
            if sending is not None:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
            await close_stream(writer)

    async def _next(self, reader: asyncio.StreamReader) -> Item | Answer | Failure | None:
        """The next line; None where it is only a sign of life."""
        async with asyncio.timeout(LOST_S):
            line = await reader.readline()
        if not line.endswith(b"\n"):
            raise ConnectionResetError("it ended the connection")
        if line == b"\n":
            return None
        if not line.startswith(b'{"item":'):
            end = decode_line(line)
            if not isinstance(end, Answer | Failure):
                raise BoxLost(f"box {self.name} answered with something else than an answer")
            return end
        head = json.loads(line)
        num_bytes = int(head["num_bytes"])
        if not 0 <= num_bytes <= MAX_PIECE_BYTES:
            raise BoxLost(f"box {self.name} announced {num_bytes} bytes in one piece")
        async with asyncio.timeout(10 * LOST_S):
            return Item(head["item"], await reader.readexactly(num_bytes) if num_bytes else b"")

    @contextlib.contextmanager
    def _told_as_lost(self) -> Any:
        at = f"box {self.name} ({self.address})"
        try:
            yield
        except TimeoutError as error:
            raise BoxLost(f"{at} does not answer") from error
        except ssl.SSLError as error:
            raise BoxLost(f"{at} has another key, or does not serve other daemons (box_port)") from error
        except (WorkerFailed, ValueError, asyncio.IncompleteReadError) as error:
            raise BoxLost(f"{at} answered with something else than an answer") from error
        except OSError as error:
            why = os.strerror(error.errno) if error.errno else str(error)
            raise BoxLost(f"{at} cannot be reached: {why}") from error


async def _send(writer: asyncio.StreamWriter, data: AsyncIterator[bytes]) -> None:
    # Where the box ends the connection meanwhile, its answer says why.
    with contextlib.suppress(OSError):
        async for piece in data:
            writer.write(piece)
            await writer.drain()
