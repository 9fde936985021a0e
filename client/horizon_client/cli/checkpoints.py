"""`horizon checkpoint`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from horizon_client.cli.output import View, output_option, print_list, print_one, print_plain
from horizon_client.cli.root import Interrupted
from horizon_client.cli.session import connected
from horizon_client.cli.text import age_text, bytes_text, time_text
from horizon_client.cli.transfer_view import TransferView

if TYPE_CHECKING:
    from horizon_client.resources import Checkpoint
    from horizon_client.sync_client import Client


def _loss(checkpoint: Checkpoint) -> str:
    return "-" if checkpoint.eval_loss is None else f"{checkpoint.eval_loss:.4f}"


def _marks(checkpoint: Checkpoint) -> str:
    return " ".join(mark for mark, is_so in (("last", checkpoint.last), ("best", checkpoint.best)) if is_so)


_VIEW: View[Checkpoint] = View(
    columns=[
        ("STEP", lambda c: str(c.step)),
        ("EVAL LOSS", _loss),
        ("SIZE", lambda c: bytes_text(c.size_bytes)),
        ("AGE", lambda c: age_text(c.create_time)),
        ("", _marks),
    ],
    details=lambda c: [
        ("job", c.job_id),
        ("step", str(c.step)),
        ("eval loss", _loss(c)),
        ("size", bytes_text(c.size_bytes)),
        ("written", time_text(c.create_time)),
        ("marks", _marks(c) or "-"),
    ],
    name=lambda c: f"{c.job_id}@{c.step}",
)


@click.group()
def checkpoint() -> None:
    """List, pull and delete what a job has written."""


@checkpoint.command(name="list", epilog="\b\nExample:\n  horizon checkpoint list JOB")
@click.argument("job")
@output_option
@connected
def list_checkpoints(client: Client, job: str, output: str) -> None:
    """List the checkpoints of a job, oldest first."""
    print_list(client.checkpoints.list(job), _VIEW, output)


@checkpoint.command(
    epilog="""\b
Example:
  horizon checkpoint pull JOB --to ./tuned
  horizon checkpoint pull JOB@best --to ./tuned
  horizon checkpoint pull JOB@500 --to ./step-500 --with-trainer

\b
The folder is a Hugging Face model folder when the command has ended. After an
interruption the same command goes on where it stopped; files that are there
and identical are left alone."""
)
@click.argument("checkpoint", metavar="JOB[@STEP|@best|@last]")
@click.option("--to", required=True, metavar="DIR", help="Folder to write into.")
@click.option("--with-trainer", is_flag=True, help="Bring the trainer state (optimizer, data position) as well.")
@click.option("--force", is_flag=True, help="Replace files that are there and different.")
@output_option
@connected
def pull(client: Client, checkpoint: str, to: str, with_trainer: bool, force: bool, output: str) -> None:
    """Bring a checkpoint into a local folder, verified."""
    job, at = _job_and_place(checkpoint, default="last")
    with TransferView() as view:
        try:
            result = client.checkpoints.pull(
                job,
                to,
                at=at,
                with_trainer=with_trainer,
                force=force,
                on_progress=view.on_progress,
                on_notice=view.on_notice,
            )
        except KeyboardInterrupt:
            raise Interrupted("interrupted; what has arrived is kept: the same command goes on from there") from None
    if output in ("json", "yaml"):
        print_plain(result, output)
    elif output == "name":
        click.echo(result.folder)
    else:
        received = bytes_text(result.received_bytes)
        click.echo(
            f"step {result.checkpoint.step} of {result.checkpoint.job_id} is in {result.folder} ({received} received)"
        )


@checkpoint.command(epilog="\b\nExample:\n  horizon checkpoint delete JOB@500")
@click.argument("checkpoint", metavar="JOB@STEP")
@output_option
@connected
def delete(client: Client, checkpoint: str, output: str) -> None:
    """Delete one checkpoint, named by its step."""
    job, at = _job_and_place(checkpoint, default="")
    if not isinstance(at, int):
        raise click.UsageError("name the checkpoint to delete by its step: JOB@STEP")
    gone = next((c for c in client.checkpoints.list(job) if c.step == at), None)
    client.checkpoints.delete(gone.job_id if gone else job, at)
    if output == "table" or gone is None:
        click.echo(f"deleted step {at} of {job}")
    else:
        print_one(gone, _VIEW, output)


def _job_and_place(text: str, *, default: str) -> tuple[str, int | str]:
    job, separator, place = text.rpartition("@")
    if not separator:
        return text, default
    if not job or not (place in ("best", "last") or place.isdecimal()):
        raise click.UsageError(f"{text!r}: write JOB, JOB@STEP, JOB@best or JOB@last")
    return job, int(place) if place.isdecimal() else place
