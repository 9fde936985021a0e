"""Tools that change something, or use the machine's memory and processors: those of `horizon mcp --write`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from horizon_client.cli.mcp.answers import Answer, job_answer
from horizon_client.cli.mcp.reading import JobName, Overrides, Spec, spec_of
from horizon_client.cli.sampling import answers, with_system
from horizon_client.reporter import Reporter

if TYPE_CHECKING:
    from horizon_client.async_client import AsyncClient
    from horizon_client.cli.sampling import Prompt

WRITING = {"submit_job": False, "pause_job": False, "resume_job": False, "cancel_job": True, "sample_checkpoint": False}
"""The tools, and whether what they do cannot be undone."""


class Writing:
    """The tools, for one client."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def submit_job(
        self,
        spec: Spec,
        overrides: Overrides = [],  # noqa: B006 - read, never changed
        request_id: Annotated[
            str, Field(description="A UUID of your choice: the same one with the same spec gives the same job again.")
        ] = "",
    ) -> Answer:
        """Queue a job, which then trains on the shared machine. Plan it with plan_job first. Give a request_id, and the
        call can be repeated without making a second job."""
        job = await self._client.jobs.submit(
            spec_of(spec), overrides=overrides, request_id=request_id or None, push=False
        )
        return job_answer(job)

    async def pause_job(self, job: JobName) -> Answer:
        """Pause a job: it writes a checkpoint after its current step and frees its memory. resume_job continues it."""
        return job_answer(await self._client.jobs.pause(await self._id(job)))

    async def resume_job(self, job: JobName) -> Answer:
        """Queue a paused or failed job again; it continues from its newest checkpoint."""
        return job_answer(await self._client.jobs.resume(await self._id(job)))

    async def cancel_job(self, job: JobName) -> Answer:
        """End a job for good; a running one stops after its current step. Its checkpoints stay. A job that has ended
        stays as it is."""
        return job_answer(await self._client.jobs.cancel(await self._id(job)))

    async def sample_checkpoint(
        self,
        checkpoint: Annotated[str, Field(description="JOB, JOB@STEP, JOB@best or JOB@last.")],
        prompts: Annotated[list[str], Field(min_length=1, max_length=8, description="Texts to answer.")],
        chat: Annotated[
            bool, Field(description="Each text is the user's message of a chat, instead of a text to continue.")
        ] = False,
        system: Annotated[str, Field(description="System message of each chat; makes each text a chat.")] = "",
        max_tokens: Annotated[int, Field(ge=1, le=1024, description="Most tokens of an answer.")] = 256,
        temperature: Annotated[float, Field(ge=0, description="0 takes the likeliest token; above, draws.")] = 0.0,
        seed: Annotated[int, Field(ge=0, description="Equal seeds draw equal answers.")] = 0,
    ) -> Answer:
        """Have a checkpoint answer prompts on the machine. It loads the model, and waits until other answers are
        done."""
        given: list[Prompt] = [[{"role": "user", "content": text}] if chat else text for text in prompts]
        if system:
            given = [with_system(prompt, system) for prompt in given]
        found = self._client.checkpoints.sample(
            checkpoint, given, max_tokens=max_tokens, temperature=temperature, seed=seed
        )
        notes = _Notes()
        complete = answers([piece async for piece in found], given, notes)
        shown = [{name: answer[name] for name in ("answer", "num_tokens", "ended")} for answer in complete]
        return {"answers": shown, "notes": notes.texts}

    async def _id(self, job: str) -> str:
        """Return the id of a job; one that is not there is refused with similar names."""
        return (await self._client.jobs.get(job)).job_id


class _Notes(Reporter):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def notice(self, message: str) -> None:
        self.texts.append(message)
