"""What every call does, gRPC's and REST's: for the gate that it passes, its limits and the audit log.

Who may do what is decided in `services.access`. A route of REST goes by the name of the call of gRPC that it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto

from horizon_server.services.access import Need


class Effect(Enum):
    """What a call does."""

    READ = auto()
    """It looks, and changes nothing."""
    UPLOAD = auto()
    """It belongs to the upload of contents, which may be thousands: without the Create and Finalize that name them they
    are nothing."""
    STEP = auto()
    """It is one of the many calls of a session, whose opening was audited; each uses the node no more than a step."""
    CHANGE = auto()
    """It changes one thing, or uses the node's memory and processors."""
    CHANGE_MANY = auto()
    """It changes one thing after the other, and streams what became of each."""

    @property
    def need(self) -> Need:
        """What the caller's token must allow."""
        return "read" if self is Effect.READ else "change"

    @property
    def is_audited(self) -> bool:
        """Whether it counts as a change: the audit log has an entry for each thing that it is about, and users have a
        rate of them."""
        return self in (Effect.CHANGE, Effect.CHANGE_MANY)


EFFECTS: Mapping[str, Effect] = {
    **dict.fromkeys(
        (
            "JobService/PlanJob",
            "JobService/GetJob",
            "JobService/ListJobs",
            "JobService/WatchJob",
            "JobService/GetJobMetrics",
            "JobService/GetJobLogs",
            "DatasetService/GetDataset",
            "DatasetService/ListDatasets",
            "DatasetService/PreviewDataset",
            "ModelService/GetModel",
            "ModelService/ListModels",
            "CheckpointService/ListCheckpoints",
            "CheckpointService/ReadCheckpointFile",
            "NodeService/GetNode",
            "SessionService/GetSessionResult",
            "SharingService/GetUsage",
            "SharingService/GetQuota",
            "SharingService/GetQueue",
            "SharingService/SimulateJob",
            "AccountService/WhoAmI",
            "AccountService/ListTokens",
            "AccountService/ListProjects",
            "WebhookService/ListWebhooks",
            "WebhookService/ListWebhookDeliveries",
        ),
        Effect.READ,
    ),
    **dict.fromkeys(
        (
            "BlobService/FindMissingBlobs",
            "BlobService/WriteBlob",
            "BlobService/WriteBlobs",
            "BlobService/QueryBlobStatus",
        ),
        Effect.UPLOAD,
    ),
    **dict.fromkeys(
        ("SessionService/CallSession",),
        Effect.STEP,
    ),
    **dict.fromkeys(
        (
            "JobService/SubmitJob",
            "JobService/CancelJob",
            "JobService/PauseJob",
            "JobService/ResumeJob",
            "JobService/UpdateJob",
            "DatasetService/CreateDataset",
            "DatasetService/FinalizeDataset",
            "DatasetService/DeleteDataset",
            "ModelService/CreateModel",
            "ModelService/FinalizeModel",
            "ModelService/DeleteModel",
            "CheckpointService/SampleCheckpoint",
            "CheckpointService/EvaluateCheckpoint",
            "CheckpointService/MergeCheckpoint",
            "CheckpointService/DeleteCheckpoint",
            "CheckpointService/KeepCheckpoint",
            "CheckpointService/RecordTaskResults",
            "NodeService/SetNode",
            "HousekeepingService/KeepJob",
            "AccountService/CreateToken",
            "AccountService/RevokeToken",
            "AccountService/SetMember",
            "AccountService/RemoveMember",
            "AccountService/Share",
            "AccountService/Unshare",
            "WebhookService/CreateWebhook",
            "WebhookService/DeleteWebhook",
            "WebhookService/TestWebhook",
        ),
        Effect.CHANGE,
    ),
    **dict.fromkeys(
        ("HousekeepingService/Delete",),
        Effect.CHANGE_MANY,
    ),
}
"""By service and method of the contract. A call that is missing here cannot be served."""
