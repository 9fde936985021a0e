"""Whether a call changes something: declared here once for each, for the gate that every call passes, its limits and the audit log.

A call that is missing here cannot be served: `start_grpc_server` refuses to start.
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
    """It belongs to the upload of contents, which may be thousands: without the Create and Finalize that name them they are nothing."""
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
        """Whether it counts as a change: the audit log has an entry for each thing that it is about, and users have a rate of them."""
        return self in (Effect.CHANGE, Effect.CHANGE_MANY)


_READ, _UPLOAD, _CHANGE, _CHANGE_MANY = Effect

EFFECTS: Mapping[str, Effect] = {
    "JobService/SubmitJob": _CHANGE,
    "JobService/PlanJob": _READ,
    "JobService/GetJob": _READ,
    "JobService/ListJobs": _READ,
    "JobService/CancelJob": _CHANGE,
    "JobService/PauseJob": _CHANGE,
    "JobService/ResumeJob": _CHANGE,
    "JobService/UpdateJob": _CHANGE,
    "JobService/WatchJob": _READ,
    "JobService/GetJobLogs": _READ,
    "BlobService/FindMissingBlobs": _UPLOAD,
    "BlobService/WriteBlob": _UPLOAD,
    "BlobService/WriteBlobs": _UPLOAD,
    "BlobService/QueryBlobStatus": _UPLOAD,
    "DatasetService/CreateDataset": _CHANGE,
    "DatasetService/FinalizeDataset": _CHANGE,
    "DatasetService/GetDataset": _READ,
    "DatasetService/ListDatasets": _READ,
    "DatasetService/DeleteDataset": _CHANGE,
    "DatasetService/PreviewDataset": _READ,
    "ModelService/CreateModel": _CHANGE,
    "ModelService/FinalizeModel": _CHANGE,
    "ModelService/GetModel": _READ,
    "ModelService/ListModels": _READ,
    "ModelService/DeleteModel": _CHANGE,
    "CheckpointService/ListCheckpoints": _READ,
    "CheckpointService/ReadCheckpointFile": _READ,
    "CheckpointService/SampleCheckpoint": _CHANGE,
    "CheckpointService/MergeCheckpoint": _CHANGE,
    "CheckpointService/DeleteCheckpoint": _CHANGE,
    "NodeService/GetNode": _READ,
    "NodeService/SetNode": _CHANGE,
    "SharingService/GetUsage": _READ,
    "SharingService/GetQuota": _READ,
    "SharingService/GetQueue": _READ,
    "SharingService/SimulateJob": _READ,
    "HousekeepingService/Delete": _CHANGE_MANY,
    "HousekeepingService/KeepJob": _CHANGE,
    "AccountService/WhoAmI": _READ,
    "AccountService/CreateToken": _CHANGE,
    "AccountService/ListTokens": _READ,
    "AccountService/RevokeToken": _CHANGE,
    "AccountService/ListProjects": _READ,
    "AccountService/SetMember": _CHANGE,
    "AccountService/RemoveMember": _CHANGE,
    "AccountService/Share": _CHANGE,
    "AccountService/Unshare": _CHANGE,
}
"""By service and method."""


def effect_of(path: str) -> Effect:
    """Return the effect of a call by its path (/package.Service/Method)."""
    return EFFECTS[path.rpartition(".")[2]]
