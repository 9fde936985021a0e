"""Uploads that break off, and uploads that lie: what arrived is kept and gone on with, what is wrong leaves nothing."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import repeat
from pathlib import Path

import grpc
import pytest
from tests.faults.raw_calls import RawCalls
from tests.support.daemon_process import wait_for
from tests.support.loop_thread import LoopThread
from tests.support.node import Node, Shell
from tests.tcp_proxy import Fault, TcpProxy

SIZE = 96 * 2**20
LEAST_BYTES, MOST_BYTES = 4 * 2**20, 8 * 2**20
LINE = b"a line of text that is long enough to be worth sending over the wire, again and again and again\n"


@contextmanager
def on_a_line(server: str, faults: Iterator[Fault]) -> Iterator[TcpProxy]:
    """A proxy in a thread of its own."""
    thread = LoopThread()

    async def start() -> TcpProxy:
        return await TcpProxy(server, faults).__aenter__()

    proxy = thread.call(start())
    try:
        yield proxy
    finally:
        thread.call(proxy.__aexit__(None, None, None))
        thread.close()


def parts(node: Node) -> list[Path]:
    return sorted((node.daemon.state_dir / "uploads").glob("*/*.part"))


def test_a_client_killed_in_the_middle_of_an_upload(node: Node, shell: Shell) -> None:
    content = b"".join(b"%08d " % i + LINE for i in range(SIZE // (len(LINE) + 9)))
    (shell.home / "big.txt").write_bytes(content)
    # No more than this gets through, so that the client is in the middle when it is killed, however late that is.
    faults = repeat(Fault(after_bytes=MOST_BYTES, how="hang", hang_s=3600.0))
    with on_a_line(node.daemon.endpoints["grpc"], faults) as proxy:
        push = replace(shell, server=proxy.address).start("dataset", "push", "big.txt", "--name", "big")
        wait_for(
            lambda: push.poll() is not None or any(part.stat().st_size >= LEAST_BYTES for part in parts(node)), 240
        )
        assert push.poll() is None, push.communicate(timeout=240)
        push.send_signal(signal.SIGKILL)
        push.communicate(timeout=240)
        passed = proxy.up_bytes

    assert "UPLOADING" in shell.works("dataset", "get", "big")
    (shell.home / "job.yaml").write_text("name: job\nmodel: demo-model\ndataset: big\n")
    refusal = shell.fails(4, "job", "submit", "job.yaml")
    assert "dataset big is not ready: its upload was not finished; push it again" in refusal
    (part,) = parts(node)
    arrived = part.stat().st_size

    again = json.loads(shell.works("dataset", "push", "big.txt", "--name", "big", "-o", "json"))
    # What is there is not sent again, and more than has arrived is not left out.
    assert len(content) - passed <= again["sent_bytes"] <= len(content) - arrived <= len(content) - LEAST_BYTES
    assert again["dataset"]["state"] == "READY"
    assert parts(node) == []
    third = json.loads(shell.works("dataset", "push", "big.txt", "--name", "big", "-o", "json"))
    assert third["sent_bytes"] == 0
    shell.works("dataset", "delete", "big")


def test_a_corrupt_byte_is_refused_and_nothing_is_left(node: Node) -> None:
    good = b'{"text": "the true content of this file"}\n' * 1000
    bad = good[:5000] + b"X" + good[5001:]
    before = _files(node.daemon.state_dir)
    raw = RawCalls(node.daemon.endpoints["grpc"], node.token)
    try:
        with pytest.raises(grpc.RpcError) as caught:
            raw.write(bad, announced=good)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "not the announced" in str(caught.value.details())
        assert "they are removed: push again" in str(caught.value.details())
        assert raw.status(good).committed_bytes == 0
        assert _files(node.daemon.state_dir) == before
        assert raw.write(good).complete
    finally:
        raw.close()


def test_more_than_was_announced_is_refused(node: Node) -> None:
    raw = RawCalls(node.daemon.endpoints["grpc"], node.token)
    try:
        with pytest.raises(grpc.RpcError) as caught:
            raw.write(b"longer than announced", announced=b"short")
        assert "more than the announced 5 bytes were sent" in str(caught.value.details())
        dataset_id = raw.create_dataset("never-sent", "rows.jsonl", b'{"text": "never sent"}\n')
        with pytest.raises(grpc.RpcError) as caught:
            raw.finalize_dataset(dataset_id)
        assert "1 of 1 files have not arrived whole, rows.jsonl among them" in str(caught.value.details())
    finally:
        raw.close()


def test_a_path_out_of_the_folder_is_refused(node: Node) -> None:
    raw = RawCalls(node.daemon.endpoints["grpc"], node.token)
    try:
        for path in ("../escape.jsonl", "/etc/rows.jsonl", "a//b.jsonl", "a\\b.jsonl"):
            with pytest.raises(grpc.RpcError) as caught:
                raw.create_dataset("escape", path, b"{}\n")
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "a relative path with forward slashes" in str(caught.value.details())
    finally:
        raw.close()


def _files(state_dir: Path) -> set[str]:
    return {str(p.relative_to(state_dir)) for top in ("blobs", "uploads") for p in (state_dir / top).glob("*/*")}
