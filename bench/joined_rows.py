"""Rows of short documents: packed and unpacked, computed row by row or up to a number of tokens at once.

Every round times each variant once, in turn, so that what else the machine does meets all of them; medians are
compared.

python -m bench.joined_rows                       # the 40m shape, 8192 tokens a step, documents of 200 tokens
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from bench.models import qwen3_config, random_store
from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.micro_batch import MicroBatch
from horizon_server.engine.template import Template
from horizon_server.engine.trainer import Trainer
from horizon_server.recipe import Recipe
from horizon_server.records.execution import Execution

NUM_THREADS = 2


def documents_in_rows(num_tokens: int, document: int, per_row: int) -> list[MicroBatch]:
    """Rows of `per_row` documents."""
    generator = torch.Generator().manual_seed(0)
    lengths = (document,) * per_row
    ids_T = torch.randint(1000, (document * per_row,), generator=generator)
    row = MicroBatch(
        input_ids_T=ids_T,
        position_ids_T=torch.arange(document).repeat(per_row),
        labels_T=ids_T,
        document_lengths=lengths,
    )
    return [row] * max(1, round(num_tokens / (document * per_row)))


def main() -> None:
    """Print a line per variant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="40m")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a step")
    parser.add_argument("--document", type=int, default=200, help="tokens of a short document")
    parser.add_argument("--row", type=int, default=4096, help="tokens of a packed row")
    parser.add_argument(
        "--joined", type=int, nargs="*", default=[0, 2048], help="tokens computed at once; 0: row by row"
    )
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    config = qwen3_config(arguments.shape)
    template = Template.from_config(config)
    rows = {
        "unpacked": documents_in_rows(arguments.tokens, arguments.document, 1),
        "packed": documents_in_rows(arguments.tokens, arguments.document, arguments.row // arguments.document),
    }
    variants = [(size, name) for size in arguments.joined for name in rows]
    trainers = {size: _trainer(template, size) for size in arguments.joined}
    speeds: dict[tuple[int, str], list[float]] = {variant: [] for variant in variants}
    for index in range(arguments.rounds + 1):
        for size, name in variants:
            start_s = time.perf_counter()
            figures = trainers[size].train_step(rows[name])
            trainers[size].flush()
            # The first round finds room for everything.
            if index:
                speeds[size, name].append(figures.num_tokens / (time.perf_counter() - start_s))
    print(
        "| tokens at once | unpacked tokens/s | packed tokens/s | packed / unpacked (median of rounds) |\n| --- | --- "
        "| --- | --- |"
    )
    for size in arguments.joined:
        unpacked, packed = speeds[size, "unpacked"], speeds[size, "packed"]
        ratio = statistics.median(one / other for one, other in zip(packed, unpacked, strict=True))
        print(
            f"| {size or 'a row'} | {statistics.median(unpacked):,.0f} | {statistics.median(packed):,.0f} | "
            f"{ratio:.2f} |"
        )


def _trainer(template: Template, micro_batch_tokens: int) -> Trainer:
    execution = Execution(optimizer_threads=NUM_THREADS, micro_batch_tokens=micro_batch_tokens)
    device = HostDevice(num_threads=NUM_THREADS)
    return Trainer(template, random_store(template), device, Recipe(learning_rate=1e-5), execution, num_steps=100)


if __name__ == "__main__":
    main()
