"""How fast this machine computes, copies and updates, measured with the engine itself: what `planning.roofline` predicts steps from.

Layers are timed as training runs them (template, slots, recompute, fp32 accumulation), on one-layer llamas of a few widths with random
weights; copies and the optimizer on a store of their own.

A run is bounded in time, by `budget_s` and what the last width takes beyond it, and in memory, by its widest model: the process peaked
at 2.3 GiB on the host device, and keeps 2.8 GiB of planes for the widest one on cuda.

Shapes: T = tokens of a row, C = tokens of a logits chunk, D = hidden size, V = vocabulary, H = heads.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig

from horizon_server.engine.device import TORCH_DTYPE, device_for
from horizon_server.engine.device.cuda import CudaDevice
from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.forward_backward import chunk_loss
from horizon_server.engine.micro_batch import MicroBatch
from horizon_server.engine.template import Template
from horizon_server.engine.trainer import TrainConfig, Trainer
from horizon_server.planning.bandwidth import adamw_bytes_per_parameter
from horizon_server.planning.ledger import DEFAULT_COMPUTE_DTYPE, ComputeDtype, DeviceKind
from horizon_server.planning.roofline import DeviceRates, WidthRates
from horizon_server.store.adamw import AdamWStep, update_unit
from horizon_server.store.cpus import update_threads
from horizon_server.store.host_store import HostStore
from horizon_server.store.layout import build_layout

# Of each thing, after one that is not counted. The quickest counts: what else the machine does can only slow a run down.
_NUM_RUNS = 4

_HEAD_SIZE = 64
# Of the one-layer models: small, so that their head hardly counts.
_VOCABULARY = 256

_COPY_ELEMENTS = 1 << 24

AnyDevice = HostDevice | CudaDevice
MakeDevice = Callable[[], AnyDevice]
_STEP = AdamWStep(step=1, learning_rate=1e-6, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0)


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    """What is worth timing on a device: large enough to be typical, small enough to be quick."""

    widths: tuple[int, ...]
    row_tokens: int
    product: int
    chunk_tokens: int
    vocabulary: int


_SIZES: Mapping[DeviceKind, _Sizes] = {
    "host": _Sizes(widths=(256, 512, 1024, 2048), row_tokens=512, product=1536, chunk_tokens=256, vocabulary=8192),
    "cuda": _Sizes(widths=(1024, 2048, 4096), row_tokens=4096, product=8192, chunk_tokens=4096, vocabulary=32768),
}


def measure_rates(
    kind: DeviceKind, *, num_threads: int, compute_dtype: ComputeDtype | None = None, budget_s: float = 10.0
) -> DeviceRates:
    """Measure a device. The first width is always timed, a wider one only while its time is likely to be within the budget.

    Without a `compute_dtype`, the device's default.

    Raises:
        InvalidSpec: the kind is cuda and torch finds no CUDA device.
    """
    sizes, start_s = _SIZES[kind], time.perf_counter()
    compute_dtype = compute_dtype or DEFAULT_COMPUTE_DTYPE[kind]
    make = partial(device_for, kind, compute_dtype=compute_dtype, num_threads=num_threads)
    grad_dtype = TORCH_DTYPE[compute_dtype]
    with closing(make()) as device:
        attention = _attention_flops_per_s(device, sizes)
        left, right = (_random(device, sizes.product, sizes.product) for _ in range(2))
        peak = 2 * sizes.product**3 / _best(lambda: _compute_s(device, partial(torch.matmul, left, right)))
    up, down, adamw = _copies(make, grad_dtype, update_threads(num_threads, device_kind=kind))
    widths: list[WidthRates] = []
    for width in sizes.widths:
        width_start_s = time.perf_counter()
        layer = _layer_flops_per_s(make, grad_dtype, width, sizes, attention)
        with closing(make()) as device:
            head = _head_flops_per_s(device, width, sizes)
        widths.append(WidthRates(hidden_size=width, layer_flops_per_s=layer, head_flops_per_s=head))
        now_s = time.perf_counter()
        # Twice the width is four times the work.
        if now_s - start_s + 4 * (now_s - width_start_s) > budget_s:
            break
    return DeviceRates(
        name=torch.cuda.get_device_name() if kind == "cuda" else "host",
        num_threads=num_threads,
        peak_flops_per_s=peak,
        attention_flops_per_s=attention,
        widths=tuple(widths),
        h2d_bytes_per_s=up,
        d2h_bytes_per_s=down,
        adamw_bytes_per_s=adamw,
    )


def _layer_flops_per_s(
    make: MakeDevice, grad_dtype: torch.dtype, width: int, sizes: _Sizes, attention_flops_per_s: float
) -> float:
    """Nominal operations per second of one llama layer, forward, again and backward, attention's scores taken off."""
    num_heads = width // _HEAD_SIZE
    config = AutoConfig.for_model(
        "llama",
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=1,
        num_attention_heads=num_heads,
        num_key_value_heads=max(1, num_heads // 2),
        head_dim=_HEAD_SIZE,
        vocab_size=_VOCABULARY,
        max_position_embeddings=sizes.row_tokens,
        tie_word_embeddings=True,
    )
    template = Template.from_config(config)
    ids_T = torch.randint(0, _VOCABULARY, (sizes.row_tokens,), generator=torch.Generator().manual_seed(0))
    positions_T, lengths = torch.arange(sizes.row_tokens), (sizes.row_tokens,)
    row = MicroBatch(input_ids_T=ids_T, position_ids_T=positions_T, labels_T=ids_T, document_lengths=lengths)
    settings = TrainConfig(num_steps=100, learning_rate=0.0)
    # A device unpins what it has pinned when it is closed, so it goes before the memory does.
    with closing(HostStore.allocate(template.layout, grad_dtype=grad_dtype)) as store, closing(make()) as device:
        store.plane("hi").normal_(std=0.02)
        with closing(Trainer(template, store, device, settings)) as trainer:

            def compute_s() -> float:
                seconds = trainer.train_step([row]).compute_s
                # The update would take cores from the next run.
                trainer.flush()
                return seconds

            step_s = _best(compute_s)
    matrices = sum(tensor.num_elements for _, tensor in template.layout.tensors() if len(tensor.shape) > 1)
    table = _VOCABULARY * width
    attention_s = _attention_flops(width, sizes.row_tokens) / attention_flops_per_s
    # Half at the least: where the processors slowed down in between, attention must not seem to have taken all of it.
    return sizes.row_tokens * (8 * (matrices - table) + 6 * table) / max(step_s - attention_s, step_s / 2)


def _head_flops_per_s(device: AnyDevice, width: int, sizes: _Sizes) -> float:
    hidden_CD = _random(device, sizes.chunk_tokens, width).requires_grad_()
    weight_VD = _random(device, sizes.vocabulary, width).requires_grad_()
    sum_VD = device.place(torch.zeros(sizes.vocabulary, width))
    targets_C = device.place(torch.zeros(sizes.chunk_tokens, dtype=torch.int64))

    def chunk() -> None:
        loss = chunk_loss(functional.linear(hidden_CD, weight_VD), targets_C, num_targets_of_step=sizes.chunk_tokens)
        torch.autograd.backward(loss)
        assert weight_VD.grad is not None
        sum_VD.add_(weight_VD.grad)
        hidden_CD.grad = weight_VD.grad = None

    return 6 * sizes.chunk_tokens * sizes.vocabulary * width / _best(lambda: _compute_s(device, chunk))


def _attention_flops_per_s(device: AnyDevice, sizes: _Sizes) -> float:
    width = sizes.widths[1]
    query, key, value = (
        _random(device, 1, width // _HEAD_SIZE, sizes.row_tokens, _HEAD_SIZE).requires_grad_() for _ in range(3)
    )

    def attend() -> Tensor:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    def forward_and_again() -> None:
        with torch.no_grad():
            attend()
        torch.autograd.backward(attend(), query.detach())
        query.grad = key.grad = value.grad = None

    return _attention_flops(width, sizes.row_tokens) / _best(lambda: _compute_s(device, forward_and_again))


def _attention_flops(width: int, row_tokens: int) -> float:
    """Of one layer, forward, again and backward."""
    return 16 * width * row_tokens * (row_tokens + 1) / 2


def _copies(make: MakeDevice, grad_dtype: torch.dtype, num_threads: int) -> tuple[float, float, float]:
    """Bytes per second up, down and through the optimizer, over units in memory files, as in a job."""
    num_units = 4
    shapes = {f"model.layers.{i}.w.weight": (_COPY_ELEMENTS // num_units,) for i in range(num_units)}
    layout = build_layout({"model.embed_tokens.weight": (1, 1), **shapes}, num_layers=num_units, tied=True)
    layers = [unit for unit in layout.units if unit.kind == "layer"]
    turn = itertools.cycle(layers)  # so that no run finds its memory in a cache
    with closing(HostStore.allocate(layout, grad_dtype=grad_dtype)) as store, closing(make()) as device:
        device.adopt(store)
        weights = device.allocate("weights", layers[0].num_elements, device.compute_dtype)
        gradient = device.allocate("gradients", layers[0].num_elements, torch.float32)
        # Uninitialised memory may hold subnormal numbers, which processors compute far more slowly.
        gradient.zero_()
        numbers = device.allocate_host("staging", len(layout.units), torch.float64)

        def up() -> float:
            device.upload_unit(store, next(turn).index, weights)
            device.h2d.record().wait()
            device.raise_failure()
            use = device.take_use().h2d
            return use.busy_s / use.bytes

        def down() -> float:
            unit = next(turn)
            device.download_unit(gradient, store.unit(unit.index, "grad"), numbers[unit.index])
            device.d2h.record().wait()
            device.raise_failure()
            use = device.take_use().d2h
            return use.busy_s / use.bytes

        def update() -> float:
            unit = next(turn)
            start_s = time.perf_counter()
            update_unit(store, unit.index, _STEP, num_threads=num_threads)
            num_bytes = unit.num_elements * adamw_bytes_per_parameter(grad_dtype.itemsize)
            return (time.perf_counter() - start_s) / num_bytes

        rates = 1 / _best(up), 1 / _best(down), 1 / _best(update)
        device.free_host(numbers)
    return rates


def _random(device: AnyDevice, *shape: int) -> Tensor:
    # Of a size that models have: larger ones would make probabilities subnormal, which processors compute far more slowly.
    return device.place((0.02 * torch.randn(shape)).to(device.compute_dtype))


def _compute_s(device: AnyDevice, work: Callable[[], object]) -> float:
    device.compute.submit(work)
    device.compute.record().wait()
    device.raise_failure()
    return device.take_use().compute_s


def _best(measure: Callable[[], float]) -> float:
    # The first run allocates and compiles what later ones find.
    measure()
    return min(measure() for _ in range(_NUM_RUNS))
