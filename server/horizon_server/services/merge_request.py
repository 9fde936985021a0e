"""What the child that merges an adapter is asked for. A module of its own: the daemon imports it, and the child's loads
torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from horizon_server.spec.lora import BaseFormat
from horizon_server.store.checkpoint_parts import MergeBase
from horizon_server.store.exported import ExportDtype
from horizon_server.store.manifest import BaseModel


@dataclass(frozen=True, kw_only=True)
class MergeRequest:
    """The model `target` of `base`, which `base_model` names, and `adapter`.

    `digests` is the book of digests; `kept_as` is how the job kept its base in memory, and `merge_base` whether those
    values are used.
    """

    base: Path
    base_model: BaseModel
    digests: Path
    adapter: Path
    target: Path
    dtype: ExportDtype
    merge_base: MergeBase
    kept_as: BaseFormat
    min_free_bytes: int | None
