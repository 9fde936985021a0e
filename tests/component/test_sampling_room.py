"""A job gets the memory of the model that answered prompts last, and which stays for the next call, without waiting for
it."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import MakeDaemon
from tests.daemon_parts import Script

from horizon_server.planning.model_folder import open_model_folder
from horizon_server.planning.sampling import sample_layout, sample_memory
from horizon_server.records.account import Principal
from horizon_server.records.job import JobState
from horizon_server.records.sample import SampleFigures, SampleOptions, SamplePrompt

ADA = Principal(name="ada", role="user", project="ada")


async def test_a_job_gets_the_memory_of_an_idle_model(
    make_daemon: MakeDaemon, model_folder: Path, tmp_path: Path
) -> None:
    total = sample_memory(sample_layout(open_model_folder(model_folder))).total
    # Room for the model or a job, not for both.
    async with make_daemon(tmp_path / "state", host_memory_limit_bytes=total, host_memory_reserve_bytes=0) as daemon:
        await daemon.services.accounts.add_user(ADA.name)
        await daemon.dataset(ADA)
        first = await daemon.submit(ADA, "first")
        await daemon.until(first.job_id, JobState.SUCCEEDED)
        files = {path.name: path.read_bytes() for path in model_folder.iterdir()}
        daemon.write_checkpoint(await daemon.job(first.job_id), 900, files)

        async def ask() -> float:
            asked = daemon.services.samples.sample(
                ADA, first.job_id, 900, [SamplePrompt(text="The lab box")], SampleOptions(max_tokens=2)
            )
            *_, figures = [piece async for piece in asked]
            assert isinstance(figures, SampleFigures)
            return figures.load_s

        async def promised_bytes() -> int:
            return (await daemon.services.node.describe(ADA)).host_memory_promised_bytes

        assert await ask() > 0
        assert await promised_bytes() == total
        second = await daemon.submit(ADA, "second", Script(hold_at=2))
        # It is not queued again for lack of memory.
        held = await daemon.until(second.job_id, JobState.RUNNING, step=1)
        assert held.attempt == 1
        assert held.plan is not None
        assert await promised_bytes() == held.plan.host_total_bytes
        daemon.release("second")
        await daemon.until(second.job_id, JobState.SUCCEEDED)
        assert await ask() > 0
        assert await ask() == 0
