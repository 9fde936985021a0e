"""Tokens per second of the streaming engine against a plain PyTorch loop: same model, batch and threads, steps in turn.

The plain loop is what one would write for a model that fits: gradient checkpointing, clip 1.0, fused AdamW. Both run a
few steps at a time; the engine's update of each step is flushed and counted, although a longer run would hide it in the
next step. With `--dtype bfloat16` both compute in bf16 with fp32 masters, and the engine in fp32 takes turns with them,
as do a layer's products alone: what bf16 gains there is the most that a step could gain. With `--compile FOLDER` the
engine's layers are compiled and kept in that folder, and the plain loop with its layers compiled by torch.compile takes
turns with them; nobody's compiling is timed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional
from transformers import PretrainedConfig

from bench.models import plain_model, qwen3_config, random_rows, random_store
from horizon_server.engine.compiled.build import build_missing
from horizon_server.engine.compiled.layers import CompiledLayers
from horizon_server.engine.compiled.library import CodeLibrary, Target
from horizon_server.engine.device import TORCH_DTYPE
from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.micro_batch import MicroBatch
from horizon_server.engine.template import Template
from horizon_server.engine.trainer import Trainer
from horizon_server.planning.ledger import micro_batch_tokens
from horizon_server.recipe import Recipe
from horizon_server.records.execution import Execution
from horizon_server.store.cpus import available_cpus


class PlainLoop:
    """The loop that one would write for a model that fits. In bf16 its weights are rounded from fp32 masters after each
    step, and the gradients of rows add up in fp32."""

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype, *, compiled: bool = False) -> None:
        self._model = model
        if compiled:
            for layer in model.model.layers:  # type: ignore[union-attr]
                # Layer by layer, as the engine: a whole model takes minutes to compile.
                layer.forward = torch.compile(layer.forward)
        self._weights: list[torch.Tensor] = list(model.parameters())
        self._masters = self._weights
        if dtype is not torch.float32:
            self._masters = [weight.detach().clone() for weight in self._weights]
            model.to(dtype)
            for master in self._masters:
                master.grad = torch.zeros_like(master)
        self._optimizer = torch.optim.AdamW(self._masters, lr=1e-4, weight_decay=0.0, fused=True)

    def step(self, rows: list[MicroBatch]) -> float:
        """One step, row by row, the loss scaled by the step's targets; returns the loss."""
        num_targets = sum(row.num_targets for row in rows)
        rounded, total = self._masters is not self._weights, 0.0
        for row in rows:
            logits = self._model(input_ids=row.input_ids_T[None], use_cache=False).logits[0]
            loss = functional.cross_entropy(logits.float(), row.labels_T, reduction="sum", ignore_index=-100)
            torch.autograd.backward(loss / num_targets)
            total += float(loss.detach()) / num_targets
            if rounded:
                for weight, master in zip(self._weights, self._masters, strict=True):
                    assert weight.grad is not None and master.grad is not None
                    master.grad += weight.grad
                    weight.grad = None
        torch.nn.utils.clip_grad_norm_(self._masters, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=not rounded)
        if rounded:
            with torch.no_grad():
                for weight, master in zip(self._weights, self._masters, strict=True):
                    weight.copy_(master)
        return total


class Engine:
    """A trainer on the host device with a store of its own."""

    def __init__(
        self, template: Template, dtype: torch.dtype, *, num_threads: int, library: CodeLibrary | None = None
    ) -> None:
        self.store = random_store(template, grad_dtype=dtype)
        self.device = HostDevice(num_threads=num_threads, compute_dtype=dtype)
        recipe = Recipe(learning_rate=1e-4, lr_schedule="constant")
        together = micro_batch_tokens(template.hidden_size, "host")
        execution = Execution(optimizer_threads=num_threads, micro_batch_tokens=together)
        compiled = None
        if library is not None:
            target = Target(
                dtype=dtype,
                device=torch.device("cpu"),
                num_threads=num_threads,
                num_tokens=together,
            )
            torch.set_num_threads(num_threads)
            print("; ".join(build_missing(template, library, target, print)))
            compiled = CompiledLayers.load(template, library, target)
        self._trainer = Trainer(
            template, self.store, self.device, recipe, execution, num_steps=10_000, compiled=compiled
        )

    def step(self, rows: list[MicroBatch]) -> float:
        """One step with its update; returns the loss."""
        loss = self._trainer.train_step(rows).loss
        self._trainer.flush()
        return loss

    def close(self) -> None:
        """Free everything."""
        self._trainer.close()
        self.device.close()
        self.store.close()


def measure(
    shape: str,
    *,
    num_rows: int,
    row_tokens: int,
    num_pairs: int,
    num_steps: int,
    num_threads: int,
    dtype: torch.dtype,
    library: CodeLibrary | None = None,
) -> dict[str, float]:
    """Return tokens per second of engine and loop, the median ratio of their turns, and the largest relative difference
    of losses.

    In bf16 also the median ratio of the engine's turns to those of an engine in fp32; with a library of compiled
    layers, to those of the loop with compiled layers.
    """
    config = qwen3_config(shape)
    template = Template.from_config(config)
    engines = {"ours": Engine(template, dtype, num_threads=num_threads, library=library)}
    if dtype is not torch.float32:
        engines["exact"] = Engine(template, torch.float32, num_threads=num_threads, library=library)
    steps: dict[str, Callable[[list[MicroBatch]], float]] = {name: engine.step for name, engine in engines.items()}
    loops = {"plain": False, **({"compiled_plain": True} if library is not None else {})}
    for name, compiled in loops.items():
        steps[name] = PlainLoop(plain_model(template, engines["ours"].store, config), dtype, compiled=compiled).step
    turns, worst = [], 0.0
    for i in range(num_pairs + 1):
        rows = random_rows(config.vocab_size, num_rows=num_rows, row_tokens=row_tokens, seed=i)
        timed = {}
        # Who goes first changes, so that nobody always finds the caches of the same other one.
        for name in sorted(steps, reverse=i % 2 == 1):
            torch.set_num_threads(num_threads)
            timed[name] = _timed(steps[name], rows, num_steps)
        worst = max(worst, abs(timed["ours"][1] - timed["plain"][1]) / timed["plain"][1])
        if i:
            turns.append({name: seconds for name, (seconds, _) in timed.items()})
        if i and dtype is not torch.float32:
            turns[-1]["products"] = _gain_of_products(config, dtype)
    tokens = num_steps * num_rows * row_tokens
    result = {f"{name}_tokens_per_s": tokens / statistics.median(turn[name] for turn in turns) for name in steps}
    result["ratio"] = statistics.median(turn["plain"] / turn["ours"] for turn in turns)
    result["loss_difference"] = worst
    if dtype is not torch.float32:
        result["of_products"] = statistics.median(turn["products"] for turn in turns)
    for name in ("exact", "compiled_plain"):
        if name in steps:
            result[f"of_{name}"] = statistics.median(turn[name] / turn["ours"] for turn in turns)
    for engine in engines.values():
        engine.close()
    return result


def _gain_of_products(config: PretrainedConfig, dtype: torch.dtype, num_tokens: int = 2048) -> float:
    """How much quicker the feed-forward part's three products, forward and backward, are in a dtype than in fp32."""
    seconds = {}
    for kind in (torch.float32, dtype):
        inputs, outputs, weight = (
            torch.randn(shape, dtype=kind)
            for shape in (
                (num_tokens, config.hidden_size),
                (num_tokens, config.intermediate_size),
                (config.intermediate_size, config.hidden_size),
            )
        )
        took = []
        for _ in range(5):
            started_s = time.perf_counter()
            inputs @ weight.t()
            outputs @ weight
            outputs.t() @ inputs
            took.append(time.perf_counter() - started_s)
        seconds[kind] = min(took)
    return seconds[torch.float32] / seconds[dtype]


def _timed(step: Callable[[list[MicroBatch]], float], rows: list[MicroBatch], num_steps: int) -> tuple[float, float]:
    started_s = time.perf_counter()
    losses = [step(rows) for _ in range(num_steps)]
    return time.perf_counter() - started_s, losses[-1]


def main() -> None:
    """Print one line per shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=["6m", "40m", "0.6b", "0.6b-short"], nargs="*", default=["6m", "40m"])
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--row-tokens", type=int, default=512)
    parser.add_argument("--pairs", type=int, default=5, help="turns of each")
    parser.add_argument("--steps", type=int, default=3, help="steps of a turn")
    parser.add_argument("--threads", type=int, default=available_cpus())
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of both computations")
    parser.add_argument("--compile", type=Path, metavar="FOLDER", help="compile layers; where the engine keeps them")
    arguments = parser.parse_args()
    print(
        "| shape | dtype | rows x tokens | threads | engine tokens/s | plain PyTorch tokens/s | ratio (median of "
        "pairs) | engine / its own fp32 | products alone, to fp32 | engine / torch.compile | loss differs by |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for shape in arguments.shape:
        found = measure(
            shape,
            num_rows=arguments.rows,
            row_tokens=arguments.row_tokens,
            num_pairs=arguments.pairs,
            num_steps=arguments.steps,
            num_threads=arguments.threads,
            dtype=TORCH_DTYPE[arguments.dtype],
            library=CodeLibrary(arguments.compile) if arguments.compile else None,
        )
        others = [
            f"{found[name]:.2f}" if name in found else "-" for name in ("of_exact", "of_products", "of_compiled_plain")
        ]
        print(
            f"| {shape} | {arguments.dtype} | {arguments.rows} x {arguments.row_tokens} | {arguments.threads} "
            f"| {found['ours_tokens_per_s']:,.0f} | {found['plain_tokens_per_s']:,.0f} | {found['ratio']:.2f} | "
            f"{' | '.join(others)} | {found['loss_difference']:.1e} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
