"""The JSON bodies of REST: the records themselves, by field name. Times are ISO 8601 in UTC, sizes are bytes, unknown
is null.

`body_of` makes the response model of a record from its dataclass: fields, types and docstrings. What differs from the
record (other names, computed fields, fields that stay inside) is in the tables below.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import math
import sys
import types
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from functools import cache, partial
from itertools import pairwise
from typing import Annotated, Any, Union, cast, get_args, get_origin, get_type_hints

from fastapi import Response
from pydantic import AliasPath, BaseModel, BeforeValidator, ConfigDict, Field, create_model

from horizon_server.api.cached_on import cached_on
from horizon_server.api.sharing import AllowanceUse, QueueEntry
from horizon_server.datasets.preview import DatasetPreview
from horizon_server.events import EvalAnswer
from horizon_server.records.account import Project
from horizon_server.records.blob import DatasetRecord, ModelRecord
from horizon_server.records.boxes import Place
from horizon_server.records.job import CheckpointRecord, JobRecord, LogPart
from horizon_server.records.plan import DriveUse, Plan
from horizon_server.records.sharing import Usage
from horizon_server.records.times import is_time, time_name
from horizon_server.services.node import NodeStatus

# Properties of a record, or of a record within it, that its body has as fields.
COMPUTED: Mapping[type[Any], tuple[str, ...]] = {
    JobRecord: ("spec.name", "progress", "eta_s"),
    Plan: (
        *("host_total_bytes", "device_total_bytes", "device_limit_bytes", "compute_dtype", "kept", "fits"),
        *("num_devices", "num_nodes", "lanes", "parallel"),
    ),
    DriveUse: ("endurance_share",),
    CheckpointRecord: ("size_bytes",),
    DatasetRecord: ("state", "size_bytes", "data_kind"),
    ModelRecord: ("state", "size_bytes"),
    DatasetPreview: ("options.method", "options.train_on", "options.sequence_length", "options.offset"),
}
# Fields of a record that its body leaves out, and why.
NOT_IN_REST: Mapping[type[Any], Mapping[str, str]] = {
    JobRecord: {
        "model_id": "may be a folder of the node, whose path is private; the spec names the model",
        "dataset_id": "an internal reference; the spec names the dataset",
        "eval_dataset_id": "an internal reference; the spec names the dataset",
        "eval_set_ids": "internal references; the spec names the datasets",
    },
    Plan: {
        "execution": "what people look at is shown by itself: limit of the device, dtype, what stays on the device",
        "plane_bytes": "how the planned memory is divided among the store's files",
        "drive_file_bytes": "how the planned bytes on drives are divided among them",
    },
    DatasetRecord: {"ready": "shown as state", "files": "up to 4096 of them; gRPC lists them"},
    ModelRecord: {"ready": "shown as state", "files": "up to 4096 of them; gRPC lists them"},
    DatasetPreview: {"options": "its fields are at the top level"},
}


def finite(value: Any) -> Any:
    """Return plain data with numbers that JSON cannot write (nan, inf) as None, however deep."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return value


Number = Annotated[float | None, BeforeValidator(finite)]
# Records have 0 or None for a time that is not known.
Time = Annotated[
    datetime | None, BeforeValidator(lambda unix_s: datetime.fromtimestamp(unix_s, UTC) if unix_s else None)
]


@cache
def body_of(kind: Any) -> type[BaseModel]:
    """Return the body of a record: all its fields and what `COMPUTED` adds, less what stays `NOT_IN_REST`."""
    shown = [field.name for field in dataclasses.fields(kind) if field.name not in NOT_IN_REST.get(kind, {})]
    described = _descriptions(kind)
    fields: dict[str, Any] = {}
    for path in (*shown, *COMPUTED.get(kind, ())):
        attribute, hint = path.rpartition(".")[2], _type_of(kind, path)
        alias = AliasPath(*path.split("."))
        fields[public_name(attribute, hint)] = (
            _json_type(hint),
            Field(validation_alias=alias, description=described.get(attribute)),
        )
    config = ConfigDict(from_attributes=True)
    body: type[BaseModel] = create_model(kind.__name__, __config__=config, __doc__=inspect.getdoc(kind), **fields)
    return body


def public_name(attribute: str, hint: Any) -> str:
    """Return the JSON name of an attribute of a record; `hint` is its type."""
    if attribute == "job_state":
        return "state"
    return time_name(attribute) if is_time(hint) else attribute


def _type_of(kind: Any, path: str) -> Any:
    for name in path.split("."):
        hints = get_type_hints(kind, include_extras=True)
        kind = hints[name] if name in hints else get_type_hints(inspect.getattr_static(kind, name).fget)["return"]
    return kind


def _json_type(hint: Any) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if is_time(hint):
        return Time
    if origin is Annotated:
        return _json_type(arguments[0])
    if hint is float:
        return Number
    if origin in (Union, types.UnionType):
        return Union[tuple(_json_type(one) for one in arguments)]  # noqa: UP007  # built while running
    if origin is tuple:
        return list[_json_type(arguments[0])]  # type: ignore[misc]  # built while running
    if origin in (dict, Mapping):
        return dict[arguments[0], _json_type(arguments[1])]  # type: ignore[misc,valid-type]  # built while running
    return body_of(cast(Any, hint)) if dataclasses.is_dataclass(hint) else hint


@cache
def _definitions(module: str) -> Mapping[str, ast.ClassDef]:
    """The classes of a module by name. A module is parsed once: `inspect.getsource` of a class parses it each time."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {one.name: one for one in tree.body if isinstance(one, ast.ClassDef)}


def _descriptions(kind: type[Any]) -> dict[str, str]:
    """The docstrings below the fields of a dataclass and of those that it inherits from."""
    # Read from the source, as Python drops a string that is below an assignment.
    described: dict[str, str] = {}
    for base in reversed([base for base in kind.__mro__ if dataclasses.is_dataclass(base)]):
        definition = _definitions(base.__module__)[base.__name__]
        for field, text in pairwise(definition.body):
            is_field = isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
            if is_field and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                described[ast.unparse(field.target)] = inspect.cleandoc(str(text.value.value))  # type: ignore[attr-defined]
    return described


def page_of(name: str, items: str, kind: Any) -> type[BaseModel]:
    """Return the body of one page of a list."""
    fields: dict[str, Any] = {
        items: (list[body_of(kind)], ...),  # type: ignore[misc]  # built while running
        "next_page_token": (str, Field(description="Empty on the last page.")),
    }
    page: type[BaseModel] = create_model(name, __doc__=f"A page of {items}, newest first.", **fields)
    return page


def packed(kind: type[BaseModel], items: str, records: Iterable[object], **fields: str) -> Response:
    """Return a page of a list as it is sent: what is sent of a record is made once, and kept with it."""

    def text(record: object) -> bytes:
        body = kind.model_validate(record, from_attributes=True).model_dump(mode="json", by_alias=True)
        return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8")

    listed = b",".join(cached_on(record, "json", partial(text, record)) for record in records)
    rest = json.dumps(fields, separators=(",", ":")).encode("utf-8")
    return Response(b'{"%s":[%s],%s' % (items.encode("ascii"), listed, rest[1:]), media_type="application/json")


JobBody = body_of(JobRecord)
JobPage = page_of("JobPage", "jobs", JobRecord)
DatasetPage = page_of("DatasetPage", "datasets", DatasetRecord)
ModelPage = page_of("ModelPage", "models", ModelRecord)
NodeBody = body_of(NodeStatus)
PreviewBody = body_of(DatasetPreview)
CheckpointBody = body_of(CheckpointRecord)
PlanBody = body_of(Plan)
PlaceBody = body_of(Place)
LogBody = body_of(LogPart)


class CheckpointList(BaseModel):
    """The complete checkpoints of a job, oldest first."""

    checkpoints: list[CheckpointBody]  # type: ignore[valid-type]  # made above


class ViolationBody(BaseModel):
    """One refused field."""

    field: str = Field(description="Path of the field, such as train.learning_rate.")
    description: str = Field(description="What is wrong and what is allowed.")


class ErrorDetail(BaseModel):
    """Why a call failed."""

    reason: str = Field(description="Stable name; scripts may match it.")
    message: str = Field(description="Message for people.")
    violations: list[ViolationBody] = Field(
        default_factory=list, description="The refused fields, where there are any."
    )


class ErrorBody(BaseModel):
    """Every error has this shape."""

    error: ErrorDetail


class VersionBody(BaseModel):
    """The daemon's version."""

    version: str


class ReadyBody(BaseModel):
    """Whether the daemon takes work."""

    ready: bool
    message: str = Field("", description="Why not.")


class QueueBody(BaseModel):
    """The resident jobs of all users, then the queue in its order."""

    jobs: list[body_of(QueueEntry)]  # type: ignore[valid-type]  # made while running


class AnsweredBody(BaseModel):
    """One evaluation and the answers that it shows."""

    step: int
    set_names: list[str]
    answers: list[body_of(EvalAnswer)]  # type: ignore[valid-type]  # made while running


class AnswersBody(BaseModel):
    """The last evaluations of a job, oldest first."""

    evaluations: list[AnsweredBody]


class MembershipBody(BaseModel):
    """A project that the caller is in."""

    name: str
    role: str = Field(description="viewer, member or admin.")


class MeBody(BaseModel):
    """Who calls, and what they may do."""

    name: str
    role: str
    scope: str = Field(description="Of the token: full or read.")
    project: str = Field(description="What the caller's jobs are charged to where the spec names none.")
    projects: list[MembershipBody]
    may_change: bool = Field(
        description="Whether the caller may change anything: neither a viewer, nor a token to read."
    )


class UsageBody(BaseModel):
    """What was used since a time, by project and user."""

    since_time: datetime
    usages: list[body_of(Usage)]  # type: ignore[valid-type]  # made while running


class ProjectList(BaseModel):
    """The caller's projects, by name."""

    projects: list[body_of(Project)]  # type: ignore[valid-type]  # made while running


class QuotaBody(BaseModel):
    """The weights and quotas of the caller and of their project."""

    allowances: list[body_of(AllowanceUse)]  # type: ignore[valid-type]  # made while running
