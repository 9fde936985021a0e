"""Every field of every record is on the wire, in REST and in the client's resources; the exceptions are named here with
their reasons."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Collection, Mapping
from enum import Enum
from typing import Any, cast

import pytest
from google.protobuf.message import Message as WireMessage
from hypothesis import given, settings
from hypothesis import strategies as st

from horizon_client import resources
from horizon_client.conversion import event_from_message
from horizon_client.conversion import from_message as resource_from
from horizon_proto.v1 import (
    account_pb2,
    blob_pb2,
    checkpoint_pb2,
    dataset_pb2,
    housekeeping_pb2,
    job_pb2,
    model_pb2,
    node_pb2,
    sharing_pb2,
    webhook_pb2,
)
from horizon_server import events
from horizon_server.api.grpc.convert import attribute_of, from_message, to_message
from horizon_server.api.http.bodies import NOT_IN_REST, body_of, public_name
from horizon_server.api.sharing import AllowanceUse, QueueEntry, QuotaLimit
from horizon_server.datasets.preview import PreviewRow, PreviewSpan
from horizon_server.figures import DriveFigures, EvalSetFigures, TransferFigures
from horizon_server.planning.machine import Accelerator
from horizon_server.records.account import Principal, Project, ProjectMember, Token
from horizon_server.records.blob import BlobFile, BlobRef, BlobStatus, DatasetRecord, ModelRecord
from horizon_server.records.execution import Residency
from horizon_server.records.housekeeping import Deletion
from horizon_server.records.job import CheckpointRecord, JobRecord
from horizon_server.records.plan import DeviceRange, DriveUse, Plan, StepPrediction
from horizon_server.records.sharing import NodeCondition, Outlook, ShareUse, Usage
from horizon_server.records.times import is_time
from horizon_server.records.webhook import Delivery, Webhook
from horizon_server.services.node import DeviceStatus, FurtherNode, NodeStatus
from horizon_server.spec import JobSpec, parse_job_spec

MESSAGES: dict[type[Any], type[WireMessage]] = {
    Accelerator: node_pb2.Accelerator,
    AllowanceUse: sharing_pb2.AllowanceUse,
    BlobFile: blob_pb2.FileEntry,
    BlobRef: blob_pb2.BlobRef,
    BlobStatus: blob_pb2.BlobStatus,
    CheckpointRecord: checkpoint_pb2.Checkpoint,
    DatasetRecord: dataset_pb2.Dataset,
    Deletion: housekeeping_pb2.Deletion,
    DeviceRange: job_pb2.DeviceRange,
    DeviceStatus: node_pb2.DeviceStatus,
    DriveUse: job_pb2.DriveUse,
    FurtherNode: node_pb2.FurtherNode,
    Plan: job_pb2.MemoryPlan,
    JobRecord: job_pb2.Job,
    ModelRecord: model_pb2.Model,
    NodeCondition: node_pb2.NodeCondition,
    NodeStatus: node_pb2.Node,
    Outlook: job_pb2.Outlook,
    Principal: account_pb2.Account,
    Project: account_pb2.Project,
    ProjectMember: account_pb2.ProjectMember,
    QueueEntry: sharing_pb2.QueueEntry,
    QuotaLimit: sharing_pb2.QuotaLimit,
    ShareUse: node_pb2.ShareUse,
    Token: account_pb2.Token,
    Usage: sharing_pb2.Usage,
    Delivery: webhook_pb2.WebhookDelivery,
    Webhook: webhook_pb2.Webhook,
    PreviewRow: dataset_pb2.PreviewRow,
    PreviewSpan: dataset_pb2.PreviewSpan,
    Residency: job_pb2.KeptMemory,
    StepPrediction: job_pb2.StepPrediction,
    events.CheckpointWritten: job_pb2.CheckpointEvent,
    events.EvalDone: job_pb2.EvalEvent,
    events.EvalAnswer: job_pb2.EvalAnswer,
    EvalSetFigures: job_pb2.EvalSetFigures,
    events.JobEvent: job_pb2.JobEvent,
    events.Message: job_pb2.MessageEvent,
    events.PrepareProgress: job_pb2.PrepareEvent,
    events.StateChanged: job_pb2.StateEvent,
    events.StepDone: job_pb2.StepEvent,
    TransferFigures: job_pb2.TransferFigures,
    DriveFigures: job_pb2.DriveFigures,
}
NOT_ON_THE_WIRE: dict[type[Any], dict[str, str]] = {
    Plan: {
        "execution": "what people look at is sent by itself: limit of the device, dtype, what stays on the device",
        "plane_bytes": "how the planned memory is divided among the store's files",
        "drive_file_bytes": "how the planned bytes on drives are divided among them",
    },
    JobRecord: {
        "model_id": "may be a folder of the node, whose path is private; the spec names the model",
        "dataset_id": "an internal reference; the spec names the dataset",
        "eval_dataset_id": "an internal reference; the spec names the dataset",
        "eval_set_ids": "internal references; the spec names the datasets",
        "num_restarts": "of the daemon's own recovery; events and the reason say what happened",
        "failed_step": "of the daemon's own recovery; events and the reason say what happened",
        "last_failure": "of the daemon's own recovery; events and the reason say what happened",
        "not_before_s": "of the daemon's own recovery; the outlook says when it starts",
        "journal_line": "how far the daemon has read a file of its own",
    },
    events.JobEvent: {"job_id": "a watch is of one job, which the caller named"},
}
RESOURCES: dict[type[Any], type[Any]] = {
    Accelerator: resources.Accelerator,
    AllowanceUse: resources.AllowanceUse,
    BlobFile: resources.FileEntry,
    CheckpointRecord: resources.Checkpoint,
    DatasetRecord: resources.Dataset,
    Deletion: resources.Deletion,
    DeviceRange: resources.DeviceRange,
    DriveUse: resources.DriveUse,
    DeviceStatus: resources.DeviceStatus,
    FurtherNode: resources.FurtherNode,
    Plan: resources.MemoryPlan,
    JobRecord: resources.Job,
    ModelRecord: resources.Model,
    NodeCondition: resources.NodeCondition,
    NodeStatus: resources.Node,
    Outlook: resources.Outlook,
    Principal: resources.Account,
    Project: resources.Project,
    ProjectMember: resources.ProjectMember,
    QueueEntry: resources.QueueEntry,
    QuotaLimit: resources.QuotaLimit,
    ShareUse: resources.ShareUse,
    Token: resources.Token,
    Usage: resources.Usage,
    Delivery: resources.WebhookDelivery,
    Webhook: resources.Webhook,
    PreviewRow: resources.PreviewRow,
    PreviewSpan: resources.PreviewSpan,
    Residency: resources.KeptMemory,
    StepPrediction: resources.StepPrediction,
    events.CheckpointWritten: resources.CheckpointEvent,
    events.EvalDone: resources.EvalEvent,
    events.EvalAnswer: resources.EvalAnswer,
    EvalSetFigures: resources.EvalSetFigures,
    events.Message: resources.MessageEvent,
    events.PrepareProgress: resources.PrepareEvent,
    events.StateChanged: resources.StateEvent,
    events.StepDone: resources.StepEvent,
    TransferFigures: resources.TransferFigures,
    DriveFigures: resources.DriveFigures,
}
IN_REST = (
    AllowanceUse,
    CheckpointRecord,
    DatasetRecord,
    JobRecord,
    ModelRecord,
    NodeStatus,
    Plan,
    Residency,
    events.StepDone,
    Outlook,
    QueueEntry,
    StepPrediction,
    Usage,
)
SPEC = parse_job_spec(
    {"name": "a", "model": "m", "dataset": "d", "eval_dataset": "e", "train": {"max_grad_norm": None}}
)

CHOICES = {"job_state": ("RUNNING", "QUEUED"), "format": ("messages", "prompt-completion")}
texts = st.text(st.characters(codec="utf-8"), max_size=8)
times = st.integers(1, 2**42).map(lambda microseconds: microseconds / 1e6)
PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    str: texts,
    bool: st.booleans(),
    int: st.integers(0, 2**31 - 1),
    float: st.floats(allow_nan=False),
    JobSpec: st.just(SPEC),
}


def values(hint: Any, name: str = "") -> st.SearchStrategy[Any]:
    """What a field of this type can hold."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if is_time(hint) or name == "time_s":
        return times | st.none() if type(None) in arguments else times
    if origin is typing.Annotated:
        return values(arguments[0])
    if name == "num_nodes":
        # A job is on one at least.
        return st.integers(1, 64)
    if name in CHOICES:
        return st.sampled_from(CHOICES[name]).map(hint)
    if hint in PLAIN:
        return PLAIN[hint]
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*(values(one) for one in arguments))
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin in (dict, Mapping):
        return st.dictionaries(values(arguments[0]), values(arguments[1]), max_size=2)
    if origin is tuple:
        return st.lists(values(arguments[0]), max_size=2).map(tuple)
    if hint is type(None):
        return st.none()
    if isinstance(hint, type) and issubclass(hint, Enum):
        return st.sampled_from(hint)
    # What does not travel of a plan within a job has its default.
    return records(hint, without=private(hint) if hint is Plan else ())


def records(kind: type[Any], *, without: Collection[str] = ()) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = [field for field in dataclasses.fields(kind) if field.name not in without]
    # A time that is not known yet is 0, where that is the default.
    unknown = {field.name: st.just(0.0) for field in fields if is_time(hints[field.name]) and field.default == 0.0}
    return st.builds(
        kind, **{f.name: unknown.get(f.name, st.nothing()) | values(hints[f.name], f.name) for f in fields}
    )


def private(kind: type[Any]) -> set[str]:
    return set(NOT_ON_THE_WIRE.get(kind, {}))


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_every_field_of_a_record_is_in_its_message(kind: type[Any]) -> None:
    carried = {attribute_of(field) for field in MESSAGES[kind].DESCRIPTOR.fields}
    if kind is events.JobEvent:
        assert set(events.KINDS) - events.PIPE_KINDS <= carried
        carried.add("payload")
    assert {field.name for field in dataclasses.fields(kind)} - private(kind) <= carried


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
@given(data=st.data())
@settings(max_examples=25)
def test_a_record_comes_back_equal(kind: type[Any], data: st.DataObject) -> None:
    record = data.draw(records(kind))
    message = MESSAGES[kind].FromString(to_message(record, MESSAGES[kind]).SerializeToString())
    hidden = {name: getattr(record, name) for name in private(kind)}
    assert from_message(message, kind, **hidden) == record


@pytest.mark.parametrize("kind", IN_REST, ids=lambda kind: kind.__name__)
@given(data=st.data())
@settings(max_examples=10)
def test_every_field_of_a_record_is_in_rest(kind: type[Any], data: st.DataObject) -> None:
    record = data.draw(records(kind))
    model: Any = body_of(cast(Any, kind))
    hints = typing.get_type_hints(kind, include_extras=True)
    body = json.loads(json.dumps(model.model_validate(record).model_dump(mode="json"), allow_nan=False))
    for field in dataclasses.fields(kind):
        if field.name in NOT_IN_REST.get(kind, {}):
            continue
        value = getattr(record, field.name)
        shown = body[public_name(field.name, hints[field.name])]
        if isinstance(value, str | bool | int) or value is None:
            assert shown == value
        elif dataclasses.is_dataclass(value) or isinstance(value, list | tuple | dict):
            assert len(shown) >= len(vars(value) if dataclasses.is_dataclass(value) else value)


@pytest.mark.parametrize("kind", RESOURCES, ids=lambda kind: kind.__name__)
@given(data=st.data())
@settings(max_examples=10)
def test_every_field_of_a_message_is_in_the_clients_resource(kind: type[Any], data: st.DataObject) -> None:
    record = data.draw(records(kind))
    message = to_message(record, MESSAGES[kind])
    if "sequence" in {field.name for field in dataclasses.fields(RESOURCES[kind])}:
        event = events.JobEvent(job_id="j", sequence=7, time_s=1.5, payload=record)
        resource: Any = event_from_message(to_message(event, job_pb2.JobEvent))
        assert (type(resource), resource.sequence, resource.time.timestamp()) == (RESOURCES[kind], 7, 1.5)
    else:
        resource = resource_from(RESOURCES[kind], message)
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        shown = getattr(resource, field.name)
        if field.enum_type is None and field.message_type is None and not field.is_repeated and not field.has_presence:
            assert shown == value
        assert (shown is None) <= (field.has_presence and not message.HasField(field.name))
