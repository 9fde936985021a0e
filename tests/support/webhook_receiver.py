"""A receiver of webhooks on loopback: keeps what it gets, and answers as a test says."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs/webhooks.md"


@dataclass(frozen=True)
class Received:
    """One request."""

    path: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def id(self) -> str:
        return self.headers["webhook-id"]

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Receiver:
    """Answers each request with the next of `answers`, and with 204 when there are no more.

    An answer is a status line with headers; an empty one cuts the connection.
    """

    def __init__(self) -> None:
        self.requests: list[Received] = []
        self.answers: deque[str] = deque()
        self.news = asyncio.Event()
        self.port = 0

    def url(self, path: str = "/hook", *, scheme: str = "http", host: str = "127.0.0.1") -> str:
        return f"{scheme}://{host}:{self.port}{path}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError), contextlib.closing(writer):
            first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            body = await reader.readexactly(int(headers.get("content-length", "0")))
            self.requests.append(Received(first.split(" ")[1], headers, body))
            self.news.set()
            answer = self.answers.popleft() if self.answers else "204 No Content"
            if answer:
                writer.write(f"HTTP/1.1 {answer}\r\ncontent-length: 0\r\n\r\n".encode())
                await writer.drain()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


@asynccontextmanager
async def receiver(tls: ssl.SSLContext | None = None) -> AsyncIterator[Receiver]:
    made = Receiver()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0, ssl=tls)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()
        await server.wait_closed()


def documented_check() -> Callable[[str, Mapping[str, str], bytes], bool]:
    """The function that docs/webhooks.md gives to receivers."""
    code = DOCS.read_text("utf-8").partition("```python\n")[2].partition("```")[0]
    names: dict[str, Any] = {}
    exec(code, names)  # noqa: S102  # our own page
    check: Callable[[str, Mapping[str, str], bytes], bool] = names["is_genuine"]
    return check


SECRET = "whsec_" + base64.b64encode(bytes(range(32))).decode()
