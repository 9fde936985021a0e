"""How fast one core checks every row of a dataset, against the library's JSON parser alone on the same bytes.

Processor time, not wall time: validation is one thread, and other work on the machine shall not count. Rows are those
of gsm8k where it lies beside the checkout, else rows of the same size made here.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet

from horizon_formats.checks import check_files
from horizon_formats.formats import DatasetFormat
from horizon_server.datasets.reading import StoredFile

GSM8K = Path(__file__).parents[2] / "shared" / "data" / "gsm8k_train.jsonl"
TOTAL_BYTES = 100 * 10**6
ROUNDS = 2

_WORDS = (
    "the",
    "clips",
    "she",
    "sold",
    "half",
    "as",
    "many",
    "friends",
    "48",
    "<<48/2=24>>",
    "\u20ac",
    "each",
    "week.\n",
)


def main() -> None:
    """Print a table: MB/s of JSON for each kind of row and container, and the share of the bare parser's speed."""
    pairs = _pairs()
    chats = [json.dumps(_chat(row), ensure_ascii=False) for row in map(json.loads, pairs)]
    print(
        "| rows | file | MB/s of JSON, one core | bare json.loads | ratio |\n| --- | --- | --- | --- | --- |",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        for kind, rows in {"prompt and completion": pairs, "chats of 5 messages": chats}.items():
            text = "".join(f"{row}\n" for row in rows).encode()
            text *= max(1, TOTAL_BYTES // len(text))
            parser = min(_timed(lambda text=text: _parse(text)) for _ in range(ROUNDS))  # type: ignore[misc]
            for name, content in _containers(text):
                path = Path(folder) / name
                path.write_bytes(content)
                ours = min(_timed(lambda path=path: _validate(path)) for _ in range(ROUNDS))  # type: ignore[misc]
                path.unlink()
                speed, bare = len(text) / ours / 1e6, len(text) / parser / 1e6
                print(f"| {kind} | {name} | {speed:.0f} | {bare:.0f} | {speed / bare:.2f} |", flush=True)


def _pairs() -> list[str]:
    if GSM8K.is_file():
        rows = [json.loads(line) for line in GSM8K.read_text("utf-8").splitlines()]
        return [
            json.dumps({"prompt": row["question"], "completion": row["answer"]}, ensure_ascii=False) for row in rows
        ]
    rng = random.Random(0)
    texts = (" ".join(rng.choices(_WORDS, k=50)) for _ in range(14_000))
    return [json.dumps({"prompt": text, "completion": next(texts)}, ensure_ascii=False) for text in texts]


def _chat(row: dict[str, str]) -> dict[str, list[dict[str, str]]]:
    turns = [("system", "You are a careful tutor."), ("user", row["prompt"]), ("assistant", row["completion"])]
    turns += [("user", "Merci \u2014 once more, please?"), ("assistant", row["completion"])]
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def _containers(text: bytes) -> Iterator[tuple[str, bytes]]:
    yield "rows.jsonl", text
    yield "rows.json", b"[" + b",".join(text.splitlines()) + b"]"
    yield "rows.jsonl.gz", gzip.compress(text, 6)
    yield "rows.jsonl.zst", pyarrow.Codec("zstd").compress(text, asbytes=True)
    sink = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([json.loads(line) for line in text.splitlines()]), sink)
    yield "rows.parquet", sink.getvalue()


def _parse(text: bytes) -> None:
    for line in io.BytesIO(text):
        json.loads(line)


def _validate(path: Path) -> None:
    check_files([StoredFile.at(path)], name=path.name, dataset_format=DatasetFormat.AUTO, field_map={})


def _timed(call: Callable[[], None]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
