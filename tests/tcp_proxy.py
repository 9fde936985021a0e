"""A TCP proxy between a real client and a real server that cuts, drops, half-closes and delays where a test says.

It counts what it has passed on, so that a test can say how much travelled twice. Belongs to the event loop of the test.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["drop", "close", "half_close", "hang"]

_PIECE_BYTES = 64 * 1024
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens to one connection once so many bytes have gone up.

    `drop` resets both sides, `close` ends both in order, `half_close` tells the server only that no more comes, `hang`
    passes on nothing any more, either way, and resets both sides after `hang_s`. `delay_s` holds back every piece on
    its way up.
    """

    after_bytes: int
    how: Kind = "drop"
    delay_s: float = 0.0
    hang_s: float = 0.0


class TcpProxy:
    """Listens on loopback and passes connections on to `server`; each takes the next of `faults`, or none when they are
    used up."""

    def __init__(self, server: str, faults: Iterator[Fault] | None = None) -> None:
        self._host, _, port = server.rpartition(":")
        self._port = int(port)
        self.faults = faults or iter(())
        self.up_bytes = 0
        """Passed on to the server, over all connections."""
        self.num_connections = 0
        self.num_faults = 0
        """Faults that have happened."""
        self.address = ""
        self._server: asyncio.Server | None = None
        self._links: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> TcpProxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=_PIECE_BYTES)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for link in self._links:
            link.cancel()
        await asyncio.gather(*self._links, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        link = asyncio.create_task(self._serve(reader, writer))
        self._links.add(link)
        link.add_done_callback(self._links.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_writer: asyncio.StreamWriter | None = None
        try:
            far_reader, far_writer = await asyncio.open_connection(self._host, self._port, limit=_PIECE_BYTES)
            await _Link(self, reader, writer, far_reader, far_writer, next(self.faults, None)).run()
        except OSError:
            pass
        finally:
            for one in (writer, far_writer):
                if one is not None:
                    one.close()


class _Link:
    """One connection: two directions, and the fault that ends it."""

    def __init__(
        self,
        proxy: TcpProxy,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        far_reader: asyncio.StreamReader,
        far_writer: asyncio.StreamWriter,
        fault: Fault | None,
    ) -> None:
        self._proxy = proxy
        self._near = (reader, writer)
        self._far = (far_reader, far_writer)
        self._fault = fault

    async def run(self) -> None:
        up, down = asyncio.create_task(self._up()), asyncio.create_task(self._down())
        try:
            # The client is left when either side has ended; a half-closed server may still say something.
            await asyncio.wait({up, down}, return_when=asyncio.FIRST_COMPLETED)
            if self._fault is not None and self._fault.how == "half_close":
                await asyncio.wait({down})
        finally:
            for task in (up, down):
                task.cancel()
            await asyncio.gather(up, down, return_exceptions=True)

    async def _up(self) -> None:
        left = None if self._fault is None else self._fault.after_bytes
        while left is None or left > 0:
            piece = await self._near[0].read(_PIECE_BYTES if left is None else min(_PIECE_BYTES, left))
            if not piece:
                return
            if self._fault is not None and self._fault.delay_s:
                await asyncio.sleep(self._fault.delay_s)
            self._far[1].write(piece)
            await self._far[1].drain()
            self._proxy.up_bytes += len(piece)
            left = None if left is None else left - len(piece)
        assert self._fault is not None
        self._proxy.num_faults += 1
        if self._fault.how == "hang":
            await self._hang(self._fault.hang_s)
        elif self._fault.how == "half_close":
            self._far[1].write_eof()
        elif self._fault.how == "drop":
            self._reset()

    async def _down(self) -> None:
        with suppress(OSError):
            while piece := await self._far[0].read(_PIECE_BYTES):
                self._near[1].write(piece)
                await self._near[1].drain()

    async def _hang(self, seconds: float) -> None:
        for reader in (self._near[0], self._far[0]):
            reader._transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.sleep(seconds)
        self._reset()

    def _reset(self) -> None:
        """Make both connections end with a reset instead of an orderly end."""
        for _, writer in (self._near, self._far):
            connection = writer.get_extra_info("socket")
            with suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            writer.transport.abort()
