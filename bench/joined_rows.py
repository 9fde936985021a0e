"""Rows of short documents: packed and unpacked, computed one by one or laid end to end up to a number of tokens.

Every round times each variant once, in turn, so that what else the machine does meets all of them; medians are compared.

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
from horizon_server.engine.trainer import TrainConfig, Trainer

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
    parser.add_argument("--row", type=int, default=4096, help="tokens of a packed row, and of the long document")
    parser.add_argument("--joined", type=int, nargs="*", default=[512, 1024, 2048, 4096])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    config = qwen3_config(arguments.shape)
    template = Template.from_config(config)
    short = documents_in_rows(arguments.tokens, arguments.document, 1)
    packed = documents_in_rows(arguments.tokens, arguments.document, arguments.row // arguments.document)
    variants = {
        f"one document of {arguments.row} a row": (documents_in_rows(arguments.tokens, arguments.row, 1), 0),
        f"packed rows of {arguments.row}": (packed, 0),
        "a short document a row": (short, 0),
        **{f"the same, joined to {size}": (short, size) for size in arguments.joined},
    }
    trainers = {name: _trainer(template, size) for name, (_, size) in variants.items()}
    speeds: dict[str, list[float]] = {name: [] for name in variants}
    for index in range(arguments.rounds + 1):
        for name, (rows, _) in variants.items():
            start_s = time.perf_counter()
            figures = trainers[name].train_step(rows)
            trainers[name].flush()
            # The first round finds room for everything.
            if index:
                speeds[name].append(figures.num_tokens / (time.perf_counter() - start_s))
    base = statistics.median(speeds["a short document a row"])
    print("| rows | tokens/s | to a short document a row |\n| --- | --- | --- |")
    for name, found in speeds.items():
        print(f"| {name} | {statistics.median(found):,.0f} | {statistics.median(found) / base:.2f} |")


def _trainer(template: Template, micro_batch_tokens: int) -> Trainer:
    config = TrainConfig(
        num_steps=100, learning_rate=1e-5, optimizer_threads=NUM_THREADS, micro_batch_tokens=micro_batch_tokens
    )
    return Trainer(template, random_store(template), HostDevice(num_threads=NUM_THREADS), config)


if __name__ == "__main__":
    main()
