"""The server for the daemons of other machines: TLS with the fleet's key, one call per connection (`nodes.boxes`)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import structlog

from horizon_server.api.audited import Asked, Trail
from horizon_server.api.box.calls import ANSWERED, STREAMED, write
from horizon_server.api.services import Services
from horizon_server.children.entry import Answer, Failure, encode_line
from horizon_server.codec import to_plain
from horizon_server.errors import Draining, HorizonError, InvalidSpec, TooManyCalls, WorkerFailed
from horizon_server.network import Address, bound_socket
from horizon_server.nodes.boxes import MAX_LINE_BYTES, BoxCall, Item, decode_call, encode_item
from horizon_server.nodes.key import server_context
from horizon_server.nodes.protocol import CALL_S, HEARTBEAT_S
from horizon_server.settings import Settings

log = structlog.get_logger(__name__)

MAX_CONNECTIONS = 64
# How long a caller may take to show that it has the key.
_HANDSHAKE_S = 5.0
_PIECE_BYTES = 2**20
# Calls that leave no entry in the audit log: the daemon that a user called has written what they asked for.
_UNAUDITED = frozenset(
    (
        "report",
        "simulate",
        "missing",
        "write",
        "updates",
        "log_part",
        "logs",
        "checkpoints",
        "read_file",
        "require_checkpoint_deletable",
    )
)


class BoxServer:
    """A running server. Thread: belongs to one event loop."""

    def __init__(self, services: Services, server: asyncio.Server, address: str) -> None:
        self._services, self._server, self.address = services, server, address
        self._tasks: set[asyncio.Task[Any]] = set()

    async def stop(self) -> None:
        """Take no more calls, and end those that are under way."""
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the one call of a connection."""
        task = asyncio.current_task()
        assert task is not None, "asyncio serves each connection in a task"
        self._tasks.add(task)
        caller = str(writer.get_extra_info("peername", ("",))[0])
        try:
            if len(self._tasks) > MAX_CONNECTIONS:
                raise TooManyCalls(
                    f"{MAX_CONNECTIONS} calls of other daemons are under way; call again", retry_after_s=1
                )
            async with asyncio.timeout(CALL_S):
                call = decode_call(await reader.readline())
            await self._answer(call, caller, reader, writer)
        except HorizonError as error:
            await _end(writer, Failure(error))
        except asyncio.CancelledError:
            # By `stop`: asyncio would log a traceback for it.
            await _end(writer, Failure(Draining("the daemon is shutting down; call again in a moment")))
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            log.info("a connection of another daemon ended", caller=caller, why=str(error))
        except Exception:  # a defect in one call must not end the server
            log.exception("a call of another daemon failed", caller=caller)
            await _end(writer, Failure(WorkerFailed("something went wrong inside the box; its log says what")))
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _answer(
        self, call: BoxCall, origin: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        name, caller, body, services = call.name, call.caller, call.body, self._services
        is_audited = name not in _UNAUDITED
        trail = Trail(services.audit, caller, origin=origin, call=f"BoxService/{name}")
        trail.asked = Asked(resource=str(body.get("key") or body.get("job_id") or body.get("id") or ""))
        if is_audited:
            await trail.begin()
        beating = asyncio.create_task(_beat(writer))
        try:
            if name in STREAMED:
                async with aclosing(STREAMED[name](services, caller, body)) as items:
                    item: Item
                    async for item in items:
                        writer.write(encode_item(item))
                        await writer.drain()
                result = None
            elif name == "write":
                result = await write(services, caller, body, _pieces(reader, _num_bytes(body)))
            elif name in ANSWERED:
                result = await ANSWERED[name](services, caller, body)
            else:
                raise InvalidSpec(f"no call is named {name!r:.40}")
        except HorizonError as error:
            if is_audited:
                await trail.end(outcome=error.reason, message=error.message)
            raise
        except (KeyError, ValueError, TypeError) as error:
            raise InvalidSpec(f"the call {name} is not one of this version: {error!r:.200}") from error
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)
        if is_audited:
            await trail.end()
        await _end(writer, Answer([to_plain(one) for one in result] if isinstance(result, list) else to_plain(result)))


def _num_bytes(body: Any) -> int:
    return max(0, int(body["ref"]["size_bytes"]) - int(body["offset"]))


async def _pieces(reader: asyncio.StreamReader, num_bytes: int) -> AsyncIterator[bytes]:
    while num_bytes:
        piece = await reader.read(min(_PIECE_BYTES, num_bytes))
        if not piece:
            raise ConnectionResetError("the caller ended in the middle of a content")
        num_bytes -= len(piece)
        yield piece


async def _beat(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            writer.write(b"\n")
            await writer.drain()


async def _end(writer: asyncio.StreamWriter, end: Answer | Failure) -> None:
    with contextlib.suppress(OSError):
        writer.write(encode_line(end))
        await writer.drain()


async def start_box_server(services: Services, settings: Settings) -> BoxServer:
    """Start to serve at `fleet_address` and `box_port`. Raises BadSetting."""
    assert settings.fleet_address and settings.fleet_key_file and settings.box_port is not None, "checked when loaded"
    listener = bound_socket(
        "box_port",
        Address(host=settings.fleet_address, port=settings.box_port),
        remedy="set another fleet_address or box_port",
    )
    host, port = listener.getsockname()[:2]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await started.serve(reader, writer)

    server = await asyncio.start_server(
        serve,
        sock=listener,
        ssl=server_context(settings.fleet_key_file),
        ssl_handshake_timeout=_HANDSHAKE_S,
        limit=MAX_LINE_BYTES,
    )
    started = BoxServer(services, server, str(Address(host=host, port=port)))
    return started
