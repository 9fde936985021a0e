"""Floating-point operations of a model: what a step is worth, and what its utilisation is counted from. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from horizon_server.planning.model_folder import ModelFolder, ModelShape
from horizon_server.store.layout import StoreLayout
from horizon_server.store.model_files import text_config

FLOPS_PER_PARAMETER = 6
FLOPS_PER_PAIR_ELEMENT = 12
_EXPERT_DIMENSIONS = 3


class FlopsCount:
    """Floating-point operations a step is worth: the model's own, whatever the engine really spends on recomputing.

    Per token, forward and backward: 6 per parameter in a matrix product, plus attention: 12 x layers x heads x head
    size per pair of tokens that may see each other (causal, inside the document, inside the window of sliding layers).
    Of these, a third is forward. By the `layout`, a frozen parameter takes 4, as it has no gradient of its own, and 2
    before the first trained unit, where no backward is. The config is config.json's object, or `to_dict` of its class.

    Source: PaLM (arXiv 2204.02311), appendix B, with the causal half and the window left out as never computed.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        config: Mapping[str, Any],
        *,
        tied: bool,
        embedding_name: str,
        layout: StoreLayout | None = None,
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
        self._flops_per_parameter = float(FLOPS_PER_PARAMETER)
        self._flops_per_pair_element = float(FLOPS_PER_PAIR_ELEMENT)
        if layout is not None:
            trained, reached = trained_shares(layout)
            self._flops_per_parameter *= (1 + reached + trained) / 3
            self._flops_per_pair_element *= 1 - 2 / 3 * layout.num_skipped_layers / (len(layout.units) - 2)
        self._width: int = model.num_attention_heads * model.head_dim
        layer_types = text.get("layer_types") or ["full_attention"] * model.num_hidden_layers
        # A window that config.json does not give layer by layer is left out.
        self._windows = [text.get("sliding_window") if kind == "sliding_attention" else None for kind in layer_types]

    @classmethod
    def of_folder(cls, folder: ModelFolder) -> FlopsCount:
        """The count of a model folder, without torch."""
        table = max(folder.layout.units[0].tensors, key=lambda tensor: tensor.num_elements)
        shapes = {tensor.name: tensor.shape for _, tensor in folder.layout.tensors()}
        return cls(shapes, folder.config, tied=folder.shape.tied, embedding_name=table.name, layout=folder.layout)

    def of(self, document_lengths: Sequence[int]) -> float:
        """Operations of one step over documents of these lengths, forward and backward."""
        matrices = self._flops_per_parameter * self.active_parameters * sum(document_lengths)
        return matrices + self.of_attention(document_lengths)

    def of_attention(self, document_lengths: Sequence[int]) -> float:
        """The part of `of` that attention's scores and values are."""
        pairs = 0
        for window in set(self._windows):
            for length in document_lengths:
                # What is outside the window is a triangle too.
                beyond = 0 if window is None else max(0, length - window)
                pairs += self._windows.count(window) * (length * (length + 1) - beyond * (beyond + 1)) // 2
        return self._flops_per_pair_element * self._width * pairs


def trained_shares(layout: StoreLayout) -> tuple[float, float]:
    """Of the elements of all matrices that are multiplied: the share that is trained, and the share that backward
    passes through."""
    total = trained = reached = 0
    for unit, tensor in layout.tensors():
        if len(tensor.shape) > 1 and (unit.kind != "embedding" or layout.tied):
            total += tensor.num_elements
            trained += tensor.num_elements * tensor.trained
            # A tied table is the head's projection.
            reached += tensor.num_elements * (unit.kind == "embedding" or unit.index >= layout.first_trained_unit)
    return (trained / total, reached / total) if total else (1.0, 1.0)
