"""Uploads by the bare stubs: what a client does that has no checks of its own, or that lies."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

import grpc

from horizon_proto.v1 import blob_pb2, blob_pb2_grpc, dataset_pb2, dataset_pb2_grpc, model_pb2, model_pb2_grpc

CHUNK_BYTES = 2**20


class RawCalls:
    """Uploads without the library. Its methods raise grpc.RpcError, or return what the server answered."""

    def __init__(self, server: str, token: str) -> None:
        self.channel = grpc.insecure_channel(server)
        self._metadata = (("authorization", f"Bearer {token}"),)
        self._models = model_pb2_grpc.ModelServiceStub(self.channel)
        self._blobs = blob_pb2_grpc.BlobServiceStub(self.channel)
        self._datasets = dataset_pb2_grpc.DatasetServiceStub(self.channel)

    def close(self) -> None:
        self.channel.close()

    def push_model(self, name: str, files: Mapping[str, bytes]) -> model_pb2.Model:
        entries = [_entry(path, content) for path, content in files.items()]
        request = model_pb2.CreateModelRequest(request_id=str(uuid.uuid4()), name=name, files=entries)
        model = self._models.CreateModel(request, metadata=self._metadata, timeout=300).model
        for content in files.values():
            self.write(content)
        finalize = model_pb2.FinalizeModelRequest(model_id=model.model_id)
        return self._models.FinalizeModel(finalize, metadata=self._metadata, timeout=300).model

    def create_dataset(self, name: str, path: str, content: bytes) -> str:
        request = dataset_pb2.CreateDatasetRequest(
            request_id=str(uuid.uuid4()),
            name=name,
            format=dataset_pb2.DATASET_FORMAT_AUTO,
            files=[_entry(path, content)],
        )
        return self._datasets.CreateDataset(request, metadata=self._metadata, timeout=300).dataset.dataset_id

    def finalize_dataset(self, dataset_id: str) -> dataset_pb2.Dataset:
        request = dataset_pb2.FinalizeDatasetRequest(dataset_id=dataset_id)
        return self._datasets.FinalizeDataset(request, metadata=self._metadata, timeout=300).dataset

    def write(self, content: bytes, *, announced: bytes | None = None) -> blob_pb2.BlobStatus:
        """Send `content` as what `announced` (by default itself) is the name of."""
        ref = blob_ref(content if announced is None else announced)
        requests = (blob_pb2.WriteBlobRequest(chunk=chunk) for chunk in _chunks(ref, content))
        return self._blobs.WriteBlob(requests, metadata=self._metadata, timeout=300).status

    def status(self, content: bytes) -> blob_pb2.BlobStatus:
        request = blob_pb2.QueryBlobStatusRequest(blob=blob_ref(content))
        return self._blobs.QueryBlobStatus(request, metadata=self._metadata, timeout=300).status


def folder_files(folder: Path) -> dict[str, bytes]:
    """The files of a model folder by name."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def blob_ref(content: bytes) -> blob_pb2.BlobRef:
    return blob_pb2.BlobRef(sha256=hashlib.sha256(content).hexdigest(), size_bytes=len(content))


def _entry(path: str, content: bytes) -> blob_pb2.FileEntry:
    ref = blob_ref(content)
    return blob_pb2.FileEntry(path=path, sha256=ref.sha256, size_bytes=ref.size_bytes)


def _chunks(ref: blob_pb2.BlobRef, content: bytes) -> Iterator[blob_pb2.BlobChunk]:
    for start in range(0, len(content), CHUNK_BYTES):
        data = content[start : start + CHUNK_BYTES]
        if start == 0:
            yield blob_pb2.BlobChunk(blob=ref, offset=0, data=data)
        else:
            yield blob_pb2.BlobChunk(data=data)
