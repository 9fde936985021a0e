"""Stage: how fast the device computes what a layer is made of: its matrix products, attention, and passes over memory.

Shapes: R = rows (tokens), K = inputs of a product, N = its outputs, T = tokens, H = heads.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.gpu.report import Report
from bench.gpu.shapes import QWEN25, SIZES, Sizes
from bench.gpu.steps import with_base
from bench.gpu.task import Clock, Task
from bench.gpu.timing import UNAVAILABLE, Timing, rate, timed, try_timed
from horizon_server.engine.attention import function
from horizon_server.engine.attention.adoption import FLASH_ATTENTION_4, PACKAGE
from horizon_server.engine.attention.implementation import Heads, adopt, use_deterministic_kernels
from horizon_server.store import packing
from horizon_server.store.layout import build_layout

_BYTES_OF_COPY = {"cuda": 1 << 30, "cpu": 1 << 20}
_DOCUMENT_TOKENS = 200
_OURS, _HOPPER, _DETERMINISTIC = "ours", "ours, FA4", "ours, deterministic"
_BACKWARD_FLOPS = 2.5
"""Of attention's forward: it computes the scores again."""


@dataclass(frozen=True, kw_only=True)
class Product:
    """Matrix products of one shape in a layer; `times` is how many."""

    name: str
    inputs: int
    outputs: int
    times: int


def run(task: Task, report: Report) -> None:
    """Four tables."""
    device, sizes, clock = torch.device(task.device), SIZES[task.device], task.clock()
    _products(device, task.shape or sizes.compute_shape, sizes, clock, report)
    _attention(device, task.shape or sizes.compute_shape, sizes, clock, report)
    _passes(device, _BYTES_OF_COPY[task.device], sizes, report)
    _packed_weights(device, task.shape or sizes.compute_shape, sizes, report)


def layer_products(shape: str) -> list[Product]:
    """The seven products of a decoder layer, equal ones together."""
    sizes = QWEN25[shape]
    width, inner = sizes["hidden_size"], sizes["intermediate_size"]
    key_value = width // sizes["num_attention_heads"] * sizes["num_key_value_heads"]
    return [
        Product(name="q, o", inputs=width, outputs=width, times=2),
        Product(name="k, v", inputs=width, outputs=key_value, times=2),
        Product(name="gate, up", inputs=width, outputs=inner, times=2),
        Product(name="down", inputs=inner, outputs=width, times=1),
    ]


def _products(device: torch.device, shape: str, sizes: Sizes, clock: Clock, report: Report) -> None:
    figures = ("forward", "input gradient", "weight gradient", "weight gradient added in fp32", "fp8")
    columns = {"product": "", "inputs": "d", "outputs": "d", "rows": ",d", **dict.fromkeys(figures, ".1f")}
    report.table("Matrix products in bf16, TFLOP/s", columns)
    head = Product(name="head", inputs=QWEN25[shape]["hidden_size"], outputs=QWEN25[shape]["vocab_size"], times=0)
    for rows in sizes.gemm_rows:
        flops, seconds = 0.0, 0.0
        for product in [*layer_products(shape), head]:
            if not clock.allows(1.0):
                report.say("No time was left for more products.")
                return
            # Its logits at more rows than this would take gigabytes, and no chunk of the engine's is larger.
            if product is head and rows > sizes.gemm_rows[1]:
                continue
            timings = _time_product(product, rows, device, sizes.timing_s)
            work = 2.0 * rows * product.inputs * product.outputs
            cells = {name.replace(" ", "_"): rate(work, timing) for name, timing in timings.items()}
            report.row(product=product.name, inputs=product.inputs, outputs=product.outputs, rows=rows, **cells)
            plain = [timing.each_s for name in figures[:3] if isinstance(timing := timings[name], Timing)]
            flops += product.times * work * len(plain)
            seconds += product.times * sum(plain)
        report.row(product="all seven", rows=rows, forward=flops / seconds / 1e12, layer_tflops=flops / seconds / 1e12)
    report.say(
        "\n`all seven` is the layer's rate over forward and both gradients, each product as often as a layer has it."
    )


def _time_product(product: Product, rows: int, device: torch.device, budget_s: float) -> dict[str, Timing | str]:
    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    x_RK, w_NK, g_RN = (
        random(rows, product.inputs),
        random(product.outputs, product.inputs),
        random(rows, product.outputs),
    )
    sum_NK = torch.zeros(product.outputs, product.inputs, device=device)
    one = torch.ones((), device=device)

    def add_in_fp32() -> None:
        torch.ops.aten.addmm.dtype_out(sum_NK, g_RN.t(), x_RK, torch.float32, out=sum_NK)

    def fp8() -> Callable[[], object]:
        left, right = x_RK.to(torch.float8_e4m3fn), w_NK.to(torch.float8_e4m3fn).t()
        scales = {"scale_a": one, "scale_b": one}
        return partial(torch._scaled_mm, left, right, **scales, out_dtype=torch.bfloat16, use_fast_accum=True)

    def time_of(work: Callable[[], object]) -> Timing | str:
        return try_timed(work, device, budget_s=budget_s)

    return {
        "forward": time_of(lambda: functional.linear(x_RK, w_NK)),
        "input gradient": time_of(lambda: g_RN.mm(w_NK)),
        "weight gradient": time_of(lambda: g_RN.t().mm(x_RK)),
        "weight gradient added in fp32": time_of(add_in_fp32),
        # The conversion too may be missing, so it is made inside.
        "fp8": _with_setup(fp8, time_of),
    }


def _with_setup(
    prepare: Callable[[], Callable[[], object]], time_of: Callable[[Callable[[], object]], Timing | str]
) -> Timing | str:
    prepared: list[Callable[[], object]] = []

    def work() -> None:
        if not prepared:
            prepared.append(prepare())
        prepared[0]()

    return time_of(work)


def _attention(device: torch.device, shape: str, sizes: Sizes, clock: Clock, report: Report) -> None:
    report.table(
        "Attention in bf16, causal; TFLOP/s count the pairs that are seen, backward 2.5 times",
        {
            "kind": "",
            "tokens": ",d",
            "forward": ".1f",
            "backward": ".1f",
            "first forward s": ".3f",
            "first backward s": ".3f",
            "same twice": "",
        },
    )
    model = QWEN25[shape]
    num_heads, num_kv = model["num_attention_heads"], model["num_key_value_heads"]
    head_size = model["hidden_size"] // num_heads
    for tokens in sizes.attention_rows:
        q, k, v = (
            torch.randn(1, n, tokens, head_size, device=device, dtype=torch.bfloat16, requires_grad=True)
            for n in (num_heads, num_kv, num_kv)
        )
        documents = [min(_DOCUMENT_TOKENS, tokens - start) for start in range(0, tokens, _DOCUMENT_TOKENS)]
        for kind, attend, lengths in _attention_kinds(q, k, v, documents):
            if not clock.allows(2.0):
                report.say("No time was left for more kinds of attention.")
                return
            # For backward too, which autograd calls.
            adopt(Heads.of(q, k, v), FLASH_ATTENTION_4 if kind.startswith(_HOPPER) else "")
            use_deterministic_kernels(kind.startswith(_DETERMINISTIC), device)
            flops = sum(2.0 * num_heads * head_size * length * (length + 1) for length in lengths)
            forward = try_timed(attend, device, budget_s=sizes.timing_s)
            backward = try_timed(_backward_of(attend, (q, k, v)), device, budget_s=sizes.timing_s)
            report.row(
                kind=kind,
                tokens=tokens,
                forward=rate(flops, forward),
                backward=rate(_BACKWARD_FLOPS * flops, backward),
                first_forward_s=forward.first_s if isinstance(forward, Timing) else "",
                first_backward_s=backward.first_s if isinstance(backward, Timing) else "",
                same_twice=_same_twice(attend, (q, k, v)) if kind.startswith(_OURS) else "",
            )
        adopt(Heads.of(q, k, v), "")
        use_deterministic_kernels(False, device)


def _attention_kinds(
    q: Tensor, k: Tensor, v: Tensor, documents: list[int]
) -> list[tuple[str, Callable[[], Tensor], list[int]]]:
    tokens, sdpa = q.shape[2], functional.scaled_dot_product_attention
    ends = torch.tensor([0, *documents], device=q.device).cumsum(0).int()

    def only(backend: SDPBackend) -> Tensor:
        with sdpa_kernel(backend):
            return sdpa(q, k, v, is_causal=True, enable_gqa=True)

    def masked() -> Tensor:
        # As transformers does for packed rows: one mask for all, keys and values repeated for every head.
        document_T = torch.repeat_interleave(torch.arange(len(documents), device=q.device), ends.diff())
        mask_TT = (document_T[:, None] == document_T[None]).tril()
        groups = q.shape[1] // k.shape[1]
        return sdpa(q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), attn_mask=mask_TT[None, None])

    def ours(lengths: list[int]) -> Callable[[], Tensor]:
        # As a layer calls it, boundaries on the host.
        boundaries = torch.tensor([0, *itertools.accumulate(lengths)])
        return lambda: function.attend(q, k, v, boundaries)

    def hopper(lengths: list[int]) -> Callable[[], Tensor]:
        attend = ours(lengths)

        def attend_where_it_is_installed() -> Tensor:
            if importlib.util.find_spec("flash_attn") is None:
                raise RuntimeError(f"the package {PACKAGE} is not installed")
            return attend()

        return attend_where_it_is_installed

    row = [tokens]
    # Two rows of as many documents whose lengths nothing else has: is something compiled for each length?
    odd = [[tokens // 8 + more, tokens // 4 - 1, tokens - tokens // 8 - tokens // 4 + 1 - more] for more in (1, 2)]
    cut = {size: [size] * (tokens // size) for size in (1024, 4096) if tokens > size}
    return [
        ("torch's choice", lambda: sdpa(q, k, v, is_causal=True, enable_gqa=True), row),
        ("flash", partial(only, SDPBackend.FLASH_ATTENTION), row),
        ("cuDNN", partial(only, SDPBackend.CUDNN_ATTENTION), row),
        (f"documents of {_DOCUMENT_TOKENS}, with a mask", masked, documents),
        ("ours", ours(row), row),
        (f"ours, documents of {_DOCUMENT_TOKENS}", ours(documents), documents),
        *((f"ours, documents of {size}", ours(lengths), lengths) for size, lengths in cut.items()),
        (_DETERMINISTIC, ours(row), row),
        (f"{_DETERMINISTIC}, documents of {_DOCUMENT_TOKENS}", ours(documents), documents),
        (_HOPPER, hopper(row), row),
        (f"{_HOPPER}, documents of {_DOCUMENT_TOKENS}", hopper(documents), documents),
        *((f"{_HOPPER}, documents of {size}", hopper(lengths), lengths) for size, lengths in cut.items()),
        *((f"{_HOPPER}, odd lengths {index}", hopper(lengths), lengths) for index, lengths in enumerate(odd, 1)),
    ]


def _same_twice(attend: Callable[[], Tensor], leaves: tuple[Tensor, ...]) -> str:
    """Whether two runs of backward give the same bits."""
    try:
        output = attend()
        one, other = (torch.autograd.grad(output, leaves, output.detach(), retain_graph=True) for _ in range(2))
    except UNAVAILABLE:
        return ""
    return "same" if all(torch.equal(a, b) for a, b in zip(one, other, strict=True)) else "differ"


def _backward_of(attend: Callable[[], Tensor], leaves: tuple[Tensor, ...]) -> Callable[[], object]:
    made: list[Tensor] = []

    def backward() -> None:
        if not made:
            made.append(attend())
        torch.autograd.grad(made[0], leaves, made[0].detach(), retain_graph=True)

    return backward


def _passes(device: torch.device, num_bytes: int, sizes: Sizes, report: Report) -> None:
    report.table("Passes over device memory", {"pass": "", "GB/s": ",.0f"})
    source = torch.zeros(num_bytes // 2, device=device, dtype=torch.bfloat16)
    target, total = torch.empty_like(source), torch.zeros(num_bytes // 2, device=device)
    for name, work, bytes_per_element in (
        ("copy bf16", lambda: target.copy_(source), 4),
        ("bf16 to fp32", lambda: total.copy_(source), 6),
        ("fp32 += bf16", lambda: total.add_(source), 10),
    ):
        seconds = timed(work, device, budget_s=sizes.timing_s).each_s
        report.row(**{"pass": name, "GB/s": source.numel() * bytes_per_element / seconds / 1e9})


def _packed_weights(device: torch.device, shape: str, sizes: Sizes, report: Report) -> None:
    """As h2d's queue does it at each visit of a layer whose base is in 4 bits."""
    report.table(
        "Weights in 4 bits that become bf16", {"weights": ",d", "ms a layer": ".2f", "GB/s read and written": ".0f"}
    )
    shapes = {
        f"model.layers.0.{index}.weight": (product.outputs, product.inputs)
        for index, product in enumerate(each for each in layer_products(shape) for _ in range(each.times))
    }
    ends = {"model.embed_tokens.weight": (32, 32), "model.norm.weight": (32,), "lm_head.weight": (32, 32)}
    unit = with_base(build_layout({**ends, **shapes}, num_layers=1, tied=False), "nf4").units[1]
    block = torch.randint(0, 256, (unit.packed_bytes,), dtype=torch.uint8, device=device)
    packed = [place for place in unit.tensors if place.packing != "none"]
    outputs = [torch.empty(place.num_elements, dtype=torch.bfloat16, device=device) for place in packed]

    def unpack() -> None:
        for place, out_N in zip(packed, outputs, strict=True):
            packing.unpack(place, block, unit.packed_parts[place.name], out_N)

    timing, num_weights = try_timed(unpack, device, budget_s=sizes.timing_s), sum(map(len, outputs))
    if isinstance(timing, str):
        report.row(weights=num_weights, ms_a_layer=timing)
        return
    moved = unit.packed_bytes + 2 * num_weights
    report.row(
        weights=num_weights, ms_a_layer=1e3 * timing.each_s, **{"GB/s_read_and_written": moved / timing.each_s / 1e9}
    )
