"""What the kernels of a compiled layer read and write on a GPU besides products and attention, and how many there are:
counted on its graphs as torch's compiler lowers and schedules them for one, without one.

Bytes are those of the tensors that each kernel reads and writes, each once; products, attention and the sums of weight
gradients are not among them. A layer of Qwen2.5-7B in bf16, by `train.matmul`:

python -m bench.lowered
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, get_args
from unittest import mock

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.runtime.hints import DeviceProperties
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _triton
from transformers import AutoConfig

from horizon_server.engine.compiled.call_pattern import CallPattern, LayerCase
from horizon_server.engine.compiled.graphs import Graph, trace_layer
from horizon_server.engine.compiled.layers import call_patterns
from horizon_server.engine.fp8 import scaled_product
from horizon_server.engine.template import Template
from horizon_server.recipe import Matmul

# As many tokens as a micro-batch has: for few of them the compiler divides a row's work, and casts it in more passes.
_LENGTHS = (6000, 10384)
_CUDA = torch.device("cuda", 0)
_H100 = {
    "major": 9,
    "multi_processor_count": 132,
    "regs_per_multiprocessor": 65536,
    "max_threads_per_multi_processor": 2048,
    "max_threads_per_block": 1024,
    "warp_size": 32,
}
_SIZES = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "num_hidden_layers": 1,
    "vocab_size": 256,
}


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """Of one graph: how many kernels there are besides products and attention, and the bytes that they read and write
    for a token, over the hidden size."""

    count: int
    hidden_sizes: float


def kernels_of(template: Template, matmul: Matmul) -> tuple[Kernels, Kernels]:
    """Those of forward, and of recompute and backward, of a template's first layer in bf16."""
    pattern = call_patterns(template, torch.bfloat16)[0]
    assert isinstance(pattern, CallPattern)
    case = LayerCase(
        template=template,
        layer=0,
        pattern=pattern,
        lengths=_LENGTHS,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        matmul=matmul,
    )
    graphs = trace_layer(case)
    forward, backward = (_lowered(graph, case) for graph in (graphs.forward, graphs.backward))
    return forward, backward


def _lowered(graph: Graph, case: LayerCase) -> Kernels:
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering
    from torch._inductor.scheduler import FusedSchedulerNode, SchedulerNode
    from torch._inductor.virtualized import V

    mode = graph.inputs[0].fake_mode  # type: ignore[attr-defined]
    module, inputs = _for_cuda(graph, mode)
    settings = {"triton.autotune_at_compile_time": False, "max_autotune": False}
    with _stand_in(), config.patch(settings), torch.no_grad():
        lowering = GraphLowering(module, example_inputs=inputs, shape_env=mode.shape_env)
        # The third writes files of what it sees.
        with V.set_graph_handler(lowering), V.set_fake_mode(mode), V.set_debug_handler(mock.MagicMock()):
            lowering.run(*inputs)
            lowering._update_scheduler()
            nodes = [node for node in lowering.scheduler.nodes if isinstance(node, (FusedSchedulerNode, SchedulerNode))]
            num_bytes = sum(node.get_read_write_buffers_sizes() for node in nodes)
    return Kernels(count=len(nodes), hidden_sizes=num_bytes / case.num_tokens / case.template.hidden_size)


def _for_cuda(graph: Graph, mode: FakeTensorMode) -> tuple[torch.fx.GraphModule, list[Tensor]]:
    """The graph as it is traced where a GPU is: torch without CUDA cannot index its tensors, so the layer's own code
    is traced for the CPU first."""
    for node in graph.module.graph.nodes:
        if node.target is torch.ops.horizon.scaled_product.default:
            node.target = _product
        if node.kwargs.get("device") == torch.device("cpu") and node.meta["val"].numel():
            node.kwargs = {**node.kwargs, "device": _CUDA}
    graph.module.recompile()
    with mode:
        # Flags and the boundaries of documents are on the CPU for every device.
        inputs = [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=_CUDA) if t.dtype.is_floating_point else t
            for t in graph.inputs
        ]
    with mode, enable_python_dispatcher():
        module = make_fx(graph.module, tracing_mode="real", decomposition_table=select_decomp_table())(*inputs)
    return module, inputs


def _product(a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, dtype: torch.dtype) -> Tensor:
    return scaled_product((a, a_scales), (b, b_scales), torch.bfloat16)


@contextmanager
def _stand_in() -> Iterator[None]:
    """What the compiler asks a driver: about an H100."""
    properties = SimpleNamespace(name="NVIDIA H100", minor=0, total_memory=80 << 30, **_H100)
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "get_device_capability": lambda *_: (9, 0),
        "get_device_properties": lambda *_: properties,
    }
    hints = DeviceProperties(type="cuda", index=0, cc=90, **_H100)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(DeviceProperties, "create", lambda *_: hints))
        stack.enter_context(mock.patch.object(torch.version, "cuda", "12.8"))
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        # torch remembers for the whole process whether there is a GPU that Triton can be used for.
        _forget_answers()
        try:
            yield
        finally:
            _forget_answers()


def _forget_answers() -> None:
    for function in vars(_triton).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()


def main() -> None:
    """Print a table."""
    print("| `train.matmul` | forward: kernels | hidden-sizes of bytes a token | backward: kernels | hidden-sizes |")
    print("| --- | --- | --- | --- | --- |")
    for matmul in get_args(Matmul):
        template = Template.from_config(AutoConfig.for_model("qwen2", **_SIZES))
        forward, backward = kernels_of(template, matmul)
        cells = (forward.count, f"{forward.hidden_sizes:.0f}", backward.count, f"{backward.hidden_sizes:.0f}")
        print(f"| {matmul} | {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    main()
