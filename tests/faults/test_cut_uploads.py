"""Uploads through a proxy that cuts, half-closes, delays and hangs: the content arrives whole, and hardly a byte
travels twice."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from tests.support.daemon_process import wait_for
from tests.support.node import Node
from tests.tcp_proxy import Fault, Kind, TcpProxy

from horizon_client import AsyncClient, InvalidRequest, Progress, Reporter, Unavailable
from horizon_client.connection import STREAM_RETRY, RetryPolicy
from horizon_client.pushed import DatasetPush
from horizon_client.upload import CHUNK_BYTES

NEVER_AGAIN = RetryPolicy(max_attempts=1)
QUICK = replace(STREAM_RETRY, first_wait_s=0.001, longest_wait_s=0.05)
FRAMING = 1.005
"""HTTP/2 puts 9 bytes before every 16 KiB, protobuf some before every piece."""
ANNOUNCING_BYTES = 32 * 1024
"""Of one connection: settings, headers with the token, the calls beside the upload."""
WINDOW_BYTES = 64 * 1024
"""What a client may send beyond the piece that the server waits for."""
KINDS = get_args(Kind)

SIZE = 3 * CHUNK_BYTES + 12_345
CUTS = [
    *(0, 1, 23, 24, 25, 100, 1000, 5000),
    *(2**16 - 1, 2**16, 2**16 + 1, 2**19, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 2**13),
    *(2 * CHUNK_BYTES, 2 * CHUNK_BYTES + 2**14, 3 * CHUNK_BYTES, SIZE - 1, SIZE),
]
assert len(CUTS) == 20


def rows(seed: int, num_bytes: int) -> bytes:
    """JSON lines that no other seed gives."""
    chance = random.Random(seed)
    line_bytes = 1 << 13
    texts = [chance.randbytes(line_bytes // 2).hex() for _ in range(num_bytes // line_bytes)]
    whole = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)
    return whole + json.dumps({"text": "x" * max(1, num_bytes - len(whole) - 13)}).encode() + b"\n"


def stored(node: Node, content: bytes) -> bytes:
    sha256 = hashlib.sha256(content).hexdigest()
    return (node.daemon.state_dir / "blobs" / sha256[:2] / sha256).read_bytes()


async def push(
    proxy: TcpProxy,
    node: Node,
    path: Path,
    name: str,
    *,
    on_progress: Callable[[Progress], object] = lambda progress: None,
    stall_s: float = 20.0,
) -> DatasetPush:
    retry = replace(QUICK, stall_s=stall_s)

    class Watching(Reporter):
        def progress(self, progress: Progress) -> None:
            on_progress(progress)

    async with AsyncClient(proxy.address, token=node.token, unary_retry=retry, stream_retry=retry) as client:
        return await client.datasets.push([path], name=name, reporter=Watching())


def sent_twice(proxy: TcpProxy, content: bytes) -> float:
    """Data bytes that went up and were not needed, at least."""
    return proxy.up_bytes / FRAMING - len(content) - proxy.num_connections * ANNOUNCING_BYTES


@pytest.mark.parametrize("number", range(len(CUTS)), ids=lambda number: f"{CUTS[number]}-{KINDS[number % 3]}")
async def test_a_cut_at_any_byte_costs_one_piece_at_most(node: Node, tmp_path: Path, number: int) -> None:
    content = rows(number, SIZE)
    (tmp_path / "rows.jsonl").write_bytes(content)
    faults = iter([Fault(after_bytes=CUTS[number], how=KINDS[number % 3])])
    async with TcpProxy(node.daemon.endpoints["grpc"], faults) as proxy:
        result = await push(proxy, node, tmp_path / "rows.jsonl", f"cut-{number}")
    assert proxy.num_faults == 1
    assert result.dataset.state == "READY"
    assert stored(node, content) == content
    assert sent_twice(proxy, content) <= CHUNK_BYTES + WINDOW_BYTES


def random_faults(seed: int, count: int) -> Iterator[Fault]:
    chance = random.Random(seed)
    for _ in range(count):
        after_bytes = chance.randrange(CHUNK_BYTES, 3 * CHUNK_BYTES)
        yield Fault(after_bytes=after_bytes, how=chance.choice(KINDS[:3]), delay_s=chance.choice([0.0, 0.0, 0.001]))


async def test_twenty_random_cuts_of_one_upload(node: Node, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    content = rows(1000, 40 * CHUNK_BYTES)
    (tmp_path / "rows.jsonl").write_bytes(content)
    async with TcpProxy(node.daemon.endpoints["grpc"], random_faults(7, 20)) as proxy:
        result = await push(proxy, node, tmp_path / "rows.jsonl", "twenty-cuts")
    assert proxy.num_faults == 20
    assert result.dataset.state == "READY"
    assert stored(node, content) == content
    assert sent_twice(proxy, content) <= 20 * (CHUNK_BYTES + WINDOW_BYTES)
    gc.collect()
    assert [record for record in caplog.records if record.name == "asyncio"] == [], "nothing is left to itself"


async def test_several_files_at_once_are_cut_together(node: Node, tmp_path: Path) -> None:
    contents = {f"shard-{i}.jsonl": rows(2000 + i, 2 * CHUNK_BYTES + i) for i in range(6)}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    seen: list[Progress] = []
    async with TcpProxy(node.daemon.endpoints["grpc"], random_faults(8, 3)) as proxy:
        result = await push(proxy, node, tmp_path, "shards", on_progress=seen.append)
    assert proxy.num_faults == 3
    assert [file.path for file in result.dataset.files] == list(contents)
    assert all(stored(node, content) == content for content in contents.values())
    uploads = [progress for progress in seen if progress.phase == "upload"]
    total = sum(map(len, contents.values()))
    assert {progress.total_bytes for progress in uploads} == {total}
    assert uploads[-1].done_bytes == total
    assert max(progress.done_bytes for progress in uploads) == total, "what travels twice is not counted twice"


async def test_a_connection_that_hangs_is_given_up(node: Node, tmp_path: Path) -> None:
    """Nothing tells either side that the other is gone; both notice by their own clocks."""
    # So long that the client does not take a connection for hung that a busy machine only slows.
    content = rows(3000, SIZE)
    (tmp_path / "rows.jsonl").write_bytes(content)
    faults = iter([Fault(after_bytes=CHUNK_BYTES + 5000, how="hang", hang_s=6.0)])
    async with TcpProxy(node.daemon.endpoints["grpc"], faults) as proxy, asyncio.timeout(300):
        await push(proxy, node, tmp_path / "rows.jsonl", "hung", stall_s=5.0)
    assert proxy.num_faults == 1
    assert stored(node, content) == content
    assert sent_twice(proxy, content) <= CHUNK_BYTES + WINDOW_BYTES


async def test_a_byte_that_changes_between_hashing_and_sending_is_found(node: Node, tmp_path: Path) -> None:
    """The file keeps its size and its time, so only the server's own sha256 can tell."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(rows(4000, SIZE))
    status = path.stat()

    def change(progress: Progress) -> None:
        if progress.phase == "hash" and progress.done_bytes == progress.total_bytes:
            with path.open("r+b") as file:
                file.seek(2 * CHUNK_BYTES + 77)
                file.write(b"#")
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    kept = set((node.daemon.state_dir / "uploads").glob("*/*"))
    async with TcpProxy(node.daemon.endpoints["grpc"]) as proxy:
        with pytest.raises(InvalidRequest, match="not the announced") as caught:
            await push(proxy, node, path, "changing", on_progress=change)
        assert "push again" in caught.value.message
        assert set((node.daemon.state_dir / "uploads").glob("*/*")) <= kept
        assert (await push(proxy, node, path, "changing")).dataset.state == "READY"


async def test_a_byte_that_changes_on_the_server_is_found_and_sent_again(node: Node, tmp_path: Path) -> None:
    content = rows(5000, SIZE)
    (tmp_path / "rows.jsonl").write_bytes(content)
    uploads = node.daemon.state_dir / "uploads"
    faults = iter([Fault(after_bytes=2 * CHUNK_BYTES, how="close")])
    async with TcpProxy(node.daemon.endpoints["grpc"], faults) as proxy:
        async with AsyncClient(
            proxy.address, token=node.token, unary_retry=NEVER_AGAIN, stream_retry=NEVER_AGAIN
        ) as client:
            with pytest.raises(Unavailable):
                await client.datasets.push([tmp_path / "rows.jsonl"], name="rotten")
        wait_for(lambda: any(half.stat().st_size >= CHUNK_BYTES for half in uploads.glob("*/*.part")), 240)
        (half,) = uploads.glob("*/*.part")
        with half.open("r+b") as file:
            file.seek(77)
            file.write(b"#")
        result = await push(proxy, node, tmp_path / "rows.jsonl", "rotten")
    assert result.dataset.state == "READY"
    assert stored(node, content) == content
    assert result.sent_bytes > len(content), "the whole content, after the rest of the rotten one"
