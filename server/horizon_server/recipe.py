"""What changes the result of training, besides the model, its trained tensors and the data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LrSchedule = Literal["constant", "linear", "cosine", "cosine_with_min_lr", "wsd"]
Matmul = Literal["bf16", "fp8", "fp8_full"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How weights are trained: optimizer, schedule, clipping, noise and rounding. One record in the job's spec, its
    plan and the engine.

    `max_grad_norm` None turns clipping off. After `max_skipped_steps` steps in a row that were skipped, training stops;
    0 turns that off. `seed` is that of dropout, where the model's config asks for it, and of noise on the embeddings,
    where `neftune_noise_alpha` is above 0. A step has up to `tokens_per_step` tokens, in rows of up to
    `sequence_length`; the engine makes room for the former at once, and grows with the largest step where it is 0.
    `matmul: fp8` rounds what the layers' products multiply, `fp8_full` for their weight gradients too. `deterministic`:
    kernels of a GPU add in a fixed order, so that two runs have the same bits, as they have on the host.
    `adapter_scale` multiplies the output of adapters and `adapter_dropout` is the share of their inputs that is
    dropped, where the layout has adapters.
    """

    learning_rate: float
    lr_schedule: LrSchedule = "cosine"
    warmup_steps: int = 0
    min_lr_ratio: float = 0.0
    lr_decay_ratio: float = 0.0
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    max_grad_norm: float | None = 1.0
    max_skipped_steps: int = 10
    seed: int = 0
    label_smoothing: float = 0.0
    neftune_noise_alpha: float = 0.0
    matmul: Matmul = "bf16"
    deterministic: bool = False
    tokens_per_step: int = 0
    sequence_length: int = 0
    adapter_scale: float = 1.0
    adapter_dropout: float = 0.0
