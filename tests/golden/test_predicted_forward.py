"""The predicted pass forward against the measured one, on the host with rates measured in the same run."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from bench.models import random_rows, random_store
from tests.support.plans import settings, step_work
from transformers import AutoConfig

from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.rate_probe import Sizes, measure_rates
from horizon_server.engine.template import Template
from horizon_server.engine.trainer import Trainer
from horizon_server.planning.model_folder import ModelFolder, ModelShape
from horizon_server.planning.step_time import predict_forward, predict_step

HIDDEN, VOCABULARY, ROWS, ROW_TOKENS = 512, 4096, 2, 256
SIZES = Sizes(
    widths=(HIDDEN,),
    attention_width=HIDDEN,
    row_tokens=ROW_TOKENS,
    gemm_tokens=(ROW_TOKENS,),
    document_tokens=(ROW_TOKENS,),
    product=512,
    chunk_tokens=256,
    vocabulary=2048,
)
FACTOR = 2.0
"""A step takes four times as long as its forward, so that a step's time in the pass's place would be found."""
ROUNDS = 8


@pytest.mark.timeout(1800)
def test_a_pass_forward_is_the_part_of_a_step_that_is_predicted() -> None:
    config = AutoConfig.for_model(
        "qwen3",
        hidden_size=HIDDEN,
        intermediate_size=1536,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        vocab_size=VOCABULARY,
        max_position_embeddings=4096,
        pad_token_id=0,
    )
    template = Template.from_config(config)
    plain = config.to_dict()
    folder = ModelFolder(
        path=Path(), config=plain, shape=ModelShape.from_config(plain), headers={}, layout=template.layout
    )
    work = step_work(
        folder,
        tokens_per_step=ROWS * ROW_TOKENS,
        sequence_length=ROW_TOKENS,
        device_kind="host",
        grad_bytes=4,
        activation_placement="device",
    )
    device = HostDevice(num_threads=1)
    store = random_store(template, grad_dtype=device.gradient_dtype)
    trainer = Trainer(template, store, device, *settings(learning_rate=1e-5, optimizer_threads=1), num_steps=100)
    found: list[Round] = []
    try:
        # The machine may become busier or idler between the steps and the rates of a round; what is predicted is as
        # far off each time.
        while not found or (not found[-1].is_close and len(found) < ROUNDS):
            took_s, step_took_s = measured(trainer)
            rates = measure_rates("host", num_threads=1, budget_s=0.0, sizes=SIZES, choose=min)
            forward_s = predict_forward(work, rates, shares_processors=True)
            step_s = predict_step(work, rates, shares_processors=True).step_s
            found.append(Round(forward_s=forward_s, step_s=step_s, took_s=took_s, step_took_s=step_took_s))
    finally:
        trainer.close()
        device.close()
        store.close()
    assert found[-1].is_close, found


@dataclass(frozen=True, kw_only=True)
class Round:
    """The seconds of a pass forward and of a step: predicted, and measured."""

    forward_s: float
    step_s: float
    took_s: float
    step_took_s: float

    @property
    def is_close(self) -> bool:
        # Load slows both sides of a ratio.
        of_step = (self.forward_s / self.step_s) / (self.took_s / self.step_took_s)
        return 1 / FACTOR < of_step < FACTOR and 1 / FACTOR**2 < self.forward_s / self.took_s < FACTOR**2


def measured(trainer: Trainer) -> tuple[float, float]:
    """Seconds of a pass forward and of a step."""
    forward_s, step_s = [], []
    for seed in range(6):
        rows = random_rows(VOCABULARY, num_rows=ROWS, row_tokens=ROW_TOKENS, seed=seed)
        start_s = time.perf_counter()
        trainer.log_probabilities(rows)
        forward_s.append(time.perf_counter() - start_s)
        start_s = time.perf_counter()
        trainer.train_step(rows)
        trainer.flush()
        step_s.append(time.perf_counter() - start_s)
    # The shortest of each, as of the rates: whatever else the machine does makes some of them longer. The first ones
    # prepare what later ones find.
    return min(forward_s[1:]), min(step_s[1:])
