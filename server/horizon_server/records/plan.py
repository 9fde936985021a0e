"""A job's memory plan and the predicted time of its steps."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

Bound = Literal["compute", "h2d", "d2h", "host memory"]


def size_text(num_bytes: float) -> str:
    """A size in MiB, or in GiB from one GiB on."""
    return f"{num_bytes / 2**30:,.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.1f} MiB"


@dataclass(frozen=True, kw_only=True)
class PlannedMachine:
    """A machine that a plan is asked about: its GPU by name, and 10^9 bytes per second of host memory and link. None leaves the link to
    the GPU's data sheet, and host memory without a limit."""

    gpu: str
    host_gbps: float
    link_gbps: float | None = None
    host_memory_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class StepPrediction:
    """What a step is expected to take. `bound` is the queue that limits it; `total_s` is the whole job, where its steps are known, with the
    pass before the first one.

    `peak_flops_per_s` is the device's matrix product, which model FLOPs utilisation refers to; `model_flops_per_s` is what a step is
    worth in its time. `parts_s` are seconds by kind of work, which overlap; `ramp` and `tail`, in which compute waits at a step's ends,
    are parts of `exposed`. `machine` is what the rates belong to, and `measured` whether they were measured or estimated.
    """

    step_s: float
    tokens_per_second: float
    bound: Bound
    peak_flops_per_s: float
    total_s: float | None = None
    # Predictions of earlier versions, which the database holds, have none of these.
    model_flops_per_s: float = 0.0
    parts_s: dict[str, float] = field(default_factory=dict)
    machine: str = ""
    measured: bool = True


@dataclass(frozen=True, kw_only=True)
class ReferencePass:
    """The pass over a job's data before its first step, for the log-probabilities of its starting weights, where its method needs them.

    `num_tokens` are those of all documents, trained and evaluated; None where the data is not known. `tokens_estimated`: they are
    estimated from the size of the files, as the data is not prepared. A job that finds the numbers of an earlier one has no pass.
    """

    tokens_per_second: float
    num_tokens: int | None = None
    tokens_estimated: bool = False
    total_s: float | None = None
    done_share: float = 0.0
    """What of it is done, 0 to 1, as the worker last reported."""


@dataclass(frozen=True, kw_only=True)
class KeptMemory:
    """What stays on a device that has memory to spare, and what that buys.

    The weights of `resident_layers` stay from step to step, and the last `product_layers` keep the products of their forward for their
    backward. `saved_share` is the predicted part of a step's time that it saves.
    """

    resident_layers: int = 0
    resident_bytes: int = 0
    product_layers: int = 0
    product_bytes: int = 0
    saved_share: float = 0.0

    @property
    def text(self) -> str:
        """In one line, for people."""
        parts = [
            f"{what} of {num_layers} layer{'' if num_layers == 1 else 's'} ({size_text(num_bytes)})"
            for what, num_layers, num_bytes in (
                ("weights", self.resident_layers, self.resident_bytes),
                ("activations", self.product_layers, self.product_bytes),
            )
            if num_layers
        ]
        return f"{', '.join(parts)}; saves about {self.saved_share:.0%} of a step"


@dataclass(frozen=True, kw_only=True)
class JobPlan:
    """The memory ledger of a job against the node's limits. Units: bytes; components by name, such as weights and moments."""

    host_bytes: dict[str, int]
    device_bytes: dict[str, int]
    host_limit_bytes: int
    device_limit_bytes: int
    num_parameters: int
    device: str
    compute_dtype: str = ""
    """What layers are computed in; empty in the plan of an earlier version."""
    message: str = ""
    """When it does not fit: the numbers and the smallest change that would make it fit; else nothing."""
    hint: str = ""
    """A change to the spec that would make the job faster, with what it costs; empty where none is known."""
    prediction: StepPrediction | None = None
    """None while the machine's speed has not been measured."""
    num_trained_parameters: int = 0
    """The others are frozen; 0 in the plan of an earlier version."""
    kept: KeptMemory | None = None
    """None where the device has nothing to spare, or it would save nothing."""
    references: ReferencePass | None = None
    """None where the method needs no reference log-probabilities, or the machine's speed has not been measured."""
    num_steps: int | None = None
    """Steps of the whole job; None while nothing is known of its data, where only that decides."""
    steps_estimated: bool = False
    """Whether they are estimated from the size of the files, as the data is not prepared."""
    warnings: tuple[str, ...] = ()
    """What the job asks for and cannot be done, or is likely not meant, although it fits: one sentence each."""

    @property
    def host_total_bytes(self) -> int:
        """Sum over the host's components."""
        return sum(self.host_bytes.values())

    @property
    def device_total_bytes(self) -> int:
        """Sum over the device's components."""
        return sum(self.device_bytes.values())

    @property
    def fits(self) -> bool:
        """Whether its memory is within both limits; slowness never counts."""
        return self.host_total_bytes <= self.host_limit_bytes and self.device_total_bytes <= self.device_limit_bytes

    @property
    def references_s(self) -> float:
        """Seconds of the pass before the first step, as far as they are known."""
        return 0.0 if self.references is None else self.references.total_s or 0.0

    def with_references_done(self, share: float) -> JobPlan:
        """The plan of a job of which that share of the pass before the first step is done."""
        if self.references is None:
            return self
        return dataclasses.replace(self, references=dataclasses.replace(self.references, done_share=share))

    def with_steps(self, num_steps: int, *, estimated: bool = False) -> JobPlan:
        """The plan of a job whose number of steps has become known."""
        known = dataclasses.replace(self, num_steps=num_steps, steps_estimated=estimated)
        if self.prediction is None:
            return known
        total_s = num_steps * self.prediction.step_s + self.references_s
        return dataclasses.replace(known, prediction=dataclasses.replace(self.prediction, total_s=total_s))

    @property
    def summary(self) -> str:
        """The plan in one line, for people."""
        on_device = f" and {size_text(self.device_total_bytes)} on the device" if self.device != "host" else ""
        dtype = f", computed in {self.compute_dtype}" if self.compute_dtype else ""
        planned = f"planned {size_text(self.host_total_bytes)} on the host{on_device}{dtype}"
        if self.prediction is None:
            return planned
        speed = f"{self.prediction.tokens_per_second:,.0f} tokens/s, bound by {self.prediction.bound}"
        return f"{planned}, predicted {speed}"
