"""Which tensors of a model learn at a rate of their own. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from horizon_server.errors import InvalidSpec
from horizon_server.expressions import fitting_names
from horizon_server.spec import LrGroup
from horizon_server.store.layout import StoreLayout, with_lr_scales

_FIELD = "train.lr_groups"


def with_lr_groups(layout: StoreLayout, groups: Sequence[LrGroup]) -> StoreLayout:
    """The layout with the scale of the first group that fits on each tensor, and 1 on those that none fits.

    Raises:
        InvalidSpec: a group changes nothing, because no tensor fits it or earlier groups have all that do.
    """
    names = [tensor.name for _, tensor in layout.tensors()]
    scales: dict[str, float] = {}
    for group in groups:
        new = [name for name in fitting_names(_FIELD, group.match, names) if name not in scales]
        if not new:
            raise InvalidSpec.of(
                _FIELD,
                f"{_FIELD}: {group.match!r} fits only tensors that groups before it fit too, and the first one counts; "
                "put it before them",
            )
        scales.update(dict.fromkeys(new, group.scale))
    return with_lr_scales(layout, scales)
