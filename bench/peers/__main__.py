"""The engine against what one would run instead: the same model, rows, batch, type of computation and machine.

    python -m bench.peers --keep-environments FOLDER
    python -m bench.peers --dtype bfloat16 --peers plain compiled
    python -m bench.peers --peers end-to-end

Each peer is a process with an environment of its own, which the bench makes with pip. All of a contest (full
fine-tuning, LoRA, DPO) are alive at the same time and take turns of a few steps, in changing order; the first turn does
not count. Ratios are medians of the turns' ratios, in brackets the lowest and the highest; those of processor seconds
are the surer ones where other work disturbs. Compiling and other preparation are not in the speed. Peak memory is the
kernel's count for a peer and its children (`memory.py`), of the steps after the first turn and of the whole life. On a
GPU, where torch finds one, else on the CPU.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.gpu.machine import processor_line
from bench.peers import published
from bench.peers.contest import Entrant, report, table, take_turns
from bench.peers.end_to_end import SHARED, EndToEnd, missing
from bench.peers.environments import NotInstalled, made
from bench.peers.protocol import Task
from bench.peers.roster import OURS, PEERS, Contest, Peer
from horizon_server.store.cpus import available_cpus

_TITLES: dict[Contest, str] = {"full": "Full fine-tuning", "lora": "LoRA", "dpo": "DPO"}
END_TO_END = "end-to-end"


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
            library=str(self._environments / "compiled-layers"),
            scratch=str(scratch),
        ).write(path)
        return path

    def contest(self, contest: Contest, peers: Sequence[Peer], dtype: str) -> list[Entrant]:
        """Let ours and these peers take turns; ours is the first of the result."""
        task = self.task(dtype)
        entrants = [self._ours(contest, task, dtype)]
        entrants += [self._theirs(peer, task, dtype) for peer in peers]
        try:
            take_turns(entrants, f"{_TITLES[contest]}, {dtype}", num_rounds=self._rounds, num_steps=self._steps)
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
        with log.with_suffix(".compiling.log").open("wb") as output:
            subprocess.run([*command, "compile", kind, str(task)], stdout=output, stderr=output, check=False)
        entrant.compile_s = time.perf_counter() - started_s
        entrant.start([*command, contest, str(task)], log)
        return entrant

    def _theirs(self, peer: Peer, task: Path, dtype: str) -> Entrant:
        entrant = Entrant(name=peer.name, title=peer.title)
        try:
            python = made(self._environments, peer.environment, report)
        except NotInstalled as error:
            entrant.fail(error)
            return entrant
        command = [str(python), "-m", f"bench.peers.{peer.module}", peer.name, str(task)]
        entrant.start(command, self._folder / f"{peer.name}-{dtype}.log")
        return entrant

    def end_to_end(self) -> list[str]:
        """The table of whole jobs, or why there is none."""
        if reason := missing(self._arguments.shared):
            return [f"Not run: it {reason}."]
        try:
            python = made(self._environments, "huggingface", report)
        except NotInstalled as error:
            return [f"Not run: {error}"]
        folder = self._folder / "end-to-end"
        folder.mkdir()
        runs = EndToEnd(
            folder,
            python,
            self._arguments.shared,
            num_steps=self._arguments.job_steps,
            num_threads=self._arguments.threads,
            device=self._device,
            report=report,
        )
        runs.run(self._arguments.job_rounds)
        return runs.table()


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
    parser.add_argument("--job-steps", type=int, default=60, help="of each run end to end")
    parser.add_argument("--job-rounds", type=int, default=3, help="runs of each end to end")
    parser.add_argument("--shared", type=Path, default=SHARED, metavar="FOLDER", help="model and data of end-to-end")
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
                rows = table(entrants, tokens_per_turn=arguments.steps * arguments.rows * arguments.row_tokens)
                print(f"### {_TITLES[contest]}, {dtype}\n", *rows, sep="\n", end="\n\n", flush=True)
        if device == "cuda":
            print("### Published\n", *published.table(), sep="\n", end="\n\n", flush=True)
        if END_TO_END in arguments.peers:
            print("### From files to a trained model\n", *bench.end_to_end(), sep="\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
