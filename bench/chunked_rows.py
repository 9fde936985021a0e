"""Rows in chunks (`train.chunk_tokens`): what they cost in time, and what long documents are forecast to take.

Steps of one document, computed as a whole and in chunks, take turns on the host device in fp32, so that what the
machine does besides meets both.

python -m bench.chunked_rows                  # steps against each other
python -m bench.chunked_rows --forecast       # the table of docs/performance.md: one document on one H100

The forecast is the planner's: no GPU has confirmed it. A test keeps the page equal to what this prints.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, replace

import torch
from transformers import Qwen3Config

from bench.forecast import model_7b, model_of
from bench.models import random_store
from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.micro_batch import MicroBatch
from horizon_server.engine.template import Template
from horizon_server.engine.trainer import Trainer
from horizon_server.planning.gpus import estimated_rates
from horizon_server.planning.ledger import plan_memory
from horizon_server.planning.model_folder import ModelFolder
from horizon_server.planning.step_parts import TODAY, StepWork
from horizon_server.planning.step_time import predict_step
from horizon_server.planning.step_work import work_of_step
from horizon_server.recipe import Recipe
from horizon_server.records.execution import Execution, Residency

NUM_THREADS = 2
CHUNK_TOKENS = 16384
_HOST_BYTES_PER_S = 200e9


@dataclass(frozen=True, kw_only=True)
class Document:
    """A row of the forecast's table. `estimate` is what it was thought to take before any of it was built: in chunks,
    the device, the host without parameters, and dense work and attention."""

    title: str
    folder: ModelFolder
    tokens: int
    estimate: str


def documents() -> tuple[Document, ...]:
    """Those that the table shows."""
    small = model_7b()
    large = model_of(hidden=8192, inner=28672, layers=80, heads=64, key_heads=8, vocabulary=128256)
    return (
        Document(title="7B, 128k tokens", folder=small, tokens=1 << 17, estimate="8 GB, 34 GB, 16 + 55 s"),
        Document(title="7B, 1M", folder=small, tokens=1 << 20, estimate="14 GB, 270 GB, 132 + 3,544 s"),
        Document(title="7B, 4M", folder=small, tokens=1 << 22, estimate="33 GB, 1,083 GB, 16 h"),
        Document(title="70B, 1M", folder=large, tokens=1 << 20, estimate="31 GB, 1,718 GB, 7 h"),
    )


def table() -> list[str]:
    """Device and host memory and time of a step over one document, as lines of Markdown."""
    lines = [
        "| one document on one H100 | device, whole | device, in chunks of 16k | of it keys, values, gradients | "
        "host: hidden states + keys and values + attention outputs | step: dense + attention | with the outputs kept | "
        "tokens/s then | first estimate: device, host, dense + attention |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for document in documents():
        recipe = Recipe(learning_rate=1e-5, tokens_per_step=document.tokens, sequence_length=document.tokens)
        whole = Execution(
            device_kind="cuda",
            compute_dtype="bfloat16",
            grad_bytes=2,
            micro_batch_tokens=CHUNK_TOKENS,
            activation_placement="host",
        )
        chunked, shape = replace(whole, chunk_tokens=CHUNK_TOKENS), document.folder.shape
        keeping = replace(chunked, residency=Residency(attention_layers=shape.num_hidden_layers))
        at_once, by_chunk, kept = (
            plan_memory(document.folder, recipe, execution) for execution in (whole, chunked, keeping)
        )
        keys_bytes = document.tokens * shape.key_value_elements
        kept_bytes = shape.num_hidden_layers * keys_bytes * 2
        rates = estimated_rates("h100", host_bytes_per_s=_HOST_BYTES_PER_S)
        works = [work_of_step(document.folder, recipe, execution, facts=TODAY) for execution in (chunked, keeping)]
        step_s, kept_s, without = (
            predict_step(work, rates, shares_processors=False).step_s for work in (*works, _without_attention(works[0]))
        )
        outputs_bytes = kept.host_bytes["activations"] - by_chunk.host_bytes["activations"]
        lines.append(
            f"| {document.title} | {at_once.device_total_bytes / 1e9:,.0f} GB | "
            f"{kept.device_total_bytes / 1e9:,.0f} GB | {keys_bytes * (2 + 4) / 1e9:,.1f} GB | "
            f"{(by_chunk.host_bytes['activations'] - kept_bytes) / 1e9:,.0f} + {kept_bytes / 1e9:,.0f} + "
            f"{outputs_bytes / 1e9:,.0f} GB | {without:,.0f} + {step_s - without:,.0f} s | "
            f"{kept_s / step_s - 1:+.0%} | {document.tokens / kept_s:,.0f} | {document.estimate} |"
        )
    return lines


def _without_attention(work: StepWork) -> StepWork:
    return replace(work, layer=replace(work.layer, attention_flops=0.0))


def measure(row_tokens: int, rounds: int) -> list[str]:
    """Steps of one document of that many tokens, in chunks against as a whole, as lines of Markdown."""
    config = Qwen3Config(
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=1024,
        max_position_embeddings=row_tokens,
    )
    template = Template.from_config(config)
    row = MicroBatch(
        input_ids_T=torch.randint(1024, (row_tokens,)),
        position_ids_T=torch.arange(row_tokens),
        labels_T=torch.randint(1024, (row_tokens,)),
        document_lengths=(row_tokens,),
    )
    kinds = [(0, False), *((row_tokens // part, keeps) for part in (1, 2, 4, 8) for keeps in (False, True))]
    trainers = {kind: _trainer(template, *kind) for kind in kinds}
    seconds: dict[tuple[int, bool], list[tuple[float, float]]] = {kind: [] for kind in kinds}
    for index in range(rounds + 1):
        for kind in kinds:
            start_s, start_processor_s = time.perf_counter(), time.process_time()
            trainers[kind].train_step([row])
            trainers[kind].flush()
            # The first round finds room for everything.
            if index:
                seconds[kind].append((time.perf_counter() - start_s, time.process_time() - start_processor_s))
    lines = [
        f"| a row of {row_tokens:,} tokens | step | chunks / whole, median of {rounds} | by processor seconds |",
        "| --- | --- | --- | --- |",
    ]
    for size, keeps in kinds:
        of_kind, of_whole = seconds[size, keeps], seconds[0, False]
        step_s = statistics.median(step_s for step_s, _ in of_kind)
        ratios = [
            statistics.median(one[clock] / whole[clock] for one, whole in zip(of_kind, of_whole, strict=True))
            for clock in (0, 1)
        ]
        name = f"chunks of {size:,}{', attention outputs kept' if keeps else ''}" if size else "whole"
        lines.append(f"| {name} | {step_s:.2f} s | {ratios[0]:.2f} | {ratios[1]:.2f} |")
    return lines


def _trainer(template: Template, chunk_tokens: int, keeps_outputs: bool) -> Trainer:
    residency = Residency(attention_layers=template.num_layers if keeps_outputs else 0)
    execution = Execution(optimizer_threads=NUM_THREADS, chunk_tokens=chunk_tokens, residency=residency)
    device = HostDevice(num_threads=NUM_THREADS)
    return Trainer(template, random_store(template), device, Recipe(learning_rate=1e-5), execution, num_steps=100)


def main() -> None:
    """Print the measurement, or the forecast."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forecast", action="store_true", help="print the forecast for one H100")
    parser.add_argument("--tokens", type=int, default=4096, help="of the row that is measured; default %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="default %(default)s")
    arguments = parser.parse_args()
    print("\n".join(table() if arguments.forecast else measure(arguments.tokens, arguments.rounds)))


if __name__ == "__main__":
    main()
