"""The further nodes that the daemon may use for jobs with `nodes`: what they have, and their reservation."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from horizon_server.children.entry import Answer, Failure, decode_line
from horizon_server.codec import from_plain, to_plain
from horizon_server.errors import HorizonError, WorkerFailed
from horizon_server.network import parse_address
from horizon_server.nodes.key import SERVER_NAME, client_context
from horizon_server.nodes.protocol import (
    CALL_S,
    MAX_LINE_BYTES,
    NodeCall,
    NodeReport,
    Reservation,
    close_stream,
    encode_call,
)

# The longest delay until a node that no job uses is seen to be free, or lost.
_ASK_EVERY_S = 5.0


NodeState = Literal["free", "busy", "lost"]


async def _always(_: str) -> bool:
    return True


@dataclass(kw_only=True, eq=False)
class NodeDirectory:
    """The nodes at these addresses (HOST:PORT), in the order in which they are taken. Thread: belongs to one event
    loop."""

    addresses: Sequence[str] = ()
    key_file: Path | None = None
    owner: str = ""
    """What this daemon calls itself, so that it knows its jobs again."""
    is_resident: Callable[[str], Awaitable[bool]] = _always
    """Whether a job of this daemon has an attempt."""
    known: dict[str, NodeReport | HorizonError] = field(init=False, default_factory=dict)
    """What each node has said of itself when it was asked last, or why it did not."""

    async def watch(self, on_change: Callable[[], None], on_asked: Callable[[Mapping[str, int]], None]) -> None:
        """Ask all nodes every few seconds, for as long as the daemon serves; `on_change` is called where one is free
        again, or lost, and `on_asked` with how many are in each state."""
        while self.addresses:
            before = [self.state_of(address) for address in self.addresses]
            await self.ask_all()
            await self._release_left()
            states = [self.state_of(address) for address in self.addresses]
            on_asked({state: states.count(state) for state in get_args(NodeState)})
            if states != before:
                on_change()
            await asyncio.sleep(_ASK_EVERY_S)

    def state_of(self, address: str) -> NodeState:
        """How a node was when it was asked last."""
        report = self.known.get(address)
        if not isinstance(report, NodeReport):
            return "lost"
        return "busy" if report.job_id else "free"

    async def ask_all(self) -> None:
        """Ask all nodes now."""

        async def one(address: str) -> None:
            try:
                self.known[address] = from_plain(NodeReport, await self._ask(address, NodeCall(name="report")))
            except HorizonError as error:
                self.known[address] = error
            except ValueError:
                self.known[address] = WorkerFailed("it answered with a report that this version does not know")

        await asyncio.gather(*map(one, self.addresses))

    def why_not(self, job_ids: Collection[str]) -> Mapping[str, str]:
        """Of each node, why none of these jobs can have it; nothing where it is free, or has one of them."""
        found = {}
        for address in self.addresses:
            report = self.known.get(address)
            if isinstance(report, NodeReport):
                is_free = not report.job_id or report.job_id in job_ids
                found[address] = "" if is_free else "works for a job of another node"
            else:
                found[address] = "has not been asked yet" if report is None else "does not answer"
        return found

    async def _release_left(self) -> None:
        """Free nodes that still have a job of this daemon which has ended: they could not be reached then."""
        for address, report in list(self.known.items()):
            job_id = report.job_id if isinstance(report, NodeReport) and report.owner == self.owner else ""
            if job_id and not await self.is_resident(job_id):
                await self.release(job_id, [address])

    def _set_job(self, address: str, job_id: str) -> None:
        if isinstance(report := self.known.get(address), NodeReport):
            self.known[address] = replace(report, job_id=job_id)

    async def reserve(
        self, reservation: Reservation, *, least: int, most: int, kept: Sequence[str] = ()
    ) -> tuple[str, ...]:
        """Reserve nodes for a job, `kept` first: as many as can be had up to `most`, or none where these are fewer than
        `least`.

        Raises:
            WorkerFailed: too few can be had; it says why of each.
        """
        order = [*(address for address in kept if address in self.addresses)]
        order += [address for address in self.addresses if address not in order]
        found: list[str] = []
        refusals: list[str] = []
        for address in order:
            if len(found) == most:
                break
            try:
                await self._ask(address, NodeCall(name="reserve", body=to_plain(reservation)))
                found.append(address)
                self._set_job(address, reservation.job_id)
            except HorizonError as error:
                refusals.append(f"{address}: {error.message}")
        if len(found) < least:
            await self.release(reservation.job_id, found)
            needs = f"it needs {least} further node{'' if least == 1 else 's'} of {len(self.addresses)}"
            raise WorkerFailed(f"{needs}: {'; '.join(refusals) or 'no others are set'}")
        return tuple(found)

    async def release(self, job_id: str, addresses: Sequence[str] | None = None) -> None:
        """Give back what is reserved for a job; a node that does not answer forgets it by itself."""

        async def one(address: str) -> None:
            with contextlib.suppress(HorizonError):
                await self._ask(address, NodeCall(name="release", body={"job_id": job_id}))
                if isinstance(report := self.known.get(address), NodeReport) and report.job_id == job_id:
                    self._set_job(address, "")

        await asyncio.gather(*map(one, self.addresses if addresses is None else addresses))

    async def _ask(self, address: str, call: NodeCall) -> Any:
        """The answer of a node. Raises what it answers, and WorkerFailed where it does not."""
        assert self.key_file is not None, "settings with nodes have a key"
        try:
            async with asyncio.timeout(CALL_S):
                return await self._answer(address, call, self.key_file)
        except TimeoutError as error:
            raise WorkerFailed(f"it does not answer within {CALL_S:g} s") from error
        except ssl.SSLError as error:
            raise WorkerFailed("its key is a different one, or it does not run horizond node serve") from error
        except OSError as error:
            raise WorkerFailed(f"it cannot be reached: {os.strerror(error.errno) if error.errno else error}") from error

    async def _answer(self, address: str, call: NodeCall, key_file: Path) -> Any:
        place = parse_address("nodes", address)
        reader, writer = await asyncio.open_connection(
            place.host, place.port, ssl=client_context(key_file), server_hostname=SERVER_NAME, limit=MAX_LINE_BYTES
        )
        try:
            writer.write(encode_call(call))
            line = await reader.readline()
            if not line:
                raise ConnectionError("it ended the connection")
            end = decode_line(line)
        except (ValueError, WorkerFailed):
            # The line is too long, or not in this protocol.
            end = None
        finally:
            await close_stream(writer)
        if isinstance(end, Failure):
            raise end.error
        if not isinstance(end, Answer):
            raise WorkerFailed(f"{address} answered with something else than an answer")
        return end.value
