"""What a method besides cross-entropy, or weights of targets, take in memory: a few numbers for each token of a step.
Torch-free."""

from __future__ import annotations

from horizon_server.recipe import Recipe
from horizon_server.records.execution import Execution
from horizon_server.records.plan import Ledger

# Log-probabilities and references in fp32, and at most seven fp64 vectors of the objective's own: with its leaf,
# derivative, ratios, advantages and what autograd keeps.
_TOKEN_BYTES = 2 * 4 + 7 * 8

WEIGHT_BYTES = 4
"""Of a target's weight, which is in fp32 beside the target as long as the step lasts."""


def with_objective(ledger: Ledger, recipe: Recipe, execution: Execution) -> Ledger:
    """The ledger of a job whose steps have an objective. The head's logits are as many as before, a chunk at a time."""
    num_bytes = recipe.tokens_per_step * _TOKEN_BYTES
    device = {**ledger.device_bytes, "workspace": ledger.device_bytes["workspace"] + num_bytes}
    # The figures of a step are computed on the CPU, from a copy of the log-probabilities; on the host its device is
    # host memory too.
    times = 2 if execution.device_kind == "host" else 1
    host = {**ledger.host_bytes, "other": ledger.host_bytes["other"] + times * num_bytes}
    return Ledger(host_bytes=host, device_bytes=device)


def with_weights(ledger: Ledger, recipe: Recipe, execution: Execution) -> Ledger:
    """The ledger of a job whose targets have different weights."""
    num_bytes = recipe.tokens_per_step * WEIGHT_BYTES
    # As the numbers of tokens: what the host holds is not in its device's account, and is sent to another device.
    workspace = ledger.device_bytes["workspace"] + (num_bytes if execution.device_kind == "cuda" else 0)
    host = {**ledger.host_bytes, "other": ledger.host_bytes["other"] + num_bytes}
    return Ledger(host_bytes=host, device_bytes={**ledger.device_bytes, "workspace": workspace})
