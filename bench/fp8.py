"""The loss of training with products in FP8 beside that in the compute dtype, on the host's emulation, whose numbers
are the reference for a GPU's.

A small model with random weights reads this project's own documentation, byte by byte; all three runs have the same
weights, rows and order.

python -m bench.fp8                          # about ten minutes on two cores
python -m bench.fp8 --steps 100 --dtype bfloat16
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import torch
from transformers import AutoConfig

from bench.models import random_store
from horizon_server.engine.compiled.layers import CompiledLayers
from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.micro_batch import IGNORED_LABEL, MicroBatch
from horizon_server.engine.template import Template
from horizon_server.engine.trainer import Trainer
from horizon_server.recipe import Matmul, Recipe
from horizon_server.records.execution import Execution

_ROOT = Path(__file__).parent.parent
_NUM_BYTES = 256
ROW_TOKENS, _ROWS_PER_STEP = 256, 4
_SIZES = {
    "vocab_size": _NUM_BYTES,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": ROW_TOKENS,
    "pad_token_id": 0,
}
_NUM_HELD_OUT = 64


def main() -> None:
    """Train in each, and print a table of losses."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.fp8", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=400, metavar="N", help="default 400")
    parser.add_argument("--every", type=int, default=50, metavar="N", help="steps in a row of the table; default 50")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="the compute dtype")
    asked = parser.parse_args()
    held_out, *steps = steps_of(rows(), asked.steps)
    losses = {kind: losses_of(kind, steps, held_out, getattr(torch, asked.dtype)) for kind in get_args(Matmul)}
    print(f"compute dtype {asked.dtype}, {ROW_TOKENS * _ROWS_PER_STEP} tokens a step; mean loss of the steps")
    print()
    print(curve(losses, asked.every))


def rows() -> list[MicroBatch]:
    """The documentation in rows of bytes."""
    text = b"\n".join(file.read_bytes() for file in sorted((_ROOT / "docs").rglob("*.md")))
    ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return [_row(part) for part in torch.split(ids, ROW_TOKENS) if part.numel() == ROW_TOKENS]


def _row(ids_T: torch.Tensor) -> MicroBatch:
    labels_T = torch.cat([ids_T[1:], torch.tensor([IGNORED_LABEL])])
    positions_T = torch.arange(ids_T.numel())
    return MicroBatch(
        input_ids_T=ids_T, position_ids_T=positions_T, labels_T=labels_T, document_lengths=(ids_T.numel(),)
    )


def steps_of(found: Sequence[MicroBatch], num_steps: int) -> list[list[MicroBatch]]:
    """Rows that are held out, and then those of each step, in an order of their own."""
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0)).tolist()
    held_out, rest = order[:_NUM_HELD_OUT], order[_NUM_HELD_OUT:]
    places = [rest[i % len(rest)] for i in range(num_steps * _ROWS_PER_STEP)]
    steps = [places[i : i + _ROWS_PER_STEP] for i in range(0, len(places), _ROWS_PER_STEP)]
    return [[found[i] for i in part] for part in (held_out, *steps)]


def template() -> Template:
    """Of the model that is trained."""
    return Template.from_config(AutoConfig.for_model("llama", **_SIZES))


def losses_of(
    matmul: Matmul,
    steps: Sequence[Sequence[MicroBatch]],
    held_out: Sequence[MicroBatch],
    dtype: torch.dtype,
    *,
    compiled: CompiledLayers | None = None,
) -> list[float]:
    """The loss of each step, and at the end that of what was held out."""
    model = template()
    store = random_store(model)
    device = HostDevice(num_threads=torch.get_num_threads(), compute_dtype=dtype)
    recipe = Recipe(learning_rate=2e-3, warmup_steps=20, weight_decay=0.1, matmul=matmul)
    trainer = Trainer(model, store, device, recipe, Execution(), num_steps=len(steps), compiled=compiled)
    losses = [trainer.train_step(list(step)).loss for step in steps]
    losses.append(trainer.evaluate(list(held_out)).eval_loss)
    trainer.close()
    device.close()
    store.close()
    return losses


def curve(losses: dict[Matmul, list[float]], every: int) -> str:
    """The table: a row for some steps each, the last for what was held out."""
    lines = []
    num_steps = len(losses["bf16"]) - 1
    for start in range(0, num_steps, every):
        means = {kind: statistics.fmean(found[start : min(start + every, num_steps)]) for kind, found in losses.items()}
        lines.append((f"{start + 1} to {min(start + every, num_steps)}", means))
    lines.append(("held out, after the last", {kind: found[-1] for kind, found in losses.items()}))
    header = ["steps", *losses, *(f"{kind} - bf16" for kind in losses if kind != "bf16")]
    rows = [
        [
            name,
            *(f"{value:.4f}" for value in means.values()),
            *(f"{value - means['bf16']:+.4f}" for kind, value in means.items() if kind != "bf16"),
        ]
        for name, means in lines
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, ["---"] * len(header), *rows])


if __name__ == "__main__":
    main()
