"""/v1/files: each file is a dataset of the caller's, checked before it is answered, or the losses of a job of theirs.

The id of a file is that of its dataset or job with another beginning; no record is kept besides the dataset's.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import PurePosixPath
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse

from horizon_server.api.audited import Asked
from horizon_server.api.http.middleware import Caller, Services
from horizon_server.api.openai.calls import Changing, Cursor, Limit, page_of
from horizon_server.api.openai.errors import BadParameter, unsupported
from horizon_server.api.openai.forms import FileForm
from horizon_server.api.openai.results import job_of_result, result_object, result_of
from horizon_server.api.services import Services as AllServices
from horizon_server.blobs.concurrency import in_thread
from horizon_server.errors import FieldViolation, InvalidData, NotFound
from horizon_server.records.account import Principal
from horizon_server.records.blob import DatasetRecord
from horizon_server.records.job import JobRecord
from horizon_server.services.access import require_create

_PURPOSE = "fine-tune"
_FILE_ID = re.compile(r"file-([0-9a-f]{12})")
_NAMELESS = "data.jsonl"
_NAME_CHARS = 120
_PIECE_BYTES = 2**20

router = APIRouter(prefix="/v1/files")


def file_id(dataset_id: str) -> str:
    """Return the id that a dataset has as a file."""
    return dataset_id.replace("dataset_", "file-", 1)


def dataset_key(key: str) -> str:
    """Return what a file's id means: the id of its dataset. Anything else is looked up as the name or id of a
    dataset."""
    found = _FILE_ID.fullmatch(key)
    return f"dataset_{found[1]}" if found else key


def file_object(record: DatasetRecord) -> dict[str, Any]:
    """Return a dataset as OpenAI's file."""
    return {
        "id": file_id(record.dataset_id),
        "object": "file",
        "bytes": record.size_bytes,
        "created_at": int(record.created_s),
        "expires_at": None,
        "filename": record.files[0].path if len(record.files) == 1 else record.name,
        "purpose": _PURPOSE,
        "status": "processed" if record.ready else "uploaded",
        "status_details": None,
    }


@router.post("")
async def create_file(change: Changing, request: Request) -> dict[str, Any]:
    """Take a file, check every row of it, and keep it as a dataset. The same file again is the one that is there."""
    form = FileForm(request.headers.get("content-type", ""), request.stream())

    async def create() -> DatasetRecord:
        datasets = change.services.datasets
        # Before the first byte is read.
        require_create(change.caller)
        content = await change.services.blobs.receive(change.caller.name, form.content())
        try:
            _check_fields(form.fields)
        except BadParameter:
            await datasets.forget(change.caller, content)
            raise
        try:
            return await datasets.take(change.caller, _path(form.file_name), content)
        except InvalidData as error:
            # Its violations are places in the file; here the parameter is named.
            raise BadParameter("file", error.message, code="invalid_file_format") from error

    record = await change.carry_out("DatasetService/CreateDataset", Asked(), create, lambda made: made.dataset_id)
    return file_object(record)


@router.get("")
async def list_files(
    services: Services,
    caller: Caller,
    limit: Limit = 10_000,
    after: Cursor = "",
    order: str = "desc",
    purpose: str = _PURPOSE,
) -> dict[str, Any]:
    """List the caller's datasets, newest first."""
    if order != "desc":
        raise unsupported("order", "must be desc: the newest comes first")
    if purpose != _PURPOSE:
        return page_of([], has_more=False)
    token = ""
    if after:
        token = services.datasets.token_after(await _file(services, caller, after))
    records, following = await services.datasets.list(caller, page_size=limit, page_token=token)
    return page_of([file_object(record) for record in records], has_more=bool(following))


@router.get("/{file_id}")
async def retrieve_file(services: Services, caller: Caller, file_id: str) -> dict[str, Any]:
    """Show one file."""
    if (job := await _job_of_result(services, caller, file_id)) is not None:
        return result_object(job, await result_of(services, job))
    return file_object(await _file(services, caller, file_id))


@router.get("/{file_id}/content")
async def retrieve_content(services: Services, caller: Caller, file_id: str) -> Response:
    """Send what was uploaded, byte for byte, or the losses of a job's steps."""
    if (job := await _job_of_result(services, caller, file_id)) is not None:
        return Response(await result_of(services, job), media_type="application/octet-stream")
    record = await _file(services, caller, file_id)
    if len(record.files) != 1:
        raise BadParameter("file_id", f"{file_id} is {len(record.files)} files, which cannot be sent as one")
    (stored,) = services.datasets.data_files(record)

    async def pieces() -> AsyncIterator[bytes]:
        with services.datasets.reading(record.dataset_id), stored.path.open("rb") as stream:
            while piece := await in_thread(lambda: stream.read(_PIECE_BYTES)):
                yield piece

    headers = {"Content-Length": str(record.size_bytes)}
    return StreamingResponse(pieces(), media_type="application/octet-stream", headers=headers)


@router.delete("/{file_id}")
async def delete_file(change: Changing, file_id: str) -> dict[str, Any]:
    """Remove a file; what jobs have made of it stays."""

    async def delete() -> DatasetRecord:
        if await _job_of_result(change.services, change.caller, file_id) is not None:
            raise unsupported("file_id", "is the file of a job's losses, which goes with the job")
        record = await _file(change.services, change.caller, file_id)
        await change.services.datasets.delete(change.caller, record.dataset_id)
        return record

    asked = Asked(resource=dataset_key(file_id))
    await change.carry_out("DatasetService/DeleteDataset", asked, delete, lambda record: record.dataset_id)
    return {"id": file_id, "object": "file", "deleted": True}


async def _file(services: AllServices, caller: Principal, key: str) -> DatasetRecord:
    try:
        return await services.datasets.get(caller, dataset_key(key))
    except NotFound as error:
        raise _no_file(key) from error


async def _job_of_result(services: AllServices, caller: Principal, key: str) -> JobRecord | None:
    try:
        return await job_of_result(services, caller, key)
    except NotFound as error:
        raise _no_file(key) from error


def _no_file(key: str) -> NotFound:
    message = f"No such File object: {key:.100}"
    return NotFound(message, violations=[FieldViolation(field="id", description=message)])


def _check_fields(fields: dict[str, str]) -> None:
    for name in fields:
        if name.startswith("expires_after"):
            raise unsupported("expires_after", "is not carried out: a file stays until it is deleted")
        if name != "purpose":
            raise BadParameter(name, f"Unknown parameter: '{name:.80}'", code="unknown_parameter")
    purpose = fields.get("purpose")
    if purpose is None:
        raise BadParameter("purpose", "Missing required parameter: 'purpose'", code="missing_required_parameter")
    if purpose != _PURPOSE:
        raise BadParameter("purpose", f"Invalid value for 'purpose': {purpose!r:.80}; it must be {_PURPOSE}")


def _path(file_name: str) -> str:
    """Return the name that a file has in its dataset: what its sender calls it, without folders."""
    name = PurePosixPath(file_name.replace("\\", "/")).name[-_NAME_CHARS:]
    if not name.isprintable() or name in ("", ".", ".."):
        return _NAMELESS
    # Without an ending the first bytes decide whether it is text or JSON lines, and only these are meant here.
    return name if "." in name else f"{name}.jsonl"
