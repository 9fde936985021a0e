"""What the layers of a model keep for their backward, counted on one layer of each kind at two lengths.

For models whose layers no formula of the plan covers: state spaces, linear attention, delta rules. No gradient is computed, and
parameters are zeros that are only read, for which the kernel provides one page: a count takes seconds, and little memory even where the
model is large.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from horizon_server.engine.template import Template
from horizon_server.planning.ledger import LayerMemory

# Recurrent layers work on chunks of up to 256 tokens and pad to them, so a curve through shorter rows is wrong.
_LENGTHS = (512, 1024)


def measure_layer_memory(folder: Path, *, lengths: tuple[int, int] = _LENGTHS) -> LayerMemory:
    """Count what the layers of a folder's model keep for rows of two lengths, in tokens.

    Raises:
        InvalidModel: the model cannot be trained layer by layer.
    """
    template = Template.from_folder(folder)
    return LayerMemory.through(lengths, (_saved_bytes(template, lengths[0]), _saved_bytes(template, lengths[1])))


def _saved_bytes(template: Template, num_tokens: int) -> int:
    """The most that any kind of layer keeps for a row."""
    ids_T, positions_T = torch.zeros(num_tokens, dtype=torch.int64), torch.arange(num_tokens)
    with torch.no_grad():
        table = {place.name: torch.zeros(place.piece.shape) for place in template.places[0]}
        hidden_1TD, calls = template.embed(table, ids_T, positions_T)
    counts: dict[int, int] = {}
    for index, group in enumerate(template.layer_groups):
        # Layers of a group are equal, so one of them counts for all.
        if group in counts:
            continue
        kept: dict[int, int] = {}

        def note(tensor: Tensor, kept: dict[int, int] = kept) -> Tensor:
            # By storage, because autograd often saves several views of one tensor.
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        parameters = {
            place.name: torch.zeros(place.piece.shape, requires_grad=True) for place in template.places[index + 1]
        }
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            # Held until the count is done, so that no address is used twice.
            output = template.layer(index, parameters, hidden_1TD.detach().requires_grad_(), calls[index])
        own = {parameter.untyped_storage().data_ptr() for parameter in parameters.values()}
        counts[group] = sum(size for address, size in kept.items() if address not in own)
        del output
    return max(counts.values())
