"""What a step trains for, as a function of its tokens' log-probabilities.

The head computes the log-probability of every supervised token, asks the objective for the loss and its derivative by
each of them, and turns those into gradients of the logits. So an objective is a few lines on a vector with one number
per token: it knows no model, no chunk and no device, and its derivative comes from autograd on that vector::

    # (chosen, rejected), by number in the step
    documents = Documents.of(rows, pairs_P2=torch.tensor([[0, 1], [2, 3]]))
    # Of the starting weights, before the first step.
    references_S = torch.cat(trainer.log_probabilities(rows))
    trainer.train_step(rows, StepObjective(objective=DPO(beta=0.1), documents=documents, references_S=references_S))

Plain cross-entropy is none of them: it needs no second look at the logits and has a pass of its own, which
`WeightedSFT` and `SumCrossEntropy` share.
"""

from collections.abc import Callable
from functools import partial

from horizon_server.engine.objectives.called import SESSION_LOSSES
from horizon_server.engine.objectives.objective import Documents, Objective, RemoteObjective, StepObjective
from horizon_server.engine.objectives.policy_gradient import PolicyGradient
from horizon_server.engine.objectives.preference import DPO, ORPO, SimPO
from horizon_server.engine.objectives.supervised import WeightedSFT
from horizon_server.engine.objectives.unpaired import DESIRABLE, KTO, MISMATCHED, UNDESIRABLE

OBJECTIVES: dict[str, Callable[..., Objective]] = {
    "dpo": DPO,
    "ipo": partial(DPO, loss="ipo"),
    "orpo": ORPO,
    "simpo": SimPO,
    "kto": KTO,
    "policy": PolicyGradient,
}
"""By the method's name. Each takes its method's options as they are in the job spec."""

__all__ = [
    "DESIRABLE",
    "DPO",
    "KTO",
    "MISMATCHED",
    "OBJECTIVES",
    "ORPO",
    "SESSION_LOSSES",
    "UNDESIRABLE",
    "Documents",
    "Objective",
    "PolicyGradient",
    "RemoteObjective",
    "SimPO",
    "StepObjective",
    "WeightedSFT",
]
