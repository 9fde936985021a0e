"""From files to a trained model: a job through a daemon against TRL's SFTTrainer, on real chats.

Both train tiny-base on gsm8k's questions and answers, on the answers only, in steps of about 4,096 tokens, and save the
result. TRL runs with its packing and with padded batches of chats of like length; runs take turns. The whole time has
everything from the files to the saved model: for the job the push of model and data, its preparation and its
evaluations; for TRL the start of Python, its preparation and the pass over the held-out chats.

Memory is that of the daemon with all its children, and of TRL's process (`memory.py`).
"""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.daemon_process import DaemonProcess
from tokenizers import Tokenizer

from bench.peers.memory import MemoryWatch
from bench.peers.process import PeerFailed, environment
from horizon_client import Client
from horizon_client.job_spec_types import JobSpec

SHARED = Path(__file__).resolve().parents[3] / "shared"
MODEL, CHATS = Path("models") / "tiny-base", Path("data") / "gsm8k_train.jsonl"
NUM_HELD_OUT = 200
LEARNING_RATE, WARMUP_STEPS = 5e-4, 5
SEQUENCE_LENGTH, TOKENS_PER_STEP = 1024, 4096
VARIANTS = {"padded": "TRL SFTTrainer, padded", "packed": "TRL SFTTrainer, packed"}


@dataclass
class Runs:
    """What one of them did, run by run."""

    title: str
    num_tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)
    loss: float = 0.0
    num_held_out: int = 0
    refusal: str = ""


def missing(shared: Path) -> str:
    """Why it cannot run; empty where it can."""
    absent = [str(path) for path in (MODEL, CHATS) if not (shared / path).exists()]
    return f"needs {' and '.join(absent)} in {shared.name}" if absent else ""


class EndToEnd:
    """The runs of both, in turn."""

    def __init__(
        self,
        folder: Path,
        python: Path,
        shared: Path,
        *,
        num_steps: int,
        num_threads: int,
        device: str,
        report: Callable[[str], None],
    ) -> None:
        self._folder, self._python, self._report = folder, python, report
        self._model, self._chats = (shared / MODEL).resolve(), shared / CHATS
        self._num_steps, self._num_threads, self._device = num_steps, num_threads, device
        self.ours = Runs("**horizon**, a job")
        self.theirs = {name: Runs(title) for name, title in VARIANTS.items()}
        self._write_data()

    def _write_data(self) -> None:
        self._training, self._held_out = self._folder / "training.jsonl", self._folder / "held_out.jsonl"
        with self._chats.open(encoding="utf-8") as lines:
            rows = [json.loads(line) for line in lines]
        chats = [
            {
                "messages": [
                    {"role": "user", "content": row["question"]},
                    {"role": "assistant", "content": row["answer"]},
                ]
            }
            for row in rows
        ]
        for path, part in ((self._held_out, chats[:NUM_HELD_OUT]), (self._training, chats[NUM_HELD_OUT:])):
            path.write_text("".join(json.dumps(chat) + "\n" for chat in part), "utf-8")

    def run(self, num_rounds: int) -> None:
        """That many runs of each."""
        with Job(self._folder / "state", self._model, self._training, self._held_out, self._num_threads) as job:
            for number in range(num_rounds):
                self._report(f"end to end: round {number + 1} of {num_rounds}")
                job.run(self._num_steps, self.ours)
                for name, runs in self.theirs.items():
                    if not runs.refusal:
                        self._run_theirs(name, runs)

    def _run_theirs(self, name: str, runs: Runs) -> None:
        chats_of_step = max(1, round(TOKENS_PER_STEP / self._tokens_per_chat()))
        settings = self._folder / f"chats-{name}.json"
        settings.write_text(
            json.dumps(
                {
                    "model": str(self._model),
                    "training": str(self._training),
                    "held_out": str(self._held_out),
                    "output": str(self._folder / "trained"),
                    "device": self._device,
                    "num_threads": self._num_threads,
                    "num_steps": self._num_steps,
                    "sequence_length": SEQUENCE_LENGTH,
                    "rows_of_step": TOKENS_PER_STEP // SEQUENCE_LENGTH,
                    "chats_of_step": chats_of_step,
                    "learning_rate": LEARNING_RATE,
                    "warmup_steps": WARMUP_STEPS,
                }
            ),
            "utf-8",
        )
        log = self._folder / f"chats-{name}.log"
        started_s = time.perf_counter()
        with log.open("wb") as errors:
            process = subprocess.Popen(
                [str(self._python), "-m", "bench.peers.chats", name, str(settings)],
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment(self._python.parent),
            )
            memory = MemoryWatch(process.pid)
            output, _ = process.communicate()
        memory.stop()
        if process.returncode:
            lines = [line for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
            runs.refusal = str(PeerFailed(f"ended with {process.returncode}: {lines[-1][:200] if lines else ''}"))
            self._report(f"{runs.title}: {runs.refusal}")
            return
        answer = json.loads(output.splitlines()[-1])
        runs.whole_s.append(time.perf_counter() - started_s)
        runs.seconds.append(answer["seconds"])
        runs.num_tokens.append(answer["num_tokens"])
        runs.peak_bytes.append(memory.whole_bytes)
        runs.loss, runs.num_held_out = answer["loss"], answer["num_held_out"]

    def _tokens_per_chat(self) -> float:
        """Of the held-out ones, by the model's tokenizer; the template adds a few."""
        tokenizer = Tokenizer.from_file(str(self._model / "tokenizer.json"))
        with self._held_out.open(encoding="utf-8") as lines:
            chats = [json.loads(line)["messages"] for line in lines]
        texts = ["\n".join(f"{turn['role']}\n{turn['content']}" for turn in chat) for chat in chats]
        return statistics.mean(len(encoding.ids) for encoding in tokenizer.encode_batch(texts))

    def table(self) -> list[str]:
        """A row each."""
        lines = [
            "| what | tokens | tokens/s in training | ours is times as fast | tokens/s of the whole | ours is times as "
            "fast | peak MiB | ours / its | held-out loss | its tokens |",
            "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        ]
        for runs in (self.ours, *self.theirs.values()):
            if runs.refusal or not runs.seconds:
                lines.append(f"| {runs.title} | failed: {runs.refusal} | | | | | | | | |")
                continue
            cells = [f"{runs.num_tokens[-1]:,}"]
            for own, other in ((self.ours.seconds, runs.seconds), (self.ours.whole_s, runs.whole_s)):
                rates = [
                    [n / s for n, s in zip(r.num_tokens, t, strict=True)] for r, t in ((self.ours, own), (runs, other))
                ]
                found = sorted(ours / its for ours, its in zip(*rates, strict=True))
                cells.append(f"{statistics.median(rates[1]):,.0f}")
                cells.append(
                    "" if runs is self.ours else f"{statistics.median(found):.2f} ({found[0]:.2f} to {found[-1]:.2f})"
                )
            peak = statistics.median(runs.peak_bytes)
            share = "" if runs is self.ours else f"{statistics.median(self.ours.peak_bytes) / peak:.2f}"
            cells += [f"{int(peak) >> 20:,}", share, f"{runs.loss:.4f}", f"{runs.num_held_out:,}"]
            lines.append(f"| {runs.title} | {' | '.join(cells)} |")
        return lines


class Job:
    """A daemon that trains one job after the other."""

    def __init__(self, state: Path, model: Path, training: Path, held_out: Path, num_threads: int) -> None:
        self._daemon = DaemonProcess(state, "--log-level", "error", num_threads=num_threads)
        self._model, self._training, self._held_out, self._number = model, training, held_out, 0

    def __enter__(self) -> Job:
        self._daemon.start()
        self._token = self._daemon.user("you")
        return self

    def __exit__(self, *error: object) -> None:
        self._daemon.close()

    def run(self, num_steps: int, runs: Runs) -> None:
        """Push, submit and wait. Raises AssertionError: the job failed."""
        self._number += 1
        name = f"run-{self._number}"
        memory = MemoryWatch(self._daemon.pid)
        started_s = time.perf_counter()
        with self._daemon.client(self._token) as client:
            client.models.push(self._model, name=name)
            client.datasets.push([self._training], name=name)
            client.datasets.push([self._held_out], name=f"{name}-held-out")
            spec: JobSpec = {
                "name": name,
                "model": name,
                "dataset": name,
                "eval_dataset": f"{name}-held-out",
                "train": {
                    "max_steps": num_steps,
                    "sequence_length": SEQUENCE_LENGTH,
                    "tokens_per_step": TOKENS_PER_STEP,
                    "learning_rate": LEARNING_RATE,
                    "lr_schedule": "constant",
                    "warmup_steps": WARMUP_STEPS,
                    "weight_decay": 0.0,
                },
            }
            job = client.jobs.submit(spec)
            for _ in client.jobs.watch(job.job_id):
                pass
            whole_s = time.perf_counter() - started_s
            self._record(client, job.job_id, runs)
        memory.stop()
        runs.whole_s.append(whole_s)
        runs.peak_bytes.append(memory.whole_bytes)

    @staticmethod
    def _record(client: Client, job_id: str, runs: Runs) -> None:
        job = client.jobs.get(job_id)
        assert job.state == "SUCCEEDED" and job.last_eval is not None, f"{job.state}: {job.message}"
        steps = [event for event in client.jobs.watch(job_id) if event.kind == "step"]
        first, last = steps[0], steps[-1]
        assert first.time is not None and last.time is not None
        # With what lies between steps.
        runs.seconds.append(first.duration_s + (last.time - first.time).total_seconds())
        runs.num_tokens.append(job.num_tokens)
        runs.loss, runs.num_held_out = job.last_eval.eval_loss, job.last_eval.num_targets
