"""`horizon checkpoint`."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from horizon_client.choices import CHECKPOINT_DTYPES, MERGE_BASES
from horizon_client.cli.completion import job_names
from horizon_client.cli.deletion import add_delete
from horizon_client.cli.evaluation_views import EvaluationReporter, checkpoint_evaluation_text
from horizon_client.cli.harness import harness_of, harness_options, results_text
from horizon_client.cli.output import (
    CommandT,
    View,
    age_text,
    bytes_text,
    output_option,
    print_list,
    print_one,
    print_result,
    time_text,
)
from horizon_client.cli.pushed import field_map_of
from horizon_client.cli.root import Commands
from horizon_client.cli.sampling import Prompt, answer_text, answers, printable, read_prompts, with_system
from horizon_client.cli.session import Notices, TransferReporter, connected, endpoint_of, find_job
from horizon_client.resources import SampledText, SampleFigures

if TYPE_CHECKING:
    from horizon_client.resources import Checkpoint
    from horizon_client.sync_client import Client


def _loss(checkpoint: Checkpoint) -> str:
    return "-" if checkpoint.eval_loss is None else f"{checkpoint.eval_loss:.4f}"


def _marks(checkpoint: Checkpoint) -> str:
    marks = (("last", checkpoint.last), ("best", checkpoint.best), ("kept", checkpoint.kept))
    return " ".join(mark for mark, is_set in marks if is_set)


CHECKPOINT_VIEW: View[Checkpoint] = View(
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


@click.group(cls=Commands)
def checkpoint() -> None:
    """List, pull, merge, publish, evaluate, sample, chat with, keep and delete the checkpoints of a job."""


@checkpoint.command(name="list", epilog="\b\nExample:\n  horizon checkpoint list JOB")
@click.argument("job", shell_complete=job_names)
@output_option
@connected
def list_checkpoints(client: Client, job: str, output: str) -> None:
    """List the checkpoints of a job, oldest first."""
    print_list(client.checkpoints.list(find_job(client, job).job_id), CHECKPOINT_VIEW, output)


@checkpoint.command(
    epilog="""\b
Example:
  horizon checkpoint pull JOB --to ./tuned
  horizon checkpoint pull JOB@best --to ./tuned
  horizon checkpoint pull JOB@500 --to ./step-500 --with-trainer

\b
The result is a Hugging Face model folder; of a job that trains adapters, an
adapter folder that PEFT loads. After an interruption the same command
continues; files that exist and are identical are skipped."""
)
@click.argument("checkpoint", metavar="JOB[@STEP|@best|@last]", shell_complete=job_names)
@click.option("--to", required=True, type=click.Path(file_okay=False), metavar="DIR", help="Folder to download into.")
@click.option("--with-trainer", is_flag=True, help="Download the trainer state (optimizer, data position) as well.")
@click.option("--force", is_flag=True, help="Replace files that exist and are different.")
@output_option
@connected
def pull(client: Client, checkpoint: str, to: str, with_trainer: bool, force: bool, output: str) -> None:
    """Download a checkpoint into a local folder and verify it."""
    job, at = _job_and_place(checkpoint, default="last")
    with TransferReporter("interrupted; what has arrived is kept: the same command continues from there") as reporter:
        result = client.checkpoints.pull(
            find_job(client, job).job_id, to, at=at, with_trainer=with_trainer, force=force, reporter=reporter
        )
    place = f"step {result.checkpoint.step} of {result.checkpoint.job_id} is in {result.folder}"
    received = bytes_text(result.received_bytes)
    print_result(result, output, names=[result.folder], page=lambda: f"{place} ({received} received)")


@checkpoint.command(
    epilog="""\b
Example:
  horizon checkpoint merge JOB --out ./merged
  horizon checkpoint merge JOB@500 --out ./merged --dtype bf16
  horizon checkpoint merge JOB@500 --remove

\b
For checkpoints of jobs with train.trainable: lora. The node merges tensor by
tensor and keeps the merged model with the checkpoint, where it takes the space
of a model; --remove takes it away. Another --dtype or --base takes its place.
After an interruption the same command continues.

\b
With train.lora.base: int8 or nf4 the adapter was trained on a rounded base.
--base trained merges into that base: the result is the model that was
evaluated. --base source merges into the model folder's own weights, as PEFT
does; its figures differ a little from those of the job. horizon_merge.json in
the merged folder says which one it is."""
)
@click.argument("checkpoint", metavar="JOB[@STEP|@best|@last]", shell_complete=job_names)
@click.option(
    "--out", type=click.Path(file_okay=False), metavar="DIR", help="Folder to download the merged model into."
)
@click.option(
    "--dtype",
    type=click.Choice(CHECKPOINT_DTYPES),
    help="Number format of the merged weights. Default: as it is there already, else the job's checkpoint.dtype.",
)
@click.option(
    "--base",
    type=click.Choice(MERGE_BASES),
    help="Base to merge into. Default: as it is there already, else the job's checkpoint.merge_base (trained).",
)
@click.option(
    "--remove", is_flag=True, help="Remove the merged model from the checkpoint on the node; the adapter stays."
)
@click.option("--force", is_flag=True, help="Replace files that exist and are different.")
@output_option
@connected
def merge(
    client: Client,
    checkpoint: str,
    out: str | None,
    dtype: str | None,
    base: str | None,
    remove: bool,
    force: bool,
    output: str,
) -> None:
    """Merge a checkpoint's adapter into its base model on the node."""
    if out and remove:
        raise click.UsageError("give --out or --remove, not both")
    job, at = _job_and_place(checkpoint, default="last")
    with TransferReporter("interrupted; what is done is kept: the same command continues from there") as reporter:
        result = client.checkpoints.merge(
            find_job(client, job).job_id,
            at=at,
            out=out,
            dtype=dtype,
            base=base,
            remove=remove,
            force=force,
            reporter=reporter,
        )
    place = f"step {result.checkpoint.step} of {result.checkpoint.job_id}"
    if remove:
        text = f"{place} holds the adapter alone again"
    elif result.folder:
        text = f"{place}, merged, is in {result.folder} ({bytes_text(result.received_bytes)} received)"
    else:
        text = f"{place} has its merged model on the node; download it with --out DIR"
    print_result(result, output, names=[result.folder or place], page=lambda: text)


@checkpoint.command(
    epilog="""\b
Example:
  horizon checkpoint push JOB hf:my-lab/gsm8k-lora --private
  horizon checkpoint push JOB@best hf:my-lab/gsm8k-8b --merged

\b
Weights, tokenizer, model card and job.yaml are published; the answers of the
evaluation, which are texts of your data, only with --with-answers. After an
interruption the same command continues with what is missing.
Needs: pip install 'horizon-train[hub]'"""
)
@click.argument("checkpoint", metavar="JOB[@STEP|@best|@last]", shell_complete=job_names)
@click.argument("target", metavar="hf:ORG/NAME")
@click.option("--merged", is_flag=True, help="Have the node merge the adapter, and publish the merged model.")
@click.option("--private/--public", default=None, help="Make a new repository so. Default: the account's setting.")
@click.option(
    "--hub-token-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with a token of the hub. Default: the one of hf auth login, or HF_TOKEN.",
)
@click.option("--with-answers", is_flag=True, help="Publish answers.jsonl too.")
@click.option(
    "--to", type=click.Path(file_okay=False), metavar="DIR", help="Download into this folder first, and keep it."
)
@output_option
@connected
def push(
    client: Client,
    checkpoint: str,
    target: str,
    merged: bool,
    private: bool | None,
    hub_token_file: Path | None,
    with_answers: bool,
    to: str | None,
    output: str,
) -> None:
    """Publish a checkpoint on the Hugging Face hub."""
    job, at = _job_and_place(checkpoint, default="last")
    with TransferReporter("interrupted; what is done is kept: the same command continues from there") as reporter:
        result = client.checkpoints.push(
            find_job(client, job).job_id,
            target,
            at=at,
            merged=merged,
            private=private,
            token=None if hub_token_file is None else hub_token_file.read_text("utf-8").strip(),
            with_answers=with_answers,
            folder=to,
            reporter=reporter,
        )
    print_result(result, output, names=[result.url], page=lambda: f"published as {result.repo}: {result.url}")


@checkpoint.command(
    name="eval",
    epilog="""\b
Example:
  horizon checkpoint eval JOB
  horizon checkpoint eval JOB@best --set gsm8k=gsm8k-test --set general=chats
  horizon checkpoint eval JOB@500 -o json
  horizon checkpoint eval JOB@best --tasks gsm8k,hellaswag --limit 200
  horizon checkpoint eval JOB@best --tasks ours --include-path ./tasks

\b
Without --set it is on the eval sets of the job, and gives the figures of the
job's own evaluation of that step; a note says what may differ in the last
digits. It uses the node's processors and memory besides its jobs. Ctrl-C ends
it on the node too.

\b
--tasks runs lm-evaluation-harness here instead, and the node answers its
questions. The results are kept in the job's record: 'job get' and 'job compare'
show them. Needs: pip install 'horizon-train[eval]'""",
)
@click.argument("checkpoint", metavar="JOB[@STEP|@best|@last]", shell_complete=job_names)
@click.option(
    "--set",
    "sets",
    multiple=True,
    metavar="NAME=DATASET",
    help="A pushed dataset to evaluate on, by the name that its figures have. Repeatable; default: the job's sets.",
)
@harness_options
@output_option
@connected
def evaluate(client: Client, checkpoint: str, sets: tuple[str, ...], output: str, **of_harness: Any) -> None:
    """Evaluate a checkpoint on the node, or with lm-evaluation-harness."""
    job, at = _job_and_place(checkpoint, default="last")
    if harness := harness_of(of_harness, with_sets=bool(sets)):
        done = harness.evaluate(client, find_job(client, job), at, endpoint_of(click.get_current_context()))
        print_result(done, output, names=[f"{done.job_id}@{done.step}"], page=lambda: results_text(done.results))
        return
    given = _sets_of(sets)
    job_id = find_job(client, job).job_id
    with EvaluationReporter() as reporter:
        found = client.checkpoints.evaluate(job_id, at=at, sets=given, reporter=reporter)
    names = [] if found.figures is None else [f"{job_id}@{found.figures.step}"]
    print_result(found, output, names=names, page=lambda: checkpoint_evaluation_text(found))


_SAMPLING = (
    click.option(
        "--max-tokens", type=int, default=256, show_default=True, help="Maximum number of tokens of an answer."
    ),
    click.option(
        "--temperature", type=float, default=0.0, show_default=True, help="0 takes the likeliest token; above, draws."
    ),
    click.option(
        "--top-p", type=float, default=1.0, show_default=True, help="Draw among the likeliest tokens with this share."
    ),
    click.option(
        "--top-k", type=int, default=0, show_default=True, help="Draw among as many of the likeliest tokens; 0: all."
    ),
    click.option("--stop", multiple=True, metavar="TEXT", help="A text that ends an answer before it. Repeatable."),
    click.option("--seed", type=int, default=0, show_default=True, help="Equal seeds draw equal answers."),
)


def _sampling_options(command: CommandT) -> CommandT:
    for option in reversed(_SAMPLING):
        command = option(command)
    return command


@checkpoint.command(
    epilog="""\b
Example:
  horizon checkpoint sample JOB --prompts prompts.jsonl
  horizon checkpoint sample JOB --prompt "Who wrote Faust?" --system "Be brief."
  horizon checkpoint sample JOB --prompts gsm8k.jsonl --map prompt=question
  horizon checkpoint sample JOB@best --prompts prompts.jsonl --temperature 0.7 --out answers.jsonl
  horizon checkpoint sample JOB --prompt "The lab" --temperature 1 --num-samples 4 --stop "." --logprobs 5

\b
A line of the file is {"prompt": "a text to continue"} or
{"messages": [{"role": "user", "content": "a question"}]}; a chat may have
tools and tool_calls, as in a dataset.
A base that the job has kept in fewer bits (train.lora.base) answers as it was
trained on, as in the job's evaluations."""
)
@click.argument("checkpoint", metavar="JOB[@STEP|@best|@last]", shell_complete=job_names)
@click.option("--prompts", type=click.Path(exists=True, dir_okay=False), metavar="FILE", help="Prompts, as JSON lines.")
@click.option(
    "--prompt",
    "texts",
    multiple=True,
    metavar="TEXT",
    help="A text to continue; with --system, the user's message of a chat. Repeatable.",
)
@click.option(
    "--system", metavar="TEXT", help="System message of every chat; texts become the user's message after it."
)
@click.option(
    "--map",
    "field_map",
    multiple=True,
    metavar="FIELD=COLUMN",
    help="Column that holds a field (prompt, messages, tools) of the file; repeatable.",
)
@_sampling_options
@click.option("--num-samples", type=int, default=1, show_default=True, help="Answers to each prompt.")
@click.option(
    "--logprobs",
    type=int,
    metavar="K",
    help="Log-probability of each token, and of the K likeliest tokens in its place; 0: of none of these.",
)
@click.option("--out", type=click.Path(dir_okay=False), metavar="FILE", help="Write the answers as JSON lines.")
@connected
def sample(
    client: Client,
    checkpoint: str,
    prompts: str | None,
    texts: tuple[str, ...],
    system: str | None,
    field_map: tuple[str, ...],
    out: str | None,
    num_samples: int,
    logprobs: int | None,
    **options: Any,
) -> None:
    """Have a checkpoint answer prompts on the node."""
    job, at = _job_and_place(checkpoint, default="last")
    if not prompts and not texts:
        raise click.UsageError("give --prompts FILE or --prompt TEXT")
    given: list[Prompt] = [*(read_prompts(Path(prompts), field_map_of(field_map)) if prompts else ()), *texts]
    if system:
        given = [with_system(prompt, system) for prompt in given]
    found = find_job(client, job)
    pieces = client.checkpoints.sample(
        found.job_id, given, at=at, num_samples=num_samples, logprobs=logprobs, **options
    )
    found_answers = answers(pieces, given, Notices(), num_samples=num_samples, has_logprobs=logprobs is not None)
    with Path(out).open("w", encoding="utf-8") if out else contextlib.nullcontext() as file:
        for answer in found_answers:
            if file is not None:
                file.write(json.dumps(answer, ensure_ascii=False) + "\n")
                file.flush()
            else:
                click.echo(answer_text(answer))


@checkpoint.command(
    epilog="""\b
Example:
  horizon checkpoint chat JOB
  horizon checkpoint chat JOB@best --temperature 0.7

\b
An empty line ends the chat. --system begins it with a system message. The node keeps the model in memory
for a while after an answer (a minute, unless an admin sets sampling_keep_s), and loads it again later.
A base that the job has kept in fewer bits (train.lora.base) answers as it was
trained on."""
)
@click.argument("checkpoint", metavar="JOB[@STEP|@best|@last]", shell_complete=job_names)
@click.option("--system", metavar="TEXT", help="System message of the chat.")
@_sampling_options
@connected
def chat(client: Client, checkpoint: str, system: str | None, **options: Any) -> None:
    """Talk with a checkpoint on the node."""
    job, at = _job_and_place(checkpoint, default="last")
    job_id = find_job(client, job).job_id
    messages = [{"role": "system", "content": system}] if system else []
    answered_with = ""
    while question := click.prompt(">", prompt_suffix=" ", default="", show_default=False):
        messages.append({"role": "user", "content": question})
        said = ""
        for piece in client.checkpoints.sample(job_id, [messages], at=at, **options):
            if isinstance(piece, SampledText):
                said += piece.text
                click.echo(printable(piece.text), nl=False)
            elif isinstance(piece, SampleFigures) and piece.weights != answered_with:
                answered_with = piece.weights
                Notices().notice(f"answered with {answered_with}")
        click.echo()
        messages.append({"role": "assistant", "content": said})


@checkpoint.command(
    epilog="""\b
Example:
  horizon checkpoint keep JOB@500
  horizon checkpoint keep JOB@500 --undo

\b
The job's checkpoint.keep_last and checkpoint.keep_days then leave it alone;
'checkpoint list' marks it as kept. 'horizon job keep' keeps all those of an
ended job."""
)
@click.argument("checkpoint", metavar="JOB[@STEP|@best|@last]", shell_complete=job_names)
@click.option("--undo", is_flag=True, help="Keep it no longer: it may be deleted automatically again.")
@output_option
@connected
def keep(client: Client, checkpoint: str, undo: bool, output: str) -> None:
    """Keep a checkpoint from being deleted automatically."""
    job, at = _job_and_place(checkpoint, default="last")
    found = client.checkpoints.keep(find_job(client, job).job_id, at=at, kept=not undo)
    told = "may be deleted automatically again" if undo else "is kept until you delete it"
    print_one(found, CHECKPOINT_VIEW, output, message=f"step {found.step} of {found.job_id} {told}")


add_delete(checkpoint, "checkpoint", job_names, "JOB@500")


def _sets_of(texts: tuple[str, ...]) -> dict[str, str]:
    sets: dict[str, str] = {}
    for text in texts:
        name, separator, dataset = text.partition("=")
        if not separator or not name or not dataset:
            raise click.UsageError(f"--set {text}: write NAME=DATASET")
        if name in sets:
            raise click.UsageError(f"--set {text}: there is a set {name} already; give each a name of its own")
        sets[name] = dataset
    return sets


def _job_and_place(text: str, *, default: str) -> tuple[str, int | str]:
    job, separator, place = text.rpartition("@")
    if not separator:
        return text, default
    if not job or not (place in ("best", "last") or place.isdecimal()):
        raise click.UsageError(f"{text!r}: write JOB, JOB@STEP, JOB@best or JOB@last")
    return job, int(place) if place.isdecimal() else place
