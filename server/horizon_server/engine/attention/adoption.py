"""Whether another implementation may take the place of torch's own attention kernels: tried on random rows, adopted
where its numbers are as good and it is faster.

Shapes: T = tokens of the trial's row, E = size of a head.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from horizon_server.engine.attention.blocks import Scores
from horizon_server.engine.attention.chunked import ChunkedRow, chunks_of
from horizon_server.engine.attention.fused import without_fused_kernels
from horizon_server.engine.attention.implementation import Heads, adopt
from horizon_server.engine.attention.kernels import attention, attention_backward
from horizon_server.engine.compiled.trial import relative_differences, timed
from horizon_server.engine.template import Template
from horizon_server.planning.model_folder import ModelShape
from horizon_server.recipe import Recipe
from horizon_server.records.execution import Execution

FLASH_ATTENTION_4, TITLE, PACKAGE = "FA4", "FlashAttention-4", "flash-attn-4"
"""In torch's registry, in texts, and on PyPI."""
_MODULE = "flash_attn.cute"
# torch's registration of it refuses other devices.
_CAPABILITIES = ((9, 0), (10, 0))
# Lengths that no tile divides, and documents shorter than one.
_DOCUMENTS = (700, 1, 129, 1024, 64, 333)
_MOST_TIMED_TOKENS = 32768
# Of the error that torch's own kernels make, or of rounding once, whichever is more: another order of sums errs as
# much, another formula by far more.
_MOST_TIMES_OWN = 1.5
_ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8}
_NUM_PAIRS = 5
_CHUNK_TOKENS = 512
_RESULTS = ("its output", "its sums", "queries' gradients", "keys' gradients", "values' gradients")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a trial found: whether the implementation is adopted, and in words why."""

    is_adopted: bool
    text: str


def adopt_for_hopper(template: Template, recipe: Recipe, execution: Execution, device: torch.device) -> str:
    """Try FlashAttention-4 where the device and the job can use it, and adopt it where it is better. Returns what to
    say of it, empty where there is nothing to say.

    It is tried on random rows like the job's, of up to 32,768 tokens, in less memory than a step needs. Not in a job
    that is `deterministic`: a trial's timing decides, and may decide otherwise when the job is resumed.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) not in _CAPABILITIES:
        return ""
    if execution.compute_dtype != "bfloat16" or template.keeps_masks:
        return ""
    heads = _heads_of(template)
    adopt(heads, "")
    if recipe.deterministic:
        return f"attention: torch's own kernels, as train.deterministic asks for; {TITLE} is not tried"
    if importlib.util.find_spec("flash_attn") is None or importlib.util.find_spec(_MODULE) is None:
        return f"attention: torch's own kernels; {TITLE} is not installed (pip install 'horizon-train[fa4]')"
    tokens = min(max(recipe.sequence_length, execution.micro_batch_tokens, 1), _MOST_TIMED_TOKENS)
    length = min(recipe.sequence_length or tokens, tokens)
    documents = [length] * (tokens // length)
    finding = try_implementation(
        FLASH_ATTENTION_4,
        heads,
        dtype=torch.bfloat16,
        device=device,
        documents=documents,
        in_chunks=execution.chunk_tokens > 0,
    )
    # What the trial took is the job's again, and its peak is not the job's.
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return f"attention: {finding.text}"


def _heads_of(template: Template) -> Heads:
    shape = ModelShape.from_config(template.config.to_dict())
    return Heads(
        queries=shape.num_attention_heads,
        keys=shape.num_key_value_heads,
        size=shape.head_dim,
        value_size=shape.head_dim,
    )


def is_for_hopper(text: str) -> bool:
    """Whether `adopt_for_hopper` said that it has adopted FlashAttention-4."""
    return text.startswith(f"attention: {TITLE}")


def try_implementation(
    name: str,
    heads: Heads,
    *,
    dtype: torch.dtype,
    device: torch.device,
    documents: Sequence[int],
    in_chunks: bool = False,
) -> Finding:
    """Compare an implementation of torch's registry with torch's own kernels, on odd lengths against fp32, then in time
    on a row of `documents`; it stays adopted for these heads where it is better. With `in_chunks` it has to compute
    rows in chunks as well, whose keys begin before the queries do."""
    try:
        finding = _judge(name, heads, dtype, device, documents, in_chunks=in_chunks)
    except Exception as error:  # noqa: BLE001  # its compiler and the driver raise anything; torch's own kernels are there
        (first_line, *_) = str(error).strip().splitlines() or ["no message"]
        text = f"torch's own kernels: {TITLE} does not run here ({type(error).__name__}: {first_line[:300]})"
        finding = Finding(is_adopted=False, text=text)
    adopt(heads, name if finding.is_adopted else "")
    return finding


def _judge(
    name: str, heads: Heads, dtype: torch.dtype, device: torch.device, documents: Sequence[int], *, in_chunks: bool
) -> Finding:
    rows = _Rows.random(heads, _DOCUMENTS, dtype=dtype, device=device)
    with without_fused_kernels():
        expected = rows.in_fp32().results()
    for what, results in (("", rows.results), (" of rows in chunks", rows.results_in_chunks))[: 1 + in_chunks]:
        adopt(heads, "")
        own = relative_differences(expected, results())
        adopt(heads, name)
        errors = relative_differences(expected, results())
        # Written so that a NaN does not pass.
        worst = [p for p, error in errors.items() if not error <= max(_MOST_TIMES_OWN * own[p], _ROUNDING[dtype])]
        if worst:
            part = worst[0]
            text = f"{TITLE} differs from fp32 by {errors[part]:.1e} in {part}{what}, torch's own by {own[part]:.1e}"
            return Finding(is_adopted=False, text=f"torch's own kernels: {text}")
    rows = _Rows.random(heads, documents, dtype=dtype, device=device)
    pairs = []
    # One more, which does not count: kernels are compiled and loaded in it.
    for _ in range(_NUM_PAIRS + 1):
        adopt(heads, "")
        own_s = timed(rows.pass_through, device)
        adopt(heads, name)
        pairs.append((own_s, timed(rows.pass_through, device)))
    speedup = statistics.median(own_s / found_s for own_s, found_s in pairs[1:])
    times = f"{speedup:.2f} times as fast as torch's own on documents of {max(documents):,} tokens"
    if not speedup > 1:
        return Finding(is_adopted=False, text=f"torch's own kernels: {TITLE} is {times}")
    return Finding(is_adopted=True, text=f"{TITLE}, {times}")


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """The arguments of one attention call, and its gradient."""

    query: Tensor
    key: Tensor
    value: Tensor
    gradient: Tensor
    boundaries: Tensor
    scale: float

    @classmethod
    def random(cls, heads: Heads, documents: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> _Rows:
        generator = torch.Generator(device).manual_seed(0)
        num_tokens = sum(documents)

        def tensor(num_heads: int, size: int) -> Tensor:
            # A token's heads next to each other, as projections leave them.
            shape = (1, num_tokens, num_heads, size)
            return torch.randn(shape, generator=generator, device=device, dtype=dtype).transpose(1, 2)

        return cls(
            query=tensor(heads.queries, heads.size),
            key=tensor(heads.keys, heads.size),
            value=tensor(heads.keys, heads.value_size),
            gradient=tensor(heads.queries, heads.value_size).transpose(1, 2),
            boundaries=torch.tensor([0, *accumulate(documents)]),
            scale=heads.size**-0.5,
        )

    def in_fp32(self) -> _Rows:
        """The same numbers."""
        query, key, value, gradient = (t.float() for t in (self.query, self.key, self.value, self.gradient))
        return _Rows(query=query, key=key, value=value, gradient=gradient, boundaries=self.boundaries, scale=self.scale)

    def forward(self) -> tuple[Tensor, Tensor]:
        """The output and the logarithms of the sums of exponentials."""
        sinks = self.query.new_empty(0)
        found: tuple[Tensor, Tensor] = attention(
            self.query, self.key, self.value, self.boundaries, sinks, self.scale, 0, 0.0
        )
        return found

    def results(self) -> dict[str, Tensor]:
        """Everything that a step uses, by name."""
        output, sums = self.forward()
        sinks = self.query.new_empty(0)
        tensors = (self.gradient, self.query, self.key, self.value, output, sums, self.boundaries, sinks)
        *gradients, _ = attention_backward(*tensors, self.scale, 0, 0.0)
        return dict(zip(_RESULTS, (output, sums, *gradients), strict=True))

    def results_in_chunks(self) -> dict[str, Tensor]:
        """The same of the row in chunks."""
        keys, values = torch.empty_like(self.key), torch.empty_like(self.value)
        changes = [torch.zeros_like(tensor, dtype=torch.float32) for tensor in (keys, values)]
        rule, sinks = Scores(scale=self.scale, window=0, softcap=0.0), self.query.new_empty(0)
        done: list[tuple[ChunkedRow, slice, Tensor, Tensor]] = []
        for chunk, boundaries in chunks_of(self.boundaries.tolist(), _CHUNK_TOKENS):
            row = ChunkedRow(chunk, boundaries, keys, values, (changes[0], changes[1]), block_tokens=_CHUNK_TOKENS)
            span = slice(chunk.first, chunk.stop)
            query, key, value = (tensor[:, :, span] for tensor in (self.query, self.key, self.value))
            done.append((row, span, *row.forward(query, key, value, sinks, rule)))
        gradients = []
        for row, span, output, sums in reversed(done):
            query, key, value = (tensor[:, :, span] for tensor in (self.query, self.key, self.value))
            *found, _ = row.backward(self.gradient[:, span], query, key, value, sinks, output, sums, rule)
            gradients.append(found)
        outputs, all_sums = torch.cat([one[2] for one in done], 1), torch.cat([one[3] for one in done], 1)
        joined = (torch.cat(of_kind[::-1], 2) for of_kind in zip(*gradients, strict=True))
        return dict(zip(_RESULTS, (outputs, all_sums, *joined), strict=True))

    def pass_through(self) -> None:
        """What a step does: forward, and once more before backward."""
        self.forward()
        self.results()
