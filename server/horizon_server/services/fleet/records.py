"""What daemons of a fleet say to each other."""

from __future__ import annotations

from dataclasses import dataclass, field

from horizon_server.planning.planner import PlannerFacts
from horizon_server.records.blob import BlobFile
from horizon_server.records.boxes import Box
from horizon_server.records.sharing import ShareUse
from horizon_server.spec import JobSpec


@dataclass(frozen=True, kw_only=True)
class BoxReport:
    """What a box has."""

    box: Box
    """As it sees itself: under its own name, without an address."""
    planner: PlannerFacts


@dataclass(frozen=True, kw_only=True)
class Needed:
    """A model or dataset that a job needs, to be copied to the box that the job is sent to."""

    kind: str
    """model or dataset."""
    name: str
    digest: str
    files: tuple[BlobFile, ...]
    format: str = ""
    field_map: dict[str, str] = field(default_factory=dict)

    @property
    def name_there(self) -> str:
        """What the copy is called: its owner may have another one of the same name there."""
        plain = "".join(letter if letter.isalnum() and letter.isascii() else "-" for letter in self.name.lower())
        return f"{plain.strip('-')[:40] or self.kind}-{self.digest[:12]}"


@dataclass(frozen=True, kw_only=True)
class Announced:
    """A copy that was announced: its id there, and whether it is there whole."""

    id: str
    ready: bool


@dataclass(frozen=True, kw_only=True)
class SentJob:
    """A job that is sent to a box, with the ids of what it needs there."""

    job_id: str
    project: str
    priority: int
    spec: JobSpec
    """As it was submitted."""
    ids: dict[str, str]
    """By what the spec names: `model`, `dataset`, `init_from`, `eval_dataset`, and `eval.sets.NAME`."""

    @property
    def named_by_ids(self) -> JobSpec:
        """The spec with the ids in place of names."""
        sets = {name: self.ids.get(f"eval.sets.{name}", given) for name, given in self.spec.eval.sets.items()}
        plain = {name: value for name, value in self.ids.items() if not name.startswith("eval.sets.")}
        evaluation = self.spec.eval.model_copy(update={"sets": sets})
        # Trackers follow its events where it was submitted.
        return self.spec.model_copy(update={**plain, "eval": evaluation, "report_to": (), "node": ""})


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What another daemon wants to know of its jobs here: their events after these numbers. `uses` is what everybody
    has used of all machines that it knows."""

    after: dict[str, int]
    uses: tuple[ShareUse, ...] = ()
