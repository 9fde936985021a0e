"""Whether a model keeps packed documents independent of each other, and up to which length of a row.

Most architectures of transformers see where documents end from `position_ids` alone; some (attention sinks, linear
attention) silently mix them, without any error. `supports_packing` finds out by running the model on its real weights.

Some architectures change how they count positions once a row is long: the rotary factors of the whole row depend on its
longest document, or attention gets a temperature by the position in the row. The trial on the real weights runs short
documents, so it cannot see that. Everything a model derives from positions alone costs next to nothing, so
`find_packing_limit` computes it for rows of any length.

Shapes: T = tokens of the trial, N = tokens of all its rows, D = hidden size.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_leaves_with_path, tree_map_only

from horizon_server.engine.attention.fused import without_fused_kernels
from horizon_server.engine.layer_stubs import NUM_TRIAL_TOKENS, RUN_ERRORS, LayerCall
from horizon_server.engine.micro_batch import IGNORED_LABEL, MicroBatch, grouped

CallsOf = Callable[[Tensor], list[LayerCall]]
"""Computes the calls of all layers for a row of these positions."""

HiddenStates = Callable[[Sequence[MicroBatch]], tuple[Tensor, Tensor]]
"""Runs rows through the layers: what goes into the first one and what comes out of the last."""

# Positions up to here are exact in fp32.
_MAX_ROW_TOKENS = 1 << 24
_DOCUMENT_TOKENS = 16
_TOLERANCE = 1e-5
_PROBE_LENGTHS = (13, 19)
_PROBE_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
# Documents that are mixed differ by about as much as they add; what is far below that is rounding.
_TIMES_NOISE, _MOST_NOISE = 2.0, 0.25


def find_packing_limit(
    calls_of: CallsOf,
    layers: Sequence[tuple[nn.Module, LayerCall]],
    *,
    hidden_size: int,
    max_document_tokens: int | None,
) -> int | None:
    """The most tokens a packed row may have, or None where no length changes anything. `layers` are one of each kind,
    with a call.

    What already differs in short rows is not judged here: the trial on the real weights runs those.
    """
    trials = [_own_positions_agree(*layer, hidden_size=hidden_size) for layer in layers]
    trials.append(_calls_agree(calls_of, max_document_tokens=max_document_tokens or _MAX_ROW_TOKENS))
    if all(agree(_MAX_ROW_TOKENS) for agree in trials):
        return None
    # Once a length changes something, all greater ones do: thresholds are crossed once.
    lengths = range(_DOCUMENT_TOKENS, _MAX_ROW_TOKENS)
    first = bisect.bisect_left(lengths, True, key=lambda length: not all(agree(length) for agree in trials))
    return lengths[first] - 1


def supports_packing(hidden_states: HiddenStates, *, vocab_size: int, compute_dtype: torch.dtype) -> bool:
    """Run two short documents packed and apart through the real layers, in one pass over the weights, and compare.

    The error counts relative to what the layers add to the hidden state, so that a large residual cannot hide it.
    """

    documents = random_documents(vocab_size, *_PROBE_LENGTHS)
    apart = [trial_row([document]) for document in documents]

    def added_by(rows: list[MicroBatch]) -> Tensor:
        inputs_ND, outputs_ND = hidden_states(rows)
        return (outputs_ND - inputs_ND).float()

    # The first half is the packed row, the second the same documents in rows of their own.
    packed_ND, apart_ND = added_by([trial_row(documents), *apart]).chunk(2)
    # Packed and single rows may run in different kernels of attention.
    return is_rounding(packed_ND, apart_ND, lambda: added_by(apart), compute_dtype)


def random_documents(vocab_size: int, *lengths: int) -> list[Tensor]:
    """Tokens of a trial's documents, always the same. Shapes: [T] each."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(vocab_size, (length,), generator=generator) for length in lengths]


def trial_row(documents: list[Tensor]) -> MicroBatch:
    """A row of them, on which nothing is trained."""
    lengths = tuple(document.numel() for document in documents)
    return MicroBatch(
        input_ids_T=torch.cat(documents),
        position_ids_T=torch.cat([torch.arange(length) for length in lengths]),
        labels_T=torch.full((sum(lengths),), IGNORED_LABEL),
        document_lengths=lengths,
    )


def is_rounding(found_ND: Tensor, wanted_ND: Tensor, again: Callable[[], Tensor], compute_dtype: torch.dtype) -> bool:
    """Whether two results differ by rounding alone; `again` makes what is wanted once more, by other kernels."""
    # Never divided: layers of weights that are not finite, or of zeros, add nothing that could be divided by.
    size = float(wanted_ND.norm())
    error, tolerance = float((found_ND - wanted_ND).norm()), _PROBE_TOLERANCE[compute_dtype] * size
    if error <= tolerance or compute_dtype == torch.float32:
        return error <= tolerance
    # In a deep model the rounding of other kernels alone adds up to more than that: two kernels on the same rows, which
    # can mix nothing, show how much.
    with sdpa_kernel(SDPBackend.MATH), without_fused_kernels():
        noise = float((again() - wanted_ND).norm())
    return error <= min(_TIMES_NOISE * noise, _MOST_NOISE * size)


def split_row(micro_batch: MicroBatch, *, max_tokens: int | None) -> list[MicroBatch]:
    """The documents of a packed row in rows of at most `max_tokens`; a longer document is a row of its own."""
    if max_tokens is None or micro_batch.num_tokens <= max_tokens or len(micro_batch.document_lengths) == 1:
        return [micro_batch]
    rows = grouped(micro_batch.document_lengths, micro_batch.document_lengths, max_tokens)
    tokens = [sum(lengths) for lengths in rows]
    parts = zip(
        torch.split(micro_batch.input_ids_T, tokens),
        torch.split(micro_batch.position_ids_T, tokens),
        torch.split(micro_batch.labels_T, tokens),
        rows,
        strict=True,
    )
    return [
        MicroBatch(input_ids_T=ids, position_ids_T=positions, labels_T=labels, document_lengths=tuple(lengths))
        for ids, positions, labels, lengths in parts
    ]


def _calls_agree(calls_of: CallsOf, *, max_document_tokens: int) -> Callable[[int], bool]:
    """Returns a test: does the model call its layers for a short document as it does after a document of N tokens?"""
    short_T = torch.arange(min(_DOCUMENT_TOKENS, max_document_tokens))

    def tensors(positions_T: Tensor) -> dict[object, Tensor]:
        return {
            (index, path): leaf
            for index, call in enumerate(calls_of(positions_T))
            for path, leaf in tree_leaves_with_path((call.args, dict(call.kwargs)))
            if isinstance(leaf, Tensor)
        }

    alone = tensors(short_T)

    def equal_after(before_T: Tensor) -> set[object] | None:
        try:
            packed = tensors(torch.cat([before_T, short_T]))
        except RUN_ERRORS:
            return None
        return {path for path, tensor in alone.items() if path in packed and _same_end(packed[path], tensor)}

    # What differs after a short document too is for the trial on the real weights to judge.
    alike = equal_after(short_T) or set()

    def agree(num_tokens: int) -> bool:
        # A row this long need not be run: the end of the long document alone has its greatest position.
        equal = equal_after(short_T + min(num_tokens, max_document_tokens) - len(short_T))
        return equal is not None and equal >= alike

    return agree


def _own_positions_agree(layer: nn.Module, call: LayerCall, *, hidden_size: int) -> Callable[[int], bool]:
    """Returns a test: does a layer compute the same from positions that it counts itself in a short row and one of N
    tokens?"""
    args, kwargs = call.without_storage(hidden_size=hidden_size)

    def derived(num_tokens: int) -> list[Tensor]:
        counted = _CountedPositions(torch.linspace(0, num_tokens - 1, NUM_TRIAL_TOKENS, dtype=torch.float64).long())
        try:
            with torch.no_grad(), counted:
                layer(*args, **kwargs)
        except RUN_ERRORS:
            pass  # Without storage, some layers run only so far (experts are chosen by values).
        return counted.used

    first, short = derived(1), derived(_DOCUMENT_TOKENS)

    def agree(num_tokens: int) -> bool:
        # Numbers that differ in short rows too are not temperatures but, say, indices of tokens.
        compared = zip(derived(num_tokens), short, first, strict=False)
        return all(torch.equal(late, early) for late, early, one in compared if torch.equal(early, one))

    return agree


class _CountedPositions(TorchFunctionMode):
    """Gives a layer without storage other positions where it counts the row's tokens, and keeps what it makes of
    them."""

    def __init__(self, positions_T: Tensor) -> None:
        super().__init__()
        self._positions_T = positions_T
        self._derived: dict[int, Tensor] = {}
        self.used: list[Tensor] = []

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        if func is torch.arange:
            counted: Tensor = func(*args, **{**named, "device": "cpu"})
            # Counted on the CPU, because on the meta device numbers have no values.
            if counted.shape == self._positions_T.shape:
                return self._keep(self._positions_T.to(counted.dtype))
            return func(*args, **named)
        tensors = [leaf for leaf in tree_leaves((args, named)) if isinstance(leaf, Tensor)]
        derived = [tensor for tensor in tensors if id(tensor) in self._derived]
        if derived and len(derived) == len(tensors):
            result = func(*args, **named)
            if not any(leaf.is_meta for leaf in tree_leaves(result) if isinstance(leaf, Tensor)):
                return tree_map_only(Tensor, self._keep, result)
        self.used.extend(derived)
        # They meet tensors without storage here, and an operation needs its operands on one device.
        meta = {id(tensor): tensor.to("meta") for tensor in derived}
        args, named = tree_map_only(Tensor, lambda tensor: meta.get(id(tensor), tensor), (args, named))
        return func(*args, **named)

    def _keep(self, tensor: Tensor) -> Tensor:
        self._derived[id(tensor)] = tensor
        return tensor


def _same_end(packed: Tensor, alone: Tensor) -> bool:
    """Whether the last part of `packed`, along every dim in which it is longer, is `alone`."""
    if packed.dim() != alone.dim():
        return False
    for dim, (longer, length) in enumerate(zip(packed.shape, alone.shape, strict=True)):
        if longer < length:
            return False
        packed = packed.narrow(dim, longer - length, length)
    # Cosines of equal angles differ in the last bit by where in a vector they are computed.
    if not alone.is_floating_point() and not alone.is_complex():
        return torch.equal(packed, alone)
    return torch.allclose(packed, alone, rtol=_TOLERANCE, atol=_TOLERANCE)
