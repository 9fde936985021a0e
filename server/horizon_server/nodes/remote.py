"""The ranks of an attempt that run on another node, as its worker sees them: for as long as it is connected."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

from horizon_server.children.entry import Answer, Failure, decode_line
from horizon_server.codec import to_plain
from horizon_server.errors import HorizonError, WorkerDied
from horizon_server.network import parse_address
from horizon_server.nodes.key import SERVER_NAME, client_context
from horizon_server.nodes.processes import End, OnEnd
from horizon_server.nodes.protocol import CALL_S, LOST_S, NodeCall, RankOrder, encode_call, end_connection


class RemoteRanks:
    """Thread: the caller's; one listens to the node."""

    def __init__(self, address: str, key_file: Path, order: RankOrder, *, on_end: OnEnd) -> None:
        """Have the node at HOST:PORT start them. What goes wrong is told to `on_end`, and not raised."""
        last = order.first_rank + order.num_ranks - 1
        self._who = f"rank{'' if order.num_ranks == 1 else 's'} {order.first_rank}" + (
            f" to {last}" if order.num_ranks > 1 else ""
        )
        self._address, self._on_end, self._is_closing = address, on_end, False
        self._connection: socket.socket | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._follow, args=(key_file, order), name=f"ranks of {address}", daemon=True).start()

    def close(self, timeout_s: float) -> None:
        """Wait for their end, and end those that take longer."""
        self._is_closing = True
        self._ended.wait(timeout_s)
        self.kill()

    def kill(self) -> None:
        """End them: the node does it when it sees that the connection has ended."""
        self._is_closing = True
        if self._connection is not None:
            end_connection(self._connection)

    def _follow(self, key_file: Path, order: RankOrder) -> None:
        try:
            end = self._run(key_file, order)
        except HorizonError as error:
            end = Failure(error)
        except TimeoutError:
            end = self._lost(f"it has sent nothing for {LOST_S:g} s")
        except OSError as error:
            end = self._lost(error.strerror or str(error))
        self._ended.set()
        if not self._is_closing:
            self._on_end(f"{self._who} on {self._address}", end)

    def _run(self, key_file: Path, order: RankOrder) -> End:
        with connected(self._address, key_file) as connection:
            self._connection = connection
            connection.sendall(encode_call(NodeCall(name="run", body=to_plain(order))))
            pending = b""
            connection.settimeout(LOST_S)
            while True:
                piece = connection.recv(1 << 16)
                if not piece:
                    return self._lost("it has closed the connection")
                *lines, pending = (pending + piece).split(b"\n")
                for line in lines:
                    # An empty one says that all is well.
                    if line and isinstance(end := decode_line(line), Answer | Failure):
                        return end if isinstance(end, Answer) else Failure(self._told(end.error))

    def _lost(self, why: str) -> Failure:
        return Failure(WorkerDied(f"{self._who} on {self._address}: the connection to the node is lost: {why}"))

    def _told(self, error: HorizonError) -> HorizonError:
        """What the node says of a rank, with the node."""
        return type(error)(f"on {self._address}: {error.message}")


def connected(address: str, key_file: Path) -> socket.socket:
    """A connection to the node at HOST:PORT. Raises OSError and BadSetting."""
    place = parse_address("nodes", address)
    plain = socket.create_connection((place.host, place.port), timeout=CALL_S)
    try:
        return client_context(key_file).wrap_socket(plain, server_hostname=SERVER_NAME)
    except BaseException:
        plain.close()
        raise
