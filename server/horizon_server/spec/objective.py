"""What a job trains for: the methods besides plain cross-entropy, and the section of options that each of them has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from horizon_server.errors import InvalidSpec
from horizon_server.spec.fields import Section

# Named, because a preview takes the same choice without being a job.
Method = Literal["sft", "pretrain", "dpo", "ipo", "orpo", "simpo", "kto", "policy", "session"]

Beta = Annotated[float, Field(gt=0, le=1000)]
SwappedShare = Annotated[float, Field(ge=0, lt=0.5)]
Weight = Annotated[float, Field(ge=0, le=1000)]


class DpoSpec(Section):
    """Options of `method: dpo`, direct preference optimisation. The defaults are those of TRL's DPOConfig."""

    beta: Beta = Field(
        default=0.1,
        description="How much a departure from the starting weights counts: the larger, the smaller the departure.",
    )
    loss: Literal["sigmoid", "hinge"] = Field(
        default="sigmoid", description="sigmoid: the paper's; hinge: that of SLiC-HF, 0 once the margin is 1 / beta."
    )
    label_smoothing: SwappedShare = Field(
        default=0.0, description="Share of the pairs whose order is assumed to be wrong. For loss sigmoid only."
    )
    length_normalised: bool = Field(
        default=False, description="Compare averages over an answer's tokens instead of sums; TRL's sigmoid_norm."
    )


class IpoSpec(Section):
    """Options of `method: ipo`, identity preference optimisation. The defaults are those of TRL's DPOConfig with
    loss_type ipo."""

    beta: Beta = Field(
        default=0.1, description="Margins are pulled to 1 / (2 beta). It is tau in the paper, and beta in TRL."
    )
    length_normalised: bool = Field(
        default=True, description="Compare averages over an answer's tokens, as TRL does; false: sums, as the paper."
    )


class OrpoSpec(Section):
    """Options of `method: orpo`, odds ratio preference optimisation. The default is that of TRL's ORPOConfig."""

    penalty: Weight = Field(
        default=0.1,
        description="Weight of the odds ratio next to the chosen answers' loss. It is lambda in the paper, beta in "
        "TRL.",
    )


class SimpoSpec(Section):
    """Options of `method: simpo`, simple preference optimisation. gamma has the default of TRL's CPOConfig; its beta of
    0.1 is for sums over tokens, so beta has the paper's instead."""

    beta: Beta = Field(default=2.0, description="Factor of the difference of average log-probabilities.")
    gamma: float = Field(default=0.5, ge=0, le=1000, description="Margin that beta times the difference is to reach.")
    label_smoothing: SwappedShare = Field(
        default=0.0, description="Share of the pairs whose order is assumed to be wrong."
    )


class KtoSpec(Section):
    """Options of `method: kto`, Kahneman-Tversky optimisation. The defaults are those of TRL's KTOConfig."""

    beta: Beta = Field(
        default=0.1,
        description="How much a departure from the starting weights counts: the larger, the smaller the departure.",
    )
    desirable_weight: Weight = Field(default=1.0, description="Weight of answers that are labelled good.")
    undesirable_weight: Weight = Field(
        default=1.0,
        description="Weight of answers that are labelled bad. With fewer good ones than bad ones, raise "
        "desirable_weight so that both sides weigh about the same.",
    )


class PolicySpec(Section):
    """Options of `method: policy`, a policy gradient on recorded samples with advantages. The defaults are those of
    TRL's GRPOConfig."""

    clip: bool = Field(
        default=True,
        description="Clip the ratio to the policy that sampled, as PPO and GRPO do. false: plain importance sampling, "
        "without clip_low and clip_high.",
    )
    clip_low: float = Field(default=0.2, ge=0, le=1, description="The ratio counts down to 1 - clip_low.")
    clip_high: float = Field(
        default=0.2, ge=0, le=1000, description="The ratio counts up to 1 + clip_high. DAPO takes 0.28."
    )
    kl_coefficient: float = Field(
        default=0.0,
        ge=0,
        le=1000,
        description="Weight of the KL divergence from the starting weights. Above 0 their log-probabilities are "
        "computed before the first step.",
    )
    mean: Literal["tokens", "documents"] = Field(
        default="tokens",
        description="tokens: every token of a step weighs the same (DAPO); documents: every sample weighs the same, "
        "whatever its length (GRPO).",
    )


class SessionSpec(Section):
    """Options of `method: session`, whose steps are called one by one over the network (docs/sessions.md)."""

    idle_minutes: float = Field(
        default=15.0,
        gt=0,
        le=525_600,
        description="After this time without a call the session is checkpointed and gives back its memory; the next "
        "call brings it back.",
    )


@dataclass(frozen=True, kw_only=True)
class MethodFacts:
    """What the daemon knows of a method. `engine.objectives.OBJECTIVES` has its loss under the same name."""

    data: Literal["text", "preference", "kto", "samples", ""] = "text"
    """The kind of data that it learns from; empty where it has none, as its steps are called."""
    options: type[Section] | None = None
    """Its section of the spec, which has the method's name; None for plain cross-entropy."""
    needs_references: Callable[[Any], bool] = lambda options: False
    """Whether it compares, with these options, with the log-probabilities of the weights that a job starts with."""

    @property
    def has_objective(self) -> bool:
        """Whether its loss is a function of the tokens' log-probabilities; else it is cross-entropy, which needs no
        second pass."""
        return self.options is not None


METHODS: dict[str, MethodFacts] = {
    "sft": MethodFacts(),
    "pretrain": MethodFacts(),
    "dpo": MethodFacts(data="preference", options=DpoSpec, needs_references=lambda dpo: True),
    "ipo": MethodFacts(data="preference", options=IpoSpec, needs_references=lambda ipo: True),
    "orpo": MethodFacts(data="preference", options=OrpoSpec),
    "simpo": MethodFacts(data="preference", options=SimpoSpec),
    "kto": MethodFacts(data="kto", options=KtoSpec, needs_references=lambda kto: True),
    "policy": MethodFacts(
        data="samples", options=PolicySpec, needs_references=lambda policy: policy.kl_coefficient > 0
    ),
    "session": MethodFacts(data="", options=SessionSpec),
}


def check_kind(method: str, kind: str, dataset: str = "") -> None:
    """Check that a method learns from data of that kind (text, preference, kto or samples). `dataset` is its name for
    the message.

    Raises:
        InvalidSpec: it does not; the message says which methods do, and which data the method needs.
    """
    wanted = METHODS[method].data
    if kind == wanted:
        return
    if not wanted:
        raise InvalidSpec.of("method", f"method is {method}, which has no dataset; its data comes with each call")
    methods = [name for name, facts in METHODS.items() if facts.data == kind]
    found = f"dataset {dataset}" if dataset else "the dataset"
    problem = (
        f"{method}, which learns from data of kind {wanted}, and {found} is of kind {kind}; set method to "
        f"{' or '.join(methods)}, or use a dataset of kind {wanted}"
    )
    raise InvalidSpec.of("method", f"method is {problem}")
