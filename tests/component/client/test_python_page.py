"""The blocks of docs/python.md run, one after the other, and say what they should."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from horizon_client import notebook
from horizon_client.reporter import Progress
from horizon_client.resources import Job
from horizon_server.events import EvalDone, StepDone
from horizon_server.records.job import JobState

if TYPE_CHECKING:
    from tests.component.client.conftest import Daemon

PAGE = Path(__file__).parents[3] / "docs" / "python.md"


def test_the_page_runs(
    daemon: Daemon,
    make_step: Callable[..., StepDone],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("pandas", reason="pandas is not installed")
    monkeypatch.setenv("HORIZON_SERVER", daemon.address)
    monkeypatch.setenv("HORIZON_TOKEN", daemon.token)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    said = []
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE):
        exec(compile(block, str(PAGE), "exec"), names)  # noqa: S102 - of our own page
        said.append(capsys.readouterr().out)
        if "job = client.jobs.submit" in block:  # nothing trains here
            _train(daemon, names["job"].job_id, make_step)
    text = "\n".join(said)
    assert "200 rows," in text and "True" in text
    assert re.search(r"^sums +ada +READY +200", text, re.MULTILINE), "a list is printed as a table"
    assert re.search(r"^Job\(job_id='job_\w+', name='sums-sft', .*, step=0, num_steps=\d+\)$", text, re.MULTILINE)
    assert "\n10 0.1\nSUCCEEDED" in text and "did you mean sums-sft?" in text and "['train.epochs']" in text


def _train(daemon: Daemon, job_id: str, make_step: Callable[..., StepDone]) -> None:
    job = daemon.job(job_id)
    for state in (JobState.PREPARING, JobState.STARTING, JobState.RUNNING):
        job = daemon.move(job, state)
    evaluation = EvalDone(step=10, eval_loss=0.5, num_targets=8, num_tokens=9, duration_s=1.0)
    job = daemon.append(job, *map(make_step, range(1, 11)), evaluation)
    daemon.add_checkpoint(job, 10, {"model.safetensors": b"weights", "config.json": b"{}"})
    daemon.move(job, JobState.SUCCEEDED)


def test_a_notebook_shows_a_job_and_a_list(daemon: Daemon, client: Any, make_step: Callable[..., StepDone]) -> None:
    daemon.add_job("first", *map(make_step, range(1, 6)), state=JobState.RUNNING)
    job = client.jobs.get("first")
    assert isinstance(job, Job)
    assert 'value="0.5000"' in job._repr_html_() and "step 5 of 10" in job._repr_html_()
    listed = client.jobs.list()
    assert "<td>first</td>" in listed._repr_html_() and isinstance(listed, list)
    assert str(listed).splitlines()[0].startswith("JOB_ID") and "first" in str(listed).splitlines()[1]
    assert str(client.models.list(limit=1)).splitlines()[0].startswith("NAME")
    planned = client.jobs.plan({"name": "planned", "model": "tiny-base", "dataset": "gsm8k"})
    assert "it fits" in planned._repr_html_() and "<b>planned</b>" in planned._repr_html_()
    assert len(repr(planned)) < 300


def test_a_reporter_draws_a_bar_in_the_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    class Handle:
        def update(self, html: str) -> None:
            shown.append(html)

    display = type("display", (), {"HTML": str, "display": staticmethod(lambda html, display_id: Handle())})
    monkeypatch.setitem(__import__("sys").modules, "IPython", type("IPython", (), {"display": display}))
    monkeypatch.setitem(__import__("sys").modules, "IPython.display", display)
    reporter = notebook.NotebookReporter()
    reporter.progress(Progress(phase="upload", name="a.jsonl", done_bytes=2**20, total_bytes=2**21))
    reporter.progress(Progress(phase="upload", name="a.jsonl", done_bytes=2**21, total_bytes=2**21))
    reporter.notice("a <notice>")
    assert 'value="0.5000"' in shown[0] and "upload a.jsonl 1.0 of 2.0 MiB" in shown[0]
    assert 'value="1.0000"' in shown[1] and "a &lt;notice&gt;" in shown[2]
