"""Rows of the table of jobs as records, and what of a record is stored in which column."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections import OrderedDict
from typing import Any

from sqlalchemy import Row

from horizon_server.codec import from_json, to_plain
from horizon_server.db.tables import JobRow
from horizon_server.events import EvalDone, decode, encode
from horizon_server.records.job import ENDED, JobRecord, JobState, StopRequest
from horizon_server.records.plan import Plan
from horizon_server.records.task_result import TaskResult
from horizon_server.spec import JobSpec, parse_job_spec

_SET_BY_JOB_STORE = ("spec", "job_state")
STORED_FIELDS = tuple(
    field.name
    for field in dataclasses.fields(JobRecord)
    if field.name in JobRow.__table__.columns and field.name not in _SET_BY_JOB_STORE
)
"""Fields of a record that can be set: those that have a column."""
_ENCODED = ("plan", "data_report", "last_step", "wanted", "eval_set_ids", "task_results")
_PLAIN = tuple(name for name in STORED_FIELDS if name not in _ENCODED)
_PLAN_OR_NONE: Any = Plan | None
_TASK_RESULTS: Any = tuple[TaskResult, ...]
# The largest page. A record takes some 20 kB with its row and its message (see `api.kept`).
_KEPT_RECORDS = 1000
# The first pages of twenty users.
_KEPT_ENDED = 2000


def columns_of(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the columns that hold these fields of a record."""
    columns = dict(fields)
    if "plan" in fields:
        columns["plan"] = to_plain(fields["plan"])
    if "data_report" in fields:
        columns["data_report"] = fields["data_report"] or None
    if "last_step" in fields:
        columns["last_step"] = "" if fields["last_step"] is None else encode(fields["last_step"])
    if "wanted" in fields:
        columns["wanted"] = StopRequest(fields["wanted"]).value
    if "eval_set_ids" in fields:
        columns["eval_set_ids"] = json.dumps(fields["eval_set_ids"])
    if "task_results" in fields:
        columns["task_results"] = json.dumps(to_plain(fields["task_results"]))
    assert columns.keys() <= set(STORED_FIELDS), sorted(columns)
    return columns


def evaluations_after(job: JobRecord, done: EvalDone) -> str:
    """Return the column with the first, the best and the last evaluation of a job once one more is done.

    After a restart from a checkpoint, steps are done again: what is known of this step and of later ones counts no
    more.
    """
    done = dataclasses.replace(done, answers=())
    first = job.first_eval if job.first_eval is not None and job.first_eval.step < done.step else done
    best = job.best_eval if job.best_eval is not None and job.best_eval.step < done.step else first
    if done.judged is not None and (best.judged is None or job.spec.eval.is_better(done.judged, best.judged)):
        best = done
    return json.dumps({"first": encode(first), "best": encode(best), "last": encode(done)})


@functools.lru_cache(maxsize=4096)
def _spec(text: str) -> JobSpec:
    # A spec never changes, and reading one takes longer than all else of a row: a list of 1,000 jobs took a second of
    # the daemon.
    return parse_job_spec(json.loads(text))


class Records:
    """The records of the rows that were read last. A record that is there is returned while the stored row is equal to
    the one that it was made of, so nothing has to be invalidated. Thread: any.
    """

    def __init__(self, most: int = _KEPT_RECORDS) -> None:
        self._most = most
        self._kept: OrderedDict[int, tuple[Row[Any], JobRecord]] = OrderedDict()

    def of(self, row: Row[Any], *, queue_position: int = 0) -> JobRecord:
        """Return the record of a row of `_STORED`."""
        kept = self._kept.get(row.number)
        if kept is None or kept[0] != row:
            kept = row, record_of(row)
            self._kept[row.number] = kept
            while len(self._kept) > self._most:
                with contextlib.suppress(KeyError):  # another thread was faster
                    self._kept.popitem(last=False)
        record = kept[1]
        return dataclasses.replace(record, queue_position=queue_position) if queue_position else record


class EndedRecords:
    """The records of ended jobs that were listed last, by the number of their rows.

    Nothing else of an ended job changes than its stamp: it is resumed, gets an event, is charged for its last turn, or
    its files are kept or deleted. So a page reads the stamps, and whole rows only of jobs that go on. Thread: any.
    """

    # With the id, as the next job gets the number of the newest one where that is deleted.
    STAMP = ("job_id", "job_state", "last_sequence", "device_s", "num_tokens", "deletion_s", "keep_files")

    def __init__(self, most: int = _KEPT_ENDED) -> None:
        self._most = most
        self._kept: OrderedDict[int, tuple[tuple[Any, ...], JobRecord]] = OrderedDict()

    def of(self, row: Row[Any]) -> JobRecord | None:
        """Return the record of a row, of which only number and stamp were read; None where it is not kept, or another
        by now."""
        kept = self._kept.get(row.number)
        if kept is None or kept[0] != tuple(getattr(row, name) for name in self.STAMP):
            return None
        with contextlib.suppress(KeyError):  # another thread has dropped it
            self._kept.move_to_end(row.number)
        return kept[1]

    def keep(self, row: Row[Any], record: JobRecord) -> None:
        """Keep the record of a whole row where its job has ended."""
        if record.job_state in ENDED:
            self._kept[row.number] = tuple(getattr(row, name) for name in self.STAMP), record
            while len(self._kept) > self._most:
                with contextlib.suppress(KeyError):  # another thread was faster
                    self._kept.popitem(last=False)


def record_of(row: Row[Any]) -> JobRecord:
    """Return the record of a row of the table of jobs, whose JSON is text."""
    evaluations = json.loads(row.evaluations) if row.evaluations else {}
    return JobRecord(
        **{name: getattr(row, name) for name in _PLAIN},
        spec=_spec(row.spec),
        job_state=JobState(row.job_state),
        wanted=StopRequest(row.wanted),
        last_step=decode(row.last_step) if row.last_step else None,
        plan=from_json(_PLAN_OR_NONE, row.plan or "null"),
        data_report=json.loads(row.data_report or "null") or {},
        eval_set_ids=json.loads(row.eval_set_ids),
        task_results=from_json(_TASK_RESULTS, row.task_results),
        **{f"{which}_eval": decode(line) for which, line in evaluations.items()},
    )
