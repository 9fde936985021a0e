"""Evaluations of checkpoints besides those of their jobs, computed in a child process: the daemon never loads torch."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Mapping
from pathlib import Path

from horizon_server.children.child import ChildTask, Limits, OnEvent, streamed
from horizon_server.children.entry import Answer
from horizon_server.codec import to_plain
from horizon_server.errors import DoesNotFit, InvalidSpec, NotFound, OutOfMemory, WorkerFailed
from horizon_server.events import EvalDone, EvaluationProgress, Message, PrepareProgress
from horizon_server.jobs.preparation import DatasetFiles, Preparation
from horizon_server.records.account import Principal
from horizon_server.records.checkpoint_evaluation import CheckpointEvaluation, EvaluationRequest
from horizon_server.records.job import JobRecord
from horizon_server.services.access import require_sample
from horizon_server.services.jobs import JobService
from horizon_server.services.sampling_child import SamplingChild
from horizon_server.spec import EVAL_SET, JobSpec, check_kind, parse_job_spec
from horizon_server.texts import size_text

# What libraries map of private memory and never touch, besides what the plan counts.
_UNTOUCHED_BYTES = 4 * 2**30
_LOG_BYTES = 64 * 2**20

Evaluated = EvaluationProgress | CheckpointEvaluation


class Evaluations:
    """Evaluates checkpoints: one at a time on the node, and callers take turns. Thread: belongs to one event loop."""

    def __init__(
        self,
        jobs: JobService,
        *,
        memory: SamplingChild,
        make_preparation: Callable[[], Preparation],
        environment: Mapping[str, str],
    ) -> None:
        """`memory` is where the children that answer prompts and evaluate have their memory from, and
        `make_preparation` returns what prepares the data of one evaluation."""
        self._jobs, self._memory = jobs, memory
        self._make_preparation, self._environment = make_preparation, environment
        self._turn = asyncio.Lock()
        self._of_user: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def evaluate(
        self, principal: Principal, key: str, step: int, sets: Mapping[str, str]
    ) -> AsyncGenerator[Evaluated, None]:
        """Yield how far the evaluation of a checkpoint is, then its figures. `sets` are pushed datasets by the names
        that their figures have; without any, it is on the eval sets of the job. Closing it ends the child.

        Raises:
            NotFound: when the caller has no such job or dataset, or the job has no such checkpoint, or its model or
                one of its datasets is gone.
            NotAllowed: when the caller may see the job and use nothing of the node.
            InvalidSpec: when the job has no eval set and none is given, or the job's method cannot be evaluated on one.
            InvalidData: when rows of a set cannot be used.
            InvalidModel: when the checkpoint is damaged, or its base is another model now.
            DoesNotFit: when running jobs leave too little memory.
        """
        job = await self._jobs.get(principal, key)
        require_sample(principal, job.owner, f"job {job.job_id}", project=job.project)
        if self._jobs.boxes.has_arrived(job):
            if sets:
                raise InvalidSpec.of(
                    "sets",
                    f"job {job.job_id} is in {job.box}, which has the datasets of its own eval sets only; evaluate on "
                    "those, or pull the checkpoint",
                )
            kinds = (EvaluationProgress, CheckpointEvaluation)
            lines = self._jobs.boxes.records(principal, job, "evaluate", kinds, step=step)
            async with contextlib.aclosing(lines):
                async for line in lines:
                    yield line
            return
        spec = _spec_on(job.spec, sets) if sets else job.spec
        if not spec.eval_sets:
            raise InvalidSpec.of(
                "sets",
                f"job {job.job_id} has no eval set (eval_dataset, eval_fraction or eval.sets); name pushed datasets to "
                "evaluate on: --set NAME=DATASET",
            )
        found = {name: await self._jobs.resources.dataset(principal, dataset) for name, dataset in sets.items()}
        if not sets:
            _, dataset, of_sets = await self._jobs.resources.of_job(job)
            # With a fraction, the set is the rows of the job's own dataset that are held out.
            found = {**({EVAL_SET: dataset} if spec.eval_fraction and dataset else {}), **of_sets}
        _require_possible(spec, found)
        checkpoints = self._jobs.folders.checkpoints(job.job_id)
        # First the user's own turn: what waits for it must not keep others waiting.
        async with self._of_user[principal.name], self._turn:
            with contextlib.ExitStack() as readings:
                readings.enter_context(await self._jobs.leases.take(checkpoints, step))
                for files in found.values():
                    readings.enter_context(self._jobs.resources.reading(files.record.dataset_id, job.model_id))
                lines = streamed(lambda on_event: self._evaluated(job, spec, step, found, on_event))
                figures: EvalDone | None = None
                async with contextlib.aclosing(lines):
                    async for line in lines:
                        if isinstance(line, EvaluationProgress):
                            yield line
                        elif isinstance(line, EvalDone):
                            figures = line
                        elif isinstance(line, Answer):
                            if figures is None:
                                raise WorkerFailed("the child that evaluates a checkpoint sent no figures")
                            yield CheckpointEvaluation(figures=figures, differences=tuple(line.value))

    async def _evaluated(
        self, job: JobRecord, spec: JobSpec, step: int, sets: Mapping[str, DatasetFiles], on_event: OnEvent
    ) -> list[str]:
        """Prepare the sets, and have the child evaluate; returns in what that differs from the job's own
        evaluation."""
        model = await self._jobs.resources.model_of(job)
        if not await asyncio.to_thread(model.is_dir):
            raise NotFound(
                f"the model {job.spec.model} that job {job.job_id} began with is not on the node any more, and its "
                "checkpoints are evaluated with its tokenizer; pull the checkpoint, and evaluate it with another "
                "program"
            )
        prepared = await self._prepared(spec, model, sets, on_event)
        execution, ledger = await asyncio.to_thread(self._jobs.planner.plan_evaluation, spec, model)
        trained_on = execution.device_kind if job.plan is None else job.plan.execution.device_kind
        request = EvaluationRequest(
            spec=spec,
            step=step,
            model=model,
            checkpoint=self._jobs.folders.checkpoints(job.job_id).of_step(step),
            prepared=prepared,
            execution=execution,
            trained_on=trained_on,
            digests=self._jobs.folders.digests,
        )
        planes = ledger.host_bytes["weights"]
        task = ChildTask(
            module="horizon_server.worker.checkpoint_evaluation",
            who="the child that evaluates a checkpoint",
            environment=self._environment,
            limits=Limits(
                memory_bytes=ledger.host_total_bytes - planes + _UNTOUCHED_BYTES,
                # The planes are files, in memory.
                file_bytes=max(planes, _LOG_BYTES),
                oom_score_adj=1000,
            ),
            meanings={
                OutOfMemory: DoesNotFit(
                    "evaluating this checkpoint takes more memory than planned; try again when the node's jobs have "
                    "ended"
                ),
            },
        )
        try:
            async with self._memory.held(ledger.host_total_bytes, _refused):
                differences: list[str] = await task.run(to_plain(request), on_event)
                return differences
        finally:
            # A job may wait for this memory.
            self._jobs.scheduler.wake()

    async def _prepared(
        self, spec: JobSpec, model: Path, sets: Mapping[str, DatasetFiles], on_event: OnEvent
    ) -> dict[str, Path]:
        """The prepared folder of each set: one that a job or an evaluation has made before, or a new one."""
        folders = {}
        for name, files in sets.items():
            fraction = spec.eval_fraction if name == EVAL_SET else 0.0
            folders[name] = await self._prepared_one(name, spec, model, files, fraction, on_event)
        return folders

    async def _prepared_one(
        self, name: str, spec: JobSpec, model: Path, files: DatasetFiles, fraction: float, on_event: OnEvent
    ) -> Path:
        async def publish(event: PrepareProgress | Message) -> None:
            if isinstance(event, PrepareProgress):
                done, total = event.done_rows, event.total_rows
                await on_event(EvaluationProgress(phase="prepare", set=name, done=done, total=total))

        preparation = self._make_preparation()
        with tempfile.TemporaryDirectory(prefix="horizon-evaluation-") as folder:
            # A task of its own: `stop` ends it in order, which leaves the turn to the next preparation.
            running = asyncio.create_task(
                preparation.run(
                    spec,
                    model,
                    files,
                    log=Path(folder, "preparation.log"),
                    environment=self._environment,
                    publish=publish,
                    eval_fraction=fraction,
                ),
                name="preparation of an evaluation",
            )
            try:
                data = await asyncio.shield(running)
            except asyncio.CancelledError:
                preparation.stop()
                await asyncio.gather(running, return_exceptions=True)
                raise
        assert data is not None, "it was not stopped"
        if fraction:
            assert data.evaluation is not None, "rows are held out"
            return data.evaluation
        return data.folder


def _spec_on(spec: JobSpec, sets: Mapping[str, str]) -> JobSpec:
    """The spec of a job with other eval sets. What it says of a set that is not among them is left out."""
    plain = spec.to_mapping()
    generate, (judged, _) = spec.eval.generate, spec.eval.judged
    others = {name: dataset for name, dataset in sets.items() if name != EVAL_SET}
    if spec.is_session:
        # Its calls say what is learned; an evaluation is that of text.
        plain |= {"method": "sft", "dataset": next(iter(sets.values()))}
    of_eval = {**plain["eval"], "sets": others, "patience": 0, "min_delta": 0.0}
    if generate is not None and generate.set not in sets:
        of_eval["generate"] = None
    if judged and judged not in sets:
        of_eval["best_by"] = "loss"
    return parse_job_spec(
        {**plain, "eval": of_eval, "eval_dataset": sets.get(EVAL_SET), "eval_fraction": 0.0, "eval_every_steps": 0}
    )


def _require_possible(spec: JobSpec, sets: Mapping[str, DatasetFiles]) -> None:
    """Refuse sets that a job of this method cannot be evaluated on, or not after its end. Raises InvalidSpec."""
    for name, files in sets.items():
        kind = files.record.data_kind
        if kind == "text":
            continue
        check_kind(spec.method, kind, files.record.name)
        if spec.needs_references:
            raise InvalidSpec.of(
                "sets",
                f"{spec.method} compares with the log-probabilities of the weights that the job started with, which "
                f"only the job's own evaluations have, so the checkpoint cannot be evaluated on the set {name} "
                f"({files.record.name}); evaluate it on text: --set NAME=DATASET",
            )
        if spec.eval.generate is not None and spec.eval.generate.set == name:
            raise InvalidSpec.of(
                "sets",
                f"the set {name} ({files.record.name}) is of kind {kind}, and the job has its prompts answered "
                "(eval.generate), which needs text; give the set another name",
            )


def _refused(needed_bytes: int, free_bytes: int) -> DoesNotFit:
    return DoesNotFit(
        f"evaluating this checkpoint takes {size_text(needed_bytes)} of host memory, and the node's jobs leave "
        f"{size_text(free_bytes)}; evaluate it again when they have ended"
    )
