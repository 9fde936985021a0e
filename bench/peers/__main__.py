"""The engine against what one would run instead: the same model, rows, batch, type of computation and machine.

    python -m bench.peers --keep-environments FOLDER
    python -m bench.peers --dtype bfloat16 --peers plain compiled
    python -m bench.peers --peers end-to-end

Each peer is a process with an environment of its own, which the bench makes with pip. All of a contest (full
fine-tuning, LoRA, DPO) are alive at the same time and take turns of a few steps, in changing order; the first turn does
not count. Ratios are medians of the turns' ratios, in brackets the lowest and the highest. Compiling and other
preparation are not in the speed. Peak memory is the kernel's count for a peer and its children (`memory.py`), of the
steps after the first turn and of the whole life. On a GPU, where torch finds one, else on the CPU.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.gpu.machine import processor_line
from bench.peers.environments import NotInstalled, made
from bench.peers.process import PeerFailed, PeerProcess
from bench.peers.protocol import Task
from bench.peers.roster import OURS, PEERS, Contest, Peer
from horizon_server.store.cpus import available_cpus

_TITLES: dict[Contest, str] = {"full": "Full fine-tuning", "lora": "LoRA", "dpo": "DPO"}
END_TO_END = "end-to-end"


def report(text: str) -> None:
    """A line of progress, with the time."""
    print(f"{datetime.datetime.now():%H:%M:%S} {text}", file=sys.stderr, flush=True)


@dataclass
class Entrant:
    """One that takes part in a contest, and what was measured of it."""

    name: str
    title: str
    process: PeerProcess | None = None
    refusal: str = ""
    ready_s: float = 0.0
    compile_s: float = 0.0
    first_s: float = 0.0
    seconds: list[float] = field(default_factory=list)
    loss: float = 0.0

    def fail(self, error: Exception) -> None:
        """Leave the contest."""
        self.refusal = str(error)
        report(f"{self.title}: {error}")
        if self.process is not None:
            self.process.end()


class Bench:
    """The contests of one run."""

    def __init__(self, arguments: argparse.Namespace, folder: Path, environments: Path, device: str) -> None:
        self._arguments, self._folder, self._environments, self._device = arguments, folder, environments, device
        self._rounds, self._steps = arguments.rounds, arguments.steps

    def task(self, dtype: str) -> Path:
        """The file of the task, made with its model and rows where they are not there yet."""
        from bench.models import SHAPES
        from bench.peers.material import write_model, write_rows

        arguments, num_steps = self._arguments, (self._rounds + 1) * self._steps
        model = self._folder / "model"
        if not model.is_dir():
            report(f"writing the model {arguments.shape}")
            write_model(model, arguments.shape)
            write_rows(
                self._folder,
                vocab_size=SHAPES[arguments.shape]["vocab_size"],
                num_rows=num_steps * arguments.rows,
                row_tokens=arguments.row_tokens,
            )
        scratch = self._folder / "scratch"
        scratch.mkdir(exist_ok=True)
        path = self._folder / f"task-{dtype}.json"
        Task(
            model=str(model),
            data=str(self._folder),
            device=self._device,
            dtype=dtype,
            num_threads=arguments.threads,
            num_steps=num_steps,
            rows_per_step=arguments.rows,
            rows_at_once=arguments.rows_at_once,
            learning_rate=3e-4,
            lora_rank=16,
            lora_alpha=32.0,
            beta=0.1,
            scratch=str(scratch),
        ).write(path)
        return path

    def contest(self, contest: Contest, peers: Sequence[Peer], dtype: str) -> list[Entrant]:
        """Let ours and these peers take turns; ours is the first of the result."""
        task = self.task(dtype)
        entrants = [self._ours(contest, task, dtype)]
        entrants += [self._theirs(peer, task, dtype) for peer in peers]
        try:
            self._take_turns(entrants, f"{_TITLES[contest]}, {dtype}")
        finally:
            for entrant in entrants:
                if entrant.process is not None:
                    entrant.process.end()
        return entrants

    def _ours(self, contest: Contest, task: Path, dtype: str) -> Entrant:
        entrant, log = Entrant(name=OURS, title="**horizon**"), self._folder / f"ours-{contest}-{dtype}.log"
        command = [sys.executable, "-m", "bench.peers.ours"]
        report(f"{_TITLES[contest]}, {dtype}: compiling our layers")
        started_s = time.perf_counter()
        kind = "lora" if contest == "lora" else "full"
        with log.open("wb") as output:
            subprocess.run([*command, "compile", kind, str(task)], stdout=output, stderr=output, check=False)
        entrant.compile_s = time.perf_counter() - started_s
        self._start(entrant, [*command, contest, str(task)], log)
        return entrant

    def _theirs(self, peer: Peer, task: Path, dtype: str) -> Entrant:
        entrant = Entrant(name=peer.name, title=peer.title)
        try:
            python = made(self._environments, peer.environment, report)
        except NotInstalled as error:
            entrant.fail(error)
            return entrant
        command = [str(python), "-m", f"bench.peers.{peer.module}", peer.name, str(task)]
        self._start(entrant, command, self._folder / f"{peer.name}-{dtype}.log")
        return entrant

    def _start(self, entrant: Entrant, command: list[str], log: Path) -> None:
        report(f"starting {entrant.title}")
        entrant.process = PeerProcess(command, log)
        try:
            entrant.ready_s = entrant.process.wait_until_ready()
        except PeerFailed as error:
            entrant.fail(error)

    def _take_turns(self, entrants: list[Entrant], title: str) -> None:
        for number in range(self._rounds + 1):
            # Who goes first changes, so that nobody always finds the caches of the same other one.
            for entrant in sorted(entrants, key=lambda entrant: entrant.name, reverse=number % 2 == 1):
                if entrant.process is None or entrant.refusal:
                    continue
                try:
                    seconds = entrant.process.steps(self._steps)
                    if number:
                        entrant.seconds.append(seconds)
                    else:
                        entrant.first_s = seconds
                        entrant.process.memory.begin_steps()
                    if number == self._rounds:
                        # Before the held-out rows are computed, which not all compute alike.
                        entrant.process.memory.sample()
                        entrant.loss = entrant.process.held_out_loss()
                except PeerFailed as error:
                    entrant.fail(error)
            report(f"{title}: round {number} of {self._rounds}")

    def table(self, entrants: list[Entrant]) -> list[str]:
        """The rows of a contest."""
        ours, tokens = entrants[0], self._steps * self._arguments.rows * self._arguments.row_tokens
        lines = [
            "| what | tokens/s | ours is times as fast | peak MiB, steps | ours / its | peak MiB, whole life | "
            "ours / its | held-out loss | preparing s |",
            "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        ]
        for entrant in entrants:
            if entrant.refusal or entrant.process is None:
                lines.append(f"| {entrant.title} | failed: {entrant.refusal} | | | | | | | |")
                continue
            speed = tokens / statistics.median(entrant.seconds)
            peaks = [entrant.process.memory.steps_bytes, entrant.process.memory.whole_bytes]
            ratios = ["", "", ""]
            if entrant is not ours and ours.process is not None and not ours.refusal:
                found = sorted(theirs / own for own, theirs in zip(ours.seconds, entrant.seconds, strict=True))
                ratios[0] = f"{statistics.median(found):.2f} ({found[0]:.2f} to {found[-1]:.2f})"
                own = [ours.process.memory.steps_bytes, ours.process.memory.whole_bytes]
                ratios[1:] = [f"{mine / its:.2f}" for mine, its in zip(own, peaks, strict=True)]
            # What the first turn took beyond another one is preparation too: torch.compile works in it.
            preparing = entrant.ready_s + entrant.compile_s + entrant.first_s - statistics.median(entrant.seconds)
            lines.append(
                f"| {entrant.title} | {speed:,.0f} | {ratios[0]} | {peaks[0] >> 20:,} | {ratios[1]} | "
                f"{peaks[1] >> 20:,} | {ratios[2]} | {entrant.loss:.4f} | {preparing:.0f} |"
            )
        return lines


def main() -> int:
    """Run the contests and print their tables."""
    names = [peer.name for peer in PEERS]
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="40m", help="of bench/models.py")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--peers", choices=[*names, END_TO_END], nargs="*", default=[*names, END_TO_END])
    parser.add_argument("--rounds", type=int, default=5, help="turns of each that count")
    parser.add_argument("--steps", type=int, default=3, help="of a turn")
    parser.add_argument("--rows", type=int, default=4, help="of a step")
    parser.add_argument("--row-tokens", type=int, default=512)
    parser.add_argument("--rows-at-once", type=int, default=4, help="that peers compute together")
    parser.add_argument("--threads", type=int, default=available_cpus())
    parser.add_argument("--keep-environments", type=Path, metavar="FOLDER", help="and use those that are there")
    arguments = parser.parse_args()
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = [peer for peer in PEERS if peer.name in arguments.peers and device in peer.devices]
    today = datetime.datetime.now(datetime.UTC).date()
    print(
        f"{today}, {processor_line()}, Python {platform.python_version()}, torch {torch.__version__}; "
        f"`python -m bench.peers {' '.join(sys.argv[1:])}`\n",
        flush=True,
    )
    with tempfile.TemporaryDirectory(prefix="horizon-peers-") as temporary:
        environments = (arguments.keep_environments or Path(temporary) / "environments").absolute()
        folder = Path(temporary) / "run"
        folder.mkdir()
        bench = Bench(arguments, folder, environments, device)
        for contest in _TITLES:
            peers = [peer for peer in chosen if peer.contest == contest]
            for dtype in arguments.dtype if peers else []:
                entrants = bench.contest(contest, peers, dtype)
                print(f"### {_TITLES[contest]}, {dtype}\n", *bench.table(entrants), sep="\n", end="\n\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
