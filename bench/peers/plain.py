"""Loops that one would write oneself: plain PyTorch, the same with compiled layers, and PEFT's adapters.

    python -m bench.peers.plain plain|compiled|peft|peft-compiled TASK.json

All with gradient checkpointing, clip 1.0 and fused AdamW. In bf16 the weights are rounded from fp32 masters after each
step; adapters are in fp32, as PEFT makes them, next to a base in bf16.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from bench.peers.protocol import Line, Rows, Task


def load_model(task: Task, dtype: torch.dtype) -> Any:
    """The model with gradient checkpointing, in training."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(task.model, dtype=dtype, attn_implementation="sdpa")
    model.config.use_cache = False
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.to(task.device).train()


def sum_of_losses(model: Any, ids_RT: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of every token but each row's first, summed, in fp32."""
    logits_RTV = model(input_ids=ids_RT, use_cache=False).logits[:, :-1]
    return functional.cross_entropy(logits_RTV.float().flatten(0, 1), ids_RT[:, 1:].flatten(), reduction="sum")


def held_out_loss(model: Any, rows: Rows, device: str) -> float:
    """The mean loss of the held-out tokens, row by row."""
    was_training, total, num_targets = model.training, 0.0, 0
    model.eval()
    with torch.no_grad():
        for row in torch.from_numpy(rows.held_out):
            total += float(sum_of_losses(model, row[None].to(device)))
            num_targets += len(row) - 1
    model.train(was_training)
    return total / num_targets


def synchronize(device: str) -> None:
    """Wait for what was launched."""
    if device == "cuda":
        torch.cuda.synchronize()


def parts_of(task: Task, rows: Rows, step: int) -> list[torch.Tensor]:
    """The rows of a step on the device, as many together as the task says."""
    ids_RT = torch.from_numpy(rows.of_step(step)).to(task.device)
    return list(torch.split(ids_RT, task.rows_at_once))


class PlainLoop:
    """The model and its optimizer."""

    def __init__(self, task: Task, rows: Rows, *, compiled: bool, peft: bool) -> None:
        self._task, self._rows = task, rows
        dtype = getattr(torch, task.dtype)
        self._rounds = dtype is not torch.float32 and not peft
        self.model = load_model(task, dtype if peft else torch.float32)
        if peft:
            from peft import LoraConfig, get_peft_model

            config = LoraConfig(r=task.lora_rank, lora_alpha=task.lora_alpha, target_modules="all-linear")  # type: ignore[arg-type]
            self.model = get_peft_model(self.model, config)
            # Without it nothing that reaches a checkpointed layer needs a gradient.
            self.model.enable_input_require_grads()
        self._weights = [weight for weight in self.model.parameters() if weight.requires_grad]
        self._masters = self._weights
        if self._rounds:
            self._masters = [weight.detach().clone() for weight in self._weights]
            self.model.to(dtype)
            for master in self._masters:
                master.grad = torch.zeros_like(master)
        if compiled:
            layers = self.model.base_model.model.model.layers if peft else self.model.model.layers
            for layer in layers:
                # Layer by layer, as the engine: a whole model takes minutes to compile.
                layer.forward = torch.compile(layer.forward)
        self._optimizer = torch.optim.AdamW(self._masters, lr=task.learning_rate, weight_decay=0.0, fused=True)

    def step(self, number: int) -> None:
        """One step with its update."""
        parts = parts_of(self._task, self._rows, number)
        num_targets = sum(part.numel() - len(part) for part in parts)
        for part in parts:
            (sum_of_losses(self.model, part) / num_targets).backward()  # type: ignore[no-untyped-call]
            if self._rounds:
                for weight, master in zip(self._weights, self._masters, strict=True):
                    assert weight.grad is not None and master.grad is not None
                    master.grad += weight.grad
                    weight.grad = None
        torch.nn.utils.clip_grad_norm_(self._masters, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=not self._rounds)
        if self._rounds:
            with torch.no_grad():
                for weight, master in zip(self._weights, self._masters, strict=True):
                    weight.copy_(master)


def main() -> None:
    """Serve the bench."""
    name, task = sys.argv[1], Task.read(Path(sys.argv[2]))
    line, rows = Line(), Rows(task)
    torch.set_num_threads(task.num_threads)
    loop = PlainLoop(task, rows, compiled="compiled" in name, peft="peft" in name)
    line.serve(loop.step, lambda: synchronize(task.device), lambda: held_out_loss(loop.model, rows, task.device))


if __name__ == "__main__":
    main()
