"""Contents and datasets over the wire: cut, resumed, corrupt, over-long, repeated, and between users."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import random
import uuid
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from horizon_proto.v1 import blob_pb2, blob_pb2_grpc, dataset_pb2, dataset_pb2_grpc
from horizon_server.blobs.parts import Disk
from horizon_server.blobs.store import BlobStore
from horizon_server.db.pushed import BlobReferences
from horizon_server.records.blob import BlobRef
from horizon_server.services.uploads import MAX_WHOLE_BLOBS, MAX_WHOLE_BYTES, Uploads

CONTENT = random.Random(1).randbytes(2 * 2**20 + 11)
REF = blob_pb2.BlobRef(sha256=hashlib.sha256(CONTENT).hexdigest(), size_bytes=len(CONTENT))


def detail(error: grpc.aio.AioRpcError, kind: Any) -> Any:
    trailers: Any = error.trailing_metadata()
    status = status_pb2.Status.FromString(dict(trailers)["grpc-status-details-bin"])
    assert status.message == error.details()
    return next((into for one in status.details if one.Unpack(into := kind())), None)


def reason(caught: pytest.ExceptionInfo[grpc.aio.AioRpcError]) -> tuple[str, str]:
    info = detail(caught.value, error_details_pb2.ErrorInfo)
    assert info.domain == "horizon"
    return caught.value.code().name, info.reason


async def test_a_dataset_goes_from_announced_to_ready(world: Any, chats: bytes) -> None:
    created = await world.ann.create("chats", {"train.jsonl": chats})
    assert (created.state, created.owner) == (dataset_pb2.DATASET_STATE_UPLOADING, "ann")
    (missing,) = await world.ann.missing({"train.jsonl": chats})
    assert (missing.committed_bytes, missing.complete) == (0, False)
    assert (await world.ann.write(chats)).complete
    assert await world.ann.missing({"train.jsonl": chats}) == []
    ready = await world.ann.push("chats", {"train.jsonl": chats})
    assert ready.dataset_id == created.dataset_id
    assert (ready.state, ready.num_rows) == (dataset_pb2.DATASET_STATE_READY, 50)
    assert ready.format == dataset_pb2.DATASET_FORMAT_MESSAGES
    assert ready.size_bytes == len(chats)
    got = await world.ann.call("datasets", "GetDataset", dataset_pb2.GetDatasetRequest(name="chats"))
    assert got.dataset == ready
    assert world.stored_bytes == len(chats)


async def test_a_push_is_repeatable_and_sends_nothing_the_second_time(world: Any, chats: bytes) -> None:
    first = await world.ann.push("chats", {"a.jsonl": chats})
    sent = world.stored_bytes
    assert await world.ann.push("chats", {"a.jsonl": chats}) == first
    explicit = await world.ann.push("chats", {"a.jsonl": chats}, format=dataset_pb2.DATASET_FORMAT_MESSAGES)
    assert explicit == first
    other_name = await world.ann.push("chats-2", {"b.jsonl": chats})
    assert other_name.dataset_id != first.dataset_id
    assert world.stored_bytes == sent


CUTS = [0, 1, 1000, 2**16 - 1, 2**16, 2**19, 2**20 - 1, 2**20, 2**20 + 1, 2 * 2**20, len(CONTENT) - 1, len(CONTENT)]


@pytest.mark.parametrize("cut", CUTS)
async def test_an_upload_that_was_cut_goes_on(world: Any, cut: int) -> None:
    async def then_hang() -> AsyncIterator[blob_pb2.WriteBlobRequest]:
        yield blob_pb2.WriteBlobRequest(chunk=blob_pb2.BlobChunk(blob=REF))
        for start in range(0, cut, 2**18):
            data = CONTENT[start : min(cut, start + 2**18)]
            yield blob_pb2.WriteBlobRequest(chunk=blob_pb2.BlobChunk(data=data))
        arrived.set()
        await asyncio.Event().wait()

    arrived = asyncio.Event()
    call = world.ann.call("blobs", "WriteBlob", then_hang())
    await arrived.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    status = await world.ann.status(CONTENT)
    while not status.complete:
        assert status.committed_bytes <= cut
        rest = CONTENT[status.committed_bytes :]
        status = await world.ann.write(rest, status.committed_bytes, ref=REF)
    assert world.blob(CONTENT).read_bytes() == CONTENT


async def test_corrupt_bytes_are_refused_and_can_be_sent_again(world: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="sha256") as caught:
        await world.ann.write(CONTENT[:-1] + b"?", ref=REF)
    assert reason(caught) == ("INVALID_ARGUMENT", "INVALID_UPLOAD")
    assert (await world.ann.status(CONTENT)).committed_bytes == 0
    assert (await world.ann.write(CONTENT)).complete


@pytest.mark.parametrize(
    ("content", "offset", "size"),
    [(CONTENT + b"x", 0, 2**20), (CONTENT, 5, 2**20), (CONTENT, -1, 2**20), (CONTENT, 0, 2**20 + 1)],
)
async def test_streams_that_break_the_rules_are_refused(world: Any, content: bytes, offset: int, size: int) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await world.ann.write(content, offset, ref=REF, size=size)
    assert reason(caught) == ("INVALID_ARGUMENT", "INVALID_UPLOAD")


async def test_a_stream_must_name_one_blob_first(world: Any) -> None:
    nameless = [blob_pb2.WriteBlobRequest(chunk=blob_pb2.BlobChunk(data=b"x"))]
    two = [
        blob_pb2.WriteBlobRequest(chunk=blob_pb2.BlobChunk(blob=REF, data=b"x")),
        blob_pb2.WriteBlobRequest(chunk=blob_pb2.BlobChunk(blob=blob_pb2.BlobRef(sha256="ab" * 32, size_bytes=9))),
    ]
    for stream in ([], nameless, two):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await world.ann.call("blobs", "WriteBlob", iter(stream))
        assert reason(caught) == ("INVALID_ARGUMENT", "INVALID_UPLOAD")


def batch_of(contents: list[bytes]) -> blob_pb2.WriteBlobsRequest:
    blobs = [
        blob_pb2.WholeBlob(
            blob=blob_pb2.BlobRef(sha256=hashlib.sha256(content).hexdigest(), size_bytes=len(content)), data=content
        )
        for content in contents
    ]
    return blob_pb2.WriteBlobsRequest(blobs=blobs)


async def test_many_small_contents_come_in_one_call(world: Any) -> None:
    files = {f"{i:03d}.jsonl": b'{"text": "row %d"}\n' % i for i in range(200)}
    await world.ann.create("small", files)
    contents = list(files.values())
    await world.ann.call("blobs", "WriteBlobs", batch_of(contents[:150]))
    missing = {status.blob.sha256 for status in await world.ann.missing(files)}
    assert missing == {whole.blob.sha256 for whole in batch_of(contents[150:]).blobs}
    assert len(await world.bob.missing(files)) == 200, "what ann has sent is not shown to bob"
    ready = await world.ann.push("small", files)
    assert (ready.state, ready.num_rows) == (dataset_pb2.DATASET_STATE_READY, 200)
    await world.ann.call("blobs", "WriteBlobs", batch_of(contents))
    assert [entry.name for entry in (world.root / "uploads" / "ann").iterdir()] == [], "the dataset proves them"


async def test_a_batch_of_contents_is_bounded(world: Any) -> None:
    most = batch_of([b"%d" % i for i in range(MAX_WHOLE_BLOBS)])
    await world.ann.call("blobs", "WriteBlobs", most)
    await world.ann.call("blobs", "WriteBlobs", batch_of([bytes(MAX_WHOLE_BYTES)]))
    impossible = blob_pb2.WriteBlobsRequest(blobs=[blob_pb2.WholeBlob(data=b"x")])
    for request, why in (
        (batch_of([b"%d" % i for i in range(MAX_WHOLE_BLOBS + 1)]), "TOO_LARGE"),
        (batch_of([bytes(MAX_WHOLE_BYTES), b"x"]), "TOO_LARGE"),
        (blob_pb2.WriteBlobsRequest(blobs=[blob_pb2.WholeBlob(blob=REF, data=b"part of it")]), "INVALID_UPLOAD"),
        (impossible, "INVALID_SPEC"),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await world.ann.call("blobs", "WriteBlobs", request)
        assert reason(caught) == ("INVALID_ARGUMENT", why)
    assert detail(caught.value, error_details_pb2.BadRequest).field_violations[0].field == "blobs[0].blob.sha256"


def long_stream(ref: blob_pb2.BlobRef, offset: int = 0, *, num: int = 24) -> Iterator[blob_pb2.WriteBlobRequest]:
    yield blob_pb2.WriteBlobRequest(chunk=blob_pb2.BlobChunk(blob=ref, offset=offset))
    for _ in range(num):
        yield blob_pb2.WriteBlobRequest(chunk=blob_pb2.BlobChunk(data=bytes(2**20)))


async def test_a_refused_or_needless_stream_does_not_hang_its_sender(world: Any, chats: bytes) -> None:
    """The answer comes although much was still to be read (grpc#6891), to clients of either kind."""
    await world.ann.push("chats", {"a.jsonl": chats})
    there = blob_pb2.BlobRef(sha256=hashlib.sha256(chats).hexdigest(), size_bytes=len(chats))

    def blocking() -> tuple[bool, str]:
        with grpc.insecure_channel(world.address) as channel:
            stub = blob_pb2_grpc.BlobServiceStub(channel)
            fine = stub.WriteBlob(long_stream(there), metadata=world.ann.metadata, timeout=240).status.complete
            with pytest.raises(grpc.RpcError) as caught:
                stub.WriteBlob(long_stream(REF, offset=7), metadata=world.ann.metadata, timeout=240)
            return fine, caught.value.code().name

    for _ in range(3):
        assert (await world.ann.call("blobs", "WriteBlob", long_stream(there))).status.complete
        with pytest.raises(grpc.aio.AioRpcError, match="0 bytes have arrived") as refused:
            await world.ann.call("blobs", "WriteBlob", long_stream(REF, offset=7))
        assert reason(refused) == ("INVALID_ARGUMENT", "INVALID_UPLOAD")
    with ThreadPoolExecutor(1) as thread:
        assert await asyncio.get_running_loop().run_in_executor(thread, blocking) == (True, "INVALID_ARGUMENT")


async def opened(caller: Any, offset: int = 0) -> Any:
    """An upload stream that has named its blob and sent no data yet."""
    call = caller.stubs["blobs"].WriteBlob(metadata=caller.metadata, timeout=240)
    await call.write(blob_pb2.WriteBlobRequest(chunk=blob_pb2.BlobChunk(blob=REF, offset=offset)))
    return call


class RoomDisk(Disk):
    """The real disk, with room for a number of bytes where `room` is set."""

    room: int | None = None

    def write(self, descriptor: int, data: memoryview) -> int:
        if self.room is not None:
            self.room -= len(data)
            if self.room < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(descriptor, data)


async def test_a_full_disk_is_reported_and_the_upload_continues_when_there_is_room(base_world: Any, serve: Any) -> None:
    disk = RoomDisk()
    disk.room = 2**20
    store = BlobStore(base_world.root, disk=disk)
    uploads = Uploads(store, BlobReferences(base_world.daemon.database), max_blob_bytes=2**30)
    async with serve(base_world, blobs=uploads) as world:
        with pytest.raises(grpc.aio.AioRpcError, match="disk is full") as caught:
            await world.ann.write(CONTENT)
        assert reason(caught) == ("RESOURCE_EXHAUSTED", "DISK_FULL")
        assert detail(caught.value, error_details_pb2.RetryInfo).retry_delay.seconds > 0
        disk.room = None
        committed = (await world.ann.status(CONTENT)).committed_bytes
        assert (await world.ann.write(CONTENT[committed:], committed, ref=REF)).complete


async def test_a_daemon_that_stops_keeps_what_has_arrived(world: Any) -> None:
    call = await opened(world.ann)
    await call.write(blob_pb2.WriteBlobRequest(chunk=blob_pb2.BlobChunk(data=CONTENT[: 2**20])))
    part = world.root / "uploads" / "ann" / f"{REF.sha256}-{REF.size_bytes}.part"
    async with asyncio.timeout(240):
        while not part.exists() or part.stat().st_size < 2**20:  # noqa: ASYNC110  # the bytes come through the network
            await asyncio.sleep(0.005)
    await world.server.stop(60)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert reason(caught) == ("UNAVAILABLE", "DRAINING")
    assert (
        await BlobStore(world.root).status("ann", BlobRef(sha256=REF.sha256, size_bytes=REF.size_bytes))
    ).committed_bytes == 2**20


async def test_a_client_that_listens_first_learns_of_a_refusal_before_it_sends_data(world: Any) -> None:
    call = await opened(world.ann, 7)
    async with asyncio.timeout(240):
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_stream_without_a_token_is_refused_without_hanging(world: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        stub: Any = blob_pb2_grpc.BlobServiceStub(world.channel)
        await stub.WriteBlob(long_stream(REF), timeout=240)
    assert reason(caught) == ("UNAUTHENTICATED", "UNAUTHENTICATED")


async def test_prepared_tokens_go_with_the_last_dataset_of_their_content(world: Any, chats: bytes) -> None:
    first = await world.ann.push("chats", {"a.jsonl": chats})
    tokens = world.root / "prepared" / first.digest / "key"
    tokens.mkdir(parents=True, exist_ok=True)
    await world.bob.push("mine", {"a.jsonl": chats})
    await world.ann.create("unfinished", {"b.jsonl": b"x"})
    for caller, name in ((world.ann, "chats"), (world.ann, "unfinished")):
        await caller.call("datasets", "DeleteDataset", dataset_pb2.DeleteDatasetRequest(name=name))
    assert tokens.exists(), "another dataset has the same content"
    await world.bob.call("datasets", "DeleteDataset", dataset_pb2.DeleteDatasetRequest(name="mine"))
    assert not tokens.parent.exists()


async def test_users_do_not_see_each_others_contents_or_datasets(world: Any, chats: bytes) -> None:
    theirs = await world.ann.push("chats", {"a.jsonl": chats})
    assert len(await world.bob.missing({"a.jsonl": chats})) == 1, "bob has not shown that he has it"
    for method, request in (
        ("GetDataset", dataset_pb2.GetDatasetRequest(name=theirs.dataset_id)),
        ("GetDataset", dataset_pb2.GetDatasetRequest(name="chats")),
        ("FinalizeDataset", dataset_pb2.FinalizeDatasetRequest(dataset_id=theirs.dataset_id)),
        ("DeleteDataset", dataset_pb2.DeleteDatasetRequest(name=theirs.dataset_id)),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await world.bob.call("datasets", method, request)
        assert reason(caught) == ("NOT_FOUND", "NOT_FOUND")
    announced = await world.bob.create("chats", {"a.jsonl": chats})
    with pytest.raises(grpc.aio.AioRpcError, match="1 of 1 files have not arrived") as caught:
        await world.bob.call(
            "datasets", "FinalizeDataset", dataset_pb2.FinalizeDatasetRequest(dataset_id=announced.dataset_id)
        )
    assert reason(caught) == ("INVALID_ARGUMENT", "INVALID_UPLOAD")
    own = await world.bob.push("chats", {"a.jsonl": chats})
    assert own.dataset_id != theirs.dataset_id
    assert len(list((world.root / "blobs").glob("*/*"))) == 1
    await world.ann.call("datasets", "DeleteDataset", dataset_pb2.DeleteDatasetRequest(name="chats"))
    assert world.blob(chats).exists(), "bob's is made of it too"
    await world.bob.call("datasets", "DeleteDataset", dataset_pb2.DeleteDatasetRequest(name="chats"))
    assert list((world.root / "blobs").glob("*/*")) == []


async def test_nothing_tells_whether_another_user_has_a_content(world: Any, chats: bytes) -> None:
    """Whole, half or not at all: every answer and every refusal that bob gets is the same but for the name of the
    content."""
    half, nobodys = chats + b"\n", chats + b"\n\n"
    await world.ann.push("chats", {"a.jsonl": chats})
    await world.ann.write(half[:100], ref=world.ann.ref_of(half))

    async def told(content: bytes) -> list[Any]:
        answers: list[Any] = [await world.bob.missing({"a.jsonl": content}), await world.bob.status(content)]
        announced = await world.bob.create("mine", {"a.jsonl": content})
        finalize = dataset_pb2.FinalizeDatasetRequest(dataset_id=announced.dataset_id)
        for refused in (world.bob.write(content[100:], 100), world.bob.call("datasets", "FinalizeDataset", finalize)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await refused
            answers += [caught.value.code(), caught.value.details()]
        cut = await world.bob.write(content[:50], ref=world.bob.ref_of(content))
        answers += [cut, await world.bob.write(content[50:], 50, ref=world.bob.ref_of(content))]
        name = world.bob.ref_of(content).sha256
        return [str(answer).replace(name, "NAME").replace(str(len(content)), "SIZE") for answer in answers]

    assert await told(chats) == await told(half) == await told(nobodys)


async def test_admins_touch_all_and_viewers_look_only(world: Any, chats: bytes) -> None:
    theirs = await world.ann.push("chats", {"a.jsonl": chats})
    others = await world.bob.push("chats", {"a.jsonl": chats})
    with pytest.raises(grpc.aio.AioRpcError, match="several users have a dataset named chats") as caught:
        await world.root_user.call("datasets", "GetDataset", dataset_pb2.GetDatasetRequest(name="chats"))
    assert theirs.dataset_id in str(caught.value.details())
    await world.root_user.call("datasets", "DeleteDataset", dataset_pb2.DeleteDatasetRequest(name=others.dataset_id))
    for caller in (world.root_user, world.eve):
        got = await caller.call("datasets", "GetDataset", dataset_pb2.GetDatasetRequest(name="chats"))
        assert got.dataset.dataset_id == theirs.dataset_id
    for action in (
        world.eve.create("mine", {"a.jsonl": chats}),
        world.eve.write(chats),
        world.eve.call("blobs", "WriteBlobs", batch_of([chats])),
        world.eve.status(chats),
        world.eve.missing({"a.jsonl": chats}),
        world.eve.call("datasets", "DeleteDataset", dataset_pb2.DeleteDatasetRequest(name="chats")),
        world.eve.call("datasets", "FinalizeDataset", dataset_pb2.FinalizeDatasetRequest(dataset_id="chats")),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await action
        assert reason(caught) == ("PERMISSION_DENIED", "NOT_ALLOWED")
    await world.root_user.call("datasets", "DeleteDataset", dataset_pb2.DeleteDatasetRequest(name="chats"))


async def test_a_request_id_makes_one_dataset(world: Any, chats: bytes) -> None:
    request_id = str(uuid.uuid4())
    first = await world.ann.create("chats", {"a.jsonl": chats}, request_id=request_id)
    assert (await world.ann.create("chats", {"a.jsonl": chats}, request_id=request_id)) == first
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await world.ann.create("others", {"a.jsonl": chats}, request_id=request_id)
    assert reason(caught) == ("INVALID_ARGUMENT", "REQUEST_ID_REUSED")
    assert (await world.bob.create("others", {"a.jsonl": chats}, request_id=request_id)).owner == "bob"
    for bad in ("", "1234"):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await world.ann.create("more", {"a.jsonl": chats}, request_id=bad)
        assert reason(caught) == ("INVALID_ARGUMENT", "INVALID_SPEC")
    await world.ann.call("datasets", "DeleteDataset", dataset_pb2.DeleteDatasetRequest(name="chats"))
    with pytest.raises(grpc.aio.AioRpcError, match="new request_id"):
        await world.ann.create("chats", {"a.jsonl": chats}, request_id=request_id)


async def test_twenty_creates_at_once_make_one_dataset(world: Any, chats: bytes) -> None:
    request_id = str(uuid.uuid4())
    calls = (world.ann.create("chats", {"a.jsonl": chats}, request_id=request_id) for _ in range(20))
    assert len({dataset.dataset_id for dataset in await asyncio.gather(*calls)}) == 1


async def test_a_name_is_taken_by_ready_content_only(world: Any, chats: bytes) -> None:
    unfinished = await world.ann.create("chats", {"a.jsonl": b"{}"})
    ready = await world.ann.push("chats", {"a.jsonl": chats})
    assert ready.dataset_id != unfinished.dataset_id
    with pytest.raises(grpc.aio.AioRpcError, match="delete it or choose another name") as caught:
        await world.ann.create("chats", {"a.jsonl": chats + chats})
    assert reason(caught) == ("ALREADY_EXISTS", "ALREADY_EXISTS")


async def test_bad_rows_are_named_by_line_and_field_and_a_repaired_file_can_be_pushed(world: Any, chats: bytes) -> None:
    bad = b'{"messages": [{"role": "king", "content": "x"}]}\n' * 150
    with pytest.raises(grpc.aio.AioRpcError, match="of 150 problems") as caught:
        await world.ann.push("chats", {"a.jsonl": chats + bad})
    assert reason(caught) == ("INVALID_ARGUMENT", "INVALID_DATA")
    violations = detail(caught.value, error_details_pb2.BadRequest).field_violations
    assert violations[0].field == "a.jsonl:51:messages[0].role"
    assert 10 < len(violations) < 100, "what fits into the 8 KiB that a plain client takes"
    assert (await world.ann.push("chats", {"a.jsonl": chats})).num_rows == 50


async def test_a_client_that_takes_more_gets_a_hundred_violations(world: Any) -> None:
    bad = b"not json\n" * 150
    dataset = await world.ann.create("bad", {"a.jsonl": bad})
    await world.ann.write(bad)
    request = dataset_pb2.FinalizeDatasetRequest(dataset_id=dataset.dataset_id)
    options = (("grpc.max_metadata_size", 2**16), ("grpc.absolute_max_metadata_size", 2**17))
    async with grpc.aio.insecure_channel(world.address, options=options) as channel:
        stub: Any = dataset_pb2_grpc.DatasetServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            metadata = (*world.ann.metadata, ("horizon-max-metadata-bytes", str(2**16)))
            await stub.FinalizeDataset(request, metadata=metadata, timeout=240)
    violations = detail(caught.value, error_details_pb2.BadRequest).field_violations
    assert [v.field for v in violations] == [f"a.jsonl:{i}" for i in range(1, 101)]


async def test_several_files_must_have_one_format_and_problems_name_their_file(world: Any, chats: bytes) -> None:
    both = await world.ann.push("both", {"a.jsonl": chats, "b.jsonl": chats * 2})
    assert both.num_rows == 150
    with pytest.raises(grpc.aio.AioRpcError, match="one format"):
        await world.ann.push("mixed", {"a.jsonl": chats, "b.txt": b"words\n"})
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await world.ann.push("bad", {"a.jsonl": chats, "sub/b.jsonl": chats + b"[1]\n"})
    violations = detail(caught.value, error_details_pb2.BadRequest).field_violations
    assert [v.field for v in violations] == ["sub/b.jsonl:51"]


@pytest.mark.parametrize(
    ("name", "path", "sha256", "size", "field"),
    [
        ("chats", "../../etc/passwd", "ab" * 32, 3, "files[0].path"),
        ("chats", "/etc/passwd", "ab" * 32, 3, "files[0].path"),
        ("chats", "a.jsonl", "../../../../etc/passwd", 3, "files[0].sha256"),
        ("chats", "a.jsonl", "ab" * 32, -1, "files[0].size_bytes"),
        ("no spaces", "a.jsonl", "ab" * 32, 3, "name"),
    ],
)
async def test_impossible_announcements_name_the_field(
    world: Any, name: str, path: str, sha256: str, size: int, field: str
) -> None:
    request = dataset_pb2.CreateDatasetRequest(
        request_id=str(uuid.uuid4()),
        name=name,
        files=[blob_pb2.FileEntry(path=path, sha256=sha256, size_bytes=size)],
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await world.ann.call("datasets", "CreateDataset", request)
    assert reason(caught) == ("INVALID_ARGUMENT", "INVALID_SPEC")
    assert detail(caught.value, error_details_pb2.BadRequest).field_violations[0].field == field


async def test_announced_sizes_are_bounded(world: Any) -> None:
    huge = blob_pb2.BlobRef(sha256="ab" * 32, size_bytes=2**62)
    request = dataset_pb2.CreateDatasetRequest(
        request_id=str(uuid.uuid4()),
        name="huge",
        files=[blob_pb2.FileEntry(path="a", sha256=huge.sha256, size_bytes=huge.size_bytes)],
    )
    for call in (world.ann.call("datasets", "CreateDataset", request), world.ann.write(b"x", ref=huge)):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert reason(caught) == ("INVALID_ARGUMENT", "TOO_LARGE")
    unknown = dataset_pb2.CreateDatasetRequest(request_id=str(uuid.uuid4()), name="x", format=77)  # type: ignore[arg-type]
    with pytest.raises(grpc.aio.AioRpcError, match="format is '77'"):
        await world.ann.call("datasets", "CreateDataset", unknown)


async def test_a_dataset_that_a_job_needs_stays(world: Any, chats: bytes) -> None:
    await world.ann.push("chats", {"a.jsonl": chats})
    job = await world.job()
    with pytest.raises(grpc.aio.AioRpcError, match=f"needed by job {job.job_id}") as caught:
        await world.ann.call("datasets", "DeleteDataset", dataset_pb2.DeleteDatasetRequest(name="chats"))
    assert reason(caught) == ("FAILED_PRECONDITION", "IN_USE")


async def test_pages_go_from_newest_to_oldest_without_gaps(world: Any) -> None:
    for i in range(7):
        await world.ann.create(f"d{i}", {"a.jsonl": b"%d" % i})
    await world.bob.create("bobs", {"a.jsonl": b"x"})
    names, token = [], ""
    for _ in range(10):
        request = dataset_pb2.ListDatasetsRequest(page_size=3, page_token=token)
        page = await world.ann.call("datasets", "ListDatasets", request)
        names += [dataset.name for dataset in page.datasets]
        token = page.next_page_token
        if not token:
            break
    assert names == [f"d{i}" for i in reversed(range(7))]
    everybody = await world.eve.call("datasets", "ListDatasets", dataset_pb2.ListDatasetsRequest(page_size=2000))
    assert len(everybody.datasets) == 8
    for bad in (
        dataset_pb2.ListDatasetsRequest(page_token="garbage"),
        dataset_pb2.ListDatasetsRequest(page_token="W10="),
        dataset_pb2.ListDatasetsRequest(page_size=-1),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await world.ann.call("datasets", "ListDatasets", bad)
        assert reason(caught) == ("INVALID_ARGUMENT", "INVALID_SPEC")


async def test_finalizing_goes_on_when_the_caller_hangs_up(world: Any, chats: bytes) -> None:
    dataset = await world.ann.create("chats", {"a.jsonl": chats * 200})
    await world.ann.write(chats * 200)
    request = dataset_pb2.FinalizeDatasetRequest(dataset_id=dataset.dataset_id)
    call = world.ann.call("datasets", "FinalizeDataset", request)
    async with asyncio.timeout(240):
        while not world.services.datasets._finalizing.runs(dataset.dataset_id):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        call.cancel()
        name = dataset_pb2.GetDatasetRequest(name="chats")
        while (await world.ann.call("datasets", "GetDataset", name)).dataset.state != dataset_pb2.DATASET_STATE_READY:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    both = await asyncio.gather(*(world.ann.call("datasets", "FinalizeDataset", request) for _ in range(2)))
    assert [answer.dataset.num_rows for answer in both] == [10_000, 10_000]


async def test_unfinished_announcements_and_their_halves_expire(world: Any, chats: bytes) -> None:
    await world.ann.create("half", {"a.jsonl": chats})
    await world.ann.write(
        chats[:100], ref=blob_pb2.BlobRef(sha256=hashlib.sha256(chats).hexdigest(), size_bytes=len(chats))
    )
    ready = await world.ann.push("ready", {"b.jsonl": chats + chats})
    assert await world.services.datasets.sweep(3600) == 0
    assert await world.services.datasets.sweep(-1) == 1
    assert await world.services.blobs.sweep(-1) == 1
    listed = await world.ann.call("datasets", "ListDatasets", dataset_pb2.ListDatasetsRequest())
    assert [dataset.dataset_id for dataset in listed.datasets] == [ready.dataset_id]
    assert world.blob(chats + chats).exists()
