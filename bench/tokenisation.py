"""The whole preparation - reading, checks, template, tokens, masks, files - against `tokenizers.encode_batch` alone on
the same cores.

The reference gets the rendered texts in memory and throws the tokens away. Both run in processes of their own, in
turns. Chats are those of gsm8k where it lies beside the checkout, else the demo's, repeated; the model is the demo's,
or tiny-base where it is there.

python -m bench.tokenisation
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import chain
from pathlib import Path

from horizon_formats.formats import DatasetFormat
from horizon_server.datasets.preparing import prepare
from horizon_server.datasets.reading import StoredFile
from horizon_server.datasets.recipe import PrepareOptions, PrepareRequest
from horizon_server.datasets.tokens.codec import TextCodec
from horizon_server.demo.recipe import demo_chats, write_demo_model
from horizon_server.settings import child_environment
from horizon_server.store.cpus import available_cpus

SHARED = Path(__file__).parents[2] / "shared"
TOTAL_BYTES = 10 * 10**6
ROUNDS = 3
_TEXTS_AT_ONCE = 1024


def chats() -> list[list[dict[str, str]]]:
    """Return chats of everyday length."""
    path = SHARED / "data" / "gsm8k_train.jsonl"
    if not path.is_file():
        return list(demo_chats())
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    return [
        [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}] for row in rows
    ]


def write_chats(path: Path, num_bytes: int, *, exchanges: int = 1) -> None:
    """Write about `num_bytes` of chats as JSON lines, each with `exchanges` questions and their answers."""
    single = chats()
    joined = [list(chain.from_iterable(single[at : at + exchanges])) for at in range(0, len(single), exchanges)]
    lines = "".join(json.dumps({"messages": chat}) + "\n" for chat in joined)
    path.write_text(lines * max(1, round(num_bytes / len(lines))), "utf-8")


def encode_alone(model: Path, data: Path) -> dict[str, float]:
    """Time `encode_batch` over the texts that the template makes of the file."""
    codec = TextCodec.from_folder(model)
    assert codec.chat_template is not None
    texts = [codec.chat_template.render(json.loads(line)["messages"]) for line in data.open(encoding="utf-8")]
    batches = [texts[begin : begin + _TEXTS_AT_ONCE] for begin in range(0, len(texts), _TEXTS_AT_ONCE)]
    tokenizer = codec.tokenizer
    started_s, started_cpu_s = time.perf_counter(), _cpu_s()
    num_tokens = 0
    for batch in batches:
        num_tokens += sum(map(len, tokenizer.encode_batch(batch, add_special_tokens=False)))
    return {"tokens": num_tokens, "wall_s": time.perf_counter() - started_s, "cpu_s": _cpu_s() - started_cpu_s}


def prepare_all(model: Path, data: Path, num_processes: int) -> dict[str, float]:
    """Time the preparation of the file."""
    with tempfile.TemporaryDirectory() as folder:
        request = PrepareRequest(
            dataset_files=(StoredFile.at(data),),
            model_dir=model,
            output_dir=Path(folder) / "prepared",
            options=PrepareOptions(format=DatasetFormat.MESSAGES, sequence_length=8192),
        )
        started_s, started_cpu_s = time.perf_counter(), _cpu_s()
        report = prepare(request, on_progress=lambda _: None, num_processes=num_processes)
        wall_s = time.perf_counter() - started_s
    return {"tokens": report.tokens, "wall_s": wall_s, "cpu_s": _cpu_s() - started_cpu_s}


def _cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def _in_a_process(what: str, model: Path, data: Path, num_processes: int) -> dict[str, float]:
    threads = {"TOKENIZERS_PARALLELISM": str(num_processes > 1).lower(), "RAYON_NUM_THREADS": str(num_processes)}
    done = subprocess.run(
        [sys.executable, "-m", "bench.tokenisation", "--run", what, str(model), str(data), str(num_processes)],
        env=child_environment() | (threads if what == "alone" else {}),
        capture_output=True,
        text=True,
        check=True,
    )
    result: dict[str, float] = json.loads(done.stdout)
    return result


def main() -> None:
    """Print a line for one core and one for all of them, for short chats and longer ones."""
    tiny_base = SHARED / "models" / "tiny-base"
    with tempfile.TemporaryDirectory() as name:
        data = Path(name) / "chats.jsonl"
        model = tiny_base if tiny_base.is_dir() else write_demo_model(Path(name) / "model")
        print(f"{model.name}, {TOTAL_BYTES / 1e6:.0f} MB of JSON lines, median of {ROUNDS} rounds\n")
        print("| chats | processes | encode_batch Mtok/s | preparation Mtok/s | ratio by wall | ratio by CPU |")
        print("| --- | --- | --- | --- | --- | --- |")
        for exchanges in (1, 4):
            write_chats(data, TOTAL_BYTES, exchanges=exchanges)
            for num_processes in dict.fromkeys((1, available_cpus())):
                print(
                    f"| {exchanges} question{'s' * (exchanges > 1)} | {num_processes} | "
                    f"{_compared(model, data, num_processes)} |",
                    flush=True,
                )


def _compared(model: Path, data: Path, num_processes: int) -> str:
    rounds = [
        (_in_a_process("alone", model, data, num_processes), _in_a_process("prepare", model, data, num_processes))
        for _ in range(ROUNDS)
    ]
    assert len({result["tokens"] for pair in rounds for result in pair}) == 1, "both make the same tokens"
    by_wall, by_cpu = (
        statistics.median(alone[key] / whole[key] for alone, whole in rounds) for key in ("wall_s", "cpu_s")
    )
    speeds = [statistics.median(pair[i]["tokens"] / pair[i]["wall_s"] / 1e6 for pair in rounds) for i in (0, 1)]
    return f"{speeds[0]:.2f} | {speeds[1]:.2f} | {by_wall:.2f} | {by_cpu:.2f}"


def _run(arguments: argparse.Namespace) -> None:
    model, data = Path(arguments.run[1]), Path(arguments.run[2])
    alone = arguments.run[0] == "alone"
    result = encode_alone(model, data) if alone else prepare_all(model, data, int(arguments.run[3]))
    os.write(1, json.dumps(result).encode())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run:
        _run(given)
    else:
        main()
