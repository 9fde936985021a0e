"""MLflow: a run of the job's experiment, found again by a tag with the job's id."""

from __future__ import annotations

from collections.abc import Sequence

from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from horizon_formats.trackers.figures import Ending, Point, TrackedJob
from horizon_formats.trackers.follower import Target, add_to

_JOB_TAG = "horizon.job_id"
_WRITTEN_TAG = "horizon.written."
# A call takes at most 1000 metrics and 100 parameters.
_POINTS_PER_CALL, _MAX_PARAMS, _MAX_PARAM_CHARS = 20, 100, 6000
_STATUS = {Ending.FINISHED: "FINISHED", Ending.FAILED: "FAILED", Ending.KILLED: "KILLED"}


class _Run:
    def __init__(self, job: TrackedJob, target: Target) -> None:
        self._client = MlflowClient(tracking_uri=target.uri or None)
        name = target.project_of(job)
        experiment = self._experiment(name)
        found = self._client.search_runs([experiment], f"tags.`{_JOB_TAG}` = '{job.job_id}'", max_results=1)
        run = found[0] if found else self._created(experiment, job)
        self._id = run.info.run_id
        if run.info.status != "RUNNING":  # ended by an earlier follower; the job has been resumed since then
            self._client.update_run(self._id, "RUNNING")
        tags = run.data.tags.items()
        self.written = {name.removeprefix(_WRITTEN_TAG): int(v) for name, v in tags if name.startswith(_WRITTEN_TAG)}
        self.where = f"run {job.name} of experiment {name} at {self._client.tracking_uri}"

    def _experiment(self, name: str) -> str:
        if (found := self._client.get_experiment_by_name(name)) is not None:
            return str(found.experiment_id)
        try:
            return str(self._client.create_experiment(name))
        except MlflowException:  # another follower was faster
            if (found := self._client.get_experiment_by_name(name)) is None:
                raise
            return str(found.experiment_id)

    def _created(self, experiment: str, job: TrackedJob):  # type: ignore[no-untyped-def]  # mlflow's own Run
        tags = {_JOB_TAG: job.job_id, "horizon.owner": job.owner, **job.labels}
        run = self._client.create_run(experiment, run_name=job.name, tags=tags)
        params = [Param(name, str(value)[:_MAX_PARAM_CHARS]) for name, value in job.flat_config.items()]
        for start in range(0, len(params), _MAX_PARAMS):
            self._client.log_batch(run.info.run_id, params=params[start : start + _MAX_PARAMS])
        return run

    def write(self, points: Sequence[Point]) -> None:
        for start in range(0, len(points), _POINTS_PER_CALL):
            some = points[start : start + _POINTS_PER_CALL]
            # With the time of the event: sent again after a cut, it is the same entry to the server.
            metrics = [
                Metric(name, value, int(point.time_s * 1000), point.step)
                for point in some
                for name, value in point.figures.items()
            ]
            add_to(self.written, some)
            tags = [RunTag(_WRITTEN_TAG + kind, str(step)) for kind, step in self.written.items()]
            self._client.log_batch(self._id, metrics=metrics, tags=tags)

    def close(self, ending: Ending | None) -> None:
        if ending is not None:
            self._client.set_terminated(self._id, _STATUS[ending])


def open_run(job: TrackedJob, target: Target) -> _Run:
    """Open the job's run, or create it."""
    return _Run(job, target)
