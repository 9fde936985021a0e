"""What a step of a job on several nodes sends over the network, and how long that takes: the planner's own count
(`planning/nodes.py`), for well-known shapes.

Arithmetic, not a measurement. docs/nodes.md shows the table, and a test keeps it equal to what this prints.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from itertools import product

from bench.forecast import model_7b
from horizon_server.planning.nodes import network_bytes
from horizon_server.records.execution import ComputeDtype, Execution
from horizon_server.store.layout import StoreLayout, build_layout

NETWORKS_GBPS = (10, 100, 400)
FLEETS = ((2, 1), (8, 8))
"""Nodes, and GPUs of each."""
WIRES: tuple[ComputeDtype, ...] = ("float32", "bfloat16")
"""What gradients are in on their way: `train.wire`."""
_HEAD_SIZE = 128


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A dense model with grouped attention and an output projection of its own."""

    hidden: int
    inner: int
    layers: int
    heads: int
    key_heads: int
    vocabulary: int

    def layout(self) -> StoreLayout:
        """Where its parameters are in the store; all are trained."""
        queries, keys = self.heads * _HEAD_SIZE, self.key_heads * _HEAD_SIZE
        layer: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj.weight": (queries, self.hidden),
            "self_attn.k_proj.weight": (keys, self.hidden),
            "self_attn.v_proj.weight": (keys, self.hidden),
            "self_attn.o_proj.weight": (self.hidden, queries),
            "mlp.gate_proj.weight": (self.inner, self.hidden),
            "mlp.up_proj.weight": (self.inner, self.hidden),
            "mlp.down_proj.weight": (self.hidden, self.inner),
            "input_layernorm.weight": (self.hidden,),
            "post_attention_layernorm.weight": (self.hidden,),
        }
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocabulary, self.hidden),
            "model.norm.weight": (self.hidden,),
            "lm_head.weight": (self.vocabulary, self.hidden),
            **{f"model.layers.{i}.{name}": shape for i in range(self.layers) for name, shape in layer.items()},
        }
        return build_layout(shapes, num_layers=self.layers, tied=False)


def layouts() -> dict[str, StoreLayout]:
    """By the name of the model."""
    return {
        "Qwen2.5-7B": model_7b().layout,
        "Qwen3-32B": Shape(hidden=5120, inner=25600, layers=64, heads=64, key_heads=8, vocabulary=151936).layout(),
        "Llama-3.3-70B": Shape(hidden=8192, inner=28672, layers=80, heads=64, key_heads=8, vocabulary=128256).layout(),
    }


def table() -> list[str]:
    """Bytes per step and node, and seconds on networks of several speeds, as lines of Markdown."""
    lines = [
        "| model | nodes x GPUs | gradients in | GB a step and node | "
        + " | ".join(f"{gbps} Gbit/s" for gbps in NETWORKS_GBPS)
        + " |",
        "| --- | --- | --- | --- |" + " --- |" * len(NETWORKS_GBPS),
    ]
    for name, layout in layouts().items():
        for (num_nodes, num_gpus), wire in product(FLEETS, WIRES):
            execution = Execution(
                device_kind="cuda",
                compute_dtype="bfloat16",
                grad_bytes=2,
                num_ranks=num_nodes * num_gpus,
                num_nodes=num_nodes,
                wire=wire,
                lanes=max(8, num_nodes * num_gpus),
            )
            num_bytes = network_bytes(layout, execution)
            seconds = [f"{num_bytes / (gbps * 1e9 / 8):.2f} s" for gbps in NETWORKS_GBPS]
            cells = [name, f"{num_nodes} x {num_gpus}", wire, f"{num_bytes / 1e9:.1f}", *seconds]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print("\n".join(table()))


if __name__ == "__main__":
    main()
