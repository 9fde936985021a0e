"""The same model resident on one device, as one would train it in plain PyTorch: what streaming is compared with.

bf16 weights, gradients accumulated in fp32, fp32 master and moments, fused AdamW, clip 1.0, gradient checkpointing, the model's own
attention (sdpa), row by row like the engine: 18 bytes a parameter.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, PretrainedConfig

from bench.models import random_rows
from horizon_server.engine.micro_batch import MicroBatch
from horizon_server.planning.ledger import DeviceKind

BYTES_PER_PARAMETER = 18


@dataclass(frozen=True, kw_only=True)
class Resident:
    """Tokens per second by (tokens, sequence), and why where there are none."""

    tokens_per_s: dict[tuple[int, int], float]
    why_not: str = ""


class ResidentModel:
    """A model with its fp32 master, which a step updates and copies back."""

    def __init__(self, config: PretrainedConfig, device: torch.device, *, learning_rate: float = 1e-6) -> None:
        with device:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.model: torch.nn.Module = model.train()
        self._weights = list(self.model.parameters())
        self.masters = [weight.detach().float() for weight in self._weights]
        for weight, master in zip(self._weights, self.masters, strict=True):
            master.grad = torch.zeros_like(master)
            weight.register_post_accumulate_grad_hook(_into(master.grad))
        self._optimizer = torch.optim.AdamW(self.masters, lr=learning_rate, fused=True)

    def step(self, rows: list[MicroBatch]) -> Tensor:
        """One optimizer step over the rows; the loss stays on the device."""
        device, num_targets = self.masters[0].device, sum(row.num_targets for row in rows)
        total = torch.zeros((), device=device)
        for row in rows:
            logits = self.model(input_ids=row.input_ids_T[None].to(device), use_cache=False).logits[0]
            loss = functional.cross_entropy(logits.float(), row.labels_T.to(device), reduction="sum") / num_targets
            torch.autograd.backward(loss)
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        self._optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self._weights, self.masters)
            torch._foreach_zero_([master.grad for master in self.masters])
        return total


def measure_resident(
    config: PretrainedConfig,
    points: Iterable[tuple[int, int]],
    *,
    num_parameters: int,
    kind: DeviceKind,
    limit_bytes: float,
    allows: Callable[[float], bool],
) -> Resident:
    """Train at each (tokens, sequence) for a step or two after a small one, as long as there is memory and time."""
    needed_bytes = BYTES_PER_PARAMETER * num_parameters
    if needed_bytes > limit_bytes:
        return Resident(
            tokens_per_s={},
            why_not=f"does not fit: {needed_bytes / 2**30:.0f} GiB of states, {limit_bytes / 2**30:.0f} GiB on the device",
        )
    rates: dict[tuple[int, int], float] = {}
    seconds_per_token, why_not = 0.0, ""
    try:
        resident = ResidentModel(config, torch.device("cuda" if kind == "cuda" else "cpu"))
        for tokens, sequence in points:
            if not allows(2 * seconds_per_token * tokens):
                why_not = "no time left"
                break
            rows = random_rows(config.vocab_size, num_rows=tokens // sequence, row_tokens=sequence)
            float(resident.step(rows[:2]))
            times = []
            for _ in range(2 if tokens <= 1 << 15 else 1):
                start_s = time.perf_counter()
                float(resident.step(rows))
                times.append(time.perf_counter() - start_s)
            seconds_per_token = statistics.median(times) / tokens
            rates[tokens, sequence] = 1 / seconds_per_token
    except torch.OutOfMemoryError:
        why_not = "does not fit"
    resident = None  # type: ignore[assignment]
    gc.collect()
    if kind == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return Resident(tokens_per_s=rates, why_not=why_not)


def _into(total: Tensor) -> Callable[[Tensor], None]:
    def take(weight: Tensor) -> None:
        assert weight.grad is not None
        total.add_(weight.grad)
        weight.grad = None

    return take
