"""What a running call reports: how far a transfer is, what happens to a job, and messages for people."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from horizon_client.resources import EvaluationProgress, JobEvent

Phase: TypeAlias = Literal["check", "hash", "upload", "finalize", "merge", "download"]


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a transfer is. `finalize` has no bytes: the server checks what has arrived."""

    phase: Phase
    name: str
    done_bytes: int
    total_bytes: int


class Reporter:
    """Receives progress, events and notices and does nothing with them; override what you want to show.

    Thread: called in the event loop of the client; for the blocking `Client` that is a thread of its own.
    """

    def progress(self, progress: Progress) -> None:
        """A transfer has advanced."""

    def evaluation(self, progress: EvaluationProgress) -> None:
        """The evaluation of a checkpoint has advanced."""

    def event(self, event: JobEvent) -> None:
        """Something happened to the job that is waited for."""

    def notice(self, message: str) -> None:
        """Something happened that a person may want to know, such as that a connection was cut and is being
        restored."""


SILENT = Reporter()
