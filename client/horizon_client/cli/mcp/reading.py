"""Tools that look and change nothing. Each calls what the daemon's access rules call a read."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Literal, cast

from pydantic import Field

from horizon_client.cli.checkpoints import CHECKPOINT_VIEW
from horizon_client.cli.compare import compared
from horizon_client.cli.figures import USUAL_FIGURES, evenly
from horizon_client.cli.job_file import job_schema, spec_fields
from horizon_client.cli.job_views import event_line
from horizon_client.cli.mcp.answers import (
    JOB_LIST_VIEW,
    MOST_LINE_CHARACTERS,
    MOST_LINES,
    MOST_LISTED,
    Answer,
    cut,
    facts,
    job_answer,
    last_lines,
    listed,
)
from horizon_client.cli.node import NODE_VIEW
from horizon_client.cli.output import time_text, to_plain
from horizon_client.cli.pushed import DATASET_VIEW, MODEL_VIEW
from horizon_client.cli.sampling import printable
from horizon_client.cli.sharing import QUEUE_VIEW
from horizon_client.job_spec import parse_spec

if TYPE_CHECKING:
    from horizon_client.async_client import AsyncClient
    from horizon_client.job_spec_types import JobSpec

READING = (
    "plan_job",
    "simulate_job",
    "list_job_fields",
    "list_jobs",
    "show_job",
    "show_job_figures",
    "show_job_events",
    "show_job_log",
    "compare_jobs",
    "list_checkpoints",
    "list_models",
    "list_datasets",
    "show_queue",
    "show_node",
)
_LOG_BYTES = 1 << 20
_SEARCHED_EVENTS = 2000

JobName = Annotated[str, Field(description="Id of a job, the beginning of an id, or a name: the newest of that name.")]
Spec = Annotated[
    str,
    Field(
        description="The whole job spec as YAML or JSON text. model and dataset are names that list_models and "
        "list_datasets show, or an id of the Hugging Face hub that the node has. Files of this machine are not "
        "sent, but for the config.json of a model folder that is only planned."
    ),
]
Overrides = Annotated[
    list[str], Field(description="Changes of the spec, each as FIELD=VALUE, such as train.learning_rate=1e-5.")
]
Limit = Annotated[int, Field(ge=1, le=MOST_LISTED, description="How many at most.")]
Lines = Annotated[int, Field(ge=1, le=MOST_LINES, description="How many at most: the newest.")]
State = Literal["queued", "preparing", "starting", "running", "stopping", "paused", "succeeded", "failed", "cancelled"]


class Reading:
    """The tools, for one client."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def plan_job(self, spec: Spec, overrides: Overrides = []) -> Answer:  # noqa: B006 - read, never changed
        """Plan a job without submitting it: whether it fits the machine, its memory by component, its predicted speed
        and duration, warnings, and a hint what would be faster or would make it fit. A spec that would be refused is
        refused here with the same message."""
        planned = await self._client.jobs.plan(spec_of(spec), overrides=overrides, push=False)
        return {"plan": to_plain(planned.plan), "machines": to_plain(planned.places[:MOST_LISTED])}

    async def simulate_job(self, spec: Spec, overrides: Overrides = []) -> Answer:  # noqa: B006
        """Say when a job would start and end if it were submitted now, and why, among the jobs that are there. Nothing
        is submitted."""
        found = await self._client.jobs.simulate(spec_of(spec), overrides=overrides, push=False)
        return {"outlook": to_plain(found.outlook), "plan": to_plain(found.plan)}

    async def list_job_fields(
        self,
        search: Annotated[
            str, Field(description="A text in the name or the description, such as learning. Empty: names of all.")
        ] = "",
    ) -> Answer:
        """List the fields of a job spec. Without a search, the names of all; with one, also type, default, range and
        description of those that match."""
        found = {name: dict(schema) for name, schema in spec_fields()}
        if not search:
            return {"fields": [*found], "required": job_schema()["required"]}
        matching = {
            name: {key: value for key, value in schema.items() if key != "title"}
            for name, schema in found.items()
            if search.lower() in f"{name} {schema.get('description', '')}".lower()
        }
        answer: Answer = {"fields": dict([*matching.items()][:MOST_LISTED])}
        if len(matching) > MOST_LISTED:
            answer["note"] = f"cut after {MOST_LISTED} of {len(matching)}: search for more of the name"
        return answer

    async def list_jobs(
        self,
        states: Annotated[list[State], Field(description="Only jobs in these states. Empty: in any.")] = [],  # noqa: B006
        owner: Annotated[str, Field(description="Only jobs of this user.")] = "",
        project: Annotated[str, Field(description="Only jobs of this project.")] = "",
        search: Annotated[
            str, Field(description="Only jobs with this text in name, id, owner, model or dataset.")
        ] = "",
        limit: Limit = 20,
    ) -> Answer:
        """List the jobs that the user may see, newest first: state, steps done, loss, owner, and when they end."""
        found = await self._client.jobs.list(
            states=states, owner=owner, project=project, search=search, limit=limit + 1
        )
        return listed("jobs", JOB_LIST_VIEW, found, limit, "older jobs are left out; narrow the list or raise limit")

    async def show_job(
        self,
        job: JobName,
        with_spec: Annotated[bool, Field(description="Also the whole spec, with every default.")] = False,
    ) -> Answer:
        """Show one job: its state and the reason for it, progress, loss, evaluations, memory, times, and warnings."""
        found = await self._client.jobs.get(job)
        return {**job_answer(found), **({"spec": to_plain(found.spec)} if with_spec else {})}

    async def show_job_figures(
        self,
        job: JobName,
        figures: Annotated[
            list[str], Field(max_length=20, description="Names of figures. Empty: loss and other usual ones.")
        ] = [],  # noqa: B006
        limit: Annotated[int, Field(ge=1, le=200, description="How many steps at most, evenly spaced.")] = 30,
    ) -> Answer:
        """Show what a job has measured over its steps: loss, eval_loss, grad_norm, learning_rate, tokens_per_second and
        others, as rows of numbers; the newest step is always there."""
        found = await self._client.jobs.metrics(job)
        for name in figures:
            found.curve(name)  # refuses an unknown one, with the names that there are
        shown, every = evenly(found, limit)
        names = figures or [name for name in USUAL_FIGURES if name in found.names]
        table = [{"step": row.step, **{name: row.figures.get(name) for name in names}} for row in shown]
        answer: Answer = {"job": found.job_id, "rows": to_plain(table), "names_of_all_figures": [*found.names]}
        if len(shown) < len(found):
            answer["note"] = f"{len(shown)} of {len(found):,} rows, every {every:,}th"
        return answer

    async def show_job_events(
        self,
        job: JobName,
        limit: Lines = 40,
        with_steps: Annotated[bool, Field(description="Also a line for each step.")] = False,
    ) -> Answer:
        """Show the newest events of a job, oldest first: changes of state with their reasons, evaluations, checkpoints,
        preparation of the data, warnings."""
        found = await self._client.jobs.get(job)
        lines: list[str] = []
        searched = limit if with_steps else _SEARCHED_EVENTS
        first = max(found.last_sequence - searched, 0)
        if found.last_sequence:
            watched = self._client.jobs.watch(found.job_id, after_sequence=first)
            async with aclosing(watched) as events:  # type: ignore[type-var]
                async for event in events:
                    if with_steps or event.kind != "step":
                        lines.append(f"{time_text(event.time)}  {cut(event_line(event), MOST_LINE_CHARACTERS)}")
                    if event.sequence >= found.last_sequence:
                        break
        answer: Answer = {"job": found.job_id, "events": lines[-limit:]}
        if first or len(lines) > limit:
            answer["note"] = "there are older events; show_job_log has what the job has said"
        return answer

    async def show_job_log(
        self,
        job: JobName,
        attempt: Annotated[int, Field(ge=0, description="Number of the attempt. 0: the newest.")] = 0,
        limit: Lines = 100,
    ) -> Answer:
        """Show the end of the log of a job's worker: what it did, and of a failed job what went wrong."""
        found = await self._client.jobs.get(job)
        tail = b""
        pieces = self._client.jobs.logs(found.job_id, attempt=attempt)
        async with aclosing(pieces) as read:  # type: ignore[type-var]
            async for piece in read:
                tail = (tail + piece)[-_LOG_BYTES:]
        return {"job": found.job_id, **last_lines(printable(tail.decode("utf-8", "replace")), limit)}

    async def compare_jobs(
        self,
        jobs: Annotated[list[str], Field(min_length=2, max_length=10, description="Ids or names of jobs.")],
    ) -> Answer:
        """Compare jobs: the fields of their specs that differ, and their losses, evaluations, speed and device time,
        each with one value a job."""
        return cast("Answer", to_plain(compared([await self._client.jobs.get(job) for job in jobs])))

    async def list_checkpoints(self, job: JobName, limit: Limit = 20) -> Answer:
        """List the checkpoints of a job, newest first: step, loss of the evaluation, size, and which is the last and
        the best."""
        found = await self._client.checkpoints.list((await self._client.jobs.get(job)).job_id)
        return listed("checkpoints", CHECKPOINT_VIEW, found[::-1], limit, "older ones are left out; raise limit")

    async def list_models(self, limit: Limit = 20) -> Answer:
        """List the models that the user may train, newest first."""
        found = await self._client.models.list(limit=limit + 1)
        return listed("models", MODEL_VIEW, found, limit, "older ones are left out; raise limit")

    async def list_datasets(self, limit: Limit = 20) -> Answer:
        """List the datasets that the user may train on, newest first."""
        found = await self._client.datasets.list(limit=limit + 1)
        return listed("datasets", DATASET_VIEW, found, limit, "older ones are left out; raise limit")

    async def show_queue(self, limit: Limit = 50) -> Answer:
        """Show the jobs on the machine and those that wait, of all users, in order, with why and until when."""
        found = await self._client.jobs.queue()
        return listed("queue", QUEUE_VIEW, found, limit, f"{len(found)} jobs in all; raise limit")

    async def show_node(self) -> Answer:
        """Show the machine: memory, devices, disk, jobs, whether jobs start, and who the user is there."""
        return {"facts": facts(NODE_VIEW.details(await self._client.node.status()))}


def spec_of(text: str) -> JobSpec:
    """Return the spec that a text holds. It is never the path of a file."""
    return cast("JobSpec", parse_spec(text, name="the spec"))
