"""`horizon plan`: what a job would take on a machine that is only asked about."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from horizon_client.cli.completion import model_names, spec_keys
from horizon_client.cli.job_views import prediction_page
from horizon_client.cli.output import output_option, print_result
from horizon_client.cli.session import TransferReporter, connected

if TYPE_CHECKING:
    from horizon_client.job_spec import SpecLike
    from horizon_client.sync_client import Client

_GIB = 1 << 30
_TERA = 10**12
_RATE = click.FloatRange(min=0, min_open=True)


@click.command(
    epilog="""\b
Example:
  horizon plan --gpu h100 --host-gbps 200 --model qwen-7b --tokens-per-step 65536 --sequence-length 4096
  horizon plan job.yaml --gpu l40s --host-gbps 120 --link-gbps 20 --set train.max_grad_norm=null
  horizon plan job.yaml --gpu h200 --host-gbps 400 --host-gib 256 --drive-read-gbps 27 --drive-write-gbps 11

\b
Exit code 0 when the job fits that machine, 1 when it does not."""
)
@click.argument("spec", metavar="[SPEC.yaml]", required=False, type=click.Path())
@click.option(
    "--gpu", required=True, metavar="NAME", help="GPU of the machine, such as h100; an unknown name lists all."
)
@click.option(
    "--host-gbps", required=True, type=_RATE, metavar="GB/S", help="Bandwidth of its host memory, in GB per second."
)
@click.option(
    "--link-gbps",
    type=_RATE,
    metavar="GB/S",
    help="Bandwidth of its link, each way. [default: what such a GPU reaches]",
)
@click.option("--host-gib", type=_RATE, metavar="GIB", help="Its host memory. [default: as much as the job needs]")
@click.option(
    "--drive-read-gbps",
    type=_RATE,
    metavar="GB/S",
    help="What its drives for states (memory.tier: drive) are read at, all of them together. [default: no drives]",
)
@click.option("--drive-write-gbps", type=_RATE, metavar="GB/S", help="What they are written at.")
@click.option(
    "--drive-tbw", type=_RATE, metavar="TB", help="What they are rated to be written, in TB, all of them together."
)
@click.option("--model", metavar="NAME", shell_complete=model_names, help="Model, instead of a job file.")
@click.option("--tokens-per-step", type=int, metavar="N", help="Replaces train.tokens_per_step.")
@click.option("--sequence-length", type=int, metavar="N", help="Replaces train.sequence_length.")
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="FIELD=VALUE",
    shell_complete=spec_keys,
    help="Change a field of the job (repeatable).",
)
@output_option
@connected
def plan(
    client: Client,
    spec: str | None,
    gpu: str,
    host_gbps: float,
    link_gbps: float | None,
    host_gib: float | None,
    drive_read_gbps: float | None,
    drive_write_gbps: float | None,
    drive_tbw: float | None,
    model: str | None,
    tokens_per_step: int | None,
    sequence_length: int | None,
    overrides: tuple[str, ...],
    output: str,
) -> int:
    """Predict a job's speed on a machine that you do not have.

    Give a job file, or --model. The server computes the prediction from the GPU's data sheet, or from its own
    measurements where it has such a GPU. A model folder on your disk is pushed first; the dataset is not read.
    """
    if spec is None and model is None:
        raise click.UsageError(
            "give a job file or --model; for example: horizon plan --model NAME --gpu h100 --host-gbps 200"
        )
    job: SpecLike = spec if spec is not None else {"name": "plan", "model": model or "", "dataset": ""}
    given = {"model": model, "train.tokens_per_step": tokens_per_step, "train.sequence_length": sequence_length}
    settings = [f"{field}={value}" for field, value in given.items() if value is not None]
    with TransferReporter("interrupted; what was uploaded is kept") as reporter:
        planned = client.jobs.plan_elsewhere(
            job,
            gpu=gpu,
            host_gbps=host_gbps,
            link_gbps=link_gbps,
            host_memory_bytes=None if host_gib is None else int(host_gib * _GIB),
            drive_read_gbps=drive_read_gbps,
            drive_write_gbps=drive_write_gbps,
            drive_endurance_bytes=None if drive_tbw is None else int(drive_tbw * _TERA),
            overrides=(*settings, *overrides),
            reporter=reporter,
        )
    link = "its usual link" if link_gbps is None else f"link {link_gbps:g} GB/s"
    machine = f"{gpu}, host memory {host_gbps:g} GB/s, {link}"
    if drive_read_gbps is not None:
        machine += f", drives {drive_read_gbps:g} / {drive_write_gbps:g} GB/s"
    names = ["fits" if planned.plan.fits else "does-not-fit"]
    print_result(planned, output, names=names, page=lambda: prediction_page(planned, machine))
    return 0 if planned.plan.fits else 1
