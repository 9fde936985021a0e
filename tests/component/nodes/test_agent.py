"""What a node answers to others, over TLS on the loopback interface, and what no caller can do to it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.support.fleet import GIB, NODE_BYTES, reservation, serving

from horizon_server.children.entry import Answer, Failure, Line, decode_line
from horizon_server.codec import to_plain
from horizon_server.errors import BadSetting, DoesNotFit, HorizonError, InUse, WorkerFailed
from horizon_server.network import parse_address
from horizon_server.nodes import agent as agent_module
from horizon_server.nodes import directory as directory_module
from horizon_server.nodes import protocol
from horizon_server.nodes.agent import NodeAgent
from horizon_server.nodes.directory import NodeDirectory
from horizon_server.nodes.key import client_context, make_key, server_context
from horizon_server.nodes.protocol import NodeCall, NodeReport, RankOrder, encode_call, receive_line
from horizon_server.nodes.remote import connected
from horizon_server.planning.machine import Accelerator
from horizon_server.version import VERSION

WAIT_S = 240.0


def until(condition: Callable[[], object]) -> None:
    """Wait for what another thread does."""
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def num_memory_files() -> int:
    """Of the agent's, which is in this process."""
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            links.append(str(entry.readlink()))
        except FileNotFoundError:
            continue
    return sum("memfd:horizon-" in link for link in links)


def said_to(address: str, key: Path, line: bytes) -> Line:
    """What a node answers to a line."""
    with connected(address, key) as connection:
        connection.sendall(line)
        return decode_line(receive_line(connection, timeout_s=WAIT_S))


def asked(node: NodeAgent, key: Path, name: Any, body: Any = None) -> Any:
    """The answer of a node; raises what it answers."""
    call = NodeCall(name=name, body={} if body is None else to_plain(body))
    end = said_to(node.address, key, encode_call(call))
    if isinstance(end, Failure):
        raise end.error
    assert isinstance(end, Answer)
    return end.value


class Impostor:
    """Has the key, and answers every call with the same bytes; with None, with nothing at all."""

    def __init__(self, key: Path, answer: bytes | None) -> None:
        self._context, self._answer = server_context(key), answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        """Take no more calls."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            try:
                plain, _ = self._listener.accept()
            except OSError:
                return
            with contextlib.suppress(OSError), self._context.wrap_socket(plain, server_side=True) as connection:
                receive_line(connection, timeout_s=WAIT_S)
                if self._answer is None:
                    # Until the caller gives up.
                    connection.recv(1)
                else:
                    connection.sendall(self._answer)


@pytest.fixture
def key(tmp_path: Path) -> Path:
    make_key(tmp_path / "fleet.pem")
    return tmp_path / "fleet.pem"


@pytest.fixture
def node(key: Path, tmp_path: Path) -> Iterator[NodeAgent]:
    with serving(tmp_path / "node", key) as agent:
        yield agent


def test_it_says_what_it_has(node: NodeAgent, key: Path) -> None:
    assert asked(node, key, "report") == to_plain(
        NodeReport(
            hostname=socket.gethostname(),
            host_bytes=NODE_BYTES,
            free_bytes=NODE_BYTES,
            num_threads=1,
            host_devices=2,
        )
    )


def test_it_works_for_one_job_at_a_time(node: NodeAgent, key: Path) -> None:
    before = num_memory_files()
    for _ in range(2):
        # The second time changes nothing.
        asked(node, key, "reserve", reservation("job_1", plane_bytes={"hi": 8192, "lo": 8192}))
        assert num_memory_files() == before + 2
    report = asked(node, key, "report")
    assert (report["job_id"], report["owner"]) == ("job_1", "daemon_1")
    with pytest.raises(InUse, match="it works for job job_1"):
        asked(node, key, "reserve", reservation("job_2"))
    asked(node, key, "reserve", reservation("job_1", plane_bytes={"hi": 4096}))
    assert num_memory_files() == before + 1, "another plan of the same job takes the place of its first"
    asked(node, key, "release", {"job_id": "job_2"})
    assert asked(node, key, "report")["job_id"] == "job_1"
    asked(node, key, "release", {"job_id": "job_1"})
    assert asked(node, key, "report")["job_id"] == ""
    assert num_memory_files() == before
    asked(node, key, "reserve", reservation("job_2"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"host_bytes": 5 * GIB}, "5.00 GiB of host memory are needed there and 4.00 GiB are free"),
        ({"num_ranks": 3}, "3 devices are needed there, and host_devices is 2"),
        (
            {"num_ranks": 2, "device_kind": "cuda", "gpu_name": "A100"},
            "2 devices are needed there, and of its GPUs that are A100 there are 1",
        ),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str, key: Path, tmp_path: Path) -> None:
    gpus = [Accelerator(index=index, name=name, memory_bytes=GIB) for index, name in enumerate(("A100", "H100"))]
    with serving(tmp_path / "node", key, gpus=gpus) as node:
        with pytest.raises(DoesNotFit) as refused:
            asked(node, key, "reserve", reservation(**changes))
        assert refused.value.message == message
        assert asked(node, key, "report")["job_id"] == ""


def test_ranks_of_a_job_that_it_is_not_reserved_for_are_not_started(node: NodeAgent, key: Path) -> None:
    order = RankOrder(
        job_id="job_2", request={}, config="{}", tensors=(), first_rank=1, num_ranks=1, meeting="127.0.0.1:1"
    )
    asked(node, key, "reserve", reservation("job_1"))
    with pytest.raises(WorkerFailed, match="the node is not reserved for job job_2"):
        asked(node, key, "run", order)


def test_a_job_without_ranks_is_forgotten(key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_module, "ABANDONED_S", 0.3)
    before = num_memory_files()
    with serving(tmp_path / "node", key) as node:
        asked(node, key, "reserve", reservation())
        until(lambda: not asked(node, key, "report")["job_id"])
        assert num_memory_files() == before


def test_a_caller_with_another_key_is_refused(node: NodeAgent, key: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.pem"
    make_key(other)
    with pytest.raises(ssl.SSLCertVerificationError):
        asked(node, other, "report")
    # Nor does the node hear one that does not look whom it calls, with another key or none.
    for file in (other, None):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        if file is not None:
            context.load_cert_chain(file)
        place = parse_address("nodes", node.address)
        plain = socket.create_connection((place.host, place.port), timeout=WAIT_S)
        with pytest.raises(OSError), context.wrap_socket(plain) as connection:  # reset, or an alert
            connection.sendall(encode_call(NodeCall(name="reserve", body=to_plain(reservation()))))
            assert connection.recv(1), "the connection has ended"
            pytest.fail("it has answered")
    assert asked(node, key, "report")["job_id"] == ""


def test_a_caller_of_another_version_is_told_both(node: NodeAgent, key: Path) -> None:
    line = encode_call(NodeCall(name="report", version="0.0.7"))
    end = said_to(node.address, key, line)
    assert isinstance(end, Failure)
    assert end.error.message == (
        f"this node runs horizon {VERSION} and the calling one 0.0.7; install the same version on all"
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"GET / HTTP/1.1\n", "sent no call that this one knows"),
        (b"\xff\xfe\n", "sent no call that this one knows"),
        (b"[" * 100_000 + b"\n", "sent no call that this one knows"),
        (json.dumps({"name": "shutdown", "version": VERSION}).encode() + b"\n", "sent no call that this one knows"),
        (json.dumps({"name": "reserve", "version": VERSION}).encode() + b"\n", "asked for something that this one"),
        (b"x" * 4096, "the line is longer than 2048 bytes"),
    ],
)
def test_what_is_no_call_is_refused(
    line: bytes, message: str, node: NodeAgent, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not line.endswith(b"\n"):
        monkeypatch.setattr(protocol, "MAX_LINE_BYTES", 2048)
    end = said_to(node.address, key, line)
    assert isinstance(end, Failure) and message in end.error.message, end
    assert asked(node, key, "report")["job_id"] == ""


@pytest.mark.parametrize("has_key", [True, False])
def test_a_connection_that_says_nothing_is_dropped(
    has_key: bool, node: NodeAgent, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_module, "CALL_S" if has_key else "_HANDSHAKE_S", 0.2)
    place = parse_address("nodes", node.address)
    if has_key:
        with connected(node.address, key) as connection:
            connection.settimeout(WAIT_S)
            assert connection.recv(1) == b""
    else:
        with socket.create_connection((place.host, place.port), timeout=WAIT_S) as plain:
            assert plain.recv(1) == b""
    monkeypatch.undo()
    assert asked(node, key, "report")["job_id"] == ""


def test_a_key_is_made_once_and_only_its_owner_reads_it(key: Path, tmp_path: Path) -> None:
    assert key.stat().st_mode & 0o777 == 0o600
    before = key.read_bytes()
    with pytest.raises(BadSetting, match="is there already; nodes that have a copy of it would be shut out"):
        make_key(key)
    assert key.read_bytes() == before
    with pytest.raises(BadSetting, match="cannot be written: No such file or directory"):
        make_key(tmp_path / "no folder" / "fleet.pem")


@pytest.mark.parametrize("context", [server_context, client_context])
@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        (None, 0, "cannot be used: No such file or directory; horizond node key makes one"),
        ("", 0o600, "cannot be used: it is not the key of a fleet; horizond node key makes one"),
        (
            "-----BEGIN CERTIFICATE-----\n",
            0o600,
            "cannot be used: it is not the key of a fleet; horizond node key makes",
        ),
    ],
)
def test_a_key_file_that_cannot_be_used_is_refused(
    context: Callable[[Path], ssl.SSLContext], text: str | None, mode: int, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "bad.pem"
    if text is not None:
        file.write_text(text)
        file.chmod(mode)
    with pytest.raises(BadSetting) as refused:
        context(file)
    assert refused.value.message.startswith("setting fleet_key_file: ")
    assert message in refused.value.message, refused.value.message


@pytest.mark.parametrize("context", [server_context, client_context])
def test_a_key_that_others_can_read_is_refused(context: Callable[[Path], ssl.SSLContext], key: Path) -> None:
    key.chmod(0o640)
    with pytest.raises(BadSetting) as refused:
        context(key)
    assert refused.value.message == (
        f"setting fleet_key_file: others than its owner can read {key}; run chmod 600 {key}"
    )


async def test_a_job_gets_all_nodes_or_none(key: Path, tmp_path: Path) -> None:
    with serving(tmp_path / "1", key) as first, serving(tmp_path / "2", key) as second:
        nodes = NodeDirectory(addresses=[first.address, second.address], key_file=key)
        assert nodes.why_not([]) == dict.fromkeys(nodes.addresses, "has not been asked yet")
        assert await nodes.reserve(reservation("job_1"), least=1, most=1, kept=[second.address]) == (second.address,)
        with pytest.raises(WorkerFailed) as refused:
            await nodes.reserve(reservation("job_2"), least=2, most=2)
        assert refused.value.message == (f"it needs 2 further nodes of 2: {second.address}: it works for job job_1")
        assert first.report().job_id == ""
        await nodes.ask_all()
        assert nodes.why_not(["job_1"]) == {first.address: "", second.address: ""}
        assert nodes.why_not([]) == {first.address: "", second.address: "works for a job of another node"}
        # In the order of the settings where none is kept, and those that are kept first.
        await nodes.release("job_1")
        assert await nodes.reserve(reservation("job_3"), least=2, most=2, kept=[second.address, "gone:1"]) == (
            second.address,
            first.address,
        )
        # At least so many, and as many as can be had.
        await nodes.release("job_3")
        taken = NodeDirectory(addresses=[first.address], key_file=key)
        assert await taken.reserve(reservation("job_4"), least=0, most=1) == (first.address,)
        assert await nodes.reserve(reservation("job_5"), least=1, most=2) == (second.address,)
        assert await nodes.reserve(reservation("job_6"), least=0, most=2) == ()
        await nodes.release("job_4")
        assert await nodes.reserve(reservation("job_5"), least=0, most=1, kept=[second.address]) == (second.address,)
        assert (first.report().job_id, second.report().job_id) == ("", "job_5")
    with pytest.raises(WorkerFailed, match="it needs 1 further node of 0: no others are set"):
        await NodeDirectory().reserve(reservation(), least=1, most=1)


async def test_nodes_that_cannot_be_reached_are_said_to(key: Path, tmp_path: Path) -> None:
    with serving(tmp_path / "node", key) as node:
        address = node.address
    nodes = NodeDirectory(addresses=[address], key_file=key)
    await nodes.ask_all()
    assert isinstance(nodes.known[address], WorkerFailed)
    assert nodes.why_not([]) == {address: "does not answer"}
    with pytest.raises(WorkerFailed, match=f"{address}: it cannot be reached: "):
        await nodes.reserve(reservation(), least=1, most=1)
    await nodes.release("job_1")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "does not answer within"),
        (b"", "cannot be reached: it ended the connection"),
        (b"hello\n", "answered with something else than an answer"),
        (b"\n", "answered with something else than an answer"),
        (b"x" * 4096, "answered with something else than an answer"),
    ],
)
async def test_a_node_that_answers_nothing_sensible_is_as_one_that_is_lost(
    answer: bytes | None, message: str, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_module, "CALL_S", 0.5 if answer is None else WAIT_S)
    monkeypatch.setattr(directory_module, "MAX_LINE_BYTES", 1024)
    with closing(Impostor(key, answer)) as impostor:
        nodes = NodeDirectory(addresses=[impostor.address], key_file=key)
        await nodes.ask_all()
        found = nodes.known[impostor.address]
        assert isinstance(found, HorizonError) and message in found.message, found
        with pytest.raises(WorkerFailed, match=message):
            await nodes.reserve(reservation(), least=1, most=1)


async def test_what_becomes_of_nodes_is_told(key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_module, "_ASK_EVERY_S", 0.02)
    changes, counts, told = list[list[str]](), list[Mapping[str, int]](), asyncio.Queue[list[str]]()

    with serving(tmp_path / "1", key) as first, contextlib.ExitStack() as life:
        second = life.enter_context(serving(tmp_path / "2", key))
        nodes = NodeDirectory(addresses=[first.address, second.address], key_file=key, owner="daemon_2")

        def note() -> None:
            changes.append([nodes.state_of(address) for address in nodes.addresses])
            told.put_nowait(changes[-1])

        async def until_told(*wanted: str) -> None:
            async with asyncio.timeout(WAIT_S):
                while await told.get() != list(wanted):
                    pass

        watching = asyncio.create_task(nodes.watch(note, counts.append))
        await until_told("free", "free")
        # Another daemon takes one, and gives it back.
        other = NodeDirectory(addresses=[second.address], key_file=key)
        await other.reserve(reservation("job_9", owner="daemon_1"), least=1, most=1)
        await until_told("free", "busy")
        await other.release("job_9")
        await until_told("free", "free")
        # Not in the event loop, which answers nobody meanwhile.
        await asyncio.to_thread(life.close)
        await until_told("free", "lost")
        assert {"free": 1, "busy": 0, "lost": 1} in counts
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
    # Nothing is told of what stays as it is.
    assert all(one != after for one, after in itertools.pairwise(changes))


async def test_a_job_that_has_ended_here_is_released_where_it_is_left(key: Path, tmp_path: Path) -> None:
    resident = {"job_1"}

    async def is_resident(job_id: str) -> bool:
        return job_id in resident

    with serving(tmp_path / "1", key) as first, serving(tmp_path / "2", key) as second:
        nodes = NodeDirectory(
            addresses=[first.address, second.address], key_file=key, owner="daemon_1", is_resident=is_resident
        )
        await nodes.reserve(reservation("job_1"), least=1, most=1)
        # Of another daemon, which knows whether it has ended.
        await nodes.reserve(reservation("job_9", owner="daemon_2"), least=1, most=1)
        for wanted in ("job_1", ""):
            await nodes.ask_all()
            await nodes._release_left()
            assert (first.report().job_id, second.report().job_id) == (wanted, "job_9")
            resident.clear()
