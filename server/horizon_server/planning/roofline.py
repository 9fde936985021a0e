"""How long a step takes on a machine whose speeds were measured, before it is run: what the schedule computes, what crosses the
link, what the optimizer moves. Every speed is measured (`engine.rate_probe`), none is guessed.

A step has two phases. Forward computes the layers once, and the last step's deferred update runs just ahead of it; backward is the
head, each layer once more and twice that for its gradients. A device with memory of its own overlaps what its queues do, so a phase
takes as long as its slowest queue. The host device's queues share the same processors and memory, so there they add up.

What is not known before the data is prepared is taken at its upper end: all tokens are trained on, each row is one document as long
as `sequence_length`, no two tokens are the same.

Units: seconds, bytes, floating-point operations.
Source: docs/architecture.md, "One step of training"; Williams et al., Roofline (CACM 52:4).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from horizon_server.planning.bandwidth import adamw_bytes_per_parameter
from horizon_server.planning.ledger import (
    DEFAULT_COMPUTE_DTYPE,
    ELEMENT_BYTES,
    NUM_SLOTS,
    ActivationPlacement,
    ComputeDtype,
    DeviceKind,
)
from horizon_server.planning.model_folder import ModelFolder, ModelShape
from horizon_server.records.plan import Bound, StepPrediction
from horizon_server.store.model_files import text_config

_FLOPS_PER_PARAMETER = 6
_FLOPS_PER_PAIR_ELEMENT = 12
_FORWARD_SHARE = 1 / 3
"""Of a model's own operations; backward is twice that, and recomputes the layers' forward besides."""
_EXPERT_DIMENSIONS = 3


class FlopsCount:
    """Floating-point operations a step is worth: the model's own, whatever the engine really spends on recomputing.

    Per token, forward and backward: 6 per parameter in a matrix product, plus attention: 12 x layers x heads x head size per pair of
    tokens that may see each other (causal, inside the document, inside the window of sliding layers). The config is config.json's object,
    or `to_dict` of its class.

    Source: PaLM (arXiv 2204.02311), appendix B, with the causal half and the window left out as never computed.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any], *, tied: bool, embedding_name: str
    ) -> None:
        text = text_config(config)
        model = ModelShape.from_config(config)
        # A token visits only some of the routed experts.
        visited = 1.0 if model.experts is None else model.experts.num_experts_per_token / model.experts.num_experts
        self.active_parameters: float = sum(
            # An expert's tensor: stacked in one tensor by the model class, one by one in a checkpoint.
            math.prod(shape) * (visited if len(shape) == _EXPERT_DIMENSIONS or ".experts." in name else 1.0)
            for name, shape in shapes.items()
            # An untied input table is looked up, not multiplied.
            if len(shape) > 1 and (tied or name != embedding_name)
        )
        self._width: int = model.num_attention_heads * model.head_dim
        layer_types = text.get("layer_types") or ["full_attention"] * model.num_hidden_layers
        # A window that config.json does not give layer by layer is left out.
        self._windows = [text.get("sliding_window") if kind == "sliding_attention" else None for kind in layer_types]

    @classmethod
    def of_folder(cls, folder: ModelFolder) -> FlopsCount:
        """The count of a model folder, without torch."""
        table = max(folder.layout.units[0].tensors, key=lambda tensor: tensor.num_elements)
        shapes = {tensor.name: tensor.shape for _, tensor in folder.layout.tensors()}
        return cls(shapes, folder.config, tied=folder.shape.tied, embedding_name=table.name)

    def of(self, document_lengths: Sequence[int]) -> float:
        """Operations of one step over documents of these lengths, forward and backward."""
        matrices = _FLOPS_PER_PARAMETER * self.active_parameters * sum(document_lengths)
        return matrices + self.of_attention(document_lengths)

    def of_attention(self, document_lengths: Sequence[int]) -> float:
        """The part of `of` that attention's scores and values are."""
        pairs = 0
        for window in set(self._windows):
            for length in document_lengths:
                # What is outside the window is a triangle too.
                beyond = 0 if window is None else max(0, length - window)
                pairs += self._windows.count(window) * (length * (length + 1) - beyond * (beyond + 1)) // 2
        return float(_FLOPS_PER_PAIR_ELEMENT * self._width * pairs)


@dataclass(frozen=True, kw_only=True)
class WidthRates:
    """What models of one hidden size reach: a whole decoder layer forward, recomputed and backward, without attention's scores; and
    a logits chunk with its loss and gradients. Units: operations per second."""

    hidden_size: int
    layer_flops_per_s: float
    head_flops_per_s: float


@dataclass(frozen=True, kw_only=True)
class DeviceRates:
    """What was measured on one kind of device. `widths` is in ascending order and not empty.

    Copies are those of the engine: on the host, h2d merges the two halves of a master weight and d2h sums a gradient's squares too.
    `adamw_bytes_per_s` is what the optimizer's kernel moves through host memory.
    """

    name: str
    num_threads: int
    peak_flops_per_s: float
    attention_flops_per_s: float
    widths: tuple[WidthRates, ...]
    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    adamw_bytes_per_s: float

    @classmethod
    def from_mapping(cls, plain: Mapping[str, Any]) -> DeviceRates:
        """The rates that `dataclasses.asdict` made plain.

        Raises:
            KeyError, TypeError, ValueError: a field is missing or unknown, or a rate is not above zero.
        """
        widths = tuple(WidthRates(**width) for width in plain["widths"])
        rates = cls(**{**plain, "widths": widths})
        numbers = [value for part in (rates, *widths) for name, value in vars(part).items() if name.endswith("_per_s")]
        if not widths or not all(math.isfinite(number) and number > 0 for number in numbers):
            raise ValueError("every rate is above zero, and at least one width is there")
        return rates

    def at(self, hidden_size: int) -> WidthRates:
        """The measured width that is nearest in ratio."""
        return min(self.widths, key=lambda w: max(w.hidden_size / hidden_size, hidden_size / w.hidden_size))


@dataclass(frozen=True, kw_only=True)
class Phase:
    """What forward or backward of a step does. `host_bytes` is the optimizer's traffic alone."""

    layer_flops: float
    head_flops: float = 0
    attention_flops: float
    h2d_bytes: float
    d2h_bytes: float
    host_bytes: float


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """One optimizer step as the schedule carries it out."""

    num_tokens: int
    hidden_size: int
    forward: Phase
    backward: Phase


def work_of_step(
    folder: ModelFolder,
    *,
    tokens_per_step: int,
    sequence_length: int,
    device_kind: DeviceKind,
    grad_bytes: int,
    activation_placement: ActivationPlacement,
    compute_dtype: ComputeDtype | None = None,
) -> StepWork:
    """Count a step. `grad_bytes` is the size of one stored gradient; 0 updates each unit in backward, as its gradient lands.

    Without a `compute_dtype`, the device's default.
    """
    model, layout = folder.shape, folder.layout
    element = ELEMENT_BYTES[compute_dtype or DEFAULT_COMPUTE_DTYPE[device_kind]]
    count = FlopsCount.of_folder(folder)
    num_full, rest = divmod(tokens_per_step, sequence_length)
    attention = count.of_attention([sequence_length] * num_full + [rest])
    head_flops = _FLOPS_PER_PARAMETER * tokens_per_step * model.vocab_size * model.hidden_size
    layer_flops = _FLOPS_PER_PARAMETER * tokens_per_step * count.active_parameters - head_flops
    layers = sum(unit.num_elements for unit in layout.units if unit.kind == "layer")
    # Where forward turns into backward, the last layers are still in their slots.
    kept = sum(unit.num_elements for unit in [unit for unit in layout.units if unit.kind == "layer"][-NUM_SLOTS:])
    embedded = min(tokens_per_step, model.vocab_size) * model.hidden_size
    # The projection of a tied model is the embedding's table.
    head = layout.units[-1].num_elements + (layout.units[0].num_elements if layout.tied else 0)
    # The last layer's input is still on the device when backward begins.
    offloaded = (model.num_hidden_layers - 1) * tokens_per_step * model.hidden_size
    offloaded_bytes = offloaded * element if activation_placement == "host" else 0
    optimizer_bytes = layout.num_elements * adamw_bytes_per_parameter(grad_bytes or element)
    forward = Phase(
        layer_flops=layer_flops * _FORWARD_SHARE,
        attention_flops=attention * _FORWARD_SHARE,
        h2d_bytes=(embedded + layers + head) * element,
        d2h_bytes=offloaded_bytes,
        host_bytes=optimizer_bytes if grad_bytes else 0,
    )
    backward = Phase(
        layer_flops=layer_flops,
        head_flops=head_flops,
        attention_flops=attention,
        h2d_bytes=(layers - kept + embedded) * element + offloaded_bytes,
        d2h_bytes=(layers + head + (0 if layout.tied else embedded)) * element,
        host_bytes=0 if grad_bytes else optimizer_bytes,
    )
    return StepWork(num_tokens=tokens_per_step, hidden_size=model.hidden_size, forward=forward, backward=backward)


def predict_step(
    work: StepWork, rates: DeviceRates, *, device_kind: DeviceKind, max_steps: int | None = None
) -> StepPrediction:
    """Return how long a step takes at these speeds, and `max_steps` of them."""
    parts: dict[Bound, float] = dict.fromkeys(("compute", "h2d", "d2h", "host memory"), 0.0)
    width = rates.at(work.hidden_size)
    for phase in (work.forward, work.backward):
        # A link's copies read and write the optimizer's memory; on the host device they are timed as a whole.
        shared_bytes = phase.h2d_bytes + phase.d2h_bytes if device_kind == "cuda" else 0
        # How long each queue would take, had it the machine to itself.
        seconds: dict[Bound, float] = {
            "compute": phase.layer_flops / width.layer_flops_per_s
            + phase.head_flops / width.head_flops_per_s
            + phase.attention_flops / rates.attention_flops_per_s,
            "h2d": phase.h2d_bytes / rates.h2d_bytes_per_s,
            "d2h": phase.d2h_bytes / rates.d2h_bytes_per_s,
            "host memory": (phase.host_bytes + shared_bytes) / rates.adamw_bytes_per_s,
        }
        slowest = max(seconds, key=seconds.__getitem__)
        for queue in seconds if device_kind == "host" else (slowest,):
            parts[queue] += seconds[queue]
    step_s = sum(parts.values())
    return StepPrediction(
        step_s=step_s,
        tokens_per_second=work.num_tokens / step_s,
        bound=max(parts, key=parts.__getitem__),
        peak_flops_per_s=rates.peak_flops_per_s,
        total_s=None if max_steps is None else max_steps * step_s,
    )
