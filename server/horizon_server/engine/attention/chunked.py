"""Attention of a long row that a layer computes chunk by chunk: what a layer gets in a mask's place.

Forward goes up the chunks, and each leaves its keys and values for those after it. Backward goes down: the attention of
a chunk adds its part to the gradients of all keys and values before it, so that those of a chunk are complete when its
own turn comes.

Shapes: T = tokens of the chunk, N = tokens of the row, G = key heads, E = size of a head, of keys or of values.
Source: OOMB (arXiv 2602.02108) and FPDT (arXiv 2408.16978), here without anything left out.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from horizon_server.engine.attention.blocks import Scores
from horizon_server.engine.attention.fused import attend_on_gpu, gradients_on_gpu, needs_no_copy
from horizon_server.engine.attention.kernels import attention, attention_backward
from horizon_server.engine.attention.past import attend_to_past, gradients_of_past, takes_all_keys


@dataclass(frozen=True, kw_only=True)
class KeySizes:
    """Key heads of a layer, the sizes of a key and of a value, and how many heads the queries have."""

    heads: int
    key: int
    value: int
    query_heads: int

    @property
    def elements(self) -> int:
        """Of the keys and values of one token."""
        return self.heads * (self.key + self.value)

    @property
    def output_elements(self) -> int:
        """Of what attention gives one token."""
        return self.query_heads * self.value


@dataclass(frozen=True, kw_only=True)
class KeptOutput:
    """Where a chunk's attention leaves its output [1, T, heads, E] and the logarithms of its sums of exponentials
    [heads, T] in forward, and finds them again in backward, where they are there (`is_there`)."""

    output: Tensor
    sums: Tensor
    is_there: bool


@dataclass(frozen=True, kw_only=True)
class RowChunk:
    """Tokens `first` to `stop` of a row of `row_tokens`, of whose chunks it has this `number`.

    The document that continues from the chunk before starts at `seen`, which is `first` where none does. `before`
    counts the tokens of the pass's chunked rows before this one.
    """

    number: int
    first: int
    stop: int
    seen: int
    row_tokens: int
    before: int

    @property
    def is_last(self) -> bool:
        """Whether the row ends with it, where backward begins."""
        return self.stop == self.row_tokens


def chunks_of(ends: Sequence[int], size: int, *, before: int = 0) -> Iterator[tuple[RowChunk, Tensor]]:
    """The chunks of a row of `size` tokens each, and the boundaries in each of the documents, or parts of them, that it
    has. `ends` are where the row's documents start, and the end of the last one."""
    for number, first in enumerate(range(0, ends[-1], size)):
        stop = min(first + size, ends[-1])
        # By bisection, because a long row may have as many documents as chunks.
        inside = bisect_right(ends, first)
        chunk = RowChunk(
            number=number, first=first, stop=stop, seen=ends[inside - 1], row_tokens=ends[-1], before=before
        )
        yield chunk, torch.tensor([first, *ends[inside : bisect_left(ends, stop)], stop]) - first


class ChunkedRow:
    """In a mask's place: attends for one chunk of a row, in one layer.

    `keys` and `values` [1, G, N, E] are those of the whole row, in the compute dtype; here the chunk's own are written.
    `for_keys` and `for_values`, of the same shapes in fp32, are the gradients that the chunks after this one have added
    up; None where there is no backward. `boundaries` are those of the documents, or parts of them, in the chunk. At
    most `block_tokens` keys get gradients at once. With `kept`, forward leaves the output there, and the recompute in
    backward takes it from there and attends to nothing.
    """

    def __init__(
        self,
        chunk: RowChunk,
        boundaries: Tensor,
        keys: Tensor,
        values: Tensor,
        gradients: tuple[Tensor, Tensor] | None = None,
        *,
        block_tokens: int,
        kept: KeptOutput | None = None,
    ) -> None:
        self._chunk, self._boundaries, self._block_tokens = chunk, boundaries, block_tokens
        self._keys, self._values, self._gradients, self._kept = keys, values, gradients, kept

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
        """As `function.attend`, over the row's earlier chunks too. Shapes: [1, heads, T, E] to [1, T, heads, E]."""
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        rule = Scores(scale=float(scale), window=int(window or 0), softcap=float(softcap or 0.0))
        sinks = query.new_empty(0) if sinks is None else sinks
        output: Tensor = _ChunkAttention.apply(query, key, value, sinks, self, rule)  # type: ignore[no-untyped-call]
        return output

    def forward(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, rule: Scores) -> tuple[Tensor, Tensor]:
        """The output and its `logsumexp`."""
        kept = self._kept
        if kept is not None and kept.is_there:
            # `data`, because others of the same memory may be on their way in, which autograd would take for a change.
            return kept.output.data, kept.sums.data
        self._keys[:, :, self._own], self._values[:, :, self._own] = key, value
        output, sums = self._attended(query, key, value, sinks, rule)
        if kept is not None:
            kept.output.copy_(output)
            kept.sums.copy_(sums)
        return output, sums

    def _attended(
        self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, rule: Scores
    ) -> tuple[Tensor, Tensor]:
        if takes_all_keys(query, sinks, rule) and (rule.window or needs_no_copy(query, value)):
            keys, boundaries = self._all_keys(rule)
            return attend_on_gpu(query, *self._seen(keys), self._boundaries, rule, key_boundaries=boundaries)
        output, sums = attention(query, key, value, self._boundaries, sinks, rule.scale, rule.window, rule.softcap)
        if queries := self._seeing(rule):
            early, early_sums, merged = query[:, :, :queries], sums[:, :queries], output[:, :queries].float()
            # All at once where that takes no copy of them: each block has to be merged.
            size = self._chunk.first if query.shape[-1] == value.shape[-1] else self._block_tokens
            for keys, ahead in self._past(rule, size):
                found, found_sums = attend_to_past(early, *self._seen(keys), rule, ahead=ahead)
                both = torch.logaddexp(early_sums, found_sums)
                share = (early_sums - both).exp_().transpose(0, 1)[..., None]
                merged = torch.lerp(found.float(), merged, share)
                early_sums = both
            output[:, :queries], sums[:, :queries] = merged.to(output.dtype), early_sums
        return output, sums

    def backward(
        self,
        gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor,
        output: Tensor,
        sums: Tensor,
        rule: Scores,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The gradients of query, key, value and sinks; those of earlier keys and values are added to."""
        assert self._gradients is not None, "a pass with a backward"
        for_keys, for_values = self._gradients
        own = self._own
        if rule.window and takes_all_keys(query, sinks, rule):
            # A window's keys and the chunk's own, of which a copy takes little.
            keys, boundaries = self._all_keys(rule)
            given = (gradient, query, *self._seen(keys), output, sums)
            for_query, of_keys, of_values = gradients_on_gpu(*given, self._boundaries, rule, key_boundaries=boundaries)
            for_keys[:, :, keys] += of_keys
            for_values[:, :, keys] += of_values
            return for_query, for_keys[:, :, own], for_values[:, :, own], torch.empty_like(sinks)
        for_query, for_key, for_value, for_sinks = attention_backward(
            gradient, query, key, value, output, sums, self._boundaries, sinks, rule.scale, rule.window, rule.softcap
        )
        if queries := self._seeing(rule):
            # In fp32, because every block of keys adds to them.
            of_early = for_query[:, :, :queries].float()
            early = (gradient[:, :queries], query[:, :, :queries])
            results = (output[:, :queries], sums[:, :queries])
            for keys, ahead in self._past(rule, self._block_tokens):
                of_block, of_keys, of_values = gradients_of_past(*early, *self._seen(keys), *results, rule, ahead=ahead)
                of_early += of_block
                for_keys[:, :, keys] += of_keys
                for_values[:, :, keys] += of_values
            for_query[:, :, :queries] = of_early
        # What the chunks after this one have added is all there is.
        return for_query, for_key + for_keys[:, :, own], for_value + for_values[:, :, own], for_sinks

    def _seeing(self, rule: Scores) -> int:
        """How many of the chunk's queries, the first ones, see keys before it."""
        if self._chunk.seen == self._chunk.first:
            return 0
        num_tokens = int(self._boundaries[1])
        return min(num_tokens, rule.window - 1) if rule.window else num_tokens

    @property
    def _own(self) -> slice:
        return slice(self._chunk.first, self._chunk.stop)

    def _seen(self, keys: slice) -> tuple[Tensor, Tensor]:
        return self._keys[:, :, keys], self._values[:, :, keys]

    def _lowest(self, rule: Scores) -> int:
        """The first key of the row that the chunk's first query sees."""
        return max(self._chunk.seen, self._chunk.first - rule.window + 1) if rule.window else self._chunk.seen

    def _all_keys(self, rule: Scores) -> tuple[slice, Tensor]:
        """The keys that the chunk's queries see, its own among them, and the boundaries of documents in them: the first
        one begins before the chunk."""
        lowest, boundaries = self._lowest(rule), self._boundaries.clone()
        boundaries[1:] += self._chunk.first - lowest
        return slice(lowest, self._chunk.stop), boundaries

    def _past(self, rule: Scores, block_tokens: int) -> Iterator[tuple[slice, int]]:
        """The keys before the chunk in blocks, and how far the chunk's first query is ahead of each block's first
        key."""
        chunk, lowest = self._chunk, self._lowest(rule)
        if rule.window:
            # Not in blocks, of which some query would see nothing.
            yield slice(lowest, chunk.first), chunk.first - lowest
            return
        for start in range(lowest, chunk.first, block_tokens):
            yield slice(start, min(start + block_tokens, chunk.first)), chunk.first - start


class _ChunkAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, row: ChunkedRow, rule: Scores
    ) -> Tensor:
        output, sums = row.forward(query, key, value, sinks, rule)
        ctx.save_for_backward(query, key, value, sinks, output, sums)
        ctx.row, ctx.rule = row, rule
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, output, sums = ctx.saved_tensors
        for_query, for_key, for_value, for_sinks = ctx.row.backward(
            gradient, query, key, value, sinks, output, sums, ctx.rule
        )
        return for_query, for_key.to(key.dtype), for_value.to(value.dtype), for_sinks, None, None
