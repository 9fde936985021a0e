"""Whether a model's layers compute a row in chunks, what they compute of it at once.

They do where tokens meet in attention alone, and attention is the engine's own. Other ways to mix tokens (convolutions,
states that go from token to token) show in a trial on the real weights.

Shapes: N = tokens of the trial's row, D = hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from horizon_server.engine.attention.chunked import KeySizes
from horizon_server.engine.device.protocol import Device
from horizon_server.engine.micro_batch import MicroBatch
from horizon_server.engine.packing_limit import is_rounding, random_documents, trial_row
from horizon_server.engine.template import Template
from horizon_server.errors import InvalidModel
from horizon_server.planning.ledger import CHUNK_TRIAL_TOKENS

HiddenStates = Callable[[Sequence[MicroBatch], int], tuple[Tensor, Tensor]]
"""Runs rows through the layers, in chunks of that many tokens or, with 0, as a whole: what goes into the first layer
and what comes out of the last."""


def key_sizes(template: Template) -> list[KeySizes]:
    """The sizes of each layer's keys.

    Raises:
        InvalidModel: the layers cannot compute chunks, as far as can be seen without weights; the message names the
            model.
    """
    own = template.own_attention
    if own is None:
        raise _refused(template, f"its attention is not the engine's own ({template.keeps_masks})")
    if not own.is_everywhere:
        raise _refused(template, "some layers keep a state from token to token, and chunks need attention in all")
    if any(len(of_layer) != 1 for of_layer in own.keys):
        raise _refused(template, "a layer attends more than once, of which chunks are not computed")
    return [sizes for (sizes,) in own.keys]


class ChunkTrial:
    """Tries a model once, when the first row comes that is longer than a chunk."""

    def __init__(self, template: Template, device: Device, hidden_states: HiddenStates, chunk_tokens: int) -> None:
        self._template, self._device = template, device
        self._hidden_states, self._chunk_tokens = hidden_states, chunk_tokens
        self._is_right: bool | None = None

    def check(self, row_tokens: int) -> None:
        """Check that a row of as many tokens may be computed as it is going to be. The device must have its memory.

        Raises:
            InvalidModel: it may not; the message names the model.
        """
        if not 0 < self._chunk_tokens < row_tokens:
            return
        limit = self._template.packing_limit
        if limit is not None and row_tokens > limit:
            raise _refused(self._template, f"it counts positions otherwise in rows of more than {limit} tokens")
        if self._is_right is None:
            self._is_right = self._try()
            # It does not count in any step's figures.
            self._device.take_use()
        if not self._is_right:
            raise _refused(self._template, "its layers compute something else in chunks (tried on its weights)")

    def _try(self) -> bool:
        limits = (CHUNK_TRIAL_TOKENS, self._template.packing_limit, self._template.max_document_tokens)
        num_tokens = min(limit for limit in limits if limit is not None)
        rows = [trial_row(random_documents(self._template.vocab_size, num_tokens))]

        def added_by(chunk_tokens: int) -> Tensor:
            inputs_ND, outputs_ND = self._hidden_states(rows, chunk_tokens)
            return (outputs_ND - inputs_ND).float()

        whole_ND, chunked_ND = added_by(0), added_by(max(1, num_tokens // 3))
        return is_rounding(chunked_ND, whole_ND, lambda: added_by(0), self._device.compute_dtype)


def _refused(template: Template, problem: str) -> InvalidModel:
    return InvalidModel(f"model_type {template.config.model_type!r}: {problem}; leave train.chunk_tokens out")
