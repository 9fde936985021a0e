"""The section `train.lora`: adapters of low rank next to a frozen model.

For an adapted weight W of a layer, y = x W' becomes y = x W' + scale * dropout(x) A' B' (LoRA, arXiv 2106.09685). With
`dora` the adapted weight V = W + scale * B A is used as m V / |V|: m are trained magnitudes, |V| the norms of its rows
(DoRA, arXiv 2402.09353).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from horizon_server.expressions import NOT, problem_of
from horizon_server.spec.fields import MAX_EXPRESSION_CHARS, MAX_EXPRESSIONS, Section, list_as_tuple, text_as_list
from horizon_server.spec.words import RULE

ALL_LINEAR = ("all-linear",)
"""`train.lora.targets` of a job that adapts every linear map of the layers."""
MAX_RANK = 4096
BaseFormat = Literal["source", "int8", "nf4"]


class LoraSpec(Section):
    """The adapters A and B that `train.trainable: lora` trains next to a frozen model; A begins random, from
    train.seed, B at zero."""

    rank: int = Field(
        default=16,
        ge=1,
        le=MAX_RANK,
        description="Rows of A and columns of B. An adapter of a map from I to O numbers has rank * (I + O) trained "
        "parameters, which take 12 to 16 bytes each; the frozen model takes 2 bytes of host memory a parameter where "
        "it is in bfloat16, else 4.",
    )
    alpha: float = Field(
        default=32.0,
        gt=0,
        le=1e6,
        description="What the adapters' output is scaled by: alpha / rank, with rslora alpha / sqrt(rank).",
    )
    dropout: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Share of an adapter's inputs that is set to zero in training, at random and for each adapter; the "
        "others are scaled up. Evaluations are without it.",
    )
    targets: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=MAX_EXPRESSION_CHARS)], ...], list_as_tuple, text_as_list
    ] = Field(
        default=ALL_LINEAR,
        min_length=1,
        max_length=MAX_EXPRESSIONS,
        description="Which weights have adapters: all-linear, or regular expressions that are found in the names of "
        "the layers' matrices, each adding some or, after a !, taking some away: [q_proj, v_proj]. all-linear is every "
        "linear map of the layers but routers and the experts of a mixture; the plan names what is left out.",
        json_schema_extra={
            RULE: f"all-linear, or a list of 1 to {MAX_EXPRESSIONS} regular expressions of up to "
            f"{MAX_EXPRESSION_CHARS} characters"
        },
    )
    rslora: bool = Field(
        default=False,
        description="Scale by alpha / sqrt(rank), so that high ranks learn as fast as low ones (rsLoRA, arXiv "
        "2312.03732).",
    )
    dora: bool = Field(
        default=False,
        description="Train the length of each output's weights apart from their direction: one more trained number for "
        "each output of an adapted map (DoRA, arXiv 2402.09353). Often better at low ranks, and slower than plain "
        "LoRA.",
    )
    base: BaseFormat = Field(
        default="source",
        description="How the frozen matrices of the layers are kept in host memory and sent to the device, which turns "
        "them into numbers again. source: as in the model folder; int8: 1 byte a parameter, a scale for each row; nf4: "
        "4 bits and 8 for every 64, as QLoRA. Both round the model that the adapters are trained on; embedding, head, "
        "norms and routers stay as they are.",
    )

    @property
    def scale(self) -> float:
        """What the adapters' output is multiplied by."""
        return float(self.alpha / (self.rank**0.5 if self.rslora else self.rank))

    @field_validator("targets")
    @classmethod
    def _expressions_that_can_be_used(cls, targets: tuple[str, ...]) -> tuple[str, ...]:
        for expression in targets:
            if problem := problem_of(expression.removeprefix(NOT)):
                raise ValueError(problem)
        if len(targets) > 1 and ALL_LINEAR[0] in targets:
            raise ValueError("holds all-linear and expressions; keep either all-linear or the expressions")
        return targets
