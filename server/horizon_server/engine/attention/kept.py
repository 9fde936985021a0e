"""Attention of sequences that grow token by token: the keys and values that are kept of them, and what a layer gets in
a mask's place when the new tokens of several sequences are one row.

Shapes: N = new tokens of all sequences, T = those of one, K = its tokens so far, B = places of sequences, G = key
heads, R = query heads of a key head, E = size of a head, C = tokens that a place has room for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from horizon_server.engine.attention.blocks import Scores

_STEP = 64
"""Places hold a multiple of this many tokens."""
_MOST_SCORES = 1 << 22
"""Of queries that are computed at once."""


def places_of(num_tokens: int) -> int:
    """Tokens that a place has room for whose sequence has so many."""
    return -(-num_tokens // _STEP) * _STEP


class KeptKeys:
    """The keys and values of several sequences in all layers: each has a place, and all places have the same room.

    Thread: places are taken and given back by the driver between passes; the rest is compute's.
    """

    def __init__(self, num_layers: int) -> None:
        self._buffers: list[list[Tensor]] = [[] for _ in range(num_layers)]
        self._free: list[int] = []
        # Tokens that each place in use needs room for.
        self._needed: dict[int, int] = {}
        self.num_places = self.capacity = 0

    def take(self, number: int, *, capacity: int) -> list[int]:
        """Places for sequences of at most `capacity` tokens."""
        self.capacity = max(self.capacity, places_of(capacity))
        while len(self._free) < number:
            self._free.append(self.num_places)
            self.num_places += 1
        # The first ones, so that what is computed over all places is little more than what is wanted.
        self._free.sort()
        taken, self._free = self._free[:number], self._free[number:]
        self._needed |= dict.fromkeys(taken, places_of(capacity))
        return taken

    def give_back(self, places: Sequence[int]) -> None:
        """Places whose sequences have ended. The memory gets smaller once half of it, or more, is for none: what is
        kept is copied for that, so not for each one that ends."""
        self._free += places
        for place in places:
            del self._needed[place]
        if not self._needed:
            self._buffers = [[] for _ in self._buffers]
            self._free, self.num_places, self.capacity = [], 0, 0
            return
        if (capacity := max(self._needed.values())) <= self.capacity // 2:
            self.capacity = capacity
        if (num_places := max(self._needed) + 1) <= self.num_places // 2:
            self.num_places = num_places
            self._free = [place for place in self._free if place < num_places]

    def layer(self, layer: int, like: Sequence[Tensor]) -> list[Tensor]:
        """What a layer keeps, with room for all places; `like` are keys and values, [G, T, E]. Shapes: [B, G, C, E]."""
        before, shape = self._buffers[layer], (self.num_places, self.capacity)
        if not before or (before[0].shape[0], before[0].shape[2]) != shape:
            # Zeros: what is hidden is multiplied too, and must be finite.
            resized = [new.new_zeros(shape[0], new.shape[0], shape[1], new.shape[2]) for new in like]
            for buffer, old in zip(resized, before, strict=False):
                num_places, capacity = min(old.shape[0], shape[0]), min(old.shape[2], shape[1])
                buffer[:num_places, :, :capacity] = old[:num_places, :, :capacity]
            self._buffers[layer] = resized
        return self._buffers[layer]

    def copy(self, source: int, targets: Sequence[int]) -> None:
        """Have places hold what another one holds."""
        for layer, buffers in enumerate(self._buffers):
            if buffers:
                self.layer(layer, [buffer[0] for buffer in buffers])
                for buffer in self._buffers[layer]:
                    buffer[list(targets)] = buffer[source].clone()

    def to(self, layer: int, device: torch.device) -> None:
        """Move what a layer keeps."""
        self._buffers[layer] = [buffer.to(device) for buffer in self._buffers[layer]]

    def num_elements(self, layer: int) -> int:
        """Numbers that a layer keeps of one token."""
        return sum(buffer.shape[1] * buffer.shape[3] for buffer in self._buffers[layer])


@dataclass(frozen=True, kw_only=True)
class Growing:
    """A sequence in a pass: its place, how many of its tokens are kept, and where its new ones are in the row."""

    place: int
    num_kept: int
    span: slice


class KeptPass:
    """A pass over sequences whose new tokens are one row. `row` is what a layer gets in a mask's place."""

    def __init__(
        self, kept: KeptKeys, sequences: Sequence[Growing], *, place: Callable[[Tensor], Tensor] = lambda tensor: tensor
    ) -> None:
        """`place` moves a tensor to where compute reads it."""
        self.kept = kept
        single = [one for one in sequences if one.span.stop - one.span.start == 1]
        # One alone is computed without what holds for all places.
        self.single = single if len(single) > 1 else []
        self.others = [one for one in sequences if one not in self.single]
        self.places_S = place(torch.tensor([one.place for one in self.single], dtype=torch.int64))
        self.positions_S = place(torch.tensor([one.num_kept for one in self.single], dtype=torch.int64))
        self.columns_S = place(torch.tensor([one.span.start for one in self.single], dtype=torch.int64))
        self.num_keys = max((one.num_kept + 1 for one in self.single), default=0)
        self._seen: dict[int, Tensor] = {}

    def row(self, layer: int) -> KeptRow:
        """For one layer."""
        return KeptRow(self, layer)

    def seen(self, window: int) -> Tensor:
        """Which keys the single new token of each place sees. Shapes: [B, 1, 1, K]."""
        if window not in self._seen:
            positions_B = self.positions_S.new_zeros(self.kept.num_places)
            positions_B[self.places_S] = self.positions_S
            keys_K = torch.arange(self.num_keys, device=positions_B.device)
            seen_BK = keys_K <= positions_B[:, None]
            if window:
                seen_BK &= keys_K > positions_B[:, None] - window
            self._seen[window] = seen_BK[:, None, None]
        return self._seen[window]


class KeptRow:
    """In a mask's place: attends for one layer of a pass."""

    def __init__(self, of_pass: KeptPass, layer: int) -> None:
        self._pass, self._layer = of_pass, layer

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float | None,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """As `function.attend`, over what is kept too, which gets the new keys and values.

        Shapes: [1, heads, N, E] to [1, N, heads, E].
        """
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        rule = Scores(scale=float(scale), window=int(window or 0), softcap=float(softcap or 0.0))
        current = self._pass
        buffers = current.kept.layer(self._layer, [key[0], value[0]])
        output = query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])
        if current.single:
            for buffer, new in zip(buffers, (key, value), strict=True):
                buffer[current.places_S, :, current.positions_S] = new[0, :, current.columns_S].transpose(0, 1)
            found = self._singles(query[0, :, current.columns_S], buffers, rule, sinks)
            output[0, current.columns_S] = found
        for one in current.others:
            end = one.num_kept + one.span.stop - one.span.start
            for buffer, new in zip(buffers, (key, value), strict=True):
                buffer[one.place, :, one.num_kept : end] = new[0, :, one.span]
            key_GKE, value_GKE = (buffer[one.place, :, :end] for buffer in buffers)
            output[0, one.span] = _attended(query[0, :, one.span], key_GKE, value_GKE, rule, sinks)
        return output

    def _singles(self, query_HSE: Tensor, buffers: Sequence[Tensor], rule: Scores, sinks: Tensor | None) -> Tensor:
        """All sequences with one new token, at once over all places. Shapes: [heads, S, E] to [S, heads, E]."""
        current, num_heads = self._pass, query_HSE.shape[0]
        key_BGKE, value_BGKE = (buffer[:, :, : current.num_keys] for buffer in buffers)
        query_BHE = query_HSE.new_zeros(current.kept.num_places, num_heads, query_HSE.shape[2])
        query_BHE[current.places_S] = query_HSE.transpose(0, 1)
        query_BGRE, seen_B11K = torch.unflatten(query_BHE, 1, (key_BGKE.shape[1], -1)), current.seen(rule.window)
        if not rule.softcap and sinks is None:
            # The query heads of a key head as queries of one head, whose keys are there once.
            mixed_BGRE = functional.scaled_dot_product_attention(
                query_BGRE, key_BGKE, value_BGKE, attn_mask=seen_B11K, scale=rule.scale
            )
        else:
            scores = torch.matmul(query_BGRE, key_BGKE.transpose(2, 3)).float().mul_(rule.scale)
            by_head = None if sinks is None else sinks.view(query_BGRE.shape[1], -1)
            weights = _weights(scores, ~seen_B11K, rule, by_head)
            mixed_BGRE = torch.matmul(weights.to(value_BGKE.dtype), value_BGKE)
        return mixed_BGRE.flatten(1, 2)[current.places_S]


def _attended(query: Tensor, key_GKE: Tensor, value_GKE: Tensor, rule: Scores, sinks: Tensor | None) -> Tensor:
    """The last T tokens of a sequence over all K of it. Shapes: [heads, T, E] to [T, heads, E]."""
    groups, num_keys, _ = key_GKE.shape
    num_heads, num_new, _ = query.shape
    per_group, first = num_heads // groups, num_keys - num_new
    size = max(1, _MOST_SCORES // (num_heads * num_keys))
    parts = []
    for start in range(0, num_new, size):
        queries = slice(start, min(start + size, num_new))
        # What is behind the window of the first query, or ahead of the last one, is seen by none.
        lowest = max(0, first + start - rule.window + 1) if rule.window else 0
        keys = slice(lowest, first + queries.stop)
        query_GRTE = torch.unflatten(query[:, queries], 0, (groups, per_group))
        products = torch.matmul(query_GRTE.flatten(1, 2), key_GKE[:, keys].transpose(1, 2)).float()
        scores_GRTK = products.mul_(rule.scale).view(*query_GRTE.shape[:3], -1)
        places_T = torch.arange(first + queries.start, first + queries.stop, device=query.device)[:, None]
        places_K = torch.arange(keys.start, keys.stop, device=query.device)[None]
        hidden_TK = places_K > places_T
        if rule.window:
            hidden_TK |= places_K <= places_T - rule.window
        by_head = None if sinks is None else sinks.view(groups, per_group, 1)
        weights_GRTK = _weights(scores_GRTK, hidden_TK, rule, by_head)
        mixed = torch.matmul(weights_GRTK.to(value_GKE.dtype).flatten(1, 2), value_GKE[:, keys])
        parts.append(torch.unflatten(mixed, 1, (per_group, -1)).flatten(0, 1).transpose(0, 1))
    return torch.cat(parts)


def _weights(scores: Tensor, hidden: Tensor, rule: Scores, sinks: Tensor | None) -> Tensor:
    """The share of each key in a query's output, in the place of the scores. `sinks` have the shape of the scores
    without the last one, or one that broadcasts to it."""
    if rule.softcap:
        scores = scores.div_(rule.softcap).tanh_().mul_(rule.softcap)
    scores = scores.masked_fill_(hidden, -torch.inf)
    if sinks is None:
        return scores.softmax(-1)
    sums = torch.logaddexp(scores.logsumexp(-1), sinks.float())
    return scores.sub_(sums[..., None]).exp_()
