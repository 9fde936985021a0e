"""What the forecast says that a step with experts in pages brings up, against what an engine's step counts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.golden.test_paged_experts import ONE_EXPERT, eager_model
from tests.support.plans import step_work

from horizon_server.planning.model_folder import ExpertShape, open_model_folder
from horizon_server.planning.pages import visited_share
from horizon_server.records.execution import NUM_SLOTS

if TYPE_CHECKING:
    from tests.support.tiny_models import Engine


@pytest.mark.parametrize(("num_tokens", "most_off"), [(2, 0.05), (4, 0.1), (16, 0.1), (120, 0.01)])
def test_uploads_are_those_that_a_step_counts(num_tokens: int, most_off: float, engine: Engine, tmp_path: Path) -> None:
    model = eager_model(engine, "qwen3_moe", num_experts=64, num_experts_per_tok=4)
    # So that tokens are about as far apart as even routing takes them to be.
    for name, weight in model.weights.items():
        if name.endswith("embed_tokens.weight"):
            weight.mul_(30)
        elif name.endswith("mlp.gate.weight"):
            torch.nn.functional.normalize(weight, dim=1, out=weight)
    reference: Any = model.reference()
    reference.save_pretrained(tmp_path)
    work = step_work(
        open_model_folder(tmp_path),
        tokens_per_step=num_tokens,
        sequence_length=num_tokens,
        expert_page_elements=ONE_EXPERT,
    )
    rows = [engine.pack(engine.documents(num_tokens, seed=3))]
    run = engine.start(model, expert_page_elements=ONE_EXPERT)
    counted = run.trainer.train_step(rows).h2d.bytes
    up = work.head_traffic.upload_bytes + work.embedding.rows_up_bytes + work.embedding.rows_up_again_bytes
    for number, layer in enumerate(reversed(work.layers)):
        # Backward finds the rest of the last layers where forward has left it.
        up += layer.upload_bytes + (layer.page_bytes if number < NUM_SLOTS else layer.upload_bytes)
    assert counted == pytest.approx(up, rel=most_off)


def test_a_token_visits_as_many_experts_as_it_chooses_and_many_tokens_visit_all() -> None:
    experts = ExpertShape(num_experts=128, num_experts_per_token=4, intermediate_size=8, shared_intermediate_size=0)
    assert visited_share(experts, 1) == pytest.approx(4 / 128)
    assert visited_share(experts, 16) == pytest.approx(0.398, abs=0.001)
    shares = [visited_share(experts, 1 << power) for power in range(12)]
    assert shares == sorted(shares) and shares[-1] == 1.0
    assert visited_share(None, 1) == 1.0
