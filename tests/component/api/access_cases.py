"""What each kind of caller is answered by each method of gRPC. docs/access.md says who they are, and what the outcomes
mean."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.access_scene import ACCEPTED, REFUSED, Scene
from tests.daemon_parts import blob_file, chat_rows

from horizon_proto.v1 import (
    account_pb2,
    blob_pb2,
    checkpoint_pb2,
    dataset_pb2,
    housekeeping_pb2,
    job_pb2,
    model_pb2,
    node_pb2,
    session_pb2,
    sharing_pb2,
    webhook_pb2,
)
from horizon_server.api.grpc.convert import to_message
from horizon_server.errors import HorizonError
from horizon_server.records.account import EVERYONE
from horizon_server.records.job import JobState

Row = tuple[str, ...]
"""The outcomes for ACCEPTED, in that order."""


def row(text: str) -> Row:
    outcomes = {"y": "OK", "-": "PERMISSION_DENIED", "0": "NOT_FOUND"}
    assert len(text.split()) == len(ACCEPTED)
    return tuple(outcomes[letter] for letter in text.split())


#                  read other watcher member manager granted viewer admin owner admin_read
ALL = row("          y    y      y      y      y       y      y     y     y     y")
CREATE = row("       -    y      y      y      y       y      -     y     y     -")
SEE_JOB = row("      y    0      y      y      y       0      y     y     y     y")
CHANGE_JOB = row("   -    0      -      -      y       0      -     y     y     -")
SAMPLE = row("       -    0      y      y      y       0      -     y     y     -")
SUBMIT = row("       -    -      -      y      y       -      -     y     y     -")
PLAN = row("         y    -      -      y      y       -      -     y     y     y")
SEE_PUSHED = row("   y    0      0      0      0       y      y     y     y     y")
CHANGE_PUSHED = row("-    0      0      0      0       -      -     y     y     -")
SHARE = row("        -    0      0      0      0       0      -     y     y     -")
NODE = row("         -    -      -      -      -       -      -     y     -     -")
OWN_TOKENS = row("   -    y      y      y      y       y      y     y     y     -")
THEIR_TOKENS = row(" y    -      -      -      -       -      -     y     y     y")
REVOKE = row("       -    0      0      0      0       0      0     y     y     -")
MEMBERS = row("      -    0      -      -      y       0      -     y     y     -")
# A refusal of one thing among many is in the answer.
DELETE_JOB = row("   -    0      -      -      y       0      -     y     y     -")
DELETE_PUSHED = row("-    0      0      0      0       -      -     y     y     -")
CHANGE_OWN = row("   -    0      0      0      0       0      -     y     y     -")
SEE_OWN = row("      y    0      0      0      0       0      y     y     y     y")
METRICS_TOKEN = row("-    -      -      -      -       -      y     y     -     -")


Make = Callable[[Scene], Awaitable[Any]]


@dataclass(frozen=True)
class Case:
    """One way to call a method: what is sent, and what each caller is answered. `instead` replaces OK."""

    outcomes: Row
    make: Make
    instead: str = "OK"


async def _job(scene: Scene, state: JobState = JobState.QUEUED) -> str:
    return (await scene.new_job(state)).job_id


async def _ended_job(scene: Scene) -> str:
    return await _job(scene, JobState.SUCCEEDED)


def _delete(kind: Any, key: str) -> housekeeping_pb2.DeleteRequest:
    return housekeeping_pb2.DeleteRequest(kind=kind, keys=[key])


async def _dataset_to_delete(scene: Scene) -> str:
    ann = scene.world.principal("ann")
    try:
        await scene.services.datasets.get(ann, "doomed")
    except HorizonError:
        await scene.daemon.dataset(ann, "doomed")
        await scene.grant("dataset", "doomed")
    return "doomed"


async def _model_to_delete(scene: Scene) -> str:
    ann = scene.world.principal("ann")
    try:
        await scene.services.models.get(ann, "doomed")
    except HorizonError:
        await scene.daemon.model(ann, "doomed")
        await scene.grant("model", "doomed")
    return "doomed"


async def _dataset_id(scene: Scene) -> str:
    return str((await scene.services.datasets.get(scene.world.principal("ann"), "chats")).dataset_id)


async def _model_id(scene: Scene) -> str:
    return str((await scene.services.models.get(scene.world.principal("ann"), "tiny")).model_id)


async def _checkpoint_to_delete(scene: Scene) -> Any:
    scene.daemon.write_checkpoint(scene.job, 9, {"model/config.json": b"{}"})
    return checkpoint_pb2.DeleteCheckpointRequest(job_id=scene.job.job_id, step=9)


async def _member_to_remove(scene: Scene) -> Any:
    await scene.services.accounts.add_member("ann", "extra", "viewer")
    return account_pb2.RemoveMemberRequest(project="ann", user="extra")


async def _webhook(scene: Scene, project: str = "ann") -> str:
    """The only webhook, of all jobs of ann's project, at an address where nobody listens."""
    ann, webhooks = scene.world.principal("ann"), scene.services.webhooks
    for earlier in await webhooks.store.all():
        await webhooks.store.delete(earlier.webhook_id)
    caller = dataclasses.replace(ann, memberships={"ann": "admin"})
    made, _ = await webhooks.create(caller, url=_NOBODY, project=project, events=(), format="", secret="")
    return str(made.webhook_id)


async def _own_webhook(scene: Scene) -> str:
    return await _webhook(scene, project="")


def _new_webhook(project: str) -> Make:
    async def make(scene: Scene) -> Any:
        await _webhook(scene)
        return webhook_pb2.CreateWebhookRequest(url=_NOBODY, project=project)

    return make


async def _unshare(scene: Scene) -> Any:
    await scene.services.datasets.unshare(scene.world.principal("ann"), "chats", "ann")
    await scene.grant("dataset", "chats")
    return account_pb2.UnshareRequest(kind="dataset", name="chats", project="granted")


def _shared_only_as_at_first(request: Any) -> Make:
    async def make(scene: Scene) -> Any:
        ann = scene.world.principal("ann")
        await scene.services.datasets.unshare(ann, "chats", "ann")
        await scene.services.models.unshare(ann, "tiny", EVERYONE)
        return request

    return make


def _is(request: Any) -> Make:
    async def make(_: Scene) -> Any:
        return request

    return make


def _of(kind: Any, **fields: Callable[[Scene], Awaitable[Any]]) -> Make:
    async def make(scene: Scene) -> Any:
        return kind(**{name: await value(scene) for name, value in fields.items()})

    return make


async def _known(scene: Scene) -> str:
    return scene.job.job_id


async def _uuid(_: Scene) -> str:
    return str(uuid.uuid4())


async def _spec(scene: Scene) -> job_pb2.JobSpec:
    return scene.spec()


async def _new_name(_: Scene) -> str:
    return f"new-{uuid.uuid4().hex[:8]}"


async def _new_files(_: Scene) -> Any:
    return [blob_pb2.FileEntry(path="a.jsonl", sha256=_REF.sha256, size_bytes=_REF.size_bytes)]


async def _model_files(_: Scene) -> Any:
    names = ("config.json", "tokenizer.json", "model.safetensors")
    return [blob_pb2.FileEntry(path=name, sha256=_REF.sha256, size_bytes=_REF.size_bytes) for name in names]


_CONTENT = chat_rows(2)
_NOBODY = "http://127.0.0.1:1/"
_REF = to_message(blob_file("a", _CONTENT).ref, blob_pb2.BlobRef)
CASES: Mapping[str, tuple[Case, ...]] = {
    "JobService/SubmitJob": (Case(SUBMIT, _of(job_pb2.SubmitJobRequest, request_id=_uuid, spec=_spec)),),
    "JobService/PlanJob": (Case(PLAN, _of(job_pb2.PlanJobRequest, spec=_spec)),),
    "JobService/GetJob": (Case(SEE_JOB, _of(job_pb2.GetJobRequest, job_id=_known)),),
    "JobService/ListJobs": (Case(ALL, _is(job_pb2.ListJobsRequest())),),
    "JobService/CancelJob": (Case(CHANGE_JOB, _of(job_pb2.CancelJobRequest, job_id=_job)),),
    "JobService/PauseJob": (Case(CHANGE_JOB, _of(job_pb2.PauseJobRequest, job_id=_job)),),
    "JobService/ResumeJob": (
        Case(CHANGE_JOB, _of(job_pb2.ResumeJobRequest, job_id=_known), instead="FAILED_PRECONDITION"),
    ),
    "JobService/UpdateJob": (
        Case(CHANGE_JOB, _of(lambda job_id: job_pb2.UpdateJobRequest(job_id=job_id, priority=5), job_id=_job)),
    ),
    "JobService/WatchJob": (Case(SEE_JOB, _of(job_pb2.WatchJobRequest, job_id=_known)),),
    "JobService/GetJobMetrics": (Case(SEE_JOB, _of(job_pb2.GetJobMetricsRequest, job_id=_known)),),
    "JobService/GetJobLogs": (Case(SEE_JOB, _of(job_pb2.GetJobLogsRequest, job_id=_known)),),
    "CheckpointService/ListCheckpoints": (Case(SEE_JOB, _of(checkpoint_pb2.ListCheckpointsRequest, job_id=_known)),),
    "CheckpointService/ReadCheckpointFile": (
        Case(
            SEE_JOB,
            _of(
                lambda job_id: checkpoint_pb2.ReadCheckpointFileRequest(
                    job_id=job_id, step=3, path="model/config.json"
                ),
                job_id=_known,
            ),
        ),
    ),
    # Those who may see the job and use the node; this checkpoint holds no model.
    "CheckpointService/SampleCheckpoint": (
        Case(
            SAMPLE,
            _of(
                lambda job_id: checkpoint_pb2.SampleCheckpointRequest(
                    job_id=job_id, step=3, prompts=[checkpoint_pb2.SamplePrompt(text="hello")]
                ),
                job_id=_known,
            ),
            instead="INVALID_ARGUMENT",
        ),
    ),
    # As for answers; this job has no eval set.
    "CheckpointService/EvaluateCheckpoint": (
        Case(
            SAMPLE,
            _of(lambda job_id: checkpoint_pb2.EvaluateCheckpointRequest(job_id=job_id, step=3), job_id=_known),
            instead="INVALID_ARGUMENT",
        ),
    ),
    # This checkpoint holds no adapter.
    "CheckpointService/MergeCheckpoint": (
        Case(
            CHANGE_JOB,
            _of(lambda job_id: checkpoint_pb2.MergeCheckpointRequest(job_id=job_id, step=3), job_id=_known),
            instead="INVALID_ARGUMENT",
        ),
    ),
    "CheckpointService/DeleteCheckpoint": (Case(CHANGE_JOB, _checkpoint_to_delete),),
    # This job is no session.
    "SessionService/CallSession": (
        Case(
            CHANGE_JOB,
            _of(
                lambda job_id: session_pb2.CallSessionRequest(
                    job_id=job_id, optim_step=session_pb2.SessionOptimStep(learning_rate=0.1)
                ),
                job_id=_known,
            ),
            instead="INVALID_ARGUMENT",
        ),
    ),
    "SessionService/GetSessionResult": (
        Case(
            SEE_JOB,
            _of(lambda job_id: session_pb2.GetSessionResultRequest(job_id=job_id, number=1), job_id=_known),
            instead="INVALID_ARGUMENT",
        ),
    ),
    "CheckpointService/KeepCheckpoint": (
        Case(
            CHANGE_JOB,
            _of(lambda job_id: checkpoint_pb2.KeepCheckpointRequest(job_id=job_id, step=3, kept=True), job_id=_known),
        ),
    ),
    "CheckpointService/RecordTaskResults": (
        Case(
            CHANGE_JOB,
            _of(lambda job_id: checkpoint_pb2.RecordTaskResultsRequest(job_id=job_id), job_id=_known),
        ),
    ),
    "BlobService/FindMissingBlobs": (Case(CREATE, _is(blob_pb2.FindMissingBlobsRequest(blobs=[_REF]))),),
    "BlobService/WriteBlob": (
        Case(CREATE, _is(blob_pb2.WriteBlobRequest(chunk=blob_pb2.BlobChunk(blob=_REF, data=_CONTENT)))),
    ),
    "BlobService/WriteBlobs": (
        Case(CREATE, _is(blob_pb2.WriteBlobsRequest(blobs=[blob_pb2.WholeBlob(blob=_REF, data=_CONTENT)]))),
    ),
    "BlobService/QueryBlobStatus": (Case(CREATE, _is(blob_pb2.QueryBlobStatusRequest(blob=_REF))),),
    "DatasetService/CreateDataset": (
        Case(CREATE, _of(dataset_pb2.CreateDatasetRequest, request_id=_uuid, name=_new_name, files=_new_files)),
    ),
    "DatasetService/FinalizeDataset": (
        Case(CHANGE_PUSHED, _of(dataset_pb2.FinalizeDatasetRequest, dataset_id=_dataset_id)),
    ),
    "DatasetService/GetDataset": (
        Case(SEE_PUSHED, _of(dataset_pb2.GetDatasetRequest, name=_dataset_id)),
        Case(SEE_PUSHED, _is(dataset_pb2.GetDatasetRequest(name="chats"))),
        Case(ALL, _is(dataset_pb2.GetDatasetRequest(name="public"))),
    ),
    "DatasetService/ListDatasets": (Case(ALL, _is(dataset_pb2.ListDatasetsRequest())),),
    "DatasetService/PreviewDataset": (
        Case(SEE_PUSHED, _is(dataset_pb2.PreviewDatasetRequest(name="chats", model="tiny"))),
    ),
    "DatasetService/DeleteDataset": (
        Case(CHANGE_PUSHED, _of(dataset_pb2.DeleteDatasetRequest, name=_dataset_to_delete)),
    ),
    "ModelService/CreateModel": (
        Case(CREATE, _of(model_pb2.CreateModelRequest, request_id=_uuid, name=_new_name, files=_model_files)),
    ),
    "ModelService/FinalizeModel": (Case(CHANGE_PUSHED, _of(model_pb2.FinalizeModelRequest, model_id=_model_id)),),
    "ModelService/GetModel": (Case(SEE_PUSHED, _is(model_pb2.GetModelRequest(name="tiny"))),),
    "ModelService/ListModels": (Case(ALL, _is(model_pb2.ListModelsRequest())),),
    "ModelService/DeleteModel": (Case(CHANGE_PUSHED, _of(model_pb2.DeleteModelRequest, name=_model_to_delete)),),
    "NodeService/GetNode": (Case(ALL, _is(node_pb2.GetNodeRequest())),),
    "NodeService/SetNode": (
        Case(NODE, _is(node_pb2.SetNodeRequest(condition=node_pb2.NodeCondition(mode=node_pb2.NODE_MODE_OPEN)))),
    ),
    "SharingService/GetUsage": (Case(ALL, _is(sharing_pb2.GetUsageRequest())),),
    "SharingService/GetQuota": (Case(ALL, _is(sharing_pb2.GetQuotaRequest())),),
    "SharingService/GetQueue": (Case(ALL, _is(sharing_pb2.GetQueueRequest())),),
    "SharingService/SimulateJob": (Case(PLAN, _of(sharing_pb2.SimulateJobRequest, spec=_spec)),),
    "HousekeepingService/Delete": (
        Case(
            DELETE_JOB,
            _of(lambda job_id: _delete(housekeeping_pb2.RESOURCE_KIND_JOB, job_id), job_id=_ended_job),
        ),
        Case(
            DELETE_PUSHED,
            _of(lambda name: _delete(housekeeping_pb2.RESOURCE_KIND_DATASET, name), name=_dataset_to_delete),
        ),
    ),
    "HousekeepingService/KeepJob": (Case(CHANGE_JOB, _of(housekeeping_pb2.KeepJobRequest, job_id=_known)),),
    "AccountService/WhoAmI": (Case(ALL, _is(account_pb2.WhoAmIRequest())),),
    "AccountService/CreateToken": (
        Case(OWN_TOKENS, _is(account_pb2.CreateTokenRequest(label="laptop"))),
        Case(OWN_TOKENS, _is(account_pb2.CreateTokenRequest(scope="read"))),
        Case(METRICS_TOKEN, _is(account_pb2.CreateTokenRequest(scope="metrics"))),
    ),
    "AccountService/ListTokens": (
        Case(ALL, _is(account_pb2.ListTokensRequest())),
        Case(THEIR_TOKENS, _is(account_pb2.ListTokensRequest(user="ann"))),
    ),
    "AccountService/RevokeToken": (Case(REVOKE, _of(account_pb2.RevokeTokenRequest, token_id=Scene.token_id)),),
    "AccountService/ListProjects": (Case(ALL, _is(account_pb2.ListProjectsRequest())),),
    "AccountService/SetMember": (
        Case(MEMBERS, _is(account_pb2.SetMemberRequest(project="ann", user="eve", role="viewer"))),
    ),
    "AccountService/RemoveMember": (Case(MEMBERS, _member_to_remove),),
    "AccountService/Share": (
        Case(SHARE, _shared_only_as_at_first(account_pb2.ShareRequest(kind="dataset", name="chats", project="ann"))),
        Case(CHANGE_PUSHED, _shared_only_as_at_first(account_pb2.ShareRequest(kind="model", name="tiny", project="*"))),
    ),
    "AccountService/Unshare": (
        Case(CHANGE_PUSHED, _unshare),
        Case(
            CHANGE_PUSHED, _shared_only_as_at_first(account_pb2.UnshareRequest(kind="model", name="tiny", project="*"))
        ),
    ),
    "WebhookService/CreateWebhook": (
        Case(CREATE, _new_webhook("")),
        Case(MEMBERS, _new_webhook("ann")),
    ),
    "WebhookService/ListWebhooks": (Case(ALL, _is(webhook_pb2.ListWebhooksRequest())),),
    "WebhookService/DeleteWebhook": (
        Case(CHANGE_JOB, _of(webhook_pb2.DeleteWebhookRequest, webhook_id=_webhook)),
        Case(CHANGE_OWN, _of(webhook_pb2.DeleteWebhookRequest, webhook_id=_own_webhook)),
    ),
    "WebhookService/TestWebhook": (Case(CHANGE_JOB, _of(webhook_pb2.TestWebhookRequest, webhook_id=_webhook)),),
    "WebhookService/ListWebhookDeliveries": (
        Case(SEE_JOB, _of(webhook_pb2.ListWebhookDeliveriesRequest, webhook_id=_webhook)),
        Case(SEE_OWN, _of(webhook_pb2.ListWebhookDeliveriesRequest, webhook_id=_own_webhook)),
    ),
}


def expected(outcomes: Row, caller: str) -> str:
    if caller in REFUSED:
        return "UNAUTHENTICATED"
    return "PERMISSION_DENIED" if caller == "metrics" else outcomes[ACCEPTED.index(caller)]
