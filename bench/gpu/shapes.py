"""The models and sizes that the stages run with: Qwen2.5's on a GPU, tiny ones in a dry run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from bench.gpu.task import DeviceChoice

QWEN25: dict[str, dict[str, Any]] = {
    "1.5b": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "7b": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "tie_word_embeddings": True,
    },
}
MAX_POSITIONS = 1 << 17

Engine = Literal["job", "eager", "row by row", "products", "states", "fp8", "streamed", "resident", "packed resident"]
"""What runs the rows, see `engine`."""

Base = Literal["", "bf16", "nf4"]
"""What adapters train next to: a model frozen in bf16 or in 4 bits. Empty: there are none, the whole model is
trained."""
RANK = 16
"""Of adapters, at every linear map of the layers."""

RowKind = Literal["equal", "short", "varied", "packed"]
"""Rows of one document each, all of the full length or of a quarter of it or of many lengths; or full rows of documents
of about 200 tokens."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One cell of the curve. `row_tokens` is the length of rows where it is not that of all points. `host_gbps` asks
    for a number of update threads that gives AdamW this much; 0 takes a job's."""

    tokens: int
    rows: RowKind = "equal"
    clip: bool = True
    engine: Engine = "job"
    base: Base = ""
    row_tokens: int = 0
    host_gbps: float = 0.0

    @property
    def name(self) -> str:
        """No other point of its stage has it."""
        return ", ".join(
            str(part)
            for part in (self.tokens, self.rows_text, self.engine_text, self.base, "" if self.clip else "clip off")
            if part
        )

    @property
    def rows_text(self) -> str:
        """The rows, for a table."""
        return f"{self.rows} of {self.row_tokens}" if self.row_tokens else self.rows

    @property
    def engine_text(self) -> str:
        """What runs them, for a table."""
        return f"{self.engine}, host {self.host_gbps:g}" if self.host_gbps else self.engine


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How large the stages are. `row_tokens` is the longest row of the engine's steps."""

    shapes: tuple[str, ...]
    compute_shape: str
    gemm_rows: tuple[int, ...]
    attention_rows: tuple[int, ...]
    timing_s: float
    link_elements: int
    adamw_parameters: int
    adamw_pairs: int
    row_tokens: int
    points: tuple[Point, ...]
    adapter_points: tuple[Point, ...]
    table_tokens: tuple[int, ...]
    twice_tokens: int
    profile_tokens: int
    profile_engines: tuple[Engine, ...]
    resident_tokens: tuple[int, ...]
    num_lengths: int
    shortest_length: int


SIZES: Mapping[DeviceChoice, Sizes] = {
    "cuda": Sizes(
        shapes=("7b", "1.5b"),
        compute_shape="7b",
        gemm_rows=(1024, 4096, 16384),
        attention_rows=(1024, 4096, 16384),
        timing_s=0.03,
        link_elements=1 << 28,
        adamw_parameters=1 << 26,
        adamw_pairs=3,
        row_tokens=4096,
        # The smallest first, which shows how long the others will take; then the most wanted.
        points=(
            Point(tokens=8192),
            Point(tokens=65536),
            Point(tokens=65536, engine="eager"),
            Point(tokens=65536, engine="row by row"),
            Point(tokens=32768),
            Point(tokens=131072),
            Point(tokens=65536, rows="packed"),
            Point(tokens=65536, rows="short"),
            Point(tokens=65536, rows="varied"),
            Point(tokens=65536, engine="fp8"),
            Point(tokens=32768, engine="products"),
            Point(tokens=8192, engine="eager"),
            Point(tokens=8192, engine="row by row"),
            Point(tokens=262144),
            # Long documents, for which attention counts most.
            Point(tokens=131072, row_tokens=16384),
            Point(tokens=131072, row_tokens=32768),
            Point(tokens=131072, row_tokens=131072),
            Point(tokens=8192, engine="resident"),
            Point(tokens=8192, engine="states"),
            # Another host memory, by the number of update threads.
            Point(tokens=8192, host_gbps=120),
            Point(tokens=32768, host_gbps=120),
            Point(tokens=8192, host_gbps=350),
            Point(tokens=32768, engine="eager"),
            Point(tokens=32768, engine="row by row"),
            Point(tokens=131072, engine="eager"),
            Point(tokens=131072, engine="row by row"),
            Point(tokens=8192, clip=False),
            Point(tokens=65536, clip=False),
        ),
        adapter_points=(
            Point(tokens=8192, base="bf16"),
            Point(tokens=65536, base="bf16"),
            Point(tokens=8192, base="bf16", engine="streamed"),
            Point(tokens=32768, base="bf16", engine="streamed"),
            Point(tokens=65536, base="bf16", engine="streamed"),
            Point(tokens=8192, base="nf4", engine="streamed"),
            Point(tokens=65536, base="nf4", engine="streamed"),
            Point(tokens=8192, base="nf4", engine="packed resident"),
            Point(tokens=8192, base="nf4"),
            Point(tokens=32768, base="nf4", engine="streamed"),
            Point(tokens=65536, base="nf4"),
            Point(tokens=131072, base="nf4", engine="streamed"),
        ),
        table_tokens=(8192, 32768, 65536, 131072, 262144),
        twice_tokens=16384,
        profile_tokens=65536,
        profile_engines=("job", "eager"),
        resident_tokens=(65536, 8192),
        num_lengths=64,
        shortest_length=256,
    ),
    "cpu": Sizes(
        shapes=("tiny",),
        compute_shape="tiny",
        gemm_rows=(16, 64),
        attention_rows=(32,),
        timing_s=0.001,
        link_elements=1 << 18,
        adamw_parameters=1 << 20,
        adamw_pairs=2,
        row_tokens=64,
        points=(
            Point(tokens=128),
            Point(tokens=256),
            Point(tokens=256, rows="packed"),
            Point(tokens=256, rows="varied"),
            Point(tokens=256, rows="short"),
            Point(tokens=256, engine="eager"),
            Point(tokens=256, engine="row by row"),
            Point(tokens=256, row_tokens=128),
            # No number of threads gives this: the row says so.
            Point(tokens=128, host_gbps=1e6),
            Point(tokens=256, clip=False),
        ),
        adapter_points=(
            Point(tokens=256, base="bf16"),
            Point(tokens=128, base="nf4", engine="streamed"),
            Point(tokens=128, base="nf4", engine="packed resident"),
        ),
        table_tokens=(128, 256),
        twice_tokens=256,
        profile_tokens=128,
        profile_engines=("eager", "job"),
        resident_tokens=(256,),
        num_lengths=16,
        shortest_length=8,
    ),
}
"""7b takes 106 GB of host memory; where that is not there, the next shape runs."""
