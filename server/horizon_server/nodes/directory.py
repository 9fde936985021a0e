"""The further nodes that the daemon may use for jobs with `nodes`: what they have, and their reservation."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from horizon_server.children.entry import Answer, Failure, decode_line
from horizon_server.codec import from_plain, to_plain
from horizon_server.errors import HorizonError, WorkerFailed
from horizon_server.network import parse_address
from horizon_server.nodes.key import SERVER_NAME, client_context
from horizon_server.nodes.protocol import CALL_S, MAX_LINE_BYTES, NodeCall, NodeReport, Reservation, encode_call

log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class NodeDirectory:
    """The nodes at these addresses (HOST:PORT), in the order in which they are taken."""

    addresses: Sequence[str] = ()
    key_file: Path | None = None

    async def reports(self) -> Mapping[str, NodeReport | HorizonError]:
        """What each node says of itself, or why it does not."""

        async def one(address: str) -> NodeReport | HorizonError:
            try:
                return from_plain(NodeReport, await self._ask(address, NodeCall(name="report")))
            except (HorizonError, ValueError) as error:
                return error if isinstance(error, HorizonError) else WorkerFailed(str(error))

        return dict(zip(self.addresses, await asyncio.gather(*map(one, self.addresses)), strict=True))

    async def reserve(self, reservation: Reservation, num_nodes: int, *, kept: Sequence[str] = ()) -> tuple[str, ...]:
        """Reserve as many nodes for a job, `kept` first; all of them or none.

        Raises:
            WorkerFailed: too few can be had; it says why of each.
        """
        order = [*(address for address in kept if address in self.addresses)]
        order += [address for address in self.addresses if address not in order]
        found: list[str] = []
        refusals: list[str] = []
        for address in order:
            if len(found) == num_nodes:
                break
            try:
                await self._ask(address, NodeCall(name="reserve", body=to_plain(reservation)))
                found.append(address)
            except HorizonError as error:
                refusals.append(f"{address}: {error.message}")
        if len(found) < num_nodes:
            await self.release(reservation.job_id, found)
            what = f"{num_nodes} further node{'' if num_nodes == 1 else 's'} of {len(self.addresses)}"
            raise WorkerFailed(f"waits for {what}: {'; '.join(refusals) or 'no others are set'}")
        return tuple(found)

    async def release(self, job_id: str, addresses: Sequence[str] | None = None) -> None:
        """Give back what is reserved for a job; a node that does not answer forgets it by itself."""

        async def one(address: str) -> None:
            with contextlib.suppress(HorizonError):
                await self._ask(address, NodeCall(name="release", body={"job_id": job_id}))

        await asyncio.gather(*map(one, self.addresses if addresses is None else addresses))

    async def _ask(self, address: str, call: NodeCall) -> Any:
        """The answer of a node. Raises what it answers, and WorkerFailed where it does not."""
        assert self.key_file is not None, "settings with nodes have a key"
        try:
            async with asyncio.timeout(CALL_S):
                return await self._answer(address, call, self.key_file)
        except (OSError, TimeoutError) as error:
            why = "it does not answer" if isinstance(error, TimeoutError) else getattr(error, "strerror", "") or error
            raise WorkerFailed(f"{address} cannot be reached: {why}") from error

    async def _answer(self, address: str, call: NodeCall, key_file: Path) -> Any:
        place = parse_address("nodes", address)
        reader, writer = await asyncio.open_connection(
            place.host, place.port, ssl=client_context(key_file), server_hostname=SERVER_NAME, limit=MAX_LINE_BYTES
        )
        try:
            writer.write(encode_call(call))
            line = await reader.readline()
        finally:
            writer.close()
        end = decode_line(line)
        if isinstance(end, Failure):
            raise end.error
        if not isinstance(end, Answer):
            raise WorkerFailed(f"{address} answered with something else than an answer")
        return end.value
