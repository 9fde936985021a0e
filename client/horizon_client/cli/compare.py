"""`horizon job compare`: what differs between jobs, and what came of it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from horizon_client.cli.completion import job_names
from horizon_client.cli.output import duration_text, output_option, print_result, table
from horizon_client.cli.session import connected, find_job

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from horizon_client.resources import EvalEvent, Job
    from horizon_client.sync_client import Client


@click.command(
    epilog="""\b
Example:
  horizon job compare first second
  horizon job compare first second third -o json
  horizon job plot first second --figure eval_loss

\b
First the fields of the job specs that differ, then the figures that each job
ended with, or has now. --all shows equal fields too."""
)
@click.argument("job_ids", metavar="JOB JOB...", nargs=-1, required=True, shell_complete=job_names)
@click.option("--all", "every", is_flag=True, help="Show fields that are equal too.")
@output_option
@connected
def compare(client: Client, job_ids: tuple[str, ...], every: bool, output: str) -> None:
    """Show where the specs of jobs differ, and the figures of each beside the others'."""
    if len(job_ids) < 2:
        raise click.UsageError("name two jobs or more: horizon job compare JOB OTHER")
    jobs = [find_job(client, text) for text in job_ids]
    found = compared(jobs, every=every)
    print_result(found, output, names=found["jobs"], page=lambda: _page(jobs, found["spec"], found["figures"]))


def compared(jobs: Sequence[Job], *, every: bool = False) -> dict[str, Any]:
    """Return the ids of jobs, the fields of their specs that differ, and their figures, each as a list of one value a
    job."""
    spec = differences([job.spec for job in jobs], every=every)
    return {"jobs": [job.job_id for job in jobs], "spec": spec, "figures": _beside([job_figures(job) for job in jobs])}


def differences(specs: Sequence[Mapping[str, Any]], *, every: bool = False) -> dict[str, list[Any]]:
    """Return the fields that are not the same in all specs, by their dotted paths, with the value in each."""
    beside = _beside([dict(_fields(spec, "")) for spec in specs])
    return {path: values for path, values in beside.items() if every or any(value != values[0] for value in values)}


def _fields(section: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        if isinstance(value, dict):
            yield from _fields(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _beside(facts: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return each fact with its value for every job; None where a job has none."""
    names = dict.fromkeys(name for of_job in facts for name in of_job)
    return {name: [of_job.get(name) for of_job in facts] for name in names}


def job_figures(job: Job) -> dict[str, Any]:
    """Return what a job has come to."""
    figures: dict[str, Any] = {
        "state": job.state,
        "steps": job.step,
        "device_s": job.device_s,
        "tokens": job.num_tokens,
    }
    if job.last_step is not None:
        figures |= {"loss": job.last_step.loss, "grad_norm": job.last_step.grad_norm}
        figures |= {f"method/{name}": value for name, value in job.last_step.method_figures.items()}
        figures["tokens_per_second"] = job.last_step.tokens_per_second
        figures["host_memory_bytes"] = sum(job.last_step.host_memory_bytes.values())
    for which, event in (("first", job.first_eval), ("last", job.last_eval), ("best", job.best_eval)):
        if event is not None:
            figures |= {f"{which} {name}": value for name, value in _of_evaluation(event).items()}
    # Of several checkpoints, what was recorded last
    return figures | {f"{one.task}/{one.metric}": one.value for one in job.task_results}


def _of_evaluation(event: EvalEvent) -> dict[str, Any]:
    figures: dict[str, Any] = {"eval step": event.step, "eval_loss": event.eval_loss}
    for one in event.sets:
        for name in ("perplexity", "accuracy", "exact_match"):
            if (value := getattr(one, name)) is not None:
                figures[f"{one.name}/{name}"] = value
    return figures


def _page(jobs: Sequence[Job], spec: Mapping[str, list[Any]], figures: Mapping[str, list[Any]]) -> str:
    names = [job.name for job in jobs]
    # Jobs of one name are told apart by their ids
    heads = [job.job_id if names.count(job.name) > 1 else job.name for job in jobs]
    fields = [[path, *map(_value, values)] for path, values in spec.items()]
    rows = [[name, *(_figure(name, value) for value in values)] for name, values in figures.items()]
    above = table(["FIELD", *heads], fields) if fields else "the specs are equal"
    return f"{above}\n\n{table(['FIGURE', *heads], rows)}"


def _value(value: Any) -> str:
    return value if isinstance(value, str) else "-" if value is None else json.dumps(value)


def _figure(name: str, value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or "-"
    if name == "device_s":
        return duration_text(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.5g}"
