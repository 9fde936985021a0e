"""What others have published for a 7B model on one H100, where they cannot be installed next to ours. None of it was
measured here."""

from __future__ import annotations

PUBLISHED = (
    ("MegaTrain, 7B, streamed from host memory", 272, "its README; arXiv 2604.05091"),
    ("LLMQ, 7B in bf16, resident, without recompute", 590, "github.com/IST-DASLab/llmq"),
    ("LLMQ, 14B in bf16, offloaded, recomputing the feed-forward part", 527, "github.com/IST-DASLab/llmq"),
    ("LLMQ, 7B in FP8", 814, "github.com/IST-DASLab/llmq"),
    ("LLMQ, 14B in FP8, offloaded, moments in bf16", 786, "github.com/IST-DASLab/llmq"),
)


def table() -> list[str]:
    """A row each; ours are in bench/RESULTS.md, by `python -m bench.gpu_all`."""
    lines = ["| published, one H100 | TFLOP/s | source |", "| --- | --- | --- |"]
    return lines + [f"| {what} | {teraflops} | {source} |" for what, teraflops, source in PUBLISHED]
