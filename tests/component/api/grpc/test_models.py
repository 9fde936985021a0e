"""Model folders over the wire."""

from __future__ import annotations

import json
import struct
import uuid
from typing import Any

import grpc
import pytest

from horizon_proto.v1 import blob_pb2, model_pb2


def folder(seed: int = 0) -> dict[str, bytes]:
    tensors = {"model.embed_tokens.weight": [4, 2], "model.layers.0.w.weight": [2, 2], "lm_head.weight": [4, 2]}
    header, offset = {}, 0
    for name, shape in tensors.items():
        size = shape[0] * shape[1] * 4
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    raw = json.dumps(header).encode()
    config = {
        "model_type": "tiny",
        "num_hidden_layers": 1,
        "hidden_size": 2,
        "vocab_size": 4,
        "num_attention_heads": 1,
        "tie_word_embeddings": False,
        "seed": seed,
    }
    return {
        "config.json": json.dumps(config).encode(),
        "model.safetensors": struct.pack("<Q", len(raw)) + raw + bytes(offset),
        "added_tokens.json": b"",
        "templates/chat.jinja": b"{{ x }}",
    }


async def test_a_model_becomes_a_folder_of_links(world: Any) -> None:
    model = await world.ann.push_model("tiny", folder())
    assert (model.state, model.architecture) == (model_pb2.MODEL_STATE_READY, "tiny")
    assert model.num_parameters == 4 * 2 * 2 + 2 * 2
    place = world.services.models.folder(model.model_id)
    assert {
        path.relative_to(place).as_posix(): path.read_bytes() for path in place.rglob("*") if path.is_file()
    } == folder()
    weights = place / "model.safetensors"
    assert weights.stat().st_nlink == 2, "no byte is stored twice"
    assert (await world.ann.push_model("tiny", folder())) == model
    again = await world.ann.push_model("tiny-2", folder())
    assert weights.samefile(world.services.models.folder(again.model_id) / "model.safetensors") is True
    request = model_pb2.GetModelRequest(name="tiny")
    assert (await world.ann.call("models", "GetModel", request)).model == model
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await world.bob.call("models", "GetModel", request)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_deleted_model_leaves_nothing(world: Any) -> None:
    await world.ann.push_model("tiny", folder())
    await world.ann.call("models", "DeleteModel", model_pb2.DeleteModelRequest(name="tiny"))
    left = [
        path for name in ("blobs", "models", "uploads") for path in (world.root / name).rglob("*") if path.is_file()
    ]
    assert left == []
    listed = await world.ann.call("models", "ListModels", model_pb2.ListModelsRequest())
    assert list(listed.models) == []


async def test_a_model_that_a_job_needs_stays(world: Any, chats: bytes) -> None:
    await world.ann.push("chats", {"a.jsonl": chats})
    files = {path.name: path.read_bytes() for path in world.daemon.model_folder.iterdir()}
    await world.ann.push_model("tiny", files)
    job = await world.daemon.submit(world.principal("ann"), model="tiny")
    with pytest.raises(grpc.aio.AioRpcError, match=f"needed by job {job.job_id}") as caught:
        await world.ann.call("models", "DeleteModel", model_pb2.DeleteModelRequest(name="tiny"))
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_a_folder_that_cannot_be_trained_is_refused_and_can_be_repaired(world: Any) -> None:
    torn = {**folder(), "model.safetensors": folder()["model.safetensors"][:-1]}
    with pytest.raises(grpc.aio.AioRpcError, match="truncated") as caught:
        await world.ann.push_model("tiny", torn)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert str(world.root) not in str(caught.value.details())
    assert list((world.root / "models").iterdir()) == []
    repaired = await world.ann.push_model("tiny", folder())
    assert repaired.state == model_pb2.MODEL_STATE_READY
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await world.ann.push_model("tiny", folder(seed=1))
    assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS


async def test_pickles_are_refused_before_anything_is_sent(world: Any) -> None:
    files = [blob_pb2.FileEntry(path="pytorch_model.bin", sha256="ab" * 32, size_bytes=10)]
    request = model_pb2.CreateModelRequest(request_id=str(uuid.uuid4()), name="p", files=files)
    with pytest.raises(grpc.aio.AioRpcError, match="pickle") as caught:
        await world.ann.call("models", "CreateModel", request)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_an_encoder_is_refused_before_anything_is_sent(world: Any) -> None:
    content = json.dumps({"model_type": "bert", "architectures": ["BertForMaskedLM"]}).encode()
    files = {**folder(), "config.json": content}
    entries = [
        blob_pb2.FileEntry(path=path, sha256=world.ann.ref_of(data).sha256, size_bytes=len(data))
        for path, data in files.items()
    ]
    request = model_pb2.CreateModelRequest(request_id=str(uuid.uuid4()), name="bert", files=entries, config=content)
    with pytest.raises(grpc.aio.AioRpcError, match="names 'BertForMaskedLM'; only decoder-only") as caught:
        await world.ann.call("models", "CreateModel", request)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    request.config = folder()["config.json"]
    with pytest.raises(grpc.aio.AioRpcError, match=r"the announced config\.json is not the one of files"):
        await world.ann.call("models", "CreateModel", request)


async def test_folders_that_a_crash_left_are_swept(world: Any) -> None:
    model = await world.ann.push_model("tiny", folder())
    stray = world.root / "models" / "model_gone"
    stray.mkdir()
    (stray / "config.json").write_bytes(b"{}")
    assert await world.services.models.sweep(3600) == 1
    assert [path.name for path in (world.root / "models").iterdir()] == [model.model_id]
