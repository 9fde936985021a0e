"""What nodes say to each other: one call per connection, over TLS with the fleet's key.

The caller sends one line, a `NodeCall` as JSON; the node answers with one line of `children.entry`, an answer or an
error. While it runs ranks it sends an empty line every second before that, and ends them when the connection does.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from dataclasses import dataclass, field
from typing import Any, Literal

from horizon_server.codec import from_json, to_json
from horizon_server.errors import WorkerFailed
from horizon_server.version import VERSION

MAX_LINE_BYTES = 64 * 2**20
"""The names and shapes of all tensors of a model are the longest that is said."""
HEARTBEAT_S = 1.0
LOST_S = 6.0
"""A node that says nothing for longer is lost."""
CALL_S = 20.0
"""How long a node may take to answer anything else. To touch memory is not a part of it."""
# How long the end of a connection may take.
_CLOSE_S = 2.0
LOG_FOLLOWS = "; the last lines of its log:\n"
"""What stands between an error of a rank and the end of the log of its node's ranks, which is theirs together: it has
the errors that followed from this one too."""


@dataclass(frozen=True, kw_only=True)
class NodeCall:
    """What a node is asked for. Only nodes of one version work together."""

    name: Literal["report", "reserve", "release", "run"]
    version: str = VERSION
    body: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """What a node has, and which job it works for."""

    hostname: str
    host_bytes: int
    """Of host memory that a job may have."""
    free_bytes: int
    """Of that, what is free now."""
    num_threads: int
    host_devices: int
    gpus: tuple[str, ...] = ()
    """Their names."""
    job_id: str = ""
    """The job that it is reserved for; empty where it is free."""
    owner: str = ""
    """Whose job that is: what its daemon calls itself."""


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """Memory and devices for the ranks of a job. A node is reserved for one job at a time; to ask again for the same
    changes nothing."""

    job_id: str
    owner: str
    plane_bytes: dict[str, int]
    """Of the memory files, each as large as the whole plane; what other nodes own of it takes no memory."""
    host_bytes: int
    """What the job takes here."""
    num_ranks: int
    device_kind: Literal["host", "cuda"]
    gpu_name: str = ""
    """The model of the GPUs: those of one job are equal."""


@dataclass(frozen=True, kw_only=True)
class RankOrder:
    """The ranks that a node is to run: `request` is the worker's, without what belongs to the first node."""

    job_id: str
    request: dict[str, Any]
    config: str
    """The model's config.json."""
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]
    """Name, dtype and shape of each of its tensors, from which its memory is laid out: the bytes come rank to rank."""
    first_rank: int
    num_ranks: int
    meeting: str
    """HOST:PORT where the first rank waits for the others."""


def receive_line(connection: socket.socket, *, timeout_s: float) -> bytes:
    """Wait for one line, which ends with a newline. Raises WorkerFailed where none comes, and OSError."""
    connection.settimeout(timeout_s)
    pieces: list[bytes] = []
    length = 0
    while not (pieces and pieces[-1].endswith(b"\n")):
        piece = connection.recv(1 << 16)
        length += len(piece)
        if not piece:
            raise WorkerFailed("the connection ended in the middle of a line")
        if length > MAX_LINE_BYTES:
            raise WorkerFailed(f"the line is longer than {MAX_LINE_BYTES} bytes")
        pieces.append(piece)
    return b"".join(pieces)


def end_connection(connection: socket.socket) -> None:
    """End a connection that another thread uses, which sees its end: not by TLS, which is that thread's."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


async def close_stream(writer: asyncio.StreamWriter) -> None:
    """Close a connection and wait until it has ended, for a moment at most: TLS ends by an exchange, for which the
    other side may not be there."""
    writer.close()
    with contextlib.suppress(OSError):
        await asyncio.wait_for(writer.wait_closed(), _CLOSE_S)


def encode_call(call: NodeCall) -> bytes:
    """A call as one line."""
    return to_json(call).encode("ascii") + b"\n"


def decode_call(line: bytes) -> NodeCall:
    """Raises WorkerFailed where it is none of this version."""
    try:
        call = from_json(NodeCall, line)
    except ValueError as error:
        raise WorkerFailed(f"the other node sent no call that this one knows, but {line[:80]!r}") from error
    if call.version != VERSION:
        raise WorkerFailed(
            f"this node runs horizon {VERSION} and the calling one {call.version}; install the same version on all"
        )
    return call
