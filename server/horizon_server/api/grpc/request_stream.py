"""Messages as they arrive: those that cannot be decoded, and the end of a stream whose answer is there before its last message."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

from google.protobuf.message import DecodeError

from horizon_server.errors import InvalidSpec

ItemT = TypeVar("ItemT")

_READ_OUT_S = 2.0
_SILENCE_S = 0.25
_REFUSED_SILENCE_S = 0.015


@dataclass(frozen=True)
class Undecodable:
    """Stands for a message that could not be decoded. gRPC decodes before it calls the server, where an error could not be answered."""

    method: str


def decoding(method: str, decode: Callable[[bytes], ItemT]) -> Callable[[bytes], ItemT | Undecodable]:
    """Return a deserializer that answers `Undecodable` instead of raising."""

    def decode_or_mark(data: bytes) -> ItemT | Undecodable:
        try:
            return decode(data)
        except DecodeError:
            return Undecodable(method)

    return decode_or_mark


def decoded(request: ItemT | Undecodable) -> ItemT:
    """Return a request that could be decoded.

    Raises:
        InvalidSpec: when it could not.
    """
    if isinstance(request, Undecodable):
        raise InvalidSpec(
            f"the message is not a valid request of {request.method}; use a client of the daemon's version"
        )
    return request


class RequestStream(Generic[ItemT]):
    """What a client sends, with a way to end it in order.

    A `grpc.aio` client whose write is under way when the answer arrives reports an internal error instead of the answer. Two things
    help: initial metadata sent before (a bare status is lost nearly always, one that follows metadata nearly never), and reading out
    what is on its way first.
    """

    def __init__(self, requests: AsyncIterator[ItemT]) -> None:
        self._requests = requests
        self._num_read = 0

    def __aiter__(self) -> RequestStream[ItemT]:
        return self

    async def __anext__(self) -> ItemT:
        request = await anext(self._requests)
        self._num_read += 1
        return decoded(request)

    async def read_out(self, *, refused: bool) -> None:
        """Drop what still comes, until it ends or pauses. One that was refused at its first message may be waiting for just that."""
        silence_s = _REFUSED_SILENCE_S if refused and self._num_read <= 1 else _SILENCE_S
        with suppress(TimeoutError, StopAsyncIteration):
            async with asyncio.timeout(_READ_OUT_S):
                while True:
                    await asyncio.wait_for(anext(self._requests), silence_s)
