"""Experts that come in pages, as the planner sees them: which layers have some, and what that takes of the device.
Torch-free.

Units: elements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from horizon_server.errors import InvalidSpec
from horizon_server.planning.model_folder import ExpertShape, ModelFolder, ModelShape
from horizon_server.records.execution import Execution
from horizon_server.store.layout import StoreLayout, UnitLayout
from horizon_server.store.model_files import text_config
from horizon_server.store.packed_pieces import copied_bytes, packed_pieces
from horizon_server.store.pages import EXPERT_NAME, MOST_PAGE_ELEMENTS, PagedUnit, paged_unit, reaches_all


@dataclass(frozen=True, kw_only=True)
class PagesPlan:
    """The layers of a layout whose experts come in pages, by the index of the unit; none where layers are whole."""

    units: Mapping[int, PagedUnit]

    @classmethod
    def of(cls, layout: StoreLayout, page_elements: int) -> PagesPlan:
        """What pages of at most `page_elements` mean on a layout; 0 is whole layers."""
        layers = [unit for unit in layout.units if page_elements and unit.kind == "layer"]
        found = {unit.index: paged_unit(unit, page_elements) for unit in layers}
        return cls(units={index: paged for index, paged in found.items() if paged is not None})

    def num_elements(self, unit: UnitLayout) -> int:
        """Of what is on the device of a layer while it is visited, besides pages."""
        return self.units[unit.index].rest.num_elements if unit.index in self.units else unit.num_elements

    def trained_elements(self, unit: UnitLayout) -> int:
        """The same of its gradient."""
        return self.units[unit.index].rest.trained_elements if unit.index in self.units else unit.trained_elements

    def packed_bytes(self, layout: StoreLayout) -> int:
        """The memory in which packed weights arrive."""
        own = (self.units[u.index].packed_bytes if u.index in self.units else u.packed_bytes for u in layout.units)
        return max(own, default=0)

    def brought(self, unit: UnitLayout, element_bytes: int, share: float) -> PageTraffic:
        """What each visit of a layer brings of its pages, where it brings this share of its experts."""
        if unit.index not in self.units:
            return PageTraffic()
        spans = [(span.start, span.stop) for page in self.units[unit.index].pages for span in page.spans]
        plain = sum(max(0, min(stop, unit.unpacked_elements) - start) for start, stop in spans)
        packed = copied_bytes(packed_pieces(unit, spans))
        unpacked = (sum(stop - start for start, stop in spans) - plain) * element_bytes
        return PageTraffic(
            all_bytes=plain * element_bytes + packed,
            upload_bytes=share * (plain * element_bytes + packed),
            all_unpack_bytes=packed + unpacked if packed else 0,
            unpack_bytes=share * (packed + unpacked) if packed else 0,
        )

    @property
    def page_elements(self) -> int:
        """Of the largest page."""
        return max((page.num_elements for paged in self.units.values() for page in paged.pages), default=0)

    @property
    def page_trained_elements(self) -> int:
        """Of its gradient."""
        return max((page.trained_elements for paged in self.units.values() for page in paged.pages), default=0)

    def shape(self, model: ModelShape) -> ModelShape:
        """The sizes of a model whose experts are computed one after the other."""
        if not self.units or model.experts is None:
            return model
        # Where all layers have experts, the inner size in the config is theirs.
        dense = 0 if len(self.units) == model.num_hidden_layers else model.intermediate_size
        return replace(model, intermediate_size=dense, experts=replace(model.experts, one_by_one=True))


@dataclass(frozen=True, kw_only=True)
class PageTraffic:
    """Bytes of a layer's experts: all of them, and those that a visit brings; over the link, and of the device's memory
    while packed ones are unpacked."""

    all_bytes: float = 0.0
    upload_bytes: float = 0.0
    all_unpack_bytes: float = 0.0
    unpack_bytes: float = 0.0


def visited_share(experts: ExpertShape | None, num_tokens: int) -> float:
    """The share of a layer's experts that a pass over `num_tokens` is expected to bring. It assumes even routing,
    where a token is as likely to choose one expert as another. Where routing is uneven, fewer are visited."""
    if experts is None or reaches_all(experts.num_experts, num_tokens * experts.num_experts_per_token):
        return 1.0
    return float(1 - (1 - experts.num_experts_per_token / experts.num_experts) ** num_tokens)


NEVER_PAGED = frozenset({"afmoe", "axk1", "dbrx", "flex_olmo", "kolibri1", "llama4_text"})
"""Model types whose classes do not call their experts by transformers' ExpertsInterface, or do more with the result
than add it up, so that backward needs it before the pages are there (a test compares)."""


def check_pages(folder: ModelFolder, execution: Execution) -> None:
    """Let pass what can be in pages.

    Raises:
        InvalidSpec: pages are asked for, and the model has no experts that can be.
    """
    if execution.expert_page_elements and (why := why_not_paged(folder, execution.expert_page_elements)):
        raise InvalidSpec.of("memory.experts", f"memory.experts is paged, and {why}; or use memory.experts: whole")


def why_not_paged(folder: ModelFolder, page_elements: int) -> str:
    """Why a model's experts cannot be in pages of this size; empty where they can."""
    model_type = text_config(folder.config).get("model_type")
    if model_type in NEVER_PAGED:
        return f"the class of {model_type} models computes their experts in a way that cannot be divided"
    if any(tensor.adapts and EXPERT_NAME.search(tensor.name) for _, tensor in folder.layout.tensors()):
        return "adapters of its experts are trained, which need all experts at once"
    if PagesPlan.of(folder.layout, page_elements).units:
        return ""
    if any(tensor.packing == "nf4" and EXPERT_NAME.search(tensor.name) for _, tensor in folder.layout.tensors()):
        return (
            f"the experts of {model_type} models end within a block of 64 numbers that nf4 keeps together; use "
            "train.lora.base: int8"
        )
    return "the model has no layers of experts"


def pages_of_answers(folder: ModelFolder) -> int:
    """The most elements of a page of experts where a model of this layout answers; 0 where its layers stay whole,
    because it has no experts, or none that can be in pages."""
    return 0 if why_not_paged(folder, MOST_PAGE_ELEMENTS) else MOST_PAGE_ELEMENTS
