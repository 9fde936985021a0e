"""lm-evaluation-harness on a checkpoint: the program runs here, unmodified, and the node answers it through /v1."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from horizon_client.cli.output import CommandT, clean, table
from horizon_client.cli.session import Notices
from horizon_client.errors import BadFile, HarnessFailed, HorizonClientError, InvalidRequest
from horizon_client.profiles import SYSTEM_CA
from horizon_client.resources import TaskResult

if TYPE_CHECKING:
    from horizon_client.profiles import Endpoint
    from horizon_client.resources import Job
    from horizon_client.sync_client import Client

HTTP_PORT = 7172
_MODULE = "lm_eval"
# What the daemon takes of a prompt in tokens
_MOST_TOKENS = 4096
# Of a request: the node may be busy with the answers of others, and compute long rows of a large model for minutes
_TIMEOUT_S = 3600
# Those that a job's record has
_MOST_RESULTS = 200
_HEADINGS = ["TASK", "METRIC", "VALUE", "+-", "SAMPLES"]
_OPTIONS = (
    click.option("--tasks", metavar="A,B", help="Tasks of lm-evaluation-harness, which runs on this machine."),
    click.option(
        "--limit", type=click.IntRange(min=1), metavar="N", help="Use the first N documents of each task only."
    ),
    click.option("--num-fewshot", type=click.IntRange(min=0), metavar="N", help="Examples before each question."),
    click.option(
        "--include-path",
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        metavar="DIR",
        help="Folder with tasks of your own.",
    ),
    click.option(
        "--batch-size",
        type=click.IntRange(1, 64),
        default=16,
        show_default=True,
        help="Prompts of a request; for --tasks.",
    ),
    click.option(
        "--results",
        type=click.Path(file_okay=False, path_type=Path),
        metavar="DIR",
        help="Keep the program's own files of results there.",
    ),
    click.option(
        "--url", metavar="URL", help="Address of the web page and of /v1. [default: the server's host, port 7172]"
    ),
)


def harness_options(command: CommandT) -> CommandT:
    """Add the options that have lm-evaluation-harness run."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """What was measured of a checkpoint, and recorded."""

    job_id: str
    step: int
    results: Sequence[TaskResult]


@dataclass(frozen=True, kw_only=True)
class Harness:
    """What the program is to do."""

    tasks: Sequence[str]
    limit: int | None
    """Documents of each task; None for all."""
    num_fewshot: int | None
    include_path: Path | None
    """Folder with tasks of one's own."""
    batch_size: int
    results: Path | None
    """Where its own files are kept; None where they are not."""
    url: str | None

    def evaluate(self, client: Client, job: Job, at: int | str, endpoint: Endpoint) -> Evaluated:
        """Run it on a checkpoint of a job, and record what it has measured.

        Raises:
            NotAllowed: when the caller may not change the job; nothing was run then.
            HarnessFailed: when the program fails.
        """
        step = client.checkpoints.list(f"{job.job_id}@{at}")[0].step
        # Before hours of work: the caller must be allowed to record what comes of it
        client.jobs.record_task_results(job.job_id, step, [])
        with tempfile.TemporaryDirectory(prefix="horizon-eval-") as scratch:
            tokenizer, out = Path(scratch, "tokenizer"), self.results or Path(scratch, "results")
            client.checkpoints.pull(job.job_id, tokenizer, at=step, with_weights=False)
            command = self.command(f"{job.job_id}@{step}", endpoint, tokenizer, out)
            environment = {
                **os.environ,
                "OPENAI_API_KEY": endpoint.token or "",
                "TOKENIZERS_PARALLELISM": "false",
                **trusting(endpoint.ca_file, Path(scratch, "ca.pem")),
            }
            # What it prints is progress: stdout is for the result
            before = _written(out)
            done = subprocess.run(command, env=environment, stdout=2, check=False)
            if done.returncode:
                raise HarnessFailed(
                    f"lm-evaluation-harness ended with code {done.returncode}; its messages above say why. Nothing was "
                    "recorded"
                )
            found = results_in(out, self.tasks, before=before)
        try:
            recorded = client.jobs.record_task_results(job.job_id, step, found).task_results
        except HorizonClientError:
            click.echo(f"the results could not be recorded; they are:\n{results_text(found)}", err=True)
            raise
        names = {(one.task, one.metric) for one in found}
        kept = [one for one in recorded if one.step == step and (one.task, one.metric) in names]
        return Evaluated(job_id=job.job_id, step=step, results=kept)

    def command(self, model: str, endpoint: Endpoint, tokenizer: Path, out: Path) -> list[str]:
        """Return the command that asks the daemon at `endpoint`; its token goes by the environment, which other users
        cannot read."""
        scheme = "https" if endpoint.ca_file else "http"
        address = self.url or f"{scheme}://{endpoint.server.rpartition(':')[0]}:{HTTP_PORT}"
        of_model = {
            "model": model,
            "base_url": f"{address.rstrip('/')}/v1/completions",
            "tokenizer": tokenizer,
            "tokenizer_backend": "huggingface",
            "max_length": _most_tokens(tokenizer),
            "timeout": _TIMEOUT_S,
        }
        options = {
            "--model": "local-completions",
            "--model_args": ",".join(f"{name}={value}" for name, value in of_model.items()),
            "--batch_size": self.batch_size,
            "--tasks": ",".join(self.tasks),
            "--output_path": out,
            "--limit": self.limit,
            "--num_fewshot": self.num_fewshot,
            "--include_path": self.include_path,
        }
        given = [text for name, value in options.items() if value is not None for text in (name, str(value))]
        return [sys.executable, "-m", _MODULE, "run", *given]


def harness_of(options: Mapping[str, Any], *, with_sets: bool) -> Harness | None:
    """Return what the options of a command have the program do; None without --tasks.

    Raises:
        InvalidRequest: when the program is not installed, or the names of tasks are none.
    """
    if options["tasks"] is None:
        given = click.get_current_context().get_parameter_source
        unused = [name for name in options if name != "tasks" and given(name) is ParameterSource.COMMANDLINE]
        if unused:
            raise click.UsageError(f"--{unused[0].replace('_', '-')} is for lm-evaluation-harness: give --tasks too")
        return None
    if with_sets:
        raise click.UsageError("give --tasks or --set, not both")
    names = [name.strip() for name in options["tasks"].split(",") if name.strip()]
    if not names:
        raise InvalidRequest.of("tasks", "--tasks is empty; give names of tasks with commas between: --tasks a,b")
    if importlib.util.find_spec(_MODULE) is None:
        raise InvalidRequest(
            "--tasks runs lm-evaluation-harness, which is not installed: pip install 'horizon-train[eval]'"
        )
    return Harness(**{**options, "tasks": names})


def results_in(folder: Path, tasks: Sequence[str], *, before: Collection[Path] = ()) -> list[TaskResult]:
    """Return the results that the program has written last below a folder, and that were not there `before`: of these
    tasks and groups; of everything that was run, where one of the names means several.

    Raises:
        HarnessFailed: when it has written none.
    """
    written = sorted(set(_written(folder)) - {*before}, key=lambda path: path.stat().st_mtime)
    if not written:
        raise HarnessFailed("lm-evaluation-harness has written no results")
    found = json.loads(written[-1].read_text("utf-8"))
    program = f"lm_eval {found.get('lm_eval_version', '')}".strip()
    names = tasks if all(task in found["results"] for task in tasks) else [*found["results"]]
    results = []
    for task in names:
        figures, samples = found["results"].get(task, {}), found.get("n-samples", {}).get(task, {})
        for name, value in figures.items():
            metric, _, kind = name.partition(",")
            if not kind or metric.endswith("_stderr") or isinstance(value, bool | str) or value is None:
                continue
            error = figures.get(f"{metric}_stderr,{kind}")
            results.append(
                TaskResult(
                    step=0,
                    task=task,
                    metric=metric if kind == "none" else name,
                    value=float(value),
                    stderr=float(error) if isinstance(error, int | float) else None,
                    num_samples=int(samples.get("effective", 0)),
                    num_documents=int(samples.get("original", 0)),
                    version=str(found.get("versions", {}).get(task, "")),
                    program=program,
                    recorded_time=None,
                )
            )
    if not results:
        raise HarnessFailed(f"lm-evaluation-harness has no figures of {', '.join(tasks)}")
    if len(results) > _MOST_RESULTS:
        Notices().notice(f"the first {_MOST_RESULTS} of {len(results)} figures are recorded")
    return results[:_MOST_RESULTS]


def trusting(ca_file: Path | None, bundle: Path) -> dict[str, str]:
    """Return the variables with which the program trusts the daemon's CA, besides those that it trusts anyhow: its
    tasks come from the hub. They are written to `bundle`."""
    if ca_file is None or str(ca_file) == SYSTEM_CA:
        return {}
    import certifi  # only here: the extra `eval` brings it

    others = Path(os.environ.get("REQUESTS_CA_BUNDLE") or certifi.where())
    try:
        bundle.write_bytes(others.read_bytes() + b"\n" + ca_file.read_bytes())
    except OSError as error:
        raise BadFile(f"cannot read {error.filename}: {error.strerror}") from error
    return {"REQUESTS_CA_BUNDLE": str(bundle), "SSL_CERT_FILE": str(bundle)}


def _most_tokens(folder: Path) -> int:
    """Return how many tokens a prompt may have: as many as the model has positions; of an adapter, whose folder has no
    config of the model, as many as its tokenizer says."""
    for file, name in (("config.json", "max_position_embeddings"), ("tokenizer_config.json", "model_max_length")):
        if (folder / file).exists():
            positions = json.loads((folder / file).read_text("utf-8")).get(name)
            # Tokenizers say 10^30 where they know none
            if isinstance(positions, int | float) and positions >= 1:
                return int(min(positions, _MOST_TOKENS))
    return _MOST_TOKENS


def _written(folder: Path) -> list[Path]:
    return [*folder.rglob("results_*.json")]


def results_text(results: Sequence[TaskResult]) -> str:
    """Return results as a table."""
    rows = [
        [
            clean(one.task),
            clean(one.metric),
            f"{one.value:.5g}",
            "-" if one.stderr is None else f"{one.stderr:.2g}",
            samples_text(one),
        ]
        for one in results
    ]
    return table(_HEADINGS, rows)


def samples_text(one: TaskResult) -> str:
    """Return how many documents were used, and of how many where that is not all."""
    if not one.num_samples:  # a group of tasks
        return "-"
    part = f" of {one.num_documents:,}" if one.num_documents > one.num_samples else ""
    return f"{one.num_samples:,}{part}"
