"""`client.checkpoints`: list, pull, merge, sample, evaluate, keep and delete the checkpoints of jobs.

A pull downloads in ranges, resumes from `.part` files, verifies sha256, and renames what is complete. It never writes
outside the folder, whatever paths the server lists, and replaces a different file only with `force`.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any

from platformdirs import user_cache_path

from horizon_client.connection import Backoff, Connection, pause_after
from horizon_client.conversion import enum_number, from_message
from horizon_client.errors import (
    BadFile,
    CorruptDownload,
    FieldViolation,
    FileConflict,
    HorizonClientError,
    InvalidRequest,
    NotFound,
    ServerFailed,
    Unavailable,
)
from horizon_client.hub import HubPush, publish, repo_of, require_hub
from horizon_client.local_files import PIECE_BYTES
from horizon_client.notebook import Listing
from horizon_client.prompts import Prompt, wire_prompts
from horizon_client.reporter import SILENT, Progress, Reporter
from horizon_client.resources import (
    Checkpoint,
    CheckpointEvaluation,
    EvaluationProgress,
    FileEntry,
    SampledPrompt,
    SampledText,
    SampleFigures,
)
from horizon_proto.v1 import checkpoint_pb2, job_pb2

if TYPE_CHECKING:
    from hashlib import _Hash

_TRAINER_PREFIX = "trainer/"
_MERGED_PREFIX = "merged/"
# A folder with one of these is a model, or an adapter, for every program that loads it
_MODEL_FILES = ("config.json", "adapter_config.json", "*.safetensors", "*.safetensors.index.json")
_ADAPTER_FILES = ("adapter_*",)
# Texts of the user's data, which are not published with a model unless that is asked for
_ANSWERS_FILE = "answers.jsonl"
_MOST_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class CheckpointPull:
    """A finished pull. `received_bytes` does not count files that existed already."""

    checkpoint: Checkpoint
    folder: str
    files: tuple[str, ...]
    received_bytes: int


@dataclass(frozen=True, kw_only=True)
class CheckpointMerge:
    """A checkpoint of an adapter after a merge, or after the merged model was removed. `folder` is "" where nothing was
    downloaded."""

    checkpoint: Checkpoint
    folder: str
    received_bytes: int


class AsyncCheckpoints:
    """`client.checkpoints`: the checkpoints of the caller's jobs."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def list(self, job: str) -> list[Checkpoint]:
        """Return the complete checkpoints of a job, oldest first; of `JOB@STEP`, `JOB@last` or `JOB@best` that one."""
        if "@" in job:
            return Listing([await self._chosen(job, "last")])
        request = checkpoint_pb2.ListCheckpointsRequest(job_id=job)
        answer = await self._connection.unary(self._connection.calls.checkpoints.ListCheckpoints, request)
        return Listing(from_message(Checkpoint, item) for item in answer.checkpoints)

    async def pull(
        self,
        job: str,
        to: str | os.PathLike[str],
        *,
        at: int | str = "last",
        with_trainer: bool = False,
        with_weights: bool = True,
        force: bool = False,
        reporter: Reporter = SILENT,
    ) -> CheckpointPull:
        """Download a checkpoint (a step, `last` or `best`) into the folder `to`, which becomes a Hugging Face model
        folder.

        `job` may name the checkpoint itself, as JOB@STEP. A pull that was interrupted continues. `with_trainer`
        downloads the trainer state as well; without `with_weights` the folder has config and tokenizer only. Of a job
        that trains adapters the folder is one that PEFT loads; `merge` downloads the merged model.

        Raises:
            NotFound: when the job has no such checkpoint.
            FileConflict: when the folder holds another model, or different files are in the way and `force` is not
                given.
            CorruptDownload: when a file does not have the listed sha256.
        """
        checkpoint = await self._chosen(job, at)
        left_out = (_MERGED_PREFIX,) if with_trainer else (_MERGED_PREFIX, _TRAINER_PREFIX)
        files = [f for f in checkpoint.files if not f.path.startswith(left_out)]
        if not with_weights:
            files = [f for f in files if not f.path.endswith(".safetensors")]
        elif any(f.path.startswith(_MERGED_PREFIX) for f in checkpoint.files):
            place = f"{checkpoint.job_id}@{checkpoint.step}"
            reporter.notice(f"this is the adapter; for the merged model: horizon checkpoint merge {place} --out DIR")
        download = _Download(self._connection, checkpoint, to, reporter)
        received_bytes = await download.fetch(files, force=force)
        return CheckpointPull(
            checkpoint=checkpoint,
            folder=str(download.folder),
            files=tuple(f.path for f in files),
            received_bytes=received_bytes,
        )

    async def merge(
        self,
        job: str,
        *,
        at: int | str = "last",
        out: str | os.PathLike[str] | None = None,
        dtype: str | None = None,
        base: str | None = None,
        remove: bool = False,
        force: bool = False,
        reporter: Reporter = SILENT,
    ) -> CheckpointMerge:
        """Have the node merge the adapter of a checkpoint into its base model, and download the result into the folder
        `out`.

        The merged model stays with the checkpoint on the node until `remove` takes it away. One that is there already
        is not made again, unless it was made with another `dtype` or `base` than you give: then the new one takes its
        place. A download that was interrupted continues. `job` may name the checkpoint itself, as JOB@STEP. `dtype` is
        source, bf16, fp16 or fp32. `base` says what the adapter is merged into where the job has kept its base in fewer
        bits (train.lora.base): trained is the base as it was trained on and evaluated, source the model folder's own
        weights. None takes what the merged model that is there was made with, else the job's checkpoint.dtype and
        checkpoint.merge_base.

        Raises:
            NotFound: when the job has no such checkpoint, or the base model is not on the node any more.
            InvalidRequest: when the checkpoint does not hold an adapter, or was written merged with another `dtype` or
                `base`.
            InUse: when the merged model that would be replaced or removed is being downloaded.
            QuotaExceeded: when the job's owner would store more than an admin allows.
            FileConflict: when `out` holds another model, or different files are in the way and `force` is not given.
            CorruptDownload: when a file does not have the listed sha256.
        """
        checkpoint = await self._chosen(job, at)
        number: Any = 0 if dtype is None else enum_number(job_pb2.CheckpointDtype, "dtype", dtype)
        onto: Any = 0 if base is None else enum_number(job_pb2.MergeBase, "base", base)
        request = checkpoint_pb2.MergeCheckpointRequest(
            job_id=checkpoint.job_id, step=checkpoint.step, dtype=number, base=onto, remove=remove
        )
        # No limit between two answers: other calls may come first, and a base is checked before it is merged.
        call = self._connection.calls.checkpoints.MergeCheckpoint
        async with aclosing(self._connection.stream(call, request, stall_s=None)) as answers:  # type: ignore[type-var]
            async for answer in answers:
                if answer.HasField("checkpoint"):
                    checkpoint = from_message(Checkpoint, answer.checkpoint)
                    continue
                done, total = answer.done_bytes, answer.total_bytes
                # The node is about to make a model, and ends that where the answers are not read any more
                if done == 0 and out is not None:
                    _require_room(_folder(out), (), force=force)
                reporter.progress(Progress(phase="merge", name="base model", done_bytes=done, total_bytes=total))
        if out is None or remove:
            return CheckpointMerge(checkpoint=checkpoint, folder="", received_bytes=0)
        # A checkpoint that was written merged is the model itself
        merged = [f for f in checkpoint.files if f.path.startswith(_MERGED_PREFIX)]
        files = merged or [f for f in checkpoint.files if not f.path.startswith(_TRAINER_PREFIX)]
        download = _Download(self._connection, checkpoint, out, reporter, prefix=_MERGED_PREFIX if merged else "")
        received_bytes = await download.fetch(files, force=force)
        return CheckpointMerge(checkpoint=checkpoint, folder=str(download.folder), received_bytes=received_bytes)

    async def push(
        self,
        job: str,
        target: str,
        *,
        at: int | str = "last",
        merged: bool = False,
        private: bool | None = None,
        token: str | None = None,
        with_answers: bool = False,
        folder: str | os.PathLike[str] | None = None,
        reporter: Reporter = SILENT,
    ) -> HubPush:
        """Publish a checkpoint on the Hugging Face hub, as `hf:ORG/NAME`: weights, tokenizer, model card and job file.

        It is pulled into `folder` first, which stays; without one, into a folder of this user's cache, which is gone
        afterwards. A push that was interrupted continues with what is missing. `merged` has the node merge an adapter,
        and publishes the merged model. `private` makes a new repository private or public; None leaves that to the
        account's setting. `token` is one of the hub; without one, that of `hf auth login` is used. The answers of the
        evaluation are texts of your data: they are published only `with_answers`. Needs `horizon-train[hub]`.

        Raises:
            BadConfig: when the extra is not installed.
            InvalidRequest: when `target` is not hf:ORG/NAME.
            NotAllowed: when the hub refuses the token.
            NotFound, FileConflict, CorruptDownload: as `pull` and `merge` do.
        """
        repo = repo_of(target)
        require_hub()
        checkpoint = await self._chosen(job, at)
        place, kept = f"{checkpoint.job_id}@{checkpoint.step}", "merged" if merged else "checkpoint"
        cache = user_cache_path("horizon") / "push" / f"{checkpoint.job_id}-{checkpoint.step}-{kept}"
        to = Path(cache if folder is None else folder)
        if merged:
            await self.merge(place, out=to, reporter=reporter)
        else:
            await self.pull(place, to, reporter=reporter)
        reporter.notice(f"publishing {to} as {repo}")
        left_out = () if with_answers else (_ANSWERS_FILE,)
        message = f"Step {checkpoint.step} of job {checkpoint.job_id}"
        pushed = await asyncio.to_thread(
            lambda: publish(to, repo, private=private, token=token, left_out=left_out, message=message)
        )
        if folder is None:
            await asyncio.to_thread(shutil.rmtree, cache, ignore_errors=True)
        return pushed

    async def sample(
        self,
        job: str,
        prompts: Prompt | Sequence[Prompt | Sequence[int]],
        *,
        at: int | str = "last",
        max_tokens: int = 256,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        top_k: int = 0,
        stop: Sequence[str] = (),
        num_samples: int = 1,
        stop_ids: Sequence[int] = (),
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
    ) -> AsyncIterator[SampledText | SampledPrompt | SampleFigures]:
        """Have a checkpoint (a step, `last` or `best`) answer prompts, and yield the text of the answers as it comes,
        then the figures.

        A prompt is a text to continue, or a chat of messages with `role` and `content`, which the model's chat template
        renders; or a row with one of them, `{"prompt": ...}` or `{"messages": [...]}`. A chat's row may have `tools`,
        and messages `tool_calls` and `tool_call_id`, as rows of a dataset. A list of tokens is continued as it is. A
        single prompt needs no list around it, unless it is tokens. `job` may name the checkpoint itself, as JOB@STEP.

        With `temperature` 0 the answers are the likeliest tokens; above it they are drawn, of the `top_k` likeliest
        where that is above 0. `num_samples` are the answers to each prompt. An answer ends before one of the texts
        `stop`, or with one of the tokens `stop_ids`. `logprobs` asks for the log-probability of each token of an
        answer, and of as many of the likeliest tokens in its place, so 0 for none of these; `prompt_logprobs` for the
        same of the prompts, which come as SampledPrompt before the answers. With it, `max_tokens` may be 0.

        Calls for the same model are answered together; those for another one wait for their turn.

        Raises:
            NotFound: when the job has no such checkpoint.
            InvalidRequest: when something is not a prompt; `violations` name it.
            DoesNotFit: when the node's jobs leave too little memory.
            InvalidModel: when the architecture cannot generate; the message names it.
        """
        given = wire_prompts(prompts)
        checkpoint = await self._chosen(job, at)
        request = checkpoint_pb2.SampleCheckpointRequest(
            job_id=checkpoint.job_id,
            step=checkpoint.step,
            prompts=given,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            top_k=top_k,
            stop=stop,
            num_samples=num_samples,
            stop_ids=stop_ids,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )
        # No limit between two answers: other calls may come first, and a large model takes minutes to load.
        call = self._connection.calls.checkpoints.SampleCheckpoint
        async for answer in self._connection.stream(call, request, stall_s=None):
            if answer.HasField("text"):
                yield from_message(SampledText, answer.text)
            elif answer.HasField("prompt"):
                yield from_message(SampledPrompt, answer.prompt)
            else:
                yield from_message(SampleFigures, answer.figures)

    async def keep(self, job: str, *, at: int | str = "last", kept: bool = True) -> Checkpoint:
        """Keep a checkpoint (a step, `last` or `best`) from being deleted automatically, or end that with `kept` False.

        A kept checkpoint stays whatever the spec's keep_last and keep_days say, until you delete it. `job` may name the
        checkpoint itself, as JOB@STEP.

        Raises:
            NotFound: when the job has no such checkpoint.
        """
        checkpoint = await self._chosen(job, at)
        request = checkpoint_pb2.KeepCheckpointRequest(job_id=checkpoint.job_id, step=checkpoint.step, kept=kept)
        answer = await self._connection.unary(self._connection.calls.checkpoints.KeepCheckpoint, request)
        return from_message(Checkpoint, answer.checkpoint)

    async def evaluate(
        self,
        job: str,
        *,
        at: int | str = "last",
        sets: Mapping[str, str] | None = None,
        reporter: Reporter = SILENT,
    ) -> CheckpointEvaluation:
        """Have the node evaluate a checkpoint (a step, `last` or `best`) as its job's own evaluations do.

        `sets` are pushed datasets by the names of their figures; without any, the job's. `job` may be JOB@STEP.

        Raises:
            NotFound, InvalidModel: when there is no such job, checkpoint or dataset; when the checkpoint is damaged.
            InvalidRequest: when the job has no eval set and none is given, or its method is not evaluated on such data.
            DoesNotFit: when the node's jobs leave too little memory.
        """
        checkpoint = await self._chosen(job, at)
        request = checkpoint_pb2.EvaluateCheckpointRequest(
            job_id=checkpoint.job_id, step=checkpoint.step, sets=dict(sets or {})
        )
        # No limit between two answers: other calls may come first, and a large model takes minutes to load.
        call = self._connection.calls.checkpoints.EvaluateCheckpoint
        async with aclosing(self._connection.stream(call, request, stall_s=None)) as answers:  # type: ignore[type-var]
            async for answer in answers:
                if answer.HasField("evaluation"):
                    return from_message(CheckpointEvaluation, answer.evaluation)
                reporter.evaluation(from_message(EvaluationProgress, answer.progress))
        raise ServerFailed("the server ended the evaluation without its figures; try again")

    async def delete(self, job: str, step: int | None = None) -> None:
        """Delete one checkpoint: of a job and a step, or JOB@STEP."""
        if step is None and "@" not in job:
            raise InvalidRequest.of(
                "step", "name the checkpoint to delete by its step: delete(JOB, STEP) or delete('JOB@STEP')"
            )
        if "@" in job:
            checkpoint = await self._chosen(job, "last" if step is None else step)
            job, step = checkpoint.job_id, checkpoint.step
        request = checkpoint_pb2.DeleteCheckpointRequest(job_id=job, step=step or 0)
        await self._connection.unary(self._connection.calls.checkpoints.DeleteCheckpoint, request, repeatable=False)

    async def _chosen(self, job: str, at: int | str) -> Checkpoint:
        """Return the checkpoint of `job`, which may be JOB@STEP, at a step, `last` or `best`."""
        name, separator, place = job.rpartition("@")
        if not separator:
            return _chosen(await self.list(job), job, at)
        if not name or not (place in ("best", "last") or place.isdecimal()):
            raise InvalidRequest.of("job", f"{job!r}: write JOB, JOB@STEP, JOB@best or JOB@last")
        if at != "last" and str(at) != place:
            raise InvalidRequest.of("at", f"{job!r} names the checkpoint already; leave out at={at!r}")
        return _chosen(await self.list(name), name, place)


def _chosen(checkpoints: Sequence[Checkpoint], job: str, at: int | str) -> Checkpoint:
    if not checkpoints:
        raise NotFound(f"job {job} has no checkpoint yet")
    if at == "last":
        return next((c for c in checkpoints if c.last), checkpoints[-1])
    steps = ", ".join(str(c.step) for c in checkpoints)
    if at == "best":
        found = next((c for c in checkpoints if c.best), None)
        missing = "no evaluated checkpoint, so none is the best; evaluate with eval_every_steps, or pull @last"
    else:
        found = next((c for c in checkpoints if str(c.step) == str(at)), None)
        missing = f"no checkpoint at step {at}; it has checkpoints at steps {steps}"
    if found is None:
        raise NotFound(f"job {job} has {missing}")
    return found


class _Download:
    """One pull into one folder."""

    def __init__(
        self,
        connection: Connection,
        checkpoint: Checkpoint,
        to: str | os.PathLike[str],
        reporter: Reporter,
        *,
        prefix: str = "",
    ) -> None:
        self._connection = connection
        self._checkpoint = checkpoint
        self._prefix = prefix
        self.folder = _folder(to)
        self._reporter = reporter
        self._done_bytes = 0
        self._total_bytes = 0

    async def fetch(self, files: Sequence[FileEntry], *, force: bool) -> int:
        """Download all files and return the number of bytes received; identical files that exist already are
        skipped."""
        targets = {entry.path: self._target(entry.path) for entry in files}
        self._total_bytes = sum(entry.size_bytes for entry in files)
        try:
            wanted = [entry for entry in files if not await self._is_complete(entry, targets[entry.path])]
            # Before anything is fetched
            _require_room(self.folder, list(targets.values()), force=True)
            # A dangling link does not exist, but is in the way
            taken = [t for t in (targets[entry.path] for entry in wanted) if t.is_symlink() or t.exists()]
            if taken and not force:
                raise FileConflict(
                    f"{taken[0]} exists and is different; choose another folder, or pass --force (force=True) to "
                    "replace it",
                    violations=[
                        FieldViolation(field=str(t), description=f"{t} exists and is different") for t in taken
                    ],
                )
            return sum([await self._fetch_file(entry, targets[entry.path]) for entry in wanted])
        except OSError as error:
            if isinstance(error, HorizonClientError):  # Unavailable is a ConnectionError, and so an OSError
                raise
            raise BadFile(f"cannot write to {self.folder}: {error.strerror} ({error.filename})") from error

    def _target(self, listed: str) -> Path:
        """Return the local path of a listed one; ServerFailed when it would be outside the folder."""
        # The same on every system: a Windows path is refused on Linux too, and the other way round
        pure = PurePosixPath(listed)
        parts = listed.removeprefix(self._prefix).split("/")
        plain = all(part not in ("", ".", "..") for part in parts) and not any(c in listed for c in "\\\0:")
        if not plain or pure.is_absolute() or PureWindowsPath(listed).is_absolute():
            raise ServerFailed(
                f"the server lists the path {listed!r:.100}, which is outside the folder; nothing was written"
            )
        target = self.folder.joinpath(*parts)
        if not target.parent.resolve().is_relative_to(self.folder.resolve()):
            raise ServerFailed(f"{target.parent} is a link to a place outside {self.folder}; nothing was written")
        return target

    async def _is_complete(self, entry: FileEntry, target: Path) -> bool:
        if _file_size(target) != entry.size_bytes:
            return False
        same = (await _hashed(target, entry.size_bytes)).hexdigest() == entry.sha256
        if same:
            self._advance(entry, entry.size_bytes)
        return same

    async def _fetch_file(self, entry: FileEntry, target: Path) -> int:
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f"{target.name}.part")
        resumed = part.exists()
        received, digest = await self._fill_part(entry, part)
        if digest != entry.sha256 and resumed:
            # The job may have written this checkpoint again since then, so one download from the start is tried
            part.unlink()
            self._reporter.notice(f"the partial download of {entry.path} is from another file; starting it again")
            self._done_bytes -= entry.size_bytes
            again, digest = await self._fill_part(entry, part)
            received += again
        if digest != entry.sha256:
            part.unlink()  # or the next pull would continue from damaged bytes
            raise CorruptDownload(
                f"{entry.path} arrived damaged: its sha256 is {digest[:12]}, not {entry.sha256[:12]}; pull it again"
            )
        part.replace(target)  # complete or not there at all, also for a program that reads the folder meanwhile
        return received

    async def _fill_part(self, entry: FileEntry, part: Path) -> tuple[int, str]:
        """Fill `part` to the listed size; return the number of bytes received and the sha256 of the whole."""
        digest = hashlib.sha256()
        offset = _usable_part_bytes(part, entry.size_bytes)
        if offset:
            digest = await _hashed(part, offset)
            self._advance(entry, offset)
        start, backoff = offset, Backoff(self._connection.stream_retry)
        with part.open("ab") as file:
            while offset < entry.size_bytes:
                before = offset
                try:
                    async for piece in self._pieces(entry.path, offset):
                        end = piece.offset + len(piece.data)
                        if piece.offset != offset or end > entry.size_bytes:
                            sent = f"bytes {piece.offset}..{end} of {entry.path}"
                            raise CorruptDownload(f"the server sent {sent}, but byte {offset} was expected")
                        # In a thread, so that a slow disk does not block the event loop
                        await asyncio.to_thread(file.write, piece.data)
                        await asyncio.to_thread(digest.update, piece.data)
                        offset = end
                        self._advance(entry, len(piece.data))
                    problem: HorizonClientError = Unavailable(
                        f"{entry.path} ended at byte {offset} of {entry.size_bytes}"
                    )
                except Unavailable as error:
                    problem = error
                if offset > before:
                    backoff.succeeded()
                if offset < entry.size_bytes:
                    await pause_after(problem, backoff, self._reporter, f"the download of {entry.path}")
            file.flush()
            # Before the rename, or a crash may leave the final name with missing bytes
            await asyncio.to_thread(os.fsync, file.fileno())
        return offset - start, digest.hexdigest()

    def _pieces(self, path: str, offset: int) -> AsyncIterator[checkpoint_pb2.ReadCheckpointFileResponse]:
        request = checkpoint_pb2.ReadCheckpointFileRequest(
            job_id=self._checkpoint.job_id, step=self._checkpoint.step, path=path, offset=offset
        )
        return self._connection.stream(self._connection.calls.checkpoints.ReadCheckpointFile, request)

    def _advance(self, entry: FileEntry, num_bytes: int) -> None:
        self._done_bytes += num_bytes
        self._reporter.progress(
            Progress(phase="download", name=entry.path, done_bytes=self._done_bytes, total_bytes=self._total_bytes)
        )


def _folder(path: str | os.PathLike[str]) -> Path:
    return Path(path).expanduser()


def _require_room(folder: Path, targets: Sequence[Path], *, force: bool) -> None:
    """Refuse a folder that holds another model: files of a model that are not among `targets`, which a download may
    replace.

    Where the targets are not known yet, `force` lets pass what a merged model may replace.
    """
    marks = _ADAPTER_FILES if force and not targets else _MODEL_FILES
    try:
        others = sorted(path for path in folder.iterdir() if path not in targets and any(map(path.match, marks)))
    except (FileNotFoundError, NotADirectoryError):
        return
    if others:
        names = ", ".join(path.name for path in others[:_MOST_NAMED]) + (", ..." if len(others) > _MOST_NAMED else "")
        raise FileConflict(
            f"{folder} holds another model ({names}); choose another folder",
            violations=[
                FieldViolation(field=str(path), description=f"{path} belongs to another model") for path in others
            ],
        )


def _file_size(path: Path) -> int | None:
    """Return the size of a plain file; None for anything else."""
    # A `.part` that is a link would be written through, to a place outside the folder
    return path.stat().st_size if path.is_file() and not path.is_symlink() else None


def _usable_part_bytes(part: Path, whole_bytes: int) -> int:
    """Return how much of an earlier download can be kept; remove it when nothing can."""
    size = _file_size(part)
    if size is None or size > whole_bytes:
        part.unlink(missing_ok=True)
        return 0
    return size


async def _hashed(path: Path, num_bytes: int) -> _Hash:
    """Return the sha256 of the first bytes of a file; each read is short, so that an interrupt is noticed."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while num_bytes > 0 and (piece := await asyncio.to_thread(file.read, min(PIECE_BYTES, num_bytes))):
            await asyncio.to_thread(digest.update, piece)
            num_bytes -= len(piece)
    return digest
